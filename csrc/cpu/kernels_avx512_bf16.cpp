#define CL_NS cl_avx512_bf16
#include "kernels_impl.h"

const Kernels* kernels_avx512_bf16() {
  // Every processor with AVX512-BF16 also has AVX512-VNNI, but the code uses both, so both are checked.
  const bool has = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  return kernels_avx512() && has ? &cl_avx512_bf16::table : nullptr;
}
