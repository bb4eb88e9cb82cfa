// Rows of codes into float32. Included in the namespace of an instruction set.

// The codes of columns [c0, c0 + n) of row r, a byte each: in place, or in `out`, which has room for 64 more.
static const uint8_t* CodesOfRow(const Weight& w, int64_t r, int64_t c0, int64_t n, uint8_t* out) {
  const int bits = w.bits;
  const uint8_t mask = static_cast<uint8_t>((1 << bits) - 1);
  if (!w.packed_cols) {
    const uint8_t* row = w.codes + r * bits / 8 * w.row_stride + c0;
    if (bits == 8) return row;
    const int shift = static_cast<int>(r * bits % 8);
    if (shift + bits <= 8) {
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(row[i] >> shift & mask);
    } else {
      const uint8_t* next = row + w.row_stride;
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>((row[i] >> shift | next[i] << (8 - shift)) & mask);
    }
    return out;
  }
  const uint8_t* p = w.codes + r * w.row_stride + c0 * bits / 8;
  if (bits == 8) return p;
  const uint8_t* end = w.codes + (r + 1) * w.row_stride;
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  // 64 codes at a time: each group of 8 codes, `bits` bytes, goes to the start of 8 bytes, where one instruction cuts 8 fields.
  alignas(64) uint8_t spread[64], field[64];
  for (int i = 0; i < 64; ++i) {
    spread[i] = static_cast<uint8_t>(i / 8 * bits + (i % 8 < bits ? i % 8 : 0));
    field[i] = static_cast<uint8_t>(i % 8 * bits);
  }
  const __m512i to = _mm512_load_si512(spread), at = _mm512_load_si512(field), low = _mm512_set1_epi8(static_cast<char>(mask));
  for (int64_t i = 0; i < n; i += 64, p += 8 * bits) {
    const int64_t left = end - p < 8 * bits ? end - p : 8 * bits;
    const __mmask64 there = left >= 64 ? ~0ull : (1ull << left) - 1;
    const __m512i packed = _mm512_permutexvar_epi8(to, _mm512_maskz_loadu_epi8(there, p));
    _mm512_storeu_si512(out + i, _mm512_and_si512(_mm512_multishift_epi64_epi8(at, packed), low));
  }
#else
  int64_t i = 0;
  if (bits == 4) {
    const int64_t pairs = n / 2 < end - p ? n / 2 : end - p;
    for (int64_t j = 0; j < pairs; ++j) {
      out[2 * j] = p[j] & 15;
      out[2 * j + 1] = p[j] >> 4;
    }
    i = 2 * pairs;
    p += pairs;
  }
  for (; i < n; i += 8, p += bits) {
    uint64_t word = 0;
    for (int b = 0; b < bits && p + b < end; ++b) word |= static_cast<uint64_t>(p[b]) << 8 * b;
    for (int j = 0; j < 8; ++j) out[i + j] = static_cast<uint8_t>(word >> j * bits & mask);
  }
#endif
  return out;
}

// The numbers of n codes; `out` has room for 64 more.
static void ValuesOf(const Weight& w, const uint8_t* codes, int64_t n, float* out) {
  int64_t i = 0;
  if (w.kind == Codes::kSigned || w.kind == Codes::kUnsigned) {
    const int spare = w.kind == Codes::kSigned ? 32 - w.bits : 0;  // a shift to the top and back extends the sign
    for (; i + kLanes <= n; i += kLanes) {
      B bytes;
      __builtin_memcpy(&bytes, codes + i, sizeof bytes);
      Store(out + i, __builtin_convertvector((I)((U)ToInts(bytes) << spare) >> spare, V));
    }
    for (; i < n; ++i) out[i] = static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(codes[i]) << spare) >> spare);
    return;
  }
  const float* table = w.values;
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  const V t0 = Load(table), t1 = Load(table + 16), t2 = Load(table + 32), t3 = Load(table + 48);
  for (; i + 16 <= n && w.bits <= 6; i += 16) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
    if (w.bits <= 4) {
      Store(out + i, _mm512_permutexvar_ps(code, t0));
    } else {
      const V low = _mm512_permutex2var_ps(t0, code, t1), high = _mm512_permutex2var_ps(t2, code, t3);
      Store(out + i, _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(code, _mm512_set1_epi32(32)), high));
    }
  }
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  const V t0 = Load(table), t1 = Load(table + 8);
  for (; i + 8 <= n && w.bits <= 4; i += 8) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    const V low = _mm256_permutevar8x32_ps(t0, code), high = _mm256_permutevar8x32_ps(t1, code);
    Store(out + i, _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(code, 28))));
  }
#endif
  for (; i < n; ++i) out[i] = table[codes[i]];
}

// Elements [from, from + n) of stored scales or zero points, times `unit`.
static void LoadScales(const StoredScales& stored, int64_t from, int64_t n, float unit, float* out) {
  if (stored.type == ScaleType::kF32) {
    const float* p = static_cast<const float*>(stored.data) + from;
    for (int64_t i = 0; i < n; ++i) out[i] = p[i] * unit;
  } else if (stored.type == ScaleType::kTable) {
    const uint8_t* p = static_cast<const uint8_t*>(stored.data) + from;
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {  // four at a time: a loop of one takes 1.4 times as long where it crosses a line of the cache
      const float four[] = {stored.table[p[i]], stored.table[p[i + 1]], stored.table[p[i + 2]], stored.table[p[i + 3]]};
      UNROLL for (int j = 0; j < 4; ++j) out[i + j] = four[j] * unit;
    }
    for (; i < n; ++i) out[i] = stored.table[p[i]] * unit;
  } else if (stored.type == ScaleType::kBF16) {
    const uint16_t* p = static_cast<const uint16_t*>(stored.data) + from;
    for (int64_t i = 0; i < n; ++i) out[i] = FloatOfBrain(p[i]) * unit;
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(stored.data) + from;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) Store(out + i, Mul(Load(reinterpret_cast<const Half*>(p + i)), Same(unit)));
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
    const __mmask16 rest = static_cast<__mmask16>((1u << (n - i)) - 1);
    _mm512_mask_storeu_ps(out + i, rest, Mul(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, p + i)), Same(unit)));
#else
    if (i < n && n >= kLanes) {  // the last ones together, some of them again
      Store(out + n - kLanes, Mul(Load(reinterpret_cast<const Half*>(p + n - kLanes)), Same(unit)));
      i = n;
    }
    for (; i < n; ++i) out[i] = FloatOfHalf(p[i]) * unit;
#endif
  }
}

// One element of a tile: its number, less or plus what its zero point says, times its scale.
template <class Vector>
static inline Vector Scaled(Zero role, const Vector& value, const Vector& scale, const Vector& zero) {
  if (role == Zero::kWhole) return Mul(Sub(value, zero), scale);
  if (role == Zero::kOffset) return Add(Mul(value, scale), zero);
  return Mul(value, scale);
}

struct RowScratch {
  uint8_t* codes;                // each with room for one block of columns and 64 more
  float *values, *scale, *zero;
  int64_t loaded_row;            // whose scales are in `scale` and `zero`; -1: none
};

// Row r, columns [c0, c0 + n), as float32 in `out`, and zeros up to a multiple of the lanes; `out` has room for 64 more.
static void DecodeRow(const Weight& w, int64_t r, int64_t c0, int64_t n, RowScratch& s, float* out) {
  ValuesOf(w, CodesOfRow(w, r, c0, n, s.codes), n, s.values);
  const int64_t first = c0 / w.col_tile, count = (c0 + n - 1) / w.col_tile - first + 1, row = r / w.row_tile;
  if (s.loaded_row != row) {
    LoadScales(w.scale, row * w.tiles_per_row + first, count, w.unit, s.scale);
    if (w.role != Zero::kNone) LoadScales(w.zero, row * w.tiles_per_row + first, count, 1.0f, s.zero);
    s.loaded_row = row;
  }
  if (w.col_tile == 1 && w.role == Zero::kNone) {  // -O2 does not move the question out of the loop
    for (int64_t i = 0; i < n; i += kLanes) Store(out + i, Mul(Load(s.values + i), Load(s.scale + i)));
  } else if (w.col_tile == 1) {
    for (int64_t i = 0; i < n; i += kLanes) Store(out + i, Scaled(w.role, Load(s.values + i), Load(s.scale + i), Load(s.zero + i)));
  } else {
    // A vector may reach beyond its tile; what it writes there is overwritten by the next tile.
    for (int64_t tile = 0; tile < count; ++tile) {
      const int64_t begin = (first + tile) * w.col_tile - c0, stop = begin + w.col_tile;
      const int64_t from = begin < 0 ? 0 : begin, to = stop < n ? stop : n;
      const V scale = Same(s.scale[tile]);
      const float* values = s.values;
      if (w.role == Zero::kNone) {
        for (int64_t i = from; i < to; i += kLanes) Store(out + i, Mul(Load(values + i), scale));
        continue;
      }
      const V zero = Same(s.zero[tile]);
      for (int64_t i = from; i < to; i += kLanes) Store(out + i, Scaled(w.role, Load(values + i), scale, zero));
    }
  }
  for (int64_t i = n; i % kLanes != 0; ++i) out[i] = 0.0f;
}
