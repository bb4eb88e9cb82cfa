// What both kinds of products share: the rows of a step. Included inside a level's namespace.

constexpr int64_t kAtOnce = kAcross * kLanes;

static int64_t UpTo(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
static int64_t Within(int64_t at, int64_t n) { return at < 0 ? 0 : at < n ? at : n; }

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

// Some queries of a head: rows [r0, r0 + rows).
struct Rows {
  const Head& head;
  int64_t r0, rows;

  // Which of the positions [s, s + n) row r sees: from First to before Seen.
  int64_t First(int64_t r, int64_t s, int64_t n) const { return Within(head.First(r0 + r) - s, n); }
  int64_t Seen(int64_t r, int64_t s, int64_t n) const { return Within(head.Seen(r0 + r) - s, n); }
};
