// The products of a step, and how w is laid out for them. Included in the namespace of an instruction set.

constexpr int kDecoded = 7;  // the kBits of kernels whose codes were unpacked to bytes first
constexpr int kIntDeep = FEWBIT_I8MM ? 8 : 4;  // contracted bytes of a row, or of an output, that panels have side by side

// In each lane, the products of four bytes of w with four of x are added; of 4-bit codes those of the low halves and of the high ones.
// AVX2's instruction for bytes saturates beyond 16 bits. Numbers of 4 bits are small enough for it (wide ones are decoded);
// decoded ones, from -127 to 127, are if x is the unsigned side.
template <int kBits>
static inline U AddProducts(U sum, const U* w, const U* x) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2 && !FEWBIT_VNNI
  if constexpr (kBits == 4) {
    const __m256i first = _mm256_maddubs_epi16((__m256i)w[0], (__m256i)x[0]);
    const __m256i pairs = _mm256_add_epi16(first, _mm256_maddubs_epi16((__m256i)w[1], (__m256i)x[1]));
    return sum + (U)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  if constexpr (kBits == kDecoded) {
    const __m256i signs = (__m256i)x[0], pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signs), _mm256_sign_epi8((__m256i)w[0], signs));
    return sum + (U)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
#endif
  sum = Dot4(sum, w[0], x[0]);
  if constexpr (kBits == 4) sum = Dot4(sum, w[1], x[1]);
  return sum;
}

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
