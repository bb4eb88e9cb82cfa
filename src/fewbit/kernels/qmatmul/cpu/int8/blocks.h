// Rows of x times rows of w whose scales change every few places: each row of w is read once, in place. Included in the namespace of
// an instruction set.
//
// A quarter of a register, 16 bytes of w, is a piece of one block, or of two where blocks are 8 bytes. Four rows of w are multiplied by
// each vector of x, and a tree of additions turns their lanes into one sum for each row and quarter. As many rows as there are lanes
// are multiplied at each place; then their sums change places, so that a vector has one block of all rows, and a block ends with one
// conversion and one multiply-add, whose latency the products at the next place hide. Codes of 4 bits that have some bits flipped are
// unflipped, others are looked up in a register, which serves every format of small integers. Codes of other widths are decoded to
// bytes first (decode_bytes.h), and those of 8 bits are multiplied as they are.
//
// Blocks are added in order, with the operations of the panels (gemm.h): an output has the same bits in both.

constexpr int kQuarters = kLanes / 4;
constexpr int64_t kFewBlockRows = 12;  // for which a weight is not worth packing
constexpr int64_t kBlockOutputs = 64;  // of a chunk

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
static inline U PairsI(U a, U b) {
  return (U)_mm512_shuffle_ps((V)a, (V)b, 0x88) + (U)_mm512_shuffle_ps((V)a, (V)b, 0xDD);
}
static inline U EvenI(U a, U b) {
  return (U)_mm512_shuffle_ps((V)a, (V)b, 0x88);
}
static inline U OddI(U a, U b) {
  return (U)_mm512_shuffle_ps((V)a, (V)b, 0xDD);
}
// Quarter i of vector j becomes quarter j of vector i.
static inline void TransposeQuarters(U (&v)[4]) { PartsInOrder(v); }
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
static inline U EvenI(U a, U b) {
  return (U)_mm256_shuffle_ps((V)a, (V)b, 0x88);
}
static inline U OddI(U a, U b) {
  return (U)_mm256_shuffle_ps((V)a, (V)b, 0xDD);
}
static inline U PairsI(U a, U b) { return (U)_mm256_hadd_epi32((__m256i)a, (__m256i)b); }
static inline void TransposeQuarters(U (&v)[2]) {
  const __m256i a = (__m256i)v[0], b = (__m256i)v[1];
  v[0] = (U)_mm256_permute2x128_si256(a, b, 0x20), v[1] = (U)_mm256_permute2x128_si256(a, b, 0x31);
}
#else
static inline U EvenI(U a, U b) { return U{a[0], a[2], b[0], b[2]}; }
static inline U OddI(U a, U b) { return U{a[1], a[3], b[1], b[3]}; }
static inline U PairsI(U a, U b) { return EvenI(a, b) + OddI(a, b); }
static inline void TransposeQuarters(U (&)[1]) {}
#endif

// Whether a block job is multiplied as an IntegerJob (gemm.h): [K, N]; and of many rows of x, where one instruction multiplies bytes,
// or numbers are so small that AVX2 adds their products in 16 bits.
static bool TakesPanels(const BlockJob& job) {
  constexpr bool kHasByteDot = FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512 || FEWBIT_VNNI;
  if (!job.contracts_cols) return true;
  return job.M > kFewBlockRows && (kHasByteDot || (FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2 && GroupsOfPairs(job.largest) > 1));
}

// The IntegerJob whose weight are the numbers of a block job. They have 8 bits, but for a few rows of x, which read codes of 4 in place.
static IntegerJob PanelsOf(const BlockJob& job) {
  IntegerJob panels{};
  panels.M = job.M, panels.N = job.N, panels.K = job.depth(), panels.tile = job.block, panels.contracts_cols = job.contracts_cols;
  panels.x_scale = job.x_scale, panels.blocks = &job, panels.y = job.y, panels.y_kind = job.y_kind;
  panels.bits = 8, panels.offset = job.offset, panels.largest = job.largest;
  const bool is_across = IsAcross(panels), is_byte = job.w.bits == 8;
  if (is_across && job.w.bits == 4 && !IsDecoded(job)) panels.bits = 4;
  else if (FEWBIT_ARM64) panels.offset = 128 + (is_byte ? job.offset : 0);  // its bytes are signed
  else if (is_across && kSignedBytes && !is_byte) panels.offset = 0;
  return panels;
}

static bool ScalesLast(const BlockJob& job) { return job.blocks() > 1 && job.x_scale.by_tile == 0; }

// What the bytes of w have more than its numbers.
static uint32_t AddedTo(const BlockJob& job) { return IsDecoded(job) && kSignedBytes ? 0 : static_cast<uint32_t>(job.offset); }

// The sum of 16 signed bytes: blocks of 32 are shorter than a register of AVX-512.
INLINE int32_t SumOf16(const int8_t* x) {
#if FEWBIT_X86
  const __m128i unsigned_bytes = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)), _mm_set1_epi8(-128));
  const __m128i halves = _mm_sad_epu8(unsigned_bytes, _mm_setzero_si128());
  return _mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - 16 * 128;
#elif FEWBIT_ARM64
  return vaddlvq_s8(vld1q_s8(x));
#else
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += x[i];
  return sum;
#endif
}

static int32_t SumOfBytes(const int8_t* x, int64_t count) {
  int64_t i = 0;
  int32_t sum = 0;
  if (count >= kIntBytes) {
    const U ones = SameBytes(1);
    U four = SameI(0);
    for (; i + kIntBytes <= count; i += kIntBytes) four = Dot4(four, ones, LoadI(x + i));
    sum = static_cast<int32_t>(SumOfInts(four));
  }
  for (; i + 16 <= count; i += 16) sum += SumOf16(x + i);
  for (; i < count; ++i) sum += x[i];
  return sum;
}

// Bytes of a row of x as `LayBlocks` lays it out.
static int64_t BlockRowBytes(const BlockJob& job) {
  if (IsDecoded(job)) return DecodedBytes(job);
  return (job.w.row_stride + kIntBytes - 1) / kIntBytes * kIntBytes * (8 / job.w.bits);
}

// Row m of x in the order of w's codes, vector by vector: of 4 bits those of the low halves, then those of the high halves; zeros
// beyond K. And what `job.x_blocks` has of it.
static void LayBlocks(const BlockJob& job, const int8_t* rows, int64_t m, int8_t* out) {
  const int8_t* from = rows + m * job.K;
  int8_t* to = out + m * BlockRowBytes(job);
  const bool is_split = job.w.bits == 4 && !IsDecoded(job);  // bytes have two codes
  const int64_t step = is_split ? 2 * kIntBytes : kIntBytes;
  int64_t group = 0, place = 0;
  for (int64_t begin = 0; begin < BlockRowBytes(job); begin += step, to += step) {
    int8_t ordered[2 * kIntBytes];
    const int8_t* codes = from + begin;
    if (job.order != nullptr) {
      for (int64_t i = 0; i < step; ++i) {
        const int64_t code = group + job.order[place];
        if (++place == job.group) place = 0, group += job.group;
        ordered[i] = code < job.K ? from[code] : int8_t{0};
      }
      codes = ordered;
    } else if (job.K - begin < step) {
      std::memset(ordered, 0, sizeof(ordered));
      if (begin < job.K) std::memcpy(ordered, codes, job.K - begin);
      codes = ordered;
    }
    if (is_split) {
      for (int64_t i = 0; i < kIntBytes; ++i) to[i] = codes[2 * i], to[kIntBytes + i] = codes[2 * i + 1];
    } else {
      std::memcpy(to, codes, kIntBytes);
    }
  }
  const bool scales_last = ScalesLast(job);
  const uint32_t added = AddedTo(job);
  for (int64_t t = 0; t < job.blocks(); ++t) {
    const int64_t begin = t * job.block, end = begin + job.block < job.K ? begin + job.block : job.K;
    const int32_t sum = SumOfBytes(from + begin, end - begin);
    const float scale = scales_last ? 1.0f : job.x_scale.At(m, t);
    job.x_blocks[m * job.blocks() + t] = {sum, static_cast<int32_t>(static_cast<uint32_t>(sum) * added), scale,
                                          scale * static_cast<float>(sum)};
  }
}

// What the rows of w that are multiplied together have at each block: vectors of scales, and of zero points.
struct BlockScales {
  float *scale, *zero;

  static int64_t Room(const BlockJob& job) { return (job.blocks() + kShorts + kLanes - 1) / kLanes * kLanes; }

  // Asks for what `Load` reads of kLanes rows from n0 on: a line or two at a time, too few for the processor to foresee the next ones.
  static void Prefetch(const BlockJob& job, const StoredScales& stored, int64_t n0) {
    const int64_t row = job.w.tiles_per_row * SizeOf(stored.type);
    const char* first = static_cast<const char*>(stored.data) + n0 / job.w.row_tile * row;
    const char* end = static_cast<const char*>(stored.data) + ((n0 + kLanes - 1) / job.w.row_tile + 1) * row;
    for (; first < end; first += 64) __builtin_prefetch(first, 0, 2);
  }

  static void Load(const BlockJob& job, const StoredScales& stored, float unit, int64_t n0, float* rest, float* out) {
    LoadTiles(job, stored, unit, n0, rest, out);
    const int64_t share = job.share();
    for (int64_t t = job.w.tiles_per_row - 1, end = job.blocks(); share > 1 && t >= 0; --t) {  // from the last: each moves up
      V v;
      std::memcpy(&v, out + t * kLanes, sizeof(v));
      for (; end > t * share; --end) Store(out + (end - 1) * kLanes, v);
    }
  }

  // Writes whole groups of kShorts vectors.
  template <bool kIsBrain>
  static void LoadShorts(const uint16_t* rows, int64_t tiles, float unit, float* out) {
    for (int64_t t = 0; t < tiles; t += kShorts, out += kShorts * kLanes) {
      H column[kShorts];
      ShortsOfRows(rows + t, tiles, column);
      UNROLL for (int i = 0; i < kShorts; ++i) {
        Store(out + i * kLanes, Mul(kIsBrain ? FromBrain(column[i]) : FromHalf(column[i]), Same(unit)));
      }
    }
  }

  // One vector for each tile of w.
  static void LoadTiles(const BlockJob& job, const StoredScales& stored, float unit, int64_t n0, float* rest, float* out) {
    const int64_t tiles = job.w.tiles_per_row, room = (tiles + kLanes - 1) / kLanes * kLanes;
    const bool is_run = job.w.row_tile == 1 && n0 + kLanes <= job.N;
    if (is_run && SizeOf(stored.type) == 2) {
      // Rows of several lines are copied first: lines in order are what the processor fetches ahead. Shorter ones are not: loads
      // across what two stores have just written wait for them.
      const uint16_t* rows = static_cast<const uint16_t*>(stored.data) + n0 * tiles;
      const int64_t read = (tiles + kShorts - 1) / kShorts * kShorts;  // of the last row: into the next one
      if (2 * tiles > 64 || (job.N - n0 - kLanes) * tiles < read - tiles) {
        rows = static_cast<const uint16_t*>(std::memcpy(rest, rows, kLanes * tiles * 2));
      }
      return stored.type == ScaleType::kBF16 ? LoadShorts<true>(rows, tiles, unit, out) : LoadShorts<false>(rows, tiles, unit, out);
    }
    if (is_run) LoadScales(stored, n0 * tiles, kLanes * tiles, unit, rest);
    for (int64_t i = 0; !is_run && i < kLanes; ++i) {
      const int64_t n = n0 + i < job.N ? n0 + i : job.N - 1;
      LoadScales(stored, n / job.w.row_tile * tiles, tiles, unit, rest + i * room);
    }
    for (int64_t t = 0; t < room; t += kLanes) Transpose(rest + t, is_run ? tiles : room, out + t * kLanes, kLanes);
  }
};

// The outputs plus those of one block.
static inline V EndBlock(Zero role, const float* scale, const float* zero, const BlockOfX& x, U sum, V total) {
  sum -= SameI(x.added);
  if (role == Zero::kWhole) sum -= SameI(x.sum) * (U)__builtin_convertvector(Load(zero), I);
  total = MulAdd(Mul(FloatI(sum), Same(x.scale)), Load(scale), total);
  return role == Zero::kOffset ? MulAdd(Load(zero), Same(x.offset), total) : total;
}

// Where kLanes rows of w are read: in place, decoded, or copied. A vector that begins in the last one can be read.
struct BlockBytes {
  const uint8_t* first;
  int64_t length, stride, ahead;  // `ahead`: how far to prefetch
};

// The numbers of codes: those of 4 bits are looked up, unless they only have some bits flipped.
template <int kBits, bool kIsLooked>
struct NumbersOfCodes {
  static constexpr int kVectors = kBits == 4 ? 2 : 1;
  U table_or_flip;

  explicit NumbersOfCodes(const BlockJob& job)
      : table_or_flip(kIsLooked ? TableI(job.numbers) : SameBytes(kBits == 4 ? job.flip * 0x11 : job.flip)) {}

  INLINE_MEMBER void Of(U codes, U (&w)[kVectors]) const {
    w[0] = kBits == kDecoded || kIsLooked ? codes : codes ^ table_or_flip;
    if constexpr (kBits == 4) {
      const U low = SameI(0x0F0F0F0F);
      w[1] = (w[0] >> 4) & low, w[0] &= low;
      if constexpr (kIsLooked) w[0] = Looked(table_or_flip, w[0]), w[1] = Looked(table_or_flip, w[1]);
    }
  }
};

// kLanes outputs of kRows rows of x, from n0 and m0 on. kPieces: blocks that a quarter of a register has a part of. The last vector of
// a row of w may have bytes of the next one, where x is zero.
template <int kBits, bool kIsLooked, int kPieces, int kRows>
static void BlockOutputs(const BlockJob& job, const BlockBytes& bytes, const BlockScales& scales, int64_t n0, int64_t m0) {
  constexpr int kVectors = kBits == 4 ? 2 : 1, kCodeBits = kBits == kDecoded ? 8 : kBits;
  const NumbersOfCodes<kBits, kIsLooked> numbers(job);
  const int64_t ldx = BlockRowBytes(job), blocks = job.blocks(), parts = job.block * kCodeBits * kPieces / 128;
  const int64_t stride = bytes.stride, ahead = bytes.ahead;
  const int8_t* x = job.x + m0 * ldx;
  const BlockOfX *of_x = job.x_blocks + m0 * blocks, *last = of_x + blocks;
  const float* scale = scales.scale;
  const int64_t to_zero = scales.zero - scales.scale;
  const Zero role = job.w.role;
  U block[kRows];
  V total[kRows];
  UNROLL for (int m = 0; m < kRows; ++m) block[m] = SameI(0), total[m] = Same(-0.0f);  // which changes no number that is added to it
  int64_t left = parts;  // of the current block
  const auto end_block = [&] {
    UNROLL for (int m = 0; m < kRows; ++m) {
      total[m] = EndBlock(role, scale, scale + to_zero, of_x[m * blocks], block[m], total[m]);
      block[m] = SameI(0);
    }
    left = parts, ++of_x, scale += kLanes;
  };
  const uint8_t *place = bytes.first, *end = place + bytes.length;
  for (; place < end; place += kIntBytes, x += kIntBytes * kVectors) {
    U of_quarter[kRows][kPieces][kQuarters];
    const uint8_t* row = place;
    UNROLL for (int q = 0; q < kQuarters; ++q, row += 4 * stride) {
      U w[4][kVectors];
      UNROLL for (int j = 0; j < 4; ++j) numbers.Of(LoadI(row + j * stride), w[j]);
      UNROLL for (int j = 0; kBits != kDecoded && j < 4; ++j) __builtin_prefetch(row + ahead + j * stride, 0, 2);
      UNROLL for (int m = 0; m < kRows; ++m) {
        U v[4], from_x[kVectors];
        UNROLL for (int i = 0; i < kVectors; ++i) from_x[i] = LoadI(x + m * ldx + i * kIntBytes);
        UNROLL for (int j = 0; j < 4; ++j) v[j] = AddProducts<kBits>(SameI(0), w[j], from_x);
        const U a = PairsI(v[0], v[1]), b = PairsI(v[2], v[3]);
        if constexpr (kPieces == 1) of_quarter[m][0][q] = PairsI(a, b);
        else of_quarter[m][0][q] = EvenI(a, b), of_quarter[m][1][q] = OddI(a, b);
      }
    }
    UNROLL for (int m = 0; m < kRows; ++m) {
      UNROLL for (int piece = 0; piece < kPieces; ++piece) TransposeQuarters(of_quarter[m][piece]);
    }
    UNROLL for (int i = 0; i < kQuarters * kPieces; ++i) {
      if (of_x == last) break;
      UNROLL for (int m = 0; m < kRows; ++m) block[m] += of_quarter[m][i % kPieces][i / kPieces];
      if (--left == 0) end_block();
    }
  }
  if (of_x != last) end_block();  // shorter than the others
  for (int m = 0; m < kRows; ++m) {
    if (ScalesLast(job)) total[m] = Mul(total[m], Same(job.x_scale.At(m0 + m, 0)));
    float y[kLanes];
    Store(y, total[m]);
    for (int64_t i = 0; i < kLanes && n0 + i < job.N; ++i) StoreFloat(job.y, job.y_kind, (m0 + m) * job.N + n0 + i, y[i]);
  }
}

// Bytes of `scratch` below.
static int64_t ScratchBytes(const BlockJob& job) {
  return kLanes * (IsDecoded(job) ? DecodedStride(job) : job.w.row_stride) + kIntBytes;
}

// The rows of w from n0 on; what is beyond the last one may be anything.
template <int kBits>
static BlockBytes RowsFrom(const BlockJob& job, int64_t n0, uint8_t* scratch) {
  const int64_t rows = job.N - n0 < kLanes ? job.N - n0 : kLanes, stride = job.w.row_stride;
  if constexpr (kBits == kDecoded) {
    const BlockBytes bytes{scratch, DecodedBytes(job), DecodedStride(job), 0};
    for (int64_t i = 0; i < rows; ++i) DecodeBytes<kSignedBytes>(job, n0 + i, scratch + i * bytes.stride);
    return bytes;
  }
  const uint8_t* first = job.w.codes + n0 * stride;
  const int64_t read = (kLanes - 1) * stride + (stride + kIntBytes - 1) / kIntBytes * kIntBytes, there = (job.N - n0) * stride;
  if (read <= there) return {first, stride, stride, PrefetchDistance(stride)};
  std::memcpy(scratch, first, rows * stride);
  return {scratch, stride, stride, 0};
}

// kLanes outputs of all rows of x.
template <int kBits, bool kIsLooked, int kPieces>
static void AllBlockOutputs(const BlockJob& job, const BlockScales& scales, int64_t n0, uint8_t* scratch) {
  const BlockBytes bytes = RowsFrom<kBits>(job, n0, scratch);
  int64_t m = 0;
  for (; m + 4 <= job.M; m += 4) BlockOutputs<kBits, kIsLooked, kPieces, 4>(job, bytes, scales, n0, m);
  for (; m + 2 <= job.M; m += 2) BlockOutputs<kBits, kIsLooked, kPieces, 2>(job, bytes, scales, n0, m);
  if (m < job.M) BlockOutputs<kBits, kIsLooked, kPieces, 1>(job, bytes, scales, n0, m);
}

static int64_t BlockChunks(const BlockJob& job) { return (job.N + kBlockOutputs - 1) / kBlockOutputs; }

static void RunBlocks(const BlockJob& job, int64_t chunk) {
  typedef void (*Outputs)(const BlockJob&, const BlockScales&, int64_t, uint8_t*);
  const int64_t room = BlockScales::Room(job) * kLanes, end = (chunk + 1) * kBlockOutputs;
  float* rest = Workspace(3 * room + (ScratchBytes(job) + 3) / 4);
  const BlockScales scales{rest + room, rest + 2 * room};
  uint8_t* scratch = reinterpret_cast<uint8_t*>(rest + 3 * room);
  static const Outputs of_4_bits[2][2] = {{AllBlockOutputs<4, false, 1>, AllBlockOutputs<4, false, 2>},
                                          {AllBlockOutputs<4, true, 1>, AllBlockOutputs<4, true, 2>}};
  const Outputs outputs = IsDecoded(job)    ? AllBlockOutputs<kDecoded, false, 1>
                          : job.w.bits == 8 ? AllBlockOutputs<8, false, 1>
                                            : of_4_bits[!job.is_flipped][job.block % 32 != 0];
  const bool has_zero = job.w.role != Zero::kNone;
  const int64_t ahead = PrefetchDistance(job.w.row_stride) / job.w.row_stride;
  for (int64_t n0 = chunk * kBlockOutputs; n0 < end && n0 < job.N; n0 += kLanes) {
    if (n0 + ahead < job.N) BlockScales::Prefetch(job, job.w.scale, n0 + ahead);
    if (has_zero && n0 + ahead < job.N) BlockScales::Prefetch(job, job.w.zero, n0 + ahead);
    BlockScales::Load(job, job.w.scale, job.w.unit, n0, rest, scales.scale);
    if (has_zero) BlockScales::Load(job, job.w.zero, 1.0f, n0, rest, scales.zero);
    outputs(job, scales, n0, scratch);
  }
}
