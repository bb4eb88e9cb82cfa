// How a call walks its array: which tiles one task takes, and whether it reads them once or twice.
#pragma once

#include <cstdint>
#include <mutex>
#include <numeric>
#include <vector>

#include "cpp/isa.h"
#include "cpp/memory.h"
#include "cpp/thread_pool.h"
#include "kernels.h"
#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace fewbit {

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
constexpr int64_t kPanel = 1 << 16;   // elements of a group of rows that is cut into panels
constexpr int64_t kPanelWidth = 512;  // columns of the narrowest panel that is read from memory at its rate

inline int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What memory is for: the codes of a task before they are packed, the magnitudes that it searches scales with, its ranges, and
// the ranges of a whole array.
struct Unpacked {};
struct Searched {};
struct OfTask {};
struct OfArray {};

template <typename Use>
class OwnRanges {
 public:
  explicit OwnRanges(int64_t count) : memory_(4 * count * sizeof(float)) {
    float* floats = memory_.floats();
    ranges_ = Ranges{reinterpret_cast<int32_t*>(floats + 3 * count), floats, floats + count, floats + 2 * count};
  }
  const Ranges& operator*() const { return ranges_; }

 private:
  CallMemory<Use> memory_;
  Ranges ranges_;
};

// Walks an array: chunks of rows, and of columns where rows of tiles are too large for the cache.
class Walk {
 public:
  Walk(Job& job, const Kernels& kernels, xla::ffi::ThreadPool& pool) : job_(job), kernels_(kernels), pool_(pool) {
    const bool shares_bytes = job.packs_rows && job.format.bits < 8;
    const int64_t tile = Least(job.tile_rows, job.rows);
    group_rows_ = Least(shares_bytes ? std::lcm(tile, int64_t{8}) : tile, job.rows);
    column_unit_ = std::lcm(job.tile_columns, int64_t{16});
    width_ = job.columns;
    if (group_rows_ * width_ > kPanel && column_unit_ < width_) {
      width_ = Least(width_, Most(column_unit_, Most(kPanel / group_rows_, kPanelWidth) / column_unit_ * column_unit_));
    }
    const bool must_be_cached = job.calibration == Calibration::kSignedMax || job.calibration >= Calibration::kBestPower;
    is_cached_ = must_be_cached || group_rows_ * width_ <= (width_ == job.columns ? 2 * kCached : kCached);
  }

  void Quantize() {
    if (job_.has_unit && !job_.unit_is_given) FindUnits();
    if (is_cached_) InOnePass();
    else InTwoPasses();
  }

  // Encodes with scales that are there.
  void Encode() {
    const int64_t unit = job_.packs_rows ? 8 : 1;
    const int64_t width = job_.columns > kChunk ? kChunk : job_.columns;
    const int64_t rows = Ceil(Most(kChunk / width, 1), unit) * unit;
    job_.ahead = width <= kPanel ? job_.columns : 0;
    Rectangles(rows, width, [&](int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
      const CallMemory<Unpacked> scratch(ScratchBytes(c1 - c0));
      kernels_.encode(job_, b, r0, r1, c0, c1, reinterpret_cast<uint8_t*>(scratch.data()));
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
      largest[chunk] = kernels_.largest(job_.x, job_.element, chunk / chunks * size + first, Least(kChunk, size - first)).finite;
    });
    const FlushedSubnormals flushed;
    for (int64_t u = 0; u < count; ++u) {
      int32_t bits = 0;
      for (int64_t i = 0; i < chunks; ++i) bits = Most(bits, largest[u * chunks + i]);
      const float unit = FloatOfBits((uint32_t)bits) / (job_.unit_bound * job_.largest_scale);
      const_cast<float*>(job_.units)[u] = unit < 1.17549435e-38f ? 1.0f : unit < job_.largest_unit ? unit : job_.largest_unit;
    }
  }

  void InOnePass() {
    job_.ahead = group_rows_ == 1 && width_ <= kPanel ? job_.columns : 0;
    const int64_t groups = Most(1, kChunk / (group_rows_ * width_));
    Rectangles(group_rows_ * groups, width_, [&](int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
      const int64_t t0 = c0 / job_.tile_columns, count = Ceil(c1, job_.tile_columns) - t0;
      const OwnRanges<OfTask> ranges(count + 2 * kernels_.lanes);
      const bool searches = job_.calibration >= Calibration::kBestPower;
      const CallMemory<Searched> gathered(searches ? job_.tile_rows * job_.tile_columns * kernels_.lanes * sizeof(float) : 0);
      const CallMemory<Unpacked> scratch(ScratchBytes(c1 - c0));
      for (int64_t g0 = r0; g0 < r1; g0 += group_rows_) {
        const int64_t g1 = Least(g0 + group_rows_, r1);
        for (int64_t r = g0; r < g1; r += job_.tile_rows) {
          if (!searches) kernels_.ranges(job_, b, r, Least(r + job_.tile_rows, g1), c0, c1, *ranges);
          kernels_.scales(job_, b, r / job_.tile_rows, t0, count, *ranges, Unit(b), gathered.floats());
        }
        kernels_.encode(job_, b, g0, g1, c0, c1, reinterpret_cast<uint8_t*>(scratch.data()));
      }
    });
  }

  // The tiles are too large to be read twice from cache: all ranges first, then the codes.
  void InTwoPasses() {
    const int64_t tiles = job_.batch * job_.row_tiles * job_.column_tiles;
    const OwnRanges<OfArray> all(tiles + 2 * kernels_.lanes);
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
      const OwnRanges<OfTask> own(count + 2 * kernels_.lanes);
      const Ranges& ranges = *own;
      for (int64_t r = r0; r < r1;) {
        const int64_t row_tile = r / job_.tile_rows, end = Least((row_tile + 1) * job_.tile_rows, r1);
        kernels_.ranges(job_, b, r, end, c0, c1, ranges);
        const int64_t at = (b * job_.row_tiles + row_tile) * job_.column_tiles + t0;
        const std::lock_guard<std::mutex> lock(mutex);
        for (int64_t i = 0; i < count; ++i) {
          total.magnitude[at + i] = (int32_t)Most(total.magnitude[at + i], ranges.magnitude[i]);
          if (!NeedsEnds(job_)) continue;
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
  xla::ffi::ThreadPool& pool_;
  int64_t group_rows_, column_unit_, width_;
  bool is_cached_;
};

}  // namespace fewbit
