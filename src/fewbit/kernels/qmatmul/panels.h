// The product by panels: weights decoded into float32 that stays in cache, and multiplied by blocks of registers. For any
// scheme and any number of rows of x. Included inside a level's namespace.

constexpr int kRows = 6;                      // rows of x in a block of registers
constexpr int kAcross = kLanes == 16 ? 4 : 2; // vectors of outputs, or outputs, in a block of registers

// c[n] += the sum of the lanes of each of kAcross vectors.
static inline void AddSums(const V* sum, float* c) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  // Four sums at once: pairs of lanes of two vectors side by side, then of all four, then the quarters of the one that is left.
  const V ab = Add(_mm512_unpacklo_ps(sum[0], sum[1]), _mm512_unpackhi_ps(sum[0], sum[1]));
  const V cd = Add(_mm512_unpacklo_ps(sum[2], sum[3]), _mm512_unpackhi_ps(sum[2], sum[3]));
  const V all = Add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  _mm_storeu_ps(c, _mm_add_ps(_mm_loadu_ps(c), quarter));
#else
  for (int n = 0; n < kAcross; ++n) c[n] += SumOfLanes(sum[n]);
#endif
}

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
  for (int m = 0; m < kRowsHere; ++m) AddSums(sum[m], c + m * ldc);
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
constexpr int64_t kDotOutputs = 16, kDotLength = 1024, kOuterOutputs = 256, kOuterLength = 128, kSlack = 64;

static int64_t PanelOutputs(const Job& job) { return job.contracts_cols ? kDotOutputs : kOuterOutputs; }

// How a panel of the weight is decoded: outputs from n0 on, contracted places from k0 on; `rest` is memory for scales.
typedef void (*Fill)(const Weight&, int64_t n0, int64_t outputs, int64_t k0, int64_t count, float* rest, float* panel, int64_t ldw);

// Rows [m0, m1) of y for the outputs of one panel's width, from n0 on.
//
// Without `fill` the panel is decoded row by row. With it contracted places come in blocks, as x does, or outputs come `apart`.
static void PanelProduct(const Job& job, Fill fill, int64_t block, int64_t apart, int64_t n0, int64_t m0, int64_t m1) {
  const bool dots = job.contracts_cols;
  const int64_t width = PanelOutputs(job), length = dots ? kDotLength : kOuterLength, rows = m1 - m0;
  const int64_t across = dots ? kAcross : kAcross * kLanes;
  const int64_t outputs = job.outputs() - n0 < width ? job.outputs() - n0 : width;
  const int64_t ldw = (dots ? length : width) + kSlack / 4, longest = (dots ? length : width) + kSlack;
  const int64_t panel_size = ldw * (dots ? width : length) + kSlack, tiles = dots ? 2 * (job.w.tiles_per_row + 32) : 0;
  float* floats = Workspace(panel_size + rows * width + 4 * longest + tiles);
  float *panel = floats, *c = panel + panel_size, *rest = c + rows * width;
  RowScratch scratch{reinterpret_cast<uint8_t*>(rest), rest + longest, rest + 2 * longest, rest + 3 * longest, -1};
  for (int64_t i = 0; i < rows * width; ++i) c[i] = 0.0f;
  for (int64_t k0 = 0; k0 < job.contracted(); k0 += length) {
    const int64_t count = job.contracted() - k0 < length ? job.contracted() - k0 : length;
    scratch.loaded_row = -1;
    if (fill != nullptr) {
      fill(job.w, n0, outputs, k0, count, rest, panel, ldw);
    } else if (dots) {
      for (int64_t n = 0; n < outputs; ++n) DecodeRow(job.w, n0 + n, k0, count, scratch, panel + n * ldw);
    } else {
      for (int64_t k = 0; k < count; ++k) DecodeRow(job.w, k0 + k, n0, outputs, scratch, panel + k * ldw);
    }
    const int64_t k_steps = dots ? (count + block - 1) / block * block : count;
    for (int64_t m = 0; m < rows; m += kRows) {
      const Block product = BlockOf(dots, rows - m);
      for (int64_t n = 0; n < outputs; n += across) {
        const float* w = panel + (dots ? n * ldw : n);
        product(job.x + (m0 + m) * job.ldx + k0, job.ldx, w, ldw, k_steps, c + m * width + n, width);
      }
    }
  }
  for (int64_t m = 0; m < rows; ++m) {
    const float* y = c + m * width;
    for (int64_t n = 0; apart > 1 && n < width; ++n) {
      rest[n] = y[n / (16 * apart) * 16 * apart + n % apart * 16 + n % (16 * apart) / apart];
    }
    StoreOutputs(job, m0 + m, n0, outputs, apart > 1 ? rest : y);
  }
}
