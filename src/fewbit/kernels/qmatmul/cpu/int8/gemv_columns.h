// A few rows of x, and w in rows of outputs ([K, N]): four rows of w are interleaved in registers and multiplied by x. Included
// in the namespace of an instruction set.
//
// It is the product by panels without the panel, which would go out to the second cache and come back: of a strip, the sums of
// few rows take little memory, so 16 rows of w are added to them before the next strip's. Sums are in the order that putting rows
// side by side makes of outputs, until a tile ends. Codes of blocks are looked up in a register if they have 4 bits; other widths,
// 16 rows at a time, are decoded to bytes first.

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512 || (FEWBIT_ARM64 && FEWBIT_VNNI)
constexpr int kAcrossAtOnce = 4;  // rows of x whose sums have room in registers
#else
constexpr int kAcrossAtOnce = FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2 || FEWBIT_ARM64 ? 2 : 1;
#endif

// What the steps of one product share.
struct Across {
  U table, flip;  // of codes of 4 bits, and of 8
  int64_t row;        // bytes of a row of x
  int32_t added;      // to the numbers of w

  Across(const IntegerJob& job, const BlockJob* blocks) : flip(SameI(static_cast<int32_t>(Flipped(job) * 0x01010101u))) {
    alignas(16) uint8_t numbers[16];
    for (int i = 0; i < 16; ++i) numbers[i] = blocks == nullptr ? static_cast<uint8_t>(i ^ Flipped(job)) : blocks->numbers[i];
    table = TableI(numbers), added = static_cast<int32_t>(AddedTo(job));
  }
};

// Groups of four rows [from, end) of w, for one vector of outputs from n on.
template <int kBits, int kM>
static void AddAcross(const Across& across, const ByteRows& w, int64_t from, int64_t end, int64_t n, const int8_t* x,
                      const int32_t* x_start, int32_t* sums, int64_t ld_sums) {
  constexpr int kParts = kBits == 4 ? 2 : 1;
  const U low = SameI(0x0F0F0F0F);
  U sum[kM][4];
  UNROLL for (int m = 0; m < kM; ++m) {
    UNROLL for (int j = 0; j < 4; ++j) {
      sum[m][j] = x_start == nullptr ? LoadI(sums + m * ld_sums + j * kLanes) : SameI(x_start[m]);
    }
  }
  for (int64_t b = from; b < end; ++b, x += 4 * kParts) {
    U fours[4];
    LoadFours<false>(w, b, n, fours);
    UNROLL for (int j = 0; j < 4; ++j) {
      U bytes[kParts];
      if constexpr (kBits == 4) {
        bytes[0] = Looked(across.table, fours[j] & low), bytes[1] = Looked(across.table, (fours[j] >> 4) & low);
      } else {
        bytes[0] = kBits == kDecoded ? fours[j] : fours[j] ^ across.flip;
      }
      UNROLL for (int m = 0; m < kM; ++m) {
        U of_x[kParts];
        UNROLL for (int i = 0; i < kParts; ++i) {
          int32_t four;
          __builtin_memcpy(&four, x + m * across.row + 4 * i, 4);
          of_x[i] = SameI(four);
        }
        sum[m][j] = AddProducts<kBits>(sum[m][j], bytes, of_x);
      }
    }
  }
  UNROLL for (int m = 0; m < kM; ++m) {
    UNROLL for (int j = 0; j < 4; ++j) StoreI(sums + m * ld_sums + j * kLanes, sum[m][j]);
  }
}

// The sums of one vector of outputs as scaled floats, its outputs in order.
template <int kM>
static void EndAcross(const IntegerJob& job, const Segment& segment, const IntegerScratch& s, int64_t t, int64_t n, int64_t row,
                      int64_t width) {
  U v[kM][4];
  UNROLL for (int m = 0; m < kM; ++m) {
    UNROLL for (int j = 0; j < 4; ++j) v[m][j] = LoadI(s.sums + (row + m) * width + n + j * kLanes);
    PartsInOrder(v[m]);
  }
  UNROLL for (int part = 0; part < 4 / kIntAcross; ++part) {
    U sum[kM][kIntAcross];
    UNROLL for (int m = 0; m < kM; ++m) {
      UNROLL for (int j = 0; j < kIntAcross; ++j) sum[m][j] = v[m][part * kIntAcross + j];
    }
    const int64_t from = n + part * kIntWide;
    float* outputs = s.c + row * width + from;
    V c[kM][kIntAcross];
    if (segment.tile + t == 0) BeginOutputs<kM>(c);
    else LoadOutputs<kM>(outputs, width, c);
    EndTile<kM>(TileAt(job, segment, s, t, row, from, width), sum, c);
    StoreOutputs<kM>(c, outputs, width);
  }
}

// Rows of x from `row` on, and `count` outputs of w from n0 on.
template <int kBits, int kM>
static void AcrossTiles(const IntegerJob& job, const Across& across, const Segment& segment, const IntegerScratch& s, int64_t n0,
                        int64_t count, int64_t row, int64_t width) {
  const Stretch bytes(job, segment);
  const BlockJob* blocks = job.blocks;
  const uint8_t* w = blocks == nullptr ? job.w : blocks->w.codes;
  const int64_t stride = blocks == nullptr ? job.row_stride : blocks->w.row_stride;
  const bool is_decoded = blocks != nullptr && job.bits != blocks->w.bits;
  constexpr int kGroups = kBits == 4 ? 2 : 1;  // of x, for four rows of bytes
  ByteRows rows{w + bytes.from * stride + n0, stride, bytes.count, count};
  if (is_decoded) rows = {s.decoded, width, 4 * kDeep, width};
  for (int64_t t = 0; t < segment.tiles; ++t) {
    const int32_t* x_start = job.x_starts + (segment.tile + t) * job.M + row;
    const int64_t first = GroupsBefore(job, segment, t) / kGroups, end = GroupsBefore(job, segment, t + 1) / kGroups;
    for (int64_t b = first; b < end; b += kDeep) {
      const int64_t stop = b + kDeep < end ? b + kDeep : end, base = is_decoded ? b : 0;
      if (is_decoded) {
        rows.count = 4 * stop < segment.count ? 4 * (stop - b) : segment.count - 4 * b;
        DecodeRows(*blocks, segment.from + 4 * b, rows.count, n0, count, width, blocks->offset - across.added, s.decoded);
      }
      const int8_t* x = job.x + row * across.row + 4 * (segment.at + b * kGroups);
      for (int64_t n = 0; n < count; n += kIntBytes) {
        AddAcross<kBits, kM>(across, rows, b - base, stop - base, n, x, segment.first && b == first ? x_start : nullptr,
                             s.sums + row * width + n, width);
      }
    }
    for (int64_t n = 0; segment.last && n < count; n += kIntBytes) EndAcross<kM>(job, segment, s, t, n, row, width);
  }
}

static void RunAcross(const IntegerJob& job, const Segment& segment, const IntegerScratch& s, int64_t n0, int64_t count,
                      int64_t width, int64_t x_row) {
  typedef void (*Run)(const IntegerJob&, const Across&, const Segment&, const IntegerScratch&, int64_t, int64_t, int64_t, int64_t);
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512 || (FEWBIT_ARM64 && FEWBIT_VNNI)
  static const Run bytes[] = {AcrossTiles<8, 1>, AcrossTiles<8, 2>, AcrossTiles<8, 3>, AcrossTiles<8, 4>};
  static const Run halves[] = {AcrossTiles<4, 1>, AcrossTiles<4, 2>, AcrossTiles<4, 3>, AcrossTiles<4, 4>};
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2 || FEWBIT_ARM64
  static const Run bytes[] = {AcrossTiles<8, 1>, AcrossTiles<8, 2>}, halves[] = {AcrossTiles<4, 1>, AcrossTiles<4, 2>};
#else
  static const Run bytes[] = {AcrossTiles<8, 1>}, halves[] = {AcrossTiles<4, 1>};
#endif
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2 && !FEWBIT_VNNI
  static const Run decoded[] = {AcrossTiles<kDecoded, 1>, AcrossTiles<kDecoded, 2>};
#else
  const Run* decoded = bytes;
#endif
  Across across(job, job.blocks);
  across.row = x_row;
  const bool is_decoded = job.blocks != nullptr && job.bits != job.blocks->w.bits;
  if (is_decoded) across.flip = SameI(0);
  const Run* run = is_decoded ? decoded : job.bits == 8 ? bytes : halves;
  for (int64_t m = 0; m < job.M; m += kAcrossAtOnce) {
    run[(job.M - m < kAcrossAtOnce ? job.M - m : kAcrossAtOnce) - 1](job, across, segment, s, n0, count, m, width);
  }
}
