// XLA's buffers of floats and of scales, as the kernels take them.
#pragma once

#include "weight.h"
#include "xla/ffi/api/ffi.h"

namespace fewbit {

inline bool FloatOf(xla::ffi::DataType type, Float* kind) {
  if (type == xla::ffi::F32) *kind = Float::kF32;
  else if (type == xla::ffi::BF16) *kind = Float::kBF16;
  else if (type == xla::ffi::F16) *kind = Float::kF16;
  else return false;
  return true;
}

// Scales or zero points: floats, or bytes with a table of 256 numbers.
inline bool StoredScalesOf(const xla::ffi::AnyBuffer& data, const xla::ffi::BufferR1<xla::ffi::F32>& table, StoredScales* stored) {
  Float kind = Float::kF32;
  if (data.element_type() == xla::ffi::U8 && table.element_count() == 256) stored->type = ScaleType::kTable;
  else if (FloatOf(data.element_type(), &kind)) stored->type = static_cast<ScaleType>(kind);
  else return false;
  stored->data = data.untyped_data();
  stored->table = table.typed_data();
  return true;
}

inline int64_t SizeOf(Float kind) { return kind == Float::kF32 ? 4 : 2; }
inline int64_t SizeOf(ScaleType type) { return type == ScaleType::kF32 ? 4 : type == ScaleType::kTable ? 1 : 2; }

}  // namespace fewbit
