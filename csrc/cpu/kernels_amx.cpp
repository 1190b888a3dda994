#define CL_NS cl_amx
#define CL_USE_AMX
#include "kernels_impl.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Whether this process may use AMX tiles: the processor must have them, and the operating system must permit this
// process to use their large state. The process asks for the permission once.
bool tiles_granted() {
#if defined(CL_AMX_ANYWHERE)
  return true;  // a build for tests, which emulate the instructions
#else
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const unsigned needed = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  const long request_permission = 0x1023, tile_data = 18;
  return (edx & needed) == needed && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#endif
}

}  // namespace

const Kernels* kernels_amx() {
  static const bool granted = tiles_granted();
  return granted && kernels_avx512_bf16() ? &cl_amx::table : nullptr;
}
