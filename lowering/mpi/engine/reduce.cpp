// The arithmetic of reductions, elementwise in the declared type.
//
// bf16 and f16 are added as f32 and rounded to nearest, ties to even. A maximum or minimum with a NaN is NaN, and -0
// is less than 0. Sums of integers wrap around. A sum of booleans is a logical or.
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "engine.h"
#include "narrow.h"

namespace commplan {
namespace {

static_assert(sizeof(std::fenv_t) <= 64, "the floating-point environment does not fit");

template <typename T>
inline T add(T a, T b) {
  if constexpr (kNarrow<T>) {
    return T::narrow(a.wide() + b.wide());
  } else if constexpr (std::is_same_v<T, bool>) {
    return a || b;
  } else if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}

// For equal numbers, which differ at most in the sign of zero: the maximum of 0 and -0 is 0 on every rank.
template <typename Bits, bool kMaximum, typename T>
inline T either(T a, T b) {
  static_assert(sizeof(Bits) == sizeof(T), "the bits of a number");
  Bits x, y;
  std::memcpy(&x, &a, sizeof x);
  std::memcpy(&y, &b, sizeof y);
  x = kMaximum ? x & y : x | y;
  std::memcpy(&a, &x, sizeof a);
  return a;
}

// The maximum or minimum. `a != a` holds for NaN.
template <typename T, bool kMaximum>
inline T extreme(T a, T b) {
  if constexpr (kNarrow<T>) {
    float x = a.wide(), y = b.wide();
    if (x == y) return either<uint16_t, kMaximum>(a, b);
    return (kMaximum ? x > y : x < y) || x != x ? a : b;
  } else if constexpr (std::is_floating_point_v<T>) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    if (a == b) return either<Bits, kMaximum>(a, b);
    return (kMaximum ? a > b : a < b) || a != a ? a : b;
  } else {
    return (kMaximum ? a >= b : a <= b) ? a : b;
  }
}

template <typename T, Reduction kOp>
void reduce(void* out, const void* a, const void* b, int64_t count) {
  T* z = static_cast<T*>(out);
  const T* x = static_cast<const T*>(a);
  const T* y = static_cast<const T*>(b);
  // Iterations are independent, even if `out` is `a`.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (kOp == kSum) {
      z[i] = add<T>(x[i], y[i]);
    } else {
      z[i] = extreme<T, kOp == kMax>(x[i], y[i]);
    }
  }
}

template <typename T>
Kernel choose(Reduction op) {
  if (op == kSum) return reduce<T, kSum>;
  return op == kMax ? reduce<T, kMax> : reduce<T, kMin>;
}

}  // namespace

Kernel kernel(DType dtype, Reduction op) {
  switch (dtype) {
    case kBool: return choose<bool>(op);
    case kU8: return choose<uint8_t>(op);
    case kI32: return choose<int32_t>(op);
    case kI64: return choose<int64_t>(op);
    case kF16: return choose<Half>(op);
    case kBF16: return choose<BFloat16>(op);
    case kF32: return choose<float>(op);
    default: return choose<double>(op);
  }
}

int64_t size_of(DType dtype) {
  constexpr int64_t sizes[kDTypes] = {1, 1, 4, 8, 2, 2, 4, 8};
  return sizes[dtype];
}

Rounding::Rounding() {
  std::fegetenv(reinterpret_cast<std::fenv_t*>(saved_));
  std::fesetenv(FE_DFL_ENV);
}

Rounding::~Rounding() { std::fesetenv(reinterpret_cast<std::fenv_t*>(saved_)); }

}  // namespace commplan
