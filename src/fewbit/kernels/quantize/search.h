// The scale of least squared error among those that can be stored. Included in each level's namespace.
//
// A lane holds a tile, so that sums, scales and comparisons of W tiles go on side by side. Magnitudes serve in place of
// elements (the grids are symmetric), in units of the power of two below the tile's largest, so that no square overflows.

// The format's number nearest to each magnitude, which is not above the largest one.
struct MinifloatGrid {
  F max;
  I lowest, shift_bits;
  explicit MinifloatGrid(const Format& f)
      : max(Splat(f.max)), lowest(Splat((int32_t)((128 - f.bias) << 23))), shift_bits(Splat((int32_t)((23 - f.mantissa) << 23))) {}
  INLINE_MEMBER F operator()(F magnitude) const {
    const F q = Min(magnitude, max);
    const F shifter = (F)(Max((I)q & 0x7F800000, lowest) + shift_bits);
    return (q + shifter) - shifter;
  }
};

struct IntegerGrid {
  F inverse_step, step, high;
  explicit IntegerGrid(const Format& f)
      : inverse_step(Splat(f.inverse_step)), step(Splat(1.0f / f.inverse_step)), high(Splat(f.high)) {}
  INLINE_MEMBER F operator()(F magnitude) const {
    const F q = Min(magnitude * inverse_step, high);
    return ((q + Splat(kRounder)) - Splat(kRounder)) * step;
  }
};

// The squared errors of W tiles of `count` magnitudes.
template <typename Grid>
INLINE F ErrorOf(const float* magnitudes, int64_t count, const Grid& grid, F scale) {
  const F reciprocal = Splat(1.0f) / scale;
  F even = Splat(0.0f), odd = even;
  auto residual = [&](const float* p) {
    const F magnitude = Load(p);
    return Fnma(grid(magnitude * reciprocal), scale, magnitude);
  };
  int64_t i = 0;
  for (; i + 2 <= count; i += 2) {
    const F a = residual(magnitudes + i * W), c = residual(magnitudes + (i + 1) * W);
    even = Fma(a, a, even), odd = Fma(c, c, odd);
  }
  if (i < count) {
    const F a = residual(magnitudes + i * W);
    even = Fma(a, a, even);
  }
  return even + odd;
}

struct Best {
  F scale, error;
  // Takes a scale of an error that is lower by more than rounding.
  INLINE_MEMBER void Offer(F other, F other_error) {
    const I wins = other_error < error * Splat(1.0f - 0x1p-16f);
    scale = wins ? other : scale;
    error = wins ? other_error : error;
  }
};

template <typename Grid>
INLINE F BestPower(const Job& job, const Grid& grid, const float* magnitudes, int64_t count, F largest, F unit_power) {
  const I ceiling = RuledExponent(job, largest);
  Best best;
  for (int i = 0; i <= job.halvings; ++i) {
    const F scale = ClippedPower(ceiling - i), error = ErrorOf(magnitudes, count, grid, scale * unit_power);
    if (i == 0) best = {scale, error};
    else best.Offer(scale, error);
  }
  return best.scale;
}

// The codes of the scales are those of positive numbers in order: code i + 1 is the i-th of them. Within the proven window of
// codes (see scales/mse.py) some need not be tried: what is eight codes above another one tried is twice its scale, and
// never better.
template <typename Grid>
INLINE F BestCode(const Job& job, const Grid& grid, const float* magnitudes, int64_t count, F largest, F unit_power, F unit) {
  const Format& holder = job.scale;
  const int32_t top = (int32_t)(holder.count);
  F needed = largest / Splat(job.bound);
  if (job.has_unit) needed = needed / unit;
  I code = MinifloatCode(holder, needed);
  code -= (I)(MinifloatValue(holder, code) < needed);
  const I ceiling = Min(Max(code, Splat((int32_t)1)), Splat(top));
  // The codes first .. first + tried - 1, but for the one at `start`, which is the ceiling and has been tried before.
  I first = Splat((int32_t)1);
  int32_t tried = top, start = -1;
  if (job.is_windowed && LargestLane((I)(ceiling < 9) & 1) == 0) {
    first = ceiling - 5, tried = 12, start = 5;
  } else if (job.is_windowed) {
    first = (ceiling < 9) ? first : ceiling - 5, tried = 15;
  }
  Best best;
  for (int32_t i = -1; i < tried; ++i) {
    if (i >= 0 && i == start) continue;
    const I c = i < 0 ? ceiling : first + i;
    F scale = MinifloatValue(holder, Min(Max(c, Splat((int32_t)1)), Splat(top)));
    if (job.has_unit) scale = scale * unit;
    const F error = ErrorOf(magnitudes, count, grid, scale * unit_power);
    if (i < 0) best = {scale, error};
    else best.Offer(scale, error);
  }
  return best.scale;
}

// The bits of the largest magnitudes of W tiles from tile `t` of a row of tiles, and in `out` their magnitudes, element by
// element; zeros where there is none. Returns how many elements a tile has.
template <typename T>
static int64_t Gathered(const Job& job, int64_t b, int64_t row_tile, int64_t t, int64_t tiles, I* largest, float* out) {
  const int64_t r0 = row_tile * job.tile_rows;
  const int64_t r1 = r0 + job.tile_rows < job.rows ? r0 + job.tile_rows : job.rows;
  const int64_t width = job.tile_columns, left = job.columns - t * width;
  I bits = Splat((int32_t)0);
  int64_t n = 0;
  auto keep = [&](int64_t i, F v) {
    const F magnitude = Abs(v);
    bits = Max(bits, (I)magnitude);
    StoreSome(out + i * W, magnitude, W);
  };
  for (int64_t r = r0; r < r1; ++r, n += width) {
    const T* x = (const T*)job.x + (b * job.rows + r) * job.columns + t * width;
    if (width == 1) {
      keep(n, LoadSome(x, tiles));
    } else if (width % W == 0 && left >= W * width) {
      for (int64_t j = 0; j < width; j += W) {
        F v[W];
        for (int lane = 0; lane < W; ++lane) v[lane] = Load(x + lane * width + j);
        Transpose(v);
        for (int i = 0; i < W; ++i) keep(n + j + i, v[i]);
      }
    } else {
      for (int64_t j = 0; j < width; ++j) {
        F v = Splat(0.0f);
        for (int lane = 0; lane < W; ++lane) {
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
// magnitudes of W tiles.
template <typename Grid>
static void SearchedScales(const Job& job, const Grid& grid, decltype(&Gathered<float>) gathered, int64_t b, int64_t row_tile,
                           int64_t t0, int64_t count, float unit, float* scratch) {
  const int64_t at = (b * job.row_tiles + row_tile) * job.column_tiles + t0;
  for (int64_t i = 0; i < count; i += W) {
    const int64_t some = count - i < W ? count - i : W;
    I bits;
    const int64_t n = gathered(job, b, row_tile, t0 + i, some, &bits, scratch);
    const F largest = MagnitudeOf(bits);
    const I exponent = Min(Max(ExponentOf(largest), Splat((int32_t)-126)), Splat((int32_t)126));
    const F unit_power = PowerOfTwo(-exponent);
    for (int64_t k = 0; k < n; ++k) StoreSome(scratch + k * W, Load(scratch + k * W) * unit_power, W);
    const F best = job.calibration == Calibration::kBestPower
                       ? BestPower(job, grid, scratch, n, largest, unit_power)
                       : BestCode(job, grid, scratch, n, largest, unit_power, Splat(unit));
    const F ideal = (largest > 0.0f) ? best : Splat(0.0f);
    StoreScales(job, ideal, ideal, bits, unit, at + i, some);
  }
}
