// Both operands packed as the micro-kernel reads them: in groups of four bytes that follow each other along the contraction. Included
// in the namespace of an instruction set.
//
// A panel of w holds strips of kIntWide outputs, and each strip its groups: four bytes of every output. Codes of 4 bits are
// taken four bytes at a time, too: their low halves make one group, their high halves the next, and x is laid out alike.
// For smmla two groups are interleaved: eight bytes of every output, and of every row of x. For AMX each row of x is in one piece.

// A row of x within a segment, in the order in which the codes of w come.
static void Lay(int bits, const Segment& segment, const int8_t* from, int8_t* to) {
  int64_t k = bits == 8 ? segment.count : segment.count / 8 * 8;
  if (bits == 8) {
    std::memcpy(to, from, segment.count);
  } else {
    for (int64_t i = 0; i < k; i += 8) {
      for (int j = 0; j < 4; ++j) to[i + j] = from[i + 2 * j], to[i + 4 + j] = from[i + 2 * j + 1];
    }
  }
  for (; k < 4 * segment.groups; ++k) {
    const int64_t at = bits == 8 ? k : k / 8 * 8 + k % 4 * 2 + k % 8 / 4;
    to[k] = at < segment.count ? from[at] : int8_t{0};
  }
}

static int64_t IntegerRowBytes(const IntegerJob& job, const std::vector<Segment>& segments) {
  if (IsFew(job)) return FewRow(job);
  return segments.empty() ? 0 : 4 * (segments.back().at + segments.back().groups);
}

// A few rows of x, and w in rows of outputs: gemv_columns.h, which takes the groups of one row after another.
constexpr int64_t kAcrossRows = 4;
static bool IsAcross(const IntegerJob& job) { return !job.contracts_cols && job.M <= kAcrossRows && job.x_zero.data == nullptr; }

// Whether rows of x are scaled only after all tiles are added.
static bool ScalesLast(const IntegerJob& job) { return job.tiles() > 1 && job.x_scale.by_tile == 0; }

// A block of rows of x from row m on, the first kIntDeep bytes of each row, then the second ones; zeros where a segment fills no group.
// And the sums of each row by tiles, with their scales. `rows` are all rows of x, `out` and `tiles` the places for all of them.
static void Prepare(const IntegerJob& job, const std::vector<Segment>& segments, const int8_t* rows, int64_t m, int8_t* out,
                    const TilesOfX& tiles) {
  const int64_t block = job.M - m < kIntRows ? job.M - m : kIntRows;
  if (IsFew(job)) {
    for (int64_t i = 0; i < block; ++i) PrepareFew(job, rows, m + i, out, tiles.sums);
    return;
  }
  const int64_t row = IntegerRowBytes(job, segments);
  const uint32_t added = static_cast<uint32_t>(AddedTo(job));
  alignas(64) int8_t laid[kSegment];
  for (const Segment& segment : segments) {
    int8_t* to = out + 4 * (segment.at * job.M + m * segment.groups);
    for (int64_t i = 0; i < block; ++i, to += kIntDeep) {
      const int8_t* from = rows + (m + i) * job.K + segment.from;
      for (int64_t t = 0, k = 0; t < segment.tiles; ++t) {
        const int64_t end = t + 1 == segment.tiles ? segment.count : k + job.tile;
        int32_t sum = 0;
        for (; k < end; ++k) sum += from[k];
        const int64_t at = (segment.tile + t) * job.M + m + i;
        tiles.sums[at] = segment.first ? sum : tiles.sums[at] + sum;
        tiles.starts[at] = static_cast<int32_t>(-added * static_cast<uint32_t>(tiles.sums[at]));
        if (job.x_zero.data != nullptr) tiles.zeros[at] = job.x_zero.At(m + i, segment.tile + t);
        tiles.scales[at] = ScalesLast(job) ? 1.0f : job.x_scale.At(m + i, segment.tile + t);
        tiles.offsets[at] = tiles.scales[at] * static_cast<float>(tiles.sums[at]);
      }
      if (IsAcross(job)) {
        Lay(job.bits, segment, from, out + (m + i) * row + 4 * segment.at);
        continue;
      }
      if (FEWBIT_AMX) {
        Lay(job.bits, segment, from, out + 4 * (segment.at * job.M + (m + i) * segment.groups));
        continue;
      }
      Lay(job.bits, segment, from, laid);
      for (int64_t k = 0; k < 4 * segment.groups; k += kIntDeep) std::memcpy(to + k * block, laid + k, kIntDeep);
    }
  }
}

// Where a segment is in the bytes of w, along the contraction.
struct Stretch {
  int64_t from, count, fours;  // bytes; groups of four of them
  Stretch(const IntegerJob& job, const Segment& segment)
      : from(segment.from * job.bits / 8), count((segment.count * job.bits + 7) / 8), fours((count + 3) / 4) {}
};

// Where group g of a strip begins.
static inline int64_t GroupAt(int64_t g) { return 4 * g / kIntDeep * kIntDeep * kIntWide + 4 * g % kIntDeep; }

// Four bytes of each output of a vector.
static inline void StoreGroup(uint8_t* out, U fours) {
  if (kIntDeep == 4) return StoreI(out, fours);
  UNROLL for (int i = 0; i < kLanes; ++i) {
    const uint32_t four = fours[i];
    std::memcpy(out + kIntDeep * i, &four, 4);
  }
}

// Four bytes of each output of a vector as unsigned numbers: one group of 8 bits, or two of 4.
static inline void StoreFours(int bits, U fours, U flip, uint8_t* out) {
  if (bits == 8) return StoreGroup(out, fours ^ flip);
  const U low = SameI(0x0F0F0F0F);
  StoreGroup(out, (fours & low) ^ flip);
  StoreGroup(out + GroupAt(1), ((fours >> 4) & low) ^ flip);
}

// Rows of bytes of w [K, N], from one output on: `count` rows, and `outputs` bytes of each.
struct ByteRows {
  const uint8_t* first;
  int64_t stride, count, outputs;
};

// Bytes of the rows 4 * b to 4 * b + 3 side by side, for a vector of outputs from n on; in order, or as `PartsInOrder` expects them.
// Rows beyond the last are any, since x is zero there.
template <bool kInOrder>
static inline void LoadFours(const ByteRows& rows, int64_t b, int64_t n, U (&fours)[4]) {
  UNROLL for (int i = 0; i < 4; ++i) {
    const uint8_t* p = rows.first + (4 * b + i < rows.count ? 4 * b + i : 0) * rows.stride + n;
    __builtin_prefetch(p + 16 * rows.stride);
    fours[i] = LoadSome(p, rows.outputs - n);
    if (kInOrder) fours[i] = Spread(fours[i]);
  }
  SideBySide(fours);
}

constexpr int64_t kDeep = 4;  // groups of four rows of [K, N] that are read over all strips before the next ones

// A segment of the strips of w [K, N]. 16 rows are read over all strips before the next ones: 256 lines of the cache below each other,
// each in a page of its own, take twice as long as 16 x 4, which the processor foresees.
static void PackRows(int bits, const ByteRows& rows, U flip, int64_t strips, uint8_t* out) {
  const int64_t groups = 8 / bits, fours_count = (rows.count + 3) / 4;  // of four bytes of w
  for (int64_t from = 0; from < fours_count; from += kDeep) {
    for (int64_t n0 = 0; n0 < strips * kIntWide; n0 += kIntBytes) {
      for (int64_t b = from; b < fours_count && b < from + kDeep; ++b) {
        U fours[4];
        LoadFours<true>(rows, b, n0, fours);
        UNROLL for (int j = 0; j < 4; ++j) {
          const int64_t n = n0 + j * kLanes;
          StoreFours(bits, fours[j], flip, out + n / kIntWide * kSegment * kIntWide + GroupAt(b * groups) + n % kIntWide * kIntDeep);
        }
      }
    }
  }
}

// kLanes outputs from n0 on, from [N, K]: squares of words are transposed.
static void PackOutputs(const IntegerJob& job, const Stretch& bytes, int64_t n0, uint8_t* out) {
  const U flip = SameI(static_cast<int32_t>(Flipped(job) * 0x01010101u));
  const int64_t groups = 8 / job.bits;
  for (int64_t b = 0; b < bytes.fours; b += kLanes) {
    V rows[kLanes];
    UNROLL for (int i = 0; i < kLanes; ++i) {
      const bool is_there = n0 + i < job.N;
      const uint8_t* p = job.w + (is_there ? n0 + i : 0) * job.row_stride + bytes.from + 4 * b;
      __builtin_prefetch(p + 64);
      rows[i] = (V)LoadSome(p, is_there ? bytes.count - 4 * b : 0);
    }
    Transpose(rows);
    for (int i = 0; i < kLanes && b + i < bytes.fours; ++i) StoreFours(job.bits, (U)rows[i], flip, out + GroupAt((b + i) * groups));
  }
}

// A segment of the strips from n0 on.
static void Pack(const IntegerJob& job, const Segment& segment, int64_t n0, int64_t strips, uint8_t* panel) {
  const Stretch bytes(job, segment);
  if (!job.contracts_cols) {
    const ByteRows rows{job.w + bytes.from * job.row_stride + n0, job.row_stride, bytes.count, job.N - n0};
    return PackRows(job.bits, rows, SameI(static_cast<int32_t>(Flipped(job) * 0x01010101u)), strips, panel);
  }
  for (int64_t n = 0; n < strips * kIntWide; n += kLanes) {
    PackOutputs(job, bytes, n0 + n, panel + n / kIntWide * kSegment * kIntWide + n % kIntWide * kIntDeep);
  }
}
