// Prefetches keys and values of the next attention operation during matrix multiplications. From about twenty rows on,
// multiplications are limited by arithmetic and attention by memory bandwidth, so the prefetch costs no time.
// (PRESERVE, Yüzügüler et al., 2025, prefetches the same data during communication over a network.)
#pragma once
#include "kv8.h"
#include "plan.h"

namespace CL_NS {

// Maximum number of bytes that a core prefetches, of weights and KV together, per multiply-add of one row with two
// groups of columns. With more bytes, multiplications wait for free line buffers.
enum { KV_AHEAD_RATE = 6 };
// KV_AHEAD_MOST: maximum number of KV bytes that a thread prefetches; they must stay in the cache. KV_AHEAD_NEAR:
// maximum number of weight bytes that are read between the prefetch and the use, because weights evict KV from the
// cache.
static const int64_t KV_AHEAD_MOST = 4 << 20, KV_AHEAD_NEAR = 8 << 20;

// State of one thread's prefetch of KV. Every thread makes the same calls, in the order of the operations.
template <typename T>
class KVAhead {
 public:
  KVAhead(const cl_program& program, const cl_batch& batch, const StepPlan& plan, int thread)
      : program_(program), batch_(batch), plan_(plan), thread_(thread) {}

  // Finds the next attention operation in [at, end), and begins with the first piece of its KV.
  void look(int at, int end) {
    weights_ = left_ = 0;
    for (; at < end && program_.ops[at].kind != CL_OP_ATTENTION; at++) weights_ += weight_bytes(program_.ops[at]);
    if (at == end) return;
    op_ = &program_.ops[at];
    kv_ = &program_.kv_layers[op_->layer];
    sharing_ = plan_.sharing_of(*op_, *kv_);
    for (span_ = 0; span_ < plan_.num_spans; span_++) left_ += find_blocks() * pieces_per_block();
    left_ = left_ < KV_AHEAD_MOST / piece_bytes() ? left_ : KV_AHEAD_MOST / piece_bytes();
    span_ = -1, block_ = end_ = 0, piece_ = pieces_per_block(), credit_ = 0.0;
  }

  // Call this when matmul `op` begins: afterwards weights_ counts the bytes of the matmuls between `op` and attention.
  void begin(const cl_op& op) { weights_ -= weight_bytes(op); }

  // Whether KV that is prefetched now will still be in the cache when attention reads it. `bytes`: number of bytes of
  // the current weight that are still to be read.
  bool due(int64_t bytes) {
    if (left_ == 0 || weights_ + bytes > KV_AHEAD_NEAR) return false;
    pace_ = double(left_) * plan_.num_threads / (double(weights_ + bytes) * batch_.num_tokens);
    return true;
  }

  // Adds KV to the prefetches of a multiplication of `rows` rows by `groups` groups of columns. It has `steps` steps
  // with `parts` multiply-adds each, and prefetches `bytes` bytes of its own in each step. The KV is spread evenly over
  // all matmuls before attention, at most one cache line per step.
  void join(Prefetch& prefetch, int rows, int groups, int steps, int parts, int64_t bytes) {
    enum { MOST = sizeof pieces_ / sizeof *pieces_, SAVED = 8 };
    prefetch.pieces = 0;
    // At most SAVED missed pieces are prefetched later, because a burst would stall the multiplication.
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
  // Bytes of a piece of KV, the unit of the prefetch: K or V of sixteen tokens and one KV head.
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

  // Sets block_ and end_ to the range of table entries whose blocks this thread prefetches for span span_: every
  // num_threads-th block that the first new token of the span's sequence reads, or is written to. The range is empty
  // for spans that are not the first of their sequence. Blocks that another span has, too, are prefetched for that one:
  // they are left out here. Returns the number of this thread's blocks.
  int find_blocks() {
    const AttentionSpan& span = plan_.spans[span_];
    const int first = batch_.cu_seqlens[span.row], size = kv_->block_size, threads = plan_.num_threads;
    const int known = batch_.seq_lens[span.row] - (batch_.cu_seqlens[span.row + 1] - first);
    const int low = op_->window > 0 && known >= op_->window ? known + 1 - op_->window : 0;
    const int begin = low / size + (thread_ + span_) % threads;
    end_ = span.first_token == first && known > 0 ? known / size + 1 : 0;
    const Sharer* sharer = sharing_ ? sharing_->sharer(span_) : nullptr;
    left_out_ = sharer ? sharer->known_from / size : 0;
    left_out_end_ = sharer ? sharer->known_until / size : 0;
    table_ = block_table(batch_, kv_->group, span.row);
    block_ = allowed(begin);
    // This thread's blocks of [begin, limit).
    const auto count = [&](int limit) { return limit > begin ? (limit - begin + threads - 1) / threads : 0; };
    const int left_out = count(left_out_end_ < end_ ? left_out_end_ : end_) - count(left_out_ < end_ ? left_out_ : end_);
    return count(end_) - left_out;
  }

  // The first of this thread's blocks from `block` on that is not left out.
  int allowed(int block) const {
    if (block < left_out_ || block >= left_out_end_) return block;
    const int threads = plan_.num_threads;
    return block + (left_out_end_ - block + threads - 1) / threads * threads;
  }

  // Moves to the next block, which exists because left_ > 0.
  void next_block() {
    piece_ = 0;
    block_ = allowed(block_ + plan_.num_threads);
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
  const SharingPlan* sharing_ = nullptr;
  const int32_t* table_ = nullptr;
  int span_ = 0, block_ = 0, end_ = 0, piece_ = 0;
  int left_out_ = 0, left_out_end_ = 0;  // table entries of the span that are not prefetched for it
  int64_t weights_ = 0, left_ = 0;     // weights_: bytes of weights before attention; left_: pieces still to prefetch
  double pace_ = 0.0, credit_ = 0.0;   // pace_: pieces per row and byte of weight; credit_: pieces that are due now
  const char* pieces_[32];
};

}  // namespace CL_NS
