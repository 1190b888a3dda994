// Instructions that code outside of the paths uses. Every processor of the architecture has them.
#pragma once

#if defined(__aarch64__)
// YIELD does nothing on most processors. ISB waits about as long as the pause instruction of x86-64.
inline void pause_processor() { __asm__ volatile("isb" ::: "memory"); }
#define CL_VECTOR_REGISTER "w"
#else
inline void pause_processor() { __builtin_ia32_pause(); }
#define CL_VECTOR_REGISTER "x"
#endif
