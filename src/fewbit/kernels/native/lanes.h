// Vectors of floats as wide as the level has them: V, kLanes, and the few operations that kernels share.
//
// Included inside a level's namespace (see isa.h), so there is no include guard.

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
constexpr int kLanes = 16;
typedef __m512 V;
static inline V Load(const float* p) { return _mm512_loadu_ps(p); }
static inline void Store(float* p, V v) { _mm512_storeu_ps(p, v); }
static inline V Same(float x) { return _mm512_set1_ps(x); }
static inline V Add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V Sub(V a, V b) { return _mm512_sub_ps(a, b); }
static inline V Mul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V MulAdd(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
static inline V WidenedF16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
constexpr int kLanes = 8;
typedef __m256 V;
static inline V Load(const float* p) { return _mm256_loadu_ps(p); }
static inline void Store(float* p, V v) { _mm256_storeu_ps(p, v); }
static inline V Same(float x) { return _mm256_set1_ps(x); }
static inline V Add(V a, V b) { return _mm256_add_ps(a, b); }
static inline V Sub(V a, V b) { return _mm256_sub_ps(a, b); }
static inline V Mul(V a, V b) { return _mm256_mul_ps(a, b); }
static inline V MulAdd(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
static inline V WidenedF16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
#else
constexpr int kLanes = 4;
typedef float V __attribute__((vector_size(16)));
static inline V Load(const float* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
static inline void Store(float* p, V v) { __builtin_memcpy(p, &v, sizeof(v)); }
static inline V Same(float x) { return V{x, x, x, x}; }
static inline V Add(V a, V b) { return a + b; }
static inline V Sub(V a, V b) { return a - b; }
static inline V Mul(V a, V b) { return a * b; }
#if defined(__aarch64__)
static inline V MulAdd(V a, V b, V c) { return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
static inline V MulAdd(V a, V b, V c) { return a * b + c; }
#endif
static inline V WidenedF16(const uint16_t* p) {
  return V{FloatOfHalf(p[0]), FloatOfHalf(p[1]), FloatOfHalf(p[2]), FloatOfHalf(p[3])};
}
#endif

// The sum of the lanes, halves added to halves: the same order whatever the code around it.
static inline float SumOfLanes(V v) {
  float lane[kLanes];
  Store(lane, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}
