// The table of functions that each instruction-set path provides. api.cpp selects one path per program.
#pragma once
#include "chairlift_cpu.h"
#include "plan.h"
#include "pool.h"

// Arguments of cl_head, of cl_logits, or of cl_sample, which uses only vocab, num_rows, rows, logits and logits_stride.
struct HeadCall {
  const cl_program& program;
  const void* hidden;
  int64_t stride;
  const int32_t* token_rows;
  const int32_t* adapters;  // [num_rows]: index of each row's adapter in program.lora, or negative; or null
  int32_t num_rows;
  const cl_op* product;
  int32_t vocab;
  cl_sampling_row* rows;  // null: the logits of all rows are stored, and no token is chosen
  float* logits;
  int64_t logits_stride;
  void* shared;  // memory of head_shared_bytes(...) bytes, used by all threads
};

struct Kernels {
  // Every thread of the pool calls these three functions during a run.
  void (*run)(cl_pool&, int thread, const cl_program&, const cl_batch&, const StepPlan&, int first_op, int end_op);
  void (*head)(cl_pool&, int thread, const HeadCall&);
  void (*sample)(cl_pool&, int thread, const HeadCall&);
  // Returns the seconds that `rounds` rounds of the path's fastest multiply-add instruction for a cl_product take.
  double (*peak)(int64_t rounds, int product);
  double operations_per_round[CL_NUM_PRODUCTS];  // 0: the path has no such instruction
  // The following functions return sizes in bytes. They differ between instruction sets, because types do.
  size_t (*split_state_bytes)();
  size_t (*scratch_bytes)(int dtype, int32_t vocab);  // per thread; vocab 0: no memory for sampling
  size_t (*head_shared_bytes)(int num_threads, int num_rows, int64_t stride, int dtype, int32_t k);
  size_t (*expert_bytes)(const cl_op& op, int dtype, int32_t tokens);
  int least_shared;  // number of tokens from which on it pays that several sequences read keys together
};

// The tables of the instruction-set paths. A build may contain only some of them, see CL_PATHS in paths.cpp.
namespace cl_avx2 { extern const Kernels table; }
namespace cl_avx512 { extern const Kernels table; }
namespace cl_avx512_vnni { extern const Kernels table; }
namespace cl_avx512_bf16 { extern const Kernels table; }
namespace cl_amx { extern const Kernels table; }
namespace cl_neon { extern const Kernels table; }
namespace cl_neon_i8mm { extern const Kernels table; }

// The table of a path (a cl_isa), or null if the build or the processor does not have this path.
const Kernels* kernels_of(int32_t isa);
