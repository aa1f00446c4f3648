// Purpose: the 16-bit floats of the host side, bit for bit what cvt.rn of the PTX ISA gives: round to nearest, ties to
// even; NaN becomes 0x7fff. In integers, because g++ before 13 has no bfloat type.

#pragma once

#include <string.h>

namespace thdcp {

inline uint32 float_bits(float x) {
  uint32 bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float bits_float(uint32 bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// `bits` without its lowest `count` bits, rounded to nearest, ties to even. 0 < count < 32.
inline uint32 round_off(uint32 bits, uint32 count) {
  const uint32 half = 1u << (count - 1);
  const uint32 odd = (bits >> count) & 1u;
  return (bits + (half - 1) + odd) >> count;
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_float(uint32(x.bits) << 16); }
inline float to_float(fp16 x) {
  const uint32 sign = uint32(x.bits & 0x8000u) << 16;
  const uint32 exponent = (x.bits >> 10) & 31u, fraction = x.bits & 0x3ffu;
  if (exponent == 31) return bits_float(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = float(fraction) * 0x1p-24f;  // Zero and the subnormals.
  return bits_float(sign | float_bits(magnitude));
}

template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  if (x != x) return bf16{0x7fff};
  return bf16{uint16(round_off(float_bits(x), 16))};
}
template <>
inline fp16 from_float<fp16>(float x) {
  if (x != x) return fp16{0x7fff};
  const uint32 bits = float_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x47800000u) return fp16{uint16(sign | 0x7c00u)};  // 2^16 or more: infinity.
  if (magnitude >= 0x38800000u)                                       // 2^-14 or more: normal; a carry may reach infinity.
    return fp16{uint16(sign | (round_off(magnitude, 13) - (112u << 10)))};
  if (magnitude < 0x33000000u) return fp16{uint16(sign)};             // Below half of the smallest.
  const uint32 exponent = magnitude >> 23, fraction = (magnitude & 0x7fffffu) | 0x800000u;
  return fp16{uint16(sign | round_off(fraction, 126 - exponent))};
}

template <typename T>
inline uint32 pack(float low, float high) {
  return uint32(from_float<T>(low).bits) | uint32(from_float<T>(high).bits) << 16;
}

}  // namespace thdcp
