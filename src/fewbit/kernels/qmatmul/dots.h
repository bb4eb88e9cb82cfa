// One row of x, or a few, and rows of the weight along the contraction, with AVX-512. Included inside a level's namespace.

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512

constexpr int64_t kAhead = 4096;  // bytes; the processor's own prefetching stops at each page

// Rows of the weight are taken RowsAtOnce(kM) at a time, which meet each vector of x together: it is loaded once, and the memory
// of several rows is asked for at once.
constexpr int RowsAtOnce(int m) { return 4 / m; }

// Scales or zero points of many short rows are widened together, where they lie one after the other.
constexpr int64_t kHeldAtOnce = 256;

static inline __mmask16 FirstLanes(int64_t n) { return static_cast<__mmask16>(n < 16 ? (1u << n) - 1 : 0xFFFF); }

// Elements [from, from + n) of scales or zero points; those that come after them are asked for.
static inline void LoadRun(const Held& held, int64_t from, int64_t n, float unit, float* out) {
  const int64_t bytes = held.holder == Holder::kF32 ? 4 : held.holder == Holder::kTable ? 1 : 2;
  const char* p = static_cast<const char*>(held.data) + (from + n) * bytes;
  for (int64_t i = 0; i < n * bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
  LoadHeld(held, from, n, unit, out);
}

// Where a row's blocks find the scales of their lanes, one block after the other.
struct RowLanes : TileLanes {
  int64_t per_block, blocks;  // whole tiles of a block, or 0; blocks of a tile, or more than there are
  __mmask16 there;            // the lanes of the last block that hold codes
  __m512i in_halves;          // the tile of each lane of a half
  RowLanes(int64_t block, int64_t steps, int64_t tile, int64_t cols) : TileLanes(block, steps, tile, cols) {
    per_block = form == Lanes::kPattern ? block / tile : 0, blocks = form == Lanes::kOne ? (tile + block - 1) / block : cols;
    there = static_cast<__mmask16>((1u << ((cols - 1) % block / steps + 1)) - 1);
    in_halves = _mm512_inserti64x4(pattern, _mm512_castsi512_si256(pattern), 1);
  }
};

// The scale or zero point of each lane of block b, whose first tile is tile `at`; 0 in lanes that are not there.
template <Lanes kForm>
static inline V LanesAt(const RowLanes& t, const float* of_tiles, int64_t at, int64_t b, __mmask16 there) {
  if (kForm == Lanes::kOne) return Same(of_tiles[at]);
  if (kForm == Lanes::kPattern) return _mm512_maskz_permutexvar_ps(there, t.pattern, Load(of_tiles + at));
  return LanesOf<kForm>(t, of_tiles, b);
}

// Sums of the lanes of four rows. Each of `pairs` holds what is still to be added to two of them, a half for each.
static inline __m128 SumsOfLanes(const V (&row)[4], const V (&pairs)[2]) {
  V of_two[2];
  for (int i = 0; i < 2; ++i) {
    const V low = _mm512_shuffle_f32x4(row[2 * i], row[2 * i + 1], 0x44), high = _mm512_shuffle_f32x4(row[2 * i], row[2 * i + 1], 0xEE);
    of_two[i] = Add(Add(low, high), pairs[i]);
  }
  V four = Add(_mm512_shuffle_f32x4(of_two[0], of_two[1], 0x88), _mm512_shuffle_f32x4(of_two[0], of_two[1], 0xDD));
  four = Add(four, _mm512_permute_ps(four, 0x4E));
  four = Add(four, _mm512_permute_ps(four, 0xB1));
  return _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, four));
}

// Adds a block of kR rows of the weight, for kM rows of x, to their totals.
template <Zero kRole, class Decoder, int kR, int kM, class XAt, class ScaleOf, class ZeroOf>
static inline __attribute__((always_inline)) void AddBlock(const Decoder (&codes)[kR], const typename Decoder::Table& table, const XAt& x_at,
                                                          const ScaleOf& scale_of, const ZeroOf& zero_of, V (&total)[kR][kM]) {
  V sum[kR][kM], z[kR];
#pragma GCC unroll 4
  for (int j = 0; j < kR; ++j) z[j] = kRole == Zero::kWhole ? zero_of(j) : Same(0.0f);
#pragma GCC unroll 32
  for (int i = 0; i < Decoder::kSteps; ++i) {
    V a[kM];
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) a[m] = x_at(m, i);
#pragma GCC unroll 4
    for (int j = 0; j < kR; ++j) {
      V v = codes[j].At(i, table);
      if (kRole == Zero::kWhole) v = Sub(v, z[j]);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) sum[j][m] = i == 0 ? Mul(v, a[m]) : MulAdd(v, a[m], sum[j][m]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kR; ++j) {
    const V s = scale_of(j);
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) total[j][m] = MulAdd(sum[j][m], s, total[j][m]);
  }
}

// The last blocks of two rows each, which fill at most half of their lanes: both rows of a pair in one block.
template <class Decoder, Zero kRole>
static inline void AddHalves(const uint8_t* const* row, int64_t bytes, const typename Decoder::Table& table, const float* x,
                             const RowLanes& lanes, const float* const* scales, const float* const* zeros, int64_t at,
                             V (&of_pair)[2]) {
  const __mmask32 there = static_cast<__mmask32>((1ull << bytes) - 1);
  const auto lanes_of = [&](const float* const* held, int pair) {
    const V low = _mm512_maskz_permutexvar_ps(lanes.there, lanes.pattern, Load(held[2 * pair] + at));
    return _mm512_mask_permutexvar_ps(low, static_cast<__mmask16>(lanes.there << 8), lanes.in_halves, Load(held[2 * pair + 1] + at));
  };
  V total[2][1] = {{Same(0.0f)}, {Same(0.0f)}};
  Decoder codes[2];
  for (int pair = 0; pair < 2; ++pair) {
    const __m256i low = _mm256_maskz_loadu_epi8(there, row[2 * pair]), high = _mm256_maskz_loadu_epi8(there, row[2 * pair + 1]);
    codes[pair] = Decoder(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), 0);
  }
  AddBlock<kRole>(
      codes, table, [&](int, int i) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(x + 16 * i)); },
      [&](int pair) { return lanes_of(scales, pair); }, [&](int pair) { return lanes_of(zeros, pair); }, total);
  for (int pair = 0; pair < 2; ++pair) of_pair[pair] = total[pair][0];
}

template <class Decoder, Lanes kForm, Zero kRole, int kM>
static void DotRows(const Job& job, int64_t r0, int64_t r1) {
  constexpr int kSteps = Decoder::kSteps, kBlock = 16 * kSteps, kBytes = Decoder::kBytes, kR = RowsAtOnce(kM);
  const Weight& w = job.w;
  const int64_t full = w.cols / kBlock, rest = w.cols % kBlock, tiles = w.tiles_per_row;
  const RowLanes lanes(kBlock, kSteps, w.col_tile, w.cols);
  const auto table = Decoder::TableOf(w);
  const int64_t run = kHeldAtOnce / kR < tiles ? kR : kHeldAtOnce / tiles / kR * kR;  // rows whose scales are loaded together
  const int64_t of_run = run * tiles + 32, of_row = (tiles + 15) / 16 * 16;
  float *scale = Workspace(2 * of_run + kM * of_row), *zero = scale + of_run, *x_of_tiles = zero + of_run;
  // What a tile's offset is multiplied with: the sum of x over the tile.
  for (int m = 0; kRole == Zero::kOffset && m < kM; ++m) {
    for (int64_t t = 0; t < of_row; ++t) x_of_tiles[m * of_row + t] = 0.0f;
    int64_t tile = 0, end = w.col_tile;  // by counting: a division for each lane took a tenth of a short product
    for (int64_t lane = 0; lane * kSteps < w.cols; ++lane) {
      if (lane * kSteps >= end) ++tile, end += w.col_tile;
      x_of_tiles[m * of_row + tile] += job.x_sums[m * job.ld_sums + lane];
    }
  }
  const int64_t ahead = kR * w.row_stride > kAhead ? kR * w.row_stride : kAhead;
  float y[kM][kFewOutputs + 4];
  int64_t loaded = 0;
  for (int64_t r = r0; r < r1; r += kR) {
    if ((r - r0) % run == 0) {
      loaded = r / w.row_tile;
      const int64_t n = ((r + run < r1 ? r + run : r1) - 1) / w.row_tile - loaded + 1;
      LoadRun(w.scale, loaded * tiles, n * tiles, w.unit, scale);
      if (kRole != Zero::kNone) LoadRun(w.zero, loaded * tiles, n * tiles, 1.0f, zero);
    }
    const uint8_t* row[kR];
    const float *scales[kR], *zeros[kR];
    V total[kR][kM];
    for (int j = 0; j < kR; ++j) {
      const int64_t here = r + j < r1 ? r + j : r1 - 1, at = (w.row_tile == 1 ? here : here / w.row_tile) - loaded;
      row[j] = w.codes + here * w.row_stride, scales[j] = scale + at * tiles, zeros[j] = zero + at * tiles;
      for (int m = 0; m < kM; ++m) total[j][m] = Same(0.0f);
      for (int64_t t = 0; kRole == Zero::kOffset && t < tiles; t += 16) {
        const V z = _mm512_maskz_loadu_ps(FirstLanes(tiles - t), zeros[j] + t);
        for (int m = 0; m < kM; ++m) total[j][m] = MulAdd(z, Load(x_of_tiles + m * of_row + t), total[j][m]);
      }
    }
    const float* x = job.x;
    int64_t at = 0, until = lanes.blocks;
    for (int64_t b = 0; b < full; ++b, x += kBlock) {
      Decoder codes[kR];
#pragma GCC unroll 4
      for (int j = 0; j < kR; ++j) {
        codes[j] = Decoder(row[j] + b * kBytes, kBytes, table);
        _mm_prefetch(reinterpret_cast<const char*>(row[j] + b * kBytes + ahead), _MM_HINT_T0);
      }
      AddBlock<kRole>(
          codes, table, [&](int m, int i) { return Load(x + m * job.ldx + 16 * i); },
          [&](int j) { return LanesAt<kForm>(lanes, scales[j], at, b, 0xFFFF); },
          [&](int j) { return LanesAt<kForm>(lanes, zeros[j], at, b, 0xFFFF); }, total);
      at += lanes.per_block;
      if (--until == 0) ++at, until = lanes.blocks;
    }
    V of_pair[2] = {Same(0.0f), Same(0.0f)};
    bool in_halves = false;
    if constexpr (kR == 4 && kForm == Lanes::kPattern && kBytes == 64) {
      in_halves = rest != 0 && rest <= kBlock / 2;
      if (in_halves) {
        const uint8_t* const ends[] = {row[0] + full * kBytes, row[1] + full * kBytes, row[2] + full * kBytes, row[3] + full * kBytes};
        AddHalves<Decoder, kRole>(ends, w.row_stride - full * kBytes, table, x, lanes, scales, zeros, at, of_pair);
      }
    }
    if (rest != 0 && !in_halves) {
      Decoder codes[kR];
#pragma GCC unroll 4
      for (int j = 0; j < kR; ++j) codes[j] = Decoder(row[j] + full * kBytes, w.row_stride - full * kBytes, table);
      AddBlock<kRole>(
          codes, table, [&](int m, int i) { return Load(x + m * job.ldx + 16 * i); },
          [&](int j) { return LanesAt<kForm>(lanes, scales[j], at, full, lanes.there); },
          [&](int j) { return LanesAt<kForm>(lanes, zeros[j], at, full, lanes.there); }, total);
    }
    if constexpr (kR == 4) {
      _mm_storeu_ps(y[0] + r - r0, SumsOfLanes({total[0][0], total[1][0], total[2][0], total[3][0]}, of_pair));
      continue;
    }
    for (int j = 0; j < kR && r + j < r1; ++j) {
      for (int m = 0; m < kM; ++m) y[m][r + j - r0] = SumOfLanes(total[j][m]);
    }
  }
  for (int m = 0; m < kM; ++m) StoreOutputs(job, m, r0, r1 - r0, y[m]);
}

#endif
