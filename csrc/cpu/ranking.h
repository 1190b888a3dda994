// Finds the highest of many values without sorting all of them. Few values are put into a heap. Of many values, more
// and more are excluded by comparing them with quantiles. Arrays of values are padded with -inf to a multiple of GROUP.
// The order in which numbers are summed depends on the values alone.
#pragma once
#include <float.h>

#include "choice.h"

namespace CL_NS {

enum {
  LONGEST_LIST = 1024,  // maximum number of ids that are put into a heap
  SPAN = 64,            // number of vectors that are summed in float32 before the sum is added to a float64
};

CL_INLINE int whole_groups(int n) { return (n + GROUP - 1) / GROUP * GROUP; }

#if defined(CL_ARM)
// In isa/neon.h.
#elif defined(__AVX512F__)
CL_INLINE vf vselect(uint32_t mask, vf x, vf otherwise) { return _mm512_mask_blend_ps(__mmask16(mask), otherwise, x); }
// Stores the lanes of x whose bit in `mask` is set, without gaps, from p on. It may write all sixteen floats from p on.
CL_INLINE void vcompress(float* p, uint32_t mask, vf x) { vstore(p, _mm512_maskz_compress_ps(__mmask16(mask), x)); }
// Lane i of the result has the integer first + i in its bits.
CL_INLINE vf lane_ids(int32_t first) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_set1_epi32(first), lane));
}
#else
CL_INLINE __m256 select_half(uint32_t mask, __m256 x, __m256 otherwise) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i on = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(mask)), bit), bit);
  return _mm256_blendv_ps(otherwise, x, _mm256_castsi256_ps(on));
}
CL_INLINE vf vselect(uint32_t mask, vf x, vf otherwise) {
  return vf{select_half(mask, x.lo, otherwise.lo), select_half(mask >> 8, x.hi, otherwise.hi)};
}
CL_INLINE void vcompress(float* p, uint32_t mask, vf x) {
  float lane[LANES];
  vstore(lane, x);
  for (; mask; mask &= mask - 1) *p++ = lane[__builtin_ctz(mask)];
}
CL_INLINE vf lane_ids(int32_t first) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i lo = _mm256_add_epi32(_mm256_set1_epi32(first), lane), hi = _mm256_add_epi32(lo, _mm256_set1_epi32(8));
  return vf{_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)};
}
#endif

// A value and its id as one integer. Higher values have higher keys. Of two equal values, the one with the lower id has
// the higher key.
CL_INLINE uint64_t key_of(float value, int32_t id) {
  value += 0.0f;  // makes -0 equal to 0
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return uint64_t(bits & 0x80000000 ? ~bits : bits | 0x80000000) << 32 | uint32_t(~id);
}
CL_INLINE int32_t id_of(uint64_t key) { return int32_t(~uint32_t(key)); }
CL_INLINE float value_of(uint64_t key) {
  uint32_t bits = uint32_t(key >> 32);
  bits = bits & 0x80000000 ? bits & 0x7fffffff : ~bits;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Keys in descending order, sorted only as far as they were read. The first `left` keys are a heap; after them are the
// keys that were read.
struct Ranking {
  uint64_t* keys;
  int size, left;

  void settle(int parent) {
    const uint64_t key = keys[parent];
    for (int child = 2 * parent + 1; child < left; child = 2 * parent + 1) {
      child += child + 1 < left && keys[child + 1] > keys[child];
      if (keys[child] <= key) break;
      keys[parent] = keys[child];
      parent = child;
    }
    keys[parent] = key;
  }
  void build(int count) {
    size = left = count;
    for (int i = count / 2 - 1; i >= 0; i--) settle(i);
  }
  uint64_t at(int rank) {
    while (size - left <= rank) {
      const uint64_t highest = keys[0];
      keys[0] = keys[--left];
      keys[left] = highest;
      settle(0);
    }
    return keys[size - 1 - rank];
  }
};

// Excludes all ids whose value is below `value`, and ids above last_id whose value is equal to `value`.
struct Cut {
  float value;
  int32_t last_id;
};

// Pairs (id, value) in ascending order of ids. No value is -inf. The arrays have room for sixteen pairs more.
struct Members {
  float* value;
  float* id;      // int32 ids in the bits of floats
  float* weight;  // exp(value - highest); or null, which means that each member has weight 1
  int size;

  int32_t id_at(int i) const {
    int32_t out;
    memcpy(&out, id + i, 4);
    return out;
  }
  // Appends the lanes whose bit is set. The lanes may have been loaded from these arrays at index `size` or later.
  inline __attribute__((always_inline)) void append(uint32_t mask, vf values, vf ids, vf weights) {
    vcompress(value + size, mask, values);
    vcompress(id + size, mask, ids);
    if (weight) vcompress(weight + size, mask, weights);
    size += __builtin_popcount(mask);
  }
};

// Result of adding up a set of ids: the sum of their weights, and their number.
struct Amount {
  double mass;
  int64_t count;
};

// Adds the weights and the number of all values above `bar` (or equal to it, if or_equal) in `vectors` vectors. The
// order of additions depends only on the indices of the values. Without weights, the mass is the number of values.
CL_INLINE void add_above(Amount& sum, const float* value, const float* weight, int vectors, float bar, bool or_equal) {
  vf mass = vset(0.0f);
  int count = 0;
  for (int i = 0; i < vectors; i++) {
    const vf x = vload(value + i * LANES);
    const uint32_t mask = or_equal ? vmask_ge(x, vset(bar)) : vmask_gt(x, vset(bar));
    count += __builtin_popcount(mask);
    if (weight) mass = vadd(mass, vselect(mask, vload(weight + i * LANES), vset(0.0f)));
  }
  sum.count += count;
  sum.mass += weight ? double(vsum(mass)) : double(count);
}

enum { QUANTILES = 4, SAMPLES = 31 };

// Writes some distinct values of the members in ascending order, which divide the members into parts of about equal
// size. Returns how many.
static int quantiles(const Members& members, float out[QUANTILES]) {
  float sample[SAMPLES];
  for (int i = 0; i < SAMPLES; i++) {
    const float value = members.value[int64_t(members.size) * i / SAMPLES];
    int at = i;
    for (; at > 0 && sample[at - 1] > value; at--) sample[at] = sample[at - 1];
    sample[at] = value;
  }
  int count = 0;
  for (int i = 1; i <= QUANTILES; i++) {
    const float value = sample[SAMPLES * i / (QUANTILES + 1)];
    if (count == 0 || value != out[count - 1]) out[count++] = value;
  }
  return count;
}

// Excludes members until at most `enough` remain. If the mass of the members is summed from the highest value down, it
// reaches `target` at one of the members that remain. `above` is the mass of all higher members: the mass of each
// member excluded at the upper end is added to it. If all members that remain have equal values, the function returns
// true early. Each iteration except the last excludes the quantiles themselves, so the loop terminates.
static bool narrow(Members& members, double target, double& above, int enough) {
  while (members.size > enough) {
    float value[QUANTILES];
    const int count = quantiles(members, value);
    Amount from[QUANTILES] = {}, beyond[QUANTILES] = {};  // members at or above each quantile; members above it
    for (int i = 0; i < LANES; i++) members.value[members.size + i] = -INFINITY;
    const int vectors = (members.size + LANES - 1) / LANES;
    for (int i = 0; i < vectors; i += SPAN)
      for (int q = 0; q < count; q++) {
        const int n = vectors - i < SPAN ? vectors - i : SPAN;
        const float *at = members.value + i * LANES, *weight = members.weight ? members.weight + i * LANES : nullptr;
        add_above(from[q], at, weight, n, value[q], true);
        add_above(beyond[q], at, weight, n, value[q], false);
      }
    int q = count - 1;
    const int lowest = from[0].count == members.size ? 0 : -1;  // -1: the part below value[0], if it has members
    while (q > lowest && above + from[q].mass < target) q--;
    const bool equal = q >= 0 && above + beyond[q].mass < target;  // a member equal to value[q] reaches the target
    const float low = q >= 0 ? value[q] : -INFINITY, high = q + 1 < count ? value[q + 1] : INFINITY;
    above += equal ? beyond[q].mass : q + 1 < count ? from[q + 1].mass : 0.0;
    const float* weights = members.weight ? members.weight : members.value;
    const int size = members.size;
    members.size = 0;
    for (int i = 0; i < size; i += LANES) {
      const vf x = vload(members.value + i);
      const uint32_t inside =
          equal ? vmask_eq(x, vset(low)) : vmask_gt(x, vset(low)) & vmask_gt(vset(high), x);
      if (inside) members.append(inside, x, vload(members.id + i), vload(weights + i));
    }
    if (equal) return true;
  }
  return false;
}

// Builds a ranking of all values that are at least `low`, which must be above -inf.
static Ranking ranking_from(float low, const float* values, int size, uint64_t* keys) {
  int count = 0;
  for (int i = 0; i < size; i += LANES)
    for (uint32_t in = vmask_ge(vload(values + i), vset(low)); in; in &= in - 1) {
      const int id = i + __builtin_ctz(in);
      keys[count++] = key_of(values[id], id);
    }
  Ranking ranking{keys, 0, 0};
  ranking.build(count);
  return ranking;
}

// Returns a lower bound for the k highest values: at least k values are not below it (if so many are above -inf), and
// not many more. The row is divided into parts; the bound is about the k-th highest of the parts' maxima.
static float bound_of_best(int k, const float* values, int size, Members members) {
  if (size <= LONGEST_LIST) return -FLT_MAX;
  const int most = size / (4 * int64_t(k) + 1), stretch = LANES * (most < 1 ? 1 : most > SPAN ? SPAN : most);
  members.weight = nullptr;
  members.size = 0;
  for (int i = 0; i < size; i += stretch) {
    vf top = vset(-INFINITY);
    for (int j = i; j < i + stretch && j < size; j += LANES) top = vmax(top, vload(values + j));
    members.append(vmask_gt(top, vset(-INFINITY)), top, top, top);
  }
  if (members.size < k) return -FLT_MAX;
  double above = 0.0;
  narrow(members, k, above, SPAN);
  float low = members.value[0];
  for (int i = 1; i < members.size; i++) low = members.value[i] < low ? members.value[i] : low;
  return low;
}

// Returns the cut after the id at which the mass, summed from the best id down, reaches `target`. `above`: mass of the
// ids that are better than all members.
static Cut cut_at(double target, double above, Members& members, float highest, uint64_t* keys) {
  const bool in_order = narrow(members, target, above, LONGEST_LIST / 4);
  if (members.size == 0) return Cut{-FLT_MAX, INT32_MAX};
  Ranking ranking{keys, 0, 0};
  if (!in_order) {
    for (int i = 0; i < members.size; i++) keys[i] = key_of(members.value[i], members.id_at(i));
    ranking.build(members.size);
  }
  Cut cut{};
  for (int i = 0; i < members.size && (i == 0 || above < target); i++) {
    const uint64_t key = in_order ? key_of(members.value[i], members.id_at(i)) : ranking.at(i);
    cut = Cut{value_of(key), id_of(key)};
    above += members.weight ? exp(double(cut.value) - highest) : 1.0;
  }
  return cut;
}

static void apply_cut(const Cut& cut, float* values, int size) {
  for (int i = 0; i < size; i += LANES) {
    const vf x = vload(values + i);
    uint32_t equal = vmask_eq(x, vset(cut.value));
    if (cut.last_id < i + LANES - 1) equal &= cut.last_id < i ? 0 : (2u << (cut.last_id - i)) - 1;
    vstore(values + i, vselect(vmask_gt(x, vset(cut.value)) | equal, x, vset(-INFINITY)));
  }
}

// Sum of exp(value - highest) over all values, added in a fixed order.
static double sum_exp(const float* values, int size, float highest) {
  double total = 0.0;
  for (int i = 0; i < size; i += SPAN * LANES) {
    vf sum = vset(0.0f);
    for (int j = i; j < i + SPAN * LANES && j < size; j += LANES)
      sum = vadd(sum, vexp(vsub(vload(values + j), vset(highest))));
    total += vsum(sum);
  }
  return total;
}

}  // namespace CL_NS
