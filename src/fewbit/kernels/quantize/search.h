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
  const F start = ClippedPower(ceiling);
  Best best{start, ErrorOf(magnitudes, count, grid, start * unit_power)};
  for (int i = 1; i <= job.halvings; ++i) {
    const F scale = ClippedPower(ceiling - i);
    best.Offer(scale, ErrorOf(magnitudes, count, grid, scale * unit_power));
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
  auto scale_of = [&](I c) {
    const F value = MinifloatValue(holder, Min(Max(c, Splat((int32_t)1)), Splat(top)));
    return job.has_unit ? value * unit : value;
  };
  const F start = scale_of(ceiling);
  Best best{start, ErrorOf(magnitudes, count, grid, start * unit_power)};
  auto offer = [&](I c) {
    const F scale = scale_of(c);
    best.Offer(scale, ErrorOf(magnitudes, count, grid, scale * unit_power));
  };
  if (!job.is_windowed) {
    for (int32_t c = 1; c <= top; ++c) offer(Splat(c));
  } else if (LargestLane((I)(ceiling < 9) & 1) == 0) {
    for (int32_t i = -5; i <= 6; ++i) {
      if (i != 0) offer(ceiling + i);
    }
  } else {
    const I first = (ceiling < 9) ? Splat((int32_t)1) : ceiling - 5;
    for (int32_t i = 0; i < 15; ++i) offer(first + i);
  }
  return best.scale;
}

// The bits of the largest magnitudes of W tiles from tile `t` of a row of tiles, and in `out` their magnitudes, element by
// element; zeros where there is none. Returns how many elements a tile has.
template <typename T>
INLINE int64_t Gathered(const Job& job, int64_t b, int64_t row_tile, int64_t t, int64_t tiles, I* largest, float* out) {
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

// As `Scales`, for the rules that search. `scratch` holds the magnitudes of W tiles.
template <typename T, typename Grid>
static void SearchedScales(const Job& job, const Grid& grid, int64_t b, int64_t row_tile, int64_t t0, int64_t count,
                           float unit, float* scratch) {
  const int64_t at = (b * job.row_tiles + row_tile) * job.column_tiles + t0;
  for (int64_t i = 0; i < count; i += W) {
    const int64_t some = count - i < W ? count - i : W;
    I bits;
    const int64_t n = Gathered<T>(job, b, row_tile, t0 + i, some, &bits, scratch);
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
