// quantize and dequantize on CPUs, of the very bytes that the reference in plain JAX gives.
//
// Layout. `geometry.py` merges the axes of an array, whatever their number, into [batch, rows, columns] with tiles of
// tile_rows x tile_columns, and says along which of the two axes codes share bytes. Weights [out, in] have tiles of 1 x 32,
// weights [in, out] of 32 x 1, DeepSeek's fp8 blocks 128 x 128, a scale per row 1 x columns, one per tensor rows x columns. A
// batch is also what vmap adds. A scheme comes as data: a format is a clip, a shift and a mask (integers), an exponent and a
// mantissa width (minifloats) or up to 16 thresholds (codebooks); so is what holds the scales, and the rule that finds them.
//
// Passes. A row of tiles is read from memory once: its ranges, its scales (a vector of tiles at a time) and its codes follow
// while it lies in the cache (`Walk::InOnePass` in walk.h). Tiles larger than that, a column or a tensor, are read twice, and
// their ranges merged over the chunks (`InTwoPasses`); maxima and minima do not depend on the order. Every byte is written by
// one task from what all tasks agree on, so the result does not depend on the number of threads. Scales that only JAX can
// choose (percentiles, searches on a grid, given ones) come with the call to `Encode`.
//
// The same bytes. The reference is IEEE arithmetic in float32 with subnormal numbers flushed, and so is this: the flags of
// the thread are set while it works, nothing is contracted, and x / scale is the correctly rounded quotient (`Quotient`).
// Only the searches add many numbers up, in an order of their own: their errors differ in the last places, and since a
// scale must win by 2**-16 to replace another, the choice does not, unless two errors are apart by just that ratio.
//
// The bound is memory: 4 bytes read and 1/2 or 1 written for an element, 0.6 of the time of a copy. What stands between are
// the searches, which try 3 (MXFP4) or 12 (NVFP4) scales for each tile at 4.5 cycles for 16 elements each.
//
// What paid: lanes that hold tiles in the searches (`search.h`), 12 candidates in place of the window's 15, for those eight
// codes above another one that was tried cannot win; quotients by a corrected reciprocal (division took as long as all
// the rest of NF4); four permutes through a register in place of 15 thresholds for codebooks. To read a row and then to encode
// it took the sum of both times, since memory was idle meanwhile: now to encode a row calls for the next one (`Job::ahead`), a
// tenth to a quarter less in all. Small tiles go by the lanes' number: their maxima are turned into one register and
// compared together (`MagnitudesOfTiles`), and their reciprocals found by one division (`EncodeRow`); NVFP4 with the largest
// magnitude's scale takes half the arithmetic. Tiles along columns are walked in panels of 256 KiB, at least 512 columns wide,
// in place of 1 MiB (a quarter less), and divide once for all rows of a tile, not for each element. Fresh results get pages of
// 2 MiB (`pages.h`), for a fault for each 4 KiB took longer than to decode what it holds.
// What did not: panels of 64 columns for tiles that are whole columns; each row of a panel is a page of its own, and two
// passes over whole rows are as fast. Non-temporal stores: the codes are small and are read next. To call ahead for panels.
// Packing into 4 bits apart from encoding costs nothing that could be seen.
//
// Measured: `python -m bench.quantize`, told in docs/kernels.md.
#include <cstdint>
#include <vector>

#include "../native/module.h"
#include "../native/pages.h"
#include "../native/parallel.h"
#include "job.h"
#include "kernels.h"
#include "walk.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace fewbit {

// --- what Python hands over ---

// A format as `words.py` writes it: kind, bits, code of NaN, and what the kind needs; then its numbers.
Format FormatOf(ffi::Span<const int32_t> ints, ffi::Span<const float> floats) {
  Format f{};
  if (ints.size() == 0) return f;
  f.kind = (Kind)ints[0], f.bits = ints[1], f.nan_code = ints[2], f.plus_zero = f.minus_zero = -1;
  if (f.kind == Kind::kInteger) {
    f.add = ints[3];
    f.inverse_step = floats[0], f.low = floats[1], f.high = floats[2];
  } else if (f.kind == Kind::kMinifloat) {
    f.mantissa = ints[3], f.bias = ints[4], f.count = ints[5], f.is_signed = ints[6], f.is_fnuz = ints[7];
    f.max = floats[0];
  } else if (f.kind == Kind::kCodebook) {
    f.plus_zero = ints[3], f.minus_zero = ints[4], f.count = (int)ints.size() - 5;
    for (int i = 0; i < f.count; ++i) f.codes[i] = ints[5 + i];
    for (int i = 0; i + 1 < f.count; ++i) f.thresholds[i] = floats[i];
  }
  return f;
}

Kind KindOf(ffi::DataType type) {
  return type == ffi::DataType::BF16 ? Kind::kBfloat16 : type == ffi::DataType::F16 ? Kind::kFloat16 : Kind::kFloat32;
}

// The geometry: x is [..., rows, columns], and codes are like it.
template <typename J>
void SetGeometry(J& job, ffi::Span<const int64_t> dims, ffi::Span<const int64_t> packed, ffi::Span<const int64_t> tiles) {
  const size_t n = dims.size();
  job.rows = dims[n - 2], job.columns = dims[n - 1], job.batch = 1;
  for (size_t i = 0; i + 2 < n; ++i) job.batch *= dims[i];
  job.packed_rows = packed[n - 2], job.packed_columns = packed[n - 1];
  job.tile_rows = tiles[0], job.tile_columns = tiles[1], job.packs_rows = tiles[2] != 0;
  job.row_tiles = Ceil(job.rows, job.tile_rows), job.column_tiles = Ceil(job.columns, job.tile_columns);
}

ffi::Error Quantize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> scale,
                    ffi::Result<ffi::AnyBuffer> zero, ffi::Result<ffi::AnyBuffer> units, ffi::Span<const int64_t> tiles,
                    ffi::Span<const int32_t> format, ffi::Span<const float> numbers, ffi::Span<const int32_t> scale_format,
                    ffi::Span<const float> scale_numbers, ffi::Span<const int32_t> zero_format,
                    ffi::Span<const float> zero_numbers, ffi::Span<const int32_t> rule, ffi::Span<const float> rule_numbers,
                    int64_t level) {
  Job job{};
  job.x = x.untyped_data();
  job.element = (int)KindOf(x.element_type());
  SetGeometry(job, x.dimensions(), codes->dimensions(), tiles);
  job.format = FormatOf(format, numbers);
  job.scale = FormatOf(scale_format, scale_numbers);
  job.zero = FormatOf(zero_format, zero_numbers);
  job.has_zero = zero->element_count() > 0, job.zero_is_whole = job.zero.kind == Kind::kInteger;
  job.has_unit = units->element_count() > 0;
  job.calibration = (Calibration)rule[0], job.contains_zero = rule[1] != 0;
  job.mantissa_bits = rule[2], job.top_exponent = rule[3], job.top_mantissa = rule[4], job.halvings = rule[5];
  job.is_windowed = rule[6];
  job.factor = rule_numbers[0], job.bound = rule_numbers[1], job.smallest_scale = rule_numbers[2];
  job.largest_scale = rule_numbers[3], job.range = rule_numbers[4], job.no_scale = rule_numbers[5];
  job.codes = (uint8_t*)codes->untyped_data();
  job.stored_scale = scale->untyped_data();
  job.stored_zero = zero->untyped_data();
  job.units = (const float*)units->untyped_data();
  job.batch_per_unit = job.has_unit ? job.batch / (int64_t)units->element_count() : 1;
  const int64_t count = job.batch * job.row_tiles * job.column_tiles;
  std::vector<float> divisors(count), offsets(job.has_zero ? count : 0);
  job.divisors = divisors.data(), job.offsets = offsets.data();
  PreferLargePages(job.codes, codes->size_bytes());
  const Kernels kernels = KernelsOf(level, job.element);
  Walk(job, kernels, pool).Quantize();
  return ffi::Error::Success();
}

ffi::Error Encode(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer divisors, ffi::AnyBuffer offsets,
                  ffi::Result<ffi::AnyBuffer> codes, ffi::Span<const int64_t> tiles, ffi::Span<const int32_t> format,
                  ffi::Span<const float> numbers, int64_t level) {
  Job job{};
  job.x = x.untyped_data();
  job.element = (int)KindOf(x.element_type());
  SetGeometry(job, x.dimensions(), codes->dimensions(), tiles);
  job.format = FormatOf(format, numbers);
  job.has_zero = offsets.element_count() > 0;
  job.calibration = Calibration::kGiven;
  job.codes = (uint8_t*)codes->untyped_data();
  job.divisors = (float*)divisors.untyped_data();
  job.offsets = (float*)offsets.untyped_data();
  PreferLargePages(job.codes, codes->size_bytes());
  const Kernels kernels = KernelsOf(level, job.element);
  Walk(job, kernels, pool).Encode();
  return ffi::Error::Success();
}

// How many elements a thread decodes at a time: of large arrays as much as a large page holds, since two threads that write to
// the same fresh page would both clear it.
int64_t DecodedAtATime(const Decoding& d) {
  return d.batch * d.rows * d.columns >= int64_t{1} << 22 ? int64_t{1} << 19 : kChunk;
}

ffi::Error Dequantize(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer factors, ffi::AnyBuffer more,
                      ffi::AnyBuffer zeros, ffi::AnyBuffer offsets, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Span<const int64_t> tiles, ffi::Span<const float> values, int64_t bits, int64_t whole_shift,
                      int64_t level) {
  Decoding d{};
  d.codes = (const uint8_t*)codes.untyped_data();
  d.out = out->untyped_data();
  d.element = (int)KindOf(out->element_type());
  SetGeometry(d, out->dimensions(), codes.dimensions(), tiles);
  d.bits = (int)bits, d.whole_shift = (int)whole_shift;
  auto floats = [](ffi::AnyBuffer& b) { return b.element_count() > 0 ? (const float*)b.untyped_data() : nullptr; };
  d.values = values.begin();
  d.factors = floats(factors), d.more_factors = floats(more), d.zeros = floats(zeros), d.offsets = floats(offsets);
  PreferLargePages(d.out, out->size_bytes());
  const Kernels kernels = KernelsOf(level, d.element);
  const int64_t rows = Most(1, DecodedAtATime(d) / d.columns), down = Ceil(d.rows, rows);
  ParallelFor(pool, d.batch * down, [&](int64_t chunk) {
    const FlushedSubnormals flushed;
    std::vector<uint8_t> scratch(d.columns + 64);
    const int64_t r0 = chunk % down * rows;
    kernels.decode(d, chunk / down, r0, Least(r0 + rows, d.rows), scratch.data());
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kQuantize, Quantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<ffi::Span<const int64_t>>("tiles")
                           .Attr<ffi::Span<const int32_t>>("format")
                           .Attr<ffi::Span<const float>>("numbers")
                           .Attr<ffi::Span<const int32_t>>("scale_format")
                           .Attr<ffi::Span<const float>>("scale_numbers")
                           .Attr<ffi::Span<const int32_t>>("zero_format")
                           .Attr<ffi::Span<const float>>("zero_numbers")
                           .Attr<ffi::Span<const int32_t>>("rule")
                           .Attr<ffi::Span<const float>>("rule_numbers")
                           .Attr<int64_t>("level"));

XLA_FFI_DEFINE_HANDLER(kEncode, Encode,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<ffi::Span<const int64_t>>("tiles")
                           .Attr<ffi::Span<const int32_t>>("format")
                           .Attr<ffi::Span<const float>>("numbers")
                           .Attr<int64_t>("level"));

XLA_FFI_DEFINE_HANDLER(kDequantize, Dequantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<ffi::Span<const int64_t>>("tiles")
                           .Attr<ffi::Span<const float>>("values")
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("whole_shift")
                           .Attr<int64_t>("level"));

}  // namespace fewbit

FEWBIT_MODULE(_cpu, {"fewbit_quantize", reinterpret_cast<void*>(fewbit::kQuantize)},
              {"fewbit_encode", reinterpret_cast<void*>(fewbit::kEncode)},
              {"fewbit_dequantize", reinterpret_cast<void*>(fewbit::kDequantize)})
