// The flip product and the log ratio of a convolution with logistic noise: entry points, and the choice of kernel.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#include "buffer.h"
#include "flipgrad.h"
#include "pool.h"
#include "targets.h"

namespace flipgrad {
namespace {

// Up to this |w| / scale, 1 - m tanh(w) is rounded by at most 2e-6 of itself in float32.
constexpr double kModerate = 2.0;

// Up to this |w| / scale, four factors exp(2w) are far from overflow, and their inverse from underflow.
template <class T>
constexpr double kTabulated = sizeof(T) == sizeof(float) ? 10.0 : 80.0;

// Above this |w| / scale, a flip can outweigh a pre-activation whose tail F(-|a|) is below the smallest number.
template <class T>
constexpr double kLargest = sizeof(T) == sizeof(float) ? 60.0 : 300.0;

// Fewer terms than this are computed sooner than another thread wakes up.
constexpr double kTermsWorthThreads = 1 << 17;

int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

int64_t round_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }

#define FLIPGRAD_WITH_AVX512
#define FLIPGRAD_KERNELS "flip_all.inc"
#include "for_each_target.inc"

double terms(const FlipProblem& p) {
  const double places = static_cast<double>(p.batch) * p.out_height * p.out_width;
  return places * p.groups * p.out_channels * p.in_channels * p.kernel[0] * p.kernel[1];
}

template <class T>
using Sum = void (*)(const FlipProblem&, const T*, const T*, const T*, const T*, T*, bool);

// A sum over flips. Up to `moderate`, |w| / scale have kernels of their own, and up to `limit` any.
template <class T>
int compute(Sum<T> sum, double moderate, double limit, FlipProblem p, const T* x, const T* a, const T* grad, const T* weight, T* u) {
  try {
    const double largest = p.largest_weight / p.scale;
    if (largest > limit) return 2;
    if (terms(p) < kTermsWorthThreads) p.threads = 1;
    sum(p, x, a, grad, weight, u, largest <= moderate);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

template <class T>
int flip(const FlipProblem& p, const T* x, const T* a, const T* grad, const T* weight, T* u) {
  return compute<T>(FLIPGRAD_BEST(p.portable, flip<T>), kModerate, kLargest<T>, p, x, a, grad, weight, u);
}

template <class T>
int ratio(const FlipProblem& p, const T* x, const T* a, const T* y, const T* weight, T* log_ratio) {
  return compute<T>(FLIPGRAD_BEST(p.portable, ratio<T>), kTabulated<T>, HUGE_VAL, p, x, a, y, weight, log_ratio);
}

}  // namespace
}  // namespace flipgrad

int flipgrad_flip_f32(const FlipProblem* problem, const float* x, const float* a, const float* grad, const float* weight, float* u) {
  return flipgrad::flip(*problem, x, a, grad, weight, u);
}

int flipgrad_flip_f64(const FlipProblem* problem, const double* x, const double* a, const double* grad, const double* weight,
                      double* u) {
  return flipgrad::flip(*problem, x, a, grad, weight, u);
}

int flipgrad_ratio_f32(const FlipProblem* problem, const float* x, const float* a, const float* y, const float* weight,
                       float* log_ratio) {
  return flipgrad::ratio(*problem, x, a, y, weight, log_ratio);
}

int flipgrad_ratio_f64(const FlipProblem* problem, const double* x, const double* a, const double* y, const double* weight,
                       double* log_ratio) {
  return flipgrad::ratio(*problem, x, a, y, weight, log_ratio);
}

int flipgrad_has_avx2(void) { return flipgrad::has_avx2(); }

int flipgrad_has_avx512(void) { return flipgrad::has_avx2() && flipgrad::has_avx512_popcount(); }

