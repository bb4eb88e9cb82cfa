// What one product of integers computes, of codes that are numbers less a constant:
//
//   y[m, n] = sum over tiles t of x_scale[m, t] * w_scale[n, t] * sum over k in t of (x[m, k] - x_zero[m, t]) * (w[n, k] - w_zero[n, t])
//
// where the inner sum is an exact int32. Each of its steps may wrap around; what comes out does not.
#pragma once

#include <cstdint>
#include <vector>

#include "cpp/isa.h"
#include "cpp/weight.h"

namespace fewbit {

// One number for each tile of an operand's rows (of x) or outputs (of w), and for each tile of the contraction.
template <class Number>
struct PerTile {
  const Number* data;  // null: none
  int64_t tile;        // rows that share one
  int64_t by_row, by_tile;  // strides to the next tile of rows, and of the contraction

  Number At(int64_t row, int64_t t) const { return data[(tile == 1 ? row : row / tile) * by_row + t * by_tile]; }
};

struct BlockJob;

struct IntegerJob {
  int64_t M, N, K;
  int64_t tile;             // contracted places that share scales
  bool contracts_cols;      // whether w is [N, K] in memory, or [K, N]
  int bits;                 // of a code of w: 8, or 4 in pairs along the contraction
  int64_t offset;           // what is added to the numbers of w to make them unsigned: 0, 8 or 128
  int largest;              // of these unsigned numbers
  const uint8_t* w;
  int64_t row_stride, byte_rows, byte_cols;  // of w in memory
  PerTile<float> w_scale, x_scale;
  PerTile<int32_t> w_zero, x_zero;
  const BlockJob* blocks;   // whose weight it is, with the scales and zero points as they are stored; null: none
  const int8_t* x;          // as `Prepare` lays it out: for each segment, block after block of kIntRows rows, group after group or (AMX) row after row
  const int32_t* x_sums;    // [tiles, M]
  // Likewise, of products by panels: at what sums begin, which is x_sums times what the bytes of w have more than its numbers, negated;
  // x_zero; x_scale, 1 where rows are scaled only after all tiles; x_sums times that.
  const int32_t *x_starts, *x_zeros;
  const float *x_scales, *x_offsets;
  void* y;                  // [M, N]
  Float y_kind;

  int64_t tiles() const { return (K + tile - 1) / tile; }
};

// What an IntegerJob needs of the rows of x by tiles, each [tiles, M].
struct TilesOfX {
  int32_t *sums, *starts, *zeros;
  float *scales, *offsets;

  static constexpr int64_t kBytes = 20;  // of one tile of one row
  TilesOfX(const IntegerJob& job, void* memory) {
    const int64_t count = job.tiles() * job.M;
    sums = static_cast<int32_t*>(memory), starts = sums + count, zeros = starts + count;
    scales = reinterpret_cast<float*>(zeros + count), offsets = scales + count;
  }
  void SetIn(IntegerJob* job) const {
    job->x_sums = sums, job->x_starts = starts, job->x_zeros = zeros, job->x_scales = scales, job->x_offsets = offsets;
  }
};

// Contracted places whose codes are laid out at once, few enough that the panel of w stays in the first cache: a part of one tile,
// or several whole ones.
struct Segment {
  int64_t tile, tiles;  // its first tile, how many
  int64_t from, count;  // its first place, how many
  int64_t groups, at;   // of four bytes each that it takes in a row of x; those of all segments before it
  bool first, last;     // whether its tiles begin, and end, in it
};

constexpr int64_t kSegment = 256;

// Several tiles share one segment where each of them fills whole groups.
inline std::vector<Segment> SegmentsOf(const IntegerJob& job) {
  std::vector<Segment> segments;
  const int64_t codes = FEWBIT_ARM64 ? 8 : 32 / job.bits;  // of four bytes of w; on arm64 of whole pairs of groups, for smmla
  const int64_t together = job.tile % codes == 0 && job.tile <= kSegment ? kSegment / job.tile : 1;
  for (int64_t t = 0, at = 0; t < job.tiles(); t += together) {
    const int64_t tiles = job.tiles() - t < together ? job.tiles() - t : together;
    const int64_t end = (t + tiles) * job.tile < job.K ? (t + tiles) * job.tile : job.K;
    for (int64_t k = t * job.tile; k < end; k += kSegment) {
      const int64_t count = end - k < kSegment ? end - k : kSegment, groups = (count + codes - 1) / codes * (codes / 4);
      segments.push_back({t, tiles, k, count, groups, at, k == t * job.tile, k + kSegment >= end});
      at += groups;
    }
  }
  return segments;
}

// What a BlockJob needs of one block of a row of x: its sum, and that times what w's bytes have more than its numbers; its scale, 1
// where a row has one for all its blocks, with which the outputs are multiplied at last; the sum times the scale.
struct BlockOfX {
  int32_t sum, added;
  float scale, offset;
};

// The same product where w has blocks of whole groups of 16 codes along the contraction: codes of 1 to 7 bits that a table makes
// integers from -127 to 127, or of 8, and scales and zero points as they are stored.
struct BlockJob {
  Weight w;              // [N, K], or [K, N]; packed along K
  bool contracts_cols;   // whether it is [N, K]
  uint8_t numbers[128];  // of codes of 1 to 7 bits: their integers plus `offset`
  int32_t offset;
  int largest;           // of `numbers`, or of codes of 8 bits
  bool is_flipped;       // whether a code with the bits of `flip` flipped is its number
  uint8_t flip;          // of codes of 8 bits: likewise
  int64_t M, N, K;
  int64_t block;         // contracted places of one sum: those of x's scales or of w's, whichever are fewer
  const int32_t* order;  // the code at each place of a group along K in memory; null: in order
  int64_t group;
  PerTile<float> x_scale;
  const int8_t* x;       // as `LayBlocks` lays it out
  BlockOfX* x_blocks;    // likewise [M, blocks]
  void* y;               // [M, N]
  Float y_kind;

  int64_t depth() const { return contracts_cols ? w.cols : w.rows; }  // K in codes of the stream
  int64_t tile() const { return contracts_cols ? w.col_tile : w.row_tile; }
  int64_t blocks() const { return (depth() + block - 1) / block; }
  int64_t share() const { return (tile() + block - 1) / block; }  // blocks of one tile of w, and of its scale
};

}  // namespace fewbit
