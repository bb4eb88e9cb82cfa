// A few rows of x, and whole rows of w: each row of w is read once, in place, and multiplied by x in registers. Included inside a
// level's namespace.
//
// Nothing is laid out but x, once a call: 64 bytes of w are 64 or 128 codes of one output, those of 4 bits the even ones in
// the low halves and the odd ones in the high halves, and x comes in the same order. Four outputs are taken together, so that x is
// loaded once for them and the memory of four rows is asked for at once; each lane keeps its own sum until a row ends.

constexpr int64_t kFewIntRows = 4;  // of x
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512 || FEWBIT_ARM64
constexpr int kIntRowsAtOnce = 4;  // of x: those whose sums have room in registers
#else
constexpr int kIntRowsAtOnce = FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2 ? 2 : 1;
#endif
constexpr int64_t kFewWide = 64;  // outputs of a chunk

// Zero points of x would need the sums of w's codes, which only panels make.
static bool IsFew(const IntegerJob& job) {
  return job.contracts_cols && job.M <= kFewIntRows && job.tiles() == 1 && job.x_zero.data == nullptr;
}

static int64_t BytesOfOutput(const IntegerJob& job) { return (job.K * job.bits + 7) / 8; }

// Bytes of a row of x as `PrepareFew` lays it out: whole vectors, zeros beyond K.
static int64_t FewRow(const IntegerJob& job) {
  return (BytesOfOutput(job) + kIntBytes - 1) / kIntBytes * kIntBytes * (8 / job.bits);
}

static void PrepareFew(const IntegerJob& job, const int8_t* rows, int64_t m, int8_t* out, int32_t* sums) {
  const int8_t* from = rows + m * job.K;
  int8_t* to = out + m * FewRow(job);
  int32_t sum = 0;
  for (int64_t k = 0; k < job.K; ++k) sum += from[k];
  sums[m] = sum;
  std::memset(to, 0, FewRow(job));
  if (job.bits == 8) {
    std::memcpy(to, from, job.K);
    return;
  }
  for (int64_t b = 0; b < job.K; b += 2 * kIntBytes, to += 2 * kIntBytes) {
    for (int64_t i = 0; i < kIntBytes && b + 2 * i < job.K; ++i) to[i] = from[b + 2 * i];
    for (int64_t i = 0; i < kIntBytes && b + 2 * i + 1 < job.K; ++i) to[kIntBytes + i] = from[b + 2 * i + 1];
  }
}

// What one vector of w's bytes adds to the sums with each row of x.
template <int kBits, int kM>
static inline void FewStep(U bytes, U flip, const int8_t* x, int64_t ldx, U (&sum)[kM]) {
  const U low = SameI(0x0F0F0F0F);
#pragma GCC unroll 4
  for (int m = 0; m < kM; ++m) {
    if (kBits == 8) {
      sum[m] = Dot4(sum[m], bytes ^ flip, LoadI(x + m * ldx));
    } else {
      sum[m] = Dot4(sum[m], (bytes & low) ^ flip, LoadI(x + m * ldx));
      sum[m] = Dot4(sum[m], ((bytes >> 4) & low) ^ flip, LoadI(x + m * ldx + kIntBytes));
    }
  }
}

static inline uint32_t SumOfInts(U v) {
  uint32_t lane[kLanes], sum = 0;
  StoreI(lane, v);
  for (int i = 0; i < kLanes; ++i) sum += lane[i];
  return sum;
}

// The outputs [n0, n1) of rows m0 to m0 + kM of x.
template <int kBits, int kM>
static void FewOutputs(const IntegerJob& job, int64_t m0, int64_t n0, int64_t n1) {
  constexpr int kR = 4;
  const int64_t whole = BytesOfOutput(job) / kIntBytes, rest = BytesOfOutput(job) % kIntBytes, ldx = FewRow(job);
  const int64_t distance = PrefetchDistance(job.row_stride);
  const U flip = SameI(static_cast<int32_t>(Flipped(job) * 0x01010101u));
  float c[kM][kFewWide];
  for (int64_t n = n0; n < n1; n += kR) {
    const uint8_t* row[kR];
    U sum[kR][kM];
#pragma GCC unroll 4
    for (int j = 0; j < kR; ++j) {
      row[j] = job.w + (n + j < n1 ? n + j : n1 - 1) * job.row_stride;
      __builtin_prefetch(row[j] + distance + whole * kIntBytes, 0, 2);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) sum[j][m] = SameI(0);
    }
    const int8_t* x = job.x + m0 * ldx;
    for (int64_t b = 0; b < whole; ++b, x += kIntBytes * (8 / kBits)) {
#pragma GCC unroll 4
      for (int j = 0; j < kR; ++j) {
        __builtin_prefetch(row[j] + distance + b * kIntBytes, 0, 2);
        FewStep<kBits, kM>(LoadI(row[j] + b * kIntBytes), flip, x, ldx, sum[j]);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kR; ++j) {
      if (rest != 0) {
        uint8_t last[kIntBytes] = {};
        std::memcpy(last, row[j] + whole * kIntBytes, rest);
        FewStep<kBits, kM>(LoadI(last), flip, x, ldx, sum[j]);
      }
      if (n + j >= n1) continue;
      const int32_t zero = static_cast<int32_t>(AddedTo(job)) + (job.w_zero.data == nullptr ? 0 : job.w_zero.At(n + j, 0));
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) {
        const uint32_t of_zero = static_cast<uint32_t>(job.x_sums[m0 + m]) * static_cast<uint32_t>(zero);
        const float value = static_cast<float>(static_cast<int32_t>(SumOfInts(sum[j][m]) - of_zero));
        c[m][n + j - n0] = value * job.x_scale.At(m0 + m, 0) * job.w_scale.At(n + j, 0);
      }
    }
  }
  for (int m = 0; m < kM; ++m) StoreRow(job, m0 + m, n0, n1 - n0, c[m]);
}

static void RunFew(const IntegerJob& job, int64_t chunk) {
  typedef void (*Few)(const IntegerJob&, int64_t, int64_t, int64_t);
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512 || FEWBIT_ARM64
  static const Few bytes[] = {FewOutputs<8, 1>, FewOutputs<8, 2>, FewOutputs<8, 3>, FewOutputs<8, 4>};
  static const Few halves[] = {FewOutputs<4, 1>, FewOutputs<4, 2>, FewOutputs<4, 3>, FewOutputs<4, 4>};
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  static const Few bytes[] = {FewOutputs<8, 1>, FewOutputs<8, 2>}, halves[] = {FewOutputs<4, 1>, FewOutputs<4, 2>};
#else
  static const Few bytes[] = {FewOutputs<8, 1>}, halves[] = {FewOutputs<4, 1>};
#endif
  const int64_t n0 = chunk * kFewWide, n1 = n0 + kFewWide < job.N ? n0 + kFewWide : job.N;
  for (int64_t m = 0; m < job.M; m += kIntRowsAtOnce) {
    const int64_t rows = job.M - m < kIntRowsAtOnce ? job.M - m : kIntRowsAtOnce;
    (job.bits == 8 ? bytes : halves)[rows - 1](job, m, n0, n1);
  }
}
