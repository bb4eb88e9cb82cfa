// The int8 GEMV and GEMM for one instruction set (foreach_isa.h).

#include "cpp/simd.h"
#include "cpp/decode_scalar.h"
#include "cpp/transpose.h"
#include "cpp/bytes_simd.h"
#include "int8_simd.h"
#include "gemv_rows.h"
#include "decode_bytes.h"
#include "pack.h"
#include "gemm.h"
#include "blocks.h"

Kernels GetKernels() {
  return {kIntRows,      IntegerChunks, IntegerRowBytes, Prepare,   RunIntegers,
          BlockRowBytes, BlockChunks,   LayBlocks,       RunBlocks, TakesPanels, PanelsOf};
}
