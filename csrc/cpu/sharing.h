// Finds the spans of a step whose block tables begin alike, and divides the keys that they share into tasks (cascade
// attention: Ye et al., 2024; Hydragen: Juravsky et al., 2024). The plan is made once per step, before any thread
// starts. It only says who may read together: the kernel's arithmetic of a query does not depend on it.
#pragma once
#include <string.h>

#include <algorithm>

#include "plan.h"

// Makes the sharing plans of a step in memory of the caller.
class SharingPlanner {
 public:
  // A span shares at least `least` tokens, or nothing.
  SharingPlanner(const cl_batch& batch, const StepPlan& plan, int least) : batch_(batch), plan_(plan), least_(least) {}

  // Bytes of memory for the plans of `kinds` kinds of attention operations.
  static size_t bytes(int kinds, size_t spans, size_t splits) {
    return kinds * (spans * (sizeof(Sharer) + sizeof(int32_t) + sizeof(Candidate)) +
                    spans * splits * sizeof(SharedTask)) +
           spans * PROBES * sizeof(Probe);
  }

  // Makes the plan of one kind of attention operation, whose key fields are set, and moves `memory` behind it. Returns
  // false if nothing is shared.
  bool make(SharingPlan& kind, char*& memory) {
    const int spans = plan_.num_spans;
    kind_ = &kind;
    kind.num_sharers = kind.num_tasks = kind.rows = 0;
    candidates_ = take<Candidate>(memory, spans);
    if (!find_candidates() || !join_candidates(reinterpret_cast<Probe*>(memory))) return false;
    compare_neighbours();
    kind.sharers = sharers_ = take<Sharer>(memory, count_);
    kind.sharer_of = sharer_of_ = take<int32_t>(memory, spans);
    kind.tasks = tasks_ = reinterpret_cast<SharedTask*>(memory);
    std::fill(sharer_of_, sharer_of_ + spans, -1);
    const int most_rows = rows_of_a_task();
    for (int first = 0, end; first < count_; first = end) {
      end = chain_end(first);
      if (end > first + 1) divide_chain(first, end, most_rows);
    }
    for (int i = 0; i < kind.num_sharers; i++) sharer_of_[sharers_[i].span] = i;
    std::sort(tasks_, tasks_ + kind.num_tasks, [](const SharedTask& a, const SharedTask& b) {
      return a.cost != b.cost ? a.cost > b.cost : a.first != b.first ? a.first < b.first : a.split < b.split;
    });
    memory += kind.num_tasks * sizeof(SharedTask);
    return kind.num_tasks > 0;
  }

 private:
  enum { PROBES = 16 };

  struct Candidate {
    int32_t span, leader, low, blocks, rows;  // low: first position that it reads; blocks: entries of its table
    int32_t equal_from, equal_until;          // see Sharer
    const int32_t* table;
  };
  // Entry `index` of a candidate's block table. Two candidates with an equal entry share all entries before it, too.
  struct Probe {
    int32_t block, index, candidate;
  };

  template <typename T>
  static T* take(char*& memory, size_t count) {
    T* taken = reinterpret_cast<T*>(memory);
    memory += (count * sizeof(T) + 7) / 8 * 8;
    return taken;
  }

  // Rows of a batch whose new tokens are one span, with few query rows. Longer chunks of prompts fill a task alone.
  bool find_candidates() {
    const SharingPlan& kind = *kind_;
    count_ = 0;
    for (int i = 0; i < plan_.num_spans; i++) {
      const AttentionSpan& span = plan_.spans[i];
      const int new_tokens = batch_.cu_seqlens[span.row + 1] - batch_.cu_seqlens[span.row];
      const int rows = span.num_tokens * kind.group, length = batch_.seq_lens[span.row];
      if (new_tokens != span.num_tokens || rows > MAX_SPLIT_ROWS / 2) continue;
      const int end = length - new_tokens + 1, low = kind.window > 0 && end > kind.window ? end - kind.window : 0;
      if (length - low < least_) continue;
      const int blocks = (length + kind.block_size - 1) / kind.block_size;
      candidates_[count_] = Candidate{i, count_, low, blocks, rows, 0, 0, block_table(batch_, kind.cache_group, span.row)};
      count_++;
    }
    return count_ > 1;
  }

  int32_t leader(int32_t candidate) const {
    while (candidates_[candidate].leader != candidate) candidate = candidates_[candidate].leader;
    return candidate;
  }

  int first_block(int low) const { return (low + kind_->block_size - 1) / kind_->block_size; }

  // Joins candidates that share a probed block, and moves those without a partner to the end. Without windows the first
  // block of every table is probed. With windows some more are, because the windows of two rows begin at different
  // positions. Returns false if nobody shares.
  bool join_candidates(Probe* probes) {
    const int step = std::max(1, least_ / kind_->block_size);
    int latest = 0, count = 0;
    for (int i = 0; i < count_; i++) latest = std::max(latest, first_block(candidates_[i].low));
    for (int i = 0; i < count_; i++) {
      const Candidate& one = candidates_[i];
      int index = (first_block(one.low) + step - 1) / step * step;
      const int last = std::min(one.blocks - 1, (latest + step - 1) / step * step);
      for (int n = 0; n < PROBES && index <= last; n++, index += step) probes[count++] = Probe{one.table[index], index, i};
    }
    std::sort(probes, probes + count, [](const Probe& a, const Probe& b) {
      return a.block != b.block ? a.block < b.block : a.index != b.index ? a.index < b.index : a.candidate < b.candidate;
    });
    bool joined = false;
    for (int i = 1; i < count; i++) {
      if (probes[i].block != probes[i - 1].block || probes[i].index != probes[i - 1].index) continue;
      const int32_t a = leader(probes[i - 1].candidate), b = leader(probes[i].candidate);
      candidates_[std::max(a, b)].leader = std::min(a, b);
      joined = true;
    }
    if (joined) sort_candidates();
    return joined;
  }

  // Sorts candidates by leader, and those of one leader by their block tables. So neighbours share the most.
  void sort_candidates() {
    for (int i = 0; i < count_; i++) candidates_[i].leader = leader(i);
    const auto common = [&](const Candidate& a, const Candidate& b) {
      const int from = first_common_[a.leader], until = std::min(a.blocks, b.blocks);
      return until > from ? memcmp(a.table + from, b.table + from, sizeof(int32_t) * (until - from)) : 0;
    };
    first_common_ = reinterpret_cast<int32_t*>(candidates_ + plan_.num_spans);
    for (int i = 0; i < count_; i++) first_common_[i] = 0;
    for (int i = 0; i < count_; i++) {
      int32_t& first = first_common_[candidates_[i].leader];
      first = std::max(first, first_block(candidates_[i].low));
    }
    std::sort(candidates_, candidates_ + count_, [&](const Candidate& a, const Candidate& b) {
      if (a.leader != b.leader) return a.leader < b.leader;
      const int order = common(a, b);
      if (order != 0) return order < 0;
      return a.blocks != b.blocks ? a.blocks < b.blocks : a.span < b.span;
    });
  }

  // Finds the blocks that each candidate shares with the one before it.
  void compare_neighbours() {
    const int size = kind_->block_size;
    for (int i = 1; i < count_; i++) {
      const Candidate& before = candidates_[i - 1];
      Candidate& one = candidates_[i];
      if (before.leader != one.leader) continue;
      const int low = std::max(before.low, one.low), from = first_block(low), until = std::min(before.blocks, one.blocks);
      int end = from;
      while (end < until && before.table[end] == one.table[end]) end++;
      if (end * size - low < least_) continue;
      one.equal_from = from * size;
      one.equal_until = end * size;
    }
  }

  // Index after the last candidate of the chain that begins at `first`: each shares blocks with the one before it.
  int chain_end(int first) const {
    int end = first + 1;
    while (end < count_ && candidates_[end].equal_until > 0) end++;
    return end;
  }

  // Number of rows of a task: as many as a task can have, or fewer if there would be too few tasks for the threads.
  int rows_of_a_task() const {
    int most = MAX_SPLIT_ROWS;
    for (; most > MAX_SPLIT_ROWS / 4; most /= 2) {
      int tasks = 0;
      for (int first = 0, end; first < count_; first = end) {
        int rows = candidates_[first].rows, until = 0;
        end = chain_end(first);
        for (int i = first + 1; i < end; i++) {
          rows += candidates_[i].rows;
          until = std::max(until, candidates_[i].equal_until);
        }
        tasks += (rows + most - 1) / most * ((until + KV_SPLIT - 1) / KV_SPLIT);
      }
      if (tasks * kind_->kv_heads >= 2 * plan_.num_threads) break;
    }
    return most;
  }

  // Divides a chain into parts of nearly equal size, and makes the tasks of each part.
  void divide_chain(int first, int end, int most_rows) {
    int left = 0;
    for (int i = first; i < end; i++) left += candidates_[i].rows;
    for (int parts = (left + most_rows - 1) / most_rows, last; first < end; first = last, parts -= parts > 1) {
      int rows = candidates_[first].rows;
      last = first + 1;
      while (last < end && rows + candidates_[last].rows <= MAX_SPLIT_ROWS && (last < first + 2 || rows * parts < left))
        rows += candidates_[last++].rows;
      left -= rows;
      if (last > first + 1) add_part(first, last);
    }
  }

  // Adds the sharers of a part, and a task for each split in which neighbours share keys.
  void add_part(int first, int end) {
    SharingPlan& kind = *kind_;
    const int base = kind.num_sharers;
    int most = 0;
    for (int i = first; i < end; i++) {
      const Candidate& one = candidates_[i];
      const int before = i > first ? one.equal_until : 0, after = i + 1 < end ? candidates_[i + 1].equal_until : 0;
      const int until = std::max(before, after), tile = until / KV_TILE * KV_TILE;
      // The last tile is left to the span alone if it shares only few of its tokens: in a shared task every span's own
      // tokens of a tile are a product for themselves.
      const int whole = until - std::max(tile, one.low) >= std::min(least_, int(KV_TILE)) ? tile + KV_TILE : tile;
      const int from = i > first ? one.equal_from : 0;
      kind.rows = std::max(kind.rows, one.rows);
      sharers_[kind.num_sharers++] = Sharer{one.span, from, before, one.equal_from, one.equal_until,
                                            whole > one.low ? whole : 0, one.low};
      most = std::max(most, whole);
    }
    for (int split = 0; split * KV_SPLIT < most; split++)
      for (int i = base; i < kind.num_sharers; i++) {
        if (!sharers_[i].shares(split)) continue;
        SharedTask task{i, 1, split, 0};
        while (i + 1 < kind.num_sharers && sharers_[i + 1].shares(split) && sharers_[i + 1].equal_until > split * KV_SPLIT)
          task.count++, i++;
        for (int j = task.first; j <= i; j++)
          task.cost += candidates_[first + j - base].rows * int64_t(sharers_[j].end(split) - sharers_[j].begin(split));
        tasks_[kind.num_tasks++] = task;
      }
  }

  const cl_batch& batch_;
  const StepPlan& plan_;
  const int least_;
  SharingPlan* kind_ = nullptr;
  Candidate* candidates_ = nullptr;
  Sharer* sharers_ = nullptr;
  SharedTask* tasks_ = nullptr;
  int32_t *sharer_of_ = nullptr, *first_common_ = nullptr;
  int count_ = 0;
};
