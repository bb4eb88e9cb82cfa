// The arguments of one call: the array's geometry, its formats, and its buffers. Plain data, shared by
// the levels of instruction sets.
#pragma once

#include <cstdint>

namespace fewbit {

enum class Kind : int { kInteger = 0, kMinifloat = 1, kCodebook = 2, kFloat32 = 3, kBfloat16 = 4, kFloat16 = 5, kE8M0 = 6 };

enum class Calibration : int {
  kGiven = 0,       // the scales come with the call
  kAbsMax = 1,
  kMinMax = 2,
  kSignedMax = 3,
  kCovering = 4,    // no element saturates, for stochastic rounding; stored scales are rounded up
  kFloor = 5,       // the powers of two of the MX rules, from here on
  kEven = 6,
  kCeiling = 7,
  kBestPower = 8,   // the search among the ceiling's power and its halvings
  kBestCode = 9,    // the search among the codes of a minifloat that holds the scales
};

constexpr int kMaxCodes = 16;  // of a codebook

// A set of numbers as the encoder needs it; which fields count depends on the kind.
struct Format {
  Kind kind;
  int bits;
  int nan_code;
  // Integer: code = (round(clip(x * inverse_step, low, high)) + add), its low bits.
  float inverse_step, low, high;
  int add;
  // Minifloat.
  int mantissa, bias, is_signed, is_fnuz;
  float max;
  // Codebook: the numbers in ascending order, the thresholds between them, and the code of each.
  int count;
  float thresholds[kMaxCodes];
  float numbers[kMaxCodes];
  int codes[kMaxCodes];
  int plus_zero, minus_zero;  // -1: no two zeros
};

// The array is [batch, rows, columns], in tiles of tile_rows x tile_columns; codes share bytes along rows or columns.
struct Job {
  const void* x;
  int element;  // the Kind of x, as an int: kFloat32, kBfloat16 or kFloat16
  int64_t batch, rows, columns, tile_rows, tile_columns, row_tiles, column_tiles;
  int64_t packed_rows, packed_columns;  // the shape of the codes
  bool packs_rows;
  int64_t ahead;  // how many elements before it is read an element is called for; 0: it is not

  Format format, scale, zero;
  bool has_zero, has_unit, unit_is_given, zero_is_whole;
  Calibration calibration;
  float factor, bound, smallest_scale, largest_scale, range, no_scale;
  // So that every finite array decodes to finite numbers: the largest end of a range, the largest scale under which the whole range
  // of codes is finite, the largest tensor scale.
  float largest_end, largest_finite_step, largest_unit;
  // The tensor scale maps the largest magnitude to `unit_bound` times the largest scale; the ends of the format's numbers.
  float unit_bound, most, least;
  bool contains_zero;
  // Searches and MX rules.
  int mantissa_bits, top_exponent, top_mantissa, halvings, is_windowed;

  uint8_t* codes;
  void* stored_scale;
  void* stored_zero;
  const float* units;  // the tensor scales
  int64_t batch_per_unit;
  float* divisors;  // by tile: what elements are divided by, NaN for tiles that are not finite
  float* offsets;   // by tile, where there are zero points

  // Stochastic rounding: two words of a Threefry key for every `batch_per_key` matrices, null without; the random numbers are
  // those of an array [batch, noise_rows, noise_columns], in which short last tiles are whole.
  const uint32_t* keys;
  int64_t batch_per_key, noise_rows, noise_columns;
};

// Whether the scales follow from the ends of a tile's range, not from its largest magnitude alone.
inline bool NeedsEnds(const Job& job) { return job.calibration == Calibration::kMinMax || job.calibration == Calibration::kCovering; }

// The scratch bytes that a task needs to encode `width` columns: a reciprocal for each, and codes of eight rows.
inline int64_t ScratchBytes(int64_t width) { return (4 + 8) * width + 64; }

// What is known of a run of tiles before their scales: largest magnitude (its bits, above infinity's for NaN), range, and
// the element of largest magnitude.
struct Ranges {
  int32_t* magnitude;
  float* low;
  float* high;
  float* first;
};

// A dequantization: codes back to floats.
struct Decoding {
  const uint8_t* codes;
  void* out;
  int element;
  int64_t batch, rows, columns, tile_rows, tile_columns, row_tiles, column_tiles;
  int64_t packed_rows, packed_columns;
  bool packs_rows;
  int bits;
  const float* values;  // 256, by code
  int whole_shift;      // codes that are whole numbers: what carries their sign to the top of 32 bits; -1: they are not
  int64_t first_tile;   // the tile that the next four begin with
  const float* factors;
  const float* more_factors;  // null: none
  const float* zeros;         // in units of codes; null: none
  const float* offsets;       // null: none
};

}  // namespace fewbit
