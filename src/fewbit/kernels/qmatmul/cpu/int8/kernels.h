// The int8 kernels of every instruction set, without anything of XLA: the handler and the tests of memory errors share them.
#pragma once

#include <cstring>

#include "cpp/isa.h"
#include "cpp/memory.h"
#include "problem.h"

namespace fewbit {

static void StoreRow(const IntegerJob& job, int64_t m, int64_t n0, int64_t count, const float* c) {
  if (job.y_kind == Float::kF32) {
    std::memcpy(static_cast<float*>(job.y) + m * job.N + n0, c, count * sizeof(float));
    return;
  }
  uint16_t* y = static_cast<uint16_t*>(job.y) + m * job.N + n0;
  for (int64_t n = 0; n < count; ++n) y[n] = job.y_kind == Float::kBF16 ? BrainOf(c[n]) : HalfOf(c[n]);
}

struct Kernels {
  int64_t rows;                                     // of x that `prepare` lays out at once
  int64_t (*chunks)(const IntegerJob& job);         // how many chunks a job has; any thread may run any of them
  int64_t (*row_bytes)(const IntegerJob& job, const std::vector<Segment>& segments);  // of x as `prepare` lays it out: a multiple of 4
  void (*prepare)(const IntegerJob& job, const std::vector<Segment>& segments, const int8_t* rows, int64_t m, int8_t* out,
                  const TilesOfX& tiles);
  void (*run)(const IntegerJob& job, const std::vector<Segment>& segments, int64_t chunk);
  // The same of a BlockJob; rows of x are laid out one by one.
  int64_t (*block_row_bytes)(const BlockJob& job);
  int64_t (*block_chunks)(const BlockJob& job);
  void (*lay_blocks)(const BlockJob& job, const int8_t* rows, int64_t m, int8_t* out);
  void (*run_blocks)(const BlockJob& job, int64_t chunk);
  bool (*takes_panels)(const BlockJob& job);       // whether a block job runs as the IntegerJob that `panels_of` makes
  IntegerJob (*panels_of)(const BlockJob& job);
};

// The instruction set of a job where `best` is the best one. AMX needs many rows, and scales that do not end too often, to be faster
// than AVX-512; the bits are the same.
inline Isa IsaOfJob(Isa best, int64_t rows, int64_t tile) {
  const bool is_fast = rows >= 8 && (tile >= kSegment || (tile >= 64 && rows >= 32));
  return best == Isa::kAmx && !is_fast ? Isa::kAvx512 : best;
}

// A row of x in the order of w's codes, zeros beyond K.
inline void OrderRow(const BlockJob& job, const int8_t* from, int8_t* to) {
  if (job.order == nullptr) {
    std::memcpy(to, from, job.K);
    std::memset(to + job.K, 0, job.depth() - job.K);
    return;
  }
  for (int64_t group = 0; group < job.depth(); group += job.group) {
    for (int64_t place = 0; place < job.group; ++place) {
      const int64_t k = group + job.order[place];
      to[group + place] = k < job.K ? from[k] : int8_t{0};
    }
  }
}

}  // namespace fewbit

#define FEWBIT_BYTE_DOT 1
#define FEWBIT_HAS_AMX_KERNELS 1
#define FEWBIT_KERNELS "qmatmul/cpu/int8/level.h"
#include "cpp/foreach_isa.h"

#if FEWBIT_IN_UNIT(0)

namespace fewbit {

// The numbers of a BlockJob's codes: integers of codes of 1 to 7 bits, or whether codes of 8 bits are signed. arm64 multiplies signed
// bytes, the others mostly unsigned ones of w.
static void SetNumbers(const int8_t* of_codes, BlockJob* job) {
  const int count = 1 << job->w.bits;
  int least = 0, most = 0;
  for (int i = 0; i < count; ++i) {
    least = of_codes[i] < least ? of_codes[i] : least;
    most = of_codes[i] > most ? of_codes[i] : most;
  }
  for (int i = 0; i < 128; ++i) job->numbers[i] = static_cast<uint8_t>(of_codes[i & (count - 1)] - least);
  job->offset = -least, job->largest = most - least;
  job->flip = job->numbers[0], job->is_flipped = true;
  for (int i = 0; i < count; ++i) job->is_flipped = job->is_flipped && job->numbers[i] == (i ^ job->flip);
}

static void SetNumbers(bool is_signed, BlockJob* job) {
  job->offset = (is_signed ? 128 : 0) - (FEWBIT_ARM64 ? 128 : 0);
  job->flip = static_cast<uint8_t>(job->offset), job->largest = 255;
}

}  // namespace fewbit

#endif
