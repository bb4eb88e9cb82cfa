// quantize and dequantize on CPUs, of the very bytes that the reference in plain JAX gives.
//
// Layout. `geometry.py` merges the axes of an array, whatever their number, into [batch, rows, columns] with tiles of
// tile_rows x tile_columns, and says along which of the two axes codes share bytes. Weights [out, in] have tiles of 1 x 32,
// weights [in, out] of 32 x 1, DeepSeek's fp8 blocks 128 x 128, a scale per row 1 x columns, one per tensor rows x columns. A
// batch is also what vmap adds. A scheme comes as data: a format is a clip, a shift and a mask (integers), an exponent and a
// mantissa width (minifloats) or up to 16 thresholds (codebooks); so is what holds the scales, and the rule that finds them.
//
// Passes. A row of tiles is read from memory once: its ranges, its scales (a vector of tiles at a time) and its codes follow
// while it lies in the cache (`Walk::InOnePass`). Tiles larger than that, a column or a tensor, are read twice, and their
// ranges merged over the chunks (`InTwoPasses`); maxima and minima do not depend on the order. Every byte is written by one
// task from what all tasks agree on, so the result does not depend on the number of threads. Scales that only JAX can choose
// (percentiles, searches on a grid, given ones) come with the call to `Encode`.
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
// the rest of NF4), one scalar reciprocal a tile; four permutes through a register in place of 15 thresholds for codebooks.
// What did not: panels of 64 columns for tiles that are whole columns; each row of a panel is a page of its own, and two
// passes over whole rows are as fast. Non-temporal stores: the codes are small and are read next.
//
// Measured on 2 cores of a Xeon with AVX-512 that eight other processes shared, 4096 x 4096 float32, the least of 9 rounds in
// units of a copy of 64 MiB in the same run: int8 1.0, int4 0.8, NF4 1.0, MXFP4 1.7, NVFP4 5.0. To decode takes 0.8 to 1.1
// times what a compiled copy does that returns a fresh array; both wait for pages, not for arithmetic.
#include <cstdint>
#include <cstring>
#include <mutex>
#include <numeric>
#include <vector>

#include "../native/isa.h"
#include "../native/module.h"
#include "../native/parallel.h"
#include "job.h"
#include "xla/ffi/api/ffi.h"

#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC says it of its own intrinsics

namespace ffi = xla::ffi;

namespace fewbit {

struct Brain {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline float FloatOfBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Half precision without instructions for it.
inline float FloatOfHalf(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023;
  if (exponent == 31) return FloatOfBits(sign | 0x7F800000 | (mantissa << 13));
  if (exponent != 0) return FloatOfBits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = (float)mantissa * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

inline uint16_t HalfOfFloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
  bits &= 0x7FFFFFFF;
  if (bits > 0x7F800000) return sign | 0x7E00;
  if (bits >= 0x477FF000) return sign | 0x7C00;
  if (bits < 0x38800000) {  // subnormal: whole steps of 2**-24
    const float steps = FloatOfBits(bits) * 0x1p24f + 12582912.0f;
    uint32_t counted;
    std::memcpy(&counted, &steps, 4);
    return sign | (uint16_t)(counted - 0x4B400000);
  }
  bits += 0xFFF + ((bits >> 13) & 1);
  return sign | (uint16_t)((bits >> 13) - (112 << 10));
}

inline float Widened(float x) { return x; }
inline float Widened(Brain x) { return FloatOfBits((uint32_t)x.bits << 16); }
inline float Widened(Half x) { return FloatOfHalf(x.bits); }

// The kernels of one level for one type of elements.
struct Kernels {
  int lanes;
  void (*ranges)(const Job&, int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1, const Ranges&);
  void (*scales)(const Job&, int64_t b, int64_t row_tile, int64_t t0, int64_t count, const Ranges&, float unit, float* scratch);
  void (*encode)(const Job&, int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1, uint8_t* scratch);
  int32_t (*largest)(const Job&, int64_t at, int64_t count);
  void (*decode)(const Decoding&, int64_t b, int64_t r0, int64_t r1, uint8_t* scratch);
};

#define INLINE_MEMBER inline __attribute__((always_inline))

#define FEWBIT_LEVEL FEWBIT_LEVEL_PORTABLE
namespace portable {
#include "level.h"
}
#undef FEWBIT_LEVEL
#undef INLINE
#undef FEWBIT_HAS_FMA
#if FEWBIT_X86
#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX2
FEWBIT_BEGIN(FEWBIT_AVX2_FEATURES)
namespace avx2 {
#include "level.h"
}
FEWBIT_END
#undef FEWBIT_LEVEL
#undef INLINE
#undef FEWBIT_HAS_FMA
#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX512
FEWBIT_BEGIN(FEWBIT_AVX512_FEATURES)
namespace avx512 {
#include "level.h"
}
FEWBIT_END
#undef FEWBIT_LEVEL
#undef INLINE
#undef FEWBIT_HAS_FMA
#endif

// The kernels of a level, or of the best one that the machine has below it.
Kernels KernelsOf(int64_t wanted, int element) {
  const int64_t level = wanted < (int64_t)BestIsa() ? wanted : (int64_t)BestIsa();
#if FEWBIT_X86
  if (level == (int64_t)Isa::kAvx512) return avx512::KernelsFor(element);
  if (level == (int64_t)Isa::kAvx2) return avx2::KernelsFor(element);
#endif
  return portable::KernelsFor(element);
}

// Counts subnormal float32 numbers as zero while it lives, as XLA does on CPU.
class FlushedSubnormals {
 public:
#if FEWBIT_X86
  FlushedSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushedSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushedSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | (1ull << 24)));
  }
  ~FlushedSubnormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

constexpr int64_t kChunk = 1 << 17;   // elements that a thread takes at a time
constexpr int64_t kCached = 1 << 18;  // elements that are read twice from cache

int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t Most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The memory of one task's ranges.
class OwnRanges {
 public:
  explicit OwnRanges(int64_t count) : magnitude_(count), floats_(count * 3) {
    ranges_ = Ranges{magnitude_.data(), floats_.data(), floats_.data() + count, floats_.data() + 2 * count};
  }
  const Ranges& operator*() const { return ranges_; }

 private:
  std::vector<int32_t> magnitude_;
  std::vector<float> floats_;
  Ranges ranges_;
};

// Walks an array: chunks of rows, and of columns where rows of tiles are too large for the cache.
class Walk {
 public:
  Walk(Job& job, const Kernels& kernels, ffi::ThreadPool& pool) : job_(job), kernels_(kernels), pool_(pool) {
    const bool shares_bytes = job.packs_rows && job.format.bits < 8;
    const int64_t tile = Least(job.tile_rows, job.rows);
    group_rows_ = Least(shares_bytes ? std::lcm(tile, int64_t{8}) : tile, job.rows);
    column_unit_ = std::lcm(job.tile_columns, int64_t{16});
    width_ = job.columns;
    if (group_rows_ * width_ > kCached && column_unit_ < width_) {
      width_ = Least(width_, Most(column_unit_, kCached / group_rows_ / column_unit_ * column_unit_));
    }
    const bool must_be_cached = job.calibration == Calibration::kSignedMax || job.calibration >= Calibration::kBestPower;
    is_cached_ = must_be_cached || (group_rows_ * width_ <= 2 * kCached && (width_ == job.columns || width_ >= 512));
  }

  void Quantize() {
    if (job_.has_unit) FindUnits();
    if (is_cached_) InOnePass();
    else InTwoPasses();
  }

  // Encodes with scales that are there.
  void Encode() {
    const int64_t unit = job_.packs_rows ? 8 : 1;
    const int64_t width = job_.columns > kChunk ? kChunk : job_.columns;
    const int64_t rows = Ceil(Most(kChunk / width, 1), unit) * unit;
    Rectangles(rows, width, [&](int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
      std::vector<uint8_t> scratch((c1 - c0) * (job_.packs_rows ? 8 : 1) + 64);
      kernels_.encode(job_, b, r0, r1, c0, c1, scratch.data());
    });
  }

 private:
  template <typename Work>
  void Rectangles(int64_t rows, int64_t width, const Work& work) {
    const int64_t across = Ceil(job_.columns, width), down = Ceil(job_.rows, rows);
    ParallelFor(pool_, job_.batch * down * across, [&](int64_t chunk) {
      const FlushedSubnormals flushed;
      const int64_t b = chunk / (down * across), r0 = chunk / across % down * rows, c0 = chunk % across * width;
      work(b, r0, Least(r0 + rows, job_.rows), c0, Least(c0 + width, job_.columns));
    });
  }

  float Unit(int64_t b) const { return job_.has_unit ? job_.units[b / job_.batch_per_unit] : 1.0f; }

  void FindUnits() {
    const int64_t size = job_.batch_per_unit * job_.rows * job_.columns, chunks = Ceil(size, kChunk);
    const int64_t count = job_.batch / job_.batch_per_unit;
    std::vector<int32_t> largest(chunks * count);
    ParallelFor(pool_, chunks * count, [&](int64_t chunk) {
      const int64_t first = chunk % chunks * kChunk;
      largest[chunk] = kernels_.largest(job_, chunk / chunks * size + first, Least(kChunk, size - first));
    });
    const FlushedSubnormals flushed;
    for (int64_t u = 0; u < count; ++u) {
      int32_t bits = 0;
      for (int64_t i = 0; i < chunks; ++i) bits = Most(bits, largest[u * chunks + i]);
      const float unit = FloatOfBits((uint32_t)bits) / (job_.bound * job_.largest_scale);
      const_cast<float*>(job_.units)[u] = unit < 1.17549435e-38f ? 1.0f : unit;
    }
  }

  void InOnePass() {
    const int64_t groups = Most(1, kChunk / (group_rows_ * width_));
    Rectangles(group_rows_ * groups, width_, [&](int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
      const int64_t t0 = c0 / job_.tile_columns, count = Ceil(c1, job_.tile_columns) - t0;
      const OwnRanges ranges(count + 2 * kernels_.lanes);
      const bool searches = job_.calibration >= Calibration::kBestPower;
      std::vector<float> gathered(searches ? job_.tile_rows * job_.tile_columns * kernels_.lanes : 0);
      std::vector<uint8_t> scratch((c1 - c0) * (job_.packs_rows ? 8 : 1) + 64);
      for (int64_t g0 = r0; g0 < r1; g0 += group_rows_) {
        const int64_t g1 = Least(g0 + group_rows_, r1);
        for (int64_t r = g0; r < g1; r += job_.tile_rows) {
          if (!searches) kernels_.ranges(job_, b, r, Least(r + job_.tile_rows, g1), c0, c1, *ranges);
          kernels_.scales(job_, b, r / job_.tile_rows, t0, count, *ranges, Unit(b), gathered.data());
        }
        kernels_.encode(job_, b, g0, g1, c0, c1, scratch.data());
      }
    });
  }

  // The tiles are too large to be read twice from cache: all ranges first, then the codes.
  void InTwoPasses() {
    const int64_t tiles = job_.batch * job_.row_tiles * job_.column_tiles;
    const OwnRanges all(tiles + 2 * kernels_.lanes);
    const Ranges& total = *all;
    for (int64_t t = 0; t < tiles; ++t) {
      total.magnitude[t] = 0;
      total.low[t] = FloatOfBits(0x7F800000);
      total.high[t] = FloatOfBits(0xFF800000);
    }
    std::mutex mutex;
    const int64_t width = Least(job_.columns, Most(column_unit_ < kChunk ? kChunk / column_unit_ * column_unit_ : kChunk, 16));
    const int64_t rows = Most(1, kChunk / width);
    Rectangles(rows, width, [&](int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
      const int64_t t0 = c0 / job_.tile_columns, count = Ceil(c1, job_.tile_columns) - t0;
      const OwnRanges own(count + 2 * kernels_.lanes);
      const Ranges& ranges = *own;
      for (int64_t r = r0; r < r1;) {
        const int64_t row_tile = r / job_.tile_rows, end = Least((row_tile + 1) * job_.tile_rows, r1);
        kernels_.ranges(job_, b, r, end, c0, c1, ranges);
        const int64_t at = (b * job_.row_tiles + row_tile) * job_.column_tiles + t0;
        const std::lock_guard<std::mutex> lock(mutex);
        for (int64_t i = 0; i < count; ++i) {
          total.magnitude[at + i] = (int32_t)Most(total.magnitude[at + i], ranges.magnitude[i]);
          if (job_.calibration != Calibration::kMinMax) continue;
          if (ranges.low[i] < total.low[at + i]) total.low[at + i] = ranges.low[i];
          if (ranges.high[i] > total.high[at + i]) total.high[at + i] = ranges.high[i];
        }
        r = end;
      }
    });
    {
      const FlushedSubnormals flushed;
      for (int64_t t = 0; t < job_.batch * job_.row_tiles; ++t) {
        const int64_t at = t * job_.column_tiles;
        const Ranges part{total.magnitude + at, total.low + at, total.high + at, total.first + at};
        kernels_.scales(job_, t / job_.row_tiles, t % job_.row_tiles, 0, job_.column_tiles, part, Unit(t / job_.row_tiles), nullptr);
      }
    }
    Encode();
  }

  Job& job_;
  const Kernels& kernels_;
  ffi::ThreadPool& pool_;
  int64_t group_rows_, column_unit_, width_;
  bool is_cached_;
};

// --- what Python hands over ---

// A format as `formats.py` writes it: kind, bits, code of NaN, and what the kind needs; then its numbers.
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
  const Kernels kernels = KernelsOf(level, job.element);
  Walk(job, kernels, pool).Encode();
  return ffi::Error::Success();
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
  const Kernels kernels = KernelsOf(level, d.element);
  const int64_t rows = Most(1, kChunk / d.columns), down = Ceil(d.rows, rows);
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
