// The product of integers by panels. Included inside a level's namespace.

// What one tile makes of the sums of a block: c[m][n] = or += (sum - x_sum[m] * w_zero[n] - x_zero[m] * ones[n]) * x_scale[m] *
// w_scale[n]. Without zero points of w, w_zero is null; without those of x, ones is.
struct Tile {
  float x_scale[kIntRows];
  int32_t x_sum[kIntRows], x_zero[kIntRows];
  const float* w_scale;
  const int32_t *w_zero, *ones;
  bool adds;
  float* c;
  int64_t ldc;
};

// The sums over groups of x[m] * w[n], for kRowsHere rows of x and one strip of w: begun at start[m], or where it is null at
// what `sums` holds; left there, or where a tile ends with them, scaled.
template <int kRowsHere>
static void IntegerBlock(const int8_t* x, const uint8_t* w, int64_t groups, const int32_t* start, int32_t* sums, int64_t ld_sums,
                         const Tile* tile) {
  I sum[kRowsHere][kIntAcross];
#pragma GCC unroll 8
  for (int m = 0; m < kRowsHere; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kIntAcross; ++n) sum[m][n] = start == nullptr ? LoadI(sums + m * ld_sums + n * kIntLanes) : SameI(start[m]);
  }
  for (int64_t g = 0; g < groups; ++g) {
    I b[kIntAcross];
#pragma GCC unroll 8
    for (int n = 0; n < kIntAcross; ++n) b[n] = LoadI(w + 4 * (g * kIntWide + n * kIntLanes));
#pragma GCC unroll 8
    for (int m = 0; m < kRowsHere; ++m) {
      int32_t four;
      __builtin_memcpy(&four, x + 4 * (g * kRowsHere + m), 4);
      const I a = SameI(four);
#pragma GCC unroll 8
      for (int n = 0; n < kIntAcross; ++n) sum[m][n] = Dot4(sum[m][n], b[n], a);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRowsHere; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kIntAcross; ++n) {
      const int at = n * kIntLanes;
      if (tile == nullptr) {
        StoreI(sums + m * ld_sums + at, sum[m][n]);
        continue;
      }
      I v = sum[m][n];
      if (tile->w_zero != nullptr) v = SubI(v, MulI(SameI(tile->x_sum[m]), LoadI(tile->w_zero + at)));
      if (tile->ones != nullptr) v = SubI(v, MulI(SameI(tile->x_zero[m]), LoadI(tile->ones + at)));
      const V scaled = Mul(Mul(FloatI(v), Same(tile->x_scale[m])), Load(tile->w_scale + at));
      float* c = tile->c + m * tile->ldc + at;
      Store(c, tile->adds ? Add(Load(c), scaled) : scaled);
    }
  }
}

typedef void (*IntegerStep)(const int8_t*, const uint8_t*, int64_t, const int32_t*, int32_t*, int64_t, const Tile*);

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

// Outputs of a chunk. Where they are columns, a row of w is another page for each, so more of it is read at a time.
static int64_t IntegerWidth(const IntegerJob& job) { return job.contracts_cols || job.N < 2048 ? kIntWide : 256; }

static int64_t IntegerChunks(const IntegerJob& job) {
  if (IsFew(job)) return (job.N + kFewWide - 1) / kFewWide;
  const int64_t width = IntegerWidth(job);
  return (job.N + width - 1) / width * ((job.M + kIntTall - 1) / kIntTall);
}

// The memory of one chunk.
struct IntegerScratch {
  uint8_t* panel;     // a segment of each strip
  int32_t* sums;      // [rows, width]
  float* c;           // [rows, width]
  float* scale;       // [width], of one tile, and likewise
  int32_t *zero, *ones;
  int8_t* every;      // a row of x that is one at each place of a segment
  IntegerScratch(int64_t strips, int64_t rows, int64_t width) {
    const int64_t size = strips * kSegment * kIntWide / 4;
    float* memory = Workspace(size + 2 * rows * width + 3 * width + kSegment / 4);
    panel = reinterpret_cast<uint8_t*>(memory);
    sums = reinterpret_cast<int32_t*>(memory + size);
    c = memory + size + rows * width;
    scale = c + rows * width;
    zero = reinterpret_cast<int32_t*>(scale + width);
    ones = zero + width;
    every = reinterpret_cast<int8_t*>(ones + width);
  }
};

// The sums of the codes of each output, less its zero point, over a tile: the product with a row of x that is one everywhere.
static void AddOnes(const IntegerJob& job, const Segment& segment, int64_t strips, int64_t width, const IntegerScratch& s) {
  const int64_t codes = 32 / job.bits;
  for (int64_t k = 0; k < 4 * segment.groups; ++k) {
    s.every[k] = (job.bits == 8 ? k : k / codes * codes + k % 4 * 2 + k % codes / 4) < segment.count;
  }
  const int32_t start = 0;
  for (int64_t i = 0; i < strips; ++i) {
    IntegerBlock<1>(s.every, s.panel + i * kSegment * kIntWide, segment.groups, segment.first ? &start : nullptr,
                    s.ones + i * kIntWide, width, nullptr);
  }
  const int32_t length = static_cast<int32_t>(segment.from + segment.count - segment.tile * job.tile);
  for (int64_t n = 0; segment.last && n < strips * kIntWide; ++n) {
    s.ones[n] -= length * (static_cast<int32_t>(AddedTo(job)) + (job.w_zero.data == nullptr ? 0 : s.zero[n]));
  }
}

static void LoadTile(const IntegerJob& job, int64_t t, int64_t n0, int64_t count, const IntegerScratch& s) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = n0 + i < job.N ? n0 + i : job.N - 1;
    s.scale[i] = job.w_scale.At(n, t);
    if (job.w_zero.data != nullptr) s.zero[i] = job.w_zero.At(n, t);
  }
}

// A segment of one strip, met by rows [m0, m0 + rows) of x.
static void RunStrip(const IntegerJob& job, const Segment& segment, const IntegerScratch& s, int64_t strip, int64_t m0,
                     int64_t rows, int64_t width) {
  const int64_t at = strip * kIntWide;
  Tile tile{};
  int32_t start[kIntRows];
  tile.w_scale = s.scale + at, tile.w_zero = job.w_zero.data == nullptr ? nullptr : s.zero + at;
  tile.ones = job.x_zero.data == nullptr ? nullptr : s.ones + at, tile.adds = segment.tile > 0, tile.ldc = width;
  for (int64_t m = 0; m < rows; m += kIntRows) {
    for (int64_t i = 0; i < kIntRows && m + i < rows; ++i) {
      tile.x_scale[i] = job.x_scale.At(m0 + m + i, segment.tile);
      tile.x_sum[i] = job.x_sums[(m0 + m + i) * job.tiles() + segment.tile];
      tile.x_zero[i] = job.x_zero.data == nullptr ? 0 : job.x_zero.At(m0 + m + i, segment.tile);
      start[i] = static_cast<int32_t>(-static_cast<uint32_t>(tile.x_sum[i]) * static_cast<uint32_t>(AddedTo(job)));
    }
    tile.c = s.c + m * width + at;
    IntegerBlockOf(rows - m)(job.x + 4 * (segment.at * job.M + (m0 + m) * segment.groups), s.panel + strip * kSegment * kIntWide,
                             segment.groups, segment.first ? start : nullptr, s.sums + m * width + at, width,
                             segment.last ? &tile : nullptr);
  }
}

static void RunIntegers(const IntegerJob& job, const std::vector<Segment>& segments, int64_t chunk) {
  if (IsFew(job)) return RunFew(job, chunk);
  const int64_t width = IntegerWidth(job), down = (job.M + kIntTall - 1) / kIntTall;
  const int64_t n0 = chunk / down * width, m0 = chunk % down * kIntTall, rows = job.M - m0 < kIntTall ? job.M - m0 : kIntTall;
  const int64_t count = job.N - n0 < width ? job.N - n0 : width, strips = (count + kIntWide - 1) / kIntWide;
  const IntegerScratch s(strips, rows, width);
  for (const Segment& segment : segments) {
    for (int64_t i = 0; i < strips; ++i) PackStrip(job, segment, n0 + i * kIntWide, s.panel + i * kSegment * kIntWide);
    if (segment.last) LoadTile(job, segment.tile, n0, strips * kIntWide, s);
    if (job.x_zero.data != nullptr) AddOnes(job, segment, strips, width, s);
    for (int64_t i = 0; i < strips; ++i) RunStrip(job, segment, s, i, m0, rows, width);
  }
  for (int64_t m = 0; m < rows; ++m) StoreRow(job, m0 + m, n0, count, s.c + m * width);
}
