// The functions of system.h for the system of this build. CL_ANY_SYSTEM makes a build for tests on Linux that uses the
// functions of other systems.
#if defined(__linux__) && !defined(CL_ANY_SYSTEM)
#include "system/linux.h"
#else
#include "system/posix.h"
#endif
