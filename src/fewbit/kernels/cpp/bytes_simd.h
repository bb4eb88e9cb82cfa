// Vectors of 32-bit integers, and the step that products of bytes are made of: in each lane, four unsigned bytes (on arm64:
// signed) times four signed ones are added. Tables of 16 bytes. Included in the namespace of an instruction set.

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
constexpr int kIntLanes = 16, kIntAcross = 4, kIntRows = 6;  // lanes; vectors of outputs and rows of x in a block of registers
typedef __m512i Words;
static inline Words LoadI(const void* p) { return _mm512_loadu_si512(p); }
static inline void StoreI(void* p, Words v) { _mm512_storeu_si512(p, v); }
static inline Words SameI(int32_t x) { return _mm512_set1_epi32(x); }
static inline Words SubI(Words a, Words b) { return _mm512_sub_epi32(a, b); }
static inline Words MulI(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
static inline Words XorI(Words a, Words b) { return _mm512_xor_si512(a, b); }
static inline Words AndI(Words a, Words b) { return _mm512_and_si512(a, b); }
static inline Words OrI(Words a, Words b) { return _mm512_or_si512(a, b); }
static inline Words HighI(Words a) { return _mm512_srli_epi32(a, 4); }
static inline Words RightI(Words a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
static inline Words LeftI(Words a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
static inline Words LessBytes(Words a, Words b) { return _mm512_sub_epi8(a, b); }
static inline V FloatI(Words a) { return _mm512_cvtepi32_ps(a); }
static inline Words TableI(const uint8_t* numbers) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
}
static inline Words Looked(Words table, Words index) { return _mm512_shuffle_epi8(table, index); }
static inline Words Dot4(Words sum, Words u, Words s) { return _mm512_dpbusd_epi32(sum, u, s); }
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
constexpr int kIntLanes = 8, kIntAcross = 2, kIntRows = FEWBIT_VNNI ? 6 : 3;
typedef __m256i Words;
static inline Words LoadI(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
static inline void StoreI(void* p, Words v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
static inline Words SameI(int32_t x) { return _mm256_set1_epi32(x); }
static inline Words SubI(Words a, Words b) { return _mm256_sub_epi32(a, b); }
static inline Words MulI(Words a, Words b) { return _mm256_mullo_epi32(a, b); }
static inline Words XorI(Words a, Words b) { return _mm256_xor_si256(a, b); }
static inline Words AndI(Words a, Words b) { return _mm256_and_si256(a, b); }
static inline Words OrI(Words a, Words b) { return _mm256_or_si256(a, b); }
static inline Words HighI(Words a) { return _mm256_srli_epi32(a, 4); }
static inline Words RightI(Words a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
static inline Words LeftI(Words a, int n) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(n)); }
static inline Words LessBytes(Words a, Words b) { return _mm256_sub_epi8(a, b); }
static inline V FloatI(Words a) { return _mm256_cvtepi32_ps(a); }
static inline Words TableI(const uint8_t* numbers) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
}
static inline Words Looked(Words table, Words index) { return _mm256_shuffle_epi8(table, index); }
#if FEWBIT_VNNI
static inline Words Dot4(Words sum, Words u, Words s) { return _mm256_dpbusd_avx_epi32(sum, u, s); }
#else
// By way of 16 bits: the instruction that takes bytes (vpmaddubsw) saturates.
static inline Words Dot4(Words sum, Words u, Words s) {
  const Words even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const Words odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
#endif
#else
#if FEWBIT_VNNI
constexpr int kIntLanes = 4, kIntAcross = 4, kIntRows = 6;
#else
constexpr int kIntLanes = 4, kIntAcross = 2, kIntRows = 3;
#endif
typedef uint32_t Words __attribute__((vector_size(16)));  // unsigned, because sums may wrap around
typedef int32_t SignedI __attribute__((vector_size(16)));
static inline Words LoadI(const void* p) {
  Words v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
static inline void StoreI(void* p, Words v) { __builtin_memcpy(p, &v, sizeof(v)); }
static inline Words SameI(int32_t x) {
  const uint32_t u = static_cast<uint32_t>(x);
  return Words{u, u, u, u};
}
static inline Words SubI(Words a, Words b) { return a - b; }
static inline Words MulI(Words a, Words b) { return a * b; }
static inline Words XorI(Words a, Words b) { return a ^ b; }
static inline Words AndI(Words a, Words b) { return a & b; }
static inline Words OrI(Words a, Words b) { return a | b; }
static inline Words HighI(Words a) { return a >> 4; }
static inline Words RightI(Words a, int n) { return a >> n; }
static inline Words LeftI(Words a, int n) { return a << n; }
static inline V FloatI(Words a) { return __builtin_convertvector((SignedI)a, V); }
static inline Words TableI(const uint8_t* numbers) { return LoadI(numbers); }
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
static inline Words LessBytes(Words a, Words b) { return (Words)((Bytes16)a - (Bytes16)b); }
static inline Words Looked(Words table, Words index) {
#if FEWBIT_ARM64
  return (Words)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#else
  const Bytes16 from = (Bytes16)table, at = (Bytes16)index;
  Bytes16 to;
  for (int i = 0; i < 16; ++i) to[i] = from[at[i] & 15];
  return (Words)to;
#endif
}
#if FEWBIT_VNNI
static inline Words Dot4(Words sum, Words w, Words x) { return (Words)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x); }
#elif defined(__aarch64__)
static inline Words Dot4(Words sum, Words w, Words x) {
  const int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b))), high = vpaddlq_s16(vmull_high_s8(a, b));
  return sum + (Words)vpaddq_s32(low, high);
}
#else
static inline Words Dot4(Words sum, Words u, Words s) {
  for (int b = 0; b < 4; ++b) sum += (u >> 8 * b & 255) * (Words)((SignedI)(s << (24 - 8 * b)) >> 24);
  return sum;
}
#endif
#endif

constexpr int kIntWide = kIntLanes * kIntAcross;  // outputs of a strip
constexpr int64_t kIntBytes = 4 * kIntLanes;      // of a vector

// The first `count` bytes of a vector, zeros after them.
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
static inline __mmask64 FirstBytes(int64_t count) { return count >= 64 ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1; }
static inline Words LoadSome(const uint8_t* p, int64_t count) { return _mm512_maskz_loadu_epi8(FirstBytes(count), p); }
#else
static inline Words LoadSome(const uint8_t* p, int64_t count) {
  if (count >= kIntBytes) return LoadI(p);
  uint8_t some[kIntBytes] = {};
  if (count > 0) __builtin_memcpy(some, p, count);
  return LoadI(some);
}
#endif

// Bytes of four rows side by side: word 4 * i + j of the rows becomes part i (of four words) of vector j.
static inline void SideBySide(Words (&v)[4]) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  const Words low01 = _mm512_unpacklo_epi8(v[0], v[1]), high01 = _mm512_unpackhi_epi8(v[0], v[1]);
  const Words low23 = _mm512_unpacklo_epi8(v[2], v[3]), high23 = _mm512_unpackhi_epi8(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi16(low01, low23), v[1] = _mm512_unpackhi_epi16(low01, low23);
  v[2] = _mm512_unpacklo_epi16(high01, high23), v[3] = _mm512_unpackhi_epi16(high01, high23);
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  const Words low01 = _mm256_unpacklo_epi8(v[0], v[1]), high01 = _mm256_unpackhi_epi8(v[0], v[1]);
  const Words low23 = _mm256_unpacklo_epi8(v[2], v[3]), high23 = _mm256_unpackhi_epi8(v[2], v[3]);
  v[0] = _mm256_unpacklo_epi16(low01, low23), v[1] = _mm256_unpackhi_epi16(low01, low23);
  v[2] = _mm256_unpacklo_epi16(high01, high23), v[3] = _mm256_unpackhi_epi16(high01, high23);
#elif FEWBIT_ARM64
  const uint8x16x2_t a = vzipq_u8((uint8x16_t)v[0], (uint8x16_t)v[1]), b = vzipq_u8((uint8x16_t)v[2], (uint8x16_t)v[3]);
  const uint16x8x2_t low = vzipq_u16((uint16x8_t)a.val[0], (uint16x8_t)b.val[0]);
  const uint16x8x2_t high = vzipq_u16((uint16x8_t)a.val[1], (uint16x8_t)b.val[1]);
  v[0] = (Words)low.val[0], v[1] = (Words)low.val[1], v[2] = (Words)high.val[0], v[3] = (Words)high.val[1];
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
static inline Words Spread(Words row) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), row);
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  return _mm256_permutevar8x32_epi32(row, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
#else
  return row;
#endif
}

// What `SideBySide` made of rows that were not spread, in order.
static inline void PartsInOrder(Words (&v)[4]) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  const Words a = _mm512_shuffle_i32x4(v[0], v[1], 0x88), b = _mm512_shuffle_i32x4(v[0], v[1], 0xDD);
  const Words c = _mm512_shuffle_i32x4(v[2], v[3], 0x88), d = _mm512_shuffle_i32x4(v[2], v[3], 0xDD);
  v[0] = _mm512_shuffle_i32x4(a, c, 0x88), v[2] = _mm512_shuffle_i32x4(a, c, 0xDD);
  v[1] = _mm512_shuffle_i32x4(b, d, 0x88), v[3] = _mm512_shuffle_i32x4(b, d, 0xDD);
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  const Words a = _mm256_permute2x128_si256(v[0], v[1], 0x20), b = _mm256_permute2x128_si256(v[2], v[3], 0x20);
  const Words c = _mm256_permute2x128_si256(v[0], v[1], 0x31), d = _mm256_permute2x128_si256(v[2], v[3], 0x31);
  v[0] = a, v[1] = b, v[2] = c, v[3] = d;
#else
  (void)v;
#endif
}
