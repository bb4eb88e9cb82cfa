// The instruction sets of the kernels, of which the best is chosen at run time: one build serves every machine.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#define FEWBIT_X86 1
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#else
#define FEWBIT_X86 0
#endif
#if defined(__aarch64__)
#define FEWBIT_ARM64 1
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#else
#define FEWBIT_ARM64 0
#endif

#define FEWBIT_LEVEL_PORTABLE 0
#define FEWBIT_LEVEL_AVX2 1
#define FEWBIT_LEVEL_AVX512 2

// Whether the instruction set that is compiled has fused multiply-add, and table lookups within registers. Every arm64 has both.
#define FEWBIT_HAS_FMA (FEWBIT_LEVEL != FEWBIT_LEVEL_PORTABLE || FEWBIT_ARM64)
#define FEWBIT_HAS_LOOKUP (FEWBIT_LEVEL != FEWBIT_LEVEL_PORTABLE || FEWBIT_ARM64)

// Compilers that have VNNI without AVX-512.
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define FEWBIT_KNOWS_AVXVNNI 1
#else
#define FEWBIT_KNOWS_AVXVNNI 0
#endif

// Compilers that have AMX, and the system that grants it.
#if defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define FEWBIT_KNOWS_AMX 1
#else
#define FEWBIT_KNOWS_AMX 0
#endif

// Compilers that have arm64's smmla.
#if defined(__clang__) || __GNUC__ >= 10
#define FEWBIT_KNOWS_I8MM 1
#else
#define FEWBIT_KNOWS_I8MM 0
#endif

namespace fewbit {

// Only kernels with FEWBIT_BYTE_DOT have kAvxVnni, kDotprod and kI8mm, only those with FEWBIT_HAS_AMX_KERNELS kAmx (foreach_isa.h).
enum class Isa { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvxVnni = 3, kDotprod = 4, kI8mm = 5, kAmx = 6 };

// Whether the environment variable FEWBIT_ISA names an instruction set, which is then the best that is used.
inline bool IsLimitedTo(const char* isa) {
  const char* limit = std::getenv("FEWBIT_ISA");
  return limit != nullptr && std::strcmp(limit, isa) == 0;
}

// The best of plain C++, AVX2 and AVX-512 here. AVX-512 means that of Ice Lake and Zen 4, with VBMI and VNNI.
inline Isa BestIsa() {
#if FEWBIT_X86
  static const Isa best = [] {
    __builtin_cpu_init();
    const bool avx2 = !IsLimitedTo("portable") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = !IsLimitedTo("avx2") && !IsLimitedTo("avxvnni") && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
    return avx2 && avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kPortable;
  }();
  return best;
#else
  return Isa::kPortable;
#endif
}

// The instruction set of a level (0: plain C++, 1: AVX2, 2: AVX-512), where this machine has it; else the best. -1: the best.
inline Isa IsaOf(int64_t level) {
  return level >= 0 && static_cast<Isa>(level) < BestIsa() ? static_cast<Isa>(level) : BestIsa();
}

// Whether AVX2 has VNNI. Machines with AVX-512 may lack that form of it: Ice Lake and Zen 4 do.
inline bool HasAvxVnni() {
#if FEWBIT_X86 && FEWBIT_KNOWS_AVXVNNI
  static const bool has = [] {  // a virtual machine takes microseconds for the instruction that tells
    unsigned a = 0, b = 0, c = 0, d = 0;
    return BestIsa() != Isa::kPortable && !IsLimitedTo("avx2") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
  }();
  return has;
#else
  return false;
#endif
}

// Whether a processor with AVX-512 has AMX for bytes and for bfloat16, and AVX-512's conversion to that. Linux gives a process the
// registers when it asks for them.
inline bool HasAmx() {
#if FEWBIT_X86 && FEWBIT_KNOWS_AMX
  static const bool has = [] {
    constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    constexpr unsigned kTiles = 1u << 22 | 1u << 24 | 1u << 25, kConversion = 1u << 5;
    unsigned a = 0, b = 0, c = 0, d = 0, brain = 0;
    return BestIsa() == Isa::kAvx512 && !IsLimitedTo("avx512") && __get_cpuid_count(7, 1, &brain, &b, &c, &d) &&
           __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTiles) == kTiles && (brain & kConversion) != 0 &&
           syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  }();
  return has;
#else
  return false;
#endif
}

// As `IsaOf` for kernels of floats with FEWBIT_HAS_AMX_KERNELS, whose level 3 is AMX.
inline Isa TileIsaOf(int64_t level) {
  return (level < 0 || level > 2) && HasAmx() ? Isa::kAmx : IsaOf(level);
}

// Whether an arm64 has sdot.
inline bool HasDotprod() {
#if FEWBIT_ARM64 && defined(__linux__)
  static const bool has = !IsLimitedTo("portable") && (getauxval(AT_HWCAP) & (1ul << 20));  // HWCAP_ASIMDDP
  return has;
#elif FEWBIT_ARM64 && defined(__APPLE__)
  return !IsLimitedTo("portable");  // every Mac with arm64 has it
#else
  return false;
#endif
}

// Whether an arm64 with sdot has smmla, too.
inline bool HasI8mm() {
#if FEWBIT_ARM64 && FEWBIT_KNOWS_I8MM && defined(__linux__)
  static const bool has = HasDotprod() && !IsLimitedTo("dotprod") && (getauxval(AT_HWCAP2) & (1ul << 13));  // HWCAP2_I8MM
  return has;
#elif FEWBIT_ARM64 && FEWBIT_KNOWS_I8MM && defined(__APPLE__)
  static const bool has = [] {  // every M2 and later
    int found = 0;
    size_t size = sizeof(found);
    return HasDotprod() && !IsLimitedTo("dotprod") &&
           sysctlbyname("hw.optional.arm.FEAT_I8MM", &found, &size, nullptr, 0) == 0 && found != 0;
  }();
  return has;
#else
  return false;
#endif
}

// As `IsaOf` for kernels with FEWBIT_BYTE_DOT, whose levels are plain C++, AVX2, AVX2 with VNNI, AVX-512 and AMX; on arm64 0 is
// NEON, 1 and 2 are sdot, 3 and 4 are smmla.
inline Isa ByteDotIsaOf(int64_t level) {
  if (level < 0 || level > 3) level = 4;
  if (FEWBIT_ARM64 && level >= 3 && HasI8mm()) return Isa::kI8mm;
  if (FEWBIT_ARM64) return level != 0 && HasDotprod() ? Isa::kDotprod : Isa::kPortable;
  if (BestIsa() == Isa::kPortable || level == 0) return Isa::kPortable;
  if (level == 4 && HasAmx()) return Isa::kAmx;
  if (level >= 3 && BestIsa() == Isa::kAvx512) return Isa::kAvx512;
  return level >= 2 && HasAvxVnni() ? Isa::kAvxVnni : Isa::kAvx2;
}

// On arm64 plain C++ has NEON, which every arm64 has.
inline const char* NameOf(Isa isa) {
  static const char* const names[] = {FEWBIT_ARM64 ? "neon" : "portable", "avx2", "avx512", "avxvnni", "dotprod", "i8mm", "amx"};
  return names[static_cast<int>(isa)];
}

}  // namespace fewbit
