// From the ranges of tiles to their scales, a vector of tiles at a time. Included in each level's namespace.

constexpr int32_t kInfinityBits = 0x7F800000;
constexpr int32_t kNanBits = 0x7FC00000;
constexpr float kTiny = 1.17549435e-38f;  // the smallest normal float32
constexpr float kLargest = 3.40282347e38f;

INLINE F PowerOfTwo(I exponent) { return (F)((exponent + 127) << 23); }
INLINE I ExponentOf(F x) { return (((I)x >> 23) & 0xFF) - 127; }

// The largest magnitudes; those that XLA counts as zero are zero, those of tiles that are not finite infinite.
INLINE F MagnitudeOf(I bits) {
  const I flushed = (bits < 0x00800000) ? Splat((int32_t)0) : bits;
  return (F)Min(flushed, Splat(kInfinityBits));
}

// A scale as it is stored, and as it is read back.
struct Held {
  I stored;  // the low bytes
  F loaded;
};

INLINE I MinifloatCode(const Format& f, F x) { return MinifloatCoder(f)(x, x); }

INLINE F MinifloatValue(const Format& f, I code) {
  const int32_t sign_bit = 1 << (f.bits - f.is_signed);
  const I magnitude = code & (sign_bit - 1);
  const F normal = (F)((magnitude << (23 - f.mantissa)) + ((127 - f.bias) << 23));
  const F steps = __builtin_convertvector(magnitude, F) * (F)(Splat((int32_t)((127 + 1 - f.bias - f.mantissa) << 23)));
  const F value = (magnitude < (1 << f.mantissa)) ? steps : normal;
  return f.is_signed ? (F)((I)value | ((code & sign_bit) ? Splat((int32_t)0x80000000) : Splat((int32_t)0))) : value;
}

INLINE Held HeldAs(const Job& job, F scale, F unit) {
  if (job.has_unit) scale = scale / unit;
  const F magnitude = Min(Max(Abs(scale), Splat(job.smallest_scale)), Splat(job.largest_scale));
  const F held = (scale == 0.0f) ? Splat(0.0f) : (F)((I)magnitude | SignBit(scale));
  Held result{(I)held, held};
  if (job.scale.kind == Kind::kBfloat16) {
    const H brain = ToBrain(held);
    result.stored = (I)__builtin_convertvector(brain, U);
    result.loaded = (F)(result.stored << 16);
  } else if (job.scale.kind == Kind::kFloat16) {
    const H half = ToHalf(held);
    result.stored = (I)__builtin_convertvector(half, U);
    result.loaded = FromHalf(half);
  } else if (job.scale.kind == Kind::kE8M0) {
    const F positive = Min(Max(held, Splat(kTiny)), Splat(0x1p127f));
    const I code = ((I)positive >> 23) & 0xFF;
    const I mantissa = (I)positive & 0x7FFFFF;
    const I up = (mantissa > (1 << 22)) | ((mantissa == (1 << 22)) & ((code & 1) != 0));
    const I rounded = Min(code - up, Splat((int32_t)254));
    result.stored = (held < kTiny) ? Splat((int32_t)0) : rounded;
    result.loaded = (F)((result.stored == 0) ? Splat((int32_t)(1 << 22)) : result.stored << 23);
  } else if (job.scale.kind == Kind::kMinifloat) {
    result.stored = MinifloatCode(job.scale, held);
    result.loaded = MinifloatValue(job.scale, result.stored);
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
INLINE F StoredZero(const Job& job, F low, F divisor, int64_t at, int64_t count) {
  if (job.zero_is_whole) {
    const I is_nan = divisor != divisor;
    const F negated = (F)((I)low ^ (int32_t)0x80000000);
    // Between what no code exceeds float32 under, see `Target.stored_zero`.
    I steps = __builtin_convertvector(Min(Splat(kLargest) / divisor, Splat(0x1p20f)), I);
    const F most = __builtin_convertvector(steps, F);
    const F side = (most * divisor > Splat(kLargest)) ? most - 1.0f : most;
    const F zero = Min(Max(negated / divisor, Splat(job.range) - side), side);
    const I code = is_nan ? Splat((int32_t)job.zero.nan_code) : IntegerCoder(job.zero)(zero, zero);
    StoreAs(Kind::kInteger, job.stored_zero, at, code, count);
    const F product = (F)((I)__builtin_convertvector(code, F) ^ (int32_t)0x80000000) * divisor;
    return Max(Splat(-kLargest), product);
  }
  const float largest = job.zero.kind == Kind::kFloat16 ? 65504.0f : job.zero.kind == Kind::kBfloat16 ? 3.38953139e38f : 3.40282347e38f;
  const F clipped = (F)((low != low) ? (I)low : (I)Min(Max(low, Splat(-largest)), Splat(largest)));
  if (job.zero.kind == Kind::kFloat16) {
    const H half = ToHalf(clipped);
    StoreAs(Kind::kFloat16, job.stored_zero, at, (I)__builtin_convertvector(half, U), count);
    return FromHalf(half);
  }
  if (job.zero.kind == Kind::kBfloat16) {
    const H brain = ToBrain(clipped);
    StoreAs(Kind::kBfloat16, job.stored_zero, at, (I)__builtin_convertvector(brain, U), count);
    return (F)(__builtin_convertvector(brain, U) << 16);
  }
  StoreAs(Kind::kFloat32, job.stored_zero, at, (I)clipped, count);
  return clipped;
}

// The power of two that an MX rule chooses, before it is clipped: its exponent.
INLINE I RuledExponent(const Job& job, F magnitude) {
  const I bits = (I)magnitude;
  if (job.calibration == Calibration::kFloor) return ExponentOf(magnitude) - job.top_exponent;
  if (job.calibration == Calibration::kEven) return ExponentOf((F)(bits + (1 << (22 - job.mantissa_bits)))) - job.top_exponent;
  return ExponentOf(magnitude) - job.top_exponent - ((bits & 0x7FFFFF) > job.top_mantissa);
}

INLINE F ClippedPower(I exponent) { return PowerOfTwo(Min(Max(exponent, Splat((int32_t)-126)), Splat((int32_t)127))); }

// Stores the scales of `count` tiles from tile `at` on; `ideal` is what the calibration wants, `low` the range's lower end.
INLINE void StoreScales(const Job& job, F ideal, F low, I bits, float unit, int64_t at, int64_t count) {
  const I is_bad = bits >= kInfinityBits;
  const F safe = (Abs(ideal) < kTiny) ? Splat(job.no_scale) : ideal;
  const Held held = HeldAs(job, safe, Splat(unit));
  StoreAs(job.scale.kind, job.stored_scale, at, is_bad ? Splat(StoredNan(job)) : held.stored, count);
  const F used = (held.loaded == 0.0f) ? Splat(1.0f) : held.loaded;
  const F divisor = (F)(is_bad ? Splat(kNanBits) : (I)used);
  StoreSome(job.divisors + at, divisor, count);
  if (job.has_zero) StoreSome(job.offsets + at, StoredZero(job, low, divisor, at, count), count);
}

// The scales of tiles `at .. at + count`, whose ranges are at the beginning of `ranges`, by every rule but the searches.
static void Scales(const Job& job, const Ranges& ranges, float unit, int64_t at, int64_t count) {
  for (int64_t i = 0; i < count; i += W) {
    const int64_t some = count - i;
    const I bits = LoadInts(ranges.magnitude + i);
    const F magnitude = MagnitudeOf(bits);
    F low = Splat(0.0f), high = low;
    if (job.calibration == Calibration::kMinMax) {
      low = Load(ranges.low + i), high = Load(ranges.high + i);
      if (job.contains_zero) low = Min(low, Splat(0.0f)), high = Max(high, Splat(0.0f));
      low = low * Splat(job.factor), high = high * Splat(job.factor);
    } else {
      high = magnitude * Splat(job.factor);
      low = (F)((I)high ^ (int32_t)0x80000000);
    }
    low = Max(low, Splat(-job.largest_end)), high = Min(high, Splat(job.largest_end));
    F ideal;
    if (job.calibration == Calibration::kSignedMax) {
      ideal = Load(ranges.first + i) / Splat(job.bound);
    } else if (job.calibration >= Calibration::kFloor) {
      ideal = (magnitude > 0.0f) ? ClippedPower(RuledExponent(job, magnitude)) : Splat(0.0f);
    } else if (job.has_zero) {
      // As `symmetric_or_range` says: a range beyond float32 by its half, and offsets that leave room for the codes.
      const F span = high - low, half = (high * Splat(0.5f) - low * Splat(0.5f)) / Splat(0.5f * job.range);
      const I is_whole = span <= Splat(kLargest);
      ideal = is_whole ? span / Splat(job.range) : half;
      const F fitting = Min(ideal, Splat(job.largest_finite_step));
      if (job.zero_is_whole) {
        ideal = is_whole ? fitting : ideal;
      } else {
        low = (ideal > fitting) ? low * (fitting / ideal) : low;
        ideal = fitting;
        low = (Abs(low) < kTiny) ? Splat(0.0f) : low;  // one zero, whatever its sign was
        low = (F)((bits >= kInfinityBits) ? Splat(kNanBits) : (I)low);
      }
    } else {
      ideal = Max((F)((I)low ^ (int32_t)0x80000000), high) / Splat(job.bound);
    }
    StoreScales(job, ideal, low, bits, unit, at + i, some);
  }
}
