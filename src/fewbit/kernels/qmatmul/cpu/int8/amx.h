// The micro-kernel of panels by AMX: one instruction multiplies 64 bytes of each of 16 rows of x by 16 groups of w for 16 outputs.
// Included in the namespace of its instruction set, in place of gemm.h's own `RunStrip`.
//
// A panel of w is what tile registers read: a group has four bytes of each output side by side, so 16 outputs of 16 groups are rows of
// 64 bytes. Rows of x lie one after another. Sums go from the registers to memory where a tile of the contraction ends, and are scaled
// from there with the operations of the other instruction sets, so that outputs have the same bits.
//
// Registers 0 to 3 are sums, 4 has x and 5 has w; 6 and 7 have the rest of a tile of scales that is no multiple of 64 bytes.

constexpr int kTileGroups = 16;             // in a register of x, and of w
constexpr int kTileWide = 16;               // outputs of a register
constexpr int64_t kTileRow = 4 * kIntWide;  // bytes from a group of a strip to the next one
constexpr int64_t kTilesAtOnce = 8;         // whose sums wait to be scaled

// The shapes of the registers for rows of x and a tile of so many groups: steps of `groups`, and a last one of `rest`, if that is not 0.
struct TileShapes {
  int rows, groups, rest;

  TileShapes(int64_t rows_of_x, int64_t of_tile)
      : rows(static_cast<int>(rows_of_x)),
        groups(static_cast<int>(of_tile < kTileGroups ? of_tile : kTileGroups)),
        rest(of_tile < kTileGroups ? 0 : static_cast<int>(of_tile % kTileGroups)) {}

  bool operator==(const TileShapes& other) const { return rows == other.rows && groups == other.groups && rest == other.rest; }

  // Gives the registers of this thread these shapes, if they have others. What they hold is lost then.
  void Set() const {
    if (Current() == *this) return;
    Current() = *this;
    TileRegisters registers;
    for (int tile = 0; tile < 4; ++tile) registers.Shape(tile, rows, 4 * kTileWide);
    registers.Shape(4, rows, 4 * groups), registers.Shape(5, groups, 4 * kTileWide);
    if (rest != 0) registers.Shape(6, rows, 4 * rest), registers.Shape(7, rest, 4 * kTileWide);
    registers.Load();
  }

  // Gives the registers back: the system needs longer to switch from a thread that holds them.
  static void Release() {
    _tile_release();
    Current() = TileShapes(0, 1);
  }

  static TileShapes& Current() {
    thread_local TileShapes shapes(0, 1);
    return shapes;
  }
};

// Adds the products of one tile for kColumns times 16 outputs to the registers from 0 on. `row`: bytes from a row of x to the next one.
#define ADD_COLUMN(sums, x, w, column)              \
  if constexpr (column < kColumns) {                \
    _tile_loadd(w, of_w + 64 * (column), kTileRow); \
    _tile_dpbsud(sums, x, w);                       \
  }
template <int kColumns>
INLINE void AddTile(const TileShapes& shapes, int64_t groups, const int8_t* of_x, int64_t row, const uint8_t* of_w) {
  for (; groups >= shapes.groups; groups -= shapes.groups, of_x += 4 * shapes.groups, of_w += kTileRow * shapes.groups) {
    _tile_loadd(4, of_x, row);
    ADD_COLUMN(0, 4, 5, 0)
    ADD_COLUMN(1, 4, 5, 1)
    ADD_COLUMN(2, 4, 5, 2)
    ADD_COLUMN(3, 4, 5, 3)
  }
  if (groups == 0) return;
  _tile_loadd(6, of_x, row);
  ADD_COLUMN(0, 6, 7, 0)
  ADD_COLUMN(1, 6, 7, 1)
  ADD_COLUMN(2, 6, 7, 2)
  ADD_COLUMN(3, 6, 7, 3)
}
#undef ADD_COLUMN

// Scales the sums of tiles for kRowsHere rows of x and 16 outputs, and adds them to c. `ld`: sums from one row to the next; `step`:
// from one tile to the next. Inline: as a call it takes a third longer.
template <int kRowsHere>
INLINE void EndTiles(int64_t rows_of_x, Tile tile, int64_t tiles, const int32_t* sums, int64_t ld, int64_t step, float* c, int64_t width,
                     bool begins) {
  V total[kRowsHere][1];
  if (begins) BeginOutputs(total);
  else LoadOutputs(c, width, total);
  for (int64_t t = 0; t < tiles; ++t, sums += step) {
    U sum[kRowsHere][1];
    UNROLL for (int m = 0; m < kRowsHere; ++m) sum[m][0] = LoadI(sums + m * ld) + SameI(tile.x_start[m]);
    EndTile(tile, sum, total);
    tile.Next(rows_of_x, width);
  }
  StoreOutputs(total, c, width);
}

// Up to 16 rows of x from m on, within a segment.
struct RowsOfX {
  const IntegerJob& job;
  const Segment& segment;
  const IntegerScratch& s;
  int64_t m, at, width;  // `at`: the first one's place in the memory of sums and outputs
  int64_t rows, stride;  // how many; bytes from one to the next
  const int8_t* x;

  RowsOfX(const IntegerJob& job, const Segment& segment, const IntegerScratch& s, int64_t m, int64_t row, int64_t width)
      : job(job), segment(segment), s(s), m(m), at(row * width), width(width), rows(job.M - m < kIntRows ? job.M - m : kIntRows),
        stride(4 * segment.groups), x(job.x + 4 * segment.at * job.M + m * stride) {}

  // Scales the sums of tiles from `first` on, for 16 outputs from n on.
  template <int kRowsHere>
  INLINE_MEMBER void EndSome(int64_t done, int64_t first, int64_t tiles, int64_t n, const int32_t* sums, int64_t ld, int64_t step) const {
    EndTiles<kRowsHere>(job.M, TileAt(job, segment, s, first, m + done, n, width), tiles, sums + done * ld, ld, step,
                        s.c + at + done * width + n, width, segment.tile + first == 0);
  }

  INLINE_MEMBER void End(int64_t first, int64_t tiles, int64_t n, const int32_t* sums, int64_t ld, int64_t step) const {
    if (rows == kIntRows) return EndSome<kIntRows>(0, first, tiles, n, sums, ld, step);
    int64_t done = 0;
    for (; done + 4 <= rows; done += 4) EndSome<4>(done, first, tiles, n, sums, ld, step);
    for (; done < rows; ++done) EndSome<1>(done, first, tiles, n, sums, ld, step);
  }

  // A tile or a part of one, whose sums are kept until its end.
  void RunPart(int64_t strip) const {
    const TileShapes shapes(rows, segment.groups);
    int32_t* sums = s.sums + at + strip * kIntWide;
    const int64_t ld = 4 * width;
    shapes.Set();
    if (segment.first) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, sums, ld);
      _tile_loadd(1, sums + kTileWide, ld);
      _tile_loadd(2, sums + 2 * kTileWide, ld);
      _tile_loadd(3, sums + 3 * kTileWide, ld);
    }
    AddTile<4>(shapes, segment.groups, x, stride, s.panel + strip * kSegment * kIntWide);
    _tile_stored(0, sums, ld);
    _tile_stored(1, sums + kTileWide, ld);
    _tile_stored(2, sums + 2 * kTileWide, ld);
    _tile_stored(3, sums + 3 * kTileWide, ld);
    for (int64_t j = 0; segment.last && j < kIntWide; j += kTileWide) End(0, 1, strip * kIntWide + j, sums + j, width, 0);
  }

  // Several tiles: those of 32 outputs at a time, then their scales.
  void RunTiles(int64_t strip) const {
    const int64_t each = job.tile / 4;
    const TileShapes shapes(rows, each);
    alignas(64) int32_t sums[2][kTilesAtOnce][kIntRows * kTileWide];
    const int8_t* next = x + kIntRows * stride;
    for (int64_t j = 0; j < kIntWide; j += 2 * kTileWide) {
      shapes.Set();
      for (int64_t first = 0; first < segment.tiles; first += kTilesAtOnce) {
        const int64_t tiles = segment.tiles - first < kTilesAtOnce ? segment.tiles - first : kTilesAtOnce;
        const int8_t* of_x = x + 4 * first * each;
        const uint8_t* of_w = s.panel + strip * kSegment * kIntWide + 4 * j + kTileRow * first * each;
        for (int64_t t = 0; t < tiles; ++t, of_x += 4 * each, of_w += kTileRow * each) {
          const int64_t left = segment.groups - (first + t) * each;
          const bool is_short = left < each;
          const TileShapes of_tile = is_short ? TileShapes(rows, left) : shapes;
          if (is_short) of_tile.Set();
          _tile_zero(0);
          _tile_zero(1);
          AddTile<2>(of_tile, is_short ? left : each, of_x, stride, of_w);
          _tile_stored(0, sums[0][t], 4 * kTileWide);
          _tile_stored(1, sums[1][t], 4 * kTileWide);
          UNROLL for (int i = 0; i < 4; ++i, next += 64) __builtin_prefetch(next);
        }
        for (int64_t i = 0; i < 2; ++i) {
          End(first, tiles, strip * kIntWide + j + i * kTileWide, sums[i][0], kTileWide, kIntRows * kTileWide);
        }
      }
    }
  }
};

// Up to 16 rows of x from m on, of a segment, times one strip.
static void RunStrip(const IntegerJob& job, const Segment& segment, const IntegerScratch& s, int64_t strip, int64_t m, int64_t row,
                     int64_t width) {
  asm volatile("" ::: "memory");  // the intrinsics do not tell the compiler what they read
  const RowsOfX rows(job, segment, s, m, row, width);
  if (segment.tiles == 1) rows.RunPart(strip);
  else rows.RunTiles(strip);
}
