// The kernels of every level of instruction sets, and the choice among them.
#pragma once

#include <cstdint>

#include "../native/halves.h"
#include "../native/isa.h"
#include "../native/units.h"
#include "job.h"

#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC says it of its own intrinsics

namespace fewbit {

struct Brain {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline float Widened(float x) { return x; }
inline float Widened(Brain x) { return FloatOfBrain(x.bits); }
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

#if FEWBIT_IN_UNIT(0)
#define FEWBIT_LEVEL FEWBIT_LEVEL_PORTABLE
namespace portable {
#include "level.h"
}
#undef FEWBIT_LEVEL
#endif

#if FEWBIT_X86
namespace avx2 {
Kernels KernelsFor(int element);
}
namespace avx512 {
Kernels KernelsFor(int element);
}

#if FEWBIT_IN_UNIT(1)
#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX2
FEWBIT_BEGIN(FEWBIT_AVX2_FEATURES)
namespace avx2 {
#include "level.h"
}
FEWBIT_END
#undef FEWBIT_LEVEL
#endif

#if FEWBIT_IN_UNIT(2)
#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX512
FEWBIT_BEGIN(FEWBIT_AVX512_FEATURES)
namespace avx512 {
#include "level.h"
}
FEWBIT_END
#undef FEWBIT_LEVEL
#endif
#endif

#if FEWBIT_IN_UNIT(0)

// The kernels of a level, or of the best one that the machine has below it.
inline Kernels KernelsOf(int64_t wanted, int element) {
  const int64_t level = wanted < (int64_t)BestIsa() ? wanted : (int64_t)BestIsa();
#if FEWBIT_X86
  if (level == (int64_t)Isa::kAvx512) return avx512::KernelsFor(element);
  if (level == (int64_t)Isa::kAvx2) return avx2::KernelsFor(element);
#endif
  return portable::KernelsFor(element);
}

#endif

}  // namespace fewbit
