// Says which instruction-set paths this build contains, and which of them the processor can run. This file is compiled
// for every processor of an architecture.
#if defined(__aarch64__)
#include "isa/detect_arm.h"
#else
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"

// Bit i is set if the build contains path i (a cl_isa).
#if !defined(CL_PATHS)
#define CL_PATHS 31
#endif

namespace {

// Whether this process may use AMX tiles: the processor must have them, and the operating system must permit this
// process to use their large state. The process asks for the permission once.
bool tiles_granted() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const unsigned needed = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  const long request_permission = 0x1023, tile_data = 18;
  return (edx & needed) == needed && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

// Every processor with AVX512-BF16 also has AVX512-VNNI, but the code uses both, so both are checked.
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

bool has_amx() {
#if defined(CL_AMX_ANYWHERE)
  return true;  // a build for tests, which emulate the instructions
#else
  static const bool granted = has_avx512_bf16() && tiles_granted();
  return granted;
#endif
}

bool processor_has(int32_t isa) {
  switch (isa) {
    case CL_AVX2: return has_avx2();
    case CL_AVX512: return has_avx512();
    case CL_AVX512_VNNI: return has_avx512_vnni();
    case CL_AVX512_BF16: return has_avx512_bf16();
    case CL_AMX: return has_amx();
  }
  return false;
}

}  // namespace
#endif

const Kernels* kernels_of(int32_t isa) {
  if (isa < 0 || isa >= CL_NUM_ISAS || !(CL_PATHS >> isa & 1) || !processor_has(isa)) return nullptr;
  switch (isa) {
#if CL_PATHS & 1
    case CL_AVX2: return &cl_avx2::table;
#endif
#if CL_PATHS & 2
    case CL_AVX512: return &cl_avx512::table;
#endif
#if CL_PATHS & 4
    case CL_AVX512_VNNI: return &cl_avx512_vnni::table;
#endif
#if CL_PATHS & 8
    case CL_AVX512_BF16: return &cl_avx512_bf16::table;
#endif
#if CL_PATHS & 16
    case CL_AMX: return &cl_amx::table;
#endif
#if CL_PATHS & 32
    case CL_NEON: return &cl_neon::table;
#endif
#if CL_PATHS & 64
    case CL_NEON_I8MM: return &cl_neon_i8mm::table;
#endif
  }
  return nullptr;
}

int32_t cl_built_isas(void) { return CL_PATHS; }

int32_t cl_supported_isas(void) {
  int32_t mask = 0;
  for (int32_t isa = 0; isa < CL_NUM_ISAS; isa++)
    if (kernels_of(isa)) mask |= 1 << isa;
  return mask;
}
