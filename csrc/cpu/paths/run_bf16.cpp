// Runs programs whose activations are bf16.
#include "../run.h"

namespace CL_NS {

void run_bf16(cl_pool& pool, int thread, const cl_program& program, const cl_batch& batch, const StepPlan& plan,
              int first_op, int end_op) {
  run_of<bf16>(pool, thread, program, batch, plan, first_op, end_op);
}

}  // namespace CL_NS
