// 16-bit floats. Arithmetic is done in f32 and rounded to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace commplan {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The upper half of an f32.
struct BFloat16 {
  uint16_t bits;
  float wide() const { return bits_to_float(static_cast<uint32_t>(bits) << 16); }
  static BFloat16 narrow(float value) {
    uint32_t bits = float_to_bits(value);
    // Adds just less than half of the last place that remains, or half if that place is odd.
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = ((bits >> 16) & 0x8000) | 0x7fc0;
    return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
  }
};

#if defined(__FLT16_MANT_DIG__)
struct Half {
  _Float16 value;
  float wide() const { return static_cast<float>(value); }
  static Half narrow(float value) { return {static_cast<_Float16>(value)}; }
};
#else
// f16 without hardware support. An f16 has 5 bits of exponent and 10 of mantissa, an f32 has 8 and 23: mantissas differ
// by 13 places, and biases of exponents by 112. Scaling by a power of two shifts the exponent. Subnormal results are
// rounded by a float addition.
struct Half {
  uint16_t bits;
  float wide() const {
    uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff;
    float value = bits_to_float(rest << 13) * bits_to_float(0x77800000);  // 2^112
    if (rest >= 0x7c00) value = bits_to_float(0x7f800000 | (rest << 13));  // infinity or NaN
    return bits_to_float(float_to_bits(value) | sign);
  }
  static Half narrow(float value) {
    uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff, half;
    if (rest > 0x7f800000) {  // NaN
      half = 0x7e00;
    } else if (rest >= 0x477ff000) {  // rounds to infinity
      half = 0x7c00;
    } else if (rest < 0x38800000) {  // less than 2^-14: the result is subnormal
      half = float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000;
    } else {
      half = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
    }
    return {static_cast<uint16_t>(sign | half)};
  }
};
#endif

// Whether T is a 16-bit float, on which arithmetic is done in f32.
template <typename T>
constexpr bool kNarrow = std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>;

}  // namespace commplan
