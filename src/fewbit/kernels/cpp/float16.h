// float16 and bfloat16 as bits: exact to float32, and from it rounded to the nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace fewbit {

inline float FloatOfBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FloatOfBrain(uint16_t half) { return FloatOfBits(static_cast<uint32_t>(half) << 16); }

// In integers throughout, because the processor may flush subnormal numbers.
inline float FloatOfHalf(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  uint32_t exponent = (half >> 10) & 31, mantissa = half & 0x3FF;
  if (exponent == 31) return FloatOfBits(sign | 0x7F800000 | mantissa << 13);
  if (exponent == 0) {
    if (mantissa == 0) return FloatOfBits(sign);
    for (exponent = 1; (mantissa & 0x400) == 0; --exponent) mantissa <<= 1;
    return FloatOfBits(sign | (exponent + 112) << 23 | (mantissa & 0x3FF) << 13);
  }
  return FloatOfBits(sign | (exponent + 112) << 23 | mantissa << 13);
}

inline uint16_t BrainOf(float x) {
  const uint32_t bits = BitsOf(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline uint16_t HalfOf(float x) {
  const uint32_t bits = BitsOf(x), magnitude = bits & 0x7FFFFFFF;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (magnitude > 0x7F800000) return sign | 0x7E00;
  if (magnitude >= 0x47800000) return sign | 0x7C00;  // 65536 and beyond
  uint32_t significand = (magnitude & 0x7FFFFF) | 0x800000, shift = 13;
  const int exponent = static_cast<int>(magnitude >> 23) - 112;
  uint32_t base = 0;
  if (exponent > 0) {
    base = static_cast<uint32_t>(exponent) << 10;
    significand &= 0x7FFFFF;
  } else {
    shift = static_cast<uint32_t>(14 - exponent);
    if (shift > 25) return sign;
  }
  const uint32_t whole = significand >> shift, rest = significand & ((1u << shift) - 1), middle = 1u << (shift - 1);
  return static_cast<uint16_t>(sign | (base + whole + (rest > middle || (rest == middle && (whole & 1)))));
}

// Elements of arrays of either type.
struct Brain {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline float Widened(float x) { return x; }
inline float Widened(Brain x) { return FloatOfBrain(x.bits); }
inline float Widened(Half x) { return FloatOfHalf(x.bits); }

}  // namespace fewbit
