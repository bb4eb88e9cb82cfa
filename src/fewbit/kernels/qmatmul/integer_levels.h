// The product of integers for each instruction set, without anything of XLA: the handler and the tests of memory errors share
// them.
#pragma once

#include <cstring>

#include "halves.h"
#include "integer_job.h"
#include "isa.h"
#include "workspace.h"

#if FEWBIT_X86
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

// Compilers that have the instruction for bytes without AVX-512.
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define FEWBIT_KNOWS_VNNI 1
#else
#define FEWBIT_KNOWS_VNNI 0
#endif

namespace fewbit {

static void StoreRow(const IntegerJob& job, int64_t m, int64_t n0, int64_t count, const float* c) {
  if (job.y_kind == Float::kF32) {
    std::memcpy(static_cast<float*>(job.y) + m * job.N + n0, c, count * sizeof(float));
    return;
  }
  uint16_t* y = static_cast<uint16_t*>(job.y) + m * job.N + n0;
  for (int64_t n = 0; n < count; ++n) y[n] = job.y_kind == Float::kBF16 ? BrainOf(c[n]) : HalfOf(c[n]);
}

#define FEWBIT_VNNI 0
#define FEWBIT_LEVEL FEWBIT_LEVEL_PORTABLE
namespace portable {
#include "integer_level.h"
}  // namespace portable
#undef FEWBIT_LEVEL

#if defined(__aarch64__)
#undef FEWBIT_VNNI
#define FEWBIT_VNNI 1
#define FEWBIT_LEVEL FEWBIT_LEVEL_PORTABLE
FEWBIT_BEGIN("+dotprod")
namespace dotprod {
#include "integer_level.h"
}  // namespace dotprod
FEWBIT_END
#undef FEWBIT_LEVEL
#endif

#if FEWBIT_X86
#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX2
FEWBIT_BEGIN(FEWBIT_AVX2_FEATURES)
namespace avx2 {
#include "integer_level.h"
}  // namespace avx2
FEWBIT_END
#undef FEWBIT_VNNI

#define FEWBIT_VNNI 1
#if FEWBIT_KNOWS_VNNI
FEWBIT_BEGIN("avx2,fma,f16c,avxvnni")
namespace avxvnni {
#include "integer_level.h"
}  // namespace avxvnni
FEWBIT_END
#else
namespace avxvnni = avx2;
#endif
#undef FEWBIT_LEVEL

#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX512
FEWBIT_BEGIN(FEWBIT_AVX512_FEATURES)
namespace avx512 {
#include "integer_level.h"
}  // namespace avx512
FEWBIT_END
#undef FEWBIT_LEVEL
#endif
#undef FEWBIT_VNNI

// The levels of products of integers: those of isa.h, and AVX2 with the instruction for bytes, which has processors of its own.
// On arm64 two: NEON without that instruction and with it.
#if defined(__aarch64__)
enum class IntegerIsa { kPortable = 0, kDotprod = 1 };

inline IntegerIsa BestIntegerIsa() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & (1ul << 20) ? IntegerIsa::kDotprod : IntegerIsa::kPortable;  // HWCAP_ASIMDDP
#elif defined(__APPLE__)
  return IntegerIsa::kDotprod;  // every Mac with arm64
#else
  return IntegerIsa::kPortable;
#endif
}

// The level of a number, where this machine runs it; else the best. -1: the best.
inline IntegerIsa IntegerIsaOf(int64_t level) {
  return level >= 0 && static_cast<IntegerIsa>(level) < BestIntegerIsa() ? static_cast<IntegerIsa>(level) : BestIntegerIsa();
}

inline const char* NameOf(IntegerIsa isa) { return isa == IntegerIsa::kDotprod ? "dotprod" : FEWBIT_PORTABLE_NAME; }

#define FEWBIT_AT(isa, call) (isa == IntegerIsa::kDotprod ? dotprod::call : portable::call)
#else
enum class IntegerIsa { kPortable = 0, kAvx2 = 1, kAvxVnni = 2, kAvx512 = 3 };

// Machines with AVX-512 may lack the AVX2 form of VNNI: Ice Lake and Zen 4 do.
inline bool HasAvxVnni() {
#if FEWBIT_X86 && FEWBIT_KNOWS_VNNI
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
#else
  return false;
#endif
}

inline IntegerIsa BestIntegerIsa() {
  static const IntegerIsa best = [] {
    if (BestIsa() == Isa::kAvx512) return IntegerIsa::kAvx512;
    if (BestIsa() == Isa::kPortable) return IntegerIsa::kPortable;
    return HasAvxVnni() ? IntegerIsa::kAvxVnni : IntegerIsa::kAvx2;
  }();
  return best;
}

// The level of a number, where this machine runs it; AVX2 in place of AVX-VNNI where that is missing; else the best.
// -1: the best.
inline IntegerIsa IntegerIsaOf(int64_t level) {
  if (level < 0 || static_cast<IntegerIsa>(level) >= BestIntegerIsa()) return BestIntegerIsa();
  const IntegerIsa isa = static_cast<IntegerIsa>(level);
  return isa == IntegerIsa::kAvxVnni && !HasAvxVnni() ? IntegerIsa::kAvx2 : isa;
}

inline const char* NameOf(IntegerIsa isa) {
  static const char* const names[] = {"portable", "avx2", "avxvnni", "avx512"};
  return names[static_cast<int>(isa)];
}

#if FEWBIT_X86
#define FEWBIT_AT(isa, call)                                   \
  (isa == IntegerIsa::kAvx512    ? avx512::call                \
   : isa == IntegerIsa::kAvxVnni ? avxvnni::call               \
   : isa == IntegerIsa::kAvx2    ? avx2::call                  \
                                 : portable::call)
#else
#define FEWBIT_AT(isa, call) portable::call
#endif
#endif

// How many chunks a job has; any thread may run any of them.
static int64_t IntegerChunks(IntegerIsa isa, const IntegerJob& job) { return FEWBIT_AT(isa, IntegerChunks(job)); }

static void RunIntegers(IntegerIsa isa, const IntegerJob& job, const std::vector<Segment>& segments, int64_t chunk) {
  FEWBIT_AT(isa, RunIntegers(job, segments, chunk));
}

// Bytes of a row of x as `Prepare` lays it out, a multiple of four.
static int64_t IntegerRowBytes(IntegerIsa isa, const IntegerJob& job, const std::vector<Segment>& segments) {
  return FEWBIT_AT(isa, IntegerRowBytes(job, segments));
}

// How many rows of x `Prepare` lays out at once.
static int64_t IntegerRows(IntegerIsa isa) { return FEWBIT_AT(isa, kIntRows); }

static void Prepare(IntegerIsa isa, const IntegerJob& job, const std::vector<Segment>& segments, const int8_t* rows, int64_t m,
                    int8_t* out, int32_t* sums) {
  FEWBIT_AT(isa, Prepare(job, segments, rows, m, out, sums));
}

#undef FEWBIT_AT

}  // namespace fewbit
