// A few rows of x, and w in rows of outputs ([K, N]): four rows of w are interleaved in registers and multiplied by x. Included
// in the namespace of an instruction set.
//
// It is the product by panels without the panel, which would go out to the second cache and come back: of a strip, the sums of
// few rows take little memory, so 16 rows of w are added to them before the next strip's. Sums are in the order that putting rows
// side by side makes of outputs, until a tile ends.

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512

constexpr int64_t kAcrossRows = 4;  // of x

static bool IsAcross(const IntegerJob& job) {
  return !job.contracts_cols && job.M <= kAcrossRows && job.x_zero.data == nullptr;
}

// Groups of four rows [from, end) of w, for one strip.
template <int kBits, int kM>
static void AddAcross(const IntegerJob& job, const Stretch& bytes, int64_t from, int64_t end, int64_t n0, const int8_t* x,
                      const int32_t* x_sum, int32_t* sums, int64_t ld_sums) {
  const Words flip = SameI(static_cast<int32_t>(Flipped(job) * 0x01010101u)), low = SameI(0x0F0F0F0F);
  const Words added = SameI(static_cast<int32_t>(-AddedTo(job)));
  Words sum[kM][4];
#pragma GCC unroll 4
  for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sum[m][j] = x_sum == nullptr ? LoadI(sums + m * ld_sums + 16 * j) : MulI(SameI(x_sum[m]), added);
  }
  x += from * 4 * kM * (8 / kBits);
  for (int64_t b = from; b < end; ++b, x += 4 * kM * (8 / kBits)) {
    Words fours[4];
    LoadFours<false>(job, bytes, b, n0, fours);
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      int32_t four, next;
      std::memcpy(&four, x + 4 * m, 4);
      if (kBits == 4) std::memcpy(&next, x + 4 * (kM + m), 4);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        if (kBits == 8) {
          sum[m][j] = Dot4(sum[m][j], XorI(fours[j], flip), SameI(four));
        } else {
          sum[m][j] = Dot4(sum[m][j], XorI(AndI(fours[j], low), flip), SameI(four));
          sum[m][j] = Dot4(sum[m][j], XorI(AndI(HighI(fours[j]), low), flip), SameI(next));
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) StoreI(sums + m * ld_sums + 16 * j, sum[m][j]);
  }
}

// The sums of one strip as scaled floats, its outputs in order.
template <int kM>
static void EndAcross(const Tile& tile, const int32_t* sums, int64_t ld_sums) {
  Words sum[kM][kIntAcross];
#pragma GCC unroll 4
  for (int m = 0; m < kM; ++m) {
    const int32_t* p = sums + m * ld_sums;
    const Words a = LoadI(p), b = LoadI(p + 16), c = LoadI(p + 32), d = LoadI(p + 48);
    const Words even = _mm512_shuffle_i32x4(a, b, 0x88), odd = _mm512_shuffle_i32x4(a, b, 0xDD);
    const Words even2 = _mm512_shuffle_i32x4(c, d, 0x88), odd2 = _mm512_shuffle_i32x4(c, d, 0xDD);
    sum[m][0] = _mm512_shuffle_i32x4(even, even2, 0x88), sum[m][2] = _mm512_shuffle_i32x4(even, even2, 0xDD);
    sum[m][1] = _mm512_shuffle_i32x4(odd, odd2, 0x88), sum[m][3] = _mm512_shuffle_i32x4(odd, odd2, 0xDD);
  }
  if (tile.w_zero != nullptr) LessProducts<kM>(tile.x_sum, tile.w_zero, sum);
  if (tile.x_scale == nullptr) EndTile<kM, false>(tile, sum);
  else EndTile<kM, true>(tile, sum);
}

template <int kBits, int kM>
static void AcrossTiles(const IntegerJob& job, const Segment& segment, const IntegerScratch& s, int64_t n0, int64_t strips,
                        int64_t width) {
  const Stretch bytes(job, segment);
  const int8_t* x = job.x + 4 * segment.at * kM;
  for (int64_t t = 0; t < segment.tiles; ++t) {
    const int32_t* x_sum = job.x_sums + (segment.tile + t) * kM;
    const int64_t first = GroupsBefore(job, segment, t) * kBits / 8, end = GroupsBefore(job, segment, t + 1) * kBits / 8;
    for (int64_t b = first; b < end; b += kDeep) {
      for (int64_t i = 0; i < strips; ++i) {
        AddAcross<kBits, kM>(job, bytes, b, b + kDeep < end ? b + kDeep : end, n0 + i * kIntWide, x,
                             segment.first && b == first ? x_sum : nullptr, s.sums + i * kIntWide, width);
      }
    }
    BlockTile tile(job, segment, t, 0, kM);
    for (int64_t i = 0; segment.last && i < strips; ++i) {
      tile.SetStrip(job, s, t, i, 0, width);
      EndAcross<kM>(tile, s.sums + i * kIntWide, width);
    }
  }
}

static void RunAcross(const IntegerJob& job, const Segment& segment, const IntegerScratch& s, int64_t n0, int64_t strips,
                      int64_t width) {
  typedef void (*Across)(const IntegerJob&, const Segment&, const IntegerScratch&, int64_t, int64_t, int64_t);
  static const Across bytes[] = {AcrossTiles<8, 1>, AcrossTiles<8, 2>, AcrossTiles<8, 3>, AcrossTiles<8, 4>};
  static const Across halves[] = {AcrossTiles<4, 1>, AcrossTiles<4, 2>, AcrossTiles<4, 3>, AcrossTiles<4, 4>};
  (job.bits == 8 ? bytes : halves)[job.M - 1](job, segment, s, n0, strips, width);
}

#else

static constexpr bool IsAcross(const IntegerJob&) { return false; }
static void RunAcross(const IntegerJob&, const Segment&, const IntegerScratch&, int64_t, int64_t, int64_t) {}

#endif
