// One instruction-set path. Each source file in paths/ is compiled once per path, with the path's compiler flags, its
// namespace CL_NS, and CL_USE_AMX for AMX. So a path consists of several objects, which are compiled at the same time.
// Every path has a namespace of its own, because the linker must never mix code of two paths.
#pragma once
#include "grouped.h"
#include "kernels.h"
#if defined(CL_USE_AMX)
#include "tiles.h"
#endif
#if defined(CL_TILE_CODES)
#include "tile_codes.h"
#endif

namespace CL_NS {

#if !defined(CL_ARM)
// Makes the processor treat subnormal numbers as zero during a run. Instructions that multiply bf16 always do so, and
// all instruction sets must give results of the same kind.
struct FlushSubnormals {
  const unsigned before = _mm_getcsr();
  FlushSubnormals() { _mm_setcsr(before | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before); }
};
#endif

// Releases the AMX tile registers after a run. Code that uses tiles sets their shapes first.
struct Tiles {
#if defined(CL_USE_AMX)
  ~Tiles() { tiles_end(); }
#else
  ~Tiles() {}
#endif
};

void run_bf16(cl_pool&, int thread, const cl_program&, const cl_batch&, const StepPlan&, int first_op, int end_op);
void run_f32(cl_pool&, int thread, const cl_program&, const cl_batch&, const StepPlan&, int first_op, int end_op);

typedef Code<8, FIXED_ZERO> Q8;
typedef Code<4, FIXED_ZERO> Q4;
typedef Code<8, MINIMUM> Q8Min;
typedef Code<4, MINIMUM> Q4Min;
typedef Code<4, E2M1> FourBitFloat;

// code_product is large and does not depend on the type of the activations. So only products_of_codes.cpp compiles it,
// for each format of weights and each number of groups of columns.
#define CL_CODE_PRODUCT(FORMAT, V)                                                                                    \
  template void code_product<FORMAT, V>(int, const Pair<float, FORMAT>::Left*, int64_t, const FORMAT*, int, int, int, \
                                        float*, int64_t, Prefetch)
extern CL_CODE_PRODUCT(Q8, 1);
extern CL_CODE_PRODUCT(Q8, 2);
extern CL_CODE_PRODUCT(Q4, 1);
extern CL_CODE_PRODUCT(Q4, 2);
extern CL_CODE_PRODUCT(Q8Min, 1);
extern CL_CODE_PRODUCT(Q8Min, 2);
extern CL_CODE_PRODUCT(Q4Min, 1);
extern CL_CODE_PRODUCT(Q4Min, 2);
extern CL_CODE_PRODUCT(FourBitFloat, 1);
extern CL_CODE_PRODUCT(FourBitFloat, 2);
#if defined(CL_TILE_CODES)
#define CL_CODE_TILES(FORMAT)                                                                                            \
  template void code_tiles<FORMAT>(int, const Pair<float, FORMAT>::Left*, int64_t, const FORMAT*, int, int, float*, int64_t, \
                                   const char*, int64_t)
extern CL_CODE_TILES(Q8);
extern CL_CODE_TILES(Q4);
extern CL_CODE_TILES(Q8Min);
extern CL_CODE_TILES(Q4Min);
extern CL_CODE_TILES(FourBitFloat);
#endif

}  // namespace CL_NS
