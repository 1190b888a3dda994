// Runs programs whose activations are float32.
#include "../run.h"

namespace CL_NS {

void run_f32(cl_pool& pool, int thread, const cl_program& program, const cl_batch& batch, const StepPlan& plan,
             int first_op, int end_op) {
  run_of<float>(pool, thread, program, batch, plan, first_op, end_op);
}

}  // namespace CL_NS
