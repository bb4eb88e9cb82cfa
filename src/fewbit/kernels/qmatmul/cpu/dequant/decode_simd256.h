// Codes to numbers within registers of 32 bytes (AVX2) or 16 (NEON), as described in decode_simd.h. Included in the namespace of an instruction set.
//
// A table of 8 numbers is one register of AVX2 and one permutation, and each further bit of a code doubles the permutations and
// adds a choice between two. NEON looks bytes up: a table is four tables of one byte of each number, 16 codes are looked up in
// all four, and what comes is put together. Integers of 4 bits and more need no table: with a code in its low bits, the bits of
// 2**23 are a float from which a subtraction leaves the number.

#if FEWBIT_LEVEL != FEWBIT_LEVEL_AVX512 && FEWBIT_HAS_LOOKUP

// The number of the code `shift` bits above the lowest of each word; other bits may be anything. With NEON it must
// be within one byte.
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
template <int kBits>
static inline V Picked(const V* table, U code) {
  if constexpr (kBits <= 3) {
    return _mm256_permutevar8x32_ps(table[0], (__m256i)code);
  } else {
    const V low = Picked<kBits - 1>(table, code), high = Picked<kBits - 1>(table + (1 << (kBits - 4)), code);
    return _mm256_blendv_ps(low, high, (V)(code << (32 - kBits)));
  }
}

template <int kBits>
struct Numbers {
  static constexpr int kTables = kBits <= 3 ? 1 : 1 << (kBits - 3);
  V table[kTables];
  static Numbers Of(const Weight& w) {
    Numbers numbers;
    UNROLL for (int i = 0; i < kTables; ++i) numbers.table[i] = Load(w.values + 8 * i);
    return numbers;
  }
  V16 At(const W16& raw, int shift) const {
    V16 r;
#pragma GCC unroll 2
    for (int i = 0; i < kPieces; ++i) r.v[i] = Picked<kBits>(table, raw.u[i] >> shift);
    return r;
  }
};
#else
template <int kBits>
struct Numbers {
  static constexpr int kTables = kBits <= 4 ? 1 : 1 << (kBits - 4);
  uint8x16_t plane[4][kTables];
  static Numbers Of(const Weight& w) {
    Numbers numbers;
    UNROLL for (int i = 0; i < kTables; ++i) {
      const uint8x16x4_t bytes = vld4q_u8(reinterpret_cast<const uint8_t*>(w.values + 16 * i));
      UNROLL for (int b = 0; b < 4; ++b) numbers.plane[b][i] = bytes.val[b];
    }
    return numbers;
  }
  static uint8x16_t Looked(const uint8x16_t* t, uint8x16_t code) {
    if constexpr (kTables == 1) return vqtbl1q_u8(t[0], code);
    else if constexpr (kTables == 2) return vqtbl2q_u8(uint8x16x2_t{{t[0], t[1]}}, code);
    else return vqtbl4q_u8(uint8x16x4_t{{t[0], t[1], t[2], t[3]}}, code);
  }
  V16 At(const W16& raw, int shift) const {
    V16 r;
    UNROLL for (int i = 0; i < kPieces; ++i) {
      const uint8x16_t code = ((uint8x16_t)raw.u[i] >> shift % 8) & vdupq_n_u8((1 << kBits) - 1);
      const uint8x16_t a = Looked(plane[0], code), b = Looked(plane[1], code), c = Looked(plane[2], code), d = Looked(plane[3], code);
      // Of the numbers of all 16 bytes, those of one byte of each word: by pairs of bytes, then of pairs.
      const bool is_odd = shift / 8 % 2 != 0;
      const uint16x8_t ab = (uint16x8_t)(is_odd ? vtrn2q_u8(a, b) : vtrn1q_u8(a, b));
      const uint16x8_t cd = (uint16x8_t)(is_odd ? vtrn2q_u8(c, d) : vtrn1q_u8(c, d));
      r.v[i] = (V)(shift >= 16 ? vtrn2q_u16(ab, cd) : vtrn1q_u16(ab, cd));
    }
    return r;
  }
};
#endif

// e4m3fn and e5m2 by way of float16.
template <bool kIsE4M3>
struct Float8 {
  static constexpr int kSteps = 2, kLaneBytes = 2, kBytes = 32, kByteRows = 1;
  typedef uint16_t H __attribute__((vector_size(2 * kLanes)));
  typedef int16_t S __attribute__((vector_size(2 * kLanes)));
  struct Table {};
  H raw[kPieces];
  static Table TableOf(const Weight&) { return {}; }
  static W16 Lanes(const uint8_t* p, int64_t left, Table) { return BytesAt(p, left); }
  Float8() = default;
  Float8(const W16& lanes, int half) {
    UNROLL for (int i = 0; i < kPieces; ++i) raw[i] = __builtin_convertvector(lanes.u[i] >> 16 * half, H);
  }
  Float8(const uint8_t* p, int64_t, int64_t, int64_t left) : Float8(p, left, Table{}) {}
  Float8(const uint8_t* p, int64_t left, Table) {
    uint8_t there[32] = {};
    if (left < 32) {
      if (left > 0) std::memcpy(there, p, left);
      p = there;
    }
    std::memcpy(raw, p, 32);
  }
  V16 At(int i, Table) const {
    V16 r;
    UNROLL for (int j = 0; j < kPieces; ++j) {
      const H high = i == 0 ? raw[j] << 8 : raw[j] & 0xFF00;
      const H half = (H)((S)high >> 1) & 0xBF80, is_nan = (H)((half & 0x3FFF) == 0x3F80);
      r.v[j] = FloatsOfHalves(kIsE4M3 ? (half & ~is_nan) | (is_nan & 0x7E00) : high);
    }
    return r;
  }

 private:
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  static V FloatsOfHalves(H h) { return _mm256_cvtph_ps((__m128i)h); }
#else
  static V FloatsOfHalves(H h) { return (V)vcvt_f32_f16((float16x4_t)h); }
#endif
};

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2

// e2m3 and e3m2 by way of float16, where a table takes 8 permutations and 7 choices: kDown is how many more bits of exponent float16
// has. Its bias is larger, so that its numbers are 2**14 or 2**12 times too small; a product with that is exact.
template <int kDown>
struct Float6 {
  static Float6 Of(const Weight&) { return {}; }
  V16 At(const W16& raw, int shift) const {
    const __m256i code = _mm256_set1_epi32(63), kept = _mm256_set1_epi16(static_cast<int16_t>(kDown == 3 ? 0x8F80 : 0x9F00));
    const __m256i low = _mm256_and_si256((__m256i)(raw.u[0] >> shift), code);
    const __m256i high = _mm256_and_si256((__m256i)(raw.u[1] >> shift), code);
    const __m256i codes = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
    const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(codes, 10), kDown), kept);
    const V factor = Same(kDown == 3 ? 0x1p14f : 0x1p12f);
    V16 r;
    r.v[0] = Mul(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor);
    r.v[1] = Mul(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), factor);
    return r;
  }
};

#endif

// Codes of 3, 5, 6 and 7 bits along a row. A lane takes the four bytes that contain its four codes and shifts the first one to the
// lowest bit; NEON, which shifts each byte by an amount of its own, gives each code its byte.
template <int kBits, class Meaning = Numbers<kBits>>
struct WideRow {
  static constexpr int kSteps = 4, kLaneBytes = 4, kBytes = 8 * kBits, kField = FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2 ? kBits : 8;
  struct Table {
    Meaning numbers;
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
    __m256i spread, shift;
#else
    uint8x16_t low, high;
    int8x16_t right, left;
#endif
  };
  W16 raw;
  static Table TableOf(const Weight& w) {
    Table t;
    t.numbers = Meaning::Of(w);
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
    alignas(32) uint8_t spread[32];
    alignas(32) uint32_t shift[8];
    for (int i = 0; i < 32; ++i) spread[i] = static_cast<uint8_t>(i % 16 / 4 * kBits / 2 + i % 4);
    for (int i = 0; i < 8; ++i) shift[i] = i % 4 * kBits % 2 * 4;
    t.spread = _mm256_load_si256(reinterpret_cast<const __m256i*>(spread));
    t.shift = _mm256_load_si256(reinterpret_cast<const __m256i*>(shift));
#else
    for (int i = 0; i < 16; ++i) {
      t.low[i] = static_cast<uint8_t>(i * kBits / 8), t.high[i] = t.low[i] + 1;
      t.right[i] = static_cast<int8_t>(-(i * kBits % 8)), t.left[i] = t.right[i] + 8;
    }
#endif
    return t;
  }
  static W16 Lanes(const uint8_t* p, int64_t left, const Table& t) {
    constexpr int kQuarter = 2 * kBits;  // bytes of 16 codes
    uint8_t there[64 + 16];
    if (left < 3 * kQuarter + 16) {
      std::memset(there, 0, sizeof(there));
      if (left > 0) std::memcpy(there, p, left < kBytes ? left : kBytes);
      p = there;
    }
    W16 r;
    UNROLL for (int i = 0; i < kPieces; ++i) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
      const __m128i* two = reinterpret_cast<const __m128i*>(p + 2 * i * kQuarter);
      const __m128i first = _mm_loadu_si128(two);
      const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + (2 * i + 1) * kQuarter));
      r.u[i] = (U)_mm256_srlv_epi32(_mm256_shuffle_epi8(_mm256_set_m128i(second, first), t.spread), t.shift);
#else
      const uint8x16_t bytes = vld1q_u8(p + i * kQuarter);
      r.u[i] = (U)(vshlq_u8(vqtbl1q_u8(bytes, t.low), t.right) | vshlq_u8(vqtbl1q_u8(bytes, t.high), t.left));
#endif
    }
    return r;
  }
  WideRow() = default;
  WideRow(const W16& lanes, int) : raw(lanes) {}
  WideRow(const uint8_t* p, int64_t left, const Table& table) : raw(Lanes(p, left, table)) {}
  V16 At(int i, const Table& table) const { return table.numbers.At(raw, kField * i); }
};

#endif
