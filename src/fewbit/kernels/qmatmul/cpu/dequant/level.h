// The dequantizing GEMV and GEMM for one instruction set (foreach_isa.h).

#include "cpp/simd.h"
#include "cpp/decode_scalar.h"
#include "cpp/transpose.h"
#include "simd16.h"
#include "decode_simd256.h"
#include "decode_simd.h"
#include "cpp/microkernel.h"
#include "gemm.h"
#if FEWBIT_AMX
#include "cpp/tile_registers.h"
#include "amx.h"
#else
#include "gemv_rows.h"
#include "gemv_columns.h"
#include "fold_scale.h"
#include "select_kernel.h"
#endif
