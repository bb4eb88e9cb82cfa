// Attention over a KV cache on CPUs: float or quantized, read in place.
//
// Data layout. A cache is [L, B, K, S, width]; the layer is an index, so a loop over layers copies nothing. 64 positions of a
// head are decoded to float32 and transposed, [width][position], so that vectors of positions are multiplied by one number of
// a query; the weights of the softmax then multiply vectors of the values. Both products are qmatmul's micro-kernel (microkernel.h):
// 6 rows by 4 vectors of sums in registers. Queries that share a KV head (GQA) are rows of one product: each position is read
// and decoded once for all of them. Floats are transposed in place; the codes of 64 positions are decoded as one row
// where no padding separates them.
//
// Queries that are quantized to int8 multiply int8 keys in integers, and the weights of the softmax, rounded to int8 for 64 positions
// at a time, multiply int8 values: vpdpbusd on words of four codes instead of decoding each code (int8_products.h).
//
// Online softmax (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135): weights are relative to the running
// maximum, and sums are rescaled when it grows. Scores of 64 positions at a time are in memory, no more. Positions masked for all
// rows of a chunk are not read: half of them in prefill, the unwritten part of the cache, and what is before a sliding window.
//
// Work is split by rows, and in runs of 512 positions where rows are few; runs are joined in order. The split depends on shapes
// and masks, not on threads, so any number of threads gives the same bits.
//
// Bound: computation in prefill, memory for long float caches, decoding for quantized ones (docs/design/kernels-cpu.md).
#include <cmath>
#include <cstring>
#include <memory>

#include "cpp/buffers.h"
#include "cpp/checks.h"
#include "cpp/python_module.h"
#include "cpp/memory.h"
#include "cpp/thread_pool.h"
#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace fewbit {

struct Kernels {
  void (*attend)(const Head& head, int64_t r0, int64_t rows, int64_t s0, int64_t s1, float* scratch, const Found& found);
  int64_t (*scratch)(int64_t width, int64_t rows);  // floats that `attend` needs
  void (*join)(const Found& found, int64_t row, int64_t parts, int64_t step, int64_t width, float sink, float* out);
  int64_t unit;  // what the length of a row of sums is a multiple of
};

}  // namespace fewbit

#define FEWBIT_KERNELS "attention/cpu/kernels.h"
#include "cpp/foreach_isa.h"

namespace fewbit {

namespace ffi = xla::ffi;

// The keys or the values of a cache [L, B, K, S, width or bytes].
struct Cache {
  Numbers of_head;
  int64_t batch, heads, stride, scale_heads, scale_stride;  // strides in bytes from one head to the next

  void Take(const ffi::AnyBuffer& data, const ffi::AnyBuffer& scale, const ffi::BufferR1<ffi::F32>& table,
            const ffi::BufferR1<ffi::F32>& values, int64_t bits, int64_t codes, float unit, int64_t width, Checks& checks) {
    const auto shape = data.dimensions();
    if (!checks.Equal("axes of the keys or values", static_cast<int64_t>(shape.size()), 5)) return;
    batch = shape[1], heads = shape[2];
    of_head.floats = data.untyped_data();
    of_head.is_coded = data.element_type() == ffi::U8;
    if (!of_head.is_coded) {
      checks.That(FloatOf(data.element_type(), &of_head.kind), "keys and values must be codes, float32, bfloat16 or float16");
      if (!checks.Equal("width of the keys or values", shape[4], width)) return;
      stride = shape[3] * width * SizeOf(of_head.kind);
      return;
    }
    const auto scales = scale.dimensions();
    Weight& w = of_head.codes;
    w = Weight{};
    checks.Within("bits of a code", bits, 1, 8);
    checks.Within("kind of the codes", codes, 0, 6);
    checks.Equal("length of the table of numbers", static_cast<int64_t>(values.element_count()), 256);
    checks.That(StoredScalesOf(scale, table, &w.scale), "scales must be floats, or bytes with a table of 256 numbers");
    if (!checks.Equal("axes of the scales", static_cast<int64_t>(scales.size()), 5)) return;
    checks.Equal("bytes of a position", shape[4], BytesOf(width, bits));
    checks.Equal("layers of the scales", scales[0], shape[0]);
    checks.Equal("batch of the scales", scales[1], batch);
    checks.OneOf("heads of the scales", scales[2], {1, heads});
    checks.Equal("positions of the scales", scales[3], shape[3]);
    if (!checks.Equal("scales of a position", scales[4], 1)) return;
    w.codes = data.typed_data<uint8_t>();
    w.rows = shape[3], w.cols = width, w.row_stride = shape[4], w.bits = static_cast<int>(bits), w.packed_cols = true;
    w.kind = static_cast<Codes>(codes), w.values = values.typed_data(), w.unit = unit;
    w.row_tile = 1, w.col_tile = width, w.tiles_per_row = 1, w.role = Zero::kNone;
    if (width * bits == 8 * shape[4]) w.rows = 1, w.cols *= shape[3], w.row_stride *= shape[3], w.tiles_per_row = shape[3];
    stride = shape[3] * shape[4], scale_heads = scales[2], scale_stride = scales[3] * SizeOf(w.scale.type);
  }

  Numbers At(int64_t layer, int64_t b, int64_t head) const {
    Numbers found = of_head;
    const int64_t row = layer * batch + b, offset = (row * heads + head) * stride;
    if (!found.is_coded) {
      found.floats = static_cast<const char*>(found.floats) + offset;
      return found;
    }
    found.codes.codes += offset;
    const int64_t scale_row = row * scale_heads + (scale_heads == 1 ? 0 : head);
    found.codes.scale.data = static_cast<const char*>(found.codes.scale.data) + scale_row * scale_stride;
    return found;
  }
};

static ffi::Error Attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer q_scale, ffi::AnyBuffer keys, ffi::AnyBuffer key_scale,
                            ffi::BufferR1<ffi::F32> key_table, ffi::BufferR1<ffi::F32> key_numbers, ffi::AnyBuffer values,
                            ffi::AnyBuffer value_scale, ffi::BufferR1<ffi::F32> value_table,
                            ffi::BufferR1<ffi::F32> value_numbers, ffi::BufferR1<ffi::S32> first, ffi::BufferR1<ffi::S32> seen,
                            ffi::BufferR1<ffi::F32> sinks, ffi::BufferR1<ffi::S32> layer, ffi::Result<ffi::AnyBuffer> out,
                            float soft_cap, int64_t key_bits, int64_t key_codes, float key_unit,
                            int64_t value_bits, int64_t value_codes, float value_unit, int64_t level) {
  const auto shape = q.dimensions();
  Float kind;
  Checks checks("attention");
  const bool is_int8 = q.element_type() == ffi::U8;
  checks.That(shape.size() == 4 && FloatOf(out->element_type(), &kind) && (is_int8 || out->element_type() == q.element_type()),
              "queries and result must be [B, H, T, width] of float32, bfloat16 or float16; queries may be int8 codes");
  checks.Within("level", level, -1, 2);
  if (!checks.Equal("axes of the result", static_cast<int64_t>(out->dimensions().size()), 4)) return checks.error();
  const int64_t batch = shape[0], tokens = shape[2], width = shape[3];
  Cache k, v;
  k.Take(keys, key_scale, key_table, key_numbers, key_bits, key_codes, key_unit, width, checks);
  v.Take(values, value_scale, value_table, value_numbers, value_bits, value_codes, value_unit, width, checks);
  if (checks.failed()) return checks.error();
  for (int axis = 0; axis < 4; ++axis) {
    checks.Equal("an axis of the result", out->dimensions()[axis], shape[axis]);
    checks.Equal("an axis of the values", values.dimensions()[axis], keys.dimensions()[axis]);
  }
  checks.That(q_scale.element_type() == ffi::F32, "scales of the queries must be float32");
  const int64_t q_rows = batch * shape[1] * tokens;
  checks.Equal("number of scales of the queries", static_cast<int64_t>(q_scale.element_count()), is_int8 ? q_rows : 0);
  const auto is_int8_too = [](const Cache& c) {
    return c.of_head.is_coded && c.of_head.codes.bits == 8 && c.of_head.codes.kind == Codes::kSigned;
  };
  checks.That(!is_int8 || (is_int8_too(k) && is_int8_too(v)), "keys and values of int8 queries must be int8");
  checks.AtLeast("number of layers", keys.dimensions()[0], 1);
  checks.Equal("batch of the keys", k.batch, batch);
  checks.That(k.heads > 0 && shape[1] % k.heads == 0, "the heads of the keys must divide those of the queries");
  checks.OneOf("length of where each token's window begins", static_cast<int64_t>(first.element_count()), {0, tokens});
  checks.Equal("length of what each token sees", static_cast<int64_t>(seen.element_count()), tokens);
  checks.OneOf("number of sinks", static_cast<int64_t>(sinks.element_count()), {0, shape[1]});
  checks.That(soft_cap >= 0, "the soft cap must be positive, or 0");
  checks.Equal("number of layer indices", static_cast<int64_t>(layer.element_count()), 1);
  if (checks.failed()) return checks.error();
  if (out->element_count() == 0) return ffi::Error::Success();
  const int64_t layers = keys.dimensions()[0], positions = keys.dimensions()[3], heads = k.heads, asked = layer.typed_data()[0];
  const int64_t wanted = asked < 0 ? asked + layers : asked;  // as XLA counts: from the end, and then the nearest there is
  const int64_t at = wanted < 0 ? 0 : wanted < layers ? wanted : layers - 1, rows = shape[1] / heads * tokens;
  Head any{};
  any.width = width, any.positions = positions, any.kind = kind, any.tokens = tokens, any.seen = seen.typed_data();
  any.first = first.element_count() == 0 ? nullptr : first.typed_data(), any.cap = soft_cap;
  int64_t begin = positions, most = 0;  // positions that some token sees
  for (int64_t t = 0; t < tokens; ++t) {
    begin = any.First(t) < begin ? any.First(t) : begin;
    most = any.Seen(t) > most ? any.Seen(t) : most;
  }
  begin = (begin < most ? begin : most) / kKeys * kKeys;

  constexpr int64_t kRowsOfChunk = 96, kRun = 512;
  const int64_t blocks = (rows + kRowsOfChunk - 1) / kRowsOfChunk;
  const int64_t parts = blocks == 1 && most - begin > kRun ? (most - begin + kRun - 1) / kRun : 1;
  const Kernels run = KernelsFor(IsaOf(level));
  const int64_t ld = (width + run.unit - 1) / run.unit * run.unit;
  const int64_t chunks = batch * heads * blocks * parts, step = parts > 1 ? rows : 0;
  // Of rows that several chunks share: the parts of a head's rows one after the other.
  std::unique_ptr<float[]> shared(parts > 1 ? new float[chunks * rows * (ld + 2)] : nullptr);
  const auto found_in = [&](float* memory, int64_t count) { return Found{memory, memory + count, memory + 2 * count}; };
  const Found all = found_in(shared.get(), chunks * rows);
  const auto store = [&](const Found& found, int64_t row, int64_t to, float* joined) {
    const float sink = sinks.element_count() == 0 ? -INFINITY : sinks.typed_data()[to / tokens % shape[1]];
    run.join(found, row, parts, step, width, sink, joined);
    for (int64_t j = 0; j < width; ++j) StoreFloat(out->untyped_data(), kind, to * width + j, joined[j]);
  };
  const auto attend = [&](int64_t chunk) {
    const int64_t part = chunk % parts, block = chunk / parts % blocks, head = chunk / parts / blocks;
    const int64_t r0 = block * kRowsOfChunk, count = rows - r0 < kRowsOfChunk ? rows - r0 : kRowsOfChunk;
    Head one = any;
    one.keys = k.At(at, head / heads, head % heads), one.values = v.At(at, head / heads, head % heads);
    one.queries = static_cast<const char*>(q.untyped_data()) + head * rows * width * (is_int8 ? 1 : SizeOf(kind));
    one.query_codes = is_int8 ? static_cast<const int8_t*>(one.queries) : nullptr;
    one.query_scale = is_int8 ? q_scale.typed_data<float>() + head * rows : nullptr;
    int64_t end = 0;
    for (int64_t r = r0; r < r0 + count; ++r) end = one.Seen(r) > end ? one.Seen(r) : end;
    if (parts > 1 && end > begin + (part + 1) * kRun) end = begin + (part + 1) * kRun;
    const int64_t scratch = run.scratch(width, count);
    float* memory = Workspace(scratch + count * (ld + 2) + width);
    const Found own = found_in(memory + scratch, count);
    const Found parted{all.peak + chunk * rows, all.sum + chunk * rows, all.mixed + chunk * rows * ld};
    run.attend(one, r0, count, begin + part * kRun, end, memory, parts > 1 ? parted : own);
    for (int64_t r = 0; parts == 1 && r < count; ++r) store(own, r, head * rows + r0 + r, own.mixed + count * ld);
  };
  constexpr int64_t kWorthThreads = 1 << 15;  // multiply-adds: few, since keys and values come from memory
  if (batch * heads * rows * (most - begin) * width * 2 >= kWorthThreads) ParallelFor(pool, chunks, attend);
  else for (int64_t chunk = 0; chunk < chunks; ++chunk) attend(chunk);
  std::unique_ptr<float[]> joined(new float[width]);
  for (int64_t i = 0; parts > 1 && i < batch * heads * rows; ++i) store(all, i / rows * parts * rows + i % rows, i, joined.get());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(attention, Attention,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()           // queries [B, H, T, width], or their codes
                           .Arg<ffi::AnyBuffer>()           // their scales [B, H, T, 1], if they are codes
                           .Arg<ffi::AnyBuffer>()           // keys [L, B, K, S, width], or their codes [L, B, K, S, bytes]
                           .Arg<ffi::AnyBuffer>()           // their scales [L, B, K or 1, S, 1], if they are codes
                           .Arg<ffi::BufferR1<ffi::F32>>()  // the numbers of stored scales, if they are bytes
                           .Arg<ffi::BufferR1<ffi::F32>>()  // the numbers of the format, if they are codes
                           .Arg<ffi::AnyBuffer>()           // values, and so on
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::BufferR1<ffi::F32>>()
                           .Arg<ffi::BufferR1<ffi::F32>>()
                           .Arg<ffi::BufferR1<ffi::S32>>()  // the first position that each token sees [T], or none: 0
                           .Arg<ffi::BufferR1<ffi::S32>>()  // the end of the positions that each token sees [T]
                           .Arg<ffi::BufferR1<ffi::F32>>()  // the sink of each query head [H], or none
                           .Arg<ffi::BufferR1<ffi::S32>>()  // the layer [1]
                           .Ret<ffi::AnyBuffer>()           // [B, H, T, width]
                           .Attr<float>("soft_cap")
                           .Attr<int64_t>("key_bits")
                           .Attr<int64_t>("key_codes")
                           .Attr<float>("key_unit")
                           .Attr<int64_t>("value_bits")
                           .Attr<int64_t>("value_codes")
                           .Attr<float>("value_unit")
                           .Attr<int64_t>("level"));

}  // namespace fewbit

FEWBIT_MODULE(_attention, {"fewbit_attention", reinterpret_cast<void*>(fewbit::attention)})
