// Which instruction set the kernels take: chosen when they run, so that one build serves every machine.
//
// A kernel's source is compiled once for each level, in a namespace of its own:
//
//   #define FEWBIT_LEVEL FEWBIT_LEVEL_AVX512
//   FEWBIT_BEGIN(FEWBIT_AVX512_FEATURES)
//   namespace avx512 {
//   #include "body.h"
//   }
//   FEWBIT_END
//   #undef FEWBIT_LEVEL
//
// (for the portable level without BEGIN and END). `body.h` has no include guard and no #include of its own, asks FEWBIT_LEVEL
// where levels differ, and instantiates no template from outside its namespace: the linker keeps one copy of such a
// template, and it could be the one that the machine cannot run.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#define FEWBIT_X86 1
#include <immintrin.h>
#else
#define FEWBIT_X86 0
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define FEWBIT_LEVEL_PORTABLE 0
#define FEWBIT_LEVEL_AVX2 1
#define FEWBIT_LEVEL_AVX512 2

#define FEWBIT_AVX2_FEATURES "avx2,fma,f16c"
#define FEWBIT_AVX512_FEATURES "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni"

#define FEWBIT_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define FEWBIT_BEGIN(features) FEWBIT_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define FEWBIT_END FEWBIT_PRAGMA(clang attribute pop)
#else
#define FEWBIT_BEGIN(features) FEWBIT_PRAGMA(GCC push_options) FEWBIT_PRAGMA(GCC target(features))
#define FEWBIT_END FEWBIT_PRAGMA(GCC pop_options)
#endif

namespace fewbit {

enum class Isa { kPortable = FEWBIT_LEVEL_PORTABLE, kAvx2 = FEWBIT_LEVEL_AVX2, kAvx512 = FEWBIT_LEVEL_AVX512 };

// The best level that this machine runs. AVX-512 means that of Ice Lake and Zen 4, with VBMI and VNNI.
inline Isa BestIsa() {
#if FEWBIT_X86
  static const Isa best = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
    return avx2 && avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kPortable;
  }();
  return best;
#else
  return Isa::kPortable;
#endif
}

// The level of a number, where this machine runs it; else the best. -1: the best.
inline Isa IsaOf(int64_t level) {
  return level >= 0 && static_cast<Isa>(level) < BestIsa() ? static_cast<Isa>(level) : BestIsa();
}

// On arm64 the portable level has NEON, which every arm64 has.
#if defined(__aarch64__)
#define FEWBIT_PORTABLE_NAME "neon"
#else
#define FEWBIT_PORTABLE_NAME "portable"
#endif

inline const char* NameOf(Isa isa) {
  return isa == Isa::kAvx512 ? "avx512" : isa == Isa::kAvx2 ? "avx2" : FEWBIT_PORTABLE_NAME;
}

}  // namespace fewbit
