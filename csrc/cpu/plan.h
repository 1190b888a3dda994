// Divides the attention of a step into tasks for the threads. The plan is made before any thread starts.
#pragma once
#include <stdint.h>

#include "chairlift_cpu.h"

enum {
  KV_SPLIT = 1024,         // length in tokens of a split. Attention sums each split of a context, then adds the splits
  SPAN_TOKENS = 16,        // maximum number of neighbouring tokens of a sequence whose queries are in one task
  MAX_SPLIT_ROWS = 64,     // maximum number of rows of a task whose splits may go to different threads
};

// Ids of the blocks that hold the sequence of a step's row, in one cache group.
static inline const int32_t* block_table(const cl_batch& batch, int group, int row) {
  return batch.block_tables + (int64_t(group) * batch.num_rows + row) * batch.table_width;
}

// Neighbouring tokens of one sequence, whose queries attend in one task for each KV head.
struct AttentionSpan {
  int32_t row;          // index of the sequence's row in the batch
  int32_t first_token;  // index of the first token in the flat batch
  int32_t num_tokens;
  int64_t cost;         // number of query-key pairs; spans are sorted by it
};

struct StepPlan {
  const AttentionSpan* spans;
  int32_t num_spans, max_splits, longest_span, num_threads;
  void* shared;  // memory for one result per split, or null

  // Whether the splits of one task go to different threads. They do if there are too few tasks to keep all threads
  // busy. `group`: number of query heads per KV head.
  bool split_tasks(int kv_heads, int group) const {
    return shared && max_splits > 1 && num_spans * kv_heads < 8 * num_threads && longest_span * group <= MAX_SPLIT_ROWS;
  }
};
