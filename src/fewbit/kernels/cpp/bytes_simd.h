// The step that products of bytes are made of: in each lane of a U (simd.h), four unsigned bytes (on arm64: signed) times four
// signed ones are added. Tables of 16 bytes. Included in the namespace of an instruction set.

// Vectors of outputs and rows of x in a block of registers: 32 of them, or of AVX2 and plain C++ 16.
constexpr int kIntAcross = FEWBIT_VNNI && FEWBIT_LEVEL != FEWBIT_LEVEL_AVX2 ? 4 : 2, kIntRows = FEWBIT_AMX ? 16 : 6;
typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));

INLINE U LoadI(const void* p) { U v; __builtin_memcpy(&v, p, sizeof v); return v; }
INLINE void StoreI(void* p, U v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE U SameI(int32_t x) { return (U)Same(x); }
INLINE V FloatI(U a) { return __builtin_convertvector((I)a, V); }
INLINE U LessBytes(U a, U b) { return (U)((Bytes)a - (Bytes)b); }

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
INLINE U TableI(const uint8_t* numbers) {
  return (U)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
}
INLINE U Looked(U table, U index) { return (U)_mm512_shuffle_epi8((__m512i)table, (__m512i)index); }
INLINE U Dot4(U sum, U u, U s) { return (U)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s); }
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
INLINE U TableI(const uint8_t* numbers) {
  return (U)_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
}
INLINE U Looked(U table, U index) { return (U)_mm256_shuffle_epi8((__m256i)table, (__m256i)index); }
#if FEWBIT_VNNI
INLINE U Dot4(U sum, U u, U s) { return (U)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)u, (__m256i)s); }
#else
// By way of 16 bits: the instruction that takes bytes (vpmaddubsw) saturates.
INLINE U Dot4(U sum, U u, U s) {
  const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)s, 8), 8), high = _mm256_srai_epi16((__m256i)s, 8);
  const __m256i even = _mm256_madd_epi16((__m256i)(u & 0x00ff00ff), low), odd = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)u, 8), high);
  return sum + (U)even + (U)odd;
}
#endif
#else
INLINE U TableI(const uint8_t* numbers) { return LoadI(numbers); }
INLINE U Looked(U table, U index) {
#if FEWBIT_ARM64
  return (U)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#else
  const Bytes from = (Bytes)table, at = (Bytes)index;
  Bytes to;
  for (int i = 0; i < 16; ++i) to[i] = from[at[i] & 15];
  return (U)to;
#endif
}
#if FEWBIT_VNNI
INLINE U Dot4(U sum, U w, U x) { return (U)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x); }
#elif defined(__aarch64__)
INLINE U Dot4(U sum, U w, U x) {
  const int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b))), high = vpaddlq_s16(vmull_high_s8(a, b));
  return sum + (U)vpaddq_s32(low, high);
}
#else
INLINE U Dot4(U sum, U u, U s) {
  for (int b = 0; b < 4; ++b) sum += (u >> 8 * b & 255) * (U)((I)(s << (24 - 8 * b)) >> 24);
  return sum;
}
#endif
#endif

constexpr int kIntWide = kLanes * kIntAcross;  // outputs of a strip
constexpr int64_t kIntBytes = 4 * kLanes;      // of a vector

// The first `count` bytes of a vector, zeros after them.
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
static inline __mmask64 FirstBytes(int64_t count) { return count >= 64 ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1; }
static inline U LoadSome(const uint8_t* p, int64_t count) { return (U)_mm512_maskz_loadu_epi8(FirstBytes(count), p); }
#else
static inline U LoadSome(const uint8_t* p, int64_t count) {
  if (count >= kIntBytes) return LoadI(p);
  uint8_t some[kIntBytes] = {};
  if (count > 0) __builtin_memcpy(some, p, count);
  return LoadI(some);
}
#endif

// Bytes of four rows side by side: word 4 * i + j of the rows becomes part i (of four words) of vector j.
static inline void SideBySide(U (&v)[4]) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  const __m512i a = (__m512i)v[0], b = (__m512i)v[1], c = (__m512i)v[2], d = (__m512i)v[3];
  const __m512i low01 = _mm512_unpacklo_epi8(a, b), high01 = _mm512_unpackhi_epi8(a, b);
  const __m512i low23 = _mm512_unpacklo_epi8(c, d), high23 = _mm512_unpackhi_epi8(c, d);
  v[0] = (U)_mm512_unpacklo_epi16(low01, low23), v[1] = (U)_mm512_unpackhi_epi16(low01, low23);
  v[2] = (U)_mm512_unpacklo_epi16(high01, high23), v[3] = (U)_mm512_unpackhi_epi16(high01, high23);
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  const __m256i a = (__m256i)v[0], b = (__m256i)v[1], c = (__m256i)v[2], d = (__m256i)v[3];
  const __m256i low01 = _mm256_unpacklo_epi8(a, b), high01 = _mm256_unpackhi_epi8(a, b);
  const __m256i low23 = _mm256_unpacklo_epi8(c, d), high23 = _mm256_unpackhi_epi8(c, d);
  v[0] = (U)_mm256_unpacklo_epi16(low01, low23), v[1] = (U)_mm256_unpackhi_epi16(low01, low23);
  v[2] = (U)_mm256_unpacklo_epi16(high01, high23), v[3] = (U)_mm256_unpackhi_epi16(high01, high23);
#elif FEWBIT_ARM64
  const uint8x16x2_t a = vzipq_u8((uint8x16_t)v[0], (uint8x16_t)v[1]), b = vzipq_u8((uint8x16_t)v[2], (uint8x16_t)v[3]);
  const uint16x8x2_t low = vzipq_u16((uint16x8_t)a.val[0], (uint16x8_t)b.val[0]);
  const uint16x8x2_t high = vzipq_u16((uint16x8_t)a.val[1], (uint16x8_t)b.val[1]);
  v[0] = (U)low.val[0], v[1] = (U)low.val[1], v[2] = (U)high.val[0], v[3] = (U)high.val[1];
#else
  uint8_t row[4][16], side[16][4];
  for (int i = 0; i < 4; ++i) StoreI(row[i], v[i]);
  for (int n = 0; n < 16; ++n) {
    for (int i = 0; i < 4; ++i) side[n][i] = row[i][n];
  }
  for (int j = 0; j < 4; ++j) v[j] = LoadI(side[4 * j]);
#endif
}

// The order of words in which `SideBySide` leaves the words in order.
static inline U Spread(U row) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  return (U)_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), (__m512i)row);
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  return (U)_mm256_permutevar8x32_epi32((__m256i)row, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
#else
  return row;
#endif
}

// What `SideBySide` made of rows that were not spread, in order.
static inline void PartsInOrder(U (&v)[4]) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  const __m512i x = (__m512i)v[0], y = (__m512i)v[1], z = (__m512i)v[2], w = (__m512i)v[3];
  const __m512i a = _mm512_shuffle_i32x4(x, y, 0x88), b = _mm512_shuffle_i32x4(x, y, 0xDD);
  const __m512i c = _mm512_shuffle_i32x4(z, w, 0x88), d = _mm512_shuffle_i32x4(z, w, 0xDD);
  v[0] = (U)_mm512_shuffle_i32x4(a, c, 0x88), v[2] = (U)_mm512_shuffle_i32x4(a, c, 0xDD);
  v[1] = (U)_mm512_shuffle_i32x4(b, d, 0x88), v[3] = (U)_mm512_shuffle_i32x4(b, d, 0xDD);
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  const __m256i a = (__m256i)v[0], b = (__m256i)v[1], c = (__m256i)v[2], d = (__m256i)v[3];
  v[0] = (U)_mm256_permute2x128_si256(a, b, 0x20), v[1] = (U)_mm256_permute2x128_si256(c, d, 0x20);
  v[2] = (U)_mm256_permute2x128_si256(a, b, 0x31), v[3] = (U)_mm256_permute2x128_si256(c, d, 0x31);
#else
  (void)v;
#endif
}
