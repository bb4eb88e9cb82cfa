// One row of x, or a few: codes become numbers in registers and are used there. Included inside a level's namespace.

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512

constexpr int64_t kFewRows = 4;
constexpr int64_t kAhead = 4096;  // bytes; the processor's own prefetching stops at each page
constexpr int64_t kRowsAhead = 8;

// Asks for the scales or zero points of a row that comes soon.
static inline void PrefetchHeld(const Held& held, int64_t from, int64_t n) {
  const int64_t bytes = held.holder == Holder::kF32 ? 4 : held.holder == Holder::kTable ? 1 : 2;
  const char* p = static_cast<const char*>(held.data) + from * bytes;
  for (int64_t i = 0; i < n * bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
}

template <class Decoder, Lanes kForm, Zero kRole, int kM>
static void DotRows(const Job& job, int64_t r0, int64_t r1) {
  constexpr int kSteps = Decoder::kSteps, kBlock = 16 * kSteps, kBytes = 16 * Decoder::kLaneBytes;
  const Weight& w = job.w;
  const int64_t blocks = (w.cols + kBlock - 1) / kBlock, tiles = w.tiles_per_row;
  const TileLanes lanes(kBlock, kSteps, w.col_tile, w.cols);
  const V table = Decoder::Table(w);
  const int64_t padded = tiles + 32;
  // The scales of a row are widened while the row before is multiplied: what is stored in parts cannot be read at once.
  float* memory = Workspace((4 + kM) * padded);
  float *scales[2] = {memory, memory + padded}, *zeros[2] = {memory + 2 * padded, memory + 3 * padded};
  float* x_of_tiles = memory + 4 * padded;
  for (int i = 0; i < 32; ++i) scales[0][tiles + i] = scales[1][tiles + i] = zeros[0][tiles + i] = zeros[1][tiles + i] = 0.0f;
  const auto load = [&](int64_t r) {
    LoadHeld(w.scale, r / w.row_tile * tiles, tiles, w.unit, scales[r & 1]);
    if (kRole != Zero::kNone) LoadHeld(w.zero, r / w.row_tile * tiles, tiles, 1.0f, zeros[r & 1]);
  };
  // What a tile's zero point is multiplied with: the sum of x over the tile.
  for (int m = 0; kRole == Zero::kOffset && m < kM; ++m) {
    for (int64_t t = 0; t < padded; ++t) x_of_tiles[m * padded + t] = 0.0f;
    int64_t tile = 0, end = w.col_tile;
    for (int64_t lane = 0; lane < 16 * blocks && lane * kSteps < w.cols; ++lane) {
      if (lane * kSteps >= end) ++tile, end += w.col_tile;
      x_of_tiles[m * padded + tile] += job.x_sums[m * job.ld_sums + lane];
    }
  }
  float y[kM][kFewOutputs];
  if (r0 < r1) load(r0);
  for (int64_t r = r0; r < r1; ++r) {
    const uint8_t* row = w.codes + r * w.row_stride;
    PrefetchHeld(w.scale, (r + kRowsAhead) / w.row_tile * tiles, tiles);
    if (kRole != Zero::kNone) PrefetchHeld(w.zero, (r + kRowsAhead) / w.row_tile * tiles, tiles);
    const float *scale = scales[r & 1], *zero = zeros[r & 1];
    if (r + 1 < r1) load(r + 1);
    V total[kM];
    for (int m = 0; m < kM; ++m) {
      total[m] = Same(0.0f);
      for (int64_t t = 0; kRole == Zero::kOffset && t < tiles; t += 16) {
        total[m] = MulAdd(Load(zero + t), Load(x_of_tiles + m * padded + t), total[m]);
      }
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const Decoder codes(row + b * kBytes, w.row_stride - b * kBytes);
      _mm_prefetch(reinterpret_cast<const char*>(row + b * kBytes + kAhead), _MM_HINT_T0);
      const V s = LanesOf<kForm>(lanes, scale, b);
      const V z = kRole == Zero::kWhole ? LanesOf<kForm>(lanes, zero, b) : Same(0.0f);
      const float* x = job.x + b * kBlock;
      V sum[kM];
#pragma GCC unroll 32
      for (int i = 0; i < kSteps; ++i) {
        V v = codes.At(i, table);
        if (kRole == Zero::kWhole) v = Sub(v, z);
        for (int m = 0; m < kM; ++m) {
          const V a = Load(x + m * job.ldx + 16 * i);
          sum[m] = i == 0 ? Mul(v, a) : MulAdd(v, a, sum[m]);
        }
      }
      for (int m = 0; m < kM; ++m) total[m] = MulAdd(sum[m], s, total[m]);
    }
    for (int m = 0; m < kM; ++m) y[m][r - r0] = SumOfLanes(total[m]);
  }
  for (int m = 0; m < kM; ++m) StoreOutputs(job, m, r0, r1 - r0, y[m]);
}

// Columns are outputs: bytes of a row are neighbouring outputs, and the codes of a byte follow each other along the contraction.
template <class Decoder, Zero kRole, int kM>
static void SumColumns(const Job& job, int64_t n0, int64_t width) {
  constexpr int kSub = Decoder::kLaneBytes, kAlong = Decoder::kSteps / kSub, kBlock = 16 * kSub;
  const Weight& w = job.w;
  const int64_t outputs = job.outputs() - n0 < width ? job.outputs() - n0 : width, blocks = (outputs + kBlock - 1) / kBlock;
  const int64_t padded = blocks * kBlock, tile = w.row_tile < w.rows ? w.row_tile : 32 * kAlong;
  const V table = Decoder::Table(w);
  float* total = Workspace(padded * (kM + 3) + 64);
  float *plain = total + padded * kM, *scale = plain + padded, *zero = scale + padded;
  for (int64_t i = 0; i < padded * kM; ++i) total[i] = 0.0f;
  int64_t loaded = -1;
  for (int64_t k0 = 0; k0 < w.rows; k0 += tile) {
    const int64_t k1 = k0 + tile < w.rows ? k0 + tile : w.rows, first = k0 / kAlong, last = (k1 + kAlong - 1) / kAlong;
    if (loaded != k0 / w.row_tile) {
      loaded = k0 / w.row_tile;
      ColumnScales<kSub>(w, w.scale, loaded, n0, outputs, blocks, w.unit, plain, scale);
      if (kRole != Zero::kNone) ColumnScales<kSub>(w, w.zero, loaded, n0, outputs, blocks, 1.0f, plain, zero);
    }
    float x_sum[kM];
    for (int m = 0; m < kM; ++m) {
      x_sum[m] = 0.0f;
      for (int64_t k = k0; kRole == Zero::kOffset && k < k1; ++k) x_sum[m] += job.x[m * job.ldx + k];
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* p = w.codes + n0 + b * kBlock;
      const int64_t left = w.cols - n0 - b * kBlock;
      V sum[kM][kSub], z[kSub];
      for (int k = 0; k < kSub; ++k) {
        z[k] = Load(zero + b * kBlock + k * 16);
        for (int m = 0; m < kM; ++m) sum[m][k] = Same(0.0f);
      }
      const int64_t ahead = (last - first) * w.row_stride;
      for (int64_t r = first; r < last; ++r) {
        const Decoder codes(p + r * w.row_stride, left);
        _mm_prefetch(reinterpret_cast<const char*>(p + r * w.row_stride + ahead), _MM_HINT_T0);
        const float* x = job.x + r * kAlong;
#pragma GCC unroll 32
        for (int i = 0; i < Decoder::kSteps; ++i) {
          V v = codes.At(i, table);
          if (kRole == Zero::kWhole) v = Sub(v, z[i / kAlong]);
          for (int m = 0; m < kM; ++m) {
            sum[m][i / kAlong] = MulAdd(v, Same(x[m * job.ldx + i % kAlong]), sum[m][i / kAlong]);
          }
        }
      }
      for (int m = 0; m < kM; ++m) {
        for (int k = 0; k < kSub; ++k) {
          float* t = total + m * padded + b * kBlock + k * 16;
          V sum_here = MulAdd(sum[m][k], Load(scale + b * kBlock + k * 16), Load(t));
          if (kRole == Zero::kOffset) sum_here = MulAdd(z[k], Same(x_sum[m]), sum_here);
          Store(t, sum_here);
        }
      }
    }
  }
  for (int m = 0; m < kM; ++m) {
    for (int64_t n = 0; n < padded; ++n) plain[n] = total[m * padded + n / kBlock * kBlock + n % kSub * 16 + n % kBlock / kSub];
    StoreOutputs(job, m, n0, outputs, plain);
  }
}

template <class Decoder, Zero kRole, int kM>
static void Few(const Job& job, bool dots, int64_t begin, int64_t count) {
  if (!dots) return SumColumns<Decoder, kRole, kM>(job, begin, count);
  const int64_t end = begin + count < job.w.rows ? begin + count : job.w.rows;
  const Lanes form = TileLanes(16 * Decoder::kSteps, Decoder::kSteps, job.w.col_tile, job.w.cols).form;
  if (form == Lanes::kOne) DotRows<Decoder, Lanes::kOne, kRole, kM>(job, begin, end);
  else if (form == Lanes::kPattern) DotRows<Decoder, Lanes::kPattern, kRole, kM>(job, begin, end);
  else DotRows<Decoder, Lanes::kAny, kRole, kM>(job, begin, end);
}

#endif
