// The program loop of an instruction-set path, for one type of activations.
#pragma once
#include "attention_tasks.h"
#include "comm.h"
#include "delta_rule.h"
#include "experts.h"
#include "linear.h"
#include "mamba2.h"
#include "path.h"
#include "recurrent.h"
#include "scratch.h"

namespace CL_NS {

template <typename T>
static void run_of(cl_pool& pool, int thread, const cl_program& program, const cl_batch& batch, const StepPlan& plan,
                   int first_op, int end_op) {
  Scratch<T>& scratch = *static_cast<Scratch<T>*>(pool.scratch(thread, sizeof(Scratch<T>)));
  const Share share = share_of(batch.num_tokens, thread, pool.num_threads());
  KVAhead<T> kv(program, batch, plan, thread);
  kv.look(first_op, end_op);
  for (int i = first_op; i < end_op; i++) {
    const cl_op& op = program.ops[i];
    bool goes_on = true;  // equal in all threads
    switch (op.kind) {
      case CL_OP_EMBED: embed<T>(op, program, batch, share); break;
      case CL_OP_ROTARY: rotary_table(op, program, batch, share); break;
      case CL_OP_RMS_NORM: rms_norm<T>(op, program, share); break;
      case CL_OP_ADD: add<T>(op, program, share); break;
      case CL_OP_LAYER_NORM: layer_norm<T>(op, program, share); break;
      case CL_OP_SCALE: scale<T>(op, program, share); break;
      case CL_OP_HEADS: heads<T>(op, program, batch, share); break;
      case CL_OP_SHORT_CONV: short_conv<T>(op, program, batch, thread, pool.num_threads()); break;
      case CL_OP_MAMBA_SCAN: scan<MambaRule, T>(op, program, batch, thread, pool.num_threads()); break;
      case CL_OP_DELTA_SCAN: scan<DeltaRule, T>(op, program, batch, thread, pool.num_threads()); break;
      case CL_OP_GATED_NORM: gated_norm<T>(op, program, batch, thread, pool.num_threads()); break;
      case CL_OP_ATTENTION:
        attention<T>(pool, thread, op, program, batch, plan, scratch.attention, fetches_far());
        kv.look(i + 1, end_op);
        break;
      case CL_OP_GATHER:
        if (program.comm && thread == 0) program.comm->meet();
        break;
      case CL_OP_EXPERTS: goes_on = experts<T>(pool, thread, op, program, batch, scratch.gemm); break;
      default:
        with_weight<T>(op, [&](const auto& weight) {
          linear<T>(pool, thread, op, weight, program, batch, scratch.gemm,
                    first_weights<T>(program, i, end_op, batch.num_tokens, thread, pool.num_threads()), kv);
        });
    }
    pool.barrier(thread);
    if (op.kind == CL_OP_GATHER && program.comm && program.comm->left()) break;
    if (!goes_on) break;
  }
}

}  // namespace CL_NS
