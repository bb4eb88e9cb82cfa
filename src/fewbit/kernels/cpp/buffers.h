// XLA's buffers of floats, of scales and of group sizes, as the kernels take them.
#pragma once

#include <cstdint>
#include <vector>

#include "checks.h"
#include "thread_pool.h"
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

// What a product with one matrix reads. The shapes are those of stacks, whose first axis counts the matrices.
inline Reads ReadsOf(const Weight& w, Dimensions codes, Dimensions scale, Dimensions zero) {
  const auto read = [](const void* data, Dimensions shape, int64_t bytes) {
    return Reads::Span{static_cast<const char*>(data), shape[1] * shape[2] * bytes};
  };
  Reads reads{read(w.codes, codes, 1), read(w.scale.data, scale, SizeOf(w.scale.type)), {}};
  if (w.role != Zero::kNone) reads.zeros = read(w.zero.data, zero, SizeOf(w.zero.type));
  return reads;
}

// Contiguous rows of x and y that are multiplied by one matrix of the weight.
struct Group {
  int64_t m0, rows, matrix;
};

// The groups of rows: of given sizes with a matrix each, or `batch` of equal size with the matrices from
// `first` on. Groups without rows are left out.
inline std::vector<Group> GroupsOf(const xla::ffi::BufferR1<xla::ffi::S32>& sizes, int64_t batch, int64_t rows, int64_t first) {
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

}  // namespace fewbit
