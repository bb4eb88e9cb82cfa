// Attention for one instruction set (foreach_isa.h).

#include "cpp/simd.h"
#include "cpp/decode_scalar.h"
#include "cpp/microkernel.h"
#include "cpp/transpose.h"
#include "exp.h"
#include "cpp/bytes_simd.h"
#include "step.h"
#include "float_products.h"
#include "int8_products.h"
#include "attend.h"

Kernels GetKernels() { return {Attend, ScratchOf, Join, kAtOnce}; }
