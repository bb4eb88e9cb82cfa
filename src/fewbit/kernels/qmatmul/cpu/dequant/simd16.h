// Sixteen lanes, however many a register has: numbers (V16), and words of 32 bits that hold codes (W16). With AVX-512 both are
// one register, with AVX2 two, with NEON four. Included in the namespace of an instruction set.

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512

typedef V V16;
typedef __m512i W16;
static inline V16 Load16(const float* p) { return Load(p); }
static inline void Store16(float* p, const V16& v) { Store(p, v); }
static inline V16 Same16(float x) { return Same(x); }
static inline W16 Words16(const void* p) { return _mm512_loadu_si512(p); }
static inline W16 SameWord(uint32_t x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); }
static inline W16 ShiftRight(const W16& w, int n) { return _mm512_srli_epi32(w, n); }
static inline W16 ShiftLeft(const W16& w, int n) { return _mm512_slli_epi32(w, n); }
static inline W16 Chosen(const W16& bits, const W16& a, const W16& b) { return _mm512_ternarylogic_epi32(bits, a, b, 0xCA); }
// The bits of `kept`, those of `flip` flipped.
static inline W16 Flipped(const W16& w, const W16& kept, const W16& flip) { return _mm512_ternarylogic_epi32(w, kept, flip, 0x6A); }
static inline W16 And(const W16& a, const W16& b) { return _mm512_and_si512(a, b); }
static inline W16 Or(const W16& a, const W16& b) { return _mm512_or_si512(a, b); }
static inline V16 AsFloats(const W16& w) { return _mm512_castsi512_ps(w); }
static inline W16 AsWords(const V16& v) { return _mm512_castps_si512(v); }
// Element index[i] of 16 in each lane; bits above the four lowest may be anything.
static inline V16 Permuted(const W16& index, const V16& of) { return _mm512_permutexvar_ps(index, of); }
static inline V16 Looked16(const W16& index, const float* of, bool) { return Permuted(index, Load16(of)); }

// The first n of at most 16 numbers, and zeros.
static inline V16 FirstOf(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p); }

// 64 bytes, of which `left` are there.
static inline W16 BytesAt(const uint8_t* p, int64_t left) {
  if (left >= 64) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi8(left <= 0 ? 0 : (1ull << left) - 1, p);
}

#elif FEWBIT_HAS_LOOKUP

constexpr int kPieces = 16 / kLanes;

struct V16 {
  V v[kPieces];
};
struct W16 {
  U u[kPieces];
};

#define FEWBIT_EACH UNROLL for (int i = 0; i < kPieces; ++i)
static inline V16 Load16(const float* p) {
  V16 r;
  FEWBIT_EACH r.v[i] = Load(p + i * kLanes);
  return r;
}
static inline void Store16(float* p, const V16& v) { FEWBIT_EACH Store(p + i * kLanes, v.v[i]); }
static inline V16 Same16(float x) {
  V16 r;
  FEWBIT_EACH r.v[i] = Same(x);
  return r;
}
static inline V16 Add(const V16& a, const V16& b) {
  V16 r;
  FEWBIT_EACH r.v[i] = Add(a.v[i], b.v[i]);
  return r;
}
static inline V16 Sub(const V16& a, const V16& b) {
  V16 r;
  FEWBIT_EACH r.v[i] = Sub(a.v[i], b.v[i]);
  return r;
}
static inline V16 Mul(const V16& a, const V16& b) {
  V16 r;
  FEWBIT_EACH r.v[i] = Mul(a.v[i], b.v[i]);
  return r;
}
static inline V16 MulAdd(const V16& a, const V16& b, const V16& c) {
  V16 r;
  FEWBIT_EACH r.v[i] = MulAdd(a.v[i], b.v[i], c.v[i]);
  return r;
}
static inline float SumOfLanes(const V16& v) {
  V sum = v.v[0];
  for (int i = 1; i < kPieces; ++i) sum = Add(sum, v.v[i]);
  return SumOfLanes(sum);
}
// A register at a time: GCC copies the struct by halves of a register, and a load of both halves waits until they are stored.
static inline W16 Words16(const void* p) {
  W16 r;
  FEWBIT_EACH r.u[i] = (U)Load(static_cast<const float*>(p) + i * kLanes);
  return r;
}
static inline W16 SameWord(uint32_t x) {
  W16 r;
  FEWBIT_EACH r.u[i] = U{} + x;
  return r;
}
static inline W16 ShiftRight(const W16& w, int n) {
  W16 r;
  FEWBIT_EACH r.u[i] = w.u[i] >> n;
  return r;
}
static inline W16 ShiftLeft(const W16& w, int n) {
  W16 r;
  FEWBIT_EACH r.u[i] = w.u[i] << n;
  return r;
}
static inline W16 ShiftRightSigned(const W16& w, int n) {
  W16 r;
  FEWBIT_EACH r.u[i] = (U)((I)w.u[i] >> n);
  return r;
}
static inline V16 Numbers16(const W16& w) {
  V16 r;
  FEWBIT_EACH r.v[i] = __builtin_convertvector((I)w.u[i], V);
  return r;
}
static inline W16 And(const W16& a, const W16& b) {
  W16 r;
  FEWBIT_EACH r.u[i] = a.u[i] & b.u[i];
  return r;
}
static inline W16 Or(const W16& a, const W16& b) {
  W16 r;
  FEWBIT_EACH r.u[i] = a.u[i] | b.u[i];
  return r;
}
static inline W16 Xor(const W16& a, const W16& b) {
  W16 r;
  FEWBIT_EACH r.u[i] = a.u[i] ^ b.u[i];
  return r;
}
static inline W16 Chosen(const W16& bits, const W16& a, const W16& b) {
  W16 r;
  FEWBIT_EACH r.u[i] = (bits.u[i] & a.u[i]) | (~bits.u[i] & b.u[i]);
  return r;
}
static inline W16 Flipped(const W16& w, const W16& kept, const W16& flip) { return Xor(And(w, kept), flip); }
static inline V16 AsFloats(const W16& w) {
  V16 r;
  FEWBIT_EACH r.v[i] = (V)w.u[i];
  return r;
}
static inline W16 AsWords(const V16& v) {
  W16 r;
  FEWBIT_EACH r.u[i] = (U)v.v[i];
  return r;
}
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
static inline V16 Permuted(const W16& index, const V16& of) {
  V16 r;
  FEWBIT_EACH {
    const __m256i at = (__m256i)index.u[i];
    const V low = _mm256_permutevar8x32_ps(of.v[0], at), high = _mm256_permutevar8x32_ps(of.v[1], at);
    r.v[i] = _mm256_blendv_ps(low, high, (V)(index.u[i] << 28));
  }
  return r;
}
#else
static inline V16 Permuted(const W16& index, const V16& of) {
  uint8x16x4_t bytes;
  UNROLL for (int i = 0; i < 4; ++i) bytes.val[i] = (uint8x16_t)of.v[i];
  V16 r;
  FEWBIT_EACH r.v[i] = (V)vqtbl4q_u8(bytes, (uint8x16_t)(index.u[i] * 0x04040404u + 0x03020100u));
  return r;
}
#endif
// Element index[i] of 16, or of 8 if all are `near`.
static inline V16 Looked16(const W16& index, const float* of, bool near) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  if (near) {
    V16 r;
    FEWBIT_EACH r.v[i] = _mm256_permutevar8x32_ps(Load(of), (__m256i)index.u[i]);
    return r;
  }
#endif
  return Permuted(index, Load16(of));
}
#undef FEWBIT_EACH

static inline V16 FirstOf(const float* p, int64_t n) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  static const int32_t is_there[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  V16 r;
  UNROLL for (int i = 0; i < kPieces; ++i) {
    r.v[i] = _mm256_maskload_ps(p + i * kLanes, (__m256i)Load(reinterpret_cast<const float*>(is_there + 16 - n + i * kLanes)));
  }
  return r;
#else
  float there[16] = {};
  for (int64_t i = 0; i < n; ++i) there[i] = p[i];
  return Load16(there);
#endif
}

static inline W16 BytesAt(const uint8_t* p, int64_t left) {
  uint8_t there[64];
  if (left < 64) {
    std::memset(there, 0, sizeof(there));
    if (left > 0) std::memcpy(there, p, left);
    p = there;
  }
  return Words16(p);
}

static inline void TransposeWords(W16* a) {
  float from[16 * 16], to[16 * 16];
  std::memcpy(from, a, sizeof(from));
  for (int i = 0; i < 16; i += kLanes) {
    for (int j = 0; j < 16; j += kLanes) Transpose(from + 16 * i + j, 16, to + 16 * j + i, 16);
  }
  std::memcpy(a, to, sizeof(to));
}

#endif
