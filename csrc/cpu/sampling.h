// Samples tokens from stored logits. chairlift/executor/sampling is the specification: tokens, errors and log-probabilities are
// the same. A row's result depends on that row alone, and is the same on every instruction-set path. Subnormals are
// zero, as in matrix multiplications, because the caller sets the processor's control register. Code here, in choice.h
// and in ranking.h uses no templates of the standard library, because the linker would keep one copy of them for all
// paths.
#pragma once
#include "choice.h"
#include "ranking.h"

namespace CL_NS {

static bool needs_logits(const cl_sampling_row& row) {
  return row.top_k > 0 || row.top_p < 1.0 || row.min_p > 0.0f || row.repetition != 1.0f || row.presence != 0.0f ||
         row.frequency != 0.0f || row.mask_bits || row.num_allowed > 0 || row.num_bias > 0 || row.num_masked > 0 ||
         row.num_logprobs >= 0 || row.target >= 0;
}

struct SampleScratch {
  uint64_t* keys;
  float* work;     // copy of the row's logits, which settings change in place
  float* weight;   // exp(work - highest)
  uint32_t* seen;  // per id: 1 if its repetition penalty was applied, plus twice its number in the output
  Members members;
};

static size_t sample_scratch_room(int32_t vocab) { return size_t(whole_groups(vocab)) + GROUP; }
static size_t sample_scratch_bytes(int32_t vocab) {
  return sample_scratch_room(vocab) * (sizeof(uint64_t) + 6 * sizeof(float));
}

static SampleScratch sample_scratch(void* memory, int32_t vocab) {
  const size_t room = sample_scratch_room(vocab);
  uint64_t* keys = static_cast<uint64_t*>(memory);
  float* at = reinterpret_cast<float*>(keys + room);
  return SampleScratch{keys, at, at + room, reinterpret_cast<uint32_t*>(at + 5 * room),
                       Members{at + 2 * room, at + 3 * room, at + 4 * room, 0}};
}

// Prevents the compiler from fusing a multiplication with an addition, so that both are rounded as in
// chairlift/executor/sampling.
CL_INLINE float rounded(float x) {
#if defined(CL_ARM)
  __asm__("" : "+w"(x));
#else
  __asm__("" : "+x"(x));
#endif
  return x;
}

static void apply_penalties(const cl_sampling_row& row, int32_t vocab, float* work, uint32_t* seen) {
  const int32_t prompt = row.num_prompt_tokens < 0 ? 0 : row.num_prompt_tokens;
  for (int i = 0; i < row.history_len; i++)
    if (uint32_t(row.history[i]) < uint32_t(vocab)) seen[row.history[i]] = 0;
  if (row.repetition != 1.0f)
    for (int i = 0; i < row.history_len; i++) {
      const uint32_t id = row.history[i];
      if (id >= uint32_t(vocab) || seen[id]) continue;
      seen[id] = 1;
      work[id] = work[id] > 0.0f ? work[id] / row.repetition : work[id] * row.repetition;
    }
  if (row.presence == 0.0f && row.frequency == 0.0f) return;
  for (int i = prompt; i < row.history_len; i++)
    if (uint32_t(row.history[i]) < uint32_t(vocab)) seen[row.history[i]] += 2;
  for (int i = prompt; i < row.history_len; i++) {
    const uint32_t id = row.history[i];
    if (id >= uint32_t(vocab) || seen[id] < 2) continue;
    work[id] -= rounded(rounded(row.frequency * float(seen[id] / 2)) + row.presence);
    seen[id] = 0;
  }
}

// Applies masks, bias and penalties to s.work in place. Returns whether the row has any of them; if so, the highest
// logit may have changed.
static bool reshape(const float* logits, const cl_sampling_row& row, int32_t vocab, const SampleScratch& s) {
  const int size = whole_groups(vocab);
  float* work = s.work;
  const auto known = [vocab](int32_t id) { return uint32_t(id) < uint32_t(vocab); };
  const auto permitted = [&row](int32_t id) { return !row.mask_bits || (row.mask_bits[id / 32] >> id % 32 & 1); };
  if (row.num_allowed > 0) {
    for (int i = 0; i < size; i += LANES) vstore(work + i, vset(-INFINITY));
    for (int i = 0; i < row.num_allowed; i++)
      if (known(row.allowed[i]) && permitted(row.allowed[i])) work[row.allowed[i]] = logits[row.allowed[i]];
  } else if (row.mask_bits) {
    for (int i = 0; i < vocab; i += LANES)
      vstore(work + i, vselect(row.mask_bits[i / 32] >> i % 32 & 0xffff, vload(work + i), vset(-INFINITY)));
  }
  for (int i = 0; i < row.num_bias; i++)
    if (known(row.bias_ids[i])) work[row.bias_ids[i]] += row.bias[i];
  for (int i = 0; i < row.num_masked; i++)
    if (known(row.masked[i])) work[row.masked[i]] = -INFINITY;
  const bool penalties = row.repetition != 1.0f || row.presence != 0.0f || row.frequency != 0.0f;
  if (penalties) apply_penalties(row, vocab, work, s.seen);
  return row.num_allowed > 0 || row.mask_bits || row.num_bias > 0 || row.num_masked > 0 || penalties;
}

// Samples from the best ids of the ranking: at most `most` ids, and only as many as are needed for a mass of `target`.
static int32_t draw_ranked(Ranking ranking, int most, double target, float highest, const Philox& philox) {
  Best best{-INFINITY, INT32_MAX, 0};
  double mass = 0.0;
  for (int i = 0; i < most && (i == 0 || mass < target); i++) {
    const uint64_t key = ranking.at(i);
    const float value = value_of(key);
    const uint32_t lowest = lowest_word(bar_of(best.score) - value);
    if (lowest < UINT32_MAX) {
      const uint32_t word = philox.word(id_of(key));
      if (word >= lowest) offer(best, value + gumbel(word), id_of(key));
    }
    if (target < INFINITY) mass += exp(double(value) - highest);
  }
  return best.id;
}

// FALLS has NUM_FALLS distances from the highest score, in ascending order. draw_nucleus first sums the mass within
// each distance.
enum { NUM_FALLS = 8 };
static const float FALLS[NUM_FALLS] = {0.5f, 1.0f, 2.0f, 3.0f, 4.5f, 6.5f, 9.0f, 12.0f};

// Samples from the smallest set of best ids whose probability is at least top_p.
static int32_t draw_nucleus(double top_p, float highest, const SampleScratch& s, int32_t vocab, const Philox& philox) {
  const int size = whole_groups(vocab);
  float* work = s.work;
  double total = 0.0;
  Amount from[NUM_FALLS] = {};  // mass and number of the ids within each distance
  for (int i = 0; i < size; i += SPAN * LANES) {
    const int end = i + SPAN * LANES < size ? i + SPAN * LANES : size;
    vf sum = vset(0.0f), top = vset(-INFINITY);
    for (int j = i; j < end; j += LANES) {
      const vf x = vload(work + j), weight = vexp(vsub(x, vset(highest)));
      vstore(s.weight + j, weight);
      sum = vadd(sum, weight);
      top = vmax(top, x);
    }
    total += vsum(sum);
    for (int f = NUM_FALLS - 1; f >= 0 && vmask_ge(top, vset(highest - FALLS[f])); f--)
      add_above(from[f], work + i, s.weight + i, (end - i) / LANES, highest - FALLS[f], true);
  }
  const double target = top_p * total;
  int f = 0;
  while (f < NUM_FALLS && from[f].mass < target) f++;
  const float low = f < NUM_FALLS ? highest - FALLS[f] : -FLT_MAX, high = f > 0 ? highest - FALLS[f - 1] : INFINITY;
  if ((f < NUM_FALLS ? from[f].count : size) <= LONGEST_LIST) {
    const Ranking ranking = ranking_from(low, work, size, s.keys);
    return draw_ranked(ranking, ranking.size, target, highest, philox);
  }
  Members members = s.members;
  for (int i = 0; i < size; i += LANES) {
    const vf x = vload(work + i);
    const uint32_t inside = vmask_ge(x, vset(low)) & vmask_gt(vset(high), x);
    if (inside) members.append(inside, x, lane_ids(i), vload(s.weight + i));
  }
  apply_cut(cut_at(target, f > 0 ? from[f - 1].mass : 0.0, members, highest, s.keys), work, size);
  Best best{-INFINITY, INT32_MAX, 0};
  consider_noisy(best, work, 0, vocab, 1.0f, philox);
  return best.id;
}

// Samples the token of a row after top_k, top_p and min_p. `highest`: the row's highest score, divided by the
// temperature.
static int32_t draw(const cl_sampling_row& row, int32_t vocab, const SampleScratch& s, float highest) {
  const Philox philox(row);
  const bool cut_k = row.top_k > 0 && row.top_k < vocab, cut_p = row.top_p < 1.0;
  Best best{-INFINITY, INT32_MAX, 0};
  if (!cut_k && !cut_p && !(row.min_p > 0.0f)) {
    consider_noisy(best, s.work, 0, vocab, row.temperature, philox);
    return best.id;
  }
  const int size = whole_groups(vocab);
  const float low = row.min_p > 0.0f ? highest + float(log(double(row.min_p))) : -FLT_MAX;
  for (int i = 0; i < size; i += LANES) {
    const vf x = vdiv(vload(s.work + i), vset(row.temperature));
    vstore(s.work + i, vselect(vmask_ge(x, vset(low)), x, vset(-INFINITY)));
  }
  Members members = s.members;
  if (cut_k && row.top_k <= LONGEST_LIST) {
    Ranking ranking = ranking_from(bound_of_best(row.top_k, s.work, size, members), s.work, size, s.keys);
    const int most = row.top_k < ranking.size ? row.top_k : ranking.size;
    double total = cut_p ? 0.0 : INFINITY;
    for (int i = 0; cut_p && i < most; i++) total += exp(double(value_of(ranking.at(i))) - highest);
    return draw_ranked(ranking, most, cut_p ? row.top_p * total : INFINITY, highest, philox);
  }
  if (cut_k) {
    members.weight = nullptr;
    for (int i = 0; i < size; i += LANES) {
      const vf x = vload(s.work + i);
      members.append(vmask_gt(x, vset(-INFINITY)), x, lane_ids(i), x);
    }
    if (members.size > row.top_k) apply_cut(cut_at(row.top_k, 0.0, members, highest, s.keys), s.work, size);
  }
  if (cut_p) return draw_nucleus(row.top_p, highest, s, vocab, philox);
  consider_noisy(best, s.work, 0, vocab, 1.0f, philox);
  return best.id;
}

// Writes the `num_logprobs` best ids and their log-probabilities to the row's results from index 1 on; index 0 is for
// the token.
static void report_best(const cl_sampling_row& row, int32_t vocab, double log_total, const SampleScratch& s) {
  const int size = whole_groups(vocab), most = row.num_logprobs < vocab ? row.num_logprobs : vocab;
  if (most <= 0) return;
  Ranking ranking = ranking_from(bound_of_best(most, s.work, size, s.members), s.work, size, s.keys);
  int count = 0;
  for (; count < most && count < ranking.size; count++) {
    const uint64_t key = ranking.at(count);
    row.top_ids[1 + count] = id_of(key);
    row.top_logprobs[1 + count] = float(value_of(key) - log_total);
  }
  for (int32_t id = 0; count < row.num_logprobs; id++) {
    if (id < vocab && s.work[id] > -INFINITY) continue;
    row.top_ids[1 + count] = id < vocab ? id : -1;
    row.top_logprobs[1 + count++] = -INFINITY;
  }
}

static void report_token(const float* logits, int32_t vocab, double log_total, cl_sampling_row& row) {
  const float value = uint32_t(row.token) < uint32_t(vocab) ? logits[row.token] : -INFINITY;
  row.rank = 1;
  for (int i = 0; i < vocab; i += LANES)
    row.rank += __builtin_popcount(vmask_gt(load_logits(logits + i, vocab - i), vset(value)));
  if (!row.top_ids) return;
  row.top_ids[0] = row.token;
  row.top_logprobs[0] = float(value - log_total);
}

// Writes results that mean "no log-probability". Called for a row that asked for log-probabilities but whose logits are
// not valid.
static void report_nothing(cl_sampling_row& row) {
  if (row.target < 0) return;
  row.rank = 1;
  for (int i = 0; i <= row.num_logprobs; i++) {
    row.top_ids[i] = i == 0 ? row.target : -1;
    row.top_logprobs[i] = NAN;
  }
}

// Samples one row of logits with all its settings. Memory after the logits must be readable up to a multiple of 16.
// `scratch` has sample_scratch_bytes(vocab) bytes, aligned to 8, with any contents. Log-probabilities are valid only if
// row.status is CL_SAMPLED.
static void sample_row(const float* logits, int32_t vocab, cl_sampling_row& row, void* scratch) {
  const SampleScratch s = sample_scratch(scratch, vocab);
  const int size = whole_groups(vocab);
  for (int i = 0; i < size; i += LANES)
    vstore(s.work + i, i < vocab ? load_logits(logits + i, vocab - i) : vset(-INFINITY));
  uint32_t flags = 0;
  float highest = vhighest(lane_maxima(s.work, size, flags));
  row.token = -1;
  row.status = flags & SAW_NAN ? CL_RAW_NAN : flags ? CL_RAW_INF : highest == -INFINITY ? CL_RAW_NONE : CL_SAMPLED;
  if (row.status != CL_SAMPLED) return report_nothing(row);

  double log_total = 0.0;
  if (row.target >= 0 || row.num_logprobs >= 0) {
    log_total = double(highest) + log(sum_exp(s.work, size, highest));
    report_best(row, vocab, log_total, s);
  }
  if (row.target >= 0) {
    row.token = row.target;
  } else {
    if (reshape(logits, row, vocab, s)) highest = vhighest(lane_maxima(s.work, size, flags));
    const float scaled = row.temperature == 0.0f ? highest : highest / row.temperature;
    row.status = flags || scaled == INFINITY ? CL_SHAPED_INF : scaled == -INFINITY ? CL_SHAPED_NONE : CL_SAMPLED;
    if (row.status != CL_SAMPLED) return;
    row.token = row.temperature == 0.0f ? index_of(s.work, size, highest) : draw(row, vocab, s, scaled);
  }
  if (row.target >= 0 || row.num_logprobs >= 0) report_token(logits, vocab, log_total, row);
}

}  // namespace CL_NS
