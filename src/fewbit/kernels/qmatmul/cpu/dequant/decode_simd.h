// Codes to numbers within registers, for the formats and layouts where that is fast. Included in the namespace of an instruction set.
//
// A lane of a block holds `kSteps` neighbouring codes, and step i decodes code i of every lane. Along contracted columns
// x is permuted to the same order beforehand (BlockedX), and a lane has one scale as long as its codes are in one tile.
// Along columns that are outputs, a lane's bytes are neighbouring outputs, and are interleaved: first those of all lanes' first
// bytes, then those of their second ones.
//
// First what is AVX-512's own; decode_simd256.h has that of the others. What follows serves all.

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512

// Integers of 8 bits along a row. A permutation of bytes puts one of each lane into the low bits of 2**23, which spares a shift.
struct Bytes {
  static constexpr int kSteps = 4, kLaneBytes = 4, kBytes = 64;
  struct Table {
    __m512i flip, place[4], number;
    V bias;
  };
  __m512i raw;
  static Table TableOf(const Weight& w) {
    const int sign = w.kind == Codes::kSigned ? 128 : 0;
    Table t;
    t.flip = _mm512_set1_epi8(static_cast<char>(sign)), t.number = _mm512_set1_epi32(0x4B000000);
    t.bias = Same(8388608.0f + static_cast<float>(sign));
    alignas(64) uint8_t place[64];
    UNROLL for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 64; ++j) place[j] = static_cast<uint8_t>(j / 4 * 4 + i);
      t.place[i] = _mm512_load_si512(place);
    }
    return t;
  }
  static __m512i Lanes(const uint8_t* p, int64_t left, const Table& t) { return _mm512_xor_si512(BytesAt(p, left), t.flip); }
  Bytes() = default;
  Bytes(__m512i lanes, int) : raw(lanes) {}
  Bytes(const uint8_t* p, int64_t left, const Table& t) : raw(Lanes(p, left, t)) {}
  V At(int i, const Table& t) const {
    return Sub(AsFloats(_mm512_mask_permutexvar_epi8(t.number, 0x1111111111111111, t.place[i], raw)), t.bias);
  }
};

// e4m3fn and e5m2 by way of float16, whose bits hold theirs: e4m3's number is 2**8 times that of its bits one place lower (the
// scale takes the factor), and only its NaN, which there would be 1.875, is put in by hand.
template <bool kIsE4M3>
struct Float8 {
  static constexpr int kSteps = 2, kLaneBytes = 2, kBytes = 32, kByteRows = 1;
  struct Table {};
  __m256i raw;
  static Table TableOf(const Weight&) { return {}; }
  static __m512i Lanes(const uint8_t* p, int64_t left, Table) { return BytesAt(p, left); }
  Float8() = default;
  Float8(__m512i lanes, int half) : raw(_mm512_cvtepi32_epi16(_mm512_srl_epi32(lanes, _mm_cvtsi32_si128(16 * half)))) {}
  Float8(const uint8_t* p, int64_t, int64_t, int64_t left) : Float8(p, left, Table{}) {}
  Float8(const uint8_t* p, int64_t left, Table) {
    raw = left >= 32 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                     : _mm256_maskz_loadu_epi8(left <= 0 ? 0 : (1u << left) - 1, p);
  }
  V At(int i, Table) const {
    if (!kIsE4M3) return _mm512_cvtph_ps(i == 0 ? _mm256_slli_epi16(raw, 8) : _mm256_andnot_si256(_mm256_set1_epi16(0xFF), raw));
    const __m256i high = i == 0 ? _mm256_slli_epi16(raw, 8) : raw, kept = _mm256_set1_epi16(static_cast<short>(0xBF80));
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), kept);
    const __m256i nan = _mm256_set1_epi16(0x3F80), magnitude = _mm256_and_si256(half, _mm256_set1_epi16(0x3FFF));
    return _mm512_cvtph_ps(_mm256_mask_set1_epi16(half, _mm256_cmpeq_epi16_mask(magnitude, nan), 0x7E00));
  }
};

// The number of the code `shift` bits above the lowest of each lane, by a table: one permutation sees 16 of them, one
// of two registers 32. Bits above a code's own may be anything, since the permutations do not look at them, and a table of fewer
// numbers repeats.
template <int kBits>
struct Numbers {
  static constexpr int kTables = kBits <= 4 ? 1 : kBits == 5 ? 2 : 4;
  V table[kTables];
  static Numbers Of(const Weight& w) {
    Numbers numbers;
    UNROLL for (int i = 0; i < kTables; ++i) numbers.table[i] = Load(w.values + 16 * i);
    return numbers;
  }
  V At(__m512i raw, int shift) const {
    const __m512i code = _mm512_srli_epi32(raw, shift);
    if constexpr (kTables == 1) {
      return _mm512_permutexvar_ps(code, table[0]);
    } else {
      const V low = _mm512_permutex2var_ps(table[0], code, table[1]);
      if constexpr (kTables == 2) return low;
      const V high = _mm512_permutex2var_ps(table[kTables - 2], code, table[kTables - 1]);
      return _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(code, _mm512_set1_epi32(32)), high);
    }
  }
};

// Codes of 3, 5, 6 and 7 bits along a row: each group of 8 codes, kBits bytes, goes to 8 bytes of its own, where one instruction
// cuts 8 fields. A lane then holds 4 codes, a byte each.
template <int kBits, class Meaning = Numbers<kBits>>
struct WideRow {
  static constexpr int kSteps = 4, kLaneBytes = 4, kBytes = 8 * kBits;
  struct Table {
    Meaning numbers;
    __m512i spread, field;
  };
  __m512i raw;
  static Table TableOf(const Weight& w) {
    alignas(64) uint8_t spread[64], field[64];
    for (int i = 0; i < 64; ++i) {
      spread[i] = static_cast<uint8_t>(i / 8 * kBits + (i % 8 < kBits ? i % 8 : 0));
      field[i] = static_cast<uint8_t>(i % 8 * kBits);
    }
    return {Meaning::Of(w), _mm512_load_si512(spread), _mm512_load_si512(field)};
  }
  static __m512i Lanes(const uint8_t* p, int64_t left, const Table& table) {
    const __m512i packed = _mm512_permutexvar_epi8(table.spread, BytesAt(p, left < kBytes ? left : kBytes));
    return _mm512_multishift_epi64_epi8(table.field, packed);
  }
  WideRow() = default;
  WideRow(__m512i lanes, int) : raw(lanes) {}
  WideRow(const uint8_t* p, int64_t left, const Table& table) : raw(Lanes(p, left, table)) {}
  V At(int i, const Table& table) const { return table.numbers.At(raw, 8 * i); }
};

#endif

#if FEWBIT_HAS_LOOKUP

static inline int64_t ByteRows(const Weight& w) { return (w.rows * w.bits + 7) / 8; }

// Of each of 16 lanes of `steps` codes, from code `begin` of a row on, how many tiles it is beyond the first lane's, by
// counting, since divisions cost more. Lanes beyond the row count as its last tile.
static inline void TilesOfLanes(int64_t tile, int64_t cols, int64_t begin, int64_t steps, int32_t* lane) {
  int64_t left = tile - begin % tile, all = cols - begin;
  int32_t place = 0;
  for (int j = 0; j < 16; ++j, left -= steps, all -= steps) {
    if (left <= 0 && all > 0) ++place, left += tile;
    lane[j] = place;
  }
}

// Integers, signed or not, without a table: with a code from bit `place` on, the bits of 2**(23 - place) are a float from which a
// subtraction leaves the number, and a flipped sign bit makes a signed code an unsigned one, less 2**(kBits - 1). So codes below the
// exponent's bits need no shift, and those above share one.
template <int kBits>
struct Whole {
  uint32_t sign;
  static constexpr int kHighest = 23 - kBits, kDown = (kHighest / kBits + 1) * kBits;
  static Whole Of(const Weight& w) { return {w.kind == Codes::kSigned ? 1u << (kBits - 1) : 0}; }
  INLINE_MEMBER V16 At(const W16& raw, int shift) const {
    const int down = shift <= kHighest ? 0 : shift >= kDown ? kDown : shift, place = shift - down;
    const uint32_t float_bits = static_cast<uint32_t>(150 - place) << 23;
    const float bias = static_cast<float>((1u << (23 - place)) + sign);
    const W16 words = down == 0 ? raw : ShiftRight(raw, down);
    return Sub(AsFloats(Flipped(words, SameWord(((1u << kBits) - 1) << place), SameWord(float_bits | sign << place))), Same16(bias));
  }
};

#if FEWBIT_LEVEL != FEWBIT_LEVEL_AVX512
// Integers by conversion: without AVX-512's instruction of three operands one less than `Whole`.
template <int kBits, bool kSigned>
struct Converted {
  static Converted Of(const Weight&) { return {}; }
  INLINE_MEMBER V16 At(const W16& raw, int shift) const {
    if (kSigned) return Numbers16(ShiftRightSigned(ShiftLeft(raw, 32 - kBits - shift), 32 - kBits));
    const W16 low = shift == 0 ? raw : ShiftRight(raw, shift);
    return Numbers16(shift + kBits == 32 ? low : And(low, SameWord((1u << kBits) - 1)));
  }
};
#endif

// Codes of 1, 2, 4 and 8 bits.
template <int kBits, class Meaning = Numbers<kBits>>
struct Narrow {
  static constexpr int kSteps = 32 / kBits, kLaneBytes = 4, kBytes = 64, kByteRows = 1;
  typedef Meaning Table;
  W16 raw;
  static Table TableOf(const Weight& w) { return Meaning::Of(w); }
  static W16 Lanes(const uint8_t* p, int64_t left, const Table&) { return BytesAt(p, left); }
  Narrow() = default;
  Narrow(const W16& lanes, int) : raw(lanes) {}
  Narrow(const uint8_t* p, int64_t left, const Table&) : raw(BytesAt(p, left)) {}
  Narrow(const uint8_t* p, int64_t, int64_t, int64_t left) : raw(BytesAt(p, left)) {}
  V16 At(int i, const Table& table) const { return table.At(raw, i * kBits); }
};

// Codes of 3, 5, 6 and 7 bits down columns: kBits rows of bytes hold 8 codes of each column. A code that two of them share takes
// its low bits from one and the rest from the other. A lane's bytes are four columns.
template <int kBits, class Meaning = Numbers<kBits>>
struct WideColumn {
  static constexpr int kSteps = 32, kLaneBytes = 4, kByteRows = kBits;
  typedef Meaning Table;
  W16 raw[kBits];
  static Table TableOf(const Weight& w) { return Meaning::Of(w); }
  WideColumn() = default;
  WideColumn(const uint8_t* p, int64_t stride, int64_t rows, int64_t left) {
    UNROLL for (int j = 0; j < kBits; ++j) raw[j] = BytesAt(p + j * stride, j < rows ? left : 0);
  }
  V16 At(int i, const Table& table) const {
    const int column = i / 8, bit = i % 8 * kBits, row = bit / 8, shift = bit % 8;
    if (shift + kBits <= 8) return table.At(raw[row], 8 * column + shift);
    const W16 rest = ShiftLeft(raw[row + 1 < kBits ? row + 1 : row], 8 - shift);
    const uint32_t is_low = ((1u << (8 - shift)) - 1) * 0x01010101u;
    return table.At(Chosen(SameWord(is_low), ShiftRight(raw[row], shift), rest), 8 * column);
  }
};

// A zero point as the two numbers that the general formula (code - subtracted) * scale + added takes, of which one changes
// nothing: x - 0 is x, and x + -0 is x.
struct ZeroParts {
  W16 subtracted, added, neutral;  // bits of the zero point that each part keeps
  explicit ZeroParts(Zero role)
      : subtracted(SameWord(role == Zero::kWhole ? ~0u : 0)), added(SameWord(role == Zero::kOffset ? ~0u : 0)),
        neutral(SameWord(role == Zero::kOffset ? 0 : 0x80000000u)) {}
  V16 Subtracted(const V16& zero) const { return AsFloats(And(AsWords(zero), subtracted)); }
  V16 Added(const V16& zero) const { return AsFloats(Or(And(AsWords(zero), added), neutral)); }
};

template <bool kHasZero, class Vector>
static inline Vector Scaled(const Vector& value, const Vector& scale, const Vector& subtracted, const Vector& added) {
  return kHasZero ? Add(Mul(Sub(value, subtracted), scale), added) : Mul(value, scale);
}

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
// Where two vectors have the k-th place of each lane.
template <int kSub>
struct DeinterleaveIndex {
  int32_t at[16 * kSub];
  constexpr DeinterleaveIndex() : at{} {
    for (int j = 0; j < 16; ++j) {
      for (int k = 0; k < kSub; ++k) at[16 * k + j] = j * kSub % 32 + k;
    }
  }
};
#endif

// Blocks of 16 * kSub numbers, de-interleaved: the k-th places of all lanes are contiguous.
template <int kSub>
static inline void Deinterleave(const float* from, int64_t blocks, float* to) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  alignas(64) static constexpr DeinterleaveIndex<kSub> index;
  for (int64_t b = 0; b < blocks; ++b, from += 16 * kSub, to += 16 * kSub) {
    const V a0 = Load(from), a1 = Load(from + 16), b0 = Load(from + 32 % (16 * kSub)), b1 = Load(from + 48 % (16 * kSub));
    UNROLL for (int k = 0; k < kSub; ++k) {
      const __m512i at = _mm512_load_si512(index.at + 16 * k);
      const V low = _mm512_permutex2var_ps(a0, at, a1), high = _mm512_permutex2var_ps(b0, at, b1);
      Store(to + 16 * k, kSub == 2 ? low : _mm512_mask_mov_ps(low, 0xFF00, high));
    }
  }
#else
  for (int64_t b = 0; b < blocks; ++b, from += 16 * kSub, to += 16 * kSub) {
    for (int k = 0; k < kSub; ++k) {
      for (int j = 0; j < 16; ++j) to[16 * k + j] = from[j * kSub + k];
    }
  }
#endif
}

// The scales or zero points of `blocks` blocks of outputs from n0 on, in their interleaved order.
template <int kSub>
static void ColumnScales(const Weight& w, const StoredScales& stored, int64_t tile_row, int64_t n0, int64_t outputs, int64_t blocks,
                         float unit, float* plain, float* out) {
  const int64_t first = n0 / w.col_tile, count = (n0 + outputs - 1) / w.col_tile - first + 1;
  LoadScales(stored, tile_row * w.tiles_per_row + first, count, unit, plain);
  if (w.col_tile == 1) {
    for (int64_t n = outputs; n < blocks * 16 * kSub; ++n) plain[n] = 0.0f;
    return Deinterleave<kSub>(plain, blocks, out);
  }
  for (int64_t n = 0; n < blocks * 16 * kSub; ++n) {
    const int64_t block = n / (16 * kSub) * 16 * kSub, lane = n % (16 * kSub) / kSub, place = n % kSub;
    out[block + place * 16 + lane] = n < outputs ? plain[(n0 + n) / w.col_tile - first] : 0.0f;
  }
}

// Elements [first, first + tiles) of the scales or zero points of 16 rows from `row` on, those of a tile contiguous. Rows after
// `last` have those of `last`.
static void RowScales(const Weight& w, const StoredScales& stored, float unit, int64_t row, int64_t last, int64_t first, int64_t tiles,
                      float* plain, float* out) {
  for (int64_t i = 0; i < 16; ++i) {
    const int64_t here = row + i < last ? row + i : last;
    LoadScales(stored, here / w.row_tile * w.tiles_per_row + first, tiles, unit, plain);
    for (int64_t t = 0; t < tiles; ++t) out[16 * t + i] = plain[t];
  }
}

// A panel of rows n0 .., columns k0 .., decoded and scaled. The bytes of 16 rows are transposed before they are decoded, so that a
// vector of four bytes a row gives many vectors of one number a row.
template <class Decoder, bool kHasZero>
static void FillDots(const Weight& w, int64_t n0, int64_t outputs, int64_t k0, int64_t count, float* rest, float* panel,
                     int64_t ldw) {
  constexpr int kParts = 4 / Decoder::kLaneBytes, kSteps = kParts * Decoder::kSteps, kBlock = 16 * kSteps;
  const int64_t first = k0 / w.col_tile, tiles = (k0 + count - 1) / w.col_tile - first + 1;
  const auto table = Decoder::TableOf(w);
  const ZeroParts parts(w.role);
  float *plain = rest, *scale = plain + tiles, *zero = scale + 16 * tiles;
  for (int64_t n = 0; n < outputs; n += 16) {
    const int64_t last = n0 + outputs - 1;
    RowScales(w, w.scale, w.unit, n0 + n, last, first, tiles, plain, scale);
    if (kHasZero) RowScales(w, w.zero, 1.0f, n0 + n, last, first, tiles, plain, zero);
    for (int64_t b = 0; b < count; b += kBlock) {
      const int64_t at = (k0 + b) / kBlock * kParts * Decoder::kBytes;
      W16 raw[16];
      for (int i = 0; i < 16; ++i) {
        const int64_t row = n0 + n + i < last ? n0 + n + i : last;
        raw[i] = Decoder::Lanes(w.codes + row * w.row_stride + at, w.row_stride - at, table);
      }
      TransposeWords(raw);
      for (int64_t k = b; k < count && k < b + kBlock; k += kSteps) {
        const int64_t tile = (k0 + k) / w.col_tile - first;
        const V16 s = Load16(scale + 16 * tile), z = kHasZero ? Load16(zero + 16 * tile) : s;
        const V16 before = parts.Subtracted(z), after = parts.Added(z);
        float* to = panel + k * ldw + n;
        UNROLL for (int part = 0; part < kParts; ++part) {
          const Decoder codes(raw[(k - b) / kSteps], part);
#pragma GCC unroll 32
          for (int i = 0; i < Decoder::kSteps; ++i) {
            Store16(to + (part * Decoder::kSteps + i) * ldw, Scaled<kHasZero>(codes.At(i, table), s, before, after));
          }
        }
      }
    }
  }
}

// A panel of rows k0 .., columns n0 .., decoded and scaled; the columns of a block are interleaved.
template <class Decoder, bool kHasZero>
static void FillColumns(const Weight& w, int64_t n0, int64_t outputs, int64_t k0, int64_t count, float* rest, float* panel,
                        int64_t ldw) {
  constexpr int kSub = Decoder::kLaneBytes, kAlong = Decoder::kSteps / kSub, kBlock = 16 * kSub;
  const int64_t blocks = (outputs + kBlock - 1) / kBlock, padded = blocks * kBlock;
  const auto table = Decoder::TableOf(w);
  const ZeroParts parts(w.role);
  float *plain = rest, *scale = rest + padded, *before = scale + padded, *after = before + padded;
  int64_t loaded = -1;
  for (int64_t k = 0; k < count; k += kAlong, panel += kAlong * ldw) {
    const int64_t tile_row = (k0 + k) / w.row_tile;
    if (tile_row != loaded) {
      loaded = tile_row;
      ColumnScales<kSub>(w, w.scale, tile_row, n0, outputs, blocks, w.unit, plain, scale);
      if (kHasZero) ColumnScales<kSub>(w, w.zero, tile_row, n0, outputs, blocks, 1.0f, plain, before);
      for (int64_t i = 0; kHasZero && i < padded; i += 16) {
        const V16 zero = Load16(before + i);
        Store16(before + i, parts.Subtracted(zero)), Store16(after + i, parts.Added(zero));
      }
    }
    const int64_t row = (k0 + k) / kAlong * Decoder::kByteRows;
    const uint8_t* p = w.codes + row * w.row_stride + n0;
    for (int64_t b = 0; b < blocks; ++b) {
      const Decoder codes(p + b * kBlock, w.row_stride, ByteRows(w) - row, w.cols - n0 - b * kBlock);
#pragma GCC unroll 8
      for (int along = 0; along < kAlong; ++along) {
#pragma GCC unroll 4
        for (int place = 0; place < kSub; ++place) {
          const int64_t column = b * kBlock + place * 16;
          const V16 s = Load16(scale + column), v = codes.At(place * kAlong + along, table);
          const V16 sub = kHasZero ? Load16(before + column) : s, add = kHasZero ? Load16(after + column) : s;
          Store16(panel + along * ldw + column, Scaled<kHasZero>(v, s, sub, add));
        }
      }
    }
  }
}

#endif
