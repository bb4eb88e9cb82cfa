// One row of x, or a few: codes become numbers in registers and are used there. Included inside a level's namespace.

#if FEWBIT_DECODES

constexpr int64_t kFewRows = 4;
constexpr int64_t kAhead = 4096;  // bytes; the processor's own prefetching stops at each page
constexpr int64_t kRowsAhead = 8;
constexpr int64_t kColumnRows = 8;  // rows of bytes that columns take at a time

// Asks for the scales or zero points of a row that comes soon.
static inline void PrefetchHeld(const Held& held, int64_t from, int64_t n) {
  const int64_t bytes = held.holder == Holder::kF32 ? 4 : held.holder == Holder::kTable ? 1 : 2;
  const char* p = static_cast<const char*>(held.data) + from * bytes;
  for (int64_t i = 0; i < n * bytes; i += 64) __builtin_prefetch(p + i);
}

// Rows of the weight are taken RowsAtOnce(kM) at a time, which meet each vector of x together: it is loaded once, and the memory
// of several rows is asked for at once.
constexpr int RowsAtOnce(int m) { return kLanes < 16 ? 2 : m == 1 ? 4 : m == 2 ? 2 : 1; }

template <class Decoder, Lanes kForm, Zero kRole, int kM>
static void DotRows(const Job& job, int64_t r0, int64_t r1) {
  constexpr int kSteps = Decoder::kSteps, kBlock = 16 * kSteps, kBytes = Decoder::kBytes, kR = RowsAtOnce(kM);
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

// Columns are outputs: bytes of a row are neighbouring outputs, and the codes of a byte follow each other along the contraction.
//
// A few rows at a time, while the next ones are asked for: where rows are a page apart, all of them compete for one set of the
// first cache, which keeps some twelve lines.
template <class Decoder, Zero kRole, int kM>
static void SumColumns(const Job& job, int64_t n0, int64_t width) {
  constexpr int kSub = Decoder::kLaneBytes, kAlong = Decoder::kSteps / kSub, kBlock = 16 * kSub;
  constexpr int kByteRows = Decoder::kByteRows;
  const Weight& w = job.w;
  const int64_t outputs = job.outputs() - n0 < width ? job.outputs() - n0 : width, blocks = (outputs + kBlock - 1) / kBlock;
  const int64_t padded = blocks * kBlock, together = (kByteRows > kColumnRows ? 1 : kColumnRows / kByteRows) * kAlong;
  const auto table = Decoder::TableOf(w);
  float* total = Workspace(padded * (kM + 3) + 64);
  float *plain = total + padded * kM, *scale = plain + padded, *zero = scale + padded;
  for (int64_t i = 0; i < padded * kM; ++i) total[i] = 0.0f;
  int64_t loaded = -1;
  for (int64_t k0 = 0, k1 = 0; k0 < w.rows; k0 = k1) {
    const int64_t tile_end = (k0 / w.row_tile + 1) * w.row_tile, end = tile_end < w.rows ? tile_end : w.rows;
    k1 = k0 + together < end ? k0 + together : end;
    const int64_t first = k0 / kAlong, last = (k1 + kAlong - 1) / kAlong;
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
      V16 sum[kM][kSub], z[kSub];
      for (int k = 0; k < kSub; ++k) {
        z[k] = Load16(zero + b * kBlock + k * 16);
        for (int m = 0; m < kM; ++m) sum[m][k] = Same16(0.0f);
      }
      const int64_t ahead = (last - first) * kByteRows * w.row_stride;
      for (int64_t r = first; r < last; ++r) {
        const uint8_t* bytes = p + r * kByteRows * w.row_stride;
        const Decoder codes(bytes, w.row_stride, ByteRows(w) - r * kByteRows, left);
        for (int j = 0; j < kByteRows; ++j) {
          __builtin_prefetch(bytes + j * w.row_stride + ahead);
        }
        const float* x = job.x + r * kAlong;
#pragma GCC unroll 8
        for (int along = 0; along < kAlong; ++along) {
#pragma GCC unroll 4
          for (int place = 0; place < kSub; ++place) {
            V16 v = codes.At(place * kAlong + along, table);
            if (kRole == Zero::kWhole) v = Sub(v, z[place]);
#pragma GCC unroll 4
            for (int m = 0; m < kM; ++m) sum[m][place] = MulAdd(v, Same16(x[m * job.ldx + along]), sum[m][place]);
          }
        }
      }
      for (int m = 0; m < kM; ++m) {
        for (int k = 0; k < kSub; ++k) {
          float* t = total + m * padded + b * kBlock + k * 16;
          V16 sum_here = MulAdd(sum[m][k], Load16(scale + b * kBlock + k * 16), Load16(t));
          if (kRole == Zero::kOffset) sum_here = MulAdd(z[k], Same16(x_sum[m]), sum_here);
          Store16(t, sum_here);
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
static void FewDots(const Job& job, int64_t begin, int64_t count) {
  const int64_t end = begin + count < job.w.rows ? begin + count : job.w.rows;
  const Lanes form = TileLanes(16 * Decoder::kSteps, Decoder::kSteps, job.w.col_tile, job.w.cols).form;
  // One scale a block is a pattern, too; only with one row of x and AVX-512 is the
  // permutation worth a kernel without it.
  constexpr Lanes kOne = kM == 1 && kLanes == 16 ? Lanes::kOne : Lanes::kPattern;
  if (form == Lanes::kOne) DotRows<Decoder, kOne, kRole, kM>(job, begin, end);
  else if (form == Lanes::kPattern) DotRows<Decoder, Lanes::kPattern, kRole, kM>(job, begin, end);
  else DotRows<Decoder, Lanes::kAny, kRole, kM>(job, begin, end);
}

#endif
