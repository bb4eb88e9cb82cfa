// GEMM and GEMV of integer activations and integer weights on CPUs: exact sums in int32, times the scales of both.
//
// One step. vpdpbusd multiplies four unsigned bytes by four signed ones and adds them, in each lane of 32 bits. The weight is the
// unsigned side: 8 or 128 is added by an exclusive or when it is packed. x is the signed side, because that operand can be a
// broadcast from memory. The added 128 times the row sum of x does not depend on w: sums start at its negative. The zero points
// of w join it; those of x need the sums of w, which are the product with one more row of ones. A step may wrap around,
// the result does not. Without VNNI a step is products of 16 bits, since AVX2's byte instruction saturates; numbers of w up to 63
// are small enough for it, and panels add up to 8 groups of four of them in 16 bits.
// AMX (int8/amx.h) multiplies tiles of 16 rows by 64 bytes: whole rows in 0.5 to 0.7 of the time, blocks of 64 in 0.7
// to 0.8.
// On arm64 sdot takes signed bytes on both sides, and so does smmla, which panels take where the processor has it (i8mm): two rows
// of x by two outputs, eight bytes of each. Processors without either widen products to 16 bits.
//
// Packing. Strips of 64 outputs by 256 contracted elements (16 KiB) are packed in groups of four bytes, from [N, K] by
// transposing 16 x 16 words, from [K, N] by interleaving four rows. Low and high halves of 4-bit codes make two groups; x is
// packed in the same order, block after block as it is read.
//
// Micro-kernel. 6 rows of x by 4 vectors of outputs: 24 sums in registers. At the end of a block of scales the sums are
// multiplied by the scale of w and added in float32, which stays in L1 for the panel's other blocks. A row of x with one
// scale is multiplied by it at the end.
//
// Order of reading w: 16 rows, four cache lines wide, with the line 16 rows below prefetched for [K, N]; the next line of each
// row for [N, K].
//
// GEMV (up to 4 rows of x) does not pack: whole rows of w are multiplied in place (gemv_rows.h), memory bound; [K, N] interleaves
// rows of w in registers (gemv_columns.h). Weights with block scales and any table of int8 numbers: [N, K] in blocks.h; for more than
// 12 rows of x, and of [K, N], pieces of such a weight are decoded to bytes, and packed and multiplied like the others.
//
// Bound of the GEMM: vpdpbusd's own rate. Measurements, and what did not pay: docs/design/kernels-cpu.md.
#define FEWBIT_UNITS 3  // the handler with plain C++, AVX2, AVX-512 and AMX

#include "int8/kernels.h"

#if FEWBIT_IN_UNIT(0)
#include <cstring>

#include "cpp/buffers.h"
#include "cpp/checks.h"
#include "cpp/python_module.h"
#include "cpp/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace fewbit {

namespace ffi = xla::ffi;

// The numbers of one matrix of a stack: `count` is 0 where there are none.
template <class Number>
struct Stacked {
  PerTile<Number> first;
  int64_t step;  // to those of the next matrix
  // Of matrix b, from a row on that begins a tile.
  PerTile<Number> At(int64_t b, int64_t row = 0) const {
    PerTile<Number> at = first;
    if (at.data != nullptr) at.data += b * step + row / at.tile * at.by_row;
    return at;
  }
};

// `rows_first`: whether the axis of rows (or outputs) comes before that of the contraction.
template <class Number, class Buffer>
static Stacked<Number> StackedOf(const Buffer& buffer, bool rows_first, int64_t row_tile) {
  const auto shape = buffer.dimensions();
  const int64_t rows = shape[rows_first ? 1 : 2], tiles = shape[rows_first ? 2 : 1];
  const int64_t by_row = rows == 1 ? 0 : rows_first ? tiles : 1, by_tile = tiles == 1 ? 0 : rows_first ? 1 : rows;
  const Number* data = buffer.element_count() == 0 ? nullptr : buffer.typed_data();
  return {{data, row_tile, by_row, by_tile}, shape[0] == 1 ? 0 : rows * tiles};
}

// One number for each tile of rows (or outputs) and of the contraction, or one for all of an axis.
static void CheckPerTile(const char* name, Dimensions shape, int64_t batch, int64_t rows, int64_t tiles, bool rows_first,
                         Checks& checks) {
  checks.OneOf({"matrices of the ", name}, shape[0], {1, batch});
  checks.OneOf({"rows of the ", name}, shape[rows_first ? 1 : 2], {1, rows});
  checks.OneOf({"tiles of the ", name}, shape[rows_first ? 2 : 1], {1, tiles});
}

// The matrices that groups of rows are multiplied with: one for each group.
static void CheckGroups(const ffi::BufferR1<ffi::S32>& sizes, int64_t batch, int64_t stacked, Checks& checks) {
  const int64_t count = static_cast<int64_t>(sizes.element_count());
  if (count == 0) return;
  checks.Equal("batch of x", batch, 1);
  checks.Equal("number of groups", count, stacked);
  for (int64_t g = 0; g < count && !checks.failed(); ++g) checks.AtLeast("size of a group", sizes.typed_data()[g], 0);
}

// Zeros in the rows after the last group.
static void ClearRest(const std::vector<Group>& groups, ffi::Result<ffi::AnyBuffer>& y) {
  const int64_t rows = y->dimensions()[0] * y->dimensions()[1], row = static_cast<int64_t>(y->size_bytes()) / rows;
  const int64_t done = groups.empty() ? 0 : groups.back().m0 + groups.back().rows;
  std::memset(static_cast<char*>(y->untyped_data()) + done * row, 0, (rows - done) * row);
}

// What the memory of a call is for: the rows of x as a kernel reads them.
struct LaidRows {};

// All chunks, by several threads where they take longer than waking one: `least` multiply-adds.
template <class Run>
static void RunChunks(ffi::ThreadPool pool, int64_t chunks, int64_t multiplications, int64_t least, const Run& run, const Reads& reads = {}) {
  if (multiplications >= least) ParallelFor(pool, chunks, run, reads);
  else for (int64_t chunk = 0; chunk < chunks; ++chunk) run(chunk);
}

// One matrix, after its rows of x are laid out. Those of `blocks` that come in another order are put in that of w before.
static void Multiply(ffi::ThreadPool pool, const Kernels& kernels, IntegerJob& job, const int8_t* rows) {
  const std::vector<Segment> segments = SegmentsOf(job);
  const BlockJob* blocks = job.blocks;
  const bool is_in_order = blocks == nullptr || (blocks->order == nullptr && blocks->K == job.K);
  const int64_t row = kernels.row_bytes(job, segments), ordered = is_in_order ? 0 : (job.K + 3) / 4 * 4, block = kernels.rows;
  const CallMemory<LaidRows> memory(job.M * (row + ordered + job.tiles() * TilesOfX::kBytes));  // rows are whole groups of four bytes: the sums are aligned
  int8_t* laid = reinterpret_cast<int8_t*>(memory.data());
  const TilesOfX tiles(job, memory.data() + job.M * row);
  job.x = laid, tiles.SetIn(&job);
  if (!is_in_order) {
    int8_t* copied = laid + job.M * (row + job.tiles() * TilesOfX::kBytes);
    ParallelFor(pool, job.M, [&](int64_t m) { OrderRow(*blocks, rows + m * blocks->K, copied + m * job.K); });
    rows = copied;
  }
  const auto prepare = [&](int64_t i) { kernels.prepare(job, segments, rows, i * block, laid, tiles); };
  ParallelFor(pool, (job.M + block - 1) / block, prepare);
  const auto run = [&](int64_t chunk) { kernels.run(job, segments, chunk); };
  RunChunks(pool, kernels.chunks(job), job.M * job.N * job.K, 1 << 19, run);
}

static ffi::Error Integers(ffi::ThreadPool pool, ffi::BufferR3<ffi::U8> x, ffi::BufferR3<ffi::F32> x_scale,
                           ffi::BufferR3<ffi::S32> x_zero, ffi::BufferR3<ffi::U8> w, ffi::BufferR3<ffi::F32> w_scale,
                           ffi::BufferR3<ffi::S32> w_zero, ffi::BufferR1<ffi::S32> sizes, ffi::Result<ffi::AnyBuffer> y,
                           bool contracts_cols, int64_t bits,
                           int64_t offset, int64_t tile, int64_t output_tile, int64_t level) {
  IntegerJob job{};
  const auto x_shape = x.dimensions(), w_shape = w.dimensions(), y_shape = y->dimensions();
  const auto kind = y->element_type();
  Checks checks("integers");
  checks.That(kind == ffi::F32 || kind == ffi::BF16 || kind == ffi::F16, "the result must be float32, bfloat16 or float16");
  checks.Equal("axes of the result", static_cast<int64_t>(y_shape.size()), 3);
  checks.OneOf("bits of a code", bits, {4, 8});
  checks.OneOf("offset", offset, {0, 8, 128});
  checks.AtLeast("tile", tile, 1);
  checks.AtLeast("tile of the outputs", output_tile, 1);
  checks.Within("level", level, -1, 4);
  if (checks.failed()) return checks.error();
  checks.Equal("batch of the result", y_shape[0], x_shape[0]);
  checks.Equal("rows of the result", y_shape[1], x_shape[1]);
  const int64_t matrices = sizes.element_count() == 0 ? x_shape[0] : w_shape[0];
  if (sizes.element_count() == 0) checks.OneOf("matrices of the codes", w_shape[0], {1, x_shape[0]});
  CheckGroups(sizes, x_shape[0], w_shape[0], checks);
  checks.Equal("outputs of the codes", w_shape[contracts_cols ? 1 : 2], y_shape[2]);
  checks.Equal("contracted bytes of the codes", w_shape[contracts_cols ? 2 : 1], BytesOf(x_shape[2], bits));
  checks.That(bits == 8 || tile % 2 == 0 || tile >= x_shape[2], "tiles must not cut bytes of two codes");
  const int64_t row_count[] = {x_shape[1], TilesOf(y_shape[2], output_tile)}, tile_count = TilesOf(x_shape[2], tile);
  CheckPerTile("scales of x", x_scale.dimensions(), x_shape[0], row_count[0], tile_count, true, checks);
  CheckPerTile("scales of the codes", w_scale.dimensions(), matrices, row_count[1], tile_count, contracts_cols, checks);
  if (x_zero.element_count() != 0) {
    CheckPerTile("zero points of x", x_zero.dimensions(), x_shape[0], row_count[0], tile_count, true, checks);
  }
  if (w_zero.element_count() != 0) {
    CheckPerTile("zero points of the codes", w_zero.dimensions(), matrices, row_count[1], tile_count, contracts_cols, checks);
  }
  if (checks.failed()) return checks.error();
  if (y->element_count() == 0) return ffi::Error::Success();
  if (x_shape[2] == 0) {  // a sum of nothing
    std::memset(y->untyped_data(), 0, y->size_bytes());
    return ffi::Error::Success();
  }
  job.y_kind = kind == ffi::F32 ? Float::kF32 : kind == ffi::BF16 ? Float::kBF16 : Float::kF16;
  job.K = x_shape[2], job.N = y_shape[2], job.tile = tile;
  job.contracts_cols = contracts_cols, job.bits = static_cast<int>(bits), job.offset = offset, job.row_stride = w_shape[2];
  job.largest = (1 << bits) - 1;
  const auto x_scales = StackedOf<float>(x_scale, true, 1);
  const auto x_zeros = StackedOf<int32_t>(x_zero, true, 1);
  const auto w_scales = StackedOf<float>(w_scale, contracts_cols, output_tile);
  const auto w_zeros = StackedOf<int32_t>(w_zero, contracts_cols, output_tile);
  const std::vector<Group> groups = GroupsOf(sizes, x_shape[0], x_shape[1], 0);
  ClearRest(groups, y);
  for (const Group& one : groups) {
    const int64_t b = one.m0 / x_shape[1], row = one.m0 % x_shape[1];
    job.M = one.rows;
    job.w = w.typed_data() + (w_shape[0] == 1 ? 0 : one.matrix * w_shape[1] * w_shape[2]);
    job.x_scale = x_scales.At(b, row), job.x_zero = x_zeros.At(b, row);
    job.w_scale = w_scales.At(one.matrix), job.w_zero = w_zeros.At(one.matrix);
    job.y = static_cast<char*>(y->untyped_data()) + one.m0 * job.N * SizeOf(job.y_kind);
    const Kernels kernels = KernelsFor(IsaOfJob(ByteDotIsaOf(level), job.M, job.tile));
    Multiply(pool, kernels, job, reinterpret_cast<const int8_t*>(x.typed_data()) + one.m0 * job.K);
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(integers, Integers,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::BufferR3<ffi::U8>>()   // x [B, M, K]: the bits of int8
                           .Arg<ffi::BufferR3<ffi::F32>>()  // its scales [B or 1, M or 1, tiles or 1]
                           .Arg<ffi::BufferR3<ffi::S32>>()  // its zero points, likewise; empty: none
                           .Arg<ffi::BufferR3<ffi::U8>>()   // codes [B or 1, rows, cols], the contracted axis in bytes
                           .Arg<ffi::BufferR3<ffi::F32>>()  // their scales, by tiles of rows and columns
                           .Arg<ffi::BufferR3<ffi::S32>>()  // their zero points, likewise; empty: none
                           .Arg<ffi::BufferR1<ffi::S32>>()  // rows of x for each matrix, whose B is 1; empty: b for b
                           .Ret<ffi::AnyBuffer>()           // y [B, M, N]
                           .Attr<bool>("contracts_cols")
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("offset")
                           .Attr<int64_t>("tile")
                           .Attr<int64_t>("output_tile")
                           .Attr<int64_t>("level"));

// The shapes of a stack of codes [`stacked`, N, bytes of K] or [`stacked`, bytes of K, N], of its scales and of its zero points.
static bool FitsBlocks(const BlockJob& job, int64_t stacked, Dimensions codes, Dimensions scale, Dimensions zero, Checks& checks) {
  checks.Within("bits of a code", job.w.bits, 1, 8);
  checks.AtLeast("rows of a tile", job.w.row_tile, 1);
  checks.AtLeast("columns of a tile", job.w.col_tile, 1);
  if (!checks.Within("depth of the codes", job.depth(), job.K, job.K + (job.group == 0 ? 0 : job.group - 1))) return false;
  const int64_t n = job.contracts_cols ? 1 : 2, k = 3 - n;  // the axes of outputs and of the contraction
  checks.Equal("outputs of the codes", codes[n], job.N);
  checks.Equal("contracted bytes of the codes", codes[k], BytesOf(job.depth(), job.w.bits));
  checks.AtLeast("places of a block", job.block, 1);
  if (checks.failed()) return false;
  checks.That(job.block % 16 == 0 || job.block >= job.depth(), "blocks must be whole groups of 16 codes");
  checks.That(job.tile() % job.block == 0 || job.tile() >= job.depth(), "tiles must be whole blocks");
  const int64_t rows = TilesOf(job.w.rows, job.w.row_tile), cols = TilesOf(job.w.cols, job.w.col_tile);
  checks.OneOf("matrices of the scales", scale[0], {1, stacked});
  checks.Equal("rows of the scales", scale[1], rows);
  checks.Equal("columns of the scales", scale[2], cols);
  if (job.w.role == Zero::kNone) return !checks.failed();
  checks.OneOf("matrices of the zero points", zero[0], {1, stacked});
  checks.Equal("rows of the zero points", zero[1], rows);
  return checks.Equal("columns of the zero points", zero[2], cols);
}

// One matrix, in place.
static void MultiplyBlocks(ffi::ThreadPool pool, const Kernels& kernels, BlockJob& job, const int8_t* rows, const Reads& reads) {
  const int64_t row = (kernels.block_row_bytes(job) + 3) / 4 * 4;
  const CallMemory<LaidRows> memory(job.M * (row + job.blocks() * static_cast<int64_t>(sizeof(BlockOfX))));
  int8_t* laid = reinterpret_cast<int8_t*>(memory.data());
  job.x = laid, job.x_blocks = reinterpret_cast<BlockOfX*>(memory.data() + job.M * row);
  const auto lay = [&](int64_t m) { kernels.lay_blocks(job, rows, m, laid); };
  if (job.M < 8) for (int64_t m = 0; m < job.M; ++m) lay(m);
  else ParallelFor(pool, job.M, lay);
  const auto run = [&](int64_t chunk) { kernels.run_blocks(job, chunk); };
  RunChunks(pool, kernels.block_chunks(job), job.M * job.N * job.K, 1 << 18, run, reads);
}

static ffi::Error Blocks(ffi::ThreadPool pool, ffi::BufferR3<ffi::U8> x, ffi::BufferR3<ffi::F32> x_scale, ffi::BufferR3<ffi::U8> codes,
                         ffi::AnyBuffer scale, ffi::BufferR1<ffi::F32> scale_table, ffi::AnyBuffer zero,
                         ffi::BufferR1<ffi::F32> zero_table, ffi::BufferR1<ffi::F32> tensor_scale, ffi::BufferR1<ffi::S8> numbers,
                         ffi::BufferR1<ffi::S32> picked, ffi::BufferR1<ffi::S32> sizes, ffi::Result<ffi::AnyBuffer> y, bool contracts_cols, int64_t depth, int64_t bits,
                         int64_t row_tile, int64_t col_tile, int64_t block, int64_t role, float unit, bool is_signed, int64_t level, ffi::Span<const int32_t> order) {
  BlockJob job{};
  Checks checks("blocks of integers");
  const auto x_shape = x.dimensions(), y_shape = y->dimensions(), shape = codes.dimensions();
  const auto scale_shape = scale.dimensions(), zero_shape = zero.dimensions();
  checks.That(FloatOf(y->element_type(), &job.y_kind), "the result must be float32, bfloat16 or float16");
  checks.That(StoredScalesOf(scale, scale_table, &job.w.scale), "scales must be floats, or bytes with a table of 256 numbers");
  checks.That(StoredScalesOf(zero, zero_table, &job.w.zero), "zero points must be floats, or bytes with a table of 256 numbers");
  checks.Equal("axes of the result", static_cast<int64_t>(y_shape.size()), 3);
  checks.Equal("axes of the scales", static_cast<int64_t>(scale_shape.size()), 3);
  checks.Equal("axes of the zero points", static_cast<int64_t>(zero_shape.size()), 3);
  checks.Within("role of the zero points", role, 0, 2);
  checks.Within("level", level, -1, 4);
  if (checks.failed()) return checks.error();
  const int64_t batch = x_shape[0], stacked = shape[0], picks = static_cast<int64_t>(picked.element_count());
  job.M = x_shape[1], job.K = x_shape[2], job.N = y_shape[2];
  job.w.bits = static_cast<int>(bits), job.w.row_tile = row_tile, job.w.col_tile = col_tile;
  job.w.role = static_cast<Zero>(role), job.group = static_cast<int64_t>(order.size()), job.contracts_cols = contracts_cols;
  job.w.rows = contracts_cols ? job.N : depth, job.w.cols = contracts_cols ? depth : job.N, job.block = block;
  checks.Equal("batch of the result", y_shape[0], batch);
  checks.Equal("rows of the result", y_shape[1], job.M);
  checks.Within("number of picked matrices", picks, 0, 1);
  checks.That(picks == 0 || sizes.element_count() == 0, "a matrix is picked, and rows have groups; one of the two is expected");
  CheckGroups(sizes, batch, stacked, checks);
  if (picks != 0) checks.Equal("batch of x", batch, 1);
  else if (sizes.element_count() == 0) checks.OneOf("matrices of the codes", stacked, {1, batch});
  if (!FitsBlocks(job, stacked, shape, scale_shape, zero_shape, checks)) return checks.error();
  if (job.group != 0) {
    checks.Equal("codes beyond whole groups of the order", depth % job.group, 0);
    checks.That(block % job.group == 0 || block >= depth, "blocks must be whole groups of the order");
    for (const int32_t place : order) checks.Within("a place of the order", place, 0, job.group - 1);
  }
  CheckPerTile("scales of x", x_scale.dimensions(), batch, job.M, job.blocks(), true, checks);
  const int64_t tensor_scales = static_cast<int64_t>(tensor_scale.element_count());
  checks.OneOf("tensor scales", tensor_scales, {0, 1, stacked});
  const int64_t count = static_cast<int64_t>(numbers.element_count());
  checks.Equal("numbers of the codes", count, bits == 8 ? 0 : 1 << bits);
  for (int64_t i = 0; !checks.failed() && i < count; ++i) checks.Within("a number", numbers.typed_data()[i], -127, 127);
  if (checks.failed()) return checks.error();
  if (y->element_count() == 0) return ffi::Error::Success();
  if (job.K == 0 || stacked == 0) {  // a sum of nothing
    std::memset(y->untyped_data(), 0, y->size_bytes());
    return ffi::Error::Success();
  }
  if (bits != 8) SetNumbers(numbers.typed_data(), &job);
  else SetNumbers(is_signed, &job);
  job.order = job.group == 0 ? nullptr : order.begin();
  job.w.row_stride = shape[2], job.w.packed_cols = contracts_cols, job.w.tiles_per_row = scale_shape[2];
  const auto x_scales = StackedOf<float>(x_scale, true, 1);
  const Weight first = job.w;
  const int64_t scales = scale_shape[0] == 1 ? 0 : scale_shape[1] * scale_shape[2];
  const int64_t zeros = role == 0 || zero_shape[0] == 1 ? 0 : zero_shape[1] * zero_shape[2];
  const int64_t asked = picks == 0 ? 0 : picked.typed_data()[0];
  const int64_t first_matrix = asked < 0 ? 0 : asked < stacked ? asked : stacked - 1;
  const std::vector<Group> groups = GroupsOf(sizes, batch, x_shape[1], first_matrix);
  ClearRest(groups, y);
  for (const Group& one : groups) {
    const int64_t matrix = stacked == 1 ? 0 : one.matrix;
    const int8_t* rows = reinterpret_cast<const int8_t*>(x.typed_data()) + one.m0 * job.K;
    job.M = one.rows;
    job.w.codes = codes.typed_data() + matrix * shape[1] * shape[2];
    job.w.scale.data = static_cast<const char*>(first.scale.data) + matrix * scales * SizeOf(first.scale.type);
    job.w.zero.data = static_cast<const char*>(first.zero.data) + matrix * zeros * SizeOf(first.zero.type);
    job.w.unit = tensor_scales == 0 ? unit : unit * tensor_scale.typed_data()[tensor_scales == 1 ? 0 : matrix];
    job.x_scale = x_scales.At(one.m0 / x_shape[1], one.m0 % x_shape[1]);
    job.y = static_cast<char*>(y->untyped_data()) + one.m0 * job.N * SizeOf(job.y_kind);
    const Kernels kernels = KernelsFor(IsaOfJob(ByteDotIsaOf(level), job.M, job.block));
    if (kernels.takes_panels(job)) {
      IntegerJob panels = kernels.panels_of(job);
      Multiply(pool, kernels, panels, rows);
    } else {
      MultiplyBlocks(pool, kernels, job, rows, ReadsOf(job.w, shape, scale_shape, zero_shape));
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(blocks, Blocks,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::BufferR3<ffi::U8>>()   // x [B, M, K]: the bits of int8
                           .Arg<ffi::BufferR3<ffi::F32>>()  // its scales [B or 1, M or 1, blocks or 1]
                           .Arg<ffi::BufferR3<ffi::U8>>()   // codes [B or 1, N, bytes of K] or [B or 1, bytes of K, N]; of a stack that one is picked of, any number
                           .Arg<ffi::AnyBuffer>()           // scales [stack or 1, tiles of rows, tiles], as they are stored
                           .Arg<ffi::BufferR1<ffi::F32>>()  // the numbers of stored scales, if they are bytes
                           .Arg<ffi::AnyBuffer>()           // zero points, like scales
                           .Arg<ffi::BufferR1<ffi::F32>>()
                           .Arg<ffi::BufferR1<ffi::F32>>()  // tensor scales, none or one or one a matrix
                           .Arg<ffi::BufferR1<ffi::S8>>()   // the integer of each code of fewer than 8 bits
                           .Arg<ffi::BufferR1<ffi::S32>>()  // the matrix of the stack; empty: b for b
                           .Arg<ffi::BufferR1<ffi::S32>>()  // rows of x for each matrix, whose B is 1; empty: none
                           .Ret<ffi::AnyBuffer>()           // y [B, M, N]
                           .Attr<bool>("contracts_cols")
                           .Attr<int64_t>("depth")
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("row_tile")
                           .Attr<int64_t>("col_tile")
                           .Attr<int64_t>("block")
                           .Attr<int64_t>("role")
                           .Attr<float>("unit")
                           .Attr<bool>("is_signed")
                           .Attr<int64_t>("level")
                           .Attr<ffi::Span<const int32_t>>("order"));

}  // namespace fewbit

// ISA is avx2 with VNNI and without.
FEWBIT_MODULE(_int8_gemm, {"fewbit_integers", reinterpret_cast<void*>(fewbit::integers)},
              {"fewbit_integer_blocks", reinterpret_cast<void*>(fewbit::blocks)})
#endif
