// The product of a float matrix and a quantized one, on CPUs.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "halves.h"
#include "isa.h"
#include "job.h"
#include "module.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace fewbit {

namespace ffi = xla::ffi;

// Memory of this thread that keeps its size from call to call, so that no page is touched for the first time twice.
static float* Workspace(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(floats + 16);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

static void StoreFloat(void* y, Float kind, int64_t at, float x) {
  if (kind == Float::kF32) {
    static_cast<float*>(y)[at] = x;
  } else {
    static_cast<uint16_t*>(y)[at] = kind == Float::kBF16 ? BrainOf(x) : HalfOf(x);
  }
}

// The outputs at places [n0, n0 + count) of row m, each where it belongs in y.
static void StoreOutputs(const Job& job, int64_t m, int64_t n0, int64_t count, const float* c) {
  if (job.order == nullptr && job.y_kind == Float::kF32) {
    std::memcpy(static_cast<float*>(job.y) + m * job.N + n0, c, count * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = job.OutputAt(n0 + i);
    if (n < job.N) StoreFloat(job.y, job.y_kind, m * job.N + n, c[i]);
  }
}

#define FEWBIT_LEVEL FEWBIT_LEVEL_PORTABLE
namespace portable {
#include "lanes.h"
#include "decode.h"
#include "panels.h"
#include "vectors.h"
}  // namespace portable
#undef FEWBIT_LEVEL

#if FEWBIT_X86
#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX2
FEWBIT_BEGIN(FEWBIT_AVX2_FEATURES)
namespace avx2 {
#include "lanes.h"
#include "decode.h"
#include "panels.h"
#include "vectors.h"
}  // namespace avx2
FEWBIT_END
#undef FEWBIT_LEVEL

#define FEWBIT_LEVEL FEWBIT_LEVEL_AVX512
FEWBIT_BEGIN(FEWBIT_AVX512_FEATURES)
namespace avx512 {
#include "lanes.h"
#include "decode.h"
#include "panels.h"
#include "vectors.h"
}  // namespace avx512
FEWBIT_END
#undef FEWBIT_LEVEL
#endif

static void RunLevel(Isa isa, ffi::ThreadPool& pool, const Job& job) {
#if FEWBIT_X86
  if (isa == Isa::kAvx512) return avx512::Run(pool, job);
  if (isa == Isa::kAvx2) return avx2::Run(pool, job);
#endif
  portable::Run(pool, job);
}

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
                          ffi::BufferR1<ffi::F32> tensor_scale, ffi::BufferR1<ffi::F32> values, ffi::Result<ffi::AnyBuffer> y,
                          bool contracts_cols, bool packed_cols, int64_t rows, int64_t cols, int64_t bits, int64_t row_tile,
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
  const int64_t batch = x_shape[0];
  job.M = x_shape[1], job.K = x_shape[2], job.N = y_shape[2];
  job.contracts_cols = contracts_cols;
  w.rows = rows, w.cols = cols, w.row_stride = codes.dimensions()[2], w.bits = static_cast<int>(bits);
  w.packed_cols = packed_cols, w.kind = static_cast<Codes>(code_kind), w.values = values.typed_data();
  w.row_tile = row_tile, w.col_tile = col_tile, w.tiles_per_row = scale_shape[2], w.role = static_cast<Zero>(role);
  const bool x_in_stream = packed_cols == contracts_cols;
  const int64_t group = static_cast<int64_t>(order.size());
  if (group != 0 && !x_in_stream) job.order = order.begin(), job.group = group;
  const int32_t* x_order = group != 0 && x_in_stream ? order.begin() : nullptr;

  constexpr int64_t kBlock = 512;  // the most codes that a kernel takes in one step
  const bool as_is = job.M > 16 && x_kind == Float::kF32 && x_order == nullptr && job.K % 16 == 0;
  job.ldx = as_is ? job.K : (job.contracted() + kBlock - 1) / kBlock * kBlock + 16;
  std::unique_ptr<float[]> packed(as_is ? nullptr : new float[job.M * job.ldx]);
  const int64_t x_bytes = x_kind == Float::kF32 ? 4 : 2, y_bytes = job.y_kind == Float::kF32 ? 4 : 2;
  const int64_t weight_bytes = codes.dimensions()[1] * codes.dimensions()[2], tiles = scale_shape[1] * scale_shape[2];
  const auto tile_bytes = [](const Held& held) { return held.holder == Holder::kF32 ? 4 : held.holder == Holder::kTable ? 1 : 2; };
  const bool one_scale = scale_shape[0] == 1, one_zero = zero.dimensions()[0] == 1;
  const int64_t zeros = role == 0 ? 0 : zero.dimensions()[1] * zero.dimensions()[2];
  const int64_t tensor_scales = static_cast<int64_t>(tensor_scale.element_count());
  const Held first_scale = w.scale, first_zero = w.zero;
  for (int64_t b = 0; b < batch; ++b) {
    const char* rows_of_x = static_cast<const char*>(x.untyped_data()) + b * job.M * job.K * x_bytes;
    if (as_is) {
      job.x = reinterpret_cast<const float*>(rows_of_x);
    } else {
      constexpr int64_t kRowsAtOnce = 16;
      ParallelFor(pool, (job.M + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t chunk) {
        for (int64_t m = chunk * kRowsAtOnce; m < job.M && m < (chunk + 1) * kRowsAtOnce; ++m) {
          PackRow(rows_of_x + m * job.K * x_bytes, x_kind, job.K, x_order, group, packed.get() + m * job.ldx, job.ldx);
        }
      });
      job.x = packed.get();
    }

    w.codes = codes.typed_data() + (codes.dimensions()[0] == 1 ? 0 : b * weight_bytes);
    w.scale.data = static_cast<const char*>(first_scale.data) + (one_scale ? 0 : b * tiles) * tile_bytes(first_scale);
    if (role != 0) w.zero.data = static_cast<const char*>(first_zero.data) + (one_zero ? 0 : b * zeros) * tile_bytes(first_zero);
    w.unit = tensor_scales == 0 ? unit : unit * tensor_scale.typed_data()[tensor_scales == 1 ? 0 : b];
    job.y = static_cast<char*>(y->untyped_data()) + b * job.M * job.N * y_bytes;
    const Isa best = BestIsa(), asked = static_cast<Isa>(level);
    RunLevel(level >= 0 && asked < best ? asked : best, pool, job);
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
