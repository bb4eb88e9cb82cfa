// Vectors of the level's width, and the few operations that C++ has no operator for.
//
// Included in each level's namespace. The vectors are those of the GCC and Clang extension, which have C++'s operators on
// any processor; a comparison gives a vector of all or no bits, and `mask ? a : b` chooses lane by lane.

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
constexpr int W = 16;
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));
typedef uint8_t B __attribute__((vector_size(W)));

#define INLINE static inline __attribute__((always_inline))
#define NO_INLINE static __attribute__((noinline))
#if FEWBIT_LEVEL != FEWBIT_LEVEL_PORTABLE || defined(__aarch64__)
#define FEWBIT_HAS_FMA 1
#else
#define FEWBIT_HAS_FMA 0
#endif

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
INLINE F Splat(float v) { return (F)_mm512_set1_ps(v); }
INLINE I Splat(int32_t v) { return (I)_mm512_set1_epi32(v); }
INLINE F Min(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }  // b where a is NaN
INLINE F Max(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE I Max(I a, I b) { return (I)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE I Min(I a, I b) { return (I)_mm512_min_epi32((__m512i)a, (__m512i)b); }
INLINE F Fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE F Fnma(F a, F b, F c) { return (F)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE F FromHalf(H h) { return (F)_mm512_cvtph_ps((__m256i)h); }
INLINE H ToHalf(F x) { return (H)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE B ToBytes(I x) { return (B)_mm512_cvtepi32_epi8((__m512i)x); }
INLINE H ToShorts(I x) { return (H)_mm512_cvtepi32_epi16((__m512i)x); }
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
INLINE F Splat(float v) { return (F)_mm256_set1_ps(v); }
INLINE I Splat(int32_t v) { return (I)_mm256_set1_epi32(v); }
INLINE F Min(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE F Max(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE I Max(I a, I b) { return (I)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE I Min(I a, I b) { return (I)_mm256_min_epi32((__m256i)a, (__m256i)b); }
INLINE F Fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE F Fnma(F a, F b, F c) { return (F)_mm256_fnmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE F FromHalf(H h) { return (F)_mm256_cvtph_ps((__m128i)h); }
INLINE H ToHalf(F x) { return (H)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE B ToBytes(I x) { return __builtin_convertvector(x, B); }
INLINE H ToShorts(I x) { return __builtin_convertvector(x, H); }
#else
INLINE F Splat(float v) { return F{v, v, v, v}; }
INLINE I Splat(int32_t v) { return I{v, v, v, v}; }
INLINE F Min(F a, F b) { return a < b ? a : b; }
INLINE F Max(F a, F b) { return a > b ? a : b; }
INLINE I Max(I a, I b) { return a > b ? a : b; }
INLINE I Min(I a, I b) { return a < b ? a : b; }
#if FEWBIT_HAS_FMA
INLINE F Fma(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE F Fnma(F a, F b, F c) { return (F)vfmsq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
typedef double D __attribute__((vector_size(8 * W)));
INLINE F Fma(F a, F b, F c) {  // a product of two float32 is exact in float64
  const D product = __builtin_convertvector(a, D) * __builtin_convertvector(b, D);
  return __builtin_convertvector(product + __builtin_convertvector(c, D), F);
}
INLINE F Fnma(F a, F b, F c) { return Fma((F)((I)a ^ (int32_t)0x80000000), b, c); }
#endif
INLINE F FromHalf(H h) {
  F x;
  for (int i = 0; i < W; ++i) x[i] = FloatOfHalf(h[i]);
  return x;
}
INLINE H ToHalf(F x) {
  H h;
  for (int i = 0; i < W; ++i) h[i] = HalfOf(x[i]);
  return h;
}
INLINE B ToBytes(I x) { return __builtin_convertvector(x, B); }
INLINE H ToShorts(I x) { return __builtin_convertvector(x, H); }
#endif

INLINE F Abs(F x) { return (F)((I)x & 0x7FFFFFFF); }
INLINE I SignBit(F x) { return (I)x & (int32_t)0x80000000; }

INLINE int32_t LargestLane(I v) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t largest = v[0];
  for (int i = 1; i < W; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
#endif
}
INLINE bool IsAny(I mask) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t any = 0;
  for (int i = 0; i < W; ++i) any |= mask[i];
  return any != 0;
#endif
}
INLINE float LowestLane(F v) {
  float lowest = v[0];
  for (int i = 1; i < W; ++i) lowest = v[i] < lowest ? v[i] : lowest;
  return lowest;
}
INLINE float HighestLane(F v) {
  float highest = v[0];
  for (int i = 1; i < W; ++i) highest = v[i] > highest ? v[i] : highest;
  return highest;
}

INLINE H ToBrain(F x) {
  const I bits = (I)x;
  const I rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const I is_nan = x != x;
  return ToShorts(is_nan ? ((bits >> 16) | 0x40) : rounded);
}

// Calls for memory that is soon read: into the second cache, since the first has no room for what comes so much later.
INLINE void Prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Elements of the array, widened.
INLINE F Load(const float* p) { F v; __builtin_memcpy(&v, p, sizeof v); return v; }
INLINE F Load(const Brain* p) {
  H h;
  __builtin_memcpy(&h, p, sizeof h);
  return (F)(__builtin_convertvector(h, U) << 16);
}
INLINE F Load(const Half* p) { H h; __builtin_memcpy(&h, p, sizeof h); return FromHalf(h); }
INLINE I LoadInts(const int32_t* p) { I v; __builtin_memcpy(&v, p, sizeof v); return v; }

// The first `count` elements; the rest repeats the first one, which no extremum sees.
template <typename T>
INLINE F LoadSome(const T* p, int64_t count) {
  if (count >= W) return Load(p);
  T some[W];
  for (int i = 0; i < W; ++i) some[i] = p[i < count ? i : 0];
  return Load(some);
}

template <typename T, typename V>
INLINE void StoreSome(T* p, V v, int64_t count) {
  if (count >= W) {
    __builtin_memcpy(p, &v, sizeof v);
  } else {
    T some[W];
    __builtin_memcpy(some, &v, sizeof v);
    for (int64_t i = 0; i < count; ++i) p[i] = some[i];
  }
}

// Transposes W vectors of W lanes.
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
INLINE void Transpose(F (&v)[W]) {
  __m512 a[W], b[W];
  for (int i = 0; i < W; i += 2) {
    a[i] = _mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
  }
  for (int i = 0; i < W; i += 4) {
    for (int k = 0; k < 2; ++k) {
      b[i + 2 * k] = (__m512)_mm512_unpacklo_pd((__m512d)a[i + k], (__m512d)a[i + k + 2]);
      b[i + 2 * k + 1] = (__m512)_mm512_unpackhi_pd((__m512d)a[i + k], (__m512d)a[i + k + 2]);
    }
  }
  for (int i = 0; i < W; i += 8) {
    for (int k = 0; k < 4; ++k) {
      a[i + k] = _mm512_shuffle_f32x4(b[i + k], b[i + k + 4], 0x88);
      a[i + k + 4] = _mm512_shuffle_f32x4(b[i + k], b[i + k + 4], 0xDD);
    }
  }
  for (int k = 0; k < 8; ++k) {
    v[k] = (F)_mm512_shuffle_f32x4(a[k], a[k + 8], 0x88);
    v[k + 8] = (F)_mm512_shuffle_f32x4(a[k], a[k + 8], 0xDD);
  }
}
#else
INLINE void Transpose(F (&v)[W]) {
  float flat[W * W];
  for (int i = 0; i < W; ++i) StoreSome(flat + i * W, v[i], W);
  for (int i = 0; i < W; ++i) {
    for (int k = 0; k < W; ++k) v[i][k] = flat[k * W + i];
  }
}
#endif
