// The kernels of recurrent layers alone, for one thread: test_recurrent_mutants.py compiles them with and without mistakes.
#define CL_NS cl_recurrent
#include "delta_rule.h"
#include "mamba2.h"

extern "C" __attribute__((visibility("default"))) int run_recurrent(const cl_op* op, const cl_program* program,
                                                                     const cl_batch* batch) {
  using namespace cl_recurrent;
  switch (op->kind) {
    case CL_OP_SHORT_CONV: short_conv<float>(*op, *program, *batch, 0, 1); return 0;
    case CL_OP_MAMBA_SCAN: scan<MambaRule, float>(*op, *program, *batch, 0, 1); return 0;
    case CL_OP_DELTA_SCAN: scan<DeltaRule, float>(*op, *program, *batch, 0, 1); return 0;
    case CL_OP_GATED_NORM: gated_norm<float>(*op, *program, *batch, 0, 1); return 0;
  }
  return -1;
}
