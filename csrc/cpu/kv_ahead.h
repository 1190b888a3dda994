// Prefetches keys and values of the next attention while products compute. With twenty rows or more, products are
// limited by arithmetic and attention by memory, so they can overlap. (PRESERVE, Yüzügüler et al., 2025, hides the same
// reads behind a network.)
#pragma once
#include "kv8.h"
#include "plan.h"

namespace CL_NS {

// Most bytes that a core prefetches per product of a row with two groups of columns, for weights and KV together. With
// more, products wait for free line buffers.
enum { KV_AHEAD_RATE = 6 };
// Cache bytes available to a thread; and most bytes that may be read between the prefetch and the use, because weights
// evict KV.
static const int64_t KV_AHEAD_MOST = 4 << 20, KV_AHEAD_NEAR = 8 << 20;

// The prefetch of one thread. Every thread calls every function, in the order of operations.
template <typename T>
class KVAhead {
 public:
  KVAhead(const cl_program& program, const cl_batch& batch, const StepPlan& plan, int thread)
      : program_(program), batch_(batch), plan_(plan), thread_(thread) {}

  // Finds the next attention among operations `at` to `end`. No part of its KV is prefetched yet.
  void look(int at, int end) {
    weights_ = left_ = 0;
    for (; at < end && program_.ops[at].kind != CL_OP_ATTENTION; at++) weights_ += weight_bytes(program_.ops[at]);
    if (at == end) return;
    op_ = &program_.ops[at];
    kv_ = &program_.kv_layers[op_->layer];
    for (span_ = 0; span_ < plan_.num_spans; span_++) left_ += find_blocks() * pieces_per_block();
    left_ = left_ < KV_AHEAD_MOST / piece_bytes() ? left_ : KV_AHEAD_MOST / piece_bytes();
    span_ = -1, block_ = end_ = 0, piece_ = pieces_per_block(), credit_ = 0.0;
  }

  // Notes that product `op` begins. weights_ are the bytes of the products after it.
  void begin(const cl_op& op) { weights_ -= weight_bytes(op); }

  // Whether data prefetched now will still be in the cache. `bytes` of the product's weight are not used yet.
  bool due(int64_t bytes) {
    if (left_ == 0 || weights_ + bytes > KV_AHEAD_NEAR) return false;
    pace_ = double(left_) * plan_.num_threads / (double(weights_ + bytes) * batch_.num_tokens);
    return true;
  }

  // Adds KV to the prefetches of a product with `rows` rows and `groups` groups of columns, which itself fetches
  // `bytes` at each of `steps` steps of `parts` products. KV is spread evenly over the remaining products, at most one
  // line per step.
  void join(Prefetch& prefetch, int rows, int groups, int steps, int parts, int64_t bytes) {
    enum { MOST = sizeof pieces_ / sizeof *pieces_, SAVED = 8 };
    prefetch.pieces = 0;
    // Only a part of missed prefetches is caught up, because a burst would stall the product.
    credit_ = (credit_ < SAVED ? credit_ : double(SAVED)) + pace_ * rows * steps * groups * STEP_BYTES;
    const int64_t rate = int64_t(KV_AHEAD_RATE) * parts * rows - bytes;
    if (rate <= 0 || rows < MANY_ROWS) return;
    int64_t count = (rate < 64 ? rate : 64) * steps / piece_bytes();
    count = count < int64_t(credit_) ? count : int64_t(credit_);
    count = count < MOST ? count : int64_t(MOST);
    for (; prefetch.pieces < count && left_ > 0; left_--) {
      if (piece_ == pieces_per_block()) next_block();
      const int64_t block = table_[block_];
      CL_ASSERT(block >= 0 && block < kv_->num_blocks);
      pieces_[prefetch.pieces++] =
          static_cast<const char*>(kv_->kv) + (block * pieces_per_block() + piece_++) * piece_bytes();
    }
    if (prefetch.pieces == 0) return;
    credit_ -= prefetch.pieces;
    prefetch.piece = pieces_;
    prefetch.piece_lines = int(piece_bytes() / 64);
    prefetch.gap = steps / (prefetch.pieces * prefetch.piece_lines);
  }

 private:
  // Bytes of K or V of sixteen tokens and one head.
  int64_t piece_bytes() const {
    return kv_->kind == CL_KV_INT8 ? CL_NS::piece_bytes(kv_->head_dim, code8()) : CL_NS::piece_bytes(kv_->head_dim, T());
  }
  int pieces_per_block() const { return 2 * kv_->kv_heads * (kv_->block_size / CL_KV_TOKENS); }

  static int64_t weight_bytes(const cl_op& op) {
    const bool product = op.kind == CL_OP_LINEAR || op.kind == CL_OP_LINEAR_SILU || op.kind == CL_OP_LINEAR_GELU ||
                         op.kind == CL_OP_QKV;
    const int bits = op.format == CL_DENSE ? 8 * int(sizeof(T)) : op.format == CL_Q8 || op.format == CL_Q8_MIN ? 8 : 4;
    return product ? int64_t(op.n) * op.k * bits / 8 : 0;
  }

  // Blocks from block_ to end_ that the first new token of this span's sequence sees, and where it is written. One in
  // num_threads belongs to this thread. There are none if an earlier span has the same sequence. Returns the number of
  // blocks.
  int find_blocks() {
    const AttentionSpan& span = plan_.spans[span_];
    const int first = batch_.cu_seqlens[span.row], size = kv_->block_size, threads = plan_.num_threads;
    const int known = batch_.seq_lens[span.row] - (batch_.cu_seqlens[span.row + 1] - first);
    const int low = op_->window > 0 && known >= op_->window ? known + 1 - op_->window : 0;
    block_ = low / size + (thread_ + span_) % threads;
    end_ = span.first_token == first && known > 0 ? known / size + 1 : 0;
    table_ = block_table(batch_, kv_->group, span.row);
    return block_ < end_ ? (end_ - block_ + threads - 1) / threads : 0;
  }

  // Moves to the next block. left_ > 0 guarantees that there is one.
  void next_block() {
    piece_ = 0;
    block_ += plan_.num_threads;
    while (block_ >= end_) {
      span_++;
      CL_ASSERT(span_ < plan_.num_spans);
      find_blocks();
    }
  }

  const cl_program& program_;
  const cl_batch& batch_;
  const StepPlan& plan_;
  const int thread_;
  const cl_op* op_ = nullptr;
  const cl_kv_layer* kv_ = nullptr;
  const int32_t* table_ = nullptr;
  int span_ = 0, block_ = 0, end_ = 0, piece_ = 0;
  int64_t weights_ = 0, left_ = 0;     // bytes of weights before attention; pieces left to prefetch
  double pace_ = 0.0, credit_ = 0.0;   // pieces per row and byte of weight; and pieces due
  const char* pieces_[32];
};

}  // namespace CL_NS
