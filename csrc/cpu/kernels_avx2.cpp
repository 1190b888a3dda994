#define CL_NS cl_avx2
#include "kernels_impl.h"

const Kernels* kernels_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &cl_avx2::table : nullptr;
}
