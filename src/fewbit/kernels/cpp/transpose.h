// Transposes squares of numbers. Included in the namespace of an instruction set.

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
// Lane i of vector j becomes lane j of vector i: within quarters by pairs and fours, then quarters among themselves.
static inline void TransposeWords(__m512i* a) {
  __m512i b[16];
  UNROLL for (int i = 0; i < 16; i += 4) {
    const __m512i p = _mm512_unpacklo_epi32(a[i], a[i + 1]), q = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    const __m512i r = _mm512_unpacklo_epi32(a[i + 2], a[i + 3]), s = _mm512_unpackhi_epi32(a[i + 2], a[i + 3]);
    b[i] = _mm512_unpacklo_epi64(p, r), b[i + 1] = _mm512_unpackhi_epi64(p, r);
    b[i + 2] = _mm512_unpacklo_epi64(q, s), b[i + 3] = _mm512_unpackhi_epi64(q, s);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    const __m512i even = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), odd = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xDD);
    const __m512i even2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88), odd2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xDD);
    a[i] = _mm512_shuffle_i32x4(even, even2, 0x88), a[8 + i] = _mm512_shuffle_i32x4(even, even2, 0xDD);
    a[4 + i] = _mm512_shuffle_i32x4(odd, odd2, 0x88), a[12 + i] = _mm512_shuffle_i32x4(odd, odd2, 0xDD);
  }
}

static inline void Transpose(const float* from, int64_t ld_from, float* to, int64_t ld_to) {
  __m512i a[16];
  UNROLL for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * ld_from);
  TransposeWords(a);
  UNROLL for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * ld_to, a[i]);
}
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
static inline void Transpose(const float* from, int64_t ld_from, float* to, int64_t ld_to) {
  V a[8], b[8];
  UNROLL for (int i = 0; i < 8; ++i) a[i] = Load(from + i * ld_from);
  UNROLL for (int i = 0; i < 8; i += 4) {
    const V p = _mm256_unpacklo_ps(a[i], a[i + 1]), q = _mm256_unpackhi_ps(a[i], a[i + 1]);
    const V r = _mm256_unpacklo_ps(a[i + 2], a[i + 3]), s = _mm256_unpackhi_ps(a[i + 2], a[i + 3]);
    b[i] = _mm256_shuffle_ps(p, r, 0x44), b[i + 1] = _mm256_shuffle_ps(p, r, 0xEE);
    b[i + 2] = _mm256_shuffle_ps(q, s, 0x44), b[i + 3] = _mm256_shuffle_ps(q, s, 0xEE);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    Store(to + i * ld_to, _mm256_permute2f128_ps(b[i], b[4 + i], 0x20));
    Store(to + (4 + i) * ld_to, _mm256_permute2f128_ps(b[i], b[4 + i], 0x31));
  }
}
#elif defined(__aarch64__)
static inline void Transpose(const float* from, int64_t ld_from, float* to, int64_t ld_to) {
  const float32x4_t a = vld1q_f32(from), b = vld1q_f32(from + ld_from);
  const float32x4_t c = vld1q_f32(from + 2 * ld_from), d = vld1q_f32(from + 3 * ld_from);
  const float64x2_t ab = (float64x2_t)vtrn1q_f32(a, b), AB = (float64x2_t)vtrn2q_f32(a, b);
  const float64x2_t cd = (float64x2_t)vtrn1q_f32(c, d), CD = (float64x2_t)vtrn2q_f32(c, d);
  vst1q_f32(to, (float32x4_t)vtrn1q_f64(ab, cd)), vst1q_f32(to + ld_to, (float32x4_t)vtrn1q_f64(AB, CD));
  vst1q_f32(to + 2 * ld_to, (float32x4_t)vtrn2q_f64(ab, cd)), vst1q_f32(to + 3 * ld_to, (float32x4_t)vtrn2q_f64(AB, CD));
}
#else
static inline void Transpose(const float* from, int64_t ld_from, float* to, int64_t ld_to) {
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) to[j * ld_to + i] = from[i * ld_from + j];
  }
}
#endif

// The vectors of a square in place.
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
INLINE void Transpose(V (&v)[kLanes]) {
  __m512i a[kLanes];
  UNROLL for (int i = 0; i < kLanes; ++i) a[i] = (__m512i)v[i];
  TransposeWords(a);
  UNROLL for (int i = 0; i < kLanes; ++i) v[i] = (V)a[i];
}
#else
INLINE void Transpose(V (&v)[kLanes]) {
  float from[kLanes * kLanes], to[kLanes * kLanes];
  UNROLL for (int i = 0; i < kLanes; ++i) Store(from + i * kLanes, v[i]);
  Transpose(from, kLanes, to, kLanes);
  UNROLL for (int i = 0; i < kLanes; ++i) v[i] = Load(to + i * kLanes);
}
#endif

// Transposes kLanes rows, `stride` numbers apart, of kShorts numbers of 16 bits each: column i has number i of every row. In each 128
// bits the numbers of four rows are interleaved; then those of one column are put together.
constexpr int kShorts = 8;
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
static inline void ShortsOfRows(const uint16_t* rows, int64_t stride, H (&column)[kShorts]) {
  const auto quarter = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + row * stride)); };
  __m512i v[4];
  UNROLL for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_inserti32x4(_mm512_castsi128_si512(quarter(i)), quarter(4 + i), 1);
    v[i] = _mm512_inserti32x4(_mm512_inserti32x4(v[i], quarter(8 + i), 2), quarter(12 + i), 3);
  }
  const __m512i low01 = _mm512_unpacklo_epi16(v[0], v[1]), high01 = _mm512_unpackhi_epi16(v[0], v[1]);
  const __m512i low23 = _mm512_unpacklo_epi16(v[2], v[3]), high23 = _mm512_unpackhi_epi16(v[2], v[3]);
  const __m512i pairs[] = {_mm512_unpacklo_epi32(low01, low23), _mm512_unpackhi_epi32(low01, low23),
                           _mm512_unpacklo_epi32(high01, high23), _mm512_unpackhi_epi32(high01, high23)};
  const __m512i in_order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  UNROLL for (int i = 0; i < 4; ++i) {
    const __m512i two = _mm512_permutexvar_epi64(in_order, pairs[i]);
    column[2 * i] = (H)_mm512_castsi512_si256(two), column[2 * i + 1] = (H)_mm512_extracti64x4_epi64(two, 1);
  }
}
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
static inline void ShortsOfRows(const uint16_t* rows, int64_t stride, H (&column)[kShorts]) {
  const auto half = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + row * stride)); };
  __m256i v[4];
  UNROLL for (int i = 0; i < 4; ++i) v[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(half(i)), half(4 + i), 1);
  const __m256i low01 = _mm256_unpacklo_epi16(v[0], v[1]), high01 = _mm256_unpackhi_epi16(v[0], v[1]);
  const __m256i low23 = _mm256_unpacklo_epi16(v[2], v[3]), high23 = _mm256_unpackhi_epi16(v[2], v[3]);
  const __m256i pairs[] = {_mm256_unpacklo_epi32(low01, low23), _mm256_unpackhi_epi32(low01, low23),
                           _mm256_unpacklo_epi32(high01, high23), _mm256_unpackhi_epi32(high01, high23)};
  UNROLL for (int i = 0; i < 4; ++i) {
    const __m256i two = _mm256_permute4x64_epi64(pairs[i], 0xD8);
    column[2 * i] = (H)_mm256_castsi256_si128(two), column[2 * i + 1] = (H)_mm256_extracti128_si256(two, 1);
  }
}
#else
static inline void ShortsOfRows(const uint16_t* rows, int64_t stride, H (&column)[kShorts]) {
  for (int i = 0; i < kShorts; ++i) {
    for (int row = 0; row < kLanes; ++row) column[i][row] = rows[row * stride + i];
  }
}
#endif
