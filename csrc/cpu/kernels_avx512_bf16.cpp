#define CL_NS cl_avx512_bf16
#include "kernels_impl.h"

const Kernels* kernels_avx512_bf16() {
  // VNNI is older: every processor with bf16 has it.
  const bool has = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  return kernels_avx512() && has ? &cl_avx512_bf16::table : nullptr;
}
