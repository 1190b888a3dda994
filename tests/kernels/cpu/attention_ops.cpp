// Attention in float32 alone, as the AVX2 path of a library: test_shared_keys.py compiles it with and without mistakes.
#define CL_NS cl_avx2
#include "attention_tasks.h"
#include "kernels.h"

namespace cl_avx2 {

static void run(cl_pool& pool, int thread, const cl_program& program, const cl_batch& batch, const StepPlan& plan,
                int first_op, int end_op) {
  void* memory = pool.scratch(thread, sizeof(AttentionScratch<float>));
  for (int i = first_op; i < end_op; i++) {
    AttentionScratch<float>& scratch = *static_cast<AttentionScratch<float>*>(memory);
    attention<float>(pool, thread, program.ops[i], program, batch, plan, scratch, false);
    pool.barrier(thread);
  }
}

static size_t split_state_bytes() { return sizeof(SoftmaxState); }
static size_t scratch_bytes(int, int32_t) { return sizeof(AttentionScratch<float>); }

// With few shared tokens, so that groups also begin and end within a tile.
const Kernels table = {run, nullptr, nullptr, nullptr, {}, split_state_bytes, scratch_bytes, nullptr, nullptr, 64};

}  // namespace cl_avx2
