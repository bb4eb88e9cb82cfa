// Random numbers for stochastic rounding: those of jax.random.uniform with a Threefry key. Included in the namespace of an
// instruction set.
//
// A lane is an element: the counter is the element's place in the array, so any part of an array can be rounded alone. Reference:
// Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), Threefry-2x32 with 20 rounds.

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
