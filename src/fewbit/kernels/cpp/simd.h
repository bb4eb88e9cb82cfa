// SIMD vectors of one instruction set, with `kLanes` lanes of 32 bits: V of floats, I and U of integers, H and B narrower ones.
//
// The vectors are those of the GCC and Clang extension, which have C++'s operators; a comparison gives a vector of all or no bits,
// and `mask ? a : b` selects lane by lane. The functions are what C++ has no operator for.
// Included in the namespace of an instruction set (foreach_isa.h).

// Before a loop over an array of vectors, which GCC else keeps in memory (-O2). At most 32 iterations.
#define UNROLL _Pragma("GCC unroll 32")
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define NO_INLINE static __attribute__((noinline))

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
constexpr int kLanes = 16;
typedef __m512 V;
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
constexpr int kLanes = 8;
typedef __m256 V;
#else
constexpr int kLanes = 4;
typedef float V __attribute__((vector_size(16)));
#endif
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef uint16_t H __attribute__((vector_size(2 * kLanes)));
typedef uint8_t B __attribute__((vector_size(kLanes)));

// ToInts and ToBytes are conversions for which GCC takes each lane out of its register. Min and Max are b where a is NaN. MulAdd rounds once where the processor has fused operations; Fma and Fnma everywhere.
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
INLINE V Load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void Store(float* p, V v) { _mm512_storeu_ps(p, v); }
INLINE V Same(float x) { return _mm512_set1_ps(x); }
INLINE I Same(int32_t x) { return (I)_mm512_set1_epi32(x); }
INLINE V Add(V a, V b) { return _mm512_add_ps(a, b); }
INLINE V Sub(V a, V b) { return _mm512_sub_ps(a, b); }
INLINE V Mul(V a, V b) { return _mm512_mul_ps(a, b); }
INLINE V Fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V Fnma(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE V MulAdd(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V Min(V a, V b) { return _mm512_min_ps(a, b); }
INLINE V Max(V a, V b) { return _mm512_max_ps(a, b); }
INLINE I Min(I a, I b) { return (I)_mm512_min_epi32((__m512i)a, (__m512i)b); }
INLINE I Max(I a, I b) { return (I)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE V FromHalf(H h) { return _mm512_cvtph_ps((__m256i)h); }
INLINE H ToHalf(V x) { return (H)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE I ToInts(B bytes) { return (I)_mm512_cvtepu8_epi32((__m128i)bytes); }
INLINE B ToBytes(I x) { return (B)_mm512_cvtepi32_epi8((__m512i)x); }
INLINE H ToShorts(I x) { return (H)_mm512_cvtepi32_epi16((__m512i)x); }
INLINE bool IsAny(I mask) { return _mm512_movepi32_mask((__m512i)mask) != 0; }
INLINE int32_t LargestLane(I v) { return _mm512_reduce_max_epi32((__m512i)v); }
INLINE float SumOfLanes(V v) { return _mm512_reduce_add_ps(v); }
#else
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
INLINE V Load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void Store(float* p, V v) { _mm256_storeu_ps(p, v); }
INLINE V Same(float x) { return _mm256_set1_ps(x); }
INLINE I Same(int32_t x) { return (I)_mm256_set1_epi32(x); }
INLINE V Add(V a, V b) { return _mm256_add_ps(a, b); }
INLINE V Sub(V a, V b) { return _mm256_sub_ps(a, b); }
INLINE V Mul(V a, V b) { return _mm256_mul_ps(a, b); }
INLINE V Fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V Fnma(V a, V b, V c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE V MulAdd(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V Min(V a, V b) { return _mm256_min_ps(a, b); }
INLINE V Max(V a, V b) { return _mm256_max_ps(a, b); }
INLINE I Min(I a, I b) { return (I)_mm256_min_epi32((__m256i)a, (__m256i)b); }
INLINE I Max(I a, I b) { return (I)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE V FromHalf(H h) { return _mm256_cvtph_ps((__m128i)h); }
INLINE H ToHalf(V x) { return (H)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE bool IsAny(I mask) { return _mm256_movemask_ps((V)mask) != 0; }
INLINE I ToInts(B bytes) { return (I)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes)); }
INLINE B ToBytes(I x) {
  const __m256i each = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0C080400));  // four bytes in every word of a half
  return (B)_mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(each), _mm256_extracti128_si256(each, 1)));
}
#else
INLINE V Load(const float* p) { V v; __builtin_memcpy(&v, p, sizeof v); return v; }
INLINE void Store(float* p, V v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE V Same(float x) { return V{x, x, x, x}; }
INLINE I Same(int32_t x) { return I{x, x, x, x}; }
INLINE V Add(V a, V b) { return a + b; }
INLINE V Sub(V a, V b) { return a - b; }
INLINE V Mul(V a, V b) { return a * b; }
#if FEWBIT_ARM64
INLINE V Fma(V a, V b, V c) { return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE V Fnma(V a, V b, V c) { return (V)vfmsq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE V MulAdd(V a, V b, V c) { return Fma(a, b, c); }
#else
typedef double D __attribute__((vector_size(8 * kLanes)));
INLINE V Fma(V a, V b, V c) {  // a product of two float32 is exact in float64
  const D product = __builtin_convertvector(a, D) * __builtin_convertvector(b, D);
  return __builtin_convertvector(product + __builtin_convertvector(c, D), V);
}
INLINE V Fnma(V a, V b, V c) { return Fma((V)((I)a ^ (int32_t)0x80000000), b, c); }
INLINE V MulAdd(V a, V b, V c) { return a * b + c; }
#endif
INLINE V Min(V a, V b) { return a < b ? a : b; }
INLINE V Max(V a, V b) { return a > b ? a : b; }
INLINE I Min(I a, I b) { return a < b ? a : b; }
INLINE I Max(I a, I b) { return a > b ? a : b; }
NO_INLINE V FromHalf(H h) {
  V x;
  for (int i = 0; i < kLanes; ++i) x[i] = FloatOfHalf(h[i]);
  return x;
}
NO_INLINE H ToHalf(V x) {
  H h;
  for (int i = 0; i < kLanes; ++i) h[i] = HalfOf(x[i]);
  return h;
}
INLINE bool IsAny(I mask) {
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= mask[i];
  return any != 0;
}
INLINE I ToInts(B bytes) { return __builtin_convertvector(bytes, I); }
INLINE B ToBytes(I x) { return __builtin_convertvector(x, B); }
#endif
INLINE H ToShorts(I x) { return __builtin_convertvector(x, H); }
INLINE int32_t LargestLane(I v) {
  int32_t largest = v[0];
  for (int i = 1; i < kLanes; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}
// Halves are added to halves: the same order whatever the code around it.
INLINE float SumOfLanes(V v) {
  float lane[kLanes];
  Store(lane, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}
#endif

INLINE V Abs(V x) { return (V)((I)x & 0x7FFFFFFF); }
INLINE I SignBit(V x) { return (I)x & (int32_t)0x80000000; }
INLINE H ToBrain(V x) {
  const I bits = (I)x;
  const I rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const I is_nan = x != x;
  return ToShorts(is_nan ? ((bits >> 16) | 0x40) : rounded);
}
INLINE V FromBrain(H h) { return (V)(__builtin_convertvector(h, U) << 16); }
INLINE V Load(const Brain* p) {
  H h;
  __builtin_memcpy(&h, p, sizeof h);
  return FromBrain(h);
}
INLINE V Load(const Half* p) { H h; __builtin_memcpy(&h, p, sizeof h); return FromHalf(h); }
INLINE I LoadInts(const int32_t* p) { I v; __builtin_memcpy(&v, p, sizeof v); return v; }

// The first `count` elements; the rest repeats the first one, which no extremum sees.
template <typename T>
INLINE V LoadSome(const T* p, int64_t count) {
  if (count >= kLanes) return Load(p);
  T some[kLanes];
  for (int i = 0; i < kLanes; ++i) some[i] = p[i < count ? i : 0];
  return Load(some);
}

template <typename T, typename Vector>
INLINE void StoreSome(T* p, Vector v, int64_t count) {
  if (count >= kLanes) {
    __builtin_memcpy(p, &v, sizeof v);
  } else {
    T some[kLanes];
    __builtin_memcpy(some, &v, sizeof v);
    for (int64_t i = 0; i < count; ++i) p[i] = some[i];
  }
}
