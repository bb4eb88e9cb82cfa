// Amax and ranges of tiles, from which their scales follow. Included in the namespace of an instruction set.

INLINE float LowestLane(V v) {
  float lowest = v[0];
  for (int i = 1; i < kLanes; ++i) lowest = v[i] < lowest ? v[i] : lowest;
  return lowest;
}
INLINE float HighestLane(V v) {
  float highest = v[0];
  for (int i = 1; i < kLanes; ++i) highest = v[i] > highest ? v[i] : highest;
  return highest;
}

template <typename T>
INLINE void RangeOfRun(const Job& job, const T* x, int64_t count, int64_t at, const Ranges& ranges) {
  I magnitude = Same((int32_t)0);
  V low = Same(__builtin_inff()), high = Same(-__builtin_inff());
  if (NeedsEnds(job)) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const V v = LoadSome(x + i, count - i);
      magnitude = Max(magnitude, (I)Abs(v));
      low = Min(v, low), high = Max(v, high);
    }
    const float lowest = LowestLane(low), highest = HighestLane(high);
    ranges.low[at] = lowest < ranges.low[at] ? lowest : ranges.low[at];
    ranges.high[at] = highest > ranges.high[at] ? highest : ranges.high[at];
  } else {
    I other = magnitude;
    int64_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      magnitude = Max(magnitude, (I)Abs(Load(x + i)));
      other = Max(other, (I)Abs(Load(x + i + kLanes)));
    }
    for (; i < count; i += kLanes) magnitude = Max(magnitude, (I)Abs(LoadSome(x + i, count - i)));
    magnitude = Max(magnitude, other);
  }
  const int32_t largest = LargestLane(magnitude);
  if (largest <= ranges.magnitude[at]) return;
  ranges.magnitude[at] = largest;
  if (job.calibration != Calibration::kSignedMax) return;
  for (int64_t i = 0; i < count; ++i) {
    const float v = Widened(x[i]);
    int32_t bits;
    __builtin_memcpy(&bits, &v, 4);
    if ((bits & 0x7FFFFFFF) == largest) {
      ranges.first[at] = v;
      return;
    }
  }
}

INLINE bool NeedsOnlyMagnitudes(const Job& job) {
  return !NeedsEnds(job) && job.calibration != Calibration::kSignedMax;
}

// The magnitudes of kLanes tiles of `width` columns, a multiple of kLanes: each tile's in a vector, and these compared together.
template <typename T>
INLINE void MagnitudesOfTiles(const T* x, int64_t width, int32_t* magnitudes) {
  V of_tile[kLanes];
  for (int k = 0; k < kLanes; ++k) {
    const T* tile = x + k * width;
    I magnitude = (I)Abs(Load(tile));
    for (int64_t i = kLanes; i < width; i += kLanes) magnitude = Max(magnitude, (I)Abs(Load(tile + i)));
    of_tile[k] = (V)magnitude;
  }
  Transpose(of_tile);
  I largest = LoadInts(magnitudes);
  for (int i = 0; i < kLanes; ++i) largest = Max(largest, (I)of_tile[i]);
  StoreSome(magnitudes, largest, kLanes);
}

// The magnitudes of tiles of one column, over four rows of this stride.
template <typename T>
INLINE void MagnitudesOfEach(const T* x, int64_t stride, int64_t count, int32_t* magnitudes) {
  for (int64_t i = 0; i < count; i += kLanes) {
    I largest = LoadInts(magnitudes + i);
    for (int k = 0; k < 4; ++k) largest = Max(largest, (I)Abs(LoadSome(x + k * stride + i, count - i)));
    StoreSome(magnitudes + i, largest, kLanes);
  }
}

template <typename T>
INLINE void RangeOfEach(const Job& job, const T* x, int64_t count, const Ranges& ranges) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const V v = LoadSome(x + i, count - i);
    const I bits = (I)Abs(v), before = LoadInts(ranges.magnitude + i);
    if (NeedsEnds(job)) {
      StoreSome(ranges.low + i, Min(v, Load(ranges.low + i)), kLanes);
      StoreSome(ranges.high + i, Max(v, Load(ranges.high + i)), kLanes);
    } else if (job.calibration == Calibration::kSignedMax) {
      StoreSome(ranges.first + i, (bits > before) ? v : Load(ranges.first + i), kLanes);
    }
    StoreSome(ranges.magnitude + i, Max(bits, before), kLanes);
  }
}

// The ranges of the tiles of columns c0..c1 of one row, which are several columns wide; `ranges` begins at tile `first`.
template <typename T>
INLINE void RangesOfRow(const Job& job, const T* x, int64_t c0, int64_t c1, int64_t first, const Ranges& ranges) {
  const int64_t width = job.tile_columns;
  int64_t c = c0;
  if (NeedsOnlyMagnitudes(job) && width % kLanes == 0 && c0 % width == 0) {
    for (; c + kLanes * width <= c1; c += kLanes * width) MagnitudesOfTiles(x + c, width, ranges.magnitude + c / width - first);
  }
  while (c < c1) {
    const int64_t tile = c / width, end = (tile + 1) * width < c1 ? (tile + 1) * width : c1;
    RangeOfRun(job, x + c, end - c, tile - first, ranges);
    c = end;
  }
}

// The ranges of the tiles in rows r0..r1 of one row of tiles, over columns c0..c1; `ranges` begins at c0's tile.
template <typename T>
static void RangesOf(const Job& job, int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1, const Ranges& ranges) {
  const int64_t first = c0 / job.tile_columns, count = (c1 - 1) / job.tile_columns + 1 - first;
  for (int64_t i = 0; i < count + kLanes; ++i) {
    ranges.magnitude[i] = 0;
    if (NeedsEnds(job)) ranges.low[i] = __builtin_inff(), ranges.high[i] = -__builtin_inff();
    if (job.calibration == Calibration::kSignedMax) ranges.first[i] = 0.0f;
  }
  for (int64_t r = r0; r < r1; ++r) {
    const T* x = (const T*)job.x + (b * job.rows + r) * job.columns;
    if (job.tile_columns > 1) {
      RangesOfRow(job, x, c0, c1, first, ranges);
    } else if (NeedsOnlyMagnitudes(job) && r + 4 <= r1) {
      MagnitudesOfEach(x + c0, job.columns, c1 - c0, ranges.magnitude);
      r += 3;
    } else {
      RangeOfEach(job, x + c0, c1 - c0, ranges);
    }
  }
}

// The largest magnitudes of a run of elements.
template <typename T>
static LargestBits LargestOf(const T* x, int64_t count) {
  I finite = Same((int32_t)0), any = finite;
  for (int64_t i = 0; i < count; i += kLanes) {
    const I bits = (I)Abs(LoadSome(x + i, count - i));
    any = Max(any, bits);
    finite = Max(finite, (bits < kInfinityBits) ? bits : Same((int32_t)0));
  }
  return {LargestLane(finite), LargestLane(Min(any, Same(kInfinityBits)))};
}
