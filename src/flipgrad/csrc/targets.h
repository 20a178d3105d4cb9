// The instruction sets that kernels are compiled for, and which of them runs here.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#define FLIPGRAD_X86 1
// GCC warns of registers that its own header leaves undefined on purpose (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#define FLIPGRAD_AVX2 __attribute__((target("avx2,fma")))
#define FLIPGRAD_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,avx2,fma")))
#endif

namespace flipgrad {

inline bool has_avx2() {
#ifdef FLIPGRAD_X86
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

inline bool has_avx512() {
#ifdef FLIPGRAD_X86
  return __builtin_cpu_supports("avx512f");
#else
  return false;
#endif
}

// What FLIPGRAD_AVX512 asks for.
inline bool has_avx512_popcount() {
#ifdef FLIPGRAD_X86
  return has_avx2() && has_avx512() && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vpopcntdq");
#else
  return false;
#endif
}

// The best of a kernel's forms for this processor, of those that for_each_target.inc made with FLIPGRAD_WITH_AVX512; `most` is the
// field `portable` of a problem.
#define FLIPGRAD_BEST(most, kernel)                          \
  ((most) == 1 || !has_avx2()              ? portable::kernel \
   : (most) == 0 && has_avx512_popcount() ? avx512::kernel   \
                                          : fastest::kernel)

// While it lives, numbers below the smallest normal one are 0 on this thread: they contribute nothing, but processors take
// a hundred times as long for them.
class FlushToZero {
 public:
#ifdef FLIPGRAD_X86
  FlushToZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushResults | kFlushArguments); }
  ~FlushToZero() { _mm_setcsr(saved_); }
  FlushToZero(const FlushToZero&) = delete;
  FlushToZero& operator=(const FlushToZero&) = delete;

 private:
  static constexpr unsigned kFlushResults = 0x8000, kFlushArguments = 0x0040;
  const unsigned saved_;
#endif
};

}  // namespace flipgrad
