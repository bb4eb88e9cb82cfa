// Attention of some queries over some positions of one head. Included inside a level's namespace.

constexpr int64_t kKeys = 64;         // positions of one step
constexpr int64_t kAtOnce = kAcross * kLanes;

static int64_t UpTo(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// n numbers of 16 bits as float32.
static void Widen(const uint16_t* from, Float kind, int64_t n, float* out) {
  int64_t i = 0;
  if (kind == Float::kBF16) {
    for (; i < n; ++i) out[i] = FloatOfBrain(from[i]);
    return;
  }
  for (; i + kLanes <= n; i += kLanes) Store(out + i, Load(reinterpret_cast<const Half*>(from + i)));
  for (; i < n; ++i) out[i] = FloatOfHalf(from[i]);
}

// Positions [s, s + n) as float32, each in `ld` numbers, the last of which are zeros. `out` has room for a vector more.
static void LoadPositions(const Numbers& of, int64_t s, int64_t n, int64_t width, float* rest, float* out, int64_t ld) {
  const bool in_one = of.is_coded && of.codes.rows == 1;  // no padding between the codes of two positions
  const int64_t room = (in_one ? n : 1) * width + 64;
  float *values = rest + room, *scale = values + room, *zero = scale + kKeys + 16, *row = ld == width ? out : zero + 16;
  RowScratch scratch{reinterpret_cast<uint8_t*>(rest), values, scale, zero, -1};
  if (in_one) {
    DecodeRow(of.codes, 0, s * width, n * width, scratch, row);
    for (int64_t i = 0; i < n && row != out; ++i) std::memcpy(out + i * ld, row + i * width, width * sizeof(float));
  } else if (of.is_coded) {
    for (int64_t i = 0; i < n; ++i) DecodeRow(of.codes, s + i, 0, width, scratch, out + i * ld);
  } else if (of.kind == Float::kF32) {
    const float* from = static_cast<const float*>(of.floats) + s * width;
    for (int64_t i = 0; i < n; ++i) std::memcpy(out + i * ld, from + i * width, width * sizeof(float));
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(of.floats) + s * width;
    for (int64_t i = 0; i < n; ++i) Widen(from + i * width, of.kind, width, out + i * ld);
  }
  for (int64_t i = 0; i < n && ld > width; ++i) std::memset(out + i * ld + width, 0, (ld - width) * sizeof(float));
}

// `LoadPositions` into `memory`, or in place, in `ld` each: floats, of which `count` positions are there.
static const float* Positions(const Numbers& of, int64_t s, int64_t n, int64_t count, int64_t width, int64_t ld, float* rest,
                              float* memory) {
  const bool as_is = !of.is_coded && of.kind == Float::kF32 && ld == width && s + n <= count;
  if (as_is) return static_cast<const float*>(of.floats) + s * width;
  LoadPositions(of, s, s + n < count ? n : count - s, width, rest, memory, ld);
  return memory;
}

// One row's scores become weights, relative to the largest score so far; what was summed before is brought to it. Scores before
// `first` and from `seen` on count nothing.
static void Weigh(float* score, int64_t first, int64_t seen, float* peak, float* sum, float* mixed, int64_t ld) {
  for (int64_t i = 0; i < first; ++i) score[i] = -INFINITY;
  for (int64_t i = seen; i < kKeys; ++i) score[i] = -INFINITY;
  V largest = Load(score);
  for (int64_t i = kLanes; i < kKeys; i += kLanes) largest = Max(Load(score + i), largest);
  const float highest = LargestOfLanes(largest), now = highest > *peak ? highest : *peak;
  V total = Same(0.0f);
  for (int64_t i = 0; i < kKeys; i += kLanes) {
    const V weight = Exponential(Sub(Load(score + i), Same(now)));
    Store(score + i, weight);
    total = Add(total, weight);
  }
  float before[kLanes];
  Store(before, Exponential(Same(*peak - now)));
  *sum = *sum * before[0] + SumOfLanes(total);
  if (now != *peak) {
    for (int64_t i = 0; i < ld; i += kLanes) Store(mixed + i, Mul(Load(mixed + i), Same(before[0])));
  }
  *peak = now;
}

// Whether no number is infinite or NaN.
static bool AreFinite(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7FFFFFFF;
    largest = bits > largest ? bits : largest;
  }
  return largest < 0x7F800000;
}

// The memory that Attend asks for, in floats.
static int64_t ScratchOf(int64_t width, int64_t rows) {
  const int64_t ld = UpTo(width, kAtOnce);
  return rows * (width + kKeys) + ld * (kKeys + kLanes) + kKeys * (ld + 3 * width) + 8 * 64;
}

// What `rows` queries see of positions [s0, s1): the largest score of each, the sum of its weights relative to that, and the sum
// of the values with these weights, in rows of `width` up to whole blocks of registers.
static void Attend(const Head& head, int64_t r0, int64_t rows, int64_t s0, int64_t s1, float* scratch, const Found& found) {
  const int64_t width = head.width, ld = UpTo(width, kAtOnce), turned = kKeys + kLanes;
  float *x = scratch, *score = x + rows * width, *keys = score + rows * kKeys, *plain = keys + ld * turned;
  float *rest = plain + kKeys * ld + 64, *peak = found.peak, *sum = found.sum, *mixed = found.mixed;
  const float factor = 1.0f / std::sqrt(static_cast<float>(width));
  for (int64_t i = 0; i < rows * width; ++i) x[i] = head.Query(r0 * width + i) * factor;
  for (int64_t i = 0; i < rows * ld; ++i) mixed[i] = 0.0f;
  for (int64_t r = 0; r < rows; ++r) peak[r] = -INFINITY, sum[r] = 0.0f;
  int64_t begin = s1;
  for (int64_t r = 0; r < rows; ++r) begin = head.First(r0 + r) < begin ? head.First(r0 + r) : begin;
  begin = begin > s0 ? s0 + (begin - s0) / kKeys * kKeys : s0;
  const auto within = [](int64_t at, int64_t n) { return at < 0 ? 0 : at < n ? at : n; };
  for (int64_t s = begin; s < s1; s += kKeys) {
    const int64_t n = s1 - s < kKeys ? s1 - s : kKeys;
    // Whole vectors of positions: what those beyond n score is not looked at.
    const float* numbers = Positions(head.keys, s, UpTo(n, kLanes), head.positions, width, ld, rest, plain);
    for (int64_t i = 0; i < n; i += kLanes) {
      for (int64_t k = 0; k < width; k += kLanes) Transpose(numbers + i * ld + k, ld, keys + k * turned + i, turned);
    }
    std::memset(score, 0, rows * kKeys * sizeof(float));
    for (int64_t i = 0; i < n; i += kAtOnce) {
      for (int64_t r = 0; r < rows; r += kRows) {
        BlockOf(rows - r)(x + r * width, width, keys + i, turned, width, score + r * kKeys + i, kKeys);
      }
    }
    if (head.cap != 0.0f) {
      const V cap = Same(head.cap), inverse = Same(1.0f / head.cap);
      for (int64_t i = 0; i < rows * kKeys; i += kLanes) Store(score + i, Mul(Tanh(Mul(Load(score + i), inverse)), cap));
    }
    int64_t from = 0, to = n;  // positions that every row sees
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t first = within(head.First(r0 + r) - s, n), seen = within(head.Seen(r0 + r) - s, n);
      from = first > from ? first : from, to = seen < to ? seen : to;
      if (seen > first) Weigh(score + r * kKeys, first, seen, peak + r, sum + r, mixed + r * ld, ld);
      else std::memset(score + r * kKeys, 0, kKeys * sizeof(float));
    }
    const float* values = Positions(head.values, s, n, head.positions, width, ld, rest, plain);
    // A weight of zero takes nothing from a number, and makes NaN of an infinity or a NaN: then each row takes only the
    // positions it sees.
    const bool by_row = !AreFinite(values, from * ld) || !AreFinite(values + to * ld, (n - to) * ld);
    for (int64_t i = 0; i < ld; i += kAtOnce) {
      for (int64_t r = 0; r < rows; r += by_row ? 1 : kRows) {
        const int64_t first = by_row ? within(head.First(r0 + r) - s, n) : 0;
        const int64_t count = (by_row ? within(head.Seen(r0 + r) - s, n) : n) - first;
        if (count <= 0) continue;
        const float* weights = score + r * kKeys + first;
        BlockOf(by_row ? 1 : rows - r)(weights, kKeys, values + first * ld + i, ld, count, mixed + r * ld + i, ld);
      }
    }
  }
}

// Joins the partial softmax sums of one row, which are `step` rows from one another, and its sink; NaN where there are none.
static void Join(const Found& found, int64_t row, int64_t parts, int64_t step, int64_t width, float sink, float* out) {
  const int64_t ld = UpTo(width, kAtOnce);
  float highest = sink, factor[kLanes];
  for (int64_t i = 0; i < parts; ++i) highest = found.peak[row + i * step] > highest ? found.peak[row + i * step] : highest;
  for (int64_t j = 0; j < width; ++j) out[j] = 0.0f;
  Store(factor, Exponential(Same(sink - highest)));
  float total = factor[0];
  for (int64_t i = 0, at = row; i < parts; ++i, at += step) {
    Store(factor, Exponential(Same(found.peak[at] - highest)));
    total += found.sum[at] * factor[0];
    for (int64_t j = 0; j < width; ++j) out[j] += found.mixed[at * ld + j] * factor[0];
  }
  for (int64_t j = 0; j < width; ++j) out[j] /= total;
}
