#define CL_NS cl_avx512
#include "kernels_impl.h"

const Kernels* kernels_avx512() {
  const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has ? &cl_avx512::table : nullptr;
}
