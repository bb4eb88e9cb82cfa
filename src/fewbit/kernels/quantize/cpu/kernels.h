// The quantizers of every instruction set.
#pragma once

#include <cstdint>

#include "cpp/float16.h"
#include "problem.h"

#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC says it of its own intrinsics

namespace fewbit {

// The bits of the largest finite magnitude, and of the largest of all: those of infinity if one is not finite.
struct LargestBits {
  int32_t finite, any;
};

struct Kernels {
  int lanes;
  void (*ranges)(const Job&, int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1, const Ranges&);
  void (*scales)(const Job&, int64_t b, int64_t row_tile, int64_t t0, int64_t count, const Ranges&, float unit, float* scratch);
  void (*encode)(const Job&, int64_t b, int64_t r0, int64_t r1, int64_t c0, int64_t c1, uint8_t* scratch);
  LargestBits (*largest)(const void* x, int element, int64_t at, int64_t count);
  void (*decode)(const Decoding&, int64_t b, int64_t r0, int64_t r1, uint8_t* scratch);
};

}  // namespace fewbit

#define FEWBIT_KERNELS "quantize/cpu/level.h"
#include "cpp/foreach_isa.h"
