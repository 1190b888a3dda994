#define CL_NS cl_avx512_bf16
#include "kernels_impl.h"

const Kernels* kernels_avx512_bf16() {
  return kernels_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") ? &cl_avx512_bf16::table : nullptr;
}
