// The product by panels: weights decoded into float32 that stays in cache, and multiplied by blocks of registers. For any
// scheme and any number of rows of x. Included inside a level's namespace.

constexpr int kRows = 6;                      // rows of x in a block of registers
constexpr int kAcross = kLanes == 16 ? 4 : 2; // vectors of outputs, or outputs, in a block of registers

// c[m][n] += sum over k of x[m][k] * w[n][k], for kRowsHere rows of x and kAcross of w; k a multiple of the lanes.
template <int kRowsHere>
static void DotBlock(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t k, float* c, int64_t ldc) {
  V sum[kRowsHere][kAcross];
  for (int m = 0; m < kRowsHere; ++m) {
    for (int n = 0; n < kAcross; ++n) sum[m][n] = Same(0.0f);
  }
  for (int64_t i = 0; i < k; i += kLanes) {
    V b[kAcross];
    for (int n = 0; n < kAcross; ++n) b[n] = Load(w + n * ldw + i);
    for (int m = 0; m < kRowsHere; ++m) {
      const V a = Load(x + m * ldx + i);
      for (int n = 0; n < kAcross; ++n) sum[m][n] = MulAdd(a, b[n], sum[m][n]);
    }
  }
  for (int m = 0; m < kRowsHere; ++m) {
    for (int n = 0; n < kAcross; ++n) c[m * ldc + n] += SumOfLanes(sum[m][n]);
  }
}

// c[m][n] += sum over k of x[m][k] * w[k][n], for kRowsHere rows of x and kAcross vectors of w.
template <int kRowsHere>
static void OuterBlock(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t k, float* c, int64_t ldc) {
  V sum[kRowsHere][kAcross];
  for (int m = 0; m < kRowsHere; ++m) {
    for (int n = 0; n < kAcross; ++n) sum[m][n] = Load(c + m * ldc + n * kLanes);
  }
  for (int64_t i = 0; i < k; ++i) {
    V b[kAcross];
    for (int n = 0; n < kAcross; ++n) b[n] = Load(w + i * ldw + n * kLanes);
    for (int m = 0; m < kRowsHere; ++m) {
      const V a = Same(x[m * ldx + i]);
      for (int n = 0; n < kAcross; ++n) sum[m][n] = MulAdd(a, b[n], sum[m][n]);
    }
  }
  for (int m = 0; m < kRowsHere; ++m) {
    for (int n = 0; n < kAcross; ++n) Store(c + m * ldc + n * kLanes, sum[m][n]);
  }
}

typedef void (*Block)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t);

static Block BlockOf(bool dots, int64_t rows) {
  static const Block dot[] = {DotBlock<1>, DotBlock<2>, DotBlock<3>, DotBlock<4>, DotBlock<5>, DotBlock<6>};
  static const Block outer[] = {OuterBlock<1>, OuterBlock<2>, OuterBlock<3>, OuterBlock<4>, OuterBlock<5>, OuterBlock<6>};
  return (dots ? dot : outer)[(rows < kRows ? rows : kRows) - 1];
}

// A panel: kPanelOutputs outputs by kPanelLength contracted places, small enough for the second-level cache; what one block
// of registers meets of it and of x fits the first.
constexpr int64_t kDotOutputs = 32, kDotLength = 1024, kOuterOutputs = 256, kOuterLength = 128, kSlack = 64;

static int64_t PanelOutputs(const Job& job) { return job.contracts_cols ? kDotOutputs : kOuterOutputs; }

// Rows [m0, m1) of y for the outputs of one panel's width, from n0 on.
static void PanelProduct(const Job& job, int64_t n0, int64_t m0, int64_t m1) {
  const bool dots = job.contracts_cols;
  const int64_t width = PanelOutputs(job), length = dots ? kDotLength : kOuterLength, rows = m1 - m0;
  const int64_t across = dots ? kAcross : kAcross * kLanes;
  const int64_t outputs = job.outputs() - n0 < width ? job.outputs() - n0 : width;
  const int64_t ldw = (dots ? length : width) + kSlack / 4, longest = (dots ? length : width) + kSlack;
  const int64_t panel_size = ldw * (dots ? width : length) + kSlack;
  float* floats = Workspace(panel_size + rows * width + 4 * longest);
  float *panel = floats, *c = panel + panel_size, *rest = c + rows * width;
  RowScratch scratch{reinterpret_cast<uint8_t*>(rest), rest + longest, rest + 2 * longest, rest + 3 * longest, -1};
  for (int64_t i = 0; i < rows * width; ++i) c[i] = 0.0f;
  for (int64_t k0 = 0; k0 < job.contracted(); k0 += length) {
    const int64_t count = job.contracted() - k0 < length ? job.contracted() - k0 : length;
    scratch.loaded_row = -1;
    if (dots) {
      for (int64_t n = 0; n < outputs; ++n) DecodeRow(job.w, n0 + n, k0, count, scratch, panel + n * ldw);
    } else {
      for (int64_t k = 0; k < count; ++k) DecodeRow(job.w, k0 + k, n0, outputs, scratch, panel + k * ldw);
    }
    const int64_t k_steps = dots ? (count + kLanes - 1) / kLanes * kLanes : count;
    for (int64_t m = 0; m < rows; m += kRows) {
      const Block block = BlockOf(dots, rows - m);
      for (int64_t n = 0; n < outputs; n += across) {
        const float* w = panel + (dots ? n * ldw : n);
        block(job.x + (m0 + m) * job.ldx + k0, job.ldx, w, ldw, k_steps, c + m * width + n, width);
      }
    }
  }
  for (int64_t m = 0; m < rows; ++m) StoreOutputs(job, m0 + m, n0, outputs, c + m * width);
}
