// The products of 64 positions in float32. Codes are decoded first. Included inside a level's namespace.

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

class FloatProducts {
 public:
  static int64_t Scratch(int64_t width, int64_t rows) {
    const int64_t ld = UpTo(width, kAtOnce);
    return rows * width + ld * kTurned + kKeys * (ld + 3 * width) + 8 * 64;
  }

  FloatProducts(const Rows& of, float* scratch) : of_(of), width_(of.head.width), ld_(UpTo(width_, kAtOnce)) {
    x_ = scratch, keys_ = x_ + of.rows * width_, plain_ = keys_ + ld_ * kTurned, rest_ = plain_ + kKeys * ld_ + 64;
    const float factor = 1.0f / std::sqrt(static_cast<float>(width_));
    for (int64_t i = 0; i < of.rows * width_; ++i) x_[i] = of.head.Query(of.r0 * width_ + i) * factor;
  }

  // The scores of n positions from s on. What those beyond n score is not looked at.
  void Scores(int64_t s, int64_t n, float* score) const {
    const float* numbers = Positions(of_.head.keys, s, UpTo(n, kLanes), of_.head.positions, width_, ld_, rest_, plain_);
    for (int64_t i = 0; i < n; i += kLanes) {
      for (int64_t k = 0; k < width_; k += kLanes) Transpose(numbers + i * ld_ + k, ld_, keys_ + k * kTurned + i, kTurned);
    }
    std::memset(score, 0, of_.rows * kKeys * sizeof(float));
    for (int64_t i = 0; i < n; i += kAtOnce) {
      for (int64_t r = 0; r < of_.rows; r += kRows) {
        BlockOf(of_.rows - r)(x_ + r * width_, width_, keys_ + i, kTurned, width_, score + r * kKeys + i, kKeys);
      }
    }
  }

  // Adds n values from s on, each row with its weights, which are zero where it does not see a position.
  void AddValues(int64_t s, int64_t n, const float* weights, float* mixed) const {
    int64_t from = 0, to = n;  // positions that every row sees
    for (int64_t r = 0; r < of_.rows; ++r) {
      const int64_t first = of_.First(r, s, n), seen = of_.Seen(r, s, n);
      from = first > from ? first : from, to = seen < to ? seen : to;
    }
    const float* values = Positions(of_.head.values, s, n, of_.head.positions, width_, ld_, rest_, plain_);
    // A weight of zero takes nothing from a number, and makes NaN of an infinity or a NaN: then each row takes only the
    // positions it sees.
    const bool by_row = !AreFinite(values, from * ld_) || !AreFinite(values + to * ld_, (n - to) * ld_);
    for (int64_t i = 0; i < ld_; i += kAtOnce) {
      for (int64_t r = 0; r < of_.rows; r += by_row ? 1 : kRows) {
        const int64_t first = by_row ? of_.First(r, s, n) : 0, count = (by_row ? of_.Seen(r, s, n) : n) - first;
        if (count <= 0) continue;
        const float* weight = weights + r * kKeys + first;
        BlockOf(by_row ? 1 : of_.rows - r)(weight, kKeys, values + first * ld_ + i, ld_, count, mixed + r * ld_ + i, ld_);
      }
    }
  }

 private:
  static constexpr int64_t kTurned = kKeys + kLanes;  // from one coordinate's keys to the next's

  Rows of_;
  int64_t width_, ld_;
  float *x_, *keys_, *plain_, *rest_;
};
