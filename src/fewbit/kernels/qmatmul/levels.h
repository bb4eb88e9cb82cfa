// The kernels for each instruction set, without anything of XLA: the handler and the tests of memory errors share them.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "halves.h"
#include "isa.h"
#include "job.h"
#include "units.h"
#include "workspace.h"

namespace fewbit {

constexpr int64_t kFewOutputs = 48;  // rows of the weight in a chunk of a few dot products

// The outputs at places [n0, n0 + count) of row m, each where it belongs in y.
static void StoreOutputs(const Job& job, int64_t m, int64_t n0, int64_t count, const float* c) {
  if (job.order == nullptr && job.y_kind == Float::kF32) {
    std::memcpy(static_cast<float*>(job.y) + m * job.N + n0, c, count * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = job.OutputAt(n0 + i);
    if (n < job.N) StoreFloat(job.y, job.y_kind, m * job.N + n, c[i]);
  }
}

#if FEWBIT_IN_UNIT(0)
#define FEWBIT_LEVEL FEWBIT_LEVEL_PORTABLE
#if defined(__aarch64__)
#define FEWBIT_DECODES 1
#else
#define FEWBIT_DECODES 0
#endif
namespace portable {
#include "level.h"
}  // namespace portable
#undef FEWBIT_LEVEL
#undef FEWBIT_DECODES
#endif

#if FEWBIT_X86
namespace avx2 {
int64_t StepsOf(const Job& job);
int64_t ChunksOf(const Job& job);
void RunChunk(const Job& job, int64_t chunk);
}  // namespace avx2
namespace avx512 {
int64_t StepsOf(const Job& job);
int64_t ChunksOf(const Job& job);
void RunChunk(const Job& job, int64_t chunk);
}  // namespace avx512

#define FEWBIT_DECODES 1
#if FEWBIT_IN_UNIT(1)
#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX2
FEWBIT_BEGIN(FEWBIT_AVX2_FEATURES)
namespace avx2 {
#include "level.h"
}  // namespace avx2
FEWBIT_END
#undef FEWBIT_LEVEL
#endif

#if FEWBIT_IN_UNIT(2) || FEWBIT_IN_UNIT(3) || FEWBIT_IN_UNIT(4)
#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX512
FEWBIT_BEGIN(FEWBIT_AVX512_FEATURES)
namespace avx512 {
#include "level.h"
}  // namespace avx512
FEWBIT_END
#undef FEWBIT_LEVEL
#endif
#undef FEWBIT_DECODES
#endif

#if FEWBIT_IN_UNIT(0)

// How many codes a lane of the kernel holds, which is how x must be laid out (BlockedX); 1: in order.
static int64_t Steps(Isa isa, const Job& job) {
#if FEWBIT_X86
  if (isa == Isa::kAvx512) return avx512::StepsOf(job);
  if (isa == Isa::kAvx2) return avx2::StepsOf(job);
#endif
  return portable::StepsOf(job);
}

// How many chunks a job has; any thread may run any of them.
static int64_t ChunkCount(Isa isa, const Job& job) {
#if FEWBIT_X86
  if (isa == Isa::kAvx512) return avx512::ChunksOf(job);
  if (isa == Isa::kAvx2) return avx2::ChunksOf(job);
#endif
  return portable::ChunksOf(job);
}

static void Run(Isa isa, const Job& job, int64_t chunk) {
#if FEWBIT_X86
  if (isa == Isa::kAvx512) return avx512::RunChunk(job, chunk);
  if (isa == Isa::kAvx2) return avx2::RunChunk(job, chunk);
#endif
  portable::RunChunk(job, chunk);
}

// A row of x in the order of the kernel's lanes: element i of lane j of a block comes i-th among the j-ths.
template <int kSteps>
static void BlockedX(const float* x, int64_t length, float* out) {
  for (int64_t b = 0; b < length; b += 16 * kSteps) {
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; ++i) {
      for (int j = 0; j < 16; ++j) out[b + i * 16 + j] = x[b + j * kSteps + i];
    }
  }
}

static void BlockedX(const float* x, int64_t length, int64_t steps, float* out) {
  if (steps == 2) BlockedX<2>(x, length, out);
  else if (steps == 4) BlockedX<4>(x, length, out);
  else if (steps == 8) BlockedX<8>(x, length, out);
  else if (steps == 16) BlockedX<16>(x, length, out);
  else BlockedX<32>(x, length, out);
}

// How many sums over tiles a row of x has, with zeros after them that kernels load, too.
static int64_t SumsOfRow(const Weight& w) { return (w.tiles_per_row / 16 + 1) * 16; }

// The sum of a row of x over each tile, which a tile's offset is multiplied by.
static void TileSums(const float* x, const Weight& w, float* sums) {
  for (int64_t t = 0; t < SumsOfRow(w); ++t) {
    const int64_t begin = t * w.col_tile, end = begin + w.col_tile < w.cols ? begin + w.col_tile : w.cols;
    float part[8] = {};
    int64_t i = begin;
    for (; i + 8 <= end; i += 8) {
      for (int64_t j = 0; j < 8; ++j) part[j] += x[i + j];
    }
    for (; i < end; ++i) part[(i - begin) % 8] += x[i];
    sums[t] = ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
  }
}

#endif

}  // namespace fewbit
