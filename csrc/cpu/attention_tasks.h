// Divides the attention of one operation among threads.
//
// First come the shared tasks: the rows of several sequences over keys of a split that they share. Then each span
// without shared keys, as a whole or split by split. After a barrier, the spans that shared keys or were split go on:
// they take over the states of their splits, attend to the rest of their own keys, and merge the splits in order.
#pragma once
#include "shared_keys.h"

namespace CL_NS {

template <typename T, typename Stored>
class AttentionTasks {
 public:
  AttentionTasks(cl_pool& pool, int thread, const cl_op& op, const cl_program& program, const cl_batch& batch,
                 const StepPlan& plan, AttentionScratch<T>& s, bool far)
      : pool_(pool), thread_(thread), op_(op), batch_(batch), plan_(plan), kv_(program.kv_layers[op.layer]), s_(s),
        far_(far), group_(op.heads / op.kv_heads), splits_(plan.split_tasks(op.kv_heads, group_) ? plan.max_splits : 1),
        sharing_(plan.sharing_of(op, kv_)), q_(static_cast<const T*>(program.buffers[op.in])),
        out_(static_cast<T*>(program.buffers[op.out])), q_stride_(program.strides[op.in]),
        out_stride_(program.strides[op.out]) {}

  void run() {
    const int64_t shared = sharing_ ? int64_t(sharing_->num_tasks) * op_.kv_heads : 0;
    const int64_t items = shared + int64_t(plan_.num_spans) * op_.kv_heads * splits_;
    Turns turns(pool_, thread_, items, Turns::SPREAD);
    for (int64_t item = turns.take(); item < items; item = turns.take()) {
      const int64_t following = turns.peek();  // next item, whose first keys can be prefetched
      if (item < shared)
        attend_shared(sharing_->tasks[item / op_.kv_heads], int(item % op_.kv_heads));
      else
        attend_span(item - shared, following < items ? following - shared : -1);
    }
    if (splits_ == 1 && !sharing_) return;
    pool_.barrier(thread_);
    const int64_t sharers = splits_ == 1 ? sharing_->num_sharers : plan_.num_spans, ends = sharers * op_.kv_heads;
    Turns merges(pool_, thread_, ends, Turns::SPREAD);
    for (int64_t item = merges.take(); item < ends; item = merges.take()) {
      const int64_t one = item / op_.kv_heads;
      const int64_t span = splits_ == 1 ? sharing_->sharers[one].span : one;
      finish(span, int(item % op_.kv_heads), Sixteens<Stored>{});
    }
  }

 private:
  const Sharer* sharer_of(int64_t span) const { return sharing_ ? sharing_->sharer(span) : nullptr; }
  const int32_t* table_of(const AttentionSpan& span) const { return block_table(batch_, kv_.group, span.row); }
  AttentionTask task_of(const AttentionSpan& span, int kv_head, int rows) const {
    return AttentionTask{op_, kv_, table_of(span), kv_head, rows, far_};
  }
  SoftmaxState& split_state(int64_t span, int kv_head, int split) const {
    return static_cast<SoftmaxState*>(plan_.shared)[(span * op_.kv_heads + kv_head) * splits_ + split];
  }
  float* handed(const Sharer& sharer, int kv_head, int split) const {
    const int index = int(&sharer - sharing_->sharers);
    return plan_.handed + sharing_->place(index, kv_head, split, plan_.max_splits, op_.head_dim);
  }

  // Computes the states of several spans over the keys of one split that they share.
  void attend_shared(const SharedTask& shared, int kv_head) {
    Member members[SharedTile::MOST];
    int rows = 0;
    const Sharer* sharers = sharing_->sharers + shared.first;
    for (int i = 0; i < shared.count; i++) {
      const Sharer& one = sharers[i];
      const AttentionSpan& span = plan_.spans[one.span];
      const AttentionPiece piece{op_, batch_, span, kv_head, 0, span.num_tokens * group_};
      load_queries<Stored>(piece, q_, q_stride_, s_, rows);
      const int end = one.end(shared.split), high = s_.high[rows + piece.rows - 1];
      members[i] = Member{table_of(span), rows, piece.rows, one.begin(shared.split), end < high ? end : high,
                          one.equal_from, one.equal_until};
      rows += piece.rows;
    }
    const AttentionTask task{op_, kv_, members[0].block_table, kv_head, rows, far_};
    attend_together<Stored>(task, members, shared.count, s_, s_.all);
    for (int i = 0; i < shared.count; i++)
      hand_over(s_.all, members[i].first_row, members[i].rows, sharing_->rows, op_.head_dim,
                handed(sharers[i], kv_head, shared.split));
  }

  // Computes a span, or one split of it. What it shares, and what must wait for that, is left out.
  void attend_span(int64_t item, int64_t following) {
    const int64_t index = item / splits_ / op_.kv_heads;
    const int kv_head = int(item / splits_ % op_.kv_heads), split = int(item % splits_);
    const Sharer* sharer = sharer_of(index);
    if (sharer && (splits_ == 1 || sharer->shares(split))) return;
    Sixteens<Stored> after = {};
    if (following >= 0) after = first_keys_of(following);
    if (splits_ == 1) return finish(index, kv_head, after);
    const AttentionSpan& span = plan_.spans[index];
    const AttentionPiece piece{op_, batch_, span, kv_head, 0, span.num_tokens * group_};
    load_queries<Stored>(piece, q_, q_stride_, s_);
    const int from = s_.low[0], to = s_.high[piece.rows - 1], begin = split * KV_SPLIT, end = begin + KV_SPLIT;
    if (begin < to && end > from)
      attend_split(piece, task_of(span, kv_head, piece.rows), s_, split_state(index, kv_head, split),
                   begin > from ? begin : from, end < to ? end : to, after, q_, q_stride_);
  }

  Sixteens<Stored> first_keys_of(int64_t item) const {
    const AttentionSpan& span = plan_.spans[item / splits_ / op_.kv_heads];
    const int kv_head = int(item / splits_ % op_.kv_heads), begin = int(item % splits_) * KV_SPLIT;
    return first_keys<Stored>(AttentionPiece{op_, batch_, span, kv_head, 0, 1}, task_of(span, kv_head, 1), begin,
                              splits_ > 1 ? begin + KV_SPLIT : INT32_MAX);
  }

  // Computes the results of a span. It takes over the states of splits that other tasks computed.
  void finish(int64_t index, int kv_head, const Sixteens<Stored>& after) {
    const AttentionSpan& span = plan_.spans[index];
    for (int first = 0; first < span.num_tokens * group_; first += MAX_ATTENTION_ROWS) {
      int rows = span.num_tokens * group_ - first;
      rows = rows < MAX_ATTENTION_ROWS ? rows : MAX_ATTENTION_ROWS;
      const AttentionPiece piece{op_, batch_, span, kv_head, first, rows};
      load_queries<Stored>(piece, q_, q_stride_, s_);
      store_outputs(piece, merged(piece, index, after), out_, out_stride_);
    }
  }

  // The state of all keys of a piece, whose queries are in the scratch.
  const SoftmaxState& merged(const AttentionPiece& piece, int64_t index, const Sixteens<Stored>& after) {
    const AttentionTask task = task_of(piece.span, piece.kv_head, piece.rows);
    const Sharer* sharer = sharer_of(index);
    const int from = s_.low[0], to = s_.high[piece.rows - 1];  // rows are sorted by position
    SoftmaxState* all = nullptr;
    for (int split = from / KV_SPLIT; split * KV_SPLIT < to; split++) {
      const int begin = split * KV_SPLIT, end = begin + KV_SPLIT;
      const bool shared = sharer && sharer->shares(split);
      SoftmaxState* state = all ? &s_.split : &s_.all;
      if (shared) take_over(*state, piece.rows, sharing_->rows, op_.head_dim, handed(*sharer, piece.kv_head, split));
      if (shared || splits_ == 1)
        attend_split(piece, task, s_, *state, begin > from ? begin : from, end < to ? end : to,
                     end < to ? first_keys<Stored>(piece, task, end, INT32_MAX) : after, q_, q_stride_,
                     shared ? sharer->end(split) : 0);
      else
        state = &split_state(index, piece.kv_head, split);
      if (all)
        merge_states(*all, *state, piece.rows, op_.head_dim);
      else
        all = state;
    }
    return *all;
  }

  cl_pool& pool_;
  const int thread_;
  const cl_op& op_;
  const cl_batch& batch_;
  const StepPlan& plan_;
  const cl_kv_layer& kv_;
  AttentionScratch<T>& s_;
  const bool far_;
  const int group_, splits_;  // splits_: number of splits of a span that different threads may compute
  const SharingPlan* const sharing_;
  const T* const q_;
  T* const out_;
  const int64_t q_stride_, out_stride_;
};

template <typename T>
static void attention(cl_pool& pool, int thread, const cl_op& op, const cl_program& program, const cl_batch& batch,
                      const StepPlan& plan, AttentionScratch<T>& s, bool far) {
#if defined(CL_USE_AMX)
  tiles_begin(ATTENTION_K, 16);
#endif
  if (program.kv_layers[op.layer].kind == CL_KV_INT8)
    AttentionTasks<T, code8>(pool, thread, op, program, batch, plan, s, far).run();
  else
    AttentionTasks<T, T>(pool, thread, op, program, batch, plan, s, far).run();
}

}  // namespace CL_NS
