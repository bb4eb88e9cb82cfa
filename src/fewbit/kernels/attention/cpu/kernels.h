// Attention for one instruction set (foreach_isa.h).

#include "cpp/simd.h"
#include "cpp/decode_scalar.h"
#include "cpp/microkernel.h"
#include "cpp/transpose.h"
#include "cpp/exp.h"
#include "attend.h"

Kernels GetKernels() { return {Attend, ScratchOf, Join, kAtOnce}; }
