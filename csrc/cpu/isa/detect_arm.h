// Says which paths an ARM64 processor can run.
#pragma once
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include "../kernels.h"

#if !defined(CL_PATHS)
#define CL_PATHS 32
#endif

namespace {

bool processor_has(int32_t isa) { return isa == CL_NEON && getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }

}  // namespace
