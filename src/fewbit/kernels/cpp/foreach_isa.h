// Compiles the kernels of an extension once for each instruction set, and chooses among them at run time.
//
//   struct Kernels { ... };                                // in namespace fewbit: a table of functions
//   #define FEWBIT_KERNELS "attention/cpu/kernels.h"       // defines `Kernels GetKernels()`
//   #include "cpp/foreach_isa.h"                           // defines `Kernels KernelsFor(Isa)`
//
// FEWBIT_KERNELS is included in a namespace for each instruction set. It and what it includes have no include guard and ask
// FEWBIT_LEVEL where instruction sets differ. They instantiate no template from outside their namespace: the linker keeps one copy
// of such a template, and it could be one that the machine cannot run.
//
// With `#define FEWBIT_BYTE_DOT 1` before, the kernels are also compiled for AVX2 with VNNI and for arm64 with sdot, which
// multiply bytes, and for arm64 with smmla, which multiplies matrices of them; FEWBIT_VNNI says whether an instruction multiplies
// bytes, FEWBIT_I8MM whether smmla is there. With `#define FEWBIT_HAS_AMX_KERNELS 1` they are compiled for AMX, too: FEWBIT_LEVEL is
// that of AVX-512 then, and FEWBIT_AMX 1.
//
// Translation units. setup.py compiles a source with `#define FEWBIT_UNITS n` n times at once, with FEWBIT_UNIT 0 to n - 1, and
// links the objects: unit 0 is plain C++ and the handlers, 1 is AVX2, the others are AVX-512 with AMX. Without FEWBIT_UNIT (tests, arm64,
// small extensions) one object has all of it.
#pragma once

#include "isa.h"

#if defined(FEWBIT_UNIT)
#define FEWBIT_IN_UNIT(unit) (FEWBIT_UNIT == unit)
#define FEWBIT_FROM_UNIT(unit) (FEWBIT_UNIT >= unit)
#else
#define FEWBIT_IN_UNIT(unit) 1
#define FEWBIT_FROM_UNIT(unit) 1
#endif

#ifndef FEWBIT_BYTE_DOT
#define FEWBIT_BYTE_DOT 0
#endif
#ifndef FEWBIT_HAS_AMX_KERNELS
#define FEWBIT_HAS_AMX_KERNELS 0
#endif

#define FEWBIT_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define FEWBIT_BEGIN(features) FEWBIT_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define FEWBIT_END FEWBIT_PRAGMA(clang attribute pop)
#else
#define FEWBIT_BEGIN(features) FEWBIT_PRAGMA(GCC push_options) FEWBIT_PRAGMA(GCC target(features))
#define FEWBIT_END FEWBIT_PRAGMA(GCC pop_options)
#endif

namespace fewbit {

namespace portable {
Kernels GetKernels();
}
#if FEWBIT_X86
namespace avx2 {
Kernels GetKernels();
}
namespace avxvnni {
Kernels GetKernels();
}
namespace avx512 {
Kernels GetKernels();
}
namespace amx {
Kernels GetKernels();
}
#endif
#if FEWBIT_ARM64
namespace dotprod {
Kernels GetKernels();
}
namespace i8mm {
Kernels GetKernels();
}
#endif

#define FEWBIT_LEVEL FEWBIT_LEVEL_PORTABLE
#define FEWBIT_VNNI 0
#define FEWBIT_I8MM 0
#define FEWBIT_AMX 0
#if FEWBIT_IN_UNIT(0)
namespace portable {
#include FEWBIT_KERNELS
}
#endif
#undef FEWBIT_VNNI
#if FEWBIT_ARM64 && FEWBIT_BYTE_DOT && FEWBIT_IN_UNIT(0)
#define FEWBIT_VNNI 1
FEWBIT_BEGIN("arch=armv8.2-a+dotprod")
namespace dotprod {
#include FEWBIT_KERNELS
}
FEWBIT_END
#undef FEWBIT_I8MM
#define FEWBIT_I8MM FEWBIT_KNOWS_I8MM
#if FEWBIT_I8MM
FEWBIT_BEGIN("arch=armv8.2-a+dotprod+i8mm")
namespace i8mm {
#include FEWBIT_KERNELS
}
FEWBIT_END
#endif
#undef FEWBIT_VNNI
#endif
#undef FEWBIT_LEVEL

#if FEWBIT_X86
#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX2
#if FEWBIT_IN_UNIT(1)
#define FEWBIT_VNNI 0
FEWBIT_BEGIN("avx2,fma,f16c")
namespace avx2 {
#include FEWBIT_KERNELS
}
FEWBIT_END
#undef FEWBIT_VNNI
#endif
#if FEWBIT_IN_UNIT(1) && FEWBIT_BYTE_DOT && FEWBIT_KNOWS_AVXVNNI
#define FEWBIT_VNNI 1
FEWBIT_BEGIN("avx2,fma,f16c,avxvnni")
namespace avxvnni {
#include FEWBIT_KERNELS
}
FEWBIT_END
#undef FEWBIT_VNNI
#endif
#undef FEWBIT_LEVEL

#if FEWBIT_FROM_UNIT(2)
#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX512
#define FEWBIT_VNNI 1
FEWBIT_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")
namespace avx512 {
#include FEWBIT_KERNELS
}
FEWBIT_END
#if FEWBIT_HAS_AMX_KERNELS && FEWBIT_KNOWS_AMX && FEWBIT_IN_UNIT(2)
#undef FEWBIT_AMX
#define FEWBIT_AMX 1
FEWBIT_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16")
namespace amx {
#include FEWBIT_KERNELS
}
FEWBIT_END
#endif
#undef FEWBIT_VNNI
#undef FEWBIT_LEVEL
#endif
#endif
#undef FEWBIT_AMX
#undef FEWBIT_I8MM

#if FEWBIT_IN_UNIT(0)

// The kernels for an instruction set that this machine has.
inline Kernels KernelsFor(Isa isa) {
#if FEWBIT_X86
#if FEWBIT_HAS_AMX_KERNELS && FEWBIT_KNOWS_AMX
  if (isa == Isa::kAmx) return amx::GetKernels();
#endif
  if (isa == Isa::kAvx512) return avx512::GetKernels();
#if FEWBIT_BYTE_DOT && FEWBIT_KNOWS_AVXVNNI
  if (isa == Isa::kAvxVnni) return avxvnni::GetKernels();
#endif
  if (isa != Isa::kPortable) return avx2::GetKernels();
#elif FEWBIT_ARM64 && FEWBIT_BYTE_DOT
#if FEWBIT_KNOWS_I8MM
  if (isa == Isa::kI8mm) return i8mm::GetKernels();
#endif
  if (isa == Isa::kDotprod) return dotprod::GetKernels();
#endif
  return portable::GetKernels();
}

#endif

}  // namespace fewbit
