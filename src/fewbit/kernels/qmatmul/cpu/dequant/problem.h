// What one call computes: y[m, n] = sum over k of x[m, k] * w, where w is a matrix of codes, rows by columns, as stored in
// memory. Either its columns or its rows are contracted; either may be the packed axis.
#pragma once

#include <cstdint>

#include "cpp/weight.h"

namespace fewbit {

// What a tile register of AMX has of x in bfloat16: rows and contracted places.
constexpr int64_t kTileRows = 16, kTileDeep = 32, kTile = kTileRows * kTileDeep;

struct Job {
  Weight w;
  bool contracts_cols;
  int64_t M, K, N;       // logical lengths
  const float* x;        // [M, ldx], in the order of the stream, zeros beyond K
  int64_t ldx;
  const float* x_sums;   // [M, ld_sums], for offsets along contracted columns: the sum over each tile, and zeros (TileSums)
  int64_t ld_sums;
  void* y;               // [M, N]
  Float y_kind;
  const uint16_t* x_tiles;  // in place of x in bfloat16 (amx.h): [pairs of blocks, 2, tile_steps, 16 rows, 32 places], zeros beyond K
  const int32_t* order;  // the code at each place of a group of the stream, of the axis that is not contracted; null: in order
  int64_t group;
  int64_t threads = 1;   // how many may share the work, which changes no bit

  int64_t contracted() const { return contracts_cols ? w.cols : w.rows; }
  int64_t tile_steps() const { return (contracted() + kTileDeep - 1) / kTileDeep; }
  int64_t tile_numbers() const { return (M + 2 * kTileRows - 1) / (2 * kTileRows) * 2 * tile_steps() * kTile; }
  int64_t outputs() const { return contracts_cols ? w.rows : w.cols; }

  // The output at place `i` of the axis that is not contracted; N or more for padding.
  int64_t OutputAt(int64_t i) const { return order == nullptr ? i : i / group * group + order[i % group]; }
};

}  // namespace fewbit
