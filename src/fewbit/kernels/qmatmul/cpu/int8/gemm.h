// The product of integers by panels. Included in the namespace of an instruction set.

// What one tile makes of the sums of a block of rows of x and a strip of w: it adds
// v[m][n] * x_scale[m] * w_scale[n] + x_offset[m] * w_offset[n] to c[m][n], where v[m][n] = sum - x_sum[m] * w_zero[n] - x_zero[m] * ones[n]
// and the sums have begun at x_start[m]. Without zero points of w, w_zero is null; without those of x, ones is; without offsets,
// w_offset is; x_scale is where the rows of x have one scale for all tiles, with which the caller multiplies at last.
struct Tile {
  const float *x_scale, *w_scale, *x_offset, *w_offset;
  const int32_t *x_sum, *x_start, *x_zero, *w_zero, *ones;

  // Goes on to the next tile of the same rows and strip.
  void Next(int64_t rows_of_x, int64_t width) {
    if (x_scale != nullptr) x_scale += rows_of_x;
    if (w_offset != nullptr) w_offset += width;
    if (w_zero != nullptr) w_zero += width;
    if (ones != nullptr) ones += width;
    x_offset += rows_of_x, x_sum += rows_of_x, x_start += rows_of_x, x_zero += rows_of_x, w_scale += width;
  }
};

template <int kRowsHere, int kAcross>
INLINE void LessProducts(const int32_t* x, const int32_t* w, U (&sum)[kRowsHere][kAcross]) {
  UNROLL for (int m = 0; m < kRowsHere; ++m) {
    UNROLL for (int n = 0; n < kAcross; ++n) sum[m][n] -= SameI(x[m]) * LoadI(w + n * kLanes);
  }
}

// The branches are outside the loops over rows.
template <int kRowsHere, int kAcross>
INLINE void EndTile(const Tile& tile, U (&sum)[kRowsHere][kAcross], V (&c)[kRowsHere][kAcross]) {
  if (tile.w_zero != nullptr) LessProducts(tile.x_sum, tile.w_zero, sum);
  if (tile.ones != nullptr) LessProducts(tile.x_zero, tile.ones, sum);
  UNROLL for (int n = 0; n < kAcross; ++n) {
    V v[kRowsHere];
    UNROLL for (int m = 0; m < kRowsHere; ++m) v[m] = FloatI(sum[m][n]);
    if (tile.x_scale != nullptr) {
      UNROLL for (int m = 0; m < kRowsHere; ++m) v[m] = Mul(v[m], Same(tile.x_scale[m]));
    }
    const V scale = Load(tile.w_scale + n * kLanes);
    UNROLL for (int m = 0; m < kRowsHere; ++m) c[m][n] = MulAdd(v[m], scale, c[m][n]);
    if (tile.w_offset != nullptr) {
      const V offset = Load(tile.w_offset + n * kLanes);
      UNROLL for (int m = 0; m < kRowsHere; ++m) c[m][n] = MulAdd(offset, Same(tile.x_offset[m]), c[m][n]);
    }
  }
}

// What outputs are before the first tile: a number that leaves all others as they are, also zeros of either sign.
template <int kRowsHere, int kAcross>
INLINE void BeginOutputs(V (&c)[kRowsHere][kAcross]) {
  UNROLL for (int m = 0; m < kRowsHere; ++m) {
    UNROLL for (int n = 0; n < kAcross; ++n) c[m][n] = Same(-0.0f);
  }
}

template <int kRowsHere, int kAcross>
INLINE void LoadOutputs(const float* from, int64_t ld, V (&c)[kRowsHere][kAcross]) {
  UNROLL for (int m = 0; m < kRowsHere; ++m) {
    UNROLL for (int n = 0; n < kAcross; ++n) c[m][n] = Load(from + m * ld + n * kLanes);
  }
}

template <int kRowsHere, int kAcross>
INLINE void StoreOutputs(const V (&c)[kRowsHere][kAcross], float* to, int64_t ld) {
  UNROLL for (int m = 0; m < kRowsHere; ++m) {
    UNROLL for (int n = 0; n < kAcross; ++n) Store(to + m * ld + n * kLanes, c[m][n]);
  }
}

// How many groups of four products with unsigned numbers up to `largest` AVX2's instruction for bytes adds as pairs of 16 bits. 0: none.
static inline int64_t GroupsOfPairs(int largest) { return 32767 / (2 * 128 * (largest | 1)); }  // without dividing by 0

template <int kRowsHere>
INLINE void SetZero(U (&sum)[kRowsHere][kIntAcross]) {
  UNROLL for (int m = 0; m < kRowsHere; ++m) {
    UNROLL for (int n = 0; n < kIntAcross; ++n) sum[m][n] = U{};
  }
}

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2 && !FEWBIT_VNNI
// The sums of kGroups groups, whose pairs are added in 16 bits; added to what `sum` holds, or in its place.
template <int kGroups, bool kAdds, int kRowsHere>
INLINE void PairsOf(const int8_t* x, const uint8_t* w, U (&sum)[kRowsHere][kIntAcross]) {
  __m256i pairs[kRowsHere][kIntAcross];
  UNROLL for (int g = 0; g < kGroups; ++g) {
    __m256i b[kIntAcross];
    UNROLL for (int n = 0; n < kIntAcross; ++n) b[n] = (__m256i)LoadI(w + 4 * (g * kIntWide + n * kLanes));
    UNROLL for (int m = 0; m < kRowsHere; ++m) {
      int32_t four;
      __builtin_memcpy(&four, x + 4 * (g * kRowsHere + m), 4);
      const __m256i a = (__m256i)SameI(four);
      UNROLL for (int n = 0; n < kIntAcross; ++n) {
        const __m256i product = _mm256_maddubs_epi16(b[n], a);
        pairs[m][n] = g == 0 ? product : _mm256_add_epi16(pairs[m][n], product);
        asm("" : "+x"(pairs[m][n]));  // in this order: a tree of sums would need more registers than there are
      }
    }
  }
  UNROLL for (int m = 0; m < kRowsHere; ++m) {
    UNROLL for (int n = 0; n < kIntAcross; ++n) {
      const U of_groups = (U)_mm256_madd_epi16(pairs[m][n], _mm256_set1_epi16(1));
      sum[m][n] = kAdds ? sum[m][n] + of_groups : of_groups;
    }
  }
}

// As many times as there are kGroups left.
template <int kGroups, int kRowsHere>
INLINE void AddPairsBy(const int8_t* x, const uint8_t* w, int64_t groups, int64_t of_pairs, int64_t& g, U (&sum)[kRowsHere][kIntAcross]) {
  if (kGroups > of_pairs) return;
  for (; g + kGroups <= groups; g += kGroups) PairsOf<kGroups, true>(x + 4 * g * kRowsHere, w + 4 * g * kIntWide, sum);
}

template <int kRowsHere>
INLINE void SumPairs(const int8_t* x, const uint8_t* w, int64_t groups, int64_t of_pairs, U (&sum)[kRowsHere][kIntAcross]) {
  int64_t g = 0;
  if (of_pairs >= 8 && groups >= 8) {  // most often all there are
    PairsOf<8, false>(x, w, sum);
    g = 8;
  } else {
    SetZero<kRowsHere>(sum);
  }
  AddPairsBy<8>(x, w, groups, of_pairs, g, sum);
  AddPairsBy<4>(x, w, groups, of_pairs, g, sum);
  AddPairsBy<2>(x, w, groups, of_pairs, g, sum);
  AddPairsBy<1>(x, w, groups, of_pairs, g, sum);
}
#endif

// sum[m][n] = the products of groups of x[m] and w[n]. `of_pairs`: how many groups AVX2 adds as pairs of 16 bits.
#if FEWBIT_I8MM
// One smmla multiplies eight bytes of two rows of x by those of two outputs: meanwhile sums lie in squares of two rows by two outputs.
// The last one of an odd number of rows makes both rows of its squares.
template <int kRowsHere>
INLINE void SumGroups(const int8_t* x, const uint8_t* w, int64_t groups, int64_t, U (&sum)[kRowsHere][kIntAcross]) {
  constexpr int kPairs = (kRowsHere + 1) / 2;
  const auto second = [](int p) { return 2 * p + 1 < kRowsHere ? 2 * p + 1 : 2 * p; };
  int32x4_t square[kPairs][2 * kIntAcross] = {};
  for (int64_t g = 0; g < groups; g += 2, x += 8 * kRowsHere, w += 8 * kIntWide) {
    int8x16_t a[kPairs];
    UNROLL for (int p = 0; p < kPairs; ++p) {
      const int8x8_t row = vld1_s8(x + 16 * p);
      a[p] = second(p) == 2 * p ? vcombine_s8(row, row) : vld1q_s8(x + 16 * p);
    }
    UNROLL for (int n = 0; n < 2 * kIntAcross; ++n) {
      const int8x16_t b = (int8x16_t)LoadI(w + n * kIntBytes);
      UNROLL for (int p = 0; p < kPairs; ++p) square[p][n] = vmmlaq_s32(square[p][n], a[p], b);
    }
  }
  UNROLL for (int p = 0; p < kPairs; ++p) {
    UNROLL for (int n = 0; n < kIntAcross; ++n) {
      const uint64x2_t a = (uint64x2_t)square[p][2 * n], b = (uint64x2_t)square[p][2 * n + 1];
      sum[2 * p][n] = (U)vzip1q_u64(a, b), sum[second(p)][n] = (U)vzip2q_u64(a, b);
    }
  }
}
#else
// The rows of a block from kFrom to kEnd.
template <int kFrom, int kEnd, int kRowsHere>
INLINE void AddDots(const int8_t* x, const uint8_t* w, int64_t groups, U (&sum)[kRowsHere][kIntAcross]) {
  for (int64_t g = 0; g < groups; ++g) {
    U b[kIntAcross];
    UNROLL for (int n = 0; n < kIntAcross; ++n) b[n] = LoadI(w + 4 * (g * kIntWide + n * kLanes));
    UNROLL for (int m = kFrom; m < kEnd; ++m) {
      int32_t four;
      __builtin_memcpy(&four, x + 4 * (g * kRowsHere + m), 4);
      const U a = SameI(four);
      UNROLL for (int n = 0; n < kIntAcross; ++n) sum[m][n] = Dot4(sum[m][n], b[n], a);
    }
  }
}

template <int kRowsHere>
INLINE void SumGroups(const int8_t* x, const uint8_t* w, int64_t groups, int64_t of_pairs, U (&sum)[kRowsHere][kIntAcross]) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2 && !FEWBIT_VNNI
  if (of_pairs != 0) return SumPairs<kRowsHere>(x, w, groups, of_pairs, sum);
#endif
  SetZero<kRowsHere>(sum);
  constexpr int kFirst = FEWBIT_VNNI || kRowsHere < 3 ? kRowsHere : 3;  // without a product of bytes more do not fit in registers
  AddDots<0, kFirst>(x, w, groups, sum);
  if (kFirst < kRowsHere) AddDots<kFirst, kRowsHere>(x, w, groups, sum);
}
#endif

template <int kRowsHere>
INLINE void AddSums(const int32_t* from, int64_t ld, U (&sum)[kRowsHere][kIntAcross]) {
  UNROLL for (int m = 0; m < kRowsHere; ++m) {
    UNROLL for (int n = 0; n < kIntAcross; ++n) sum[m][n] += LoadI(from + m * ld + n * kLanes);
  }
}

template <int kRowsHere>
INLINE void StoreSums(const U (&sum)[kRowsHere][kIntAcross], int32_t* to, int64_t ld) {
  UNROLL for (int m = 0; m < kRowsHere; ++m) {
    UNROLL for (int n = 0; n < kIntAcross; ++n) StoreI(to + m * ld + n * kLanes, sum[m][n]);
  }
}

constexpr int64_t kIntTall = 384;  // rows of x that share one panel

// Outputs of a chunk. Where they are columns, a row of w is another page for each, so more of it is read at a time. Small tiles take
// longer for a block of few sums: rows of blocks are 64 at a time.
static int64_t IntegerWidth(const IntegerJob& job) {
  if (!job.contracts_cols) return job.N < 2048 ? 64 : 256;
  if (job.blocks != nullptr) return 64;
  return kIntWide;
}

static int64_t IntegerChunks(const IntegerJob& job) {
  if (IsFew(job)) return (job.N + kFewWide - 1) / kFewWide;
  const int64_t width = IntegerWidth(job);
  return (job.N + width - 1) / width * ((job.M + kIntTall - 1) / kIntTall);
}

// The memory of one chunk.
struct IntegerScratch {
  uint8_t* panel;     // a segment of each strip
  int32_t* sums;      // [rows, width]
  float* c;           // [rows, width]; where there is one tile, the memory of the sums
  float* scale;       // [tiles of a segment, width], and likewise
  float* offset;
  int32_t *zero, *ones;
  int8_t* every;      // a row of x that is one at each place of a segment
  uint8_t* decoded;   // the rows of blocks
  IntegerScratch(const IntegerJob& job, int64_t tiles, int64_t strips, int64_t rows, int64_t width) {
    const int64_t size = strips * kSegment * kIntWide / 4, block = rows * width;
    int64_t row = 0;  // floats of decoded codes for one output
    if (job.blocks != nullptr) row = job.contracts_cols ? DecodedStride(*job.blocks) / 4 + 1 : kSegment / 4;
    float* memory = Workspace(size + 2 * block + 4 * tiles * width + kSegment / 4 + row * width);
    panel = reinterpret_cast<uint8_t*>(memory);
    sums = reinterpret_cast<int32_t*>(memory + size);
    c = memory + size + (job.tiles() == 1 ? 0 : block);
    scale = memory + size + 2 * block;
    zero = reinterpret_cast<int32_t*>(scale + tiles * width);
    ones = zero + tiles * width;
    offset = scale + 3 * tiles * width;
    every = reinterpret_cast<int8_t*>(offset + tiles * width);
    decoded = reinterpret_cast<uint8_t*>(every + kSegment);
  }
};

// Groups of a tile that shares a segment, before `t` tiles of it or after all.
static int64_t GroupsBefore(const IntegerJob& job, const Segment& segment, int64_t t) {
  return t < segment.tiles ? t * job.tile / 4 : segment.groups;
}

// The sums of the codes of each output, less its zero point, over a tile: the product with a row of x that is one everywhere.
static void AddOnes(const IntegerJob& job, const Segment& segment, int64_t count, int64_t width, const IntegerScratch& s) {
  const int64_t codes = 32 / job.bits;
  for (int64_t k = 0; k < 4 * segment.groups; ++k) {
    s.every[k] = (job.bits == 8 ? k : k / codes * codes + k % 4 * 2 + k % codes / 4) < segment.count;
  }
  for (int64_t t = 0; t < segment.tiles; ++t) {
    const int64_t g = GroupsBefore(job, segment, t), groups = GroupsBefore(job, segment, t + 1) - g;
    for (int64_t i = 0; i * kIntWide < count; ++i) {
      int32_t* ones = s.ones + t * width + i * kIntWide;
      U sum[1][kIntAcross];
      SumGroups<1>(s.every + 4 * g, s.panel + (i * kSegment + 4 * g) * kIntWide, groups, 0, sum);
      if (!segment.first) AddSums<1>(ones, width, sum);
      StoreSums<1>(sum, ones, width);
    }
    const int64_t from = (segment.tile + t) * job.tile, end = from + job.tile < job.K ? from + job.tile : job.K;
    for (int64_t n = t * width; segment.last && n < t * width + count; ++n) {
      s.ones[n] -= static_cast<int32_t>(end - from) *
                   (static_cast<int32_t>(AddedTo(job)) + (job.w_zero.data == nullptr ? 0 : s.zero[n]));
    }
  }
}

// The numbers of the tiles of a segment, for outputs from n0 on.
template <class Number>
static void LoadTiles(const PerTile<Number>& from, const Segment& segment, int64_t n0, int64_t count, int64_t width,
                      Number* to) {
  const Number* data = from.data + segment.tile * from.by_tile;
  if (from.tile == 1 && from.by_row == 1) {
    for (int64_t t = 0; t < segment.tiles; ++t) std::memcpy(to + t * width, data + t * from.by_tile + n0, count * sizeof(Number));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const Number* number = data + (from.tile == 1 ? n0 + i : (n0 + i) / from.tile) * from.by_row;
    for (int64_t t = 0; t < segment.tiles; ++t) to[t * width + i] = number[t * from.by_tile];
  }
}

static bool HasOffset(const IntegerJob& job) { return job.blocks != nullptr && job.blocks->w.role == Zero::kOffset; }

static bool HasZero(const IntegerJob& job) {
  return job.blocks == nullptr ? job.w_zero.data != nullptr : job.blocks->w.role == Zero::kWhole;
}

// Tile t of a segment, for rows of x from m on and outputs from the chunk's n on.
static Tile TileAt(const IntegerJob& job, const Segment& segment, const IntegerScratch& s, int64_t t, int64_t m, int64_t n,
                   int64_t width) {
  const int64_t of_x = (segment.tile + t) * job.M + m, of_w = t * width + n;
  Tile tile;
  tile.x_scale = ScalesLast(job) ? nullptr : job.x_scales + of_x, tile.x_offset = job.x_offsets + of_x;
  tile.x_sum = job.x_sums + of_x, tile.x_start = job.x_starts + of_x, tile.x_zero = job.x_zeros + of_x;
  tile.w_scale = s.scale + of_w, tile.w_offset = HasOffset(job) ? s.offset + of_w : nullptr;
  tile.w_zero = HasZero(job) ? s.zero + of_w : nullptr, tile.ones = job.x_zero.data == nullptr ? nullptr : s.ones + of_w;
  return tile;
}

typedef void (*StripStep)(const IntegerJob&, const Segment&, const IntegerScratch&, int64_t, int64_t, int64_t, int64_t);

#if FEWBIT_AMX
#include "cpp/tile_registers.h"
#include "amx.h"

static StripStep RunStripOf(int64_t) { return RunStrip; }
#else
// kRowsHere rows of x from m on, of a segment, times one strip: tile by tile, or a part of one whose sums are kept until its end.
template <int kRowsHere>
static void RunStrip(const IntegerJob& job, const Segment& segment, const IntegerScratch& s, int64_t strip, int64_t m, int64_t row,
                     int64_t width) {
  const int64_t of_pairs = GroupsOfPairs(job.largest), n = strip * kIntWide, at = row * width + n;
  const int8_t* x = job.x + 4 * (segment.at * job.M + m * segment.groups);
  const uint8_t* w = s.panel + strip * kSegment * kIntWide;
  Tile tile = TileAt(job, segment, s, 0, m, n, width);
  V c[kRowsHere][kIntAcross];
  if (segment.tile == 0 || !segment.last) BeginOutputs(c);
  else LoadOutputs(s.c + at, width, c);
  for (int64_t t = 0; t < segment.tiles; ++t) {
    const int64_t groups = GroupsBefore(job, segment, t + 1) - GroupsBefore(job, segment, t);
    U sum[kRowsHere][kIntAcross];
    SumGroups<kRowsHere>(x, w, groups, of_pairs, sum);
    if (!segment.first) AddSums<kRowsHere>(s.sums + at, width, sum);
    if (!segment.last) return StoreSums<kRowsHere>(sum, s.sums + at, width);
    UNROLL for (int i = 0; i < kRowsHere; ++i) {
      UNROLL for (int j = 0; j < kIntAcross; ++j) sum[i][j] += SameI(tile.x_start[i]);
    }
    EndTile(tile, sum, c);
    x += 4 * groups * kRowsHere, w += 4 * groups * kIntWide;
    tile.Next(job.M, width);
  }
  StoreOutputs(c, s.c + at, width);
}

static StripStep RunStripOf(int64_t rows) {
  static const StripStep steps[] = {RunStrip<1>, RunStrip<2>, RunStrip<3>, RunStrip<4>, RunStrip<5>, RunStrip<6>};
  return steps[(rows < kIntRows ? rows : kIntRows) - 1];
}
#endif

#include "gemv_columns.h"

// The strips of panels from output n0 on: of [N, K] of rows that are decoded first, and in memory as they are if codes have 8 bits.
static void PackBlocks(const IntegerJob& job, Segment segment, int64_t n0, int64_t count, int64_t strips, const IntegerScratch& s) {
  const BlockJob& blocks = *job.blocks;
  IntegerJob rows = job;
  rows.N = count, rows.row_stride = blocks.w.row_stride;
  rows.w = blocks.w.codes + n0 * (job.contracts_cols ? rows.row_stride : 1);
  if (blocks.w.bits < 8) {
    rows.w = s.decoded, rows.row_stride = DecodedStride(blocks);
    rows.offset -= AddedTo(job);  // is in the bytes
    if (!job.contracts_cols) {
      rows.N = rows.row_stride = strips * kIntWide;
      DecodeRows(blocks, segment.from, segment.count, n0, count, rows.N, blocks.offset - AddedTo(job), s.decoded);
      segment.from = 0;
    }
  }
  Pack(rows, segment, 0, strips, s.panel);
}

// Stored numbers of `count` outputs from n0 on, of the row of tiles `t` of a weight [K, N].
static void LoadTileRow(const Weight& w, const StoredScales& stored, float unit, int64_t t, int64_t n0, int64_t count, float* out) {
  const int64_t from = t * w.tiles_per_row;
  if (w.col_tile == 1) return LoadScales(stored, from + n0, count, unit, out);
  for (int64_t i = 0; i < count;) {
    const int64_t tile = (n0 + i) / w.col_tile, end = (tile + 1) * w.col_tile - n0;
    float number;
    for (LoadScales(stored, from + tile, 1, unit, &number); i < count && i < end; ++i) out[i] = number;
  }
}

// The stored scales and zero points of a segment's tiles.
static void LoadBlockTiles(const BlockJob& job, const Segment& segment, int64_t n0, int64_t count, int64_t width,
                           const IntegerScratch& s) {
  float numbers[kSegment / 16];
  const int64_t share = job.share(), first = segment.tile / share, stored = (segment.tile + segment.tiles - 1) / share - first + 1;
  int64_t place[kSegment / 16];  // of each tile among the stored ones
  for (int64_t t = 0; t < segment.tiles; ++t) place[t] = (segment.tile + t) / share - first;
  for (int64_t t = 0; !job.contracts_cols && t < segment.tiles; ++t) {
    float* offset = s.offset + t * width;
    LoadTileRow(job.w, job.w.scale, job.w.unit, first + place[t], n0, count, s.scale + t * width);
    if (job.w.role == Zero::kNone) continue;
    LoadTileRow(job.w, job.w.zero, 1.0f, first + place[t], n0, count, offset);
    for (int64_t i = 0; job.w.role == Zero::kWhole && i < count; ++i) s.zero[t * width + i] = static_cast<int32_t>(offset[i]);
  }
  for (int64_t i = 0; job.contracts_cols && i < count; ++i) {
    const int64_t from = (n0 + i) / job.w.row_tile * job.w.tiles_per_row + first;
    LoadScales(job.w.scale, from, stored, job.w.unit, numbers);
    for (int64_t t = 0; t < segment.tiles; ++t) s.scale[t * width + i] = numbers[place[t]];
    if (job.w.role == Zero::kNone) continue;
    LoadScales(job.w.zero, from, stored, 1.0f, numbers);
    for (int64_t t = 0; t < segment.tiles; ++t) {
      s.offset[t * width + i] = numbers[place[t]];
      if (job.w.role == Zero::kWhole) s.zero[t * width + i] = static_cast<int32_t>(numbers[place[t]]);
    }
  }
}

static void RunIntegers(const IntegerJob& job, const std::vector<Segment>& segments, int64_t chunk) {
  if (IsFew(job)) return RunFew(job, chunk);
  const int64_t width = IntegerWidth(job), down = (job.M + kIntTall - 1) / kIntTall;
  const int64_t n0 = chunk / down * width, m0 = chunk % down * kIntTall, rows = job.M - m0 < kIntTall ? job.M - m0 : kIntTall;
  const int64_t count = job.N - n0 < width ? job.N - n0 : width, unit = job.contracts_cols ? kIntWide : kIntBytes;
  const int64_t strips = (count + unit - 1) / unit * unit / kIntWide;
  const IntegerScratch s(job, segments.empty() ? 0 : segments[0].tiles, strips, rows, width);
  for (int64_t i = 0; job.contracts_cols && job.blocks != nullptr && job.blocks->w.bits < 8 && i < count; ++i) {
    DecodeBytes<FEWBIT_ARM64>(*job.blocks, n0 + i, s.decoded + i * DecodedStride(*job.blocks));
  }
  for (const Segment& segment : segments) {
    if (job.blocks != nullptr && segment.last) LoadBlockTiles(*job.blocks, segment, n0, count, width, s);
    if (job.blocks != nullptr && !IsAcross(job)) PackBlocks(job, segment, n0, count, strips, s);
    else if (!IsAcross(job)) Pack(job, segment, n0, strips, s.panel);
    if (segment.last && job.blocks == nullptr) LoadTiles(job.w_scale, segment, n0, count, width, s.scale);
    if (segment.last && job.w_zero.data != nullptr) LoadTiles(job.w_zero, segment, n0, count, width, s.zero);
    if (job.x_zero.data != nullptr) AddOnes(job, segment, count, width, s);
    if (IsAcross(job)) {
      RunAcross(job, segment, s, n0, count, width, IntegerRowBytes(job, segments));
      continue;
    }
    const int64_t together = job.blocks == nullptr || !job.contracts_cols ? 1 : strips;  // whose panels stay in the first cache
    for (int64_t j = 0; j < strips; j += together) {
      for (int64_t m = 0; m < rows; m += kIntRows) {
        const StripStep run = RunStripOf(rows - m);
        for (int64_t strip = j; strip < j + together; ++strip) run(job, segment, s, strip, m0 + m, m, width);
      }
    }
  }
#if FEWBIT_AMX
  TileShapes::Release();
#endif
  for (int64_t m = 0; m < rows; ++m) {
    float* c = s.c + m * width;
    const float scale = ScalesLast(job) ? job.x_scale.At(m0 + m, 0) : 1;
    for (int64_t n = 0; scale != 1 && n < count; ++n) c[n] *= scale;
    StoreRow(job, m0 + m, n0, count, c);
  }
}
