// The product of integers by panels. Included in the namespace of an instruction set.

// What one tile makes of the sums of a block, where v[m][n] = sum - x_sum[m] * w_zero[n] - x_zero[m] * ones[n]: the first one
// c[m][n] = v * x_scale[m] * w_scale[n] + x_offset[m] * w_offset[n], each other one adds its own to that. Without zero points of w,
// w_zero is null; without those of x, ones is; without offsets, w_offset is; x_scale is where the rows of x have one scale for all
// tiles, with which the caller multiplies at last.
struct Tile {
  const float *x_scale, *w_scale, *x_offset, *w_offset;
  const int32_t *x_sum, *x_zero, *w_zero, *ones;
  bool adds;
  float* c;
  int64_t ldc;
};

template <int kRowsHere>
static inline void LessProducts(const int32_t* x, const int32_t* w, U (&sum)[kRowsHere][kIntAcross]) {
#pragma GCC unroll 8
  for (int m = 0; m < kRowsHere; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kIntAcross; ++n) sum[m][n] -= SameI(x[m]) * LoadI(w + n * kLanes);
  }
}

// The branches are outside the loops over rows, and the pointers are copied: c could hold them, as far as the compiler can tell.
template <int kRowsHere>
static inline void EndTile(const Tile& tile, U (&sum)[kRowsHere][kIntAcross]) {
  const float *x_scale = tile.x_scale, *w_scale = tile.w_scale, *x_offset = tile.x_offset, *w_offset = tile.w_offset;
  float* c = tile.c;
  const int64_t ldc = tile.ldc;
  const bool adds = tile.adds;
  UNROLL for (int n = 0; n < kIntAcross; ++n) {
    const int at = n * kLanes;
    const V scale = Load(w_scale + at);
    V v[kRowsHere];
    UNROLL for (int m = 0; m < kRowsHere; ++m) v[m] = FloatI(sum[m][n]);
    if (x_scale != nullptr) {
      UNROLL for (int m = 0; m < kRowsHere; ++m) v[m] = Mul(v[m], Same(x_scale[m]));
    }
    if (adds) {
      UNROLL for (int m = 0; m < kRowsHere; ++m) v[m] = MulAdd(v[m], scale, Load(c + m * ldc + at));
    } else {
      UNROLL for (int m = 0; m < kRowsHere; ++m) v[m] = Mul(v[m], scale);
    }
    if (w_offset != nullptr) {
      const V offset = Load(w_offset + at);
      UNROLL for (int m = 0; m < kRowsHere; ++m) v[m] = MulAdd(offset, Same(x_offset[m]), v[m]);
    }
    UNROLL for (int m = 0; m < kRowsHere; ++m) Store(c + m * ldc + at, v[m]);
  }
}

// How many groups of four products with unsigned numbers up to `largest` AVX2's instruction for bytes adds as pairs of 16 bits. 0: none.
static inline int64_t GroupsOfPairs(int largest) { return 32767 / (2 * 128 * (largest | 1)); }  // without dividing by 0

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2 && !FEWBIT_VNNI
template <int kRowsHere>
INLINE void AddPairs(const int8_t* x, const uint8_t* w, int64_t groups, int64_t of_pairs, U (&sum)[kRowsHere][kIntAcross]) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t g = 0; g < groups;) {
    __m256i pairs[kRowsHere][kIntAcross] = {};
    for (const int64_t end = g + of_pairs < groups ? g + of_pairs : groups; g < end; ++g) {
      U b[kIntAcross];
      UNROLL for (int n = 0; n < kIntAcross; ++n) b[n] = LoadI(w + 4 * (g * kIntWide + n * kLanes));
      UNROLL for (int m = 0; m < kRowsHere; ++m) {
        int32_t four;
        __builtin_memcpy(&four, x + 4 * (g * kRowsHere + m), 4);
        const __m256i a = (__m256i)SameI(four);
        UNROLL for (int n = 0; n < kIntAcross; ++n) {
          pairs[m][n] = _mm256_add_epi16(pairs[m][n], _mm256_maddubs_epi16((__m256i)b[n], a));
        }
      }
    }
    UNROLL for (int m = 0; m < kRowsHere; ++m) {
      UNROLL for (int n = 0; n < kIntAcross; ++n) sum[m][n] += (U)_mm256_madd_epi16(pairs[m][n], ones);
    }
  }
}
#endif

// sum[m][n] += the products of groups of x[m] and w[n]. `of_pairs`: how many groups AVX2 adds as pairs of 16 bits.
#if FEWBIT_I8MM
// One smmla multiplies eight bytes of two rows of x by those of two outputs: meanwhile sums lie in squares of two rows by two outputs.
// The last one of an odd number of rows makes both rows of its squares.
template <int kRowsHere>
INLINE void AddGroups(const int8_t* x, const uint8_t* w, int64_t groups, int64_t, U (&sum)[kRowsHere][kIntAcross]) {
  constexpr int kPairs = (kRowsHere + 1) / 2;
  const auto second = [](int p) { return 2 * p + 1 < kRowsHere ? 2 * p + 1 : 2 * p; };
  int32x4_t square[kPairs][2 * kIntAcross];
  UNROLL for (int p = 0; p < kPairs; ++p) {
    UNROLL for (int n = 0; n < kIntAcross; ++n) {
      const uint64x2_t a = (uint64x2_t)sum[2 * p][n], b = (uint64x2_t)sum[second(p)][n];
      square[p][2 * n] = (int32x4_t)vzip1q_u64(a, b), square[p][2 * n + 1] = (int32x4_t)vzip2q_u64(a, b);
    }
  }
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
template <int kRowsHere>
INLINE void AddGroups(const int8_t* x, const uint8_t* w, int64_t groups, int64_t of_pairs, U (&sum)[kRowsHere][kIntAcross]) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2 && !FEWBIT_VNNI
  if (of_pairs != 0) return AddPairs<kRowsHere>(x, w, groups, of_pairs, sum);
#endif
  for (int64_t g = 0; g < groups; ++g) {
    U b[kIntAcross];
#pragma GCC unroll 8
    for (int n = 0; n < kIntAcross; ++n) b[n] = LoadI(w + 4 * (g * kIntWide + n * kLanes));
#pragma GCC unroll 8
    for (int m = 0; m < kRowsHere; ++m) {
      int32_t four;
      __builtin_memcpy(&four, x + 4 * (g * kRowsHere + m), 4);
      const U a = SameI(four);
#pragma GCC unroll 8
      for (int n = 0; n < kIntAcross; ++n) sum[m][n] = Dot4(sum[m][n], b[n], a);
    }
  }
}
#endif

// The sums over groups of x[m] * w[n], for kRowsHere rows of x and one strip of w: begun at -added * x_sum[m], or where x_sum is
// null at what `sums` holds; left there, or where a tile ends with them, scaled.
template <int kRowsHere>
static void IntegerBlock(const int8_t* x, const uint8_t* w, int64_t groups, int64_t of_pairs, const int32_t* x_sum, int32_t added,
                         int32_t* sums, int64_t ld_sums, const Tile* tile) {
  U sum[kRowsHere][kIntAcross];
#pragma GCC unroll 8
  for (int m = 0; m < kRowsHere; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kIntAcross; ++n) {
      sum[m][n] = x_sum == nullptr ? LoadI(sums + m * ld_sums + n * kLanes) : SameI(x_sum[m]) * SameI(-added);
    }
  }
  AddGroups<kRowsHere>(x, w, groups, of_pairs, sum);
  if (tile == nullptr) {
#pragma GCC unroll 8
    for (int m = 0; m < kRowsHere; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < kIntAcross; ++n) StoreI(sums + m * ld_sums + n * kLanes, sum[m][n]);
    }
    return;
  }
  if (tile->w_zero != nullptr) LessProducts<kRowsHere>(tile->x_sum, tile->w_zero, sum);
  if (tile->ones != nullptr) LessProducts<kRowsHere>(tile->x_zero, tile->ones, sum);
  EndTile<kRowsHere>(*tile, sum);
}

typedef void (*IntegerStep)(const int8_t*, const uint8_t*, int64_t, int64_t, const int32_t*, int32_t, int32_t*, int64_t, const Tile*);

static IntegerStep IntegerBlockOf(int64_t rows) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512 || FEWBIT_VNNI
  static const IntegerStep blocks[] = {IntegerBlock<1>, IntegerBlock<2>, IntegerBlock<3>,
                                       IntegerBlock<4>, IntegerBlock<5>, IntegerBlock<6>};
#else
  static const IntegerStep blocks[] = {IntegerBlock<1>, IntegerBlock<2>, IntegerBlock<3>};
#endif
  return blocks[(rows < kIntRows ? rows : kIntRows) - 1];
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
  const int32_t nothing = 0;
  for (int64_t t = 0; t < segment.tiles; ++t) {
    const int64_t g = GroupsBefore(job, segment, t), groups = GroupsBefore(job, segment, t + 1) - g;
    for (int64_t i = 0; i * kIntWide < count; ++i) {
      IntegerBlock<1>(s.every + 4 * g, s.panel + (i * kSegment + 4 * g) * kIntWide, groups, 0, segment.first ? &nothing : nullptr, 0,
                      s.ones + t * width + i * kIntWide, width, nullptr);
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

// What tile t of a segment makes of the sums of a block of rows of x, from row m of x and of the chunk's `row` on.
struct BlockTile : Tile {
  int32_t zeros[kIntRows];
  BlockTile(const IntegerJob& job, const Segment& segment, int64_t t, int64_t m, int64_t block) {
    const int64_t at = segment.tile + t, from = at * job.M + m;
    x_scale = ScalesLast(job) ? nullptr : job.x_scales + from, x_offset = job.x_offsets + from;
    x_zero = zeros, x_sum = job.x_sums + from;
    adds = at > 0;
    SetZeros(job, at, m, block);
  }
  static bool HasOffset(const IntegerJob& job) { return job.blocks != nullptr && job.blocks->w.role == Zero::kOffset; }

  void SetZeros(const IntegerJob& job, int64_t at, int64_t m, int64_t block) {
    for (int64_t i = 0; job.x_zero.data != nullptr && i < block; ++i) zeros[i] = job.x_zero.At(m + i, at);
  }

  void SetStrip(const IntegerJob& job, const IntegerScratch& s, int64_t t, int64_t strip, int64_t row, int64_t width) {
    const int64_t n = strip * kIntWide, at = t * width + n;
    const bool has_zero = job.blocks == nullptr ? job.w_zero.data != nullptr : job.blocks->w.role == Zero::kWhole;
    w_scale = s.scale + at, w_offset = HasOffset(job) ? s.offset + at : nullptr, w_zero = has_zero ? s.zero + at : nullptr;
    ones = job.x_zero.data == nullptr ? nullptr : s.ones + at;
    c = s.c + row * width + n, ldc = width;
  }

  // Goes on to the next tile of the same rows and strip, but for the zero points of x.
  void Next(int64_t rows_of_x, int64_t width) {
    if (x_scale != nullptr) x_scale += rows_of_x;
    if (w_offset != nullptr) w_offset += width;
    if (w_zero != nullptr) w_zero += width;
    if (ones != nullptr) ones += width;
    x_offset += rows_of_x, x_sum += rows_of_x, w_scale += width, adds = true;
  }
};

// A block of rows of x from m on, of a segment, times strips [from, end): tile by tile.
static void RunBlock(const IntegerJob& job, const Segment& segment, const IntegerScratch& s, int64_t from, int64_t end, int64_t m,
                     int64_t block, int64_t row, int64_t width) {
  const int8_t* x = job.x + 4 * (segment.at * job.M + m * segment.groups);
  const IntegerStep step = IntegerBlockOf(block);
  const int32_t added = static_cast<int32_t>(AddedTo(job));
  const int64_t of_pairs = GroupsOfPairs(job.largest);
  for (int64_t strip = from; strip < end; ++strip) {
    BlockTile tile(job, segment, 0, m, block);
    tile.SetStrip(job, s, 0, strip, row, width);
    const uint8_t* w = s.panel + strip * kSegment * kIntWide;
    int32_t* sums = s.sums + row * width + strip * kIntWide;
    for (int64_t t = 0, g = 0; t < segment.tiles; ++t) {
      const int64_t end_of_tile = GroupsBefore(job, segment, t + 1);
      step(x + 4 * g * block, w + 4 * g * kIntWide, end_of_tile - g, of_pairs, segment.first ? tile.x_sum : nullptr, added, sums,
           width, segment.last ? &tile : nullptr);
      g = end_of_tile;
      tile.Next(job.M, width);
      if (t + 1 < segment.tiles) tile.SetZeros(job, segment.tile + t + 1, m, block);
    }
  }
}

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
        RunBlock(job, segment, s, j, j + together, m0 + m, rows - m < kIntRows ? rows - m : kIntRows, m, width);
      }
    }
  }
  for (int64_t m = 0; m < rows; ++m) {
    float* c = s.c + m * width;
    const float scale = ScalesLast(job) ? job.x_scale.At(m0 + m, 0) : 1;
    for (int64_t n = 0; scale != 1 && n < count; ++n) c[n] *= scale;
    StoreRow(job, m0 + m, n0, count, c);
  }
}
