// GEMV and GEMM with float activations and quantized weights on CPUs: y = x w, exact in the decoded codes, sums in float32.
//
// Data layout. w is a matrix of codes [rows, cols], packed along either axis, of which either is contracted (problem.h): [N, K],
// [K, N], and the gradients of both are one call. Codes are never repacked; where a container permutes them, x or y is permuted.
// Scales are read as stored: float32, bfloat16, float16, or bytes with a table of 256 numbers (E8M0, E4M3).
//
// Decoding (decode_simd.h, decode_simd256.h). 64 bytes are 16 lanes of 32 bits, so a lane holds 8 neighbouring codes of 4 bits. A
// shift brings code i of every lane to the low bits, and one permutation of a table in registers makes floats: two instructions
// and an FMA for 16 weights. 3, 5 and 6 bits are first spread to bytes; integers become floats through the bits of 2**23; fp8
// goes by float16. AVX2 and NEON use two and four registers for 16 lanes (simd16.h).
//
// GEMV, memory bound (gemv_rows.h, gemv_columns.h). Along the contraction x is permuted once to the order of the lanes (BlockedX), four
// rows of w share each load of x, and a scale multiplies the sum of its block: a block is any multiple of 8 codes. Zero points
// are subtracted from codes; offsets multiply the block sums of x. Where outputs are contiguous, 8 rows of w are read at a
// time in runs of up to 1 KiB, and the next 8 are prefetched. 2 to 4 rows of x share the decoded weights (to 16 along the
// contraction, four at a time).
//
// Scales that vary along the contraction (fold_scale.h), as in every gradient, multiply x instead of the sum: (x s) c.
//
// GEMM (gemm.h, microkernel.h). Panels of 128 outputs by 128 contracted elements are decoded and scaled to float32, [k][n] for
// either layout; the micro-kernel is 6 rows by 4 vectors: 24 FMA for 10 loads. Its part of a panel, 32 KiB, stays in L1 while it
// walks down the rows of x. Along the contraction the packed bytes of 16 rows are transposed before decoding. Formats without
// a register decoder are decoded row by row (decode_scalar.h). With AMX (amx.h), 64 rows or more of x in bfloat16 are multiplied as
// they are, by panels cut into up to three bfloat16 whose sum is the float32.
//
// Threads take contiguous chunks of outputs; each output is summed in one order, so the bits do not depend on their number.
// Groups of rows with a matrix each (mixture of experts) are jobs whose chunks all threads share.
//
// Measurements, and what did not pay: docs/design/kernels-cpu.md.
#define FEWBIT_UNITS 5  // the handler with plain C++, AVX2, and three for AVX-512 (select_kernel.h), the first with AMX

#include "dequant/kernels.h"

#if FEWBIT_IN_UNIT(0)
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpp/buffers.h"
#include "cpp/checks.h"
#include "cpp/python_module.h"
#include "cpp/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace fewbit {

namespace ffi = xla::ffi;

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

// Whether numbers in bfloat16 have neither infinities nor NaN. Infinity times a weight's parts, of either sign or zero, would be NaN.
static bool AreFinite(const uint16_t* x, int64_t count) {
  uint64_t found = 0;  // in the highest bit of four numbers at once, which an exponent of ones reaches when one is added to it
  const auto look = [&](uint64_t four) { found |= (four & 0x7F807F807F807F80) + 0x0080008000800080; };
  const int64_t whole = count / 4 * 4;
  for (int64_t i = 0; i < whole; i += 4) {
    uint64_t four;
    std::memcpy(&four, x + i, sizeof(four));
    look(four);
  }
  for (int64_t i = whole; i < count; ++i) look(x[i]);
  return (found & 0x8000800080008000) == 0;
}

// The matrices of a stack: where each begins.
struct Matrices {
  StoredScales scale, zero;
  const uint8_t* codes;
  const float* tensor_scale;
  int64_t bytes, scales, zeros, tensor_scales;  // of one matrix; 0 where all share one
  float unit;

  // The matrix, for a weight that says all that they have in common.
  void Take(int64_t matrix, Weight* w) const {
    w->codes = codes + matrix * bytes;
    w->scale = scale, w->zero = zero;
    w->scale.data = static_cast<const char*>(scale.data) + matrix * scales * SizeOf(scale.type);
    if (zeros != 0) w->zero.data = static_cast<const char*>(zero.data) + matrix * zeros * SizeOf(zero.type);
    w->unit = tensor_scale == nullptr ? unit : unit * tensor_scale[matrix * tensor_scales];
  }
};

// The shapes of a stack of codes, scales and zero points.
struct Stack {
  Dimensions codes, scale, zero;
  int64_t rows, cols, bits, row_tile, col_tile;
  bool packed_cols, has_zero;

  bool Fits(Checks& checks) const {
    checks.Within("bits of a code", bits, 1, 8);
    checks.AtLeast("rows of a tile", row_tile, 1);
    checks.AtLeast("columns of a tile", col_tile, 1);
    checks.AtLeast("rows of the weight", rows, 0);
    if (!checks.AtLeast("columns of the weight", cols, 0)) return false;
    checks.Equal("rows of the codes", codes[1], packed_cols ? rows : BytesOf(rows, bits));
    checks.Equal("columns of the codes", codes[2], packed_cols ? BytesOf(cols, bits) : cols);
    checks.OneOf("matrices of the scales", scale[0], {1, codes[0]});
    checks.Equal("rows of the scales", scale[1], TilesOf(rows, row_tile));
    checks.Equal("columns of the scales", scale[2], TilesOf(cols, col_tile));
    if (!has_zero) return !checks.failed();
    checks.OneOf("matrices of the zero points", zero[0], {1, codes[0]});
    checks.Equal("rows of the zero points", zero[1], scale[1]);
    return checks.Equal("columns of the zero points", zero[2], scale[2]);
  }
};

// The order of the codes in each group of the packed axis, whose length is in whole groups.
static void CheckOrder(ffi::Span<const int32_t> order, int64_t bits, int64_t packed, Checks& checks) {
  const int64_t group = static_cast<int64_t>(order.size());
  if (group == 0) return;
  checks.Equal("the packed axis beyond whole groups of the order", packed % group, 0);
  checks.Equal("bits beyond whole bytes of a group", group * bits % 8, 0);
  for (const int32_t place : order) checks.Within("a place of the order", place, 0, group - 1);
}

// Rows of x and of the result for a weight of these lengths; an axis of codes in groups may be padded.
static void CheckRows(Dimensions x, Dimensions y, int64_t contracted, int64_t outputs, ffi::Span<const int32_t> order,
                      bool is_contracted_packed, Checks& checks) {
  const int64_t spare = order.size() == 0 ? 0 : static_cast<int64_t>(order.size()) - 1;
  checks.Equal("batch of the result", y[0], x[0]);
  checks.Equal("rows of the result", y[1], x[1]);
  checks.Within("columns of x", x[2], contracted - (is_contracted_packed ? spare : 0), contracted);
  checks.Within("columns of the result", y[2], outputs - (is_contracted_packed ? 0 : spare), outputs);
}

// Which matrices x is multiplied with: each its own, a picked one, or one for each group of rows.
static void CheckMatrices(Dimensions x, int64_t stacked, const ffi::BufferR1<ffi::S32>& picked,
                          const ffi::BufferR1<ffi::S32>& sizes, int64_t tensor_scales, Checks& checks) {
  const int64_t picks = static_cast<int64_t>(picked.element_count()), groups = static_cast<int64_t>(sizes.element_count());
  checks.That(tensor_scales == 0 || tensor_scales == 1 || tensor_scales == stacked,
              "there must be no tensor scale, one, or one for each matrix");
  checks.Within("number of picked matrices", picks, 0, 1);
  checks.That(picks == 0 || groups == 0, "a matrix is picked, and rows have groups; one of the two is expected");
  if (picks != 0 || groups != 0) checks.Equal("batch of x", x[0], 1);
  if (groups != 0) {
    checks.OneOf("number of groups", groups, {stacked});
    for (int64_t g = 0; g < groups && !checks.failed(); ++g) checks.AtLeast("size of a group", sizes.typed_data()[g], 0);
  } else if (picks == 0) {
    checks.OneOf("matrices of the codes", stacked, {1, x[0]});
  }
}

static ffi::Error Qmatmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::BufferR3<ffi::U8> codes, ffi::AnyBuffer scale,
                          ffi::BufferR1<ffi::F32> scale_table, ffi::AnyBuffer zero, ffi::BufferR1<ffi::F32> zero_table,
                          ffi::BufferR1<ffi::F32> tensor_scale, ffi::BufferR1<ffi::F32> values,
                          ffi::BufferR1<ffi::S32> picked, ffi::BufferR1<ffi::S32> sizes, ffi::Result<ffi::AnyBuffer> y,
                          bool contracts_cols, bool packed_cols, int64_t rows, int64_t cols, int64_t bits, int64_t row_tile,
                          int64_t col_tile, int64_t code_kind, int64_t role, float unit, int64_t level,
                          ffi::Span<const int32_t> order) {
  Job job{};
  Float x_kind;
  const auto x_shape = x.dimensions(), y_shape = y->dimensions(), scale_shape = scale.dimensions();
  Weight& w = job.w;
  Checks checks("qmatmul");
  checks.That(FloatOf(x.element_type(), &x_kind) && FloatOf(y->element_type(), &job.y_kind),
              "x and the result must be float32, bfloat16 or float16");
  checks.That(x_shape.size() == 3 && y_shape.size() == 3 && scale_shape.size() == 3, "x, the scales and the result must have 3 axes");
  checks.That(StoredScalesOf(scale, scale_table, &w.scale), "scales must be floats, or bytes with a table of 256 numbers");
  checks.Within("role of the zero points", role, 0, 2);
  checks.That(role == 0 || (zero.dimensions().size() == 3 && StoredScalesOf(zero, zero_table, &w.zero)),
              "zero points must have 3 axes, and be floats, or bytes with a table of 256 numbers");
  checks.Equal("length of the table of numbers", static_cast<int64_t>(values.element_count()), 256);
  const Stack stack{codes.dimensions(), scale_shape, zero.dimensions(), rows, cols, bits, row_tile, col_tile, packed_cols, role != 0};
  if (checks.failed() || !stack.Fits(checks)) return checks.error();
  CheckOrder(order, bits, packed_cols ? cols : rows, checks);
  checks.Within("kind of the codes", code_kind, 0, 6);
  checks.Within("level", level, -1, 3);
  CheckRows(x_shape, y_shape, contracts_cols ? cols : rows, contracts_cols ? rows : cols, order, packed_cols == contracts_cols, checks);
  CheckMatrices(x_shape, codes.dimensions()[0], picked, sizes, static_cast<int64_t>(tensor_scale.element_count()), checks);
  if (checks.failed()) return checks.error();
  const int64_t stacked = codes.dimensions()[0], all_rows = x_shape[0] * x_shape[1];
  if (y->element_count() == 0) return ffi::Error::Success();
  if (stacked == 0 || x_shape[2] == 0) {  // a sum of nothing
    std::memset(y->untyped_data(), 0, y->size_bytes());
    return ffi::Error::Success();
  }
  int64_t first = 0;  // the matrix of the stack for the first one of x
  if (picked.element_count() != 0) {
    const int64_t asked = picked.typed_data()[0];
    first = asked < 0 ? 0 : asked < stacked ? asked : stacked - 1;
  }
  job.K = x_shape[2], job.N = y_shape[2];
  job.contracts_cols = contracts_cols, job.threads = pool.num_threads();
  w.rows = rows, w.cols = cols, w.row_stride = codes.dimensions()[2], w.bits = static_cast<int>(bits);
  w.packed_cols = packed_cols, w.kind = static_cast<Codes>(code_kind), w.values = values.typed_data();
  w.row_tile = row_tile, w.col_tile = col_tile, w.tiles_per_row = scale_shape[2], w.role = static_cast<Zero>(role);
  const bool x_in_stream = packed_cols == contracts_cols;
  const int64_t group = static_cast<int64_t>(order.size());
  if (group != 0 && !x_in_stream) job.order = order.begin(), job.group = group;
  const int32_t* x_order = group != 0 && x_in_stream ? order.begin() : nullptr;
  const int64_t tensor_scales = static_cast<int64_t>(tensor_scale.element_count());
  const Matrices matrices{w.scale, w.zero, codes.typed_data(), tensor_scales == 0 ? nullptr : tensor_scale.typed_data(),
                          stacked == 1 ? 0 : codes.dimensions()[1] * codes.dimensions()[2],
                          scale_shape[0] == 1 ? 0 : scale_shape[1] * scale_shape[2],
                          role == 0 || zero.dimensions()[0] == 1 ? 0 : zero.dimensions()[1] * zero.dimensions()[2],
                          tensor_scales == 1 ? 0 : 1, unit};

  const Kernels kernels = KernelsFor(TileIsaOf(level));
  const int64_t x_bytes = SizeOf(x_kind), y_bytes = SizeOf(job.y_kind);
  const char* x_data = static_cast<const char*>(x.untyped_data());
  char* y_data = static_cast<char*>(y->untyped_data());

  // A job for each group; rows that must be laid out first are counted.
  struct Laid {
    Job job;
    int64_t steps, m0, from, chunks;  // `from`: the first of its rows among those that are laid out
    int64_t tiles_at = -1;            // where its tiles of x begin; -1: it has none
  };
  std::vector<Laid> jobs;
  std::vector<int32_t> owner;  // of each row that is laid out
  int64_t chunks = 0, work = 0, done = 0, tile_numbers = 0, block = 16;  // `block`: what a kernel takes of a row of x at once
  bool is_blocked = false;
  for (const Group& one : GroupsOf(sizes, x_shape[0], x_shape[1], first)) {
    done = one.m0 + one.rows;
    job.M = one.rows;
    matrices.Take(one.matrix, &w);
    const int64_t steps = kernels.steps(job);
    const bool in_tiles = x_kind == Float::kBF16 && kernels.takes_bfloat16(job) &&
                          AreFinite(reinterpret_cast<const uint16_t*>(x_data) + one.m0 * job.K, job.M * job.K);
    const bool as_is = in_tiles || (steps == 1 && job.M > 16 && x_kind == Float::kF32 && x_order == nullptr);
    job.x = as_is ? reinterpret_cast<const float*>(x_data + one.m0 * job.K * x_bytes) : nullptr;
    job.ldx = job.K;
    job.y = y_data + one.m0 * job.N * y_bytes;
    jobs.push_back({job, steps, one.m0, static_cast<int64_t>(owner.size()), kernels.chunks(job)});
    if (!as_is) owner.resize(owner.size() + job.M, static_cast<int32_t>(jobs.size() - 1));
    constexpr int64_t kMost = 512;  // of any kernel that takes x in order
    block = as_is ? block : std::max(block, steps > 1 ? 16 * steps : kMost);
    is_blocked = is_blocked || steps > 1;
    chunks += jobs.back().chunks, work += job.M * w.rows * w.cols;
    if (in_tiles) jobs.back().tiles_at = tile_numbers, tile_numbers += job.tile_numbers();
  }
  std::memset(y_data + done * job.N * y_bytes, 0, (all_rows - done) * job.N * y_bytes);

  const int64_t length = (job.contracted() + block - 1) / block * block, ldx = length + 16;
  const int64_t copied = static_cast<int64_t>(owner.size()), ld_sums = SumsOfRow(w);
  const bool has_sums = is_blocked && w.role == Zero::kOffset;
  struct Rows {};
  const int64_t in_blocks = is_blocked ? copied * ldx + 16 : 0;
  const CallMemory<Rows> memory((copied * ldx + in_blocks + (has_sums ? copied * ld_sums : 0)) * sizeof(float));
  float *packed = memory.floats(), *blocked = FromALine(packed + copied * ldx), *sums = packed + copied * ldx + in_blocks;
  for (Laid& one : jobs) {
    if (one.job.x != nullptr) continue;
    one.job.x = (one.steps > 1 ? blocked : packed) + one.from * ldx, one.job.ldx = ldx;
    if (has_sums) one.job.x_sums = sums + one.from * ld_sums, one.job.ld_sums = ld_sums;
  }
  constexpr int64_t kRowsAtOnce = 16;
  ParallelFor(pool, (copied + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t chunk) {
    for (int64_t i = chunk * kRowsAtOnce; i < copied && i < (chunk + 1) * kRowsAtOnce; ++i) {
      const Laid& one = jobs[owner[i]];
      float* row = packed + i * ldx;
      PackRow(x_data + (one.m0 + i - one.from) * job.K * x_bytes, x_kind, job.K, x_order, group, row, ldx);
      if (one.steps > 1) BlockedX(row, length, one.steps, blocked + i * ldx);
      if (has_sums) TileSums(row, w, sums + i * ld_sums);
    }
  });
  struct Tiles {};
  const CallMemory<Tiles> of_tiles(tile_numbers * sizeof(uint16_t) + 64);
  uint16_t* tiles = reinterpret_cast<uint16_t*>(FromALine(of_tiles.floats()));
  for (Laid& one : jobs) {
    if (one.tiles_at < 0) continue;
    one.job.x_tiles = tiles + one.tiles_at;
    const uint16_t* x_rows = reinterpret_cast<const uint16_t*>(x_data) + one.m0 * job.K;
    ParallelFor(pool, (one.job.M + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t chunk) {
      for (int64_t m = chunk * kRowsAtOnce; m < one.job.M && m < (chunk + 1) * kRowsAtOnce; ++m) {
        LayTiles(one.job, m, x_rows + m * job.K, x_order, group, tiles + one.tiles_at);
      }
    });
  }
  const auto run = [&](int64_t chunk) {
    size_t i = 0;
    for (; chunk >= jobs[i].chunks; ++i) chunk -= jobs[i].chunks;
    kernels.run(jobs[i].job, chunk);
  };
  constexpr int64_t kWorthThreads = 1 << 16;  // multiply-adds that take longer than to tell a thread that looks
  Reads reads;
  if (jobs.size() == 1) reads = ReadsOf(jobs[0].job.w, codes.dimensions(), scale_shape, zero.dimensions());
  if (work >= kWorthThreads) ParallelFor(pool, chunks, run, reads);
  else for (int64_t chunk = 0; chunk < chunks; ++chunk) run(chunk);
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
                           .Arg<ffi::BufferR1<ffi::S32>>()     // the index of x's matrix in a stack; none: x has one for each
                           .Arg<ffi::BufferR1<ffi::S32>>()     // how many rows of x each matrix has; none: as x has them
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

FEWBIT_MODULE(_dequant_gemm, {"fewbit_qmatmul", reinterpret_cast<void*>(fewbit::qmatmul)})
#endif
