// Attention of ragged rows over the paged cache, causal unless CL_BOTH_WAYS says otherwise (PagedAttention: Kwon et
// al., 2023; online softmax: Milakov and Gimelshein, 2018; fixed KV splits: Flash-Decoding, Dao et al., 2023).
//
// The arithmetic of a query depends only on its own sequence. Tiles of 256 tokens and splits of 1,024 tokens begin at
// fixed positions. Keys after the query or before its window contribute exact zeros. Splits are merged in the order of
// their positions, no matter which threads computed them. So the result does not depend on the other queries of a task,
// and decode equals prefill bit for bit.
#pragma once
#include "elementwise.h"
#include "kv8.h"
#include "plan.h"

namespace CL_NS {

// A row of scores is one cache line longer than a tile of keys. If the distance between rows were a power of two, all
// rows would compete for the same sets of L1.
enum { SCORES_STRIDE = int(KV_TILE) + int(LANES), MAX_ATTENTION_ROWS = 64, MAX_HEAD_DIM = 256 };
// Rows for which there is memory. AMX reads and writes sixteen rows at a time, from any row on.
enum { ROOM_ROWS = MAX_ATTENTION_ROWS + 16 };
static_assert(KV_SPLIT % KV_TILE == 0, "splits are whole tiles");
static_assert(int(MAX_SPLIT_ROWS) <= int(MAX_ATTENTION_ROWS), "a task has all rows whose splits are divided");

// State of the online softmax of one task. For each row: the highest score so far (in units of log2), the sum of
// 2^(score - highest), and the sum of the values with these weights.
struct SoftmaxState {
  float highest[MAX_ATTENTION_ROWS], sum[MAX_ATTENTION_ROWS];
  float values[ROOM_ROWS * MAX_HEAD_DIM];  // [rows, head_dim]
};

// Scratch for attention over a KV cache in 8 bits. `Multiplied` is the type of the numbers that this instruction set
// multiplies (see kv8.h). If that is bf16, `widened` holds one tile's keys, or some columns of its values, converted
// from 8 bits to bf16.
template <typename Multiplied>
struct CodeScratch {
  alignas(64) Multiplied widened[MAX_GROUPS * CL_KV_TOKENS * MAX_HEAD_DIM];
  static_assert(int(KV_TILE) <= int(MAX_HEAD_DIM), "the values of a tile fit in, too");
};
// Instruction sets that multiply float32 compute attention over an 8-bit cache with 16-bit integers instead. q and
// weights: rows of queries and of softmax weights, as integers. q_unit and weight_unit: factor by which each row's
// integers are multiplied to get the numbers. q_sum: sum of each query's integers. shift: part of each row's result
// that the minima of the values contribute. sums: exact sums of a tile that is read in several pieces.
template <>
struct CodeScratch<float> {
  int16_t q[MAX_ATTENTION_ROWS * MAX_HEAD_DIM];
  alignas(64) int16_t weights[MAX_ATTENTION_ROWS * SCORES_STRIDE];
  float q_unit[MAX_ATTENTION_ROWS], q_sum[MAX_ATTENTION_ROWS];
  float weight_unit[MAX_ATTENTION_ROWS], shift[MAX_ATTENTION_ROWS];
  alignas(64) int32_t sums[MAX_ATTENTION_ROWS * MAX_HEAD_DIM];
};

template <typename T>
struct AttentionScratch {
  Left<T, T> q[ROOM_ROWS * MAX_HEAD_DIM];
  alignas(64) float scores[ROOM_ROWS * SCORES_STRIDE];
  alignas(64) Left<T, T> weights[ROOM_ROWS * SCORES_STRIDE];
  alignas(64) SoftmaxState all, split;
  CodeScratch<Left<T, T>> codes;
  // of each row in the current tile: the highest score after it, and the factor of the sums before it
  float highest[MAX_ATTENTION_ROWS], factor[MAX_ATTENTION_ROWS];
  int low[MAX_ATTENTION_ROWS], high[MAX_ATTENTION_ROWS];  // each row attends to the positions low <= position < high
};

// Initial value of a row's highest score: lower than every real score, but finite, so that the difference of two scores
// is never NaN.
static const float NO_SCORE = -1e30f;

// Several query rows that attend to the same keys of one KV head: those of one sequence, or of several that share keys.
struct AttentionTask {
  const cl_op& op;
  const cl_kv_layer& kv;
  const int32_t* block_table;  // block ids of the sequence, or of one of them
  int kv_head;
  int rows;
  bool far;  // true: keys and values are prefetched into L2; false: into L1
  int first_row = 0;  // index of the first row in the scratch

  // Prefetch distance in groups of sixteen tokens. With a longer distance, lines would be evicted from L1 before their
  // use.
  int fetch_ahead() const { return far ? 8 : 4; }
};

// Whether this processor should prefetch keys and values into L2. AMD cores of family 19h (Zen 3 and Zen 4) can wait
// for too few cache lines of L1 at once to use the full memory bandwidth.
#if defined(CL_ARM)
static bool fetches_far() { return false; }
#else
static bool fetches_far() { return __builtin_cpu_is("amdfam19h"); }
#endif

// Addresses of the K and V of at most one KV tile: `count` groups of sixteen tokens, from group number `first` of the
// sequence on. The K of sixteen tokens of one KV head is contiguous, and their V follows it. `Stored` is the type of an
// element of the cache.
template <typename Stored>
struct Sixteens {
  enum { MOST = KV_TILE / CL_KV_TOKENS };
  const Stored *keys[MOST], *values[MOST];
  int first, count;

  void locate(const AttentionTask& task, int first_one, int end) {
    const cl_kv_layer& kv = task.kv;
    const int per_block = kv.block_size / CL_KV_TOKENS;
    const int64_t size = piece_bytes(kv.head_dim, Stored()) / int64_t(sizeof(Stored));
    first = first_one;
    count = end - first_one < MOST ? end - first_one : int(MOST);
    int index = first / per_block, inside = first % per_block;
    for (int i = 0; i < count; i++) {
      const int64_t block = task.block_table[index];
      CL_ASSERT(block >= 0 && block < kv.num_blocks);
      keys[i] = static_cast<const Stored*>(kv.kv) + ((block * kv.kv_heads + task.kv_head) * per_block + inside) * 2 * size;
      values[i] = keys[i] + size;
      if (++inside == per_block) inside = 0, index++;
    }
  }
};

// The KV tiles that attention reads in order: the current tile, the next tile, and the tile after it. In each tile, all
// keys are read first, then all values. A piece is the K or V of sixteen tokens.
template <typename Stored>
struct Reading {
  const Sixteens<Stored>&at, &next, &after;

  // The piece that is read `place` pieces after the first piece of the current tile; null after the last tile. Callers
  // prefetch it when they read the piece that comes fetch_ahead() pieces earlier. So the first pieces of a sequence or
  // split are not prefetched here.
  const Stored* piece(int place) const {
    for (const Sixteens<Stored>* here : {&at, &next, &after}) {
      if (place < here->count) return here->keys[place];
      if ((place -= here->count) < here->count) return here->values[place];
      place -= here->count;
    }
    return nullptr;
  }
};

// Computes the scores of all rows for the keys of the current tile, and stores them from column `column0` of the
// scratch on.
template <typename T>
static void score(const AttentionTask& task, AttentionScratch<T>& s, const Reading<T>& reading, int column0) {
  const Sixteens<T>& at = reading.at;
  const int dim = task.kv.head_dim, steps = dim / Packed<T>::P;
  const auto* q = s.q + task.first_row * dim;
  float* scores = s.scores + task.first_row * SCORES_STRIDE + column0;
  for (int i = 0, groups; i < at.count; i += groups) {
    groups = groups_at_once(task.rows, at.count - i);
    const char* ahead[MAX_GROUPS];
    for (int g = 0; g < groups; g++) {
      const T* piece = reading.piece(i + task.fetch_ahead() + g);
      // if there is no piece to prefetch: an address that is in the cache, so that the prefetch costs little
      ahead[g] = piece ? (const char*)piece : (const char*)s.q;
    }
    Columns<T> keys{at.keys + i, 1, steps, steps, CL_KV_TOKENS * Packed<T>::P};
    product_rows<KEYS>(task.rows, groups, q, dim, keys, scores + i * CL_KV_TOKENS, SCORES_STRIDE, false,
                       Prefetch{ahead, groups, 64, task.far});
  }
}
// Computes the scores for keys in 8 bits: widens the keys to bf16, then multiplies.
template <bool NEAR, typename T>
static void score_codes(const AttentionTask& task, AttentionScratch<T>& s, CodeScratch<bf16>& codes,
                        const Reading<code8>& reading, int column0) {
  const Sixteens<code8>& at = reading.at;
  const int dim = task.kv.head_dim, steps = dim / Packed<bf16>::P;
  const auto* q = s.q + task.first_row * dim;
  float* scores = s.scores + task.first_row * SCORES_STRIDE + column0;
  for (int i = 0, groups; i < at.count; i += groups) {
    groups = groups_at_once(task.rows, at.count - i);
    const bf16* column[MAX_GROUPS];
    for (int g = 0; g < groups; g++) {
      const code8* piece = reading.piece(i + task.fetch_ahead() + g);
      bf16* to = codes.widened + g * CL_KV_TOKENS * dim;
      widen_keys<NEAR>(at.keys[i + g], dim, to, piece ? (const char*)piece : (const char*)s.q);
      column[g] = to;
    }
    const Columns<bf16> keys{column, 1, steps, steps, CL_KV_TOKENS * Packed<bf16>::P};
    product_rows<KEYS>(task.rows, groups, q, dim, keys, scores + i * CL_KV_TOKENS, SCORES_STRIDE, false,
                       Prefetch{nullptr, 0, 0, task.far});
  }
}

// Scores for keys in 8 bits, computed with integers. If a query is unit * q and a key is scale * codes + minimum, their
// score is unit * (scale * (q @ codes) + minimum * sum of q).
template <bool NEAR, typename T>
static void score_codes(const AttentionTask& task, AttentionScratch<T>& s, CodeScratch<float>& codes,
                        const Reading<code8>& reading, int column0) {
  const Sixteens<code8>& at = reading.at;
  const int dim = task.kv.head_dim;
  for (int i = 0; i < at.count; i++) {
    const code8* piece = reading.piece(i + task.fetch_ahead());
    // if there is no piece to prefetch: an address that is in the cache, so that the prefetch costs little
    const char* ahead = piece ? (const char*)piece : (const char*)s.q;
    fetch_line<NEAR>(ahead + dim * CL_KV_TOKENS);
    fetch_line<NEAR>(ahead + dim * CL_KV_TOKENS + 64);
    const float* scales = scales_of(at.keys[i], dim);
    const vf scale = vload(scales), minimum = vload(scales + LANES);
    float* out = s.scores + task.first_row * SCORES_STRIDE + column0 + i * CL_KV_TOKENS;
    const int16_t* q = codes.q + task.first_row * dim;
    product_of_codes<NEAR>(task.rows, q, dim, at.keys + i, &ahead, 1, dim / 2, [&](int row, vi sums) {
      const vf score = vfma(ifloat(sums), scale, vmul(minimum, vset(codes.q_sum[task.first_row + row])));
      vstore(out + row * SCORES_STRIDE, vmul(score, vset(codes.q_unit[task.first_row + row])));
    });
  }
}
template <typename T>
static void score(const AttentionTask& task, AttentionScratch<T>& s, const Reading<code8>& reading, int column0) {
  if (task.far)
    score_codes<false>(task, s, s.codes, reading, column0);
  else
    score_codes<true>(task, s, s.codes, reading, column0);
}

// Finds a row's highest score so far, after columns [from, to) (multiples of 16) of a tile, and hides the scores of
// positions that the row does not attend to. `scale` is positive and includes log2(e).
template <typename T>
static void find_highest(AttentionScratch<T>& s, const SoftmaxState& state, int row, int from, int to, int tile_start,
                         float scale) {
  const int low = s.low[row] - tile_start, high = s.high[row] - tile_start;
  float* scores = s.scores + row * SCORES_STRIDE;
  vf best = vset(-INFINITY);
  for (int j = from; j < to; j += LANES) {
    vf x = vload(scores + j);
    if (j < low || j + LANES > high) {
      x = vkeep(x, low - j, high - j, -INFINITY);
      vstore(scores + j, x);
    }
    best = vmax(best, x);
  }
  const float highest = vhighest(best) * scale;
  s.highest[row] = state.highest[row] > highest ? state.highest[row] : highest;
}

// Computes the factors by which the sums so far of the first `rows` rows must be multiplied, sixteen rows at a time: one
// exponential takes as long for sixteen numbers as for one. Every row must have its new highest score.
template <typename T>
static void find_factors(AttentionScratch<T>& s, const SoftmaxState& state, int rows) {
  for (int row = 0; row < rows; row += LANES)
    vstore(s.factor + row, vexp2(vsub(vload(state.highest + row), vload(s.highest + row))));
}

// Turns a row's scores in columns [from, to) into softmax weights, and updates the row's highest score and sum.
template <typename T>
static void weigh_row(AttentionScratch<T>& s, SoftmaxState& state, int row, int from, int to, float scale) {
  const float* scores = s.scores + row * SCORES_STRIDE;
  Left<T, T>* weights = s.weights + row * SCORES_STRIDE;
  const vf factor = vset(scale), shift = vset(-s.highest[row]);
  vf sum = vset(0.0f);
  for (int j = from; j < to; j += LANES) {
    const vf weight = vexp2(vfma(vload(scores + j), factor, shift));
    sum = vadd(sum, weight);
    store_power(weights + j, weight, T());
  }
  state.sum[row] = state.sum[row] * s.factor[row] + vsum(sum);
  state.highest[row] = s.highest[row];
}

// Applies the score cap: replaces each score in columns [from, to) by tanh(score * factor).
template <typename T>
static void cap_scores(const AttentionTask& task, AttentionScratch<T>& s, int from, int to, float factor) {
  for (int row = task.first_row; row < task.first_row + task.rows; row++) {
    float* scores = s.scores + row * SCORES_STRIDE;
    for (int j = from; j < to; j += LANES) vstore(scores + j, vtanh(vmul(vload(scores + j), vset(factor))));
  }
}

template <typename T>
static void apply_factors(const AttentionTask& task, const AttentionScratch<T>& s, SoftmaxState& state) {
  const int dim = task.kv.head_dim;
  for (int row = task.first_row; row < task.first_row + task.rows; row++) {
    if (s.factor[row] == 1.0f) continue;
    float* values = state.values + row * dim;
    for (int d = 0; d < dim; d += LANES) vstore(values + d, vmul(vload(values + d), vset(s.factor[row])));
  }
}

// state.values += weights @ values of the current tile, up to token `to`.
template <typename T>
static void add_values(const AttentionTask& task, AttentionScratch<T>& s, SoftmaxState& state,
                       const Reading<T>& reading, int, int to, int column0) {
  enum { P = Packed<T>::P, MOST = Sixteens<T>::MOST };
  const Sixteens<T>& at = reading.at;
  const int dim = task.kv.head_dim, end = at.first + at.count;
  const auto* weights = s.weights + task.first_row * SCORES_STRIDE + column0;
  float* sums = state.values + task.first_row * dim;
  const int last_tokens = to < end * CL_KV_TOKENS ? to - (end - 1) * CL_KV_TOKENS : int(CL_KV_TOKENS);
  for (int d = 0, groups; d < dim; d += groups * LANES) {
    groups = groups_at_once(task.rows, (dim - d) / LANES);
    const T* column[MAX_GROUPS * MOST];
    const char* ahead[MAX_GROUPS * MOST];
    const int lines = groups == 1 ? 1 : groups == 2 ? 2 : 4;
    for (int i = 0; i < at.count; i++) {
      for (int g = 0; g < groups; g++) column[g * at.count + i] = at.values[i] + (d + g * LANES) * P;
      const T* piece = reading.piece(at.count + i + task.fetch_ahead());
      const char* tile = piece ? (const char*)(piece + d * P) : (const char*)s.q;
      for (int line = 0; line < lines; line++) ahead[i * lines + line] = tile + 64 * line;
    }
    // The last group ends at token `to`. After it the cache has values of other requests: their weights are zero, but
    // the values may be NaN.
    Columns<T> values{column, at.count, CL_KV_TOKENS / P, (last_tokens + P - 1) / P, int64_t(dim) * P};
    product_rows<VALUES>(task.rows, groups, weights, SCORES_STRIDE, values, sums + d, dim, true,
                         Prefetch{ahead, lines, int64_t(dim * P * sizeof(T)), task.far});
  }
}

// Copies the scales and minima of the values of tokens [first, first + 16). For tokens outside [low, high) it writes
// zeros, because their scales may be NaN.
static void seen_scales(const float* scales, float* into, int first, int low, int high) {
  for (int t = 0; t < CL_KV_TOKENS; t++) {
    const bool seen = low <= first + t && first + t < high;
    into[t] = seen ? scales[t] : 0.0f;
    into[CL_KV_TOKENS + t] = seen ? scales[CL_KV_TOKENS + t] : 0.0f;
  }
}

// state.values += weights @ values, for values in 8 bits, widened to bf16 first. `scales`: the results of seen_scales
// for each group of sixteen tokens of the current tile.
template <bool NEAR, typename T>
static void add_codes(const AttentionTask& task, AttentionScratch<T>& s, CodeScratch<bf16>& codes, SoftmaxState& state,
                      const Sixteens<code8>& at, const float* scales, const char* const* ahead, int column0) {
  enum { P = Packed<bf16>::P, MOST = Sixteens<code8>::MOST };
  const int dim = task.kv.head_dim;
  const auto* weights = s.weights + task.first_row * SCORES_STRIDE + column0;
  float* sums = state.values + task.first_row * dim;
  for (int d = 0, groups; d < dim; d += groups * LANES) {
    groups = groups_at_once(task.rows, (dim - d) / LANES);
    const bf16* column[MAX_GROUPS * MOST];
    for (int i = 0; i < at.count; i++) {
      bf16* wide = codes.widened + i * groups * CL_KV_TOKENS * LANES;
      widen_values<NEAR>(at.values[i] + d * CL_KV_TOKENS, groups, scales + i * 2 * CL_KV_TOKENS, wide,
                         ahead[i] + d * CL_KV_TOKENS);
      for (int g = 0; g < groups; g++) column[g * at.count + i] = wide + g * LANES * P;
    }
    const Columns<bf16> values{column, at.count, CL_KV_TOKENS / P, CL_KV_TOKENS / P, int64_t(groups) * LANES * P};
    product_rows<VALUES>(task.rows, groups, weights, SCORES_STRIDE, values, sums + d, dim, true,
                         Prefetch{nullptr, 0, 0, task.far});
  }
}

// Turns the softmax weights of a task's rows over `size` tokens into integers, for values in 8 bits. Each weight is
// multiplied by its value's scale first. A value's minimum adds weight * minimum to all columns of a row.
template <typename T>
static void round_weights(const AttentionTask& task, AttentionScratch<T>& s, CodeScratch<float>& codes,
                          const float* scales, int column0, int size) {
  for (int row = task.first_row; row < task.first_row + task.rows; row++) {
    float* weights = s.weights + row * SCORES_STRIDE + column0;
    vf shift = vset(0.0f);
    for (int j = 0; j < size; j += CL_KV_TOKENS) {
      const vf weight = vload(weights + j);
      shift = vfma(weight, vload(scales + 2 * j + CL_KV_TOKENS), shift);
      vstore(weights + j, vmul(weight, vload(scales + 2 * j)));
    }
    codes.shift[row] = vsum(shift);
    codes.weight_unit[row] = round_row(weights, size, codes.weights + row * SCORES_STRIDE + column0);
  }
}
// Adds the integer sums of a row's weights and values to the row's numbers from column d on.
CL_INLINE void add_sums(const CodeScratch<float>& codes, SoftmaxState& state, int row, int dim, int d, vi sums) {
  float* out = state.values + row * dim + d;
  const vf before = vadd(vload(out), vset(codes.shift[row]));
  vstore(out, vfma(ifloat(sums), vset(codes.weight_unit[row]), before));
}

// Multiplies the rounded weights of the task's rows by the values of `at`, and calls finish(row of the task, column, sums)
// for sixteen columns at a time.
template <bool NEAR, typename Finish>
static void multiply_codes(const AttentionTask& task, CodeScratch<float>& codes, const Sixteens<code8>& at,
                           const char* const* ahead, int column0, const Finish& finish) {
  enum { MOST = Sixteens<code8>::MOST };
  const int dim = task.kv.head_dim;
  const int16_t* weights = codes.weights + task.first_row * SCORES_STRIDE + column0;
  for (int d = 0; d < dim; d += LANES) {
    const code8* column[MOST];
    const char* there[MOST];
    for (int i = 0; i < at.count; i++) {
      column[i] = at.values[i] + d * CL_KV_TOKENS;
      there[i] = ahead[i] + d * CL_KV_TOKENS;
    }
    product_of_codes<NEAR>(task.rows, weights, SCORES_STRIDE, column, there, at.count, CL_KV_TOKENS / 2,
                           [&](int row, vi sums) { finish(task.first_row + row, d, sums); });
  }
}

// state.values += weights @ values, for values in 8 bits, with integers.
template <bool NEAR, typename T>
static void add_codes(const AttentionTask& task, AttentionScratch<T>& s, CodeScratch<float>& codes, SoftmaxState& state,
                      const Sixteens<code8>& at, const float* scales, const char* const* ahead, int column0) {
  const int dim = task.kv.head_dim;
  round_weights(task, s, codes, scales, column0, at.count * CL_KV_TOKENS);
  multiply_codes<NEAR>(task, codes, at, ahead, column0,
                       [&](int row, int d, vi sums) { add_sums(codes, state, row, dim, d, sums); });
}

template <typename T>
static void add_values(const AttentionTask& task, AttentionScratch<T>& s, SoftmaxState& state,
                       const Reading<code8>& reading, int from, int to, int column0) {
  enum { MOST = Sixteens<code8>::MOST, SCALES = 2 * CL_KV_TOKENS };
  const Sixteens<code8>& at = reading.at;
  const int dim = task.kv.head_dim;
  float scales[MOST * SCALES];
  const char* ahead[MOST];
  for (int i = 0; i < at.count; i++) {
    const code8* piece = reading.piece(at.count + i + task.fetch_ahead());
    ahead[i] = piece ? (const char*)piece : (const char*)s.q;
    for (int line = 0; line < 2; line++) fetch_line<false>(ahead[i] + dim * CL_KV_TOKENS + 64 * line);
    seen_scales(scales_of(at.values[i], dim), scales + i * SCALES, (at.first + i) * CL_KV_TOKENS, from, to);
  }
  if (task.far)
    add_codes<false>(task, s, s.codes, state, at, scales, ahead, column0);
  else
    add_codes<true>(task, s, s.codes, state, at, scales, ahead, column0);
}

static void clear(SoftmaxState& state, int rows, int dim) {
  for (int row = 0; row < rows; row++) state.highest[row] = NO_SCORE, state.sum[row] = 0.0f;
  memset(state.values, 0, sizeof(float) * rows * dim);
}

// Copies the values of tokens [first, first + 16) in their layout [16 / P, head_dim, P]. For tokens outside [low, high)
// it writes zeros.
template <typename T>
static const T* seen_values(const T* values, T* into, int dim, int first, int low, int high) {
  enum { P = Packed<T>::P };
  for (int i = 0; i < CL_KV_TOKENS * dim; i++) {
    const int position = first + i / (dim * P) * P + i % P;
    into[i] = low <= position && position < high ? values[i] : T();
  }
  return into;
}

// Replaces the values of tokens outside [from, to) by zeros. Only the first and the last group of the tile can have
// such tokens. Both groups are copied to `edges` with zeros, and `at` gets the addresses of the copies.
template <typename T>
static void leave_out_unseen(Sixteens<T>& at, T* edges, int dim, int from, int to) {
  for (int i = 0; i < at.count; i += at.count > 1 ? at.count - 1 : 1)
    at.values[i] = seen_values(at.values[i], edges + (i > 0) * CL_KV_TOKENS * MAX_HEAD_DIM, dim,
                               (at.first + i) * CL_KV_TOKENS, from, to);
}
static void leave_out_unseen(Sixteens<code8>&, code8*, int, int, int) {}  // in 8 bits seen_scales already does it

// Adds tokens [from, to) of one split to the softmax state of all rows. Each row attends to low <= position < high of
// them. `after`: keys that are read next. `edges`: null, or room for two groups of values; then values of tokens outside
// [from, to) are replaced by zeros. The compiler makes only one copy of this function, so that it can
// inline the functions that only this one calls.
template <typename T, typename Stored>
__attribute__((noinline, noclone)) static void attend_tokens(const AttentionTask& task, AttentionScratch<T>& s,
                                                             SoftmaxState& state, int from, int to,
                                                             const Sixteens<Stored>& after, Stored* edges) {
  const float cap = task.op.cap, scale = (cap > 0.0f ? cap : task.op.scale) * 1.44269504f;
  const int limit = (to + CL_KV_TOKENS - 1) / CL_KV_TOKENS, per_tile = Sixteens<Stored>::MOST;
  Sixteens<Stored> tiles[2];
  const int first = from / CL_KV_TOKENS;
  tiles[0].locate(task, first, (first / per_tile + 1) * per_tile < limit ? (first / per_tile + 1) * per_tile : limit);
  for (int i = 0; tiles[i].count > 0; i ^= 1) {
    Sixteens<Stored>&at = tiles[i], &next = tiles[i ^ 1];
    const int end = at.first + at.count, start = at.first / per_tile * KV_TILE;
    next.locate(task, end, limit);
    const Reading<Stored> reading{at, next, after};
    const int begin_column = at.first * CL_KV_TOKENS - start, end_column = end * CL_KV_TOKENS - start;
    score(task, s, reading, begin_column);
    if (cap > 0.0f) cap_scores(task, s, begin_column, end_column, task.op.scale / cap);
    for (int row = 0; row < task.rows; row++) find_highest(s, state, row, begin_column, end_column, start, scale);
    find_factors(s, state, task.rows);
    for (int row = 0; row < task.rows; row++) weigh_row(s, state, row, begin_column, end_column, scale);
    if (edges) leave_out_unseen(at, edges, task.kv.head_dim, from, to);
    apply_factors(task, s, state);
    add_values(task, s, state, reading, from, to, begin_column);
  }
}

// Adds the softmax state `from` of a later split of the sequence to `into`, the state of all earlier splits.
static void merge_states(SoftmaxState& into, const SoftmaxState& from, int rows, int dim) {
  for (int row = 0; row < rows; row++) {
    const float a = into.highest[row], b = from.highest[row], highest = a > b ? a : b;
    const float old = vfirst(vexp2(vset(a - highest))), added = vfirst(vexp2(vset(b - highest)));
    into.highest[row] = highest;
    into.sum[row] = into.sum[row] * old + from.sum[row] * added;
    for (int d = row * dim; d < (row + 1) * dim; d += LANES)
      vstore(into.values + d, vfma(vload(from.values + d), vset(added), vmul(vload(into.values + d), vset(old))));
  }
}

// The rows of an AttentionTask: row r is the query of token r / group() and of head r % group() among the heads that
// use the KV head.
struct AttentionPiece {
  const cl_op& op;
  const cl_batch& batch;
  const AttentionSpan& span;
  int kv_head, first_row, rows;

  int group() const { return op.heads / op.kv_heads; }
  int token(int row) const { return span.first_token + (first_row + row) / group(); }
  int head(int row) const { return kv_head * group() + (first_row + row) % group(); }
  int position(int row) const {
    return batch.seq_lens[span.row] - (batch.cu_seqlens[span.row + 1] - token(row));
  }
  // The row attends only to positions below the returned one.
  int seen_end(int row) const {
    if (op.flags & CL_BOTH_WAYS) {
      const int end = batch.seq_lens[span.row], near = position(row) + op.window;
      return op.window > 0 && near < end ? near : end;
    }
    return batch.seen_ends ? batch.seen_ends[token(row)] : position(row) + 1;
  }
  // The row attends to no position below the returned one.
  int seen_begin(int row) const {
    const int end = position(row) + 1;
    return op.window > 0 && end > op.window ? end - op.window : 0;
  }
};

// Addresses of the first keys that the piece will read of tokens [begin, end), so that they can be prefetched: at most
// fetch_ahead() groups.
template <typename Stored>
static Sixteens<Stored> first_keys(const AttentionPiece& piece, const AttentionTask& task, int begin, int end) {
  const int high = piece.seen_end(0), low = piece.seen_begin(0);
  const int from = begin > low ? begin : low, to = end < high ? end : high;
  const int first = from / CL_KV_TOKENS, limit = from < to ? (to + CL_KV_TOKENS - 1) / CL_KV_TOKENS : first;
  Sixteens<Stored> found;
  found.locate(task, first, limit < first + task.fetch_ahead() ? limit : first + task.fetch_ahead());
  return found;
}

template <typename Scratch, typename Stored>
static void round_queries(Scratch&, int, int, int, Stored) {}
template <typename T>
static void round_queries(AttentionScratch<T>& s, int first, int end, int dim, code8) {
  if constexpr (sizeof(Left<T, T>) == sizeof(float))
    for (int row = first; row < end; row++) {
      s.codes.q_unit[row] = round_row(s.q + row * dim, dim, s.codes.q + row * dim);
      s.codes.q_sum[row] = sum_of(s.codes.q + row * dim, dim);
    }
}

template <typename Stored, typename T>
static void load_queries(const AttentionPiece& piece, const T* q, int64_t stride, AttentionScratch<T>& s,
                         int first_row = 0) {
  const int dim = piece.op.head_dim;
  for (int row = 0; row < piece.rows; row++) {
    const T* from = q + piece.token(row) * stride + piece.head(row) * dim;
    for (int d = 0; d < dim; d += LANES) store_rounded(s.q + (first_row + row) * dim + d, vload(from + d), T());
    s.high[first_row + row] = piece.seen_end(row);
    s.low[first_row + row] = piece.seen_begin(row);
  }
  round_queries(s, first_row, first_row + piece.rows, dim, Stored());
}

// Computes the attention of each row again, one row at a time, and reads only the tokens that the row attends to. It
// overwrites the queries in the scratch.
template <typename Stored, typename T>
__attribute__((noinline, cold)) static void attend_alone(AttentionTask task, AttentionScratch<T>& s, SoftmaxState& state,
                                                         int from, int to) {
  const int rows = task.rows, dim = task.kv.head_dim;
  SoftmaxState alone;
  alignas(64) Stored edges[2 * CL_KV_TOKENS * MAX_HEAD_DIM];
  task.rows = 1;
  for (int row = 0; row < rows; row++) {
    const int low = s.low[row] > from ? s.low[row] : from, high = s.high[row] < to ? s.high[row] : to;
    memmove(s.q, s.q + row * dim, sizeof(s.q[0]) * dim);
    round_queries(s, 0, 1, dim, Stored());
    s.low[0] = low, s.high[0] = high;
    clear(alone, 1, dim);
    if (low < high) attend_tokens(task, s, alone, low, high, Sixteens<Stored>{}, edges);
    state.highest[row] = alone.highest[0], state.sum[row] = alone.sum[0];
    memcpy(state.values + row * dim, alone.values, sizeof(float) * dim);
  }
}

// Computes the softmax state of all rows over tokens [from, to) of one split. A weight of zero times NaN or infinity is
// NaN. So if a result is not finite, the cause may be a value that the row must not read, and the rows are computed
// again without such values. For all other rows both ways give the same bits, because the values left out have weight
// zero. `known`: the state already has the tokens before this position, a multiple of KV_TILE, if it is above `from`.
template <typename T, typename Stored>
static void attend_split(const AttentionPiece& piece, const AttentionTask& task, AttentionScratch<T>& s,
                         SoftmaxState& state, int from, int to, const Sixteens<Stored>& after, const T* q,
                         int64_t stride, int known = 0) {
  if (known <= from) clear(state, task.rows, task.kv.head_dim);
  if (known < to) attend_tokens(task, s, state, known > from ? known : from, to, after, static_cast<Stored*>(nullptr));
  vf nothing = vset(0.0f);  // becomes NaN after a value that is not finite
  for (int i = 0; i < task.rows * task.kv.head_dim; i += LANES) nothing = vfma(vload(state.values + i), vset(0.0f), nothing);
  if (vsum(nothing) == 0.0f) return;
  attend_alone<Stored>(task, s, state, from, to);
  load_queries<Stored>(piece, q, stride, s);
}

// Writes the output of a row with an attention sink: its softmax has one more logit, which has no value.
template <typename T>
static void store_with_sink(const SoftmaxState& state, int row, float sink, T* to, int dim) {
  const float logit = sink * 1.44269504f, before = state.highest[row], highest = logit > before ? logit : before;
  const vf factor = vexp2(vset(before - highest));
  const vf sum = vadd(vmul(vset(state.sum[row]), factor), vexp2(vset(logit - highest)));
  for (int d = 0; d < dim; d += LANES) vstore(to + d, vdiv(vmul(vload(state.values + row * dim + d), factor), sum));
}

template <typename T>
static void store_outputs(const AttentionPiece& piece, const SoftmaxState& state, T* out, int64_t stride) {
  const int dim = piece.op.head_dim;
  for (int row = 0; row < piece.rows; row++) {
    T* to = out + piece.token(row) * stride + piece.head(row) * dim;
    if (piece.head(row) == piece.op.heads - 1) clear_pad(to + dim - piece.op.heads * dim, piece.op.heads * dim);
    if (piece.op.sinks) {
      store_with_sink(state, row, piece.op.sinks[piece.head(row)], to, dim);
      continue;
    }
    const vf sum = vset(state.sum[row]);
    for (int d = 0; d < dim; d += LANES) vstore(to + d, vdiv(vload(state.values + row * dim + d), sum));
  }
}

}  // namespace CL_NS
