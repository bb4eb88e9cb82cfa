// What one call computes: out[r] = sum over s of softmax(q[r] . keys / sqrt(width))[s] * values[s], for one head of keys and the
// queries that share it, each of which sees a run of positions only. The scores may have a soft cap, and each softmax a sink: one
// more score, whose value is 0.
#pragma once

#include <cstdint>

#include "cpp/weight.h"

namespace fewbit {

// Positions of one step, which begin at a multiple of it: int8 weights of a step have one scale, the same in every call.
constexpr int64_t kKeys = 64;

// The keys or values of one head, one position after the other: codes with a scale for each position, or floats.
struct Numbers {
  bool is_coded;
  Weight codes;
  const void* floats;
  Float kind;
};

struct Head {
  Numbers keys, values;
  int64_t width, positions;
  const void* queries;  // [rows, width]; row r is token r % tokens
  Float kind;
  const int8_t* query_codes;  // the queries in int8, or none: then keys and values are int8, too, and products are of integers
  const float* query_scale;   // of each row of codes
  int64_t tokens;
  const int32_t *first, *seen;  // each token sees the positions from the first one to before `seen`; no `first`: from 0 on
  float cap;                    // a score x becomes cap * tanh(x / cap); 0: it stays

  float Query(int64_t i) const {
    if (kind == Float::kF32) return static_cast<const float*>(queries)[i];
    const uint16_t half = static_cast<const uint16_t*>(queries)[i];
    return kind == Float::kBF16 ? FloatOfBrain(half) : FloatOfHalf(half);
  }
  int64_t Seen(int64_t row) const { return Position(seen[row % tokens]); }
  int64_t First(int64_t row) const { return first == nullptr ? 0 : Position(first[row % tokens]); }
  int64_t Position(int64_t n) const { return n < 0 ? 0 : n < positions ? n : positions; }
};

// What was found of rows in a run of positions: the largest score of each, the sum of the weights relative to it, and the sum of
// the values with these weights.
struct Found {
  float *peak, *sum, *mixed;
};

}  // namespace fewbit
