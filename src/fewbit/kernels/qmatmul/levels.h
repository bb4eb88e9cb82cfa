// The kernels for each instruction set, without anything of XLA: the handler and the tests of memory errors share them.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "halves.h"
#include "isa.h"
#include "job.h"
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

// Whether a level decodes codes within registers: where it has an instruction that looks up in a table.
#if defined(__aarch64__)
#define FEWBIT_DECODES 1
#else
#define FEWBIT_DECODES 0
#endif
#define FEWBIT_LEVEL FEWBIT_LEVEL_PORTABLE
namespace portable {
#include "lanes.h"
#include "sixteen.h"
#include "decode.h"
#include "turn.h"
#include "short_registers.h"
#include "registers.h"
#include "outer.h"
#include "panels.h"
#include "dots.h"
#include "short_dots.h"
#include "vectors.h"
#include "across.h"
#include "choice.h"
}  // namespace portable
#undef FEWBIT_LEVEL
#undef FEWBIT_DECODES
#define FEWBIT_DECODES 1

#if FEWBIT_X86
#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX2
FEWBIT_BEGIN(FEWBIT_AVX2_FEATURES)
namespace avx2 {
#include "lanes.h"
#include "sixteen.h"
#include "decode.h"
#include "turn.h"
#include "short_registers.h"
#include "registers.h"
#include "outer.h"
#include "panels.h"
#include "dots.h"
#include "short_dots.h"
#include "vectors.h"
#include "across.h"
#include "choice.h"
}  // namespace avx2
FEWBIT_END
#undef FEWBIT_LEVEL

#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX512
FEWBIT_BEGIN(FEWBIT_AVX512_FEATURES)
namespace avx512 {
#include "lanes.h"
#include "sixteen.h"
#include "decode.h"
#include "turn.h"
#include "short_registers.h"
#include "registers.h"
#include "outer.h"
#include "panels.h"
#include "dots.h"
#include "short_dots.h"
#include "vectors.h"
#include "across.h"
#include "choice.h"
}  // namespace avx512
FEWBIT_END
#undef FEWBIT_LEVEL
#endif
#undef FEWBIT_DECODES

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

// A row of x as the lanes of the kernel meet it: element i of lane j of a block comes i-th among the j-ths. `sums` takes, where
// it is not null, the sum of each lane's elements.
static void BlockedX(const float* x, int64_t length, int64_t steps, float* out, float* sums) {
  for (int64_t b = 0; b < length / (16 * steps); ++b) {
    const float* from = x + b * 16 * steps;
    float* to = out + b * 16 * steps;
    for (int64_t i = 0; i < steps; ++i) {
      for (int64_t j = 0; j < 16; ++j) to[i * 16 + j] = from[j * steps + i];
    }
    for (int64_t j = 0; sums != nullptr && j < 16; ++j) {
      float sum = 0.0f;
      for (int64_t i = 0; i < steps; ++i) sum += to[i * 16 + j];
      sums[b * 16 + j] = sum;
    }
  }
}

}  // namespace fewbit
