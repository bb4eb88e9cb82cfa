// Rows of codes into bytes that are multiplied: every width of 1 to 7 bits, every table of integers from -127 to 127. Included in the
// namespace of an instruction set.

// Whether the bytes are the numbers themselves, which takes instructions for signed bytes on both sides, or for 16 bits where x is the
// unsigned side; else they are unsigned: the numbers plus the job's offset.
#if FEWBIT_ARM64 || (FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2 && !FEWBIT_VNNI)
constexpr bool kSignedBytes = true;
#else
constexpr bool kSignedBytes = false;
#endif

// Codes of 8 bits, and those of 4 whose unsigned numbers fit the instruction, are multiplied without this.
static inline bool IsDecoded(const BlockJob& job) {
  return job.w.bits != 8 && (job.w.bits != 4 || (job.largest > 63 && kSignedBytes));
}

// Bytes of a decoded row that are multiplied, and to the next row: decoding takes room for 64 more.
static inline int64_t DecodedBytes(const BlockJob& job) { return (job.w.cols + kIntBytes - 1) / kIntBytes * kIntBytes; }
static inline int64_t DecodedStride(const BlockJob& job) { return DecodedBytes(job) + 64; }

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512

// The numbers of 64 codes plus the job's offset.
static inline U NumbersOf(const BlockJob& job, U codes) {
  const __m512i low = _mm512_loadu_si512(job.numbers);
  if (job.w.bits < 7) return (U)_mm512_permutexvar_epi8((__m512i)codes, low);
  return (U)_mm512_permutex2var_epi8(low, (__m512i)codes, _mm512_loadu_si512(job.numbers + 64));
}

// The numbers of row n plus the job's offset; where kIsSigned, without it.
//
// 64 codes at a time: each group of 8, `bits` bytes, goes to the start of 8 bytes, where one instruction cuts 8 fields.
template <bool kIsSigned>
static void DecodeBytes(const BlockJob& job, int64_t n, uint8_t* out) {
  static_assert(!kIsSigned, "bytes of w are unsigned here");
  const int bits = job.w.bits;
  alignas(64) uint8_t spread[64], field[64];
  for (int i = 0; i < 64; ++i) {
    spread[i] = static_cast<uint8_t>(i / 8 * bits + (i % 8 < bits ? i % 8 : 0));
    field[i] = static_cast<uint8_t>(i % 8 * bits);
  }
  const __m512i to = _mm512_load_si512(spread), at = _mm512_load_si512(field), mask = _mm512_set1_epi8(static_cast<char>((1 << bits) - 1));
  const uint8_t *p = job.w.codes + n * job.w.row_stride, *end = p + job.w.row_stride;
  const int64_t distance = PrefetchDistance(job.w.row_stride);
  for (int64_t i = 0; i < job.w.cols; i += 64, p += 8 * bits) {
    const __mmask64 there = FirstBytes(end - p);
    __builtin_prefetch(p + distance, 0, 2);
    const __m512i packed = _mm512_permutexvar_epi8(to, _mm512_maskz_loadu_epi8(there, p));
    const __m512i codes = _mm512_and_si512(_mm512_multishift_epi64_epi8(at, packed), mask);
    StoreI(out + i, NumbersOf(job, (U)codes));
  }
}

#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2

// 32 codes from their 4 * `bits` bytes, of which 32 can be read: each goes to 16 bits with the byte that follows its first one, is
// shifted to the top by a multiplication, and down from there.
struct Unpacking {
  __m256i first, second, factors;
  __m128i down;
  int64_t half;  // bytes of 16 codes

  explicit Unpacking(int bits) : down(_mm_cvtsi32_si128(16 - bits)), half(2 * bits) {
    alignas(32) uint8_t at[2][32];
    alignas(32) uint16_t factor[16];
    for (int j = 0; j < 8; ++j) {
      const int byte = j * bits / 8;
      for (int lane = 0; lane < 2; ++lane) {
        for (int b = 0; b < 2; ++b) {
          at[0][16 * lane + 2 * j + b] = static_cast<uint8_t>(byte + b);
          at[1][16 * lane + 2 * j + b] = static_cast<uint8_t>(byte + b + bits);
        }
        factor[8 * lane + j] = static_cast<uint16_t>(1 << (16 - bits - j * bits % 8));
      }
    }
    first = (__m256i)LoadI(at[0]), second = (__m256i)LoadI(at[1]), factors = (__m256i)LoadI(factor);
  }

  U Codes(const uint8_t* p) const {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + half));
    const __m256i both = _mm256_set_m128i(high, low);
    const __m256i a = _mm256_srl_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(both, first), factors), down);
    const __m256i b = _mm256_srl_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(both, second), factors), down);
    return (U)_mm256_packus_epi16(a, b);
  }
};

// The numbers of 32 codes plus the job's offset.
static inline U NumbersOf(const BlockJob& job, U codes) {
  if (job.is_flipped) return codes ^ (U)_mm256_set1_epi8(static_cast<char>(job.flip));
  U numbers = Looked(TableI(job.numbers), codes);
  for (int from = 16; from < 1 << job.w.bits; from += 16) {
    const __m256i upper = _mm256_and_si256((__m256i)codes, _mm256_set1_epi8(0x70));
    const __m256i here = _mm256_cmpeq_epi8(upper, _mm256_set1_epi8(static_cast<char>(from)));
    numbers = (U)_mm256_blendv_epi8((__m256i)numbers, (__m256i)Looked(TableI(job.numbers + from), codes), here);
  }
  return numbers;
}

template <bool kIsSigned>
static void DecodeBytes(const BlockJob& job, int64_t n, uint8_t* out) {
  const Unpacking unpacking(job.w.bits);
  const uint8_t *p = job.w.codes + n * job.w.row_stride, *end = p + job.w.row_stride;
  const int64_t distance = PrefetchDistance(job.w.row_stride);
  const U offset = (U)_mm256_set1_epi8(static_cast<char>(kIsSigned ? job.offset : 0));
  for (int64_t i = 0; i < job.w.cols; i += 32, p += 4 * job.w.bits) {
    uint8_t last[32];
    const bool is_last = end - p < 32;
    if (is_last) std::memset(last, 0, sizeof(last));
    __builtin_prefetch(p + distance, 0, 2);
    const uint8_t* from = is_last ? static_cast<const uint8_t*>(std::memcpy(last, p, end - p)) : p;
    StoreI(out + i, LessBytes(NumbersOf(job, unpacking.Codes(from)), offset));
  }
}

#else

// The numbers of 16 codes plus the job's offset.
static inline U NumbersOf(const BlockJob& job, U codes) {
  uint8_t number[kIntBytes];
  StoreI(number, codes);
  for (int i = 0; i < kIntBytes; ++i) number[i] = job.numbers[number[i]];
  return LoadI(number);
}

template <bool kIsSigned>
static void DecodeBytes(const BlockJob& job, int64_t n, uint8_t* out) {
  CodesOfRow(job.w, n, 0, job.w.cols, out);
  const uint8_t offset = static_cast<uint8_t>(kIsSigned ? job.offset : 0);
  for (int64_t i = 0; i < job.w.cols; ++i) out[i] = static_cast<uint8_t>(job.numbers[out[i]] - offset);
  std::memset(out + job.w.cols, 0, DecodedBytes(job) - job.w.cols);
}

#endif

static inline U SameBytes(int byte) { return SameI(static_cast<int32_t>(static_cast<uint8_t>(byte) * 0x01010101u)); }

// Rows [k, k + count) of a weight [K, N], outputs [n0, n0 + outputs): the numbers plus the job's offset less `offset`, rows of `width`
// bytes, whole vectors of them.
static void DecodeRows(const BlockJob& job, int64_t k, int64_t count, int64_t n0, int64_t outputs, int64_t width, int32_t offset,
                       uint8_t* out) {
  const int bits = job.w.bits, mask = (1 << bits) - 1;
  const U less = SameBytes(offset);
  for (const int64_t end = k + count; k < end; ++k, out += width) {
    const uint8_t* row = job.w.codes + k * bits / 8 * job.w.row_stride + n0;
    const int shift = static_cast<int>(k * bits % 8), rest = 8 - shift;
    const U first = SameBytes(rest < bits ? (1 << rest) - 1 : mask), second = SameBytes(mask >> rest << rest);
    for (int64_t n = 0; n < outputs; n += kIntBytes) {
      __builtin_prefetch(row + n + 16 * job.w.row_stride);
      U codes = (LoadSome(row + n, outputs - n) >> shift) & first;
      if (rest < bits) codes |= (LoadSome(row + n + job.w.row_stride, outputs - n) << rest) & second;
      StoreI(out + n, LessBytes(NumbersOf(job, codes), less));
    }
  }
}
