// The float32 micro-kernel: rows of x times vectors of outputs. Included in the namespace of an instruction set.

constexpr int kRows = 6;                       // rows of x in a block of registers
constexpr int kAcross = kLanes == 16 ? 4 : 2;  // vectors of outputs in a block of registers

// c[m][n] += sum over k of x[m][k] * w[k][n], for kRowsHere rows of x and kAcross vectors of w.
template <int kRowsHere>
static void OuterBlock(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t k, float* c, int64_t ldc) {
  V sum[kRowsHere][kAcross];
  UNROLL for (int m = 0; m < kRowsHere; ++m) {
    UNROLL for (int n = 0; n < kAcross; ++n) sum[m][n] = Load(c + m * ldc + n * kLanes);
  }
  for (int64_t i = 0; i < k; ++i) {
    V b[kAcross];
    UNROLL for (int n = 0; n < kAcross; ++n) b[n] = Load(w + i * ldw + n * kLanes);
    UNROLL for (int m = 0; m < kRowsHere; ++m) {
      const V a = Same(x[m * ldx + i]);
      UNROLL for (int n = 0; n < kAcross; ++n) sum[m][n] = MulAdd(a, b[n], sum[m][n]);
    }
  }
  UNROLL for (int m = 0; m < kRowsHere; ++m) {
    UNROLL for (int n = 0; n < kAcross; ++n) Store(c + m * ldc + n * kLanes, sum[m][n]);
  }
}

typedef void (*Block)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t);

static Block BlockOf(int64_t rows) {
  static const Block outer[] = {OuterBlock<1>, OuterBlock<2>, OuterBlock<3>, OuterBlock<4>, OuterBlock<5>, OuterBlock<6>};
  return outer[(rows < kRows ? rows : kRows) - 1];
}
