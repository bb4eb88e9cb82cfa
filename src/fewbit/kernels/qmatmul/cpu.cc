// The product of a float matrix and a quantized one on CPUs: y = x w, exact in what the codes mean, summed in float32.
//
// Layout. A weight is a matrix of codes as it lies in memory, rows by columns, its codes packed along either axis, and either
// axis contracted (job.h): [N, K] and [K, N], a product and its gradient, are all four the same call. Nothing is repacked.
// Where a container permutes its codes, x or y is permuted instead. Scales are read in their stored form: float32, bfloat16,
// float16, or bytes through a table of 256 numbers (E8M0, E4M3, scales that are quantized themselves).
//
// A few rows of x (up to 4; vectors.h). The weight is read once, so the bound is memory, and the aim is to decode as fast as
// bytes come. 64 bytes are loaded as 16 lanes of 32 bits. Shifting all lanes by 4 i brings code i of each lane to the low bits,
// and one permutation of 16 floats turns 16 of them into numbers, since it looks at four bits of each index only: two
// instructions and a multiply-add for 16 weights, whatever the 4-bit format; loading from one byte further on spares every
// second shift. So a lane holds 8 neighbouring codes. Along a contraction x is laid out to match once a call (BlockedX), which
// is O(M K); each lane keeps its own sum, and takes its own scale after 8 codes, so a tile may be any multiple of 8. Offsets
// meet the sums of x over their tiles, once a row. Along outputs a lane's bytes are neighbouring outputs, put in order when
// they are stored; the rows of the next tile are prefetched, because each row is another page. 1 and 2 bits go the same way;
// bytes by two shifts and a conversion; fp8 by way of float16, whose bits hold theirs. Codes of 3, 5 and 6 bits are
// cut out of their bytes first, to a byte each: along a row eight at a time by one instruction, down columns by two shifts
// where two bytes share a code. Then 5 bits are one permutation of two registers, 6 bits two of them, and integers of 7 bits,
// whose table would be eight registers, become floats by their bits (Whole). With one row of x four rows of the weight are taken
// together: x is loaded once for them.
//
// AVX2 and NEON go the same way with the same layout: sixteen lanes are two registers or four (sixteen.h), and only how a code
// becomes a number is their own (short_registers.h). One row of x is all that has room for its sums there; two or more meet
// panels, which are filled from the same registers. One core kept to AVX2, one row of x, 2048 x 2048 in tiles of 64 along rows, the
// least of two runs of seven on a busy machine, row by row and from registers: codes of 3 bits 7.3 and 0.32 ms, int4 3.9 and
// 0.60, nf4 3.6 and 0.70, int6 8.5 and 0.47, mxfp6 9.7 and 2.2, int7 8.8 and 0.51, int8 3.7 and 0.81, fp8 3.5 and 1.1. A table of
// 6 bits is 8 permutations and 7 choices there. On arm64 values are tested in an emulator; speed was not measured.
//
// More rows (panels.h). 128 outputs by 128 places are decoded and scaled into float32, [k][n] whichever axis is contracted, and
// multiplied by blocks of 6 x 4 vectors of registers, at 24 multiply-adds for 10 loads. A block of registers walks down the
// rows of x while its part of the panel, 32 KiB, stays in the first cache; x streams past it, 24 bytes for 12 cycles. Along a
// contraction the packed bytes of 16 rows are turned before they are decoded: 64 shuffles for 2048 codes of 4 bits, an eighth
// of what turning the numbers would take. The decoding is that of vectors.h where there is one. Every other case (tables of
// 7 bits, and of 5 with AVX2 and NEON; tiles that lanes do not fit; plain C++) is decoded row by row (decode.h) and turned as
// numbers, for a few rows of x, too.
//
// Threads take chunks of outputs, whose sizes do not depend on how many threads there are, and each output is summed in one
// order: the bits of the result are the same for any number of them. A network of many layers makes hundreds of calls of some
// 10 us each, and to wake a sleeping thread for each took longer than it saved: 64 tokens of a 30-layer model were faster on
// one core than on two. So a thread that has helped looks for the next call for 100 us before it sleeps (parallel.h). It is no
// thread of XLA's pool: operations that XLA runs beside each other, such as the products of keys and values, waited for it
// there.
//
// Layers that a loop runs over are one stack, of which a call takes one matrix by its index: XLA would copy it first.
//
// The bound. On a Sapphire Rapids core, which permutes on one port, 128 codes of 4 bits take 25 instructions on two ports:
// 12.5 cycles; 13.0 are measured from the cache with four rows together. Measured on one core of a busy machine (processor
// time, least of many, 4096 x 4096, weights that rotate, one run): one row of x with int4 in tiles of 64 along columns 0.82 ms
// beside 0.85 of torch's kernel for 4 bits, int8 1.18 beside 1.50 of torch's; along rows 1.12 and 1.71; int3 0.82 and 0.87,
// mxfp6 1.6 and 1.8. 256 rows, beside XLA's float32 product, 56 ms along columns and 58 along rows: int4 56 and 58, int3 55
// and 55, mxfp6 56 and 58, int8 56 and 61. bench/results/qmatmul.json has a run of every scheme. Along rows one row of x is
// behind: presumably because the bytes of a tile lie on as many pages as it has rows, at a stride that the first cache maps to
// one set. Prefetching into the second cache instead did not help.
//
// What did not pay. Codes in natural order in the lanes: two more instructions on the port that permutes. Loads at each of the
// four bytes of a lane, in place of more shifts: 12.0 cycles in place of 13.0 with four rows of the weight, but 16 and 19 with
// one and two, since each such load crosses a cache line. bfloat16 products of x in three parts: that instruction runs on one
// port. Sums first and zero points afterwards, which saves an instruction for 16 weights: a tile of zeros would no longer give
// exact zeros. Scales spread to one an output by scalar code: twice the time of the whole product. Panels [n][k], summed by
// lanes: each block streams from the second cache, and 256 rows took 1.5 times as long. Loops over rows within registers
// without `unroll`: GCC leaves some of them rolled, with their sums in memory, at 1.4 times the time.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "levels.h"
#include "module.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace fewbit {

namespace ffi = xla::ffi;

static bool FloatOf(ffi::DataType type, Float* kind) {
  if (type == ffi::F32) *kind = Float::kF32;
  else if (type == ffi::BF16) *kind = Float::kBF16;
  else if (type == ffi::F16) *kind = Float::kF16;
  else return false;
  return true;
}

static bool HeldOf(const ffi::AnyBuffer& data, const ffi::BufferR1<ffi::F32>& table, Held* held) {
  Float kind = Float::kF32;
  if (data.element_type() == ffi::U8 && table.element_count() == 256) held->holder = Holder::kTable;
  else if (FloatOf(data.element_type(), &kind)) held->holder = static_cast<Holder>(kind);
  else return false;
  held->data = data.untyped_data();
  held->table = table.typed_data();
  return true;
}

// The first place of memory at which a cache line begins.
static float* FromALine(float* memory) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64); }

// Row m of x as float32 in the order of the stream, zeros up to ldx.
static void PackRow(const void* x, Float kind, int64_t k, const int32_t* order, int64_t group, float* out, int64_t ldx) {
  const auto at = [&](int64_t i) {
    if (kind == Float::kF32) return static_cast<const float*>(x)[i];
    const uint16_t half = static_cast<const uint16_t*>(x)[i];
    return kind == Float::kBF16 ? FloatOfBrain(half) : FloatOfHalf(half);
  };
  if (order == nullptr) {
    if (kind == Float::kF32) {
      std::memcpy(out, x, k * sizeof(float));
    } else {
      for (int64_t i = 0; i < k; ++i) out[i] = at(i);
    }
    for (int64_t i = k; i < ldx; ++i) out[i] = 0.0f;
    return;
  }
  for (int64_t i = 0; i < ldx; ++i) {
    const int64_t code = i / group * group + order[i % group];
    out[i] = code < k ? at(code) : 0.0f;
  }
}

static ffi::Error Qmatmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::BufferR3<ffi::U8> codes, ffi::AnyBuffer scale,
                          ffi::BufferR1<ffi::F32> scale_table, ffi::AnyBuffer zero, ffi::BufferR1<ffi::F32> zero_table,
                          ffi::BufferR1<ffi::F32> tensor_scale, ffi::BufferR1<ffi::F32> values,
                          ffi::BufferR1<ffi::S32> picked, ffi::Result<ffi::AnyBuffer> y, bool contracts_cols, bool packed_cols, int64_t rows, int64_t cols, int64_t bits, int64_t row_tile,
                          int64_t col_tile, int64_t code_kind, int64_t role, float unit, int64_t level,
                          ffi::Span<const int32_t> order) {
  Job job{};
  Float x_kind;
  if (!FloatOf(x.element_type(), &x_kind) || !FloatOf(y->element_type(), &job.y_kind)) {
    return ffi::Error::InvalidArgument("qmatmul takes and gives float32, bfloat16 or float16");
  }
  const auto x_shape = x.dimensions(), y_shape = y->dimensions(), scale_shape = scale.dimensions();
  Weight& w = job.w;
  if (x_shape.size() != 3 || y_shape.size() != 3 || scale_shape.size() != 3 || values.element_count() != 256 ||
      !HeldOf(scale, scale_table, &w.scale) || (role != 0 && !HeldOf(zero, zero_table, &w.zero))) {
    return ffi::Error::InvalidArgument("qmatmul was called with buffers of the wrong form");
  }
  const int64_t batch = x_shape[0], stacked = codes.dimensions()[0];
  int64_t first = 0;  // the matrix of the stack that the first one of x meets
  if (picked.element_count() != 0) {
    const int64_t asked = picked.typed_data()[0];
    first = asked < 0 ? 0 : asked < stacked ? asked : stacked - 1;
  }
  job.M = x_shape[1], job.K = x_shape[2], job.N = y_shape[2];
  job.contracts_cols = contracts_cols;
  w.rows = rows, w.cols = cols, w.row_stride = codes.dimensions()[2], w.bits = static_cast<int>(bits);
  w.packed_cols = packed_cols, w.kind = static_cast<Codes>(code_kind), w.values = values.typed_data();
  w.row_tile = row_tile, w.col_tile = col_tile, w.tiles_per_row = scale_shape[2], w.role = static_cast<Zero>(role);
  const bool x_in_stream = packed_cols == contracts_cols;
  const int64_t group = static_cast<int64_t>(order.size());
  if (group != 0 && !x_in_stream) job.order = order.begin(), job.group = group;
  const int32_t* x_order = group != 0 && x_in_stream ? order.begin() : nullptr;

  const Isa isa = level >= 0 && static_cast<Isa>(level) < BestIsa() ? static_cast<Isa>(level) : BestIsa();
  const int64_t steps = Steps(isa, job);
  constexpr int64_t kBlock = 512;  // the most codes that a kernel takes in one step
  const int64_t length = (job.contracted() + kBlock - 1) / kBlock * kBlock;
  const bool as_is = steps == 1 && job.M > 16 && x_kind == Float::kF32 && x_order == nullptr;
  job.ldx = as_is ? job.K : length + 16;
  std::unique_ptr<float[]> packed(as_is ? nullptr : new float[job.M * job.ldx]);
  std::unique_ptr<float[]> blocked_memory(steps == 1 ? nullptr : new float[job.M * job.ldx + 16]);
  float* blocked = FromALine(blocked_memory.get());
  std::unique_ptr<float[]> sums(steps == 1 ? nullptr : new float[job.M * (length / steps)]);
  if (steps > 1 && w.role == Zero::kOffset) job.x_sums = sums.get(), job.ld_sums = length / steps;
  const int64_t x_bytes = x_kind == Float::kF32 ? 4 : 2, y_bytes = job.y_kind == Float::kF32 ? 4 : 2;
  const int64_t weight_bytes = codes.dimensions()[1] * codes.dimensions()[2], tiles = scale_shape[1] * scale_shape[2];
  const auto tile_bytes = [](const Held& held) { return held.holder == Holder::kF32 ? 4 : held.holder == Holder::kTable ? 1 : 2; };
  const bool one_scale = scale_shape[0] == 1, one_zero = zero.dimensions()[0] == 1;
  const int64_t zeros = role == 0 ? 0 : zero.dimensions()[1] * zero.dimensions()[2];
  const int64_t tensor_scales = static_cast<int64_t>(tensor_scale.element_count());
  const Held first_scale = w.scale, first_zero = w.zero;
  for (int64_t b = 0; b < batch; ++b) {
    const char* rows_of_x = static_cast<const char*>(x.untyped_data()) + b * job.M * job.K * x_bytes;
    job.x = as_is ? reinterpret_cast<const float*>(rows_of_x) : steps > 1 ? blocked : packed.get();
    constexpr int64_t kRowsAtOnce = 16;
    ParallelFor(pool, as_is ? 0 : (job.M + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t chunk) {
      for (int64_t m = chunk * kRowsAtOnce; m < job.M && m < (chunk + 1) * kRowsAtOnce; ++m) {
        float* row = packed.get() + m * job.ldx;
        PackRow(rows_of_x + m * job.K * x_bytes, x_kind, job.K, x_order, group, row, job.ldx);
        float* sums_of_row = job.x_sums == nullptr ? nullptr : sums.get() + m * job.ld_sums;
        if (steps > 1) BlockedX(row, length, steps, blocked + m * job.ldx, sums_of_row);
      }
    });
    const int64_t at = first + b;
    w.codes = codes.typed_data() + (stacked == 1 ? 0 : at * weight_bytes);
    w.scale.data = static_cast<const char*>(first_scale.data) + (one_scale ? 0 : at * tiles) * tile_bytes(first_scale);
    if (role != 0) w.zero.data = static_cast<const char*>(first_zero.data) + (one_zero ? 0 : at * zeros) * tile_bytes(first_zero);
    w.unit = tensor_scales == 0 ? unit : unit * tensor_scale.typed_data()[tensor_scales == 1 ? 0 : at];
    job.y = static_cast<char*>(y->untyped_data()) + b * job.M * job.N * y_bytes;
    const auto run = [&](int64_t chunk) { Run(isa, job, chunk); };
    constexpr int64_t kWorthThreads = 1 << 16;  // multiply-adds that take longer than to tell a thread that looks
    const int64_t chunks = ChunkCount(isa, job);
    if (job.M * w.rows * w.cols >= kWorthThreads) ParallelFor(pool, chunks, run);
    else for (int64_t chunk = 0; chunk < chunks; ++chunk) run(chunk);
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(qmatmul, Qmatmul,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()              // x [B, M, K]
                           .Arg<ffi::BufferR3<ffi::U8>>()      // codes [B or 1, rows, cols], one of the two in bytes
                           .Arg<ffi::AnyBuffer>()              // scale [B or 1, tiles, tiles]
                           .Arg<ffi::BufferR1<ffi::F32>>()     // the numbers of stored scales, if they are bytes
                           .Arg<ffi::AnyBuffer>()              // zero points, like scale
                           .Arg<ffi::BufferR1<ffi::F32>>()
                           .Arg<ffi::BufferR1<ffi::F32>>()     // tensor scales, none or one or one a batch
                           .Arg<ffi::BufferR1<ffi::F32>>()     // the numbers of the format
                           .Arg<ffi::BufferR1<ffi::S32>>()     // the matrix that x meets, of a stack; none: x has one for each
                           .Ret<ffi::AnyBuffer>()              // y [B, M, N]
                           .Attr<bool>("contracts_cols")
                           .Attr<bool>("packed_cols")
                           .Attr<int64_t>("rows")
                           .Attr<int64_t>("cols")
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("row_tile")
                           .Attr<int64_t>("col_tile")
                           .Attr<int64_t>("codes")
                           .Attr<int64_t>("role")
                           .Attr<float>("unit")
                           .Attr<int64_t>("level")
                           .Attr<ffi::Span<const int32_t>>("order"));

}  // namespace fewbit

FEWBIT_MODULE(_cpu, {"fewbit_qmatmul", reinterpret_cast<void*>(fewbit::qmatmul)})
