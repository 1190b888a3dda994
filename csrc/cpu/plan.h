// Divides the attention of a step into tasks for the threads. The plan is made before any thread starts.
#pragma once
#include <stdint.h>

#include "chairlift_cpu.h"

enum {
  KV_SPLIT = 1024,         // length in tokens of a split. Attention sums each split of a context, then adds the splits
  KV_TILE = 256,           // length in tokens of a tile: attention multiplies by the keys of a tile, then by its values
  SPAN_TOKENS = 16,        // maximum number of neighbouring tokens of a sequence whose queries are in one task
  MAX_SPLIT_ROWS = 64,     // maximum number of rows of a task whose splits may go to different threads
  MOST_SHARING_KINDS = 8,  // kinds of attention operations of a program that can share keys
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

// A span whose first keys are also read by other spans of the step. Neighbours in the list of sharers share the most.
struct Sharer {
  int32_t span;  // index in StepPlan::spans
  // Positions at which the block table of the sharer before this one has the same blocks: multiples of the block size.
  // The range is empty if the two are not in one task.
  int32_t equal_from, equal_until;
  // The same for the span before this one in the order of tables, even if the two are not in one task. Those blocks are
  // prefetched for that span.
  int32_t known_from, known_until;
  int32_t shared_until;  // the keys of [low, shared_until) are read in shared tasks: a multiple of KV_TILE
  int32_t low;           // first position that the span reads

  // Whether a shared task computes the first tiles that the sharer reads of this split, and which tokens these are. The
  // sequence may end before `end`.
  bool shares(int split) const { return begin(split) < end(split); }
  int begin(int split) const { return low > split * KV_SPLIT ? low : split * KV_SPLIT; }
  int end(int split) const { return shared_until < (split + 1) * KV_SPLIT ? shared_until : (split + 1) * KV_SPLIT; }
};

// Neighbouring sharers, whose rows read the keys of one split together.
struct SharedTask {
  int32_t first, count, split;  // sharers [first, first + count)
  int64_t cost;                 // number of query-key pairs; tasks are sorted by it
};

// The shared keys of a step, for all attention operations with equal fields of the first line. `group`: query heads per
// KV head.
struct SharingPlan {
  int32_t cache_group, block_size, window, kv_heads, group;
  const Sharer* sharers;
  const int32_t* sharer_of;  // for each span: index of its sharer, or -1
  const SharedTask* tasks;
  int32_t num_sharers, num_tasks;
  int32_t rows;  // the largest number of query rows of a sharer

  // The sharer of a span, or null if the span shares nothing.
  const Sharer* sharer(int64_t span) const { return sharer_of[span] < 0 ? nullptr : sharers + sharer_of[span]; }

  // Index of the first number of a shared task's result for one sharer, KV head and split: `rows` highest scores, `rows`
  // sums, and values [rows, head_dim].
  int64_t place(int sharer, int kv_head, int split, int splits, int head_dim) const {
    return ((int64_t(sharer) * kv_heads + kv_head) * splits + split) * rows * (head_dim + 2);
  }
};

struct StepPlan {
  const AttentionSpan* spans;
  int32_t num_spans, max_splits, longest_span, num_threads;
  void* shared;  // memory for one result per split, or null
  const SharingPlan* sharing = nullptr;  // plans of the operations that share keys
  int32_t num_sharing = 0;
  float* handed = nullptr;  // memory for the results of shared tasks; see SharingPlan::place

  // The plan of an attention operation, or null if its spans share no keys.
  const SharingPlan* sharing_of(const cl_op& op, const cl_kv_layer& kv) const {
    if (op.flags & (CL_BOTH_WAYS | CL_APART)) return nullptr;
    for (const SharingPlan* plan = sharing; plan < sharing + num_sharing; plan++)
      if (plan->cache_group == kv.group && plan->block_size == kv.block_size && plan->window == op.window &&
          plan->kv_heads == op.kv_heads && plan->group == op.heads / op.kv_heads)
        return plan;
    return nullptr;
  }

  // Whether the splits of one task go to different threads. They do if there are too few tasks to keep all threads
  // busy. `group`: number of query heads per KV head.
  bool split_tasks(int kv_heads, int group) const {
    return shared && max_splits > 1 && num_spans * kv_heads < 8 * num_threads && longest_span * group <= MAX_SPLIT_ROWS;
  }
};
