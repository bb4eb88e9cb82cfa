// From elements in units of their scale to codes. Included in each level's namespace, after lanes.h.

// Adding 1.5 * 2**23 to a float below 2**22 rounds it to the nearest even integer, which stands in the low bits.
constexpr float kRounder = 12582912.0f;
constexpr int32_t kRounderBits = 0x4B400000;

// A whole number of the scale's steps, clipped.
struct IntegerCoder {
  F inverse_step, low, high;
  I add, mask;
  explicit IntegerCoder(const Format& f)
      : inverse_step(Splat(f.inverse_step)), low(Splat(f.low)), high(Splat(f.high)),
        add(Splat(f.add - kRounderBits)), mask(Splat((1 << f.bits) - 1)) {}
  INLINE_MEMBER I operator()(F q, F) const {
    return ((I)(Min(Max(q * inverse_step, low), high) + Splat(kRounder)) + add) & mask;
  }
};

// The number of steps, in the exponent at hand, that lie nearest; a carry runs on into the exponent field by itself.
// `sign` gives the sign, which a quotient that underflows loses.
struct MinifloatCoder {
  F max;
  I lowest, shift_bits;
  int mantissa, sign_shift, is_signed, is_fnuz;
  explicit MinifloatCoder(const Format& f)
      : max(Splat(f.max)), lowest(Splat((int32_t)((128 - f.bias) << 23))), shift_bits(Splat((int32_t)((23 - f.mantissa) << 23))),
        mantissa(f.mantissa), sign_shift(31 - (f.bits - f.is_signed)), is_signed(f.is_signed), is_fnuz(f.is_fnuz) {}
  INLINE_MEMBER I operator()(F q, F sign) const {
    const F magnitude = Min(Abs(q), max);
    const I exponent = Max((I)magnitude & 0x7F800000, lowest);
    const I shifter = exponent + shift_bits;  // its last place is the step
    const I steps = (I)(magnitude + (F)shifter) - shifter;
    const I code = ((exponent - lowest) >> (23 - mantissa)) + steps;
    const I negative = (I)sign >> 31;
    if (!is_signed) return code & ~negative;
    const I bit = (I)((U)SignBit(sign) >> sign_shift);
    return is_fnuz ? code | (bit & (code > 0)) : code | bit;
  }
};

// How many thresholds lie below, added up in steps of the code.
struct CodebookCoder {
  int count;
  F thresholds[kMaxCodes];
  I steps[kMaxCodes];
  I first, plus, minus;
  bool has_two_zeros;
  explicit CodebookCoder(const Format& f)
      : count(f.count), first(Splat((int32_t)f.codes[0])), plus(Splat((int32_t)f.plus_zero)), minus(Splat((int32_t)f.minus_zero)),
        has_two_zeros(f.plus_zero >= 0) {
    for (int i = 0; i + 1 < count; ++i) {
      thresholds[i] = Splat(f.thresholds[i]);
      steps[i] = Splat((int32_t)(f.codes[i + 1] - f.codes[i]));
    }
  }
  INLINE_MEMBER I operator()(F q, F sign) const {
    I code = first;
    for (int i = 0; i + 1 < count; ++i) code += (I)(q > thresholds[i]) & steps[i];
    if (!has_two_zeros) return code;
    const I zero = ((I)sign < 0) ? minus : plus;
    return ((code == plus) | (code == minus)) ? zero : code;
  }
};

// Whether x / scale may be found by the reciprocal: far from where any step of it would leave the normal numbers.
INLINE bool IsModerate(float scale) {
  int32_t bits;
  __builtin_memcpy(&bits, &scale, 4);
  const int exponent = (bits >> 23) & 0xFF;
  return exponent >= 67 && exponent <= 187;
}

// x / scale, rounded once as IEEE 754 has it. With fused operations a correctly rounded reciprocal, and two corrections,
// give the very same number in a third of the time (Markstein, IBM J. Res. Dev. 34, 1990: after the first the quotient is
// within a last place, and one more rounds it correctly). Elements so small that a remainder underflows have code 0 either
// way.
struct Divider {
  F scale, reciprocal;
  bool is_exact_needed;
  INLINE_MEMBER F operator()(F x) const {
#if FEWBIT_LEVEL != FEWBIT_LEVEL_PORTABLE
    if (!is_exact_needed) {
      const F q = x * reciprocal;
      const F better = Fma(Fnma(q, scale, x), reciprocal, q);
      return Fma(Fnma(better, scale, x), reciprocal, better);
    }
#endif
    return x / scale;
  }
};

// Encodes a run of elements that share a scale.
template <typename T, typename Coder>
INLINE void EncodeRun(const T* x, int64_t count, const Coder& coder, float scale, const float* offset, bool always_divide,
                      uint8_t* out) {
  const Divider divide{Splat(scale), Splat(1.0f) / Splat(scale), always_divide || !IsModerate(scale)};
  const I scale_sign = SignBit(Splat(scale));
  const F shift = Splat(offset == nullptr ? 0.0f : *offset);
  auto encode = [&](F v) {
    if (offset != nullptr) v -= shift;
    return ToBytes(coder(divide(v), (F)((I)v ^ scale_sign)));
  };
  int64_t i = 0;
  if (!divide.is_exact_needed && offset == nullptr) {
    for (; i + W <= count; i += W) StoreSome(out + i, encode(Load(x + i)), W);
  } else {
    for (; i + W <= count; i += W) StoreSome(out + i, encode(Load(x + i)), W);
  }
  if (i < count) StoreSome(out + i, encode(LoadSome(x + i, count - i)), count - i);
}

// Encodes elements of one row that each have their own scale.
template <typename T, typename Coder>
INLINE void EncodeEach(const T* x, int64_t count, const Coder& coder, const float* scales, const float* offsets, int nan_code,
                       bool always_divide, uint8_t* out) {
  for (int64_t i = 0; i < count; i += W) {
    const int64_t some = count - i;
    const F scale = LoadSome(scales + i, some);
    const F reciprocal = Splat(1.0f) / scale;
    const I exponent = ((I)scale >> 23) & 0xFF;
    const bool is_extreme = always_divide || LargestLane((I)((exponent < 67) | (exponent > 187)) & 1) != 0;
    F v = LoadSome(x + i, some);
    if (offsets != nullptr) v -= LoadSome(offsets + i, some);
    const F q = Divider{scale, reciprocal, is_extreme}(v);
    const I code = coder(q, (F)((I)v ^ SignBit(scale)));
    StoreSome(out + i, ToBytes((scale != scale) ? Splat((int32_t)nan_code) : code), some);
  }
}

// The codes of a row's elements, one a byte. `c0` is the first column; tiles are told by the job.
template <typename T, typename Coder>
static void EncodeRow(const Job& job, const Coder& coder, const T* x, const float* scales, const float* offsets, int64_t c0,
                      int64_t c1, uint8_t* out) {
  const bool always_divide = job.calibration == Calibration::kGiven;
  if (job.tile_columns == 1) {
    EncodeEach(x + c0, c1 - c0, coder, scales + c0, offsets == nullptr ? nullptr : offsets + c0, job.format.nan_code,
               always_divide, out);
    return;
  }
  for (int64_t c = c0; c < c1;) {
    const int64_t tile = c / job.tile_columns;
    int64_t end = (tile + 1) * job.tile_columns;
    end = end < c1 ? end : c1;
    const float scale = scales[tile];
    uint8_t* to = out + (c - c0);
    if (scale != scale) {
      __builtin_memset(to, job.format.nan_code, (size_t)(end - c));
    } else if (offsets == nullptr) {
      EncodeRun(x + c, end - c, coder, scale, nullptr, always_divide, to);
    } else {
      EncodeRun(x + c, end - c, coder, scale, offsets + tile, always_divide, to);
    }
    c = end;
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

template <typename T, typename Coder>
static void EncodeBlock(const Job& job, int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1, uint8_t* scratch) {
  const Coder coder(job.format);
  const int bits = job.format.bits;
  const T* x = (const T*)job.x + b * job.rows * job.columns;
  const int64_t width = c1 - c0;
  uint8_t* codes = job.codes + b * job.packed_rows * job.packed_columns;
  auto encode = [&](int64_t r, uint8_t* out) {
    const int64_t tile = (b * job.row_tiles + r / job.tile_rows) * job.column_tiles;
    EncodeRow(job, coder, x + r * job.columns, job.divisors + tile, job.has_zero ? job.offsets + tile : nullptr, c0, c1, out);
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
