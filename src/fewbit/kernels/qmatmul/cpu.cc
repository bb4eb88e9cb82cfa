// The product of a float matrix and a quantized one on CPUs: y = x w, exact in what the codes mean, summed in float32.
//
// Layout. A weight is a matrix of codes as it lies in memory, rows by columns, its codes packed along either axis, and either
// axis contracted (job.h): [N, K] and [K, N], a product and its gradient, are all four the same call. Nothing is repacked.
// Where a container permutes its codes, x or y is permuted instead. Scales are read in their stored form: float32, bfloat16,
// float16, or bytes through a table of 256 numbers (E8M0, E4M3, scales that are quantized themselves).
//
// A few rows of x (up to 4; dots.h, vectors.h). The weight is read once, so the bound is memory, and the aim is to decode as
// fast as bytes come. 64 bytes are loaded as 16 lanes of 32 bits. Shifting all lanes by 4 i brings code i of each lane to the
// low bits, and one permutation of 16 floats turns 16 of them into numbers, since it looks at four bits of each index only: two
// instructions and a multiply-add for 16 weights, whatever the 4-bit format. So a lane holds 8 neighbouring codes. Along a
// contraction x is laid out to match once a call (BlockedX), which is O(M K); each lane keeps its own sum, and takes its own
// scale after 8 codes, so a tile may be any multiple of 8. Which tile each lane of a block lies in is a pattern of 16 places,
// made once a chunk, so that one kernel serves tiles of any length; the sum of a tile of several blocks waits in its registers
// until the tile ends. Offsets meet the sums of x over their tiles, which are made once a call. Along outputs a lane's bytes are
// neighbouring outputs, put in order when they are stored; eight rows are taken at a time, in runs of up to 1 KiB, while the
// next eight are prefetched. 1 and 2 bits go the same way. Bytes along a row: a permutation puts one of each lane into the low
// bits of 2**23, a float from which a subtraction leaves the number; down columns a shift and a mask do (Whole). fp8 goes by way
// of float16, whose bits hold theirs. Codes of 3, 5 and 6 bits are cut out of their bytes first, to a byte each: along a row
// eight at a time by one instruction, down columns by two shifts where two bytes share a code. Then 5 bits are one permutation
// of two registers, 6 bits two of them, and integers of 7 bits, whose table would be eight registers, become floats by their
// bits, too. With one row of x four rows of the weight are taken together: x is loaded once for them.
//
// AVX2 and NEON go the same way with the same layout: sixteen lanes are two registers or four (sixteen.h), and only how a
// code becomes a number is their own (short_registers.h). One row of x is all that has room for its sums there; two or more
// meet panels, which are filled from the same registers. One core kept to AVX2, one row of x, 2048 x 2048 in tiles of 64
// along rows, the least of two runs of seven on a busy machine, row by row and from registers: codes of 3 bits 7.3 and 0.32
// ms, int4 3.9 and 0.60, nf4 3.6 and 0.70, int6 8.5 and 0.47, mxfp6 9.7 and 2.2, int7 8.8 and 0.51, int8 3.7 and 0.81, fp8
// 3.5 and 1.1. A table of 6 bits is 8 permutations and 7 choices there. Sums have no room to wait for the end of a tile: with
// that int8 took 1.3 times as long. On arm64 values are tested in an emulator; speed was not measured.
//
// Short rows cost as much beside their codes as with them: 1536 rows of 576 codes of Q4_1 took 65 us of one core where 576 rows
// of 1536 codes took 38. So the scales and zero points of many rows are widened together, the lanes of four rows are summed
// together, whole blocks are loaded without a mask, and where the last block is filled by half or less, that of another row
// comes into the other half. Up to 16 rows of x along a contraction are taken four at a time, while the rows of the weight lie
// in the cache.
//
// Scales that change along the contraction (across.h): x @ w with a scale for each row of w, tiles that run along the
// outputs, and so every gradient, whose weight is read along its other axis. There a tile's sum is one product long, so the
// scale meets x instead of the sum. Where rows are contracted, a lane holds 8 codes (4 of a byte) that are neighbouring
// outputs, and one product of x and scale serves them all; where columns are, x is scaled once for each row of tiles, and
// meets the bare codes of all its rows. A zero point is still subtracted from the codes, so that what is zero stays so;
// offsets meet x alone. x times a scale is rounded once more than the decoded weight would be, and overflows where it exceeds
// float32, whatever the code.
//
// Rows in groups, each with a matrix of its own (a mixture of experts), are a job for each group, whose chunks all threads
// share, as are those of a batch. How many rows a group has is read when the call is made: a few of them go the way of few
// rows, and a matrix without rows is not read.
//
// More rows (panels.h). 128 outputs by 128 places are decoded and scaled into float32, [k][n] whichever axis is contracted,
// and multiplied by blocks of 6 x 4 vectors of registers, at 24 multiply-adds for 10 loads. A block of registers walks down
// the rows of x while its part of the panel, 32 KiB, stays in the first cache; x streams past it, 24 bytes for 12 cycles.
// Along a contraction the packed bytes of 16 rows are turned before they are decoded: 64 shuffles for 2048 codes of 4 bits,
// an eighth of what turning the numbers would take. The decoding is that of vectors.h and across.h where there is one. Every
// other case (tables of 7 bits, and of 5 with AVX2 and NEON; tiles that lanes do not fit; plain C++) is decoded row by row
// (decode.h) and turned as numbers, for a few rows of x, too.
//
// Threads take chunks of outputs, and each output is summed in one order, whatever its chunk: the bits of the result are the
// same for any number of threads. Each has a share of neighbouring chunks: what a thread asks for ahead reaches into the next
// chunk, and would be read twice if that were another's. A network of many layers makes hundreds of calls of some
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
// and 55, mxfp6 56 and 58, int8 56 and 61. bench/results/qmatmul.json has a run of every scheme. Along rows one row of x
// was behind, because the bytes of a tile lie on as many pages as it has rows, at a stride that the first cache maps to one
// set of twelve lines. Eight rows at a time in runs of 1 KiB mended that: int8 1.45 to 0.93 ms, int4 0.95 to 0.60 (two
// threads, beyond the cache, one run); runs of 512 bytes 1.3 and 0.8, and asking for bytes further along the same rows, in
// place of the next rows, 1.6 and 1.0.
//
// Rows along the contraction, two cores, weights beyond the caches, medians of 12 rounds in turns with a plain read of the same
// bytes: int8 4096 x 4096 0.65 ms beside 0.55 (26 GB/s; a copy of 64 MiB reads and writes 52), q8_0 0.70 and 0.59, int4 in
// tiles of 64 0.45 and 0.32. SmolLM2's products for one token, 30 layers one after the other: q, k and v 0.74 ms and 0.45, the
// output 0.49 and 0.29, gate and up 2.02 and 1.27, down 1.09 and 0.68; the head, 8 bits, 1.48 and 1.08. Before patterns, sums
// that wait and bytes by permutation these took 1.04 to 1.11 times as long, tiles of 40 2.5 times, int4 and uint4 about as
// long; int3 in tiles of 64 and mxfp6, whose blocks are short, 0.9 times. Bytes are asked for into the second cache, 4 KiB
// ahead or as far as the next rows; where a block has 64 codes or fewer, into the first one 1 KiB ahead besides, which made
// int8 faster by 5 in 100 and int4 slower by 8. Without any, products took 1.2 to 2 times as long. One thread takes as long
// from memory as from the caches (gate and up, 13 GB/s): what it computes bounds it. Two would read 27 GB/s so, which is all
// that plain reading gets, and read 16: near the limit each line comes later than it was asked for. That is what stands between
// a token of SmolLM2 and twice the speed of llama.cpp: in the trace of one, 5.1 of 5.6 ms were products; in the rounds above
// they took 5.8 ms for a token, and plain reading 3.8.
//
// What did not pay. Codes in natural order in the lanes: two more instructions on the port that permutes. Loads at each of the
// four bytes of a lane, in place of more shifts: 12.0 cycles in place of 13.0 with four rows of the weight, but 16 and 19 with
// one and two, since each such load crosses a cache line. To ask for the bytes of four rows as one run: 1.0 to 1.25 times the
// time; rows from four places of a chunk: 1.5 times for short rows. More scales at once; a branch for blocks that lie in one
// tile, with AVX-512. bfloat16 products, of x in three parts or where a lower precision is asked for: that instruction
// (vdpbf16ps) makes 109 billion operations a second on one core of this processor, where multiply-adds in float32 make 217
// (nothing else in the loop), those in float16 447 and pairs of 16-bit integers 460. Sums first and zero points afterwards,
// which saves an instruction for 16 weights: a tile of zeros would no longer give exact zeros. Scales spread to one an output
// by scalar code: twice the time of the whole product. Panels [n][k], summed by lanes: each block streams from the second
// cache, and 256 rows took 1.5 times as long. Loops over rows within registers without `unroll`: GCC leaves some of them
// rolled, with their sums in memory, at 1.4 times the time.
#define FEWBIT_UNITS 5  // the handler with plain C++, AVX2, and three for AVX-512 (choice.h)

#include "levels.h"
#include "units.h"

#if FEWBIT_IN_UNIT(0)
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "buffers.h"
#include "checks.h"
#include "module.h"
#include "parallel.h"
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

// Rows of x that meet one matrix of the weight, one after the other in x and in y.
struct Group {
  int64_t m0, rows, matrix;
};

// The groups of rows: those of given sizes, which meet one matrix each, or `batch` of equally many, which meet the matrices from
// `first` on. Groups without rows are left out.
static std::vector<Group> GroupsOf(const ffi::BufferR1<ffi::S32>& sizes, int64_t batch, int64_t rows, int64_t first) {
  std::vector<Group> groups;
  const int64_t count = static_cast<int64_t>(sizes.element_count()), all = batch * rows;
  int64_t m0 = 0;
  for (int64_t g = 0; g < (count != 0 ? count : batch) && m0 < all; ++g) {
    const int64_t asked = count != 0 ? sizes.typed_data()[g] : rows, left = all - m0;
    const int64_t here = asked < 0 ? 0 : asked < left ? asked : left;
    if (here > 0) groups.push_back({m0, here, first + g});
    m0 += here;
  }
  return groups;
}

// The matrices of a stack: where each begins.
struct Matrices {
  Held scale, zero;
  const uint8_t* codes;
  const float* tensor_scale;
  int64_t bytes, scales, zeros, tensor_scales;  // of one matrix; 0 where all share one
  float unit;

  // The matrix, for a weight that says all that they have in common.
  void Take(int64_t matrix, Weight* w) const {
    w->codes = codes + matrix * bytes;
    w->scale = scale, w->zero = zero;
    w->scale.data = static_cast<const char*>(scale.data) + matrix * scales * SizeOf(scale.holder);
    if (zeros != 0) w->zero.data = static_cast<const char*>(zero.data) + matrix * zeros * SizeOf(zero.holder);
    w->unit = tensor_scale == nullptr ? unit : unit * tensor_scale[matrix * tensor_scales];
  }
};

// The shapes of a stack of codes and what lies with it.
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

// Rows of x and of the result for a weight of these lengths; an axis of codes in groups may be longer than what it stands for.
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
  checks.That(HeldOf(scale, scale_table, &w.scale), "scales must be floats, or bytes with a table of 256 numbers");
  checks.Within("role of the zero points", role, 0, 2);
  checks.That(role == 0 || (zero.dimensions().size() == 3 && HeldOf(zero, zero_table, &w.zero)),
              "zero points must have 3 axes, and be floats, or bytes with a table of 256 numbers");
  checks.Equal("length of the table of numbers", static_cast<int64_t>(values.element_count()), 256);
  const Stack stack{codes.dimensions(), scale_shape, zero.dimensions(), rows, cols, bits, row_tile, col_tile, packed_cols, role != 0};
  if (checks.failed() || !stack.Fits(checks)) return checks.error();
  CheckOrder(order, bits, packed_cols ? cols : rows, checks);
  checks.Within("kind of the codes", code_kind, 0, 4);
  checks.Within("level", level, -1, 2);
  CheckRows(x_shape, y_shape, contracts_cols ? cols : rows, contracts_cols ? rows : cols, order, packed_cols == contracts_cols, checks);
  CheckMatrices(x_shape, codes.dimensions()[0], picked, sizes, static_cast<int64_t>(tensor_scale.element_count()), checks);
  if (checks.failed()) return checks.error();
  const int64_t stacked = codes.dimensions()[0], all_rows = x_shape[0] * x_shape[1];
  if (y->element_count() == 0) return ffi::Error::Success();
  if (stacked == 0 || x_shape[2] == 0) {  // a sum of nothing
    std::memset(y->untyped_data(), 0, y->size_bytes());
    return ffi::Error::Success();
  }
  int64_t first = 0;  // the matrix of the stack that the first one of x meets
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

  const Isa isa = IsaOf(level);
  const int64_t x_bytes = SizeOf(x_kind), y_bytes = SizeOf(job.y_kind);
  const char* x_data = static_cast<const char*>(x.untyped_data());
  char* y_data = static_cast<char*>(y->untyped_data());

  // A job for each group; rows that must be laid out first are counted.
  struct Laid {
    Job job;
    int64_t steps, m0, from, chunks;  // `from`: the first of its rows among those that are laid out
  };
  std::vector<Laid> jobs;
  std::vector<int32_t> owner;  // of each row that is laid out
  int64_t chunks = 0, work = 0, met = 0, block = 16;  // `block`: what a kernel takes of a row of x at once
  bool is_blocked = false;
  for (const Group& one : GroupsOf(sizes, x_shape[0], x_shape[1], first)) {
    met = one.m0 + one.rows;
    job.M = one.rows;
    matrices.Take(one.matrix, &w);
    const int64_t steps = Steps(isa, job);
    const bool as_is = steps == 1 && job.M > 16 && x_kind == Float::kF32 && x_order == nullptr;
    job.x = as_is ? reinterpret_cast<const float*>(x_data + one.m0 * job.K * x_bytes) : nullptr;
    job.ldx = job.K;
    job.y = y_data + one.m0 * job.N * y_bytes;
    jobs.push_back({job, steps, one.m0, static_cast<int64_t>(owner.size()), ChunkCount(isa, job)});
    if (!as_is) owner.resize(owner.size() + job.M, static_cast<int32_t>(jobs.size() - 1));
    constexpr int64_t kMost = 512;  // of any kernel that takes x in order
    block = as_is ? block : std::max(block, steps > 1 ? 16 * steps : kMost);
    is_blocked = is_blocked || steps > 1;
    chunks += jobs.back().chunks, work += job.M * w.rows * w.cols;
  }
  std::memset(y_data + met * job.N * y_bytes, 0, (all_rows - met) * job.N * y_bytes);

  const int64_t length = (job.contracted() + block - 1) / block * block, ldx = length + 16;
  const int64_t held = static_cast<int64_t>(owner.size()), ld_sums = SumsOfRow(w);
  const bool has_sums = is_blocked && w.role == Zero::kOffset;
  std::unique_ptr<float[]> packed(new float[held * ldx]), blocked_memory(is_blocked ? new float[held * ldx + 16] : nullptr);
  std::unique_ptr<float[]> sums(has_sums ? new float[held * ld_sums] : nullptr);
  float* blocked = FromALine(blocked_memory.get());
  for (Laid& one : jobs) {
    if (one.job.x != nullptr) continue;
    one.job.x = (one.steps > 1 ? blocked : packed.get()) + one.from * ldx, one.job.ldx = ldx;
    if (has_sums) one.job.x_sums = sums.get() + one.from * ld_sums, one.job.ld_sums = ld_sums;
  }
  constexpr int64_t kRowsAtOnce = 16;
  ParallelFor(pool, (held + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t chunk) {
    for (int64_t i = chunk * kRowsAtOnce; i < held && i < (chunk + 1) * kRowsAtOnce; ++i) {
      const Laid& one = jobs[owner[i]];
      float* row = packed.get() + i * ldx;
      PackRow(x_data + (one.m0 + i - one.from) * job.K * x_bytes, x_kind, job.K, x_order, group, row, ldx);
      if (one.steps > 1) BlockedX(row, length, one.steps, blocked + i * ldx);
      if (has_sums) TileSums(row, w, sums.get() + i * ld_sums);
    }
  });
  const auto run = [&](int64_t chunk) {
    size_t i = 0;
    for (; chunk >= jobs[i].chunks; ++i) chunk -= jobs[i].chunks;
    Run(isa, jobs[i].job, chunk);
  };
  constexpr int64_t kWorthThreads = 1 << 16;  // multiply-adds that take longer than to tell a thread that looks
  if (work >= kWorthThreads) ParallelFor(pool, chunks, run);
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
                           .Arg<ffi::BufferR1<ffi::S32>>()     // the matrix that x meets, of a stack; none: x has one for each
                           .Arg<ffi::BufferR1<ffi::S32>>()     // how many rows of x meet each matrix; none: as x has them
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
#endif
