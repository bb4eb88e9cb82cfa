// One row of x and rows of the weight along the contraction, where sixteen lanes are several registers. Included inside a
// level's namespace.

#if FEWBIT_DECODES && FEWBIT_LEVEL != FEWBIT_LEVEL_AVX512

constexpr int64_t kAhead = 4096;  // bytes; the processor's own prefetching stops at each page
constexpr int64_t kRowsAhead = 8;

// Asks for the scales or zero points of a row that comes soon.
static inline void PrefetchHeld(const Held& held, int64_t from, int64_t n) {
  const int64_t bytes = held.holder == Holder::kF32 ? 4 : held.holder == Holder::kTable ? 1 : 2;
  const char* p = static_cast<const char*>(held.data) + from * bytes;
  for (int64_t i = 0; i < n * bytes; i += 64) __builtin_prefetch(p + i);
}

// Two rows of the weight meet each vector of x together.
template <class Decoder, Lanes kForm, Zero kRole, int kM>
static void DotRows(const Job& job, int64_t r0, int64_t r1) {
  constexpr int kSteps = Decoder::kSteps, kBlock = 16 * kSteps, kBytes = Decoder::kBytes, kR = 2;
  const Weight& w = job.w;
  const int64_t blocks = (w.cols + kBlock - 1) / kBlock, tiles = w.tiles_per_row, apart = tiles + 32;
  const TileLanes lanes(kBlock, kSteps, w.col_tile, w.cols);
  const auto table = Decoder::TableOf(w);
  float* scale = Workspace((2 * kR + kM) * apart);
  float *zero = scale + kR * apart, *x_of_tiles = zero + kR * apart;
  for (int64_t i = 0; i < (2 * kR + kM) * apart; ++i) scale[i] = 0.0f;
  // What a tile's offset is multiplied with: the sum of x over the tile.
  for (int m = 0; kRole == Zero::kOffset && m < kM; ++m) {
    int64_t tile = 0, end = w.col_tile;  // by counting: a division for each lane took a tenth of a short product
    for (int64_t lane = 0; lane < 16 * blocks && lane * kSteps < w.cols; ++lane) {
      if (lane * kSteps >= end) ++tile, end += w.col_tile;
      x_of_tiles[m * apart + tile] += job.x_sums[m * job.ld_sums + lane];
    }
  }
  float y[kM][kFewOutputs];
  for (int64_t r = r0; r < r1; r += kR) {
    const uint8_t* row[kR];
    V16 total[kR][kM];
    for (int j = 0; j < kR; ++j) {
      const int64_t here = r + j < r1 ? r + j : r1 - 1;
      row[j] = w.codes + here * w.row_stride;
      PrefetchHeld(w.scale, (r + j + kRowsAhead) / w.row_tile * tiles, tiles);
      LoadHeld(w.scale, here / w.row_tile * tiles, tiles, w.unit, scale + j * apart);
      for (int m = 0; m < kM; ++m) total[j][m] = Same16(0.0f);
      if (kRole == Zero::kNone) continue;
      PrefetchHeld(w.zero, (r + j + kRowsAhead) / w.row_tile * tiles, tiles);
      LoadHeld(w.zero, here / w.row_tile * tiles, tiles, 1.0f, zero + j * apart);
      for (int m = 0; m < kM; ++m) {
        for (int64_t t = 0; kRole == Zero::kOffset && t < tiles; t += 16) {
          total[j][m] = MulAdd(Load16(zero + j * apart + t), Load16(x_of_tiles + m * apart + t), total[j][m]);
        }
      }
    }
    const int64_t next = kR * w.row_stride > kAhead ? kR * w.row_stride : kAhead;
    for (int64_t b = 0; b < blocks; ++b) {
      const float* x = job.x + b * kBlock;
      V16 sum[kR][kM], z[kR];
      Decoder codes[kR];
#pragma GCC unroll 4
      for (int j = 0; j < kR; ++j) {
        codes[j] = Decoder(row[j] + b * kBytes, w.row_stride - b * kBytes, table);
        __builtin_prefetch(row[j] + b * kBytes + next);
        z[j] = kRole == Zero::kWhole ? LanesOf<kForm>(lanes, zero + j * apart, b) : Same16(0.0f);
      }
#pragma GCC unroll 32
      for (int i = 0; i < kSteps; ++i) {
        V16 a[kM];
#pragma GCC unroll 4
        for (int m = 0; m < kM; ++m) a[m] = Load16(x + m * job.ldx + 16 * i);
#pragma GCC unroll 4
        for (int j = 0; j < kR; ++j) {
          V16 v = codes[j].At(i, table);
          if (kRole == Zero::kWhole) v = Sub(v, z[j]);
#pragma GCC unroll 4
          for (int m = 0; m < kM; ++m) sum[j][m] = i == 0 ? Mul(v, a[m]) : MulAdd(v, a[m], sum[j][m]);
        }
      }
#pragma GCC unroll 4
      for (int j = 0; j < kR; ++j) {
        const V16 s = LanesOf<kForm>(lanes, scale + j * apart, b);
        for (int m = 0; m < kM; ++m) total[j][m] = MulAdd(sum[j][m], s, total[j][m]);
      }
    }
    for (int j = 0; j < kR && r + j < r1; ++j) {
      for (int m = 0; m < kM; ++m) y[m][r + j - r0] = SumOfLanes(total[j][m]);
    }
  }
  for (int m = 0; m < kM; ++m) StoreOutputs(job, m, r0, r1 - r0, y[m]);
}

#endif
