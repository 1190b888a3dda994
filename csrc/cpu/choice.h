// Chooses a row's token while its logits are computed, so that they need not be stored. The token is the argmax of the
// logits, or of logits / temperature + Gumbel noise. chairlift/executor/sampling/gumbel.py defines the noise, and chooses the
// same ids.
#pragma once
#include "chairlift_cpu.h"
#include "vec.h"

namespace CL_NS {

// Vectors of 32-bit words, each in the low half of a 64-bit lane. The high halves are undefined; wmul does not read
// them.
#if defined(CL_ARM)
// In isa/neon.h.
#elif defined(__AVX512F__)
typedef __m512i wide;
enum { WIDE = 8 };
CL_INLINE wide wset(uint64_t x) { return _mm512_set1_epi64(int64_t(x)); }
CL_INLINE wide wcount() { return _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7); }
CL_INLINE wide wadd(wide a, wide b) { return _mm512_add_epi64(a, b); }
CL_INLINE wide wmul(wide a, wide b) { return _mm512_mul_epu32(a, b); }
CL_INLINE wide whigh(wide a) { return _mm512_srli_epi64(a, 32); }
CL_INLINE wide wxor(wide a, wide b, wide c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
CL_INLINE wide wmax(wide a, wide b) { return _mm512_max_epu32(a, b); }
CL_INLINE bool wreaches(wide a, uint32_t bar) { return _mm512_mask_cmpge_epu32_mask(0x5555, a, wset(bar)); }
CL_INLINE void wstore(uint64_t* p, wide a) { _mm512_storeu_si512(p, a); }
#else
typedef __m256i wide;
enum { WIDE = 4 };
CL_INLINE wide wset(uint64_t x) { return _mm256_set1_epi64x(int64_t(x)); }
CL_INLINE wide wcount() { return _mm256_setr_epi64x(0, 1, 2, 3); }
CL_INLINE wide wadd(wide a, wide b) { return _mm256_add_epi64(a, b); }
CL_INLINE wide wmul(wide a, wide b) { return _mm256_mul_epu32(a, b); }
CL_INLINE wide whigh(wide a) { return _mm256_srli_epi64(a, 32); }
CL_INLINE wide wxor(wide a, wide b, wide c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
CL_INLINE wide wmax(wide a, wide b) { return _mm256_max_epu32(a, b); }
CL_INLINE bool wreaches(wide a, uint32_t bar) {
  return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(wmax(a, wset(bar)), a))) & 0x55;
}
CL_INLINE void wstore(uint64_t* p, wide a) { _mm256_storeu_si256((__m256i*)p, a); }
#endif

enum {
  PHILOX_ROUNDS = 10,
  GROUP = 64,  // number of ids that are processed together: 16 Philox counters, which give 4 words each
};
static const uint32_t PHILOX_M0 = 0xD2511F53, PHILOX_M1 = 0xCD9E8D57;

// Philox, a counter-based random generator, for one row. It gives one random 32-bit word for each id.
struct Philox {
  uint64_t keys[2 * PHILOX_ROUNDS];
  uint64_t position;

  explicit Philox(const cl_sampling_row& row) : position(uint32_t(row.position)) {
    uint32_t k0 = uint32_t(row.seed), k1 = uint32_t(row.seed >> 32);
    for (int round = 0; round < PHILOX_ROUNDS; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
      keys[2 * round] = k0;
      keys[2 * round + 1] = k1;
    }
  }

  uint32_t word(int32_t id) const {
    uint32_t c[4] = {uint32_t(id) >> 2, uint32_t(position), 0, 0};
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
      const uint64_t p0 = uint64_t(PHILOX_M0) * c[0], p1 = uint64_t(PHILOX_M1) * c[2];
      c[0] = uint32_t(p1 >> 32) ^ c[1] ^ uint32_t(keys[2 * round]);
      c[2] = uint32_t(p0 >> 32) ^ c[3] ^ uint32_t(keys[2 * round + 1]);
      c[1] = uint32_t(p1);
      c[3] = uint32_t(p0);
    }
    return c[id & 3];
  }

  // Writes the words of GROUP ids from first_id on, which is a multiple of 4. Returns false, and writes nothing, if no
  // word is at least `bar`.
  bool group(int32_t first_id, uint32_t bar, uint32_t words[GROUP]) const {
    enum { PARTS = GROUP / 4 / WIDE };
    wide c0[PARTS], c1[PARTS], c2[PARTS], c3[PARTS];
    const wide m0 = wset(PHILOX_M0), m1 = wset(PHILOX_M1);
    for (int i = 0; i < PARTS; i++) {
      c0[i] = wadd(wset(uint64_t(first_id) / 4 + i * WIDE), wcount());
      c1[i] = wset(position);
      c2[i] = c3[i] = wset(0);
    }
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
      const wide k0 = wset(keys[2 * round]), k1 = wset(keys[2 * round + 1]);
      for (int i = 0; i < PARTS; i++) {
        const wide p0 = wmul(c0[i], m0), p1 = wmul(c2[i], m1);
        c0[i] = wxor(whigh(p1), c1[i], k0);
        c2[i] = wxor(whigh(p0), c3[i], k1);
        c1[i] = p1;
        c3[i] = p0;
      }
    }
    wide highest = wset(0);
    for (int i = 0; i < PARTS; i++) highest = wmax(wmax(wmax(c0[i], c1[i]), wmax(c2[i], c3[i])), highest);
    if (!wreaches(highest, bar)) return false;
    for (int i = 0; i < PARTS; i++) {
      uint64_t lane[4][WIDE];
      wstore(lane[0], c0[i]);
      wstore(lane[1], c1[i]);
      wstore(lane[2], c2[i]);
      wstore(lane[3], c3[i]);
      for (int j = 0; j < 4 * WIDE; j++) words[4 * WIDE * i + j] = uint32_t(lane[j % 4][j / 4]);
    }
    return true;
  }
};

CL_INLINE float gumbel(uint32_t word) { return float(-log(-log((word + 0.5) * 0x1p-32))); }

static const float GUMBEL_BOUND = 22.9f;  // upper bound of the noise

// A value slightly below `score`. Another id is better only if its score plus noise is at least this value. The margin
// is larger than all rounding errors.
CL_INLINE float bar_of(float score) { return score - (1e-3f + fabsf(score) * 0x1p-20f); }

// A lower bound for the random words whose noise is at least `gap`. Let u be the word as a fraction, and v = 1 - u. The
// noise is at most -log(v), so v must be at most exp(-gap). Between two powers of two the exponential is replaced by
// the straight line through them, which is above it.
CL_INLINE uint32_t lowest_word(float gap) {
  if (!(gap > 0.0f)) return 0;
  if (gap > GUMBEL_BOUND + 1.0f) return UINT32_MAX;
  const int32_t bits = int32_t((127.0f + 32.0f - gap * 1.44269504f) * 0x1p23f);
  float words;
  memcpy(&words, &bits, 4);
  return uint64_t(words) >= UINT32_MAX ? 0 : UINT32_MAX - 1 - uint32_t(words);
}

// The best id so far: the id with the highest score, and the lowest id if scores are equal. So the order in which ids
// are offered does not matter. `flags`: a bit set of SAW_NAN, SAW_INF and SAW_LOGIT.
struct Best {
  float score;
  int32_t id;
  uint32_t flags;
};
enum {
  SAW_NAN = 1,
  SAW_INF = 2,    // a logit is +inf
  SAW_LOGIT = 4,  // a logit is above -inf; used only with a temperature above 0
};

CL_INLINE void offer(Best& best, float score, int32_t id) {
  if (score > best.score || (score == best.score && id < best.id && score > -INFINITY)) {
    best.score = score;
    best.id = id;
  }
}

static void merge(Best& into, const Best& from) {
  into.flags |= from.flags;
  offer(into, from.score, from.id);
}

// Loads sixteen logits. If fewer than sixteen are `left`, the lanes after them are -inf.
CL_INLINE vf load_logits(const float* p, int left) {
  return left >= LANES ? vload(p) : vkeep(vload(p), 0, left, -INFINITY);
}

static uint32_t irregular_flags(const float* logits, int count) {
  uint32_t flags = 0;
  for (int i = 0; i < count; i++) flags |= logits[i] != logits[i] ? SAW_NAN : logits[i] == INFINITY ? SAW_INF : 0;
  return flags;
}

static int index_of(const float* values, int count, float value) {
  for (int i = 0; i < count; i += LANES) {
    const uint32_t equal = vmask_eq(load_logits(values + i, count - i), vset(value));
    if (equal) return i + __builtin_ctz(equal);
  }
  return count;
}

// Lane i of the result is the maximum of logits i, i + 16, i + 32, ... of `count` logits. If a logit is NaN or +inf,
// `flags` gets SAW_NAN or SAW_INF.
CL_INLINE vf lane_maxima(const float* logits, int count, uint32_t& flags) {
  vf top = vset(-INFINITY);
  uint32_t regular = 0xffff;
  for (int i = 0; i < count; i += LANES) {
    const vf x = load_logits(logits + i, count - i);
    regular &= vmask_gt(vset(INFINITY), x);
    top = vmax(x, top);
  }
  if (regular != 0xffff) flags |= irregular_flags(logits, count);
  return top;
}

static void consider_highest(Best& best, const float* logits, int32_t first_id, int32_t count) {
  const vf top = lane_maxima(logits, count, best.flags);
  if (!vmask_ge(top, vset(best.score))) return;
  const float highest = vhighest(top);
  if (highest > -INFINITY) offer(best, highest, first_id + index_of(logits, count, highest));
}

// Updates `best` with at most GROUP ids, from first_id on. `highest`: the highest logit of these ids, divided by the
// row's temperature.
static void consider_group(Best& best, const float* logits, int32_t first_id, int size, float highest,
                           float temperature, const Philox& philox) {
  const uint32_t bar = lowest_word(bar_of(best.score) - highest);
  uint32_t words[GROUP];
  if (!philox.group(first_id, bar, words)) return;
  for (int i = 0; i < size; i++) {
    if (words[i] < bar) continue;
    const float score = logits[i] / temperature;
    if (words[i] >= lowest_word(bar_of(best.score) - score)) offer(best, score + gumbel(words[i]), first_id + i);
  }
}

// Offers the id with the highest logit to `best` first. Its score plus noise is a bound that excludes most other ids,
// so their noise need not be computed.
static void begin_with_highest(Best& best, const float* logits, int32_t first_id, int size, float temperature,
                               const Philox& philox) {
  int at = 0;
  for (int i = 1; i < size; i++) at = logits[i] > logits[at] ? i : at;
  if (!(logits[at] > -INFINITY)) return;
  best.flags |= SAW_LOGIT;
  offer(best, logits[at] / temperature + gumbel(philox.word(first_id + at)), first_id + at);
}

static void consider_noisy(Best& best, const float* logits, int32_t first_id, int32_t count, float temperature,
                           const Philox& philox) {
  for (int i = 0; i < count; i += GROUP) {
    const int size = count - i < GROUP ? count - i : GROUP;
    if (best.score == -INFINITY) begin_with_highest(best, logits + i, first_id + i, size, temperature, philox);
    const vf top = vdiv(lane_maxima(logits + i, size, best.flags), vset(temperature));
    if (vmask_gt(top, vset(bar_of(best.score) - GUMBEL_BOUND)))
      consider_group(best, logits + i, first_id + i, size, vhighest(top), temperature, philox);
  }
}

// Offers `count` ids, from first_id (a multiple of 16) on, to `best`. The logits after them, up to a multiple of 16,
// may have any value.
static void consider(Best& best, const float* logits, int32_t first_id, int32_t count, const cl_sampling_row& row) {
  CL_ASSERT(first_id % LANES == 0 && count >= 0);
  if (row.temperature == 0.0f)
    consider_highest(best, logits, first_id, count);
  else
    consider_noisy(best, logits, first_id, count, row.temperature, Philox(row));
}

static void finish(const Best& best, cl_sampling_row& row) {
  const bool none = best.id == INT32_MAX;
  row.status = best.flags & SAW_NAN       ? CL_RAW_NAN
               : best.flags & SAW_INF     ? CL_RAW_INF
               : best.score == INFINITY   ? CL_SHAPED_INF
               : !none                    ? CL_SAMPLED
               : best.flags & SAW_LOGIT   ? CL_SHAPED_NONE
                                          : CL_RAW_NONE;
  row.token = row.status == CL_SAMPLED ? best.id : -1;
}

}  // namespace CL_NS
