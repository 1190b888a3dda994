// The plan of a step, made before any thread starts: division of attention into tasks.
#pragma once
#include <stdint.h>

#include "chairlift_cpu.h"

enum {
  KV_SPLIT = 1024,         // tokens; a context is always summed in pieces of this size
  SPAN_TOKENS = 16,        // most queries of one sequence in one task
  MAX_SPLIT_ROWS = 64,     // most rows of a task whose pieces may go to different threads
};

// Block numbers of one row of a step in one cache group.
static inline const int32_t* block_table(const cl_batch& batch, int group, int row) {
  return batch.block_tables + (int64_t(group) * batch.num_rows + row) * batch.table_width;
}

// Neighbouring queries of one sequence.
struct AttentionSpan {
  int32_t row;          // row of the batch
  int32_t first_token;  // in the flat batch
  int32_t num_tokens;
  int64_t cost;         // number of query-key pairs, used to sort by cost
};

struct StepPlan {
  const AttentionSpan* spans;
  int32_t num_spans, max_splits, longest_span, num_threads;
  void* shared;  // results of splits, or null

  // Whether the splits of one task go to different threads: only if there are too few tasks to keep all threads busy.
  bool split_tasks(int kv_heads, int group) const {
    return shared && max_splits > 1 && num_spans * kv_heads < 8 * num_threads && longest_span * group <= MAX_SPLIT_ROWS;
  }
};
