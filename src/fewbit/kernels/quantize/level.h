// The kernels of one level of instruction sets, and the table through which they are called.

#include "lanes.h"
#include "encode.h"
#include "scale.h"
#include "ranges.h"
#include "search.h"
#include "decode.h"

template <typename T>
struct Of {
  static void Ranges_(const Job& job, int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1, const Ranges& ranges) {
    RangesOf<T>(job, b, r0, r1, c0, c1, ranges);
  }
  static void Scales_(const Job& job, int64_t b, int64_t row_tile, int64_t t0, int64_t count, const Ranges& ranges, float unit,
                      float* scratch) {
    if (job.calibration < Calibration::kBestPower) {
      Scales(job, ranges, unit, (b * job.row_tiles + row_tile) * job.column_tiles + t0, count);
    } else if (job.format.kind == Kind::kInteger) {
      SearchedScales(job, IntegerGrid(job.format), Gathered<T>, b, row_tile, t0, count, unit, scratch);
    } else {
      SearchedScales(job, MinifloatGrid(job.format), Gathered<T>, b, row_tile, t0, count, unit, scratch);
    }
  }
  static void Encode(const Job& job, int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1, uint8_t* scratch) {
    if (job.format.kind == Kind::kInteger) EncodeBlock<T, IntegerCoder>(job, b, r0, r1, c0, c1, scratch);
    else if (job.format.kind == Kind::kMinifloat) EncodeBlock<T, MinifloatCoder>(job, b, r0, r1, c0, c1, scratch);
    else EncodeBlock<T, CodebookCoder>(job, b, r0, r1, c0, c1, scratch);
  }
  static int32_t Largest(const Job& job, int64_t at, int64_t count) { return LargestFinite((const T*)job.x + at, count); }
  static void Decode(const Decoding& d, int64_t b, int64_t r0, int64_t r1, uint8_t* scratch) {
    DecodeRows<T>(d, b, r0, r1, scratch);
  }
  static Kernels All() { return Kernels{W, Ranges_, Scales_, Encode, Largest, Decode}; }
};

Kernels KernelsFor(int element) {
  if (element == (int)Kind::kBfloat16) return Of<Brain>::All();
  if (element == (int)Kind::kFloat16) return Of<Half>::All();
  return Of<float>::All();
}

#undef INLINE
#undef NO_INLINE
#undef FEWBIT_HAS_FMA
