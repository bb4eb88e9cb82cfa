// A matrix of codes with its scales, as stored in memory, and the float types of operands and results.
//
// The codes of the packed axis are taken in the order of their bits in memory (the stream). Where a container permutes them
// (Packing's interleave, high bits first), x is permuted alike when that axis is contracted, and y when it is not: the kernels
// never see it.
#pragma once

#include <cstdint>

#include "float16.h"

namespace fewbit {

enum class Float { kF32 = 0, kBF16 = 1, kF16 = 2 };

inline int64_t SizeOf(Float kind) { return kind == Float::kF32 ? 4 : 2; }

inline void StoreFloat(void* y, Float kind, int64_t at, float x) {
  if (kind == Float::kF32) {
    static_cast<float*>(y)[at] = x;
  } else {
    static_cast<uint16_t*>(y)[at] = kind == Float::kBF16 ? BrainOf(x) : HalfOf(x);
  }
}

// How scales and zero points are stored: as a float dtype, or as bytes that a table of 256 numbers explains.
enum class ScaleType { kF32 = 0, kBF16 = 1, kF16 = 2, kTable = 3 };

inline int64_t SizeOf(ScaleType type) { return type == ScaleType::kF32 ? 4 : type == ScaleType::kTable ? 1 : 2; }

// What a zero point is: nothing, a number in units of codes that is subtracted, or a float that is added.
enum class Zero { kNone = 0, kWhole = 1, kOffset = 2 };

// How a code becomes a number: by the table of the format's values, as an integer of `bits` bits, or as a float of 8 or 6 bits.
// Those of e4m3fn are decoded 2**8 times too small; `unit` makes up for it.
enum class Codes { kTable = 0, kSigned = 1, kUnsigned = 2, kE4M3 = 3, kE5M2 = 4, kE2M3 = 5, kE3M2 = 6 };

struct StoredScales {
  ScaleType type;
  const void* data;
  const float* table;  // of a ScaleType::kTable
};

struct Weight {
  const uint8_t* codes;
  int64_t rows, cols;   // in codes of the stream
  int64_t row_stride;   // bytes from one row of bytes to the next
  int bits;
  bool packed_cols;     // whether codes share bytes along a row, or along a column
  Codes kind;
  const float* values;  // 256 numbers; those of narrower codes repeat
  int64_t row_tile, col_tile, tiles_per_row;
  StoredScales scale, zero;
  Zero role;
  float unit;           // what every scale is multiplied by
};

}  // namespace fewbit
