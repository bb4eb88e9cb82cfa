// Attention of some queries over some positions of one head. Included inside a level's namespace.

// One row's scores become weights, relative to the largest score so far; what was summed before is brought to it. Scores before
// `first` and from `seen` on count nothing.
static void Weigh(float* score, int64_t first, int64_t seen, float* peak, float* sum, float* mixed, int64_t ld) {
  for (int64_t i = 0; i < first; ++i) score[i] = -INFINITY;
  for (int64_t i = seen; i < kKeys; ++i) score[i] = -INFINITY;
  V largest = Load(score);
  for (int64_t i = kLanes; i < kKeys; i += kLanes) largest = Max(Load(score + i), largest);
  const float highest = LargestOfLanes(largest), now = highest > *peak ? highest : *peak;
  const float origin = now == -INFINITY ? 0.0f : now;  // while all scores are -inf, all weights are 0, and not -inf - -inf
  V total = Same(0.0f);
  for (int64_t i = 0; i < kKeys; i += kLanes) {
    const V weight = Exponential(Sub(Load(score + i), Same(origin)));
    Store(score + i, weight);
    total = Add(total, weight);
  }
  float before[kLanes];
  Store(before, Exponential(Same(*peak - origin)));
  *sum = *sum * before[0] + SumOfLanes(total);
  if (now != *peak) {
    for (int64_t i = 0; i < ld; i += kLanes) Store(mixed + i, Mul(Load(mixed + i), Same(before[0])));
  }
  *peak = now;
}

template <class Products>
static void AttendBy(const Products& products, const Rows& of, int64_t s0, int64_t s1, float* score, const Found& found) {
  const int64_t ld = UpTo(of.head.width, kAtOnce);
  for (int64_t i = 0; i < of.rows * ld; ++i) found.mixed[i] = 0.0f;
  for (int64_t r = 0; r < of.rows; ++r) found.peak[r] = -INFINITY, found.sum[r] = 0.0f;
  int64_t begin = s1;
  for (int64_t r = 0; r < of.rows; ++r) begin = of.head.First(of.r0 + r) < begin ? of.head.First(of.r0 + r) : begin;
  begin = begin > s0 ? s0 + (begin - s0) / kKeys * kKeys : s0;
  for (int64_t s = begin; s < s1; s += kKeys) {
    const int64_t n = s1 - s < kKeys ? s1 - s : kKeys;
    products.Scores(s, n, score);
    if (of.head.cap != 0.0f) {
      const V cap = Same(of.head.cap), inverse = Same(1.0f / of.head.cap);
      for (int64_t i = 0; i < of.rows * kKeys; i += kLanes) Store(score + i, Mul(Tanh(Mul(Load(score + i), inverse)), cap));
    }
    for (int64_t r = 0; r < of.rows; ++r) {
      const int64_t first = of.First(r, s, n), seen = of.Seen(r, s, n);
      if (seen > first) Weigh(score + r * kKeys, first, seen, found.peak + r, found.sum + r, found.mixed + r * ld, ld);
      else std::memset(score + r * kKeys, 0, kKeys * sizeof(float));
    }
    products.AddValues(s, n, score, found.mixed);
  }
}

// The memory that Attend asks for, in floats.
static int64_t ScratchOf(int64_t width, int64_t rows) {
  const int64_t floats = FloatProducts::Scratch(width, rows), bytes = Int8Products::Scratch(width, rows);
  return rows * kKeys + (floats > bytes ? floats : bytes);
}

// What `rows` queries see of positions [s0, s1): the largest score of each, the sum of its weights relative to that, and the sum
// of the values with these weights, in rows of `width` up to whole blocks of registers.
static void Attend(const Head& head, int64_t r0, int64_t rows, int64_t s0, int64_t s1, float* scratch, const Found& found) {
  const Rows of{head, r0, rows};
  float *score = scratch, *rest = score + rows * kKeys;
  if (head.query_codes == nullptr) AttendBy(FloatProducts(of, rest), of, s0, s1, score, found);
  else AttendBy(Int8Products(of, rest), of, s0, s1, score, found);
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
