// From the ranges of tiles to their scales, a vector of tiles at a time. Included in the namespace of an instruction set.

constexpr int32_t kInfinityBits = 0x7F800000;
constexpr int32_t kNanBits = 0x7FC00000;
constexpr float kTiny = 1.17549435e-38f;  // the smallest normal float32
constexpr float kLargest = 3.40282347e38f;

INLINE V PowerOfTwo(I exponent) { return (V)((exponent + 127) << 23); }
INLINE I ExponentOf(V x) { return (((I)x >> 23) & 0xFF) - 127; }

// The largest magnitudes; those that XLA counts as zero are zero, those of tiles that are not finite infinite.
INLINE V MagnitudeOf(I bits) {
  const I flushed = (bits < 0x00800000) ? Same((int32_t)0) : bits;
  return (V)Min(flushed, Same(kInfinityBits));
}

// A scale as it is stored, and as it is read back.
struct RoundedScale {
  I stored;  // the low bytes
  V loaded;
};

INLINE I MinifloatCode(const Format& f, V x) { return MinifloatCoder(f)(x, x); }

INLINE V MinifloatValue(const Format& f, I code) {
  const int32_t sign_bit = 1 << (f.bits - f.is_signed);
  const I magnitude = code & (sign_bit - 1);
  const V normal = (V)((magnitude << (23 - f.mantissa)) + ((127 - f.bias) << 23));
  const V steps = __builtin_convertvector(magnitude, V) * (V)(Same((int32_t)((127 + 1 - f.bias - f.mantissa) << 23)));
  const V value = (magnitude < (1 << f.mantissa)) ? steps : normal;
  return f.is_signed ? (V)((I)value | ((code & sign_bit) ? Same((int32_t)0x80000000) : Same((int32_t)0))) : value;
}

// The number of a stored scale, without the tensor scale.
INLINE V LoadedScale(const Job& job, I stored) {
  if (job.scale.kind == Kind::kBfloat16) return (V)(stored << 16);
  if (job.scale.kind == Kind::kFloat16) return FromHalf(ToShorts(stored));
  if (job.scale.kind == Kind::kE8M0) return (V)((stored == 0) ? Same((int32_t)(1 << 22)) : stored << 23);
  if (job.scale.kind == Kind::kMinifloat) return MinifloatValue(job.scale, stored);
  return (V)stored;
}

// To nearest, or up: to the next larger number that can be stored.
INLINE RoundedScale RoundScale(const Job& job, V scale, V unit, bool is_up = false) {
  const V ideal = scale;
  if (job.has_unit) scale = scale / unit;
  const V magnitude = Min(Max(Abs(scale), Same(job.smallest_scale)), Same(job.largest_scale));
  const V clipped = (scale == 0.0f) ? Same(0.0f) : (V)((I)magnitude | SignBit(scale));
  RoundedScale result{(I)clipped, clipped};
  if (job.scale.kind == Kind::kBfloat16) {
    result.stored = (I)__builtin_convertvector(ToBrain(clipped), U);
  } else if (job.scale.kind == Kind::kFloat16) {
    result.stored = (I)__builtin_convertvector(ToHalf(clipped), U);
  } else if (job.scale.kind == Kind::kE8M0) {
    const V positive = Min(Max(clipped, Same(kTiny)), Same(0x1p127f));
    const I code = ((I)positive >> 23) & 0xFF;
    const I mantissa = (I)positive & 0x7FFFFF;
    const I up = (mantissa > (1 << 22)) | ((mantissa == (1 << 22)) & ((code & 1) != 0));
    const I rounded = Min(code - up, Same((int32_t)254));
    result.stored = (clipped < kTiny) ? Same((int32_t)0) : rounded;
  } else if (job.scale.kind == Kind::kMinifloat) {
    result.stored = MinifloatCode(job.scale, clipped);
  }
  result.loaded = LoadedScale(job, result.stored);
  if (is_up) {  // the next larger number of each kind has the next code
    const V value = job.has_unit ? result.loaded * unit : result.loaded;
    I is_below = (value < ideal) & (result.loaded < job.largest_scale);
    if (job.scale.kind == Kind::kMinifloat) is_below &= result.stored != 0;  // scales too small for the format stay zero
    result.stored += is_below & 1;
    result.loaded = LoadedScale(job, result.stored);
  }
  if (job.has_unit) result.loaded = result.loaded * unit;
  return result;
}

INLINE int32_t StoredNan(const Job& job) {
  switch (job.scale.kind) {
    case Kind::kBfloat16: return 0x7FC0;
    case Kind::kFloat16: return 0x7E00;
    case Kind::kE8M0: return 255;
    case Kind::kMinifloat: return job.scale.nan_code;
    default: return kNanBits;
  }
}

INLINE void StoreAs(Kind kind, void* out, int64_t at, I values, int64_t count) {
  if (kind == Kind::kFloat32) StoreSome((int32_t*)out + at, values, count);
  else if (kind == Kind::kBfloat16 || kind == Kind::kFloat16) StoreSome((uint16_t*)out + at, ToShorts(values), count);
  else StoreSome((uint8_t*)out + at, ToBytes(values), count);
}

// The zero points of tiles whose range begins at `low`, stored, and the number of code 0.
INLINE V StoredZero(const Job& job, V low, V divisor, int64_t at, int64_t count) {
  if (job.zero_is_whole) {
    const I is_nan = divisor != divisor;
    const V negated = (V)((I)low ^ (int32_t)0x80000000);
    // Between what no code exceeds float32 under, see `Target.stored_zero`.
    I steps = __builtin_convertvector(Min(Same(kLargest) / divisor, Same(0x1p20f)), I);
    const V most = __builtin_convertvector(steps, V);
    const V side = (most * divisor > Same(kLargest)) ? most - 1.0f : most;
    const V zero = Min(Max(negated / divisor, Same(job.range) - side), side);
    const I code = is_nan ? Same((int32_t)job.zero.nan_code) : IntegerCoder(job.zero)(zero, zero);
    StoreAs(Kind::kInteger, job.stored_zero, at, code, count);
    const V product = (V)((I)__builtin_convertvector(code, V) ^ (int32_t)0x80000000) * divisor;
    return Max(Same(-kLargest), product);
  }
  const float largest = job.zero.kind == Kind::kFloat16 ? 65504.0f : job.zero.kind == Kind::kBfloat16 ? 3.38953139e38f : 3.40282347e38f;
  const V clipped = (V)((low != low) ? (I)low : (I)Min(Max(low, Same(-largest)), Same(largest)));
  if (job.zero.kind == Kind::kFloat16) {
    const H half = ToHalf(clipped);
    StoreAs(Kind::kFloat16, job.stored_zero, at, (I)__builtin_convertvector(half, U), count);
    return FromHalf(half);
  }
  if (job.zero.kind == Kind::kBfloat16) {
    const H brain = ToBrain(clipped);
    StoreAs(Kind::kBfloat16, job.stored_zero, at, (I)__builtin_convertvector(brain, U), count);
    return (V)(__builtin_convertvector(brain, U) << 16);
  }
  StoreAs(Kind::kFloat32, job.stored_zero, at, (I)clipped, count);
  return clipped;
}

// The power of two that an MX rule chooses, before it is clipped: its exponent.
INLINE I RuledExponent(const Job& job, V magnitude) {
  const I bits = (I)magnitude;
  if (job.calibration == Calibration::kFloor) return ExponentOf(magnitude) - job.top_exponent;
  if (job.calibration == Calibration::kEven) return ExponentOf((V)(bits + (1 << (22 - job.mantissa_bits)))) - job.top_exponent;
  return ExponentOf(magnitude) - job.top_exponent - ((bits & 0x7FFFFF) > job.top_mantissa);
}

INLINE V ClippedPower(I exponent) { return PowerOfTwo(Min(Max(exponent, Same((int32_t)-126)), Same((int32_t)127))); }

// Stores the scales of `count` tiles from tile `at` on; `ideal` is what the calibration wants, `low` the range's lower end.
INLINE void StoreScales(const Job& job, V ideal, V low, I bits, float unit, int64_t at, int64_t count) {
  const I is_bad = bits >= kInfinityBits;
  const V safe = (Abs(ideal) < kTiny) ? Same(job.no_scale) : ideal;
  const RoundedScale rounded = RoundScale(job, safe, Same(unit), job.calibration == Calibration::kCovering);
  StoreAs(job.scale.kind, job.stored_scale, at, is_bad ? Same(StoredNan(job)) : rounded.stored, count);
  const V used = (rounded.loaded == 0.0f) ? Same(1.0f) : rounded.loaded;
  const V divisor = (V)(is_bad ? Same(kNanBits) : (I)used);
  StoreSome(job.divisors + at, divisor, count);
  if (job.has_zero) StoreSome(job.offsets + at, StoredZero(job, low, divisor, at, count), count);
}

// The scale of a range: where only powers of two can be stored, the next larger one, so that nothing in the range saturates.
INLINE V CoveringScale(const Job& job, V scale) {
  if (job.scale.kind != Kind::kE8M0) return scale;
  return (scale < kTiny) ? scale : RoundScale(job, scale, Same(1.0f), true).loaded;
}

// The scales of tiles `at .. at + count`, whose ranges are at the beginning of `ranges`, by every rule but the searches.
static void Scales(const Job& job, const Ranges& ranges, float unit, int64_t at, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = count - i;
    const I bits = LoadInts(ranges.magnitude + i);
    const V magnitude = MagnitudeOf(bits);
    V low = Same(0.0f), high = low;
    if (NeedsEnds(job)) {
      low = Load(ranges.low + i), high = Load(ranges.high + i);
      if (job.contains_zero) low = Min(low, Same(0.0f)), high = Max(high, Same(0.0f));
      low = low * Same(job.factor), high = high * Same(job.factor);
    } else {
      high = magnitude * Same(job.factor);
      low = (V)((I)high ^ (int32_t)0x80000000);
    }
    low = Max(low, Same(-job.largest_end)), high = Min(high, Same(job.largest_end));
    V ideal;
    if (job.calibration == Calibration::kSignedMax) {
      ideal = Load(ranges.first + i) / Same(job.bound);
    } else if (job.calibration == Calibration::kCovering) {
      ideal = Max(magnitude / Same(job.bound), Max(high, Same(0.0f)) / Same(job.most));
      if (job.least < 0.0f) ideal = Max(ideal, Min(low, Same(0.0f)) / Same(job.least));
    } else if (job.calibration >= Calibration::kFloor) {
      ideal = (magnitude > 0.0f) ? ClippedPower(RuledExponent(job, magnitude)) : Same(0.0f);
    } else if (job.has_zero) {
      // As `symmetric_or_range` says: a range beyond float32 by its half, and offsets that leave room for the codes.
      const V span = high - low, half = (high * Same(0.5f) - low * Same(0.5f)) / Same(0.5f * job.range);
      const I is_whole = span <= Same(kLargest);
      ideal = is_whole ? span / Same(job.range) : half;
      ideal = CoveringScale(job, ideal);
      const V fitting = Min(ideal, Same(job.largest_finite_step));
      if (job.zero_is_whole) {
        ideal = is_whole ? fitting : ideal;
      } else {
        low = (ideal > fitting) ? low * (fitting / ideal) : low;
        ideal = fitting;
        low = (Abs(low) < kTiny) ? Same(0.0f) : low;  // one zero, whatever its sign was
        low = (V)((bits >= kInfinityBits) ? Same(kNanBits) : (I)low);
      }
    } else {
      ideal = CoveringScale(job, Max((V)((I)low ^ (int32_t)0x80000000), high) / Same(job.bound));
    }
    StoreScales(job, ideal, low, bits, unit, at + i, some);
  }
}
