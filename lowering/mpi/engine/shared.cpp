// Elastic averaging without a lock, in memory that the server shares with the workers on its host (Hogwild, Niu et
// al. 2011). With the worker's value w and the server's value c, the result is d = eta rho (w - c). Then c + d is
// written to the server's memory, even if another worker has changed c in between.
//
// Every operation rounds to the declared type, as the server does for messages. The compiler must not contract
// operations.
#include "engine.h"
#include "narrow.h"

namespace commplan {
namespace {

// The value rounded to T.
template <typename T>
T as(double value) {
  if constexpr (kNarrow<T>) {
    return T::narrow(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <typename T>
void run(const SharedUpdate& x, int64_t begin, int64_t end, const void* input, void* output, const double factors[2]) {
  const T* w = static_cast<const T*>(input) + x.offset;
  T* d = static_cast<T*>(output) + x.offset;
  T* c = reinterpret_cast<T*>(x.center) + x.offset;
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
  for (int64_t i = begin; i < end; ++i) {
    if constexpr (kNarrow<T>) {
      float factor = T::narrow(as<T>(factors[0]).wide() * as<T>(factors[1]).wide()).wide();
      float center = c[i].wide();
      T pull = T::narrow(T::narrow(w[i].wide() - center).wide() * factor);
      d[i] = pull;
      c[i] = T::narrow(center + pull.wide());
    } else {
      T factor = as<T>(factors[0]) * as<T>(factors[1]);
      T center = c[i];
      T pull = (w[i] - center) * factor;
      d[i] = pull;
      c[i] = center + pull;
    }
  }
}

}  // namespace

double number(const void* scalar, DType dtype) {
  switch (dtype) {
    case kF16: return static_cast<const Half*>(scalar)->wide();
    case kBF16: return static_cast<const BFloat16*>(scalar)->wide();
    case kF32: return *static_cast<const float*>(scalar);
    default: return *static_cast<const double*>(scalar);
  }
}

void apply(const SharedUpdate& x, int64_t begin, int64_t end, const void* input, void* output, const double factors[2]) {
  switch (static_cast<DType>(x.dtype)) {
    case kF16: return run<Half>(x, begin, end, input, output, factors);
    case kBF16: return run<BFloat16>(x, begin, end, input, output, factors);
    case kF32: return run<float>(x, begin, end, input, output, factors);
    default: return run<double>(x, begin, end, input, output, factors);
  }
}

}  // namespace commplan
