// The product of two operands of integers on CPUs: exact sums in int32, times the scales of both.
//
// One step. vpdpbusd multiplies four unsigned bytes with four signed ones and adds them up, in each lane of 32 bits. The weight
// is the unsigned side: 8 or 128 is added to its numbers, which is one exclusive or where it is laid out. The signed side is x,
// because that one may come from memory as one number for all lanes. What the addition brings in, 128 times the sum of
// a row of x, depends on no weight: sums begin at its negative. So do the zero points of w; those of x need the sums of each
// output's codes, which are the product with one more row of ones. Any step may wrap around, the result does not.
//
// Without VNNI (AVX2, plain C++) a step is made of products of 16 bits: the older instruction for bytes saturates at 2**15. On
// arm64 sdot takes signed bytes on both sides, so there w is laid out signed; processors without it widen products to 16 bits.
//
// Layout. Of a strip of 64 outputs, 256 contracted places (16 KiB) are laid out in groups of four bytes, from [N, K] by
// transposing 16 x 16 words, from [K, N] by interleaving four rows; then blocks of 6 rows of x meet it, 24 sums in registers.
// Codes of 4 bits are split only when they are laid out: their low halves make one group and their high halves the next, and
// x, in the same order, costs nothing. x lies block after block in the order in which it is read. Where a tile of the contraction
// ends, its sums leave the registers: they are multiplied with the scale of w and added in float32, which stays in the first
// cache while the block meets the other tiles of its panel. A row of x that has one scale is multiplied with it at last.
//
// The order in which w is read decides. [K, N] one line of the cache wide, 256 rows down: 1.3 to 1.5 ms of a core for 16 MiB, and
// 2.2 when the next 256 rows are asked for meanwhile. 16 rows, four lines wide: 0.6, for the processor foresees lines that
// follow each other. To lay them out besides takes 2.5 ms, and 1.1 when the line 16 rows below is asked for: 8 rows take 0.9 while
// the other core rests, but nothing is gained while it works, too, for then the processor looks only half as far ahead. Of
// [N, K] 1.35, and 0.7 when the next line of each row is asked for. To ask between blocks of x for the next segment gained no more.
//
// Up to 4 rows of x and whole rows of w along their bytes skip all this: w is read once and multiplied where it lies
// (integer_few.h), and memory is the bound. One row of x, int8 and int4, 4096 x 4096, both cores, weights that rotate: 0.89 and
// 0.57 ms, where panels had taken 1.97 and 1.33 and the kernels for x in float32 take 0.98 and 0.62. Up to 4 rows and w [K, N],
// tiles or not, put rows of w side by side in registers and meet x there (integer_across.h): one row takes half to three quarters
// of what panels take on a core (int8 1.0 to 1.7 ms of 2.1 to 2.8, int4_g64 0.5 of 0.8 to 1.0; others at work beside).
//
// The bound. A block of registers reaches what the processor has: 863 billion operations a second on one core, where nothing
// but vpdpbusd gives 870 (Sapphire Rapids, AVX-512, others at work beside, processor time). To lay out 16 MiB of weight takes
// 0.7 to 1 ms of a core from the cache, a tenth of the product with 256 rows. Both cores through jit, 256 rows, 4096 x 4096,
// with panels of 32 KiB: 0.33 of the time of XLA's int8 product along rows and 0.30 along columns, 1.14 and 1.09 of that of
// torch._int_mm, which gives int32 and scales nothing. Panels of 16 KiB, of which two cores that share a first cache keep both,
// took 0.26 of XLA's time where those of 32 KiB had taken 0.30. Before w was read as told above, along columns took 1.29 of
// torch's time and tiles of 64 1.46 to 1.48; in the run after it 0.93 and 1.07 to 1.14 (docs/kernels.md has the last run).
// Tiles of 64 in 4 bits take 1.3 times as long as whole rows, where the two operations on each of 24 sums beside its 16
// products would make it 1.13; each tile in a panel of its own, its floats in the second cache, had taken 1.6. Blocks of 3
// rows, whose floats stay in registers, take as long. A loop over tiles around the registers makes GCC move all of them in each
// step (1.6 times).
//
// What was needed. torch's threads look for work for milliseconds after its product, so that whoever is timed right after it
// has one core and a half: 12.2 ms in place of 8.8, of which no tuning found any. Without being asked to unroll the loops
// over registers, GCC kept every sum in memory, too: 290 in place of 863.
#include <cstring>
#include <memory>

#include "checks.h"
#include "integer_levels.h"
#include "module.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace fewbit {

namespace ffi = xla::ffi;

// The numbers of one matrix of a stack: `count` is 0 where there are none.
template <class Number>
struct Stacked {
  PerTile<Number> first;
  int64_t step;  // to those of the next matrix
  PerTile<Number> At(int64_t b) const { return {first.data == nullptr ? nullptr : first.data + b * step, first.tile, first.by_row, first.by_tile}; }
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
static void CheckPerTile(const char* what, Dimensions shape, int64_t batch, int64_t rows, int64_t tiles, bool rows_first,
                         Checks& checks) {
  const std::string name(what);
  checks.OneOf(("matrices of the " + name).c_str(), shape[0], {1, batch});
  checks.OneOf(("rows of the " + name).c_str(), shape[rows_first ? 1 : 2], {1, rows});
  checks.OneOf(("tiles of the " + name).c_str(), shape[rows_first ? 2 : 1], {1, tiles});
}

// The memory of a call that begins on this thread. The thread keeps it for the next one while it is small: the system takes
// 1 ms of a core for each MiB of fresh pages, and to lay x out takes a seventh of that.
class CallMemory {
 public:
  explicit CallMemory(int64_t bytes) {
    constexpr int64_t kMost = 8 << 20;
    thread_local std::vector<char> kept;
    if (bytes > kMost) own_.reset(new char[bytes]);
    else if (static_cast<int64_t>(kept.size()) < bytes) kept.resize(bytes);
    data_ = bytes > kMost ? own_.get() : kept.data();
  }
  char* data() const { return data_; }

 private:
  std::unique_ptr<char[]> own_;
  char* data_;
};

static ffi::Error Integers(ffi::ThreadPool pool, ffi::BufferR3<ffi::S8> x, ffi::BufferR3<ffi::F32> x_scale,
                           ffi::BufferR3<ffi::S32> x_zero, ffi::BufferR3<ffi::U8> w, ffi::BufferR3<ffi::F32> w_scale,
                           ffi::BufferR3<ffi::S32> w_zero, ffi::Result<ffi::AnyBuffer> y, bool contracts_cols, int64_t bits,
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
  checks.Within("level", level, -1, 3);
  if (checks.failed()) return checks.error();
  checks.Equal("batch of the result", y_shape[0], x_shape[0]);
  checks.Equal("rows of the result", y_shape[1], x_shape[1]);
  checks.OneOf("matrices of the codes", w_shape[0], {1, x_shape[0]});
  checks.Equal("outputs of the codes", w_shape[contracts_cols ? 1 : 2], y_shape[2]);
  checks.Equal("contracted bytes of the codes", w_shape[contracts_cols ? 2 : 1], BytesOf(x_shape[2], bits));
  checks.That(bits == 8 || tile % 2 == 0 || tile >= x_shape[2], "tiles must not cut bytes of two codes");
  const int64_t row_count[] = {x_shape[1], TilesOf(y_shape[2], output_tile)}, tile_count = TilesOf(x_shape[2], tile);
  CheckPerTile("scales of x", x_scale.dimensions(), x_shape[0], row_count[0], tile_count, true, checks);
  CheckPerTile("scales of the codes", w_scale.dimensions(), x_shape[0], row_count[1], tile_count, contracts_cols, checks);
  if (x_zero.element_count() != 0) {
    CheckPerTile("zero points of x", x_zero.dimensions(), x_shape[0], row_count[0], tile_count, true, checks);
  }
  if (w_zero.element_count() != 0) {
    CheckPerTile("zero points of the codes", w_zero.dimensions(), x_shape[0], row_count[1], tile_count, contracts_cols, checks);
  }
  if (checks.failed()) return checks.error();
  if (y->element_count() == 0) return ffi::Error::Success();
  if (x_shape[2] == 0) {  // a sum of nothing
    std::memset(y->untyped_data(), 0, y->size_bytes());
    return ffi::Error::Success();
  }
  job.y_kind = kind == ffi::F32 ? Float::kF32 : kind == ffi::BF16 ? Float::kBF16 : Float::kF16;
  job.M = x_shape[1], job.K = x_shape[2], job.N = y_shape[2], job.tile = tile;
  job.contracts_cols = contracts_cols, job.bits = static_cast<int>(bits), job.offset = offset, job.row_stride = w_shape[2];
  const auto x_scales = StackedOf<float>(x_scale, true, 1);
  const auto x_zeros = StackedOf<int32_t>(x_zero, true, 1);
  const auto w_scales = StackedOf<float>(w_scale, contracts_cols, output_tile);
  const auto w_zeros = StackedOf<int32_t>(w_zero, contracts_cols, output_tile);
  const std::vector<Segment> segments = SegmentsOf(job);
  const int64_t batch = x_shape[0], tiles = job.tiles();
  const IntegerIsa isa = IntegerIsaOf(level);
  job.x_zero = x_zeros.At(0);
  const int64_t row = IntegerRowBytes(isa, job, segments);
  const CallMemory memory(job.M * (row + tiles * 4));  // rows are whole groups of four bytes, so that the sums are aligned
  int8_t* laid = reinterpret_cast<int8_t*>(memory.data());
  int32_t* sums = reinterpret_cast<int32_t*>(memory.data() + job.M * row);
  job.x = laid, job.x_sums = sums;
  for (int64_t b = 0; b < batch; ++b) {
    const int8_t* rows = x.typed_data() + b * job.M * job.K;
    const int64_t block = IntegerRows(isa);
    const auto prepare = [&](int64_t i) { Prepare(isa, job, segments, rows, i * block, laid, sums); };
    ParallelFor(pool, (job.M + block - 1) / block, prepare);
    job.w = w.typed_data() + (w_shape[0] == 1 ? 0 : b * w_shape[1] * w_shape[2]);
    job.x_scale = x_scales.At(b), job.x_zero = x_zeros.At(b), job.w_scale = w_scales.At(b), job.w_zero = w_zeros.At(b);
    job.y = static_cast<char*>(y->untyped_data()) + b * job.M * job.N * (job.y_kind == Float::kF32 ? 4 : 2);
    const auto run = [&](int64_t chunk) { RunIntegers(isa, job, segments, chunk); };
    constexpr int64_t kWorthThreads = 1 << 19;  // multiply-adds that take longer, about 10 us, than waking a thread
    const int64_t chunks = IntegerChunks(isa, job);
    if (job.M * job.N * job.K >= kWorthThreads) ParallelFor(pool, chunks, run);
    else for (int64_t chunk = 0; chunk < chunks; ++chunk) run(chunk);
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(integers, Integers,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::BufferR3<ffi::S8>>()   // x [B, M, K]
                           .Arg<ffi::BufferR3<ffi::F32>>()  // its scales [B or 1, M or 1, tiles or 1]
                           .Arg<ffi::BufferR3<ffi::S32>>()  // its zero points, likewise; empty: none
                           .Arg<ffi::BufferR3<ffi::U8>>()   // codes [B or 1, rows, cols], the contracted axis in bytes
                           .Arg<ffi::BufferR3<ffi::F32>>()  // their scales, by tiles of rows and columns
                           .Arg<ffi::BufferR3<ffi::S32>>()  // their zero points, likewise; empty: none
                           .Ret<ffi::AnyBuffer>()           // y [B, M, N]
                           .Attr<bool>("contracts_cols")
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("offset")
                           .Attr<int64_t>("tile")
                           .Attr<int64_t>("output_tile")
                           .Attr<int64_t>("level"));

}  // namespace fewbit

// ISA names the level of these kernels, which have one more than others.
FEWBIT_MODULE(_integers, {"fewbit_integers", reinterpret_cast<void*>(fewbit::integers)})
