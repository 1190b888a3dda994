// Says which paths an ARM64 processor can run.
#pragma once
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "../kernels.h"

#if !defined(CL_PATHS)
#define CL_PATHS 96
#endif

namespace {

#if defined(__APPLE__)
bool reports(const char* name) {
  int32_t value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dot_products() { return reports("hw.optional.arm.FEAT_DotProd"); }
bool has_matrix_products() { return reports("hw.optional.arm.FEAT_I8MM"); }
#else
#if !defined(HWCAP2_I8MM)
#define HWCAP2_I8MM (1 << 13)
#endif
bool has_dot_products() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
bool has_matrix_products() { return getauxval(AT_HWCAP2) & HWCAP2_I8MM; }
#endif

bool processor_has(int32_t isa) {
  switch (isa) {
    case CL_NEON: return has_dot_products();
    case CL_NEON_I8MM: return has_dot_products() && has_matrix_products();
  }
  return false;
}

}  // namespace
