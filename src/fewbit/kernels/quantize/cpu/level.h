// Quantize and dequantize for one instruction set (foreach_isa.h), and the choice of the element type.

#include "cpp/simd.h"
#include "cpp/transpose.h"
#include "elements.h"
#include "encode.h"
#include "scale.h"
#include "ranges.h"
#include "search.h"
#include "decode.h"

static void FindRanges(const Job& job, int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1, const Ranges& ranges) {
  if (job.element == (int)Kind::kBfloat16) RangesOf<Brain>(job, b, r0, r1, c0, c1, ranges);
  else if (job.element == (int)Kind::kFloat16) RangesOf<Half>(job, b, r0, r1, c0, c1, ranges);
  else RangesOf<float>(job, b, r0, r1, c0, c1, ranges);
}

static void FindScales(const Job& job, int64_t b, int64_t row_tile, int64_t t0, int64_t count, const Ranges& ranges, float unit,
                       float* scratch) {
  if (job.calibration < Calibration::kBestPower) {
    return Scales(job, ranges, unit, (b * job.row_tiles + row_tile) * job.column_tiles + t0, count);
  }
  const auto gathered = job.element == (int)Kind::kBfloat16  ? Gathered<Brain>
                        : job.element == (int)Kind::kFloat16 ? Gathered<Half>
                                                             : Gathered<float>;
  if (job.format.kind == Kind::kInteger) {
    SearchedScales(job, IntegerGrid(job.format), gathered, b, row_tile, t0, count, unit, scratch);
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  } else if (QuarterGrid::Serves(job.format)) {
    SearchedScales(job, QuarterGrid(job.format), gathered, b, row_tile, t0, count, unit, scratch);
#endif
  } else {
    SearchedScales(job, MinifloatGrid(job.format), gathered, b, row_tile, t0, count, unit, scratch);
  }
}

static void Encode(const Job& job, int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1, uint8_t* scratch) {
  if (job.format.kind == Kind::kInteger) EncodeBlock<IntegerCoder>(job, b, r0, r1, c0, c1, scratch);
  else if (job.format.kind == Kind::kMinifloat) EncodeBlock<MinifloatCoder>(job, b, r0, r1, c0, c1, scratch);
  else EncodeBlock<CodebookCoder>(job, b, r0, r1, c0, c1, scratch);
}

static LargestBits Largest(const void* x, int element, int64_t at, int64_t count) {
  if (element == (int)Kind::kBfloat16) return LargestOf((const Brain*)x + at, count);
  if (element == (int)Kind::kFloat16) return LargestOf((const Half*)x + at, count);
  return LargestOf((const float*)x + at, count);
}

Kernels GetKernels() { return {kLanes, FindRanges, FindScales, Encode, Largest, DecodeRows}; }
