// The instruction sets that kernels are compiled for, and which of them runs here.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#define FLIPGRAD_X86 1
#define FLIPGRAD_AVX2 __attribute__((target("avx2,fma")))
#endif

namespace flipgrad {

inline bool has_avx2() {
#ifdef FLIPGRAD_X86
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

}  // namespace flipgrad
