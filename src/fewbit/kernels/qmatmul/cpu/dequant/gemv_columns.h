// One row of x, or a few: codes become numbers in registers and are used there. Included in the namespace of an instruction set.

#if FEWBIT_HAS_LOOKUP

constexpr int64_t kFewRows = 4;     // of x that share one decoding of the weight
constexpr int64_t kSeveral = 16;    // that are taken four at a time along a contraction; panels are faster for more
constexpr int64_t kColumnRows = 8;  // rows of bytes that columns take at a time

// Columns are outputs: bytes of a row are neighbouring outputs, and the codes of a byte follow each other along the contraction.
//
// A few rows at a time, while the next ones are asked for: where rows are a page apart, they all compete for one set of the
// first cache, which keeps some twelve lines.
template <class Decoder, bool kSubtracts, int kM>
static void SumColumns(const Job& job, int64_t n0, int64_t width) {
  constexpr int kSub = Decoder::kLaneBytes, kAlong = Decoder::kSteps / kSub, kBlock = 16 * kSub;
  constexpr int kByteRows = Decoder::kByteRows;
  const Weight& w = job.w;
  const bool has_zero = w.role != Zero::kNone, has_offset = w.role == Zero::kOffset;
  const int64_t outputs = job.outputs() - n0 < width ? job.outputs() - n0 : width, blocks = (outputs + kBlock - 1) / kBlock;
  const int64_t padded = blocks * kBlock, together = (kByteRows > kColumnRows ? 1 : kColumnRows / kByteRows) * kAlong;
  const auto table = Decoder::TableOf(w);
  float* total = Workspace(padded * (kM + 3) + 64);
  float *plain = total + padded * kM, *scale = plain + padded, *zero = scale + padded;
  for (int64_t i = 0; i < padded * kM; ++i) total[i] = 0.0f;
  int64_t loaded = -1;
  for (int64_t k0 = 0, k1 = 0; k0 < w.rows; k0 = k1) {
    const int64_t tile_end = (k0 / w.row_tile + 1) * w.row_tile, end = tile_end < w.rows ? tile_end : w.rows;
    k1 = k0 + together < end ? k0 + together : end;
    const int64_t first = k0 / kAlong, last = (k1 + kAlong - 1) / kAlong;
    if (loaded != k0 / w.row_tile) {
      loaded = k0 / w.row_tile;
      ColumnScales<kSub>(w, w.scale, loaded, n0, outputs, blocks, w.unit, plain, scale);
      if (has_zero) ColumnScales<kSub>(w, w.zero, loaded, n0, outputs, blocks, 1.0f, plain, zero);
    }
    float x_sum[kM];
    UNROLL for (int m = 0; m < kM; ++m) {
      x_sum[m] = 0.0f;
      for (int64_t k = k0; has_offset && k < k1; ++k) x_sum[m] += job.x[m * job.ldx + k];
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* p = w.codes + n0 + b * kBlock;
      const int64_t left = w.cols - n0 - b * kBlock;
      V16 sum[kM][kSub], z[kSub];
      UNROLL for (int k = 0; k < kSub; ++k) {
        z[k] = kSubtracts ? Load16(zero + b * kBlock + k * 16) : Same16(0.0f);
        UNROLL for (int m = 0; m < kM; ++m) sum[m][k] = Same16(0.0f);
      }
      const int64_t ahead = (last - first) * kByteRows * w.row_stride;
      for (int64_t r = first; r < last; ++r) {
        const uint8_t* bytes = p + r * kByteRows * w.row_stride;
        const Decoder codes(bytes, w.row_stride, ByteRows(w) - r * kByteRows, left);
        for (int j = 0; j < kByteRows; ++j) {
          __builtin_prefetch(bytes + j * w.row_stride + ahead);
        }
        const float* x = job.x + r * kAlong;
#pragma GCC unroll 8
        for (int along = 0; along < kAlong; ++along) {
#pragma GCC unroll 4
          for (int place = 0; place < kSub; ++place) {
            V16 v = codes.At(place * kAlong + along, table);
            if (kSubtracts) v = Sub(v, z[place]);
#pragma GCC unroll 4
            for (int m = 0; m < kM; ++m) sum[m][place] = MulAdd(v, Same16(x[m * job.ldx + along]), sum[m][place]);
          }
        }
      }
      UNROLL for (int m = 0; m < kM; ++m) {
        UNROLL for (int k = 0; k < kSub; ++k) {
          float* t = total + m * padded + b * kBlock + k * 16;
          V16 sum_here = MulAdd(sum[m][k], Load16(scale + b * kBlock + k * 16), Load16(t));
          if (has_offset) sum_here = MulAdd(Load16(zero + b * kBlock + k * 16), Same16(x_sum[m]), sum_here);
          Store16(t, sum_here);
        }
      }
    }
  }
  for (int m = 0; m < kM; ++m) {
    for (int64_t n = 0; n < padded; ++n) plain[n] = total[m * padded + n / kBlock * kBlock + n % kSub * 16 + n % kBlock / kSub];
    StoreOutputs(job, m, n0, outputs, plain);
  }
}

#endif
