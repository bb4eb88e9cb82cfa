// exp and tanh in every lane, and the largest lane, for a softmax. Included in the namespace of an instruction set, after simd.h.

static inline float LargestOfLanes(V v) {
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  return _mm512_reduce_max_ps(v);
#else
  float lane[kLanes];
  Store(lane, v);
  for (int i = 1; i < kLanes; ++i) lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
  return lane[0];
#endif
}

// e**x for x of at most 0, to 2 units in the last place; exact zero below -87, where float32 would be subnormal. NaN stays NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2: a number of 2**23 and more has no fraction, so that adding 1.5 * 2**23 rounds, and leaves n
// in the low bits, from where it goes to the exponent. The polynomial is that of Cephes' expf.
static inline V Exponential(V x) {
  const V shift = Same(12582912.0f), one = Same(1.0f);
  const I is_small = (I)(x < Same(-87.0f));
  const V rounded = MulAdd(x, Same(1.44269504088896341f), shift), n = Sub(rounded, shift);
  const V r = MulAdd(n, Same(2.12194440e-4f), MulAdd(n, Same(-0.693359375f), x));
  V p = Same(1.9875691500e-4f);
  p = MulAdd(p, r, Same(1.3981999507e-3f));
  p = MulAdd(p, r, Same(8.3334519073e-3f));
  p = MulAdd(p, r, Same(4.1665795894e-2f));
  p = MulAdd(p, r, Same(1.6666665459e-1f));
  p = MulAdd(p, r, Same(5.0000001201e-1f));
  const V y = Add(MulAdd(Mul(r, r), p, r), one), power = (V)(((I)rounded << 23) + (I)one);
  return (V)(~is_small & (I)Mul(y, power));
}

// tanh to 4 units in the last place: (1 - e**-2|x|) / (1 + e**-2|x|), and its series near 0, where that cancels.
static inline V Tanh(V x) {
  const V one = Same(1.0f), size = Max(x, Sub(Same(0.0f), x)), e = Exponential(Mul(size, Same(-2.0f))), square = Mul(x, x);
  V p = Same(62.0f / 2835.0f);
  p = MulAdd(p, square, Same(-17.0f / 315.0f));
  p = MulAdd(p, square, Same(2.0f / 15.0f));
  p = MulAdd(p, square, Same(-1.0f / 3.0f));
  const I near = (I)MulAdd(Mul(p, square), size, size), far = (I)(Sub(one, e) / Add(one, e));
  const I is_near = (I)(size < Same(0.25f)), sign = (I)x & (I)Same(-0.0f);
  return (V)((is_near & near) | (~is_near & far) | sign);
}
