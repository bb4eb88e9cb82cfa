// The products of 64 positions in int8: queries by keys, and weights of the softmax, rounded, by values. All codes are from -127 to
// 127; sums are exact in int32. Included inside a level's namespace.
//
// Both are one micro-kernel: words of four bytes of x, broadcast, by vectors of words of w. Keys become words of four coordinates
// by transposing squares of words; values become words of four positions by interleaving four rows. The weights of a row, times the
// scales of the values, have one scale for the 64 positions, which begin at a multiple of 64.

static_assert(kIntAcross * kLanes == kAtOnce && kIntBytes % kAtOnce == 0, "whole vectors of bytes are whole blocks of columns");

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
constexpr uint32_t kKeyFlip = 0;
// The instruction for bytes saturates beyond 16 bits, which twice 127 * 127 is not.
static inline U AddByWeights(U sum, U weights, U values) {
  return sum + (U)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)weights, (__m256i)values), _mm256_set1_epi16(1));
}
static inline U AddByQuery(U sum, U query, U keys) {
  return AddByWeights(sum, (U)_mm256_abs_epi8((__m256i)query), (U)_mm256_sign_epi8((__m256i)keys, (__m256i)query));
}
#else
// What makes keys unsigned: they gain 128, and sums 128 times the sum of the query.
constexpr uint32_t kKeyFlip = FEWBIT_ARM64 ? 0 : 0x80808080u;
static inline U AddByWeights(U sum, U weights, U values) { return Dot4(sum, weights, values); }
static inline U AddByQuery(U sum, U query, U keys) { return Dot4(sum, keys, query); }
#endif

// c[m][n] += the products of `depth` words of x[m] and of column n of w, for kRowsHere rows of x and kIntAcross vectors of columns.
template <int kRowsHere, bool kIsQuery>
static void ByteBlock(const int8_t* x, int64_t ldx, const int8_t* w, int64_t ldw, int64_t depth, int32_t* c, int64_t ldc) {
  U sum[kRowsHere][kIntAcross];
  UNROLL for (int m = 0; m < kRowsHere; ++m) {
    UNROLL for (int n = 0; n < kIntAcross; ++n) sum[m][n] = LoadI(c + m * ldc + n * kLanes);
  }
  for (int64_t i = 0; i < depth; ++i) {
    U b[kIntAcross];
    UNROLL for (int n = 0; n < kIntAcross; ++n) b[n] = LoadI(w + 4 * i * ldw + n * kIntBytes);
    UNROLL for (int m = 0; m < kRowsHere; ++m) {
      int32_t word;
      std::memcpy(&word, x + m * ldx + 4 * i, 4);
      const U a = SameI(word);
      UNROLL for (int n = 0; n < kIntAcross; ++n) {
        sum[m][n] = kIsQuery ? AddByQuery(sum[m][n], a, b[n]) : AddByWeights(sum[m][n], a, b[n]);
      }
    }
  }
  UNROLL for (int m = 0; m < kRowsHere; ++m) {
    UNROLL for (int n = 0; n < kIntAcross; ++n) StoreI(c + m * ldc + n * kLanes, sum[m][n]);
  }
}

// All blocks of `rows` rows and `columns` columns.
template <bool kIsQuery>
static void ByteBlocks(const int8_t* x, int64_t ldx, const int8_t* w, int64_t ldw, int64_t depth, int64_t rows, int64_t columns,
                       int32_t* c, int64_t ldc) {
  constexpr int kMost = 4;
  typedef void (*Run)(const int8_t*, int64_t, const int8_t*, int64_t, int64_t, int32_t*, int64_t);
  static const Run run[] = {ByteBlock<1, kIsQuery>, ByteBlock<2, kIsQuery>, ByteBlock<3, kIsQuery>, ByteBlock<4, kIsQuery>};
  for (int64_t n = 0; n < columns; n += kAtOnce) {
    for (int64_t m = 0; m < rows; m += kMost) {
      run[(rows - m < kMost ? rows - m : kMost) - 1](x + m * ldx, ldx, w + 4 * n, ldw, depth, c + m * ldc + n, ldc);
    }
  }
}

class Int8Products {
 public:
  // In floats; a byte is a quarter of one.
  static int64_t Scratch(int64_t width, int64_t rows) {
    const int64_t ld = BytesOfPosition(width);
    return kKeys + rows * (2 + (ld > kKeys ? ld : kKeys) + ld / 4 + kKeys / 4) + 2 * kKeys * ld / 4 + 8 * 16;  // eight arrays, each up to a multiple of 16
  }

  Int8Products(const Rows& of, float* scratch) : of_(of), width_(of.head.width), ld_(BytesOfPosition(width_)) {
    const auto take = [&](int64_t floats) {
      float* taken = scratch;
      scratch += UpTo(floats, 16);
      return taken;
    };
    const auto bytes = [&](int64_t count) { return reinterpret_cast<int8_t*>(take(count / 4)); };
    scale_ = take(kKeys), unit_ = take(of.rows);
    start_ = reinterpret_cast<int32_t*>(take(of.rows));
    sums_ = reinterpret_cast<int32_t*>(take(of.rows * (ld_ > kKeys ? ld_ : kKeys)));
    queries_ = bytes(of.rows * ld_), weights_ = bytes(of.rows * kKeys);
    plain_ = bytes(kKeys * ld_), turned_ = bytes(kKeys * ld_);
    for (int64_t r = 0; r < of.rows; ++r) {
      const int8_t* from = of.head.query_codes + (of.r0 + r) * width_;
      std::memcpy(queries_ + r * ld_, from, width_);
      std::memset(queries_ + r * ld_ + width_, 0, ld_ - width_);
      int32_t sum = 0;
      for (int64_t k = 0; k < width_ && kKeyFlip != 0; ++k) sum += from[k];
      start_[r] = -128 * sum;
    }
  }

  // As FloatProducts.
  void Scores(int64_t s, int64_t n, float* score) const {
    TurnKeys(s, n);
    for (int64_t r = 0; r < of_.rows; ++r) {
      for (int64_t i = 0; i < kKeys; ++i) sums_[r * kKeys + i] = start_[r];
    }
    ByteBlocks<true>(queries_, ld_, turned_, kKeys, ld_ / 4, of_.rows, n, sums_, kKeys);
    LoadScales(of_.head.keys.codes.scale, s, n, of_.head.keys.codes.unit, scale_);
    for (int64_t i = n; i < kKeys; ++i) scale_[i] = 0.0f;
    const float root = 1.0f / std::sqrt(static_cast<float>(width_));
    for (int64_t r = 0; r < of_.rows; ++r) {
      const V factor = Same(of_.head.query_scale[of_.r0 + r] * root);
      for (int64_t i = r * kKeys; i < (r + 1) * kKeys; i += kLanes) {
        Store(score + i, Mul(FloatI(LoadI(sums_ + i)), Mul(factor, Load(scale_ + i - r * kKeys))));
      }
    }
  }

  // As FloatProducts.
  void AddValues(int64_t s, int64_t n, const float* weights, float* mixed) const {
    LoadScales(of_.head.values.codes.scale, s, n, of_.head.values.codes.unit, scale_);
    for (int64_t r = 0; r < of_.rows; ++r) RoundWeights(r, of_.First(r, s, n), of_.Seen(r, s, n), weights + r * kKeys);
    TurnValues(s, n);
    std::memset(sums_, 0, of_.rows * ld_ * sizeof(int32_t));
    ByteBlocks<false>(weights_, kKeys, turned_, ld_, UpTo(n, 4) / 4, of_.rows, ld_, sums_, ld_);
    const int64_t ld = UpTo(width_, kAtOnce);
    for (int64_t r = 0; r < of_.rows; ++r) {
      const V unit = Same(unit_[r]);
      for (int64_t j = 0; j < ld; j += kLanes) {
        float* to = mixed + r * ld + j;
        Store(to, MulAdd(FloatI(LoadI(sums_ + r * ld_ + j)), unit, Load(to)));
      }
    }
  }

 private:
  static int64_t BytesOfPosition(int64_t width) { return UpTo(width, kIntBytes); }

  // U [ld / 4, kKeys] of the keys of n positions from s on.
  void TurnKeys(int64_t s, int64_t n) const {
    const int64_t whole = UpTo(n, kLanes);
    const int8_t* keys = BytesOf(of_.head.keys, s, n, whole);
    const U flip = SameI(static_cast<int32_t>(kKeyFlip));
    for (int64_t i = 0; i < whole; i += kLanes) {
      for (int64_t k = 0; k < ld_; k += kIntBytes) {
        V words[kLanes];
        UNROLL for (int j = 0; j < kLanes; ++j) words[j] = (V)LoadI(keys + (i + j) * ld_ + k);
        Transpose(words);
        UNROLL for (int j = 0; j < kLanes; ++j) StoreI(turned_ + (k + 4 * j) * kKeys + 4 * i, (U)words[j] ^ flip);
      }
    }
  }

  // U [kKeys / 4, ld] of the values of n positions from s on.
  void TurnValues(int64_t s, int64_t n) const {
    const int64_t whole = UpTo(n, 4);
    const int8_t* values = BytesOf(of_.head.values, s, n, whole);
    for (int64_t i = 0; i < whole; i += 4) {
      for (int64_t k = 0; k < ld_; k += kIntBytes) {
        U v[4];
        UNROLL for (int j = 0; j < 4; ++j) v[j] = LoadI(values + (i + j) * ld_ + k);
        SideBySide(v);
        PartsInOrder(v);
        UNROLL for (int j = 0; j < 4; ++j) StoreI(turned_ + i * ld_ + 4 * (k + j * kLanes), v[j]);
      }
    }
  }

  // The weights of the positions that a row sees, times their scales, as integers of one unit. NaN if one is not finite.
  void RoundWeights(int64_t r, int64_t first, int64_t seen, const float* weights) const {
    float scaled[kKeys] = {};
    for (int64_t i = first; i < seen; ++i) scaled[i] = weights[i] * scale_[i];
    const bool is_finite = AreFinite(scaled, kKeys);
    V largest = Same(0.0f);
    for (int64_t i = 0; i < kKeys; i += kLanes) largest = Max(Load(scaled + i), largest);
    const float highest = LargestOfLanes(largest);
    const bool is_some = is_finite && highest > 0.0f;
    const V shift = Same(12582912.0f);  // 1.5 * 2**23: what is added to it is rounded
    for (int64_t i = 0; i < kKeys; i += kLanes) {
      const V share = is_some ? Load(scaled + i) / Same(highest) : Same(0.0f);
      const B bytes = ToBytes((I)Add(Mul(share, Same(127.0f)), shift) & 255);
      std::memcpy(weights_ + r * kKeys + i, &bytes, sizeof bytes);
    }
    unit_[r] = is_finite ? highest / 127.0f : NAN;
  }

  // The codes of positions [from, from + n), of which the first `count` are there, in `ld` bytes each: in place, or with zeros.
  const int8_t* BytesOf(const Numbers& of, int64_t from, int64_t count, int64_t n) const {
    const int8_t* codes = reinterpret_cast<const int8_t*>(of.codes.codes) + from * width_;
    if (width_ == ld_ && count == n) return codes;
    std::memset(plain_, 0, n * ld_);
    for (int64_t i = 0; i < count; ++i) std::memcpy(plain_ + i * ld_, codes + i * width_, width_);
    return plain_;
  }

  Rows of_;
  int64_t width_, ld_;    // ld: bytes of a position, up to whole vectors
  float* scale_;          // [kKeys]
  float* unit_;           // [rows]: what one of the rounded weights is
  int32_t* start_;        // [rows]: the sums that flipped keys begin with
  int32_t* sums_;         // [rows, kKeys] of scores, [rows, ld] of values
  int8_t *queries_, *weights_;  // [rows, ld], [rows, kKeys]
  int8_t *plain_, *turned_;     // [kKeys, ld], and the same as words
};
