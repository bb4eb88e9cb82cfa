// The kernels of every instruction set, without anything of XLA: the handler and the tests of memory errors share them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpp/memory.h"
#include "problem.h"

namespace fewbit {

constexpr int64_t kFewOutputs = 48;  // rows of the weight in a chunk of a few dot products

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

struct Kernels {
  int64_t (*steps)(const Job& job);   // how many codes a lane holds, which is how x must be laid out (BlockedX); 1: in order
  int64_t (*chunks)(const Job& job);  // how many chunks a job has; any thread may run any of them
  void (*run)(const Job& job, int64_t chunk);
  bool (*takes_bfloat16)(const Job& job);  // whether x in bfloat16 is multiplied without conversion to float32, from x_tiles
};

}  // namespace fewbit

#define FEWBIT_HAS_AMX_KERNELS 1
#define FEWBIT_KERNELS "qmatmul/cpu/dequant/level.h"
#include "cpp/foreach_isa.h"

#if FEWBIT_IN_UNIT(0)

namespace fewbit {

// Row m of x in its place among the tiles: x in the order of the stream, zeros beyond K.
static void LayTiles(const Job& job, int64_t m, const uint16_t* x, const int32_t* order, int64_t group, uint16_t* tiles) {
  uint16_t* to = tiles + m / kTileRows * job.tile_steps() * kTile + m % kTileRows * kTileDeep;
  for (int64_t k = 0; k < job.contracted(); k += kTileDeep, to += kTile) {
    if (order == nullptr && k + kTileDeep <= job.K) {
      std::memcpy(to, x + k, kTileDeep * sizeof(uint16_t));
      continue;
    }
    for (int64_t i = 0; i < kTileDeep; ++i) {
      const int64_t at = order == nullptr ? k + i : (k + i) / group * group + order[(k + i) % group];
      to[i] = at < job.K ? x[at] : uint16_t{0};
    }
  }
}

// A row of x in the order of the kernel's lanes: element i of lane j of a block comes i-th among the j-ths.
template <int kSteps>
static void BlockedX(const float* x, int64_t length, float* out) {
  for (int64_t b = 0; b < length; b += 16 * kSteps) {
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; ++i) {
      for (int j = 0; j < 16; ++j) out[b + i * 16 + j] = x[b + j * kSteps + i];
    }
  }
}

static void BlockedX(const float* x, int64_t length, int64_t steps, float* out) {
  if (steps == 2) BlockedX<2>(x, length, out);
  else if (steps == 4) BlockedX<4>(x, length, out);
  else if (steps == 8) BlockedX<8>(x, length, out);
  else if (steps == 16) BlockedX<16>(x, length, out);
  else BlockedX<32>(x, length, out);
}

// How many sums over tiles a row of x has, with zeros after them that kernels load, too.
static int64_t SumsOfRow(const Weight& w) { return (w.tiles_per_row / 16 + 1) * 16; }

// The sum of a row of x over each tile, which a tile's offset is multiplied by.
static void TileSums(const float* x, const Weight& w, float* sums) {
  for (int64_t t = 0; t < SumsOfRow(w); ++t) {
    const int64_t begin = t * w.col_tile, end = begin + w.col_tile < w.cols ? begin + w.col_tile : w.cols;
    float part[8] = {};
    int64_t i = begin;
    for (; i + 8 <= end; i += 8) {
      for (int64_t j = 0; j < 8; ++j) part[j] += x[i + j];
    }
    for (; i < end; ++i) part[(i - begin) % 8] += x[i];
    sums[t] = ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
  }
}

}  // namespace fewbit

#endif
