// quantize and dequantize on CPUs, byte for byte as the reference in plain JAX.
//
// Data layout. `view.py` merges all axes into [batch, rows, columns] with tiles of tile_rows x tile_columns, and says which
// axis is packed: weights [out, in] have tiles of 1 x 32, [in, out] of 32 x 1, DeepSeek's fp8 blocks 128 x 128, per-channel
// scales 1 x columns, per-tensor rows x columns. vmap adds to the batch. Formats are data: clip, shift and mask (integers),
// exponent and mantissa widths (minifloats), up to 16 thresholds (codebooks); so are the formats of scales and their rule.
//
// Passes (passes.h). A row of tiles is read once: amax or range, scales (a vector of tiles at a time) and codes while it is in
// cache (`InOnePass`). Larger tiles, a column or a tensor, are read twice and their ranges merged (`InTwoPasses`). Every byte
// is written by one task from values that do not depend on the order, so any number of threads gives the same bytes. Scales
// that only JAX computes (percentiles, grid searches) are arguments of `Encode`.
//
// Same bytes as the reference: float32 with subnormals flushed to zero, no contraction to FMA, x / scale correctly rounded
// (`Quotient`). Only the scale searches sum in another order; a scale must win by 2**-16 to replace another, so the choice is
// the same unless two errors differ by just that ratio.
//
// Vectors. A lane is an element in encoding (encode.h), a tile in the scale searches (search.h). Amax of small tiles: one
// vector for each tile, transposed and reduced at once (`MagnitudesOfTiles`); their reciprocals take one division (`EncodeRow`).
// Elements are divided by a corrected reciprocal; codebooks are searched by four permutations. The next row is prefetched while
// one is encoded; results get pages of 2 MiB.
//
// Stochastic rounding (`EncodeStochastically`) draws JAX's random numbers by the place of each element; scales are rounded up, so
// that no element saturates (`kCovering`).
//
// Bound: memory, 4 bytes read and 1/2 or 1 written for an element, except the searches, which try 3 (MXFP4) or up to 12
// (NVFP4) scales for each tile. Measurements, and what did not pay: docs/design/kernels-cpu.md; `python -m bench.quantize` measures.
#define FEWBIT_UNITS 3  // the handlers with plain C++, AVX2, AVX-512

#include "kernels.h"

#if FEWBIT_IN_UNIT(0)
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpp/checks.h"
#include "cpp/float16.h"
#include "cpp/memory.h"
#include "cpp/python_module.h"
#include "cpp/thread_pool.h"
#include "passes.h"
#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace fewbit {

// --- what Python hands over ---

// Whether what describes a format is whole: `FormatOf` reads no more than this.
void CheckFormat(const char* name, ffi::Span<const int32_t> ints, ffi::Span<const float> floats, bool may_be_absent, Checks& checks) {
  const int64_t whole = static_cast<int64_t>(ints.size()), numbers = static_cast<int64_t>(floats.size());
  if (!checks.AtLeast({"length of what describes the ", name}, whole, 3)) return;
  if (may_be_absent && ints[0] < 0) return;
  if (!checks.Within({"kind of the ", name}, ints[0], 0, 6)) return;
  const Kind kind = static_cast<Kind>(ints[0]);
  const bool has_codes = kind == Kind::kInteger || kind == Kind::kMinifloat || kind == Kind::kCodebook;
  if (has_codes) checks.Within({"bits of the ", name}, ints[1], 1, 8);
  if (kind == Kind::kInteger) {
    checks.AtLeast({"length of the integer ", name}, whole, 4);
    checks.AtLeast({"numbers of the integer ", name}, numbers, 3);
  } else if (kind == Kind::kMinifloat) {
    checks.AtLeast({"length of the minifloat ", name}, whole, 8);
    checks.AtLeast({"numbers of the minifloat ", name}, numbers, 1);
  } else if (kind == Kind::kCodebook) {
    checks.Within({"codes of the ", name}, whole - 5, 1, kMaxCodes);
    checks.AtLeast({"thresholds and numbers of the ", name}, numbers, 2 * (whole - 5) - 1);
  }
}

// A format as `attributes.py` writes it: kind, bits, code of NaN, and what the kind needs; then its numbers.
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
    for (int i = 0; i < f.count; ++i) f.numbers[i] = floats[f.count - 1 + i];
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

// Whether an array [..., rows, columns] and its codes have the shapes that their tiles and bits make.
void CheckGeometry(Dimensions dims, Dimensions packed, ffi::Span<const int64_t> tiles, int64_t bits, Checks& checks) {
  const size_t n = dims.size();
  if (!checks.AtLeast("axes of the array", static_cast<int64_t>(n), 2)) return;
  if (!checks.Equal("axes of the codes", static_cast<int64_t>(packed.size()), static_cast<int64_t>(n))) return;
  if (!checks.Equal("numbers that say the tiles", static_cast<int64_t>(tiles.size()), 3)) return;
  for (size_t i = 0; i + 2 < n; ++i) checks.Equal("an axis of the codes", packed[i], dims[i]);
  const bool packs_rows = tiles[2] != 0;
  checks.Equal("rows of the codes", packed[n - 2], packs_rows ? BytesOf(dims[n - 2], bits) : dims[n - 2]);
  checks.Equal("columns of the codes", packed[n - 1], packs_rows ? dims[n - 1] : BytesOf(dims[n - 1], bits));
  checks.Within("rows of a tile", tiles[0], 1, dims[n - 2] > 1 ? dims[n - 2] : 1);
  checks.Within("columns of a tile", tiles[1], 1, dims[n - 1] > 1 ? dims[n - 1] : 1);
}

bool IsFloat(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16 || type == ffi::F16; }

// The dtype of what holds scales or zero points.
ffi::DataType HolderOf(Kind kind) {
  return kind == Kind::kFloat32 ? ffi::F32 : kind == Kind::kBfloat16 ? ffi::BF16 : kind == Kind::kFloat16 ? ffi::F16 : ffi::U8;
}

template <typename J>
int64_t TileCount(const J& job) { return job.batch * job.row_tiles * job.column_tiles; }

// Float32 numbers, one for each tile; or none, where that is allowed.
void CheckByTile(const char* what, const ffi::AnyBuffer& numbers, int64_t tiles, bool may_be_absent, Checks& checks) {
  const int64_t count = static_cast<int64_t>(numbers.element_count());
  checks.That(numbers.element_type() == ffi::F32, "what each tile has must be float32");
  if (!may_be_absent || count != 0) checks.Equal(what, count, tiles);
}

// The random numbers: no key, or two words of one for each of equal parts of the batch.
void CheckNoise(const ffi::AnyBuffer& keys, ffi::Span<const int64_t> noise, const Job& job, Checks& checks) {
  const int64_t words = static_cast<int64_t>(keys.element_count());
  checks.That(keys.element_type() == ffi::U32, "a key must be uint32");
  if (!checks.Equal("numbers that say the random numbers' shape", static_cast<int64_t>(noise.size()), 2) || words == 0) return;
  checks.That(words % 2 == 0 && job.batch % (words / 2) == 0, "keys must be pairs of words and divide the batch");
  checks.AtLeast("rows of random numbers", noise[0], job.rows);
  checks.AtLeast("columns of random numbers", noise[1], job.columns);
}

void SetNoise(Job& job, const ffi::AnyBuffer& keys, ffi::Span<const int64_t> noise) {
  if (keys.element_count() == 0) return;
  job.keys = static_cast<const uint32_t*>(keys.untyped_data());
  job.batch_per_key = job.batch / (static_cast<int64_t>(keys.element_count()) / 2);
  job.noise_rows = noise[0], job.noise_columns = noise[1];
}

ffi::Error Quantize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer given_units, ffi::AnyBuffer keys, ffi::Result<ffi::AnyBuffer> codes,
                    ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::AnyBuffer> zero, ffi::Result<ffi::AnyBuffer> units, ffi::Span<const int64_t> tiles,
                    ffi::Span<const int32_t> format, ffi::Span<const float> numbers, ffi::Span<const int32_t> scale_format,
                    ffi::Span<const float> scale_numbers, ffi::Span<const int32_t> zero_format,
                    ffi::Span<const float> zero_numbers, ffi::Span<const int32_t> rule, ffi::Span<const float> rule_numbers,
                    ffi::Span<const int64_t> noise, int64_t level) {
  Checks checks("quantize");
  checks.That(IsFloat(x.element_type()), "x must be float32, bfloat16 or float16");
  checks.That(codes->element_type() == ffi::U8, "codes must be bytes");
  CheckFormat("format", format, numbers, false, checks);
  CheckFormat("format of the scales", scale_format, scale_numbers, false, checks);
  CheckFormat("format of the zero points", zero_format, zero_numbers, true, checks);
  checks.Equal("whole numbers of the rule", static_cast<int64_t>(rule.size()), 7);
  checks.Equal("floats of the rule", static_cast<int64_t>(rule_numbers.size()), 12);
  checks.Within("level", level, 0, 2);
  if (checks.failed()) return checks.error();
  CheckGeometry(x.dimensions(), codes->dimensions(), tiles, format[1], checks);
  checks.Within("kind of the format", format[0], 0, 2);
  checks.Within("rule", rule[0], 1, 9);
  checks.That(scale_format[0] != (int)Kind::kInteger && scale_format[0] != (int)Kind::kCodebook, "scales must be floats, E8M0 or minifloats");
  checks.That(rule[0] != (int)Calibration::kBestCode || scale_format[0] == (int)Kind::kMinifloat, "only codes of minifloats are searched");
  if (checks.failed()) return checks.error();
  Job job{};
  job.x = x.untyped_data();
  job.element = (int)KindOf(x.element_type());
  SetGeometry(job, x.dimensions(), codes->dimensions(), tiles);
  const int64_t count = TileCount(job), zeros = (int64_t)zero->element_count(), scales = (int64_t)units->element_count();
  checks.Equal("number of scales", (int64_t)scale->element_count(), count);
  checks.That(scale->element_type() == HolderOf((Kind)scale_format[0]), "scales must have the dtype of their format");
  if (zeros != 0) {
    checks.Equal("number of zero points", zeros, count);
    checks.That(zero_format[0] >= 0 && zero->element_type() == HolderOf((Kind)zero_format[0]), "zero points must have the dtype of their format");
  }
  checks.That(units->element_type() == ffi::F32 && (scales == 0 || job.batch % scales == 0), "tensor scales must be float32 and divide the batch");
  checks.That(given_units.element_type() == ffi::F32, "given tensor scales must be float32");
  const int64_t given = static_cast<int64_t>(given_units.element_count());
  if (given != 0) checks.Equal("number of given tensor scales", given, scales);
  CheckNoise(keys, noise, job, checks);
  if (checks.failed()) return checks.error();
  if (x.element_count() == 0) return ffi::Error::Success();  // and so has every result but a tensor scale, which Python makes
  job.format = FormatOf(format, numbers);
  job.scale = FormatOf(scale_format, scale_numbers);
  job.zero = FormatOf(zero_format, zero_numbers);
  job.has_zero = zero->element_count() > 0, job.zero_is_whole = job.zero.kind == Kind::kInteger;
  job.has_unit = units->element_count() > 0, job.unit_is_given = given != 0;
  if (job.unit_is_given) std::memcpy(units->untyped_data(), given_units.untyped_data(), given * sizeof(float));
  job.calibration = (Calibration)rule[0], job.contains_zero = rule[1] != 0;
  job.mantissa_bits = rule[2], job.top_exponent = rule[3], job.top_mantissa = rule[4], job.halvings = rule[5];
  job.is_windowed = rule[6];
  job.factor = rule_numbers[0], job.bound = rule_numbers[1], job.smallest_scale = rule_numbers[2];
  job.largest_scale = rule_numbers[3], job.range = rule_numbers[4], job.no_scale = rule_numbers[5];
  job.largest_end = rule_numbers[6], job.largest_finite_step = rule_numbers[7], job.largest_unit = rule_numbers[8];
  job.unit_bound = rule_numbers[9], job.most = rule_numbers[10], job.least = rule_numbers[11];
  SetNoise(job, keys, noise);
  job.codes = (uint8_t*)codes->untyped_data();
  job.stored_scale = scale->untyped_data();
  job.stored_zero = zero->untyped_data();
  job.units = (const float*)units->untyped_data();
  job.batch_per_unit = job.has_unit ? job.batch / (int64_t)units->element_count() : 1;
  struct Scales {};
  const CallMemory<Scales> memory((job.has_zero ? 2 : 1) * count * sizeof(float));
  job.divisors = memory.floats(), job.offsets = memory.floats() + (job.has_zero ? count : 0);
  PreferLargePages(job.codes, codes->size_bytes());
  const Kernels kernels = KernelsFor(IsaOf(level));
  Walk(job, kernels, pool).Quantize();
  return ffi::Error::Success();
}

ffi::Error Encode(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer divisors, ffi::AnyBuffer offsets, ffi::AnyBuffer keys,
                  ffi::Result<ffi::AnyBuffer> codes, ffi::Span<const int64_t> tiles, ffi::Span<const int32_t> format,
                  ffi::Span<const float> numbers, ffi::Span<const int64_t> noise, int64_t level) {
  Checks checks("encode");
  checks.That(IsFloat(x.element_type()), "x must be float32, bfloat16 or float16");
  checks.That(codes->element_type() == ffi::U8, "codes must be bytes");
  CheckFormat("format", format, numbers, false, checks);
  checks.Within("level", level, 0, 2);
  if (checks.failed()) return checks.error();
  checks.Within("kind of the format", format[0], 0, 2);
  CheckGeometry(x.dimensions(), codes->dimensions(), tiles, format[1], checks);
  if (checks.failed()) return checks.error();
  Job job{};
  job.x = x.untyped_data();
  job.element = (int)KindOf(x.element_type());
  SetGeometry(job, x.dimensions(), codes->dimensions(), tiles);
  CheckByTile("number of scales", divisors, TileCount(job), false, checks);
  CheckByTile("number of offsets", offsets, TileCount(job), true, checks);
  CheckNoise(keys, noise, job, checks);
  if (checks.failed()) return checks.error();
  if (x.element_count() == 0) return ffi::Error::Success();
  job.format = FormatOf(format, numbers);
  job.has_zero = offsets.element_count() > 0;
  job.calibration = Calibration::kGiven;
  SetNoise(job, keys, noise);
  job.codes = (uint8_t*)codes->untyped_data();
  job.divisors = (float*)divisors.untyped_data();
  job.offsets = (float*)offsets.untyped_data();
  PreferLargePages(job.codes, codes->size_bytes());
  const Kernels kernels = KernelsFor(IsaOf(level));
  Walk(job, kernels, pool).Encode();
  return ffi::Error::Success();
}

// For each row of x [..., columns] its largest finite magnitude, and its largest magnitude: infinite if a number is not finite.
ffi::Error RowMagnitudes(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out, int64_t level) {
  Checks checks("row magnitudes");
  checks.That(x.element_type() == ffi::F32, "x must be float32");
  checks.That(out->element_type() == ffi::F32, "the result must be float32");
  checks.AtLeast("axes of x", static_cast<int64_t>(x.dimensions().size()), 1);
  checks.Within("level", level, 0, 2);
  if (checks.failed()) return checks.error();
  const int64_t columns = x.dimensions().back(), count = static_cast<int64_t>(x.element_count());
  const int64_t rows = columns == 0 ? 0 : count / columns;
  checks.Equal("numbers of the result", static_cast<int64_t>(out->element_count()), 2 * rows);
  if (checks.failed()) return checks.error();
  const Kernels kernels = KernelsFor(IsaOf(level));
  auto* found = static_cast<float*>(out->untyped_data());
  const int64_t together = Most(1, kChunk / Most(1, columns));
  ParallelFor(pool, Ceil(rows, together), [&](int64_t chunk) {
    for (int64_t r = chunk * together; r < Least((chunk + 1) * together, rows); ++r) {
      const LargestBits bits = kernels.largest(x.untyped_data(), (int)Kind::kFloat32, r * columns, columns);
      found[2 * r] = FloatOfBits((uint32_t)bits.finite), found[2 * r + 1] = FloatOfBits((uint32_t)bits.any);
    }
  });
  return ffi::Error::Success();
}

// How many elements a thread decodes at a time: of large arrays as much as a large page holds, since two threads that write to
// the same fresh page would both clear it.
int64_t DecodedAtATime(const Decoding& d) {
  return d.batch * d.rows * d.columns >= int64_t{1} << 22 ? int64_t{1} << 19 : kChunk;
}

constexpr int64_t kScaleCodes = 256;

// Scales first .. first + count - 1 as float32: the stored ones, or the entries of one table of 256 numbers that they index,
// times the tensor scale, if any. With two tables a scale is the product of two factors, and `more` has the second ones.
void LoadScales(const ffi::AnyBuffer& scales, ffi::Span<const float> tables, const float* unit, int64_t first, int64_t count,
                std::vector<float>& factors, std::vector<float>& more) {
  const ffi::DataType type = scales.element_type();
  const bool is_product = static_cast<int64_t>(tables.size()) == 2 * kScaleCodes;
  const auto* bytes = static_cast<const uint8_t*>(scales.untyped_data()) + (type == ffi::U8 ? first : 0);
  const auto* halves = static_cast<const uint16_t*>(scales.untyped_data()) + (type == ffi::U8 || type == ffi::F32 ? 0 : first);
  const auto* floats = static_cast<const float*>(scales.untyped_data()) + (type == ffi::F32 ? first : 0);
  factors.resize(count), more.resize(is_product ? count : 0);
  auto fill = [&](std::vector<float>& to, auto scale_at) {
    for (int64_t i = 0; i < count; ++i) to[i] = scale_at(i);
  };
  if (type == ffi::U8) fill(factors, [&](int64_t i) { return tables[bytes[i]]; });
  if (is_product) fill(more, [&](int64_t i) { return tables[kScaleCodes + bytes[i]]; });
  if (type == ffi::F32) fill(factors, [&](int64_t i) { return floats[i]; });
  if (type == ffi::BF16) fill(factors, [&](int64_t i) { return FloatOfBrain(halves[i]); });
  if (type == ffi::F16) fill(factors, [&](int64_t i) { return FloatOfHalf(halves[i]); });
  if (unit == nullptr) return;
  std::vector<float>& last = is_product ? more : factors;
  fill(last, [&](int64_t i) { return last[i] * *unit; });
}

ffi::Error Dequantize(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer scales, ffi::AnyBuffer units,
                      ffi::AnyBuffer zeros, ffi::AnyBuffer offsets, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Span<const int64_t> tiles, ffi::Span<const float> values, ffi::Span<const float> scale_tables,
                      int64_t bits, int64_t whole_shift, int64_t level) {
  Checks checks("dequantize");
  checks.That(IsFloat(out->element_type()), "the result must be float32, bfloat16 or float16");
  checks.That(codes.element_type() == ffi::U8, "codes must be bytes");
  checks.Within("bits of a code", bits, 1, 8);
  checks.Within("shift of whole codes", whole_shift, -1, 31);
  checks.Equal("length of the table of numbers", (int64_t)values.size(), 256);
  checks.Within("level", level, 0, 2);
  if (checks.failed()) return checks.error();
  CheckGeometry(out->dimensions(), codes.dimensions(), tiles, bits, checks);
  if (checks.failed()) return checks.error();
  Decoding d{};
  d.codes = (const uint8_t*)codes.untyped_data();
  d.out = out->untyped_data();
  d.element = (int)KindOf(out->element_type());
  SetGeometry(d, out->dimensions(), codes.dimensions(), tiles);
  const int64_t tables = static_cast<int64_t>(scale_tables.size()), unit_count = static_cast<int64_t>(units.element_count());
  const bool are_codes = scales.element_type() == ffi::U8;
  checks.Equal("number of scales", static_cast<int64_t>(scales.element_count()), TileCount(d));
  checks.That(are_codes || IsFloat(scales.element_type()), "scales must be bytes, float32, bfloat16 or float16");
  checks.That(are_codes ? tables == kScaleCodes || tables == 2 * kScaleCodes : tables == 0,
              "scales that are bytes must have one or two tables of 256 numbers, and others none");
  checks.That(units.element_type() == ffi::F32 && (unit_count == 0 || d.batch % unit_count == 0),
              "tensor scales must be float32 and divide the batch");
  CheckByTile("number of zero points", zeros, TileCount(d), true, checks);
  CheckByTile("number of offsets", offsets, TileCount(d), true, checks);
  if (checks.failed()) return checks.error();
  if (out->element_count() == 0) return ffi::Error::Success();
  d.bits = (int)bits, d.whole_shift = (int)whole_shift;
  auto floats = [](ffi::AnyBuffer& b) { return b.element_count() > 0 ? (const float*)b.untyped_data() : nullptr; };
  d.values = values.begin();
  const bool are_loaded = scales.element_type() != ffi::F32 || unit_count != 0;
  d.factors = are_loaded ? nullptr : floats(scales);
  d.zeros = floats(zeros), d.offsets = floats(offsets);
  PreferLargePages(d.out, out->size_bytes());
  const Kernels kernels = KernelsFor(IsaOf(level));
  const int64_t rows = Most(1, DecodedAtATime(d) / d.columns), down = Ceil(d.rows, rows);
  ParallelFor(pool, d.batch * down, [&](int64_t chunk) {
    const FlushedSubnormals flushed;
    std::vector<uint8_t> scratch(d.columns + 64);
    std::vector<float> factors, more;
    const int64_t b = chunk / down, r0 = chunk % down * rows, r1 = Least(r0 + rows, d.rows);
    Decoding own = d;
    own.first_tile = (b * d.row_tiles + r0 / d.tile_rows) * d.column_tiles;
    if (are_loaded) {
      const int64_t count = ((r1 - 1) / d.tile_rows - r0 / d.tile_rows + 1) * d.column_tiles;
      const float* unit = unit_count == 0 ? nullptr : floats(units) + b / (d.batch / unit_count);
      LoadScales(scales, scale_tables, unit, own.first_tile, count, factors, more);
      own.factors = factors.data(), own.more_factors = more.empty() ? nullptr : more.data();
    } else {
      own.factors += own.first_tile;
    }
    if (own.zeros != nullptr) own.zeros += own.first_tile;
    if (own.offsets != nullptr) own.offsets += own.first_tile;
    kernels.decode(own, b, r0, r1, scratch.data());
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kQuantize, Quantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
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
                           .Attr<ffi::Span<const int64_t>>("noise")
                           .Attr<int64_t>("level"));

XLA_FFI_DEFINE_HANDLER(kEncode, Encode,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<ffi::Span<const int64_t>>("tiles")
                           .Attr<ffi::Span<const int32_t>>("format")
                           .Attr<ffi::Span<const float>>("numbers")
                           .Attr<ffi::Span<const int64_t>>("noise")
                           .Attr<int64_t>("level"));

XLA_FFI_DEFINE_HANDLER(kRowMagnitudes, RowMagnitudes,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
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
                           .Attr<ffi::Span<const float>>("scale_tables")
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("whole_shift")
                           .Attr<int64_t>("level"));

}  // namespace fewbit

FEWBIT_MODULE(_quantize, {"fewbit_quantize", reinterpret_cast<void*>(fewbit::kQuantize)},
              {"fewbit_encode", reinterpret_cast<void*>(fewbit::kEncode)},
              {"fewbit_row_magnitudes", reinterpret_cast<void*>(fewbit::kRowMagnitudes)},
              {"fewbit_dequantize", reinterpret_cast<void*>(fewbit::kDequantize)})
#endif
