// One row of x, or a few, and rows of the weight along the contraction. Included in the namespace of an instruction set.

#if FEWBIT_HAS_LOOKUP

// Bytes of each row are prefetched to L2, since the processor's own prefetching stops at each page; and where few
// codes fill a line, into the first one later.
constexpr int64_t kLater = 4096, kSoon = 1024;

// Rows of the weight are taken RowsAtOnce(kM) at a time, which share each vector of x: it is loaded once, and the memory
// of several rows is asked for at once. Where sixteen lanes are several registers, two rows have room for their sums.
constexpr int RowsAtOnce(int m) { return kLanes == 16 ? 4 / m : 2; }

// Scales or zero points of many short rows are widened together, where they are contiguous.
constexpr int64_t kScalesAtOnce = 256;

// Elements [from, from + n) of scales or zero points; those that come after them are asked for.
static inline void LoadRun(const StoredScales& stored, int64_t from, int64_t n, float unit, float* out) {
  const int64_t bytes = stored.type == ScaleType::kF32 ? 4 : stored.type == ScaleType::kTable ? 1 : 2;
  const char* p = static_cast<const char*>(stored.data) + (from + n) * bytes;
  for (int64_t i = 0; i < n * bytes; i += 64) __builtin_prefetch(p + i);
  LoadScales(stored, from, n, unit, out);
}

// Where the lanes of a row's blocks find the scales of their tiles. A block's first tile is counted on from block to block, and
// a pattern says how many tiles further each lane is: the same for all blocks but the last, whose lanes may be beyond the
// row, or one for each, where a block is neither whole tiles nor part of one.
struct RowLanes {
  int64_t tile, per_block, beyond;  // codes of a tile; whole tiles of a block, and how many codes it has besides
  int64_t step;                    // from a block's pattern to the next one's: 16 or 0
  bool one, each, near;             // whether a block is within one tile; whether each has scales of its own; of at most 8 tiles
  int32_t *patterns, *last;         // 16 numbers each

  static int64_t Room(int64_t cols, int64_t block) { return 16 * (cols / block + 2); }

  RowLanes(const Weight& w, int64_t block, int64_t steps, int32_t* room)
      : tile(w.col_tile), per_block(block / tile), beyond(block % tile), patterns(room) {
    const int64_t blocks = (w.cols - 1) / block + 1;
    one = tile % block == 0 || tile >= w.cols;
    step = one || beyond == 0 ? 0 : 16;
    each = step != 0 || per_block != 0;
    near = per_block + (beyond == 0 ? 0 : 2) <= 8;
    last = room + (step == 0 ? 16 : 16 * (blocks - 1));
    for (int64_t b = 0; b < (step == 0 ? 1 : blocks - 1); ++b) TilesOfLanes(tile, w.cols, b * block, steps, patterns + 16 * b);
    TilesOfLanes(tile, w.cols, (blocks - 1) * block, steps, last);
  }
};

// Whether the sum of a tile of several blocks waits in its registers until the tile ends; or else each block's is scaled at once,
// and the registers are free.
constexpr bool kWaits = kLanes == 16;

// Adds a block of kR rows of the weight, for kM rows of x, to sums that are yet to be scaled.
template <bool kSubtracts, class Decoder, int kR, int kM, class XAt, class ZeroOf>
static inline __attribute__((always_inline)) void AddBlock(const Decoder (&codes)[kR], const typename Decoder::Table& table,
                                                           const XAt& x_at, const ZeroOf& zero_of, V16 (&sum)[kR][kM]) {
  V16 z[kR];
#pragma GCC unroll 4
  for (int j = 0; j < kR; ++j) z[j] = kSubtracts ? zero_of(j) : Same16(0.0f);
#pragma GCC unroll 32
  for (int i = 0; i < Decoder::kSteps; ++i) {
    V16 a[kM];
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) a[m] = x_at(m, i);
#pragma GCC unroll 4
    for (int j = 0; j < kR; ++j) {
      V16 v = codes[j].At(i, table);
      if (kSubtracts) v = Sub(v, z[j]);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) sum[j][m] = !kWaits && i == 0 ? Mul(v, a[m]) : MulAdd(v, a[m], sum[j][m]);
    }
  }
}

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512

// Sums of the lanes of four rows. Each of `pairs` holds what is still to be added to two of them, a half for each.
static inline void StoreSums(const V (&row)[4][1], const V (&pairs)[2], float* to) {
  V of_two[2];
  UNROLL for (int i = 0; i < 2; ++i) {
    const V a = row[2 * i][0], b = row[2 * i + 1][0];
    of_two[i] = Add(Add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE)), pairs[i]);
  }
  V four = Add(_mm512_shuffle_f32x4(of_two[0], of_two[1], 0x88), _mm512_shuffle_f32x4(of_two[0], of_two[1], 0xDD));
  four = Add(four, _mm512_permute_ps(four, 0x4E));
  four = Add(four, _mm512_permute_ps(four, 0xB1));
  _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, four)));
}

// The last blocks of two rows each, which fill at most half of their lanes: both rows of a pair in one block.
template <class Decoder, bool kSubtracts>
static inline void AddHalves(const uint8_t* const* row, int64_t from, int64_t bytes, const typename Decoder::Table& table,
                             const float* x, __m512i lanes, const float* const* scales, const float* const* zeros, int64_t at,
                             V (&of_pair)[2]) {
  const __mmask32 there = static_cast<__mmask32>((1ull << bytes) - 1);
  const __m512i twice = _mm512_inserti64x4(lanes, _mm512_castsi512_si256(lanes), 1);
  const auto lanes_of = [&](const float* const* stored, int pair) {
    const V low = Permuted(twice, Load(stored[2 * pair] + at));
    return _mm512_mask_permutexvar_ps(low, 0xFF00, twice, Load(stored[2 * pair + 1] + at));
  };
  V sum[2][1] = {{Same(0.0f)}, {Same(0.0f)}};
  Decoder codes[2];
  UNROLL for (int pair = 0; pair < 2; ++pair) {
    const __m256i low = _mm256_maskz_loadu_epi8(there, row[2 * pair] + from);
    const __m256i high = _mm256_maskz_loadu_epi8(there, row[2 * pair + 1] + from);
    codes[pair] = Decoder(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), 0);
  }
  AddBlock<kSubtracts>(
      codes, table, [&](int, int i) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(x + 16 * i)); },
      [&](int pair) { return lanes_of(zeros, pair); }, sum);
  UNROLL for (int pair = 0; pair < 2; ++pair) of_pair[pair] = Mul(sum[pair][0], lanes_of(scales, pair));
}

#endif

template <class Decoder, bool kSubtracts, int kM>
static void DotRows(const Job& job, int64_t r0, int64_t count) {
  constexpr int kSteps = Decoder::kSteps, kBlock = 16 * kSteps, kBytes = Decoder::kBytes, kR = RowsAtOnce(kM);
  constexpr bool kHalves = FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2;  // whether the lanes of a block are two registers
  constexpr bool kLoadsMore = kLanes < 16 && kBytes % 32 != 0;  // a decoder loads whole registers, as far as the row goes
  const Weight& w = job.w;
  const int64_t r1 = r0 + count < w.rows ? r0 + count : w.rows, last = (w.cols - 1) / kBlock;
  const int64_t tiles = w.tiles_per_row, whole = tiles / 16 * 16;
  const auto table = Decoder::TableOf(w);
  const int64_t run = kScalesAtOnce / kR < tiles ? kR : kScalesAtOnce / tiles / kR * kR;  // rows whose scales are loaded together
  const int64_t of_run = (run * tiles + 47) / 16 * 16;
  float *scale = Workspace(2 * of_run + RowLanes::Room(w.cols, kBlock)), *zero = scale + of_run;
  const RowLanes lanes(w, kBlock, kSteps, reinterpret_cast<int32_t*>(zero + of_run));
  const int64_t ahead = kR * w.row_stride > kLater ? kR * w.row_stride : kLater;
  float y[kM][kFewOutputs + 4];
  alignas(64) uint8_t part[kR][64] = {};
  int64_t loaded = 0;
  for (int64_t r = r0; r < r1; r += kR) {
    if ((r - r0) % run == 0) {
      loaded = r / w.row_tile;
      const int64_t n = ((r + run < r1 ? r + run : r1) - 1) / w.row_tile - loaded + 1;
      LoadRun(w.scale, loaded * tiles, n * tiles, w.unit, scale);
      if (w.role != Zero::kNone) LoadRun(w.zero, loaded * tiles, n * tiles, 1.0f, zero);
    }
    const uint8_t* row[kR];
    const float *scales[kR], *zeros[kR];
    V16 total[kR][kM], waiting[kR][kM];  // sums, scaled and not
#pragma GCC unroll 4
    for (int j = 0; j < kR; ++j) {
      const int64_t here = r + j < r1 ? r + j : r1 - 1, at = (w.row_tile == 1 ? here : here / w.row_tile) - loaded;
      row[j] = w.codes + here * w.row_stride, scales[j] = scale + at * tiles, zeros[j] = zero + at * tiles;
      UNROLL for (int m = 0; m < kM; ++m) total[j][m] = waiting[j][m] = Same16(0.0f);
      if (w.role != Zero::kOffset) continue;
      const V16 end = FirstOf(zeros[j] + whole, tiles - whole);  // a tile's offset times the sum of x over the tile
      UNROLL for (int m = 0; m < kM; ++m) {
        const float* sums = job.x_sums + m * job.ld_sums;
        for (int64_t t = 0; t < whole; t += 16) total[j][m] = MulAdd(Load16(zeros[j] + t), Load16(sums + t), total[j][m]);
        total[j][m] = MulAdd(end, Load16(sums + whole), total[j][m]);
      }
    }
    const float* x = job.x;
    const int32_t* pattern = lanes.patterns;
    int64_t at = 0, left = lanes.tile;  // the first tile of a block, and how many of its codes follow
    const auto add_scaled = [&](const W16& of_lanes, V16 (&sum)[kR][kM], bool is_half) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int j = 0; j < kR; ++j) {
        const V16 s = kLanes < 16 && lanes.one ? Same16(scales[j][at]) : Looked16(of_lanes, scales[j] + at, lanes.near);
#pragma GCC unroll 4
        for (int m = 0; m < kM; ++m) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
          if (is_half) {
            total[j][m].v[0] = MulAdd(sum[j][m].v[0], s.v[0], total[j][m].v[0]);
            continue;
          }
#endif
          total[j][m] = MulAdd(sum[j][m], s, total[j][m]);
        }
      }
    };
    const auto add = [&](int64_t b, int64_t bytes, const int32_t* pattern, bool ends, bool is_half) __attribute__((always_inline)) {
      const W16 of_lanes = Words16(pattern);
      Decoder codes[kR];
#pragma GCC unroll 4
      for (int j = 0; j < kR; ++j) {
        const uint8_t* p = row[j] + b * kBytes;
        codes[j] = Decoder(p, bytes, table);
        __builtin_prefetch(p + ahead, 0, 2);
        if (kLanes == 16 && kSteps <= 4) __builtin_prefetch(p + kSoon);
      }
      const auto x_at = [&](int m, int i) { return Load16(x + m * job.ldx + 16 * i); };
      const auto zero_of = [&](int j) { return Looked16(of_lanes, zeros[j] + at, lanes.near); };
      if constexpr (kWaits) {
        AddBlock<kSubtracts>(codes, table, x_at, zero_of, waiting);
        if (!ends) return;
        add_scaled(of_lanes, waiting, is_half);
#pragma GCC unroll 4
        for (int j = 0; j < kR; ++j) {
          UNROLL for (int m = 0; m < kM; ++m) waiting[j][m] = Same16(0.0f);
        }
      } else {
        V16 sum[kR][kM];
        AddBlock<kSubtracts>(codes, table, x_at, zero_of, sum);
        add_scaled(of_lanes, sum, is_half);
      }
    };
    const int64_t bytes = w.row_stride - last * kBytes;
    bool is_added = false;  // the last block
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
    V of_pair[2] = {Same(0.0f), Same(0.0f)};
#endif
    for (int64_t b = 0; b <= last; ++b, x += kBlock, pattern += lanes.step) {
      left -= lanes.beyond;
      if (b == last) {
        pattern = lanes.last, left = 0;
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
        if constexpr (kR == 4 && kSteps >= 8) {
          is_added = lanes.each && w.cols - last * kBlock <= kBlock / 2;
          if (is_added) AddHalves<Decoder, kSubtracts>(row, last * kBytes, bytes, table, x, Words16(pattern), scales, zeros, at, of_pair);
        }
#endif
        if (is_added) break;
        // A part of a block is copied to memory that has room for all of it: the loop loads whole blocks without a mask.
        for (int j = 0; !kLoadsMore && bytes < kBytes && j < kR; ++j) {
          __builtin_memcpy(part[j], row[j] + last * kBytes, bytes);
          row[j] = part[j] - last * kBytes;
        }
      }
      const int64_t there = kLoadsMore ? w.row_stride - b * kBytes : kBytes;
      if (kHalves && b == last && bytes <= kBytes / 2) {  // what AVX2 computes of the other register is not used, and left out
        add(b, there, pattern, true, true);
        break;
      }
      add(b, there, pattern, lanes.each || left <= 0, false);
      at += lanes.per_block;
      if (left <= 0) ++at, left += lanes.tile;
    }
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
    if constexpr (kR == 4) {
      StoreSums(total, of_pair, y[0] + r - r0);
      continue;
    }
#endif
    UNROLL for (int j = 0; j < kR; ++j) {
      if (r + j >= r1) continue;
      UNROLL for (int m = 0; m < kM; ++m) y[m][r + j - r0] = SumOfLanes(total[j][m]);
    }
  }
  for (int m = 0; m < kM; ++m) StoreOutputs(job, m, r0, r1 - r0, y[m]);
}

#endif
