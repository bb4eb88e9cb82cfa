// The scale of least squared error among those that can be stored. Included in the namespace of an instruction set.
//
// A lane holds a tile, so that sums, scales and comparisons of kLanes tiles go on side by side. Magnitudes serve in place of
// elements (the grids are symmetric), in units of the power of two below the tile's largest, so that no square overflows.

// A grid gives the format's number nearest to each magnitude, which is in units of 1 / `steps`.
struct MinifloatGrid {
  static constexpr float steps = 1.0f;
  V max;
  I lowest, shift_bits;
  explicit MinifloatGrid(const Format& f)
      : max(Same(f.max)), lowest(Same((int32_t)((128 - f.bias) << 23))), shift_bits(Same((int32_t)((23 - f.mantissa) << 23))) {}
  INLINE_MEMBER V operator()(V magnitude) const {
    const V q = Min(magnitude, max);
    const V shifter = (V)(Max((I)q & 0x7F800000, lowest) + shift_bits);
    return (q + shifter) - shifter;
  }
};

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
// E2M1, in quarters: the numbers halfway between two of the grid are 1, 3, 5, 7, 10, 14 and 20 quarters, so the whole quarters
// below a magnitude index its number. Halfway itself either neighbour has the same error.
struct QuarterGrid {
  static constexpr float steps = 4.0f;
  __m512 low, high;
  explicit QuarterGrid(const Format&) {
    alignas(64) float numbers[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i) {
      numbers[i] = i < 1 ? 0.0f : i < 3 ? 0.5f : i < 5 ? 1.0f : i < 7 ? 1.5f : i < 10 ? 2.0f : i < 14 ? 3.0f : i < 20 ? 4.0f : 6.0f;
    }
    low = _mm512_load_ps(numbers), high = _mm512_load_ps(numbers + kLanes);
  }
  static bool Serves(const Format& f) { return f.kind == Kind::kMinifloat && f.mantissa == 1 && f.bias == 1 && f.max == 6.0f; }
  INLINE_MEMBER V operator()(V quarters) const {
    const __m512i index = _mm512_cvttps_epi32(Min(quarters, Same(24.0f)));
    return (V)_mm512_permutex2var_ps(low, index, high);
  }
};
#endif

struct IntegerGrid {
  static constexpr float steps = 1.0f;
  V inverse_step, step, high;
  explicit IntegerGrid(const Format& f)
      : inverse_step(Same(f.inverse_step)), step(Same(1.0f / f.inverse_step)), high(Same(f.high)) {}
  INLINE_MEMBER V operator()(V magnitude) const {
    const V q = Min(magnitude * inverse_step, high);
    return ((q + Same(kRounder)) - Same(kRounder)) * step;
  }
};

// The squared errors of kLanes tiles of `count` magnitudes.
template <typename Grid>
INLINE V ErrorOf(const float* magnitudes, int64_t count, const Grid& grid, V scale) {
  const V reciprocal = Same(Grid::steps) / scale;
  V even = Same(0.0f), odd = even;
  auto residual = [&](const float* p) {
    const V magnitude = Load(p);
    return Fnma(grid(magnitude * reciprocal), scale, magnitude);
  };
  int64_t i = 0;
  for (; i + 2 <= count; i += 2) {
    const V a = residual(magnitudes + i * kLanes), c = residual(magnitudes + (i + 1) * kLanes);
    even = Fma(a, a, even), odd = Fma(c, c, odd);
  }
  if (i < count) {
    const V a = residual(magnitudes + i * kLanes);
    even = Fma(a, a, even);
  }
  return even + odd;
}

struct Best {
  V scale, error;
  // Takes a scale of an error that is lower by more than rounding.
  INLINE_MEMBER void Offer(V other, V other_error) {
    const I wins = other_error < error * Same(1.0f - 0x1p-16f);
    scale = wins ? other : scale;
    error = wins ? other_error : error;
  }
};

template <typename Grid>
INLINE V BestPower(const Job& job, const Grid& grid, const float* magnitudes, int64_t count, V largest, V unit_power) {
  const I ceiling = RuledExponent(job, largest);
  Best best;
  for (int i = 0; i <= job.halvings; ++i) {
    const V scale = ClippedPower(ceiling - i), error = ErrorOf(magnitudes, count, grid, scale * unit_power);
    if (i == 0) best = {scale, error};
    else best.Offer(scale, error);
  }
  return best.scale;
}

// The codes of the scales are those of positive numbers in order: code i + 1 is the i-th of them. Within the proven window of
// codes (see scales/mse.py) some need not be tried: what is eight codes above another one tried is twice its scale, and
// never better.
template <typename Grid>
INLINE V BestCode(const Job& job, const Grid& grid, const float* magnitudes, int64_t count, V largest, V unit_power, V unit) {
  const Format& holder = job.scale;
  const int32_t top = (int32_t)(holder.count);
  V needed = largest / Same(job.bound);
  if (job.has_unit) needed = needed / unit;
  I code = MinifloatCode(holder, needed);
  code -= (I)(MinifloatValue(holder, code) < needed);
  const I ceiling = Min(Max(code, Same((int32_t)1)), Same(top));
  // The codes first .. first + tried - 1, but for the one at `start`, which is the ceiling and has been tried before.
  I first = Same((int32_t)1);
  int32_t tried = top, start = -1;
  if (job.is_windowed && LargestLane((I)(ceiling < 9) & 1) == 0) {
    first = ceiling - 5, tried = 12, start = 5;
  } else if (job.is_windowed) {
    first = (ceiling < 9) ? first : ceiling - 5, tried = 15;
  }
  auto scale_of = [&](I c) {
    const V scale = MinifloatValue(holder, Min(Max(c, Same((int32_t)1)), Same(top)));
    return job.has_unit ? scale * unit : scale;
  };
  const V whole = scale_of(ceiling);
  Best best{whole, ErrorOf(magnitudes, count, grid, whole * unit_power)};
  int32_t i = 0;
  // A scale at which the largest element alone loses more than all elements do at the ceiling is not tried. 2**-10 is far above
  // the rounding of both: a sum of up to 32 squares is exact to 2**-18.
  for (; i < start; ++i) {
    const V lost = Max(largest - scale_of(first + i) * Same(job.format.max), Same(0.0f)) * unit_power;
    if (LargestLane((I)(lost * lost <= best.error * Same(1.0f + 0x1p-10f)) & 1) != 0) break;
  }
  for (; i < tried; ++i) {
    if (i == start) continue;
    const V scale = scale_of(first + i);
    best.Offer(scale, ErrorOf(magnitudes, count, grid, scale * unit_power));
  }
  return best.scale;
}

// The bits of the largest magnitudes of kLanes tiles from tile `t` of a row of tiles, and in `out` their magnitudes, element by
// element; zeros where there is none. Returns how many elements a tile has.
template <typename T>
static int64_t Gathered(const Job& job, int64_t b, int64_t row_tile, int64_t t, int64_t tiles, I* largest, float* out) {
  const int64_t r0 = row_tile * job.tile_rows;
  const int64_t r1 = r0 + job.tile_rows < job.rows ? r0 + job.tile_rows : job.rows;
  const int64_t width = job.tile_columns, left = job.columns - t * width;
  I bits = Same((int32_t)0);
  int64_t n = 0;
  auto keep = [&](int64_t i, V v) {
    const V magnitude = Abs(v);
    bits = Max(bits, (I)magnitude);
    StoreSome(out + i * kLanes, magnitude, kLanes);
  };
  for (int64_t r = r0; r < r1; ++r, n += width) {
    const T* x = (const T*)job.x + (b * job.rows + r) * job.columns + t * width;
    if (width == 1) {
      keep(n, LoadSome(x, tiles));
    } else if (width % kLanes == 0 && left >= kLanes * width) {
      for (int64_t j = 0; j < width; j += kLanes) {
        V v[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) v[lane] = Load(x + lane * width + j);
        Transpose(v);
        for (int i = 0; i < kLanes; ++i) keep(n + j + i, v[i]);
      }
    } else {
      for (int64_t j = 0; j < width; ++j) {
        V v = Same(0.0f);
        for (int lane = 0; lane < kLanes; ++lane) {
          if (lane * width + j < left) v[lane] = Widened(x[lane * width + j]);
        }
        keep(n + j, v);
      }
    }
  }
  *largest = bits;
  return n;
}

// As `Scales`, for the rules that search, whatever the elements are: `gathered` reads them. `scratch` has room for the
// magnitudes of kLanes tiles.
template <typename Grid>
static void SearchedScales(const Job& job, const Grid& grid, decltype(&Gathered<float>) gathered, int64_t b, int64_t row_tile,
                           int64_t t0, int64_t count, float unit, float* scratch) {
  const int64_t at = (b * job.row_tiles + row_tile) * job.column_tiles + t0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = count - i < kLanes ? count - i : kLanes;
    I bits;
    const int64_t n = gathered(job, b, row_tile, t0 + i, some, &bits, scratch);
    const V largest = MagnitudeOf(bits);
    const I exponent = Min(Max(ExponentOf(largest), Same((int32_t)-126)), Same((int32_t)126));
    const V unit_power = PowerOfTwo(-exponent);
    for (int64_t k = 0; k < n; ++k) StoreSome(scratch + k * kLanes, Load(scratch + k * kLanes) * unit_power, kLanes);
    const V best = job.calibration == Calibration::kBestPower
                       ? BestPower(job, grid, scratch, n, largest, unit_power)
                       : BestCode(job, grid, scratch, n, largest, unit_power, Same(unit));
    const V ideal = (largest > 0.0f) ? best : Same(0.0f);
    StoreScales(job, ideal, ideal, bits, unit, at + i, some);
  }
}
