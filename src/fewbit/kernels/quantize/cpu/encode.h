// From elements in units of their scale to codes. Included in the namespace of an instruction set, after simd.h.

// The random numbers of stochastic rounding: those of jax.random.uniform with a Threefry key. A lane is an element, and the counter
// its place in the array, so that any part of an array can be rounded alone. Reference: Salmon et al., Parallel random numbers: as
// easy as 1, 2, 3 (SC 2011), Threefry-2x32 with 20 rounds.
template <int by>
INLINE U Rotated(U x) { return (x << by) | (x >> (32 - by)); }

struct Threefry {
  uint32_t key[3];
  explicit Threefry(const uint32_t* two) : key{two[0], two[1], two[0] ^ two[1] ^ 0x1BD11BDA} {}

  template <int a, int b, int c, int d>
  INLINE_MEMBER void FourRounds(U& x, U& y, uint32_t i) const {
    x += y, y = Rotated<a>(y) ^ x;
    x += y, y = Rotated<b>(y) ^ x;
    x += y, y = Rotated<c>(y) ^ x;
    x += y, y = Rotated<d>(y) ^ x;
    x += key[i % 3], y += key[(i + 1) % 3] + i;
  }

  // Numbers in [0, 1) for the elements from place `at` on.
  INLINE_MEMBER V Uniform(uint64_t at) const {
    U low, high;
    for (int i = 0; i < kLanes; ++i) low[i] = (uint32_t)(at + i), high[i] = (uint32_t)((at + i) >> 32);
    U x = high + key[0], y = low + key[1];
    FourRounds<13, 15, 26, 6>(x, y, 1);
    FourRounds<17, 29, 16, 24>(x, y, 2);
    FourRounds<13, 15, 26, 6>(x, y, 3);
    FourRounds<17, 29, 16, 24>(x, y, 4);
    FourRounds<13, 15, 26, 6>(x, y, 5);
    return (V)(((x ^ y) >> 9) | 0x3F800000) - 1.0f;
  }
};

// Adding 1.5 * 2**23 to a float below 2**22 rounds it to the nearest even integer, which is in the low bits.
constexpr float kRounder = 12582912.0f;
constexpr int32_t kRounderBits = 0x4B400000;

// floor(x), and 1 more where `noise` is below what floor cuts off; |x| is small.
INLINE V StochasticallyRounded(V x, V noise) {
  const V whole = __builtin_convertvector(__builtin_convertvector(x, I), V);
  const V floor = (whole > x) ? whole - 1.0f : whole;
  return (noise < x - floor) ? floor + 1.0f : floor;
}

// A whole number of the scale's steps, clipped.
struct IntegerCoder {
  V inverse_step, low, high;
  I add, mask;
  explicit IntegerCoder(const Format& f)
      : inverse_step(Same(f.inverse_step)), low(Same(f.low)), high(Same(f.high)),
        add(Same(f.add - kRounderBits)), mask(Same((1 << f.bits) - 1)) {}
  INLINE_MEMBER I operator()(V q, V) const {
    return ((I)(Min(Max(q * inverse_step, low), high) + Same(kRounder)) + add) & mask;
  }
  INLINE_MEMBER I Stochastic(V q, V, V noise) const {
    const V rounded = StochasticallyRounded(Min(Max(q * inverse_step, low), high), noise);
    return ((I)(rounded + Same(kRounder)) + add) & mask;
  }
};

// The nearest number of steps of the current exponent; a carry runs on into the exponent field by itself.
// `sign` gives the sign, which a quotient that underflows loses.
struct MinifloatCoder {
  V max;
  I lowest, shift_bits, code_shift, sign_shift;  // by vectors: a shift by one number for all lanes takes two instructions
  bool is_signed, is_fnuz;
  explicit MinifloatCoder(const Format& f)
      : max(Same(f.max)), lowest(Same((int32_t)((128 - f.bias) << 23))), shift_bits(Same((int32_t)((23 - f.mantissa) << 23))),
        code_shift(Same((int32_t)(23 - f.mantissa))), sign_shift(Same((int32_t)(31 - (f.bits - f.is_signed)))),
        is_signed(f.is_signed), is_fnuz(f.is_fnuz) {}
  INLINE_MEMBER I operator()(V q, V sign) const {
    const V magnitude = Min(Abs(q), max);
    const I exponent = Max((I)magnitude & 0x7F800000, lowest);
    const I shifter = exponent + shift_bits;  // its last place is the step
    const I steps = (I)(magnitude + (V)shifter) - shifter;
    return WithSign(((exponent - lowest) >> code_shift) + steps, sign);
  }
  INLINE_MEMBER I Stochastic(V q, V sign, V noise) const {
    const V magnitude = Min(Abs(q), max);
    const I exponent = Max((I)magnitude & 0x7F800000, lowest);
    // Divided by the step, 2**(exponent - mantissa): a power of two whose exponent field is the difference.
    const V inverse_step = (V)((Same((int32_t)(254 << 23)) - exponent) + (Same((int32_t)(23 << 23)) - shift_bits));
    const I steps = __builtin_convertvector(StochasticallyRounded(magnitude * inverse_step, noise), I);
    return WithSign(((exponent - lowest) >> code_shift) + steps, sign);
  }
  INLINE_MEMBER I WithSign(I code, V sign) const {
    const I negative = (I)sign >> 31;
    if (!is_signed) return code & ~negative;
    const I bit = (I)((U)SignBit(sign) >> (U)sign_shift);
    return is_fnuz ? code | (bit & (code > 0)) : code | bit;
  }
};

// How many thresholds are below: by halving where lanes look a threshold up, of which a register has 16 (AVX-512) or 8 (AVX2, whose
// largest table has 8 as well: those that the first three comparisons leave); else added up one by one, in steps of the code.
struct CodebookCoder {
  const Format& format;
  I plus, minus;
  bool has_two_zeros, is_sorted;
  explicit CodebookCoder(const Format& f)
      : format(f), plus(Same((int32_t)f.plus_zero)), minus(Same((int32_t)f.minus_zero)), has_two_zeros(f.plus_zero >= 0), is_sorted(true) {
    for (int i = 0; i < f.count; ++i) is_sorted = is_sorted && f.codes[i] == i;
    MakeTables();
  }
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  V middle, after4, after2, after1;  // the threshold that is asked next, by what is known of the place
  I codes;
  void MakeTables() {
    float all[32];
    for (int i = 0; i < 32; ++i) all[i] = i + 1 < format.count ? format.thresholds[i] : __builtin_inff();
    middle = Same(all[7]), after4 = Load(all + 3), after2 = Load(all + 1), after1 = Load(all);
    codes = LoadInts(format.codes);
  }
  INLINE_MEMBER I operator()(V q, V sign) const {
    auto beyond = [&](I place, V threshold, int step) {
      const __mmask16 is_beyond = _mm512_cmp_ps_mask((__m512)q, (__m512)threshold, _CMP_GT_OQ);
      return (I)_mm512_mask_add_epi32((__m512i)place, is_beyond, (__m512i)place, _mm512_set1_epi32(step));
    };
    auto of = [&](I place, V thresholds) { return (V)_mm512_permutexvar_ps((__m512i)place, (__m512)thresholds); };
    I code = beyond(Same((int32_t)0), middle, 8);
    code = beyond(code, of(code, after4), 4);
    code = beyond(code, of(code, after2), 2);
    code = beyond(code, of(code, after1), 1);
    if (!is_sorted) code = (I)_mm512_permutexvar_epi32((__m512i)code, (__m512i)codes);
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  V middle, after1, after2, after3;  // the threshold that is asked next, by the answers before: none, one, two, three
  I codes[2];
  void MakeTables() {
    auto all = [&](int i) { return i + 1 < format.count ? format.thresholds[i] : __builtin_inff(); };
    middle = Same(all(7));
    for (int i = 0; i < 8; ++i) {
      after1[i] = all(3 + 8 * (i % 2)), after2[i] = all(1 + 4 * (i % 4)), after3[i] = all(2 * i);
      codes[0][i] = format.codes[i], codes[1][i] = format.codes[8 + i];
    }
  }
  INLINE_MEMBER I operator()(V q, V sign) const {
    auto next = [&](I place, V thresholds) {
      return place + place - (I)(q > (V)_mm256_permutevar8x32_ps((__m256)thresholds, (__m256i)place));
    };
    I code = next(next(next(-(I)(q > middle), after1), after2), after3);
    if (!is_sorted) {
      auto of = [&](I half) { return (I)_mm256_permutevar8x32_epi32((__m256i)half, (__m256i)code); };
      code = (code > 7) ? of(codes[1]) : of(codes[0]);
    }
#else
  V thresholds[kMaxCodes];
  I steps[kMaxCodes];
  void MakeTables() {
    for (int i = 0; i + 1 < format.count; ++i) {
      thresholds[i] = Same(format.thresholds[i]);
      steps[i] = Same((int32_t)(format.codes[i + 1] - format.codes[i]));
    }
  }
  INLINE_MEMBER I operator()(V q, V sign) const {
    I code = Same((int32_t)format.codes[0]);
    for (int i = 0; i + 1 < format.count; ++i) code += (I)(q > thresholds[i]) & steps[i];
#endif
    return WithZero(code, sign);
  }
  // The number below or above, which is one table look-up a lane: the numbers of a codebook lie at no regular distance.
  INLINE_MEMBER I Stochastic(V q, V sign, V noise) const {
    const V inside = Min(Max(q, Same(format.numbers[0])), Same(format.numbers[format.count - 1]));
    I place = Same((int32_t)0);
    for (int i = 1; i + 1 < format.count; ++i) place -= inside >= Same(format.numbers[i]);
    I code;
    for (int i = 0; i < kLanes; ++i) {
      const float low = format.numbers[place[i]], high = format.numbers[place[i] + 1];
      code[i] = format.codes[place[i] + (noise[i] * (high - low) < inside[i] - low)];
    }
    return WithZero(code, sign);
  }
  INLINE_MEMBER I WithZero(I code, V sign) const {
    if (!has_two_zeros) return code;
    const I zero = ((I)sign < 0) ? minus : plus;
    return ((code == plus) | (code == minus)) ? zero : code;
  }
};

// How x / scale is found, rounded once as IEEE 754 has it.
//
// A power of two divides by its reciprocal. With fused operations a correctly rounded reciprocal and two corrections give the
// very quotient in a third of a division's time (Markstein, IBM J. Res. Dev. 34, 1990: after the first the quotient is within
// a last place, and one more rounds it correctly). Both need scales far from where a step of it would leave the normal
// numbers; elements so small that a remainder underflows have code 0 either way.
enum class Way { kMultiply, kCorrect, kDivide };

// The way that serves kLanes scales, or the worse of two.
INLINE Way WayOf(V scales, bool always_divide) {
  const I exponent = ((I)scales >> 23) & 0xFF;
  if (always_divide || IsAny((exponent < 67) | (exponent > 187))) return Way::kDivide;
  if (!IsAny(((I)scales & 0x7FFFFF) != 0)) return Way::kMultiply;
  return FEWBIT_HAS_FMA ? Way::kCorrect : Way::kDivide;
}
INLINE Way Worse(Way a, Way b) { return a > b ? a : b; }

template <Way way>
INLINE V Quotient(V x, V scale, V reciprocal) {
  if (way == Way::kDivide) return x / scale;
  const V q = x * reciprocal;
  if (way == Way::kMultiply) return q;
  const V better = Fma(Fnma(q, scale, x), reciprocal, q);
  return Fma(Fnma(better, scale, x), reciprocal, better);
}

// x - offset and its quotient by a scale. Where an offset is so large that the difference may exceed float32, the halves are
// subtracted and the quotient is doubled, which rounds alike; such tiles are divided (`IsFar`).
constexpr float kFar = 0x1p100f;

INLINE bool IsFar(V offsets) { return IsAny(Abs(offsets) >= Same(kFar)); }

// Encodes a run of elements that share a scale, and prefetches those `ahead` elements later. What remains after the last whole
// vector is copied to one of its own and takes the same loop once more, so that the loop's code exists once.
template <Way way, bool has_offset, typename Coder>
INLINE void EncodeRun(Elements x, int64_t count, const Coder& coder, float scale, float reciprocal, float offset, int64_t ahead,
                      uint8_t* out) {
  const V by = Same(scale), inverse = Same(reciprocal), shift = Same(offset);
  const I scale_sign = SignBit(by);
  const bool halves = way == Way::kDivide && has_offset && (offset >= kFar || offset <= -kFar);
  float rest[kLanes] = {};
  uint8_t rest_codes[kLanes];
  uint8_t* to = out;
  const int64_t left = count % kLanes, step = kLanes * x.size(), later = ahead * x.size();
  for (int64_t whole = count - left;;) {
    for (int64_t i = 0; i < whole; i += kLanes, x.data += step) {
      __builtin_prefetch(x.data + later, 0, 2);  // into L2: L1 has no room for what comes so much later
      V v = Load(x);
      if (has_offset) v = halves ? v * 0.5f - shift * 0.5f : v - shift;
      const V q = Quotient<way>(v, by, inverse);
      StoreSome(to + i, ToBytes(coder(halves ? q + q : q, (V)((I)v ^ scale_sign))), kLanes);
    }
    if (left == 0) return;
    if (to == rest_codes) break;
    __builtin_memcpy(rest, x.data, left * x.size());
    x.data = (char*)rest, to = rest_codes, whole = kLanes;
  }
  __builtin_memcpy(out + count - left, rest_codes, left);
}

// Encodes elements of one row that each have their own scale.
template <Way way, typename Coder>
INLINE void EncodeEach(Elements x, int64_t count, const Coder& coder, const float* scales, const float* reciprocals,
                       const float* offsets, int nan_code, int64_t ahead, uint8_t* out) {
  float rest[kLanes] = {}, rest_scales[kLanes] = {}, rest_reciprocals[kLanes] = {}, rest_offsets[kLanes] = {};
  uint8_t rest_codes[kLanes];
  uint8_t* to = out;
  const int64_t left = count % kLanes, step = kLanes * x.size(), later = ahead * x.size();
  for (int64_t whole = count - left;;) {
    for (int64_t i = 0; i < whole; i += kLanes, x.data += step) {
      const V scale = Load(scales + i);
      __builtin_prefetch(x.data + later, 0, 2);
      V v = Load(x), factor = Same(1.0f);
      if (offsets != nullptr) {
        const V shift = Load(offsets + i);
        if (way == Way::kDivide) {
          const I is_far = Abs(shift) >= Same(kFar);
          v = is_far ? v * 0.5f - shift * 0.5f : v - shift, factor = is_far ? Same(2.0f) : factor;
        } else {
          v -= shift;
        }
      }
      V q = Quotient<way>(v, scale, Load(reciprocals + i));
      if (way == Way::kDivide) q *= factor;
      I code = coder(q, (V)((I)v ^ SignBit(scale)));
      if (way == Way::kDivide) code = (scale != scale) ? Same((int32_t)nan_code) : code;
      StoreSome(to + i, ToBytes(code), kLanes);
    }
    if (left == 0) return;
    if (to == rest_codes) break;
    __builtin_memcpy(rest, x.data, left * x.size());
    __builtin_memcpy(rest_scales, scales + whole, left * sizeof(float));
    __builtin_memcpy(rest_reciprocals, reciprocals + whole, left * sizeof(float));
    if (offsets != nullptr) __builtin_memcpy(rest_offsets, offsets + whole, left * sizeof(float)), offsets = rest_offsets;
    x.data = (char*)rest, scales = rest_scales, reciprocals = rest_reciprocals, to = rest_codes, whole = kLanes;
  }
  __builtin_memcpy(out + count - left, rest_codes, left);
}

// Encodes columns `c .. end` of a row, of up to kLanes tiles from `tile` on; `scales` and `offsets` are those of the row.
template <Way way, bool has_offset, typename Coder>
INLINE void EncodeTiles(const Job& job, const Coder& coder, const Elements& x, const float* scales, const float* reciprocals,
                        const float* offsets, int64_t tile, int64_t c, int64_t end, uint8_t* out) {
  for (int64_t k = 0; c < end; ++k) {
    const int64_t tile_end = (tile + k + 1) * job.tile_columns, stop = tile_end < end ? tile_end : end;
    const float scale = scales[tile + k];
    if (way == Way::kDivide && scale != scale) {
      __builtin_memset(out, job.format.nan_code, (size_t)(stop - c));
    } else {
      const float offset = has_offset ? offsets[tile + k] : 0.0f;
      EncodeRun<way, has_offset>(x.From(c), stop - c, coder, scale, reciprocals[k], offset, job.ahead, out);
    }
    out += stop - c, c = stop;
  }
}

// The codes of columns `c0 .. c1` of a row, one a byte: kLanes tiles at a time, whose reciprocals are computed together.
template <typename Coder>
NO_INLINE void EncodeRow(const Job& job, const Coder& coder, const Elements& x, const float* scales, const float* offsets, int64_t c0,
                         int64_t c1, uint8_t* out) {
  constexpr Way kExact = FEWBIT_HAS_FMA ? Way::kCorrect : Way::kDivide;
  for (int64_t c = c0; c < c1;) {
    const int64_t tile = c / job.tile_columns, left = (c1 - 1) / job.tile_columns + 1 - tile;
    const int64_t end = left <= kLanes ? c1 : (tile + kLanes) * job.tile_columns;
    const V scale = LoadSome(scales + tile, left);
    float reciprocals[kLanes];
    StoreSome(reciprocals, Same(1.0f) / scale, kLanes);
    const bool is_far = offsets != nullptr && IsFar(LoadSome(offsets + tile, left));
    const Way way = WayOf(scale, is_far || job.calibration == Calibration::kGiven);
    uint8_t* to = out + (c - c0);
    // With offsets a power of two takes the general way, which rounds alike.
    if (offsets != nullptr && way == Way::kDivide) EncodeTiles<Way::kDivide, true>(job, coder, x, scales, reciprocals, offsets, tile, c, end, to);
    else if (offsets != nullptr) EncodeTiles<kExact, true>(job, coder, x, scales, reciprocals, offsets, tile, c, end, to);
    else if (way == Way::kMultiply) EncodeTiles<Way::kMultiply, false>(job, coder, x, scales, reciprocals, nullptr, tile, c, end, to);
    else if (way == kExact) EncodeTiles<kExact, false>(job, coder, x, scales, reciprocals, nullptr, tile, c, end, to);
    else EncodeTiles<Way::kDivide, false>(job, coder, x, scales, reciprocals, nullptr, tile, c, end, to);
    c = end;
  }
}

// The reciprocals of `count` scales, and the way that is exact for all of them.
INLINE Way ReciprocalsOf(const Job& job, const float* scales, const float* offsets, int64_t count, float* reciprocals) {
  Way way = Way::kMultiply;
  for (int64_t i = 0; i < count; i += kLanes) {
    const V scale = LoadSome(scales + i, count - i);
    StoreSome(reciprocals + i, Same(1.0f) / scale, count - i);
    const bool is_far = offsets != nullptr && IsFar(LoadSome(offsets + i, count - i));
    way = Worse(way, WayOf(scale, is_far || job.calibration == Calibration::kGiven));
  }
  return way;
}

// The same of tiles that are one column wide; `way` and `reciprocals` are those of the columns' scales.
template <typename Coder>
NO_INLINE void EncodeColumns(const Job& job, const Coder& coder, const Elements& row, const float* scales, const float* offsets,
                             Way way, const float* reciprocals, int64_t c0, int64_t c1, uint8_t* out) {
  constexpr Way kExact = FEWBIT_HAS_FMA ? Way::kCorrect : Way::kDivide;
  const float* shifts = offsets == nullptr ? nullptr : offsets + c0;
  const int nan_code = job.format.nan_code;
  const Elements x = row.From(c0);
  scales += c0;
  if (way == Way::kMultiply) EncodeEach<Way::kMultiply>(x, c1 - c0, coder, scales, reciprocals, shifts, nan_code, job.ahead, out);
  else if (way == kExact) EncodeEach<kExact>(x, c1 - c0, coder, scales, reciprocals, shifts, nan_code, job.ahead, out);
  else EncodeEach<Way::kDivide>(x, c1 - c0, coder, scales, reciprocals, shifts, nan_code, job.ahead, out);
}

// Rounds columns `c0 .. c1` of row `r` stochastically, each to the number below or above. One loop serves tiles of any shape:
// the random numbers take most of the time.
template <typename Coder>
NO_INLINE void EncodeStochastically(const Job& job, const Coder& coder, const Elements& row, const float* scales, const float* offsets,
                                    int64_t b, int64_t r, int64_t c0, int64_t c1, uint8_t* out) {
  const Threefry random(job.keys + b / job.batch_per_key * 2);
  const uint64_t first = (uint64_t)((b % job.batch_per_key * job.noise_rows + r) * job.noise_columns);
  float rest[kLanes] = {}, by[kLanes], shift[kLanes] = {};
  int64_t tile = c0 / job.tile_columns, end = (tile + 1) * job.tile_columns;
  for (int64_t c = c0; c < c1; c += kLanes) {
    const int64_t some = c1 - c < kLanes ? c1 - c : kLanes;
    for (int i = 0; i < kLanes; ++i) {
      by[i] = scales[tile];
      if (offsets != nullptr) shift[i] = offsets[tile];
      if (i + 1 < some && c + i + 1 == end) ++tile, end += job.tile_columns;
    }
    if (c + some == end) ++tile, end += job.tile_columns;
    Elements x = row.From(c);
    if (some < kLanes) {
      __builtin_memcpy(rest, x.data, some * x.size());
      x.data = (char*)rest;
    }
    const V scale = Load(by), offset = Load(shift);
    V v = Load(x), factor = Same(1.0f);
    if (offsets != nullptr) {
      const I is_far = Abs(offset) >= Same(kFar);
      v = is_far ? v * 0.5f - offset * 0.5f : v - offset, factor = is_far ? Same(2.0f) : factor;
    }
    const I code = coder.Stochastic(v / scale * factor, (V)((I)v ^ SignBit(scale)), random.Uniform(first + (uint64_t)c));
    StoreSome(out + (c - c0), ToBytes((scale != scale) ? Same((int32_t)job.format.nan_code) : code), some);
  }
}

// Codes that follow one another, packed: eight of them fill `bits` bytes.
INLINE void PackRun(const uint8_t* codes, int64_t count, int bits, uint8_t* out) {
  if (bits == 4) {
    int64_t i = 0;
    for (; i < count / 2; ++i) out[i] = (uint8_t)(codes[2 * i] | (codes[2 * i + 1] << 4));
    if (count & 1) out[i] = codes[count - 1];
    return;
  }
  for (int64_t i = 0; i < count; i += 8) {
    uint64_t word = 0;
    const int64_t some = count - i < 8 ? count - i : 8;
    for (int64_t k = 0; k < some; ++k) word |= (uint64_t)codes[i + k] << (k * bits);
    const int64_t bytes = (some * bits + 7) / 8;
    for (int64_t k = 0; k < bytes; ++k) out[i / 8 * bits + k] = (uint8_t)(word >> (8 * k));
  }
}

// Rows of codes packed across rows: byte row `k` of the unit holds the bits of every row of codes that reach into it.
INLINE void PackRows(const uint8_t* codes, int64_t stride, int row_count, int64_t count, int bits, int k, uint8_t* out) {
  if (bits == 4 && 2 * k + 1 < row_count) {
    const uint8_t *low = codes + 2 * k * stride, *high = low + stride;
    for (int64_t i = 0; i < count; ++i) out[i] = (uint8_t)(low[i] | (high[i] << 4));
    return;
  }
  const int first = k * 8 / bits, last = (k * 8 + 7) / bits;
  for (int row = first; row <= last && row < row_count; ++row) {
    const int shift = row * bits - k * 8;
    const uint8_t* from = codes + row * stride;
    if (row == first) {
      if (shift >= 0) for (int64_t i = 0; i < count; ++i) out[i] = (uint8_t)(from[i] << shift);
      else for (int64_t i = 0; i < count; ++i) out[i] = (uint8_t)(from[i] >> -shift);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] |= (uint8_t)(from[i] << shift);
    }
  }
}

template <typename Coder>
static void EncodeBlock(const Job& job, int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1, uint8_t* scratch) {
  const Coder coder(job.format);
  const int bits = job.format.bits;
  const Elements x = Elements{(char*)job.x, job.element}.From(b * job.rows * job.columns);
  const int64_t width = c1 - c0;
  uint8_t* codes = job.codes + b * job.packed_rows * job.packed_columns;
  float* reciprocals = (float*)scratch;
  scratch += width * sizeof(float);
  Way way = Way::kDivide;
  int64_t row_tile = -1;  // whose reciprocals these are
  auto encode = [&](int64_t r, uint8_t* out) {
    const int64_t tile = (b * job.row_tiles + r / job.tile_rows) * job.column_tiles;
    const float *scales = job.divisors + tile, *offsets = job.has_zero ? job.offsets + tile : nullptr;
    if (job.keys != nullptr) {
      EncodeStochastically(job, coder, x.From(r * job.columns), scales, offsets, b, r, c0, c1, out);
      return;
    }
    if (job.tile_columns > 1) {
      EncodeRow(job, coder, x.From(r * job.columns), scales, offsets, c0, c1, out);
      return;
    }
    if (row_tile != r / job.tile_rows) way = ReciprocalsOf(job, scales + c0, offsets == nullptr ? nullptr : offsets + c0, width, reciprocals);
    row_tile = r / job.tile_rows;
    EncodeColumns(job, coder, x.From(r * job.columns), scales, offsets, way, reciprocals, c0, c1, out);
  };
  if (bits == 8) {
    for (int64_t r = r0; r < r1; ++r) encode(r, codes + r * job.packed_columns + c0);
  } else if (!job.packs_rows) {
    for (int64_t r = r0; r < r1; ++r) {
      encode(r, scratch);
      PackRun(scratch, width, bits, codes + r * job.packed_columns + c0 * bits / 8);
    }
  } else {
    for (int64_t r = r0; r < r1; r += 8) {
      const int some = (int)(r1 - r < 8 ? r1 - r : 8);
      for (int i = 0; i < some; ++i) encode(r + i, scratch + i * width);
      for (int k = 0; k < (some * bits + 7) / 8; ++k) {
        PackRows(scratch, width, some, width, bits, k, codes + (r * bits / 8 + k) * job.packed_columns + c0);
      }
    }
  }
}
