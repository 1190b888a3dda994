// Attention of the rows of several sequences over keys that they share: each tile of keys and values is read once and
// multiplied by the rows of all sequences (cascade attention: Ye et al., 2024; Hydragen: Juravsky et al., 2024).
//
// Every row passes through the same operations, in the same order, as in a task of its own sequence. Tiles begin at the
// same positions, and only products over equal addresses are computed together. So the bits of a row do not depend on
// the rows that share its keys.
#pragma once
#include "attention.h"

namespace CL_NS {

// Number of tokens that a span shares, or none. With AMX, sixteen rows take the time of one. The other paths compute the
// few rows of one sequence nearly as fast per row as many rows, and save only loads of keys and values: 1 to 2 ns per
// token, row of a batch and KV head. The state that a row takes over, or its own part of a shared tile, costs 0.3 to 0.8
// us. So whole tiles pay, and with bf16 products a single one.
#if defined(CL_USE_AMX)
enum { LEAST_SHARED = 64 };
#elif defined(__AVX512BF16__)
enum { LEAST_SHARED = KV_TILE };
#else
enum { LEAST_SHARED = 2 * KV_TILE };
#endif

// Rows of one sequence in a task of several, and the tokens [from, to) of a split that they read. The member before this
// one has the same blocks at positions [equal_from, equal_until).
struct Member {
  const int32_t* block_table;
  int first_row, rows, from, to, equal_from, equal_until;

  AttentionTask task(const AttentionTask& whole, int num_rows) const {
    AttentionTask part = whole;
    part.block_table = block_table;
    part.first_row = first_row;
    part.rows = num_rows;
    return part;
  }
};

// The members of a task in one tile. Bit i of a mask is for the sixteen tokens number i of the tile.
class SharedTile {
 public:
  enum { MOST = MAX_ATTENTION_ROWS, PIECES = KV_TILE / CL_KV_TOKENS };

  SharedTile(const Member* members, int count, int start) : members_(members), count_(count), start_(start) {
    for (int i = 0; i < count; i++) {
      const Member& one = members[i];
      seen_[i] = mask(one.from, one.to);
      equal_[i] = i > 0 ? mask(one.equal_from, one.equal_until) & seen_[i] & seen_[i - 1] : 0;
      borders_ |= seen_[i] ^ seen_[i] << 1;
      borders_ |= equal_[i] ^ equal_[i] << 1;
    }
  }

  // Calls visit(member) for the members that read tokens of the tile.
  template <typename Visit>
  void members(const Visit& visit) const {
    for (int i = 0; i < count_; i++)
      if (seen_[i]) visit(i);
  }
  // Columns of the tile that a member reads: whole groups of sixteen.
  int begin_column(int member) const { return __builtin_ctz(seen_[member]) * CL_KV_TOKENS; }
  int end_column(int member) const { return (32 - __builtin_clz(seen_[member])) * CL_KV_TOKENS; }

  // Whether a member reads the same blocks as the one before it, in the whole tile.
  bool same_as_before(int member) const { return equal_[member] == (1u << PIECES) - 1; }

  // Divides what the members read into runs: members [first, end) read the same groups [from, to) of sixteen tokens,
  // counted from the start of the tile. A member's runs come in the order of their positions.
  template <typename Visit>
  void runs(const Visit& visit) const {
    for (int from = 0, to; from < PIECES; from = to) {
      to = from + 1;
      while (to < PIECES && !(borders_ >> to & 1)) to++;
      for (int first = 0, end; first < count_; first = end) {
        end = first + 1;
        if (!(seen_[first] >> from & 1)) continue;
        while (end < count_ && equal_[end] >> from & 1) end++;
        visit(first, end, from, to);
      }
    }
  }

 private:
  // Groups of sixteen tokens of the tile that have tokens of [begin, end).
  uint32_t mask(int begin, int end) const {
    const int low = begin > start_ ? (begin - start_) / CL_KV_TOKENS : 0;
    int high = end > start_ ? (end - start_ + CL_KV_TOKENS - 1) / CL_KV_TOKENS : 0;
    high = high < PIECES ? high : int(PIECES);
    return low < high ? (1u << high) - (1u << low) : 0;
  }

  const Member* members_;
  const int count_, start_;
  uint32_t seen_[MOST], equal_[MOST], borders_ = 0;
};

// A run of a tile: the task of its rows, and the addresses that they read. `next`: what the first member reads then.
template <typename Stored>
struct SharedRun {
  AttentionTask task;
  Sixteens<Stored> at, next, after;
  int column0, from, to;  // the members of the run read tokens of [from, to)

  SharedRun(const AttentionTask& whole, const Member* members, int first, int end, int start, int begin, int limit)
      : task(members[first].task(whole, members[end - 1].first_row + members[end - 1].rows - members[first].first_row)) {
    const int base = start / CL_KV_TOKENS, last = (members[first].to + CL_KV_TOKENS - 1) / CL_KV_TOKENS;
    const int ahead = base + limit + task.fetch_ahead() + MAX_GROUPS;
    at.locate(task, base + begin, base + limit);
    next.locate(task, base + limit, ahead < last ? ahead : last > base + limit ? last : base + limit);
    after.first = after.count = 0;
    column0 = begin * CL_KV_TOKENS;
    from = members[first].from, to = members[first].to;
    for (int i = first + 1; i < end; i++) {
      from = members[i].from < from ? members[i].from : from;
      to = members[i].to > to ? members[i].to : to;
    }
  }
  Reading<Stored> reading() const { return Reading<Stored>{at, next, after}; }
};

// Keeps the values of the rows after a task's last one. AMX adds to a multiple of 16 rows, and they belong to others.
// Scores need no such care: the runs of later members, which come afterwards, overwrite them.
class LaterRows {
 public:
#if defined(CL_USE_AMX)
  LaterRows(const AttentionTask& task, int all_rows, SoftmaxState& state) {
    const int dim = task.kv.head_dim, end = task.first_row + task.rows;
    const int touched = task.first_row + (task.rows + 15) / 16 * 16, limit = touched < all_rows ? touched : all_rows;
    at_ = state.values + end * dim;
    bytes_ = limit > end ? sizeof(float) * (limit - end) * dim : 0;
    memcpy(kept_, at_, bytes_);
  }
  ~LaterRows() {
    written(at_);
    memcpy(at_, kept_, bytes_);
  }

 private:
  float* at_;
  size_t bytes_;
  float kept_[15 * MAX_HEAD_DIM];
#else
  LaterRows(const AttentionTask&, int, SoftmaxState&) {}
  ~LaterRows() {}
#endif
};

// state.values += weights @ values of a tile, for all members.
template <typename T, typename Stored>
static void add_runs(const AttentionTask& task, AttentionScratch<T>& s, SoftmaxState& state, const SharedTile& tile,
                     const Member* members, int start) {
  tile.runs([&](int first, int end, int begin, int limit) {
    const SharedRun<Stored> run(task, members, first, end, start, begin, limit);
    const LaterRows later(run.task, task.rows, state);
    add_values(run.task, s, state, run.reading(), run.from, run.to, run.column0);
  });
}

// The same with integers, for values in 8 bits. The weights of a row are rounded together for the whole tile, and the
// integer sums of all its runs are added before they become numbers.
template <typename T>
static void add_shared_codes(const AttentionTask& task, AttentionScratch<T>& s, CodeScratch<float>& codes,
                             SoftmaxState& state, const SharedTile& tile, const Member* members, int start) {
  enum { MOST = Sixteens<code8>::MOST, SCALES = 2 * CL_KV_TOKENS };
  const int dim = task.kv.head_dim;
  float scales[MOST * SCALES];
  tile.members([&](int i) {
    const AttentionTask part = members[i].task(task, members[i].rows);
    const int column0 = tile.begin_column(i), size = tile.end_column(i) - column0;
    Sixteens<code8> at;
    at.locate(part, (start + column0) / CL_KV_TOKENS, (start + column0 + size) / CL_KV_TOKENS);
    for (int piece = 0; piece < at.count; piece++)
      seen_scales(scales_of(at.values[piece], dim), scales + piece * SCALES, (at.first + piece) * CL_KV_TOKENS,
                  members[i].from, members[i].to);
    round_weights(part, s, codes, scales, column0, size);
    memset(codes.sums + part.first_row * dim, 0, sizeof(int32_t) * part.rows * dim);
  });
  tile.runs([&](int first, int end, int begin, int limit) {
    const SharedRun<code8> run(task, members, first, end, start, begin, limit);
    const char* ahead[MOST];
    for (int i = 0; i < run.at.count; i++) {
      const code8* piece = run.reading().piece(run.at.count + i + task.fetch_ahead());
      ahead[i] = piece ? (const char*)piece : (const char*)s.q;
    }
    const auto add = [&](int row, int d, vi sums) {
      int32_t* to = codes.sums + row * dim + d;
      istore(to, iadd(iload(to), sums));
    };
    multiply_codes<false>(run.task, codes, run.at, ahead, run.column0, add);
  });
  tile.members([&](int i) {
    for (int row = members[i].first_row; row < members[i].first_row + members[i].rows; row++)
      for (int d = 0; d < dim; d += LANES) add_sums(codes, state, row, dim, d, iload(codes.sums + row * dim + d));
  });
}
template <typename T, typename Stored>
static void add_shared_values(const AttentionTask& task, AttentionScratch<T>& s, SoftmaxState& state,
                              const SharedTile& tile, const Member* members, int start) {
  if constexpr (sizeof(Stored) == 1 && sizeof(Left<T, T>) == sizeof(float))
    add_shared_codes(task, s, s.codes, state, tile, members, start);
  else
    add_runs<T, Stored>(task, s, state, tile, members, start);
}

// Computes the softmax state of the rows of all members over the tokens that they read. Members whose blocks are equal
// are neighbours.
template <typename Stored, typename T>
__attribute__((noinline, noclone)) static void attend_together(const AttentionTask& task, const Member* members,
                                                               int count, AttentionScratch<T>& s, SoftmaxState& state) {
  const float cap = task.op.cap, scale = (cap > 0.0f ? cap : task.op.scale) * 1.44269504f;
  int from = members[0].from, to = members[0].to;
  for (int i = 1; i < count; i++) {
    from = members[i].from < from ? members[i].from : from;
    to = members[i].to > to ? members[i].to : to;
  }
  clear(state, task.rows, task.kv.head_dim);
  for (int start = from / KV_TILE * KV_TILE; start < to; start += KV_TILE) {
    const SharedTile tile(members, count, start);
    tile.runs([&](int first, int end, int begin, int limit) {
      const SharedRun<Stored> run(task, members, first, end, start, begin, limit);
      score(run.task, s, run.reading(), run.column0);
    });
    tile.members([&](int i) {
      const AttentionTask part = members[i].task(task, members[i].rows);
      const int begin = tile.begin_column(i), end = tile.end_column(i);
      if (cap > 0.0f) cap_scores(part, s, begin, end, task.op.scale / cap);
      for (int row = part.first_row; row < part.first_row + part.rows; row++)
        find_highest(s, state, row, begin, end, start, scale);
    });
    find_factors(s, state, task.rows);
    tile.members([&](int i) {
      const AttentionTask part = members[i].task(task, members[i].rows);
      for (int row = part.first_row; row < part.first_row + part.rows; row++)
        weigh_row(s, state, row, tile.begin_column(i), tile.end_column(i), scale);
      apply_factors(part, s, state);
    });
    add_shared_values<T, Stored>(task, s, state, tile, members, start);
  }
}

// Copies the state of rows [first_row, first_row + rows) to memory that the next phase reads, and back to the first rows
// of a state. The memory has place for `most` rows.
static void hand_over(const SoftmaxState& state, int first_row, int rows, int most, int dim, float* to) {
  memcpy(to, state.highest + first_row, sizeof(float) * rows);
  memcpy(to + most, state.sum + first_row, sizeof(float) * rows);
  memcpy(to + 2 * most, state.values + first_row * dim, sizeof(float) * rows * dim);
}
static void take_over(SoftmaxState& state, int rows, int most, int dim, const float* from) {
  memcpy(state.highest, from, sizeof(float) * rows);
  memcpy(state.sum, from + most, sizeof(float) * rows);
  memcpy(state.values, from + 2 * most, sizeof(float) * rows * dim);
}

}  // namespace CL_NS
