// The functions of the C ABI. They plan the step, and start the threads.
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <new>

#include "comm.h"
#include "isa/processor.h"
#include "kernels.h"
#include "plan.h"
#include "pool.h"
#include "sharing.h"

namespace {

struct Run {
  cl_pool& pool;
  const Kernels& kernels;
  const cl_program& program;
  const cl_batch& batch;
  StepPlan plan;
  int first_op, end_op;
};

void run_on_thread(void* argument, int thread) {
  Run& run = *static_cast<Run*>(argument);
  run.kernels.run(run.pool, thread, run.program, run.batch, run.plan, run.first_op, run.end_op);
}

struct Head {
  cl_pool& pool;
  void (*part)(cl_pool&, int, const HeadCall&);
  HeadCall call;
};

void head_on_thread(void* argument, int thread) {
  Head& head = *static_cast<Head*>(argument);
  head.part(head.pool, thread, head.call);
}

// Number of splits of the longest sequence.
int splits_of(const cl_batch& batch) {
  int most = 1;
  for (int row = 0; row < batch.num_rows; row++) most = std::max(most, (batch.seq_lens[row] + KV_SPLIT - 1) / KV_SPLIT);
  return most;
}

// Divides each row into spans of at most SPAN_TOKENS tokens, and sorts them by descending cost. So cheap spans are
// computed last, and all threads end at about the same time. Returns the number of spans.
int plan_spans(const cl_batch& batch, AttentionSpan* spans, StepPlan& plan) {
  int count = 0, longest = 0;
  for (int row = 0; row < batch.num_rows; row++) {
    const int begin = batch.cu_seqlens[row], end = batch.cu_seqlens[row + 1];
    for (int token = begin; token < end; token += SPAN_TOKENS) {
      const int tokens = std::min(int(SPAN_TOKENS), end - token);
      const int64_t context = batch.seq_lens[row] - (end - token) + tokens;
      spans[count++] = AttentionSpan{row, token, tokens, tokens * context};
      longest = std::max(longest, tokens);
    }
  }
  std::sort(spans, spans + count, [](const AttentionSpan& a, const AttentionSpan& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.first_token < b.first_token;
  });
  plan.spans = spans;
  plan.num_spans = count;
  plan.longest_span = longest;
  plan.max_splits = splits_of(batch);
  return count;
}

// Finds the kinds of attention operations in a program. Returns their number. Operations of further kinds share no keys.
int sharing_kinds(const cl_program& program, SharingPlan* kinds) {
  StepPlan found{};
  found.sharing = kinds;
  for (int i = 0; i < program.num_ops && found.num_sharing < MOST_SHARING_KINDS; i++) {
    const cl_op& op = program.ops[i];
    if (op.kind != CL_OP_ATTENTION || op.flags & (CL_BOTH_WAYS | CL_APART)) continue;
    const cl_kv_layer& kv = program.kv_layers[op.layer];
    if (found.sharing_of(op, kv)) continue;
    SharingPlan& kind = kinds[found.num_sharing++];
    kind.cache_group = kv.group, kind.block_size = kv.block_size;
    kind.window = op.window, kind.kv_heads = op.kv_heads, kind.group = op.heads / op.kv_heads;
  }
  return found.num_sharing;
}

// Plans which spans read keys together. It needs SharingPlanner::bytes bytes of memory.
void plan_sharing(const cl_batch& batch, int least, SharingPlan* kinds, int num_kinds, char* memory, StepPlan& plan) {
  SharingPlanner planner(batch, plan, least);
  int count = 0;
  for (int i = 0; i < num_kinds; i++) {
    SharingPlan kind = kinds[i];
    if (planner.make(kind, memory)) kinds[count++] = kind;
  }
  plan.sharing = kinds;
  plan.num_sharing = count;
}

// Bytes of memory for the partial results of attention, in the layer that needs the most. 0 if in every layer each task
// is computed by one thread.
size_t split_bytes(const Kernels& kernels, const cl_program& program, const StepPlan& plan) {
  size_t most = 0;
  for (int i = 0; i < program.num_ops; i++) {
    const cl_op& op = program.ops[i];
    if (op.kind == CL_OP_ATTENTION && plan.split_tasks(op.kv_heads, op.heads / op.kv_heads))
      most = std::max(most, size_t(plan.num_spans) * op.kv_heads * plan.max_splits * kernels.split_state_bytes());
  }
  return most;
}

// Bytes of memory for the results of shared tasks, in the layer that needs the most.
size_t handed_bytes(const cl_program& program, const StepPlan& plan) {
  size_t most = 0;
  for (int i = 0; i < program.num_ops; i++) {
    const cl_op& op = program.ops[i];
    if (op.kind != CL_OP_ATTENTION) continue;
    const SharingPlan* sharing = plan.sharing_of(op, program.kv_layers[op.layer]);
    if (sharing) most = std::max(most, size_t(sharing->place(sharing->num_sharers, 0, 0, plan.max_splits, op.head_dim)));
  }
  return most * sizeof(float);
}

// Allocates every thread's scratch memory before the run, because an error inside a run cannot be reported. Returns
// false if memory is short.
bool reserve(cl_pool& pool, const Kernels& kernels, int dtype, int32_t vocab) {
  const size_t bytes = kernels.scratch_bytes(dtype, vocab);
  for (int thread = 0; thread < pool.num_threads(); thread++)
    if (!pool.scratch(thread, bytes)) return false;
  return true;
}

bool valid(const cl_program& program, const cl_batch& batch) {
  return batch.num_tokens >= 0 && batch.num_tokens <= program.capacity && batch.num_rows >= 0 &&
         (batch.num_rows == 0 || batch.cu_seqlens[batch.num_rows] == batch.num_tokens);
}

}  // namespace

int32_t cl_abi_version(void) { return CL_ABI_VERSION; }

void cl_struct_sizes(int64_t sizes[8]) {
  sizes[0] = sizeof(cl_op);
  sizes[1] = sizeof(cl_kv_layer);
  sizes[2] = sizeof(cl_program);
  sizes[3] = sizeof(cl_batch);
  sizes[4] = sizeof(cl_sampling_row);
  sizes[5] = sizeof(cl_experts);
  sizes[6] = sizeof(cl_lora);
  sizes[7] = sizeof(cl_embedding);
}

int64_t cl_expert_bytes(const cl_op* op, int32_t dtype, int32_t tokens) {
  for (int32_t isa = CL_NUM_ISAS - 1; isa >= 0; isa--)  // all paths have the same requirements
    if (const Kernels* kernels = kernels_of(isa)) return int64_t(kernels->expert_bytes(*op, dtype, tokens));
  return 0;
}

int32_t cl_run(cl_pool* pool, const cl_program* program, const cl_batch* batch, int32_t first_op) {
  const Kernels* kernels = kernels_of(program->isa);
  if (!kernels || !valid(*program, *batch) || first_op < 0) return -1;
  int32_t end_op = first_op;
  while (end_op < program->num_ops && program->ops[end_op].kind != CL_OP_CALL) end_op++;
  if (batch->num_tokens == 0 || end_op == first_op) return end_op;
  const size_t most_spans = size_t(batch->num_tokens / SPAN_TOKENS) + batch->num_rows + 1;
  SharingPlan kinds[MOST_SHARING_KINDS] = {};
  const int num_kinds = batch->num_rows > 1 ? sharing_kinds(*program, kinds) : 0;
  const size_t span_bytes = most_spans * sizeof(AttentionSpan);
  const size_t sharing_bytes = num_kinds ? SharingPlanner::bytes(num_kinds, most_spans, splits_of(*batch)) : 0;
  char* memory = static_cast<char*>(pool->plan_memory(span_bytes + sharing_bytes));
  AttentionSpan* spans = reinterpret_cast<AttentionSpan*>(memory);
  if (!spans || !reserve(*pool, *kernels, program->dtype, 0)) return -1;
  StepPlan plan{};
  plan.num_threads = pool->num_threads();
  plan_spans(*batch, spans, plan);
  if (num_kinds) plan_sharing(*batch, kernels->least_shared, kinds, num_kinds, memory + span_bytes, plan);
  plan.shared = spans;  // not null, because split_tasks returns false for null, and split_bytes calls split_tasks
  const size_t bytes = split_bytes(*kernels, *program, plan), handed = handed_bytes(*program, plan);
  char* shared = bytes + handed ? static_cast<char*>(pool->shared(bytes + handed)) : nullptr;
  if (!shared) plan.num_sharing = 0;
  plan.shared = bytes ? shared : nullptr;
  plan.handed = reinterpret_cast<float*>(shared + bytes);
  Run run{*pool, *kernels, *program, *batch, plan, first_op, end_op};
  pool->run(run_on_thread, &run);
  return program->comm && program->comm->left() ? -2 : end_op;
}

int32_t cl_head(cl_pool* pool, const cl_program* program, const void* hidden, int64_t stride, const int32_t* token_rows,
                const int32_t* adapters, int32_t num_rows, const cl_op* product, cl_sampling_row* rows, float* logits, int64_t logits_rows) {
  const Kernels* kernels = kernels_of(program->isa);
  if (!kernels || num_rows < 0) return -1;
  if (num_rows == 0) return 0;
  int64_t stored = 0;
  for (int32_t row = 0; row < num_rows; row++) stored += cl_needs_logits(&rows[row]);
  if (stored > logits_rows || (stored > 0 && !logits)) return -1;
  const size_t bytes = kernels->head_shared_bytes(pool->num_threads(), num_rows, stride, program->dtype, product->k);
  void* shared = pool->shared(bytes);
  if (!shared || !reserve(*pool, *kernels, program->dtype, product->n)) return -1;
  const int64_t logits_stride = (int64_t(product->n) + CL_PANEL - 1) / CL_PANEL * CL_PANEL;
  Head head{*pool, kernels->head,
            HeadCall{*program, hidden, stride, token_rows, adapters, num_rows, product, product->n, rows, logits, logits_stride, shared}};
  pool->run(head_on_thread, &head);
  return 0;
}

int32_t cl_logits(cl_pool* pool, const cl_program* program, const void* hidden, int64_t stride, const int32_t* token_rows,
                  const int32_t* adapters, int32_t num_rows, const cl_op* product, float* logits, int64_t logits_stride) {
  const Kernels* kernels = kernels_of(program->isa);
  if (!kernels || num_rows < 0) return -1;
  if (num_rows == 0) return 0;
  const size_t bytes = kernels->head_shared_bytes(pool->num_threads(), num_rows, stride, program->dtype, product->k);
  void* shared = pool->shared(bytes);
  if (!shared || !reserve(*pool, *kernels, program->dtype, product->n)) return -1;
  Head head{*pool, kernels->head,
            HeadCall{*program, hidden, stride, token_rows, adapters, num_rows, product, product->n, nullptr, logits, logits_stride, shared}};
  pool->run(head_on_thread, &head);
  return 0;
}

int32_t cl_needs_logits(const cl_sampling_row* row) {
  return row->top_k > 0 || row->top_p < 1.0 || row->min_p > 0.0f || row->repetition != 1.0f || row->presence != 0.0f ||
         row->frequency != 0.0f || row->mask_bits || row->num_allowed > 0 || row->num_bias > 0 ||
         row->num_masked > 0 || row->num_logprobs >= 0 || row->target >= 0;
}

int32_t cl_sample(cl_pool* pool, const float* logits, int64_t stride, int32_t num_rows, int32_t vocab,
                  cl_sampling_row* rows, int32_t isa) {
  const Kernels* kernels = kernels_of(isa);
  if (!kernels || num_rows < 0 || !reserve(*pool, *kernels, CL_F32, vocab)) return -1;
  static const cl_program no_program{};
  Head head{*pool, kernels->sample,
            HeadCall{no_program, nullptr, 0, nullptr, nullptr, num_rows, nullptr, vocab, rows, const_cast<float*>(logits), stride,
                     nullptr}};
  pool->run(head_on_thread, &head);
  return 0;
}

namespace {

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

struct Read {
  cl_pool& pool;
  const char* memory;
  size_t bytes;
};

// Reads one thread's part of the memory, to measure bandwidth. It combines all words by xor, so that the compiler
// cannot omit a read. It uses only instructions that every processor has; they are fast enough to use the full memory
// bandwidth.
void read_on_thread(void* argument, int thread) {
  typedef long long Words __attribute__((vector_size(16)));
  Read& read = *static_cast<Read*>(argument);
  const size_t lines = read.bytes / 64, threads = read.pool.num_threads();
  const char* at = read.memory + lines * thread / threads * 64;
  const char* end = read.memory + lines * (thread + 1) / threads * 64;
  Words sum[4] = {};
  for (; at < end; at += 64) {
    __builtin_prefetch(at + 4096, 0, 3);
    for (int i = 0; i < 4; i++) sum[i] ^= reinterpret_cast<const Words*>(at)[i];
  }
  Words all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
  __asm__ volatile("" : : CL_VECTOR_REGISTER(all));
}

struct Peak {
  const Kernels& kernels;
  int product;
  int64_t rounds;
};

void peak_on_thread(void* argument, int) {
  Peak& peak = *static_cast<Peak*>(argument);
  peak.kernels.peak(peak.rounds, peak.product);
}

}  // namespace

double cl_measure_read(cl_pool* pool, const void* memory, size_t bytes) {
  Read read{*pool, static_cast<const char*>(memory), bytes};
  const double start = seconds();
  pool->run(read_on_thread, &read);
  return double(bytes / 64 * 64) / (seconds() - start);
}

double cl_measure_peak(cl_pool* pool, int32_t isa, int32_t product, double wanted_seconds) {
  const Kernels* kernels = kernels_of(isa);
  if (!kernels || product < 0 || product >= CL_NUM_PRODUCTS || kernels->operations_per_round[product] == 0.0) return 0.0;
  const int64_t trial = 20000;
  const double rate = trial / kernels->peak(trial, product);
  Peak peak{*kernels, product, trial};
  pool->run(peak_on_thread, &peak);  // wakes the threads: the time of waking must not be measured
  peak.rounds = std::max<int64_t>(trial, int64_t(rate * wanted_seconds));
  const double start = seconds();
  pool->run(peak_on_thread, &peak);
  return double(peak.rounds) * kernels->operations_per_round[product] * pool->num_threads() / (seconds() - start);
}
