// The table of functions that each instruction-set path provides. api.cpp selects one path per program.
#pragma once
#include "chairlift_cpu.h"
#include "plan.h"
#include "pool.h"

// Arguments of cl_head, or of cl_sample, which uses only vocab, num_rows, rows, logits and logits_stride.
struct HeadCall {
  const cl_program& program;
  const void* hidden;
  int64_t stride;
  const int32_t* token_rows;
  int32_t num_rows;
  const cl_op* product;
  int32_t vocab;
  cl_sampling_row* rows;
  float* logits;
  int64_t logits_stride;
  void* shared;  // memory of head_shared_bytes(...) bytes, used by all threads
};

struct Kernels {
  // Every thread of the pool calls these three functions during a run.
  void (*run)(cl_pool&, int thread, const cl_program&, const cl_batch&, const StepPlan&, int first_op, int end_op);
  void (*head)(cl_pool&, int thread, const HeadCall&);
  void (*sample)(cl_pool&, int thread, const HeadCall&);
  // Returns the seconds that `rounds` rounds of the path's fastest multiply-add instruction take.
  double (*peak)(int64_t rounds, bool int8);
  double operations_per_round[2];  // index 0: bf16 or float32; index 1: int8
  // The following functions return sizes in bytes. They differ between instruction sets, because types do.
  size_t (*split_state_bytes)();
  size_t (*scratch_bytes)(int dtype, int32_t vocab);  // per thread; vocab 0: no memory for sampling
  size_t (*head_shared_bytes)(int num_threads, int num_rows, int64_t stride, int dtype, int32_t k);
  size_t (*expert_bytes)(const cl_op& op, int dtype, int32_t tokens);
};

// Each function returns the table of its instruction-set path, or null if the build or the processor does not have this
// path.
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512_bf16();
const Kernels* kernels_amx();
