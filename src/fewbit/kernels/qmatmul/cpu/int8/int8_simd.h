// Vectors of 32-bit integers, and the step that the product is made of: in each lane, four unsigned bytes (on arm64: signed)
// times four signed ones are added. Tables of 16 bytes. Included in the namespace of an instruction set.

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
static inline Words HighI(Words a) { return _mm512_srli_epi32(a, 4); }
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
static inline Words HighI(Words a) { return _mm256_srli_epi32(a, 4); }
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
static inline Words HighI(Words a) { return a >> 4; }
static inline V FloatI(Words a) { return __builtin_convertvector((SignedI)a, V); }
static inline Words TableI(const uint8_t* numbers) { return LoadI(numbers); }
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
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

// What is added to the numbers of w where they are laid out, and the bits of a code that it flips. The instructions of arm64 take
// signed bytes on both sides: there numbers of 8 bits lose the 128 that makes them unsigned.
#if defined(__aarch64__)
static inline int64_t AddedTo(const IntegerJob& job) { return job.bits == 8 ? job.offset - 128 : job.offset; }
#else
static inline int64_t AddedTo(const IntegerJob& job) { return job.offset; }
#endif
static inline uint32_t Flipped(const IntegerJob& job) { return static_cast<uint32_t>(AddedTo(job)) & 255; }

// How far ahead rows are prefetched, in bytes: 16 rows or more, at least 4 KiB; the processor's own prefetching stops at each page.
// Into L2: what is fetched into L1 is gone before it is read, and its few buffers for misses stop the multiplications.
static inline int64_t PrefetchDistance(int64_t stride) { return (4096 / (16 * stride) + 1) * 16 * stride; }
