// K and V in 8 bits: codes with a scale and a minimum per token and head (see cl_kv_layer). They are rounded once, when
// they are written.
//
// Paths that multiply bf16 widen the codes of a few groups of sixteen tokens at a time into L1, then multiply as for a
// bf16 cache. On the other paths, widening to float32 would take a fourth of the time of attention. So these paths
// multiply the codes as integers: queries and softmax weights are rounded to 16 bits, a hundred times finer than the
// codes, and their sums in 32 bits are exact.
#pragma once
#include <float.h>

#include "ints.h"
#include "product.h"

namespace CL_NS {

// One code of a KV cache that stores K and V in 8 bits.
struct code8 {
  uint8_t bits;
};

// Bytes of the K or V of sixteen tokens and one head, if elements are of type `Stored`.
template <typename Stored>
CL_INLINE int64_t piece_bytes(int head_dim, Stored) {
  return int64_t(CL_KV_TOKENS) * head_dim * int64_t(sizeof(Stored));
}
CL_INLINE int64_t piece_bytes(int head_dim, code8) {
  return int64_t(CL_KV_TOKENS) * (head_dim + 2 * int64_t(sizeof(float)));  // scales and minima come after the codes
}
CL_INLINE const float* scales_of(const code8* piece, int head_dim) {
  return (const float*)(piece + int64_t(CL_KV_TOKENS) * head_dim);
}

#if defined(CL_ARM)
// In isa/neon.h.
#elif defined(__AVX512F__)
CL_INLINE vi load_pairs(const code8* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
CL_INLINE vf numbers_of(__m128i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes)); }
CL_INLINE __m128i codes_of(vf x) { return _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(x)); }
CL_INLINE void store_int16(int16_t* p, vf x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x))); }
#else
CL_INLINE vi load_pairs(const code8* p) {
  return vi{_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(p + LANES)))};
}
CL_INLINE vf numbers_of(__m128i codes) {
  return vf{_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(codes, codes)))};
}
// Rounds x to nearest even as 16-bit integers, and limits the results to the range of int16.
CL_INLINE __m256i words_of(vf x) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)), 0xd8);
}
CL_INLINE __m128i codes_of(vf x) {
  const __m256i words = words_of(x);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
CL_INLINE void store_int16(int16_t* p, vf x) { _mm256_storeu_si256((__m256i*)p, words_of(x)); }
#endif
#if !defined(CL_ARM)
CL_INLINE __m128i load_codes(const code8* p) { return _mm_loadu_si128((const __m128i*)p); }
CL_INLINE void store_codes(code8* p, __m128i codes) { _mm_storeu_si128((__m128i*)p, codes); }
#endif

// Rounds the numbers x[dim] of one head to codes with a scale and a minimum. The scale is NaN if a number is not finite
// or if highest - lowest exceeds float32. Then rows that read this head get NaN, as from a cache that stores NaN
// itself.
static void round_head(const float* x, int dim, code8* codes, float& scale, float& minimum) {
  vf low = vload(x), high = low, nothing = vset(0.0f);
  for (int d = 0; d < dim; d += LANES) {
    const vf v = vload(x + d);
    low = vmin(low, v);
    high = vmax(high, v);
    nothing = vfma(v, vset(0.0f), nothing);  // becomes NaN after a number that is not finite
  }
  minimum = -vhighest(vsub(vset(0.0f), low));
  const float range = vhighest(high) - minimum;
  scale = vsum(nothing) == 0.0f && range <= FLT_MAX ? range / 255.0f : NAN;
  const vf unit = vset(scale > 0.0f ? scale : 1.0f);  // if all numbers are (nearly) equal, every code is 0
  for (int d = 0; d < dim; d += LANES)
    store_codes(codes + d, codes_of(vdiv(vsub(vload(x + d), vset(minimum)), unit)));
}

// Widens keys [dim / 2][16][2] to bf16, and prefetches the piece at `ahead`.
template <bool NEAR>
static void widen_keys(const code8* from, int dim, bf16* to, const char* ahead) {
  const float* scales = scales_of(from, dim);
  float twice[4 * LANES];
  for (int i = 0; i < 4 * LANES; i++) twice[i] = scales[i / 2];
  const vf scale[2] = {vload(twice), vload(twice + LANES)};
  const vf minimum[2] = {vload(twice + 2 * LANES), vload(twice + 3 * LANES)};
  for (int at = 0; at < dim * CL_KV_TOKENS; at += 64) {
    fetch_line<NEAR>(ahead + at);
#pragma GCC unroll 4
    for (int i = 0; i < 64; i += LANES)
      vstore(to + at + i, vfma(numbers_of(load_codes(from + at + i)), scale[i / LANES % 2], minimum[i / LANES % 2]));
  }
  fetch_line<NEAR>(ahead + dim * CL_KV_TOKENS);
  fetch_line<NEAR>(ahead + dim * CL_KV_TOKENS + 64);
}

// Widens values to bf16: `groups` times [16 / 2][16][2] become [16 / 2][groups * 16][2]. `scales`: the scales of the
// tokens, then their minima. If both are zero for a token, its values become zero, whatever its codes are.
template <bool NEAR>
static void widen_values(const code8* from, int groups, const float* scales, bf16* to, const char* ahead) {
  float twice[CL_KV_TOKENS][2 * LANES];  // for each pair of tokens: alternating scales, then minima
  for (int pair = 0; pair < CL_KV_TOKENS / 2; pair++)
    for (int i = 0; i < LANES; i++) {
      twice[pair][i] = scales[2 * pair + i % 2];
      twice[pair][LANES + i] = scales[CL_KV_TOKENS + 2 * pair + i % 2];
    }
  for (int g = 0; g < groups; g++)
    for (int pair = 0; pair < CL_KV_TOKENS / 2; pair++, from += 2 * LANES, ahead += 2 * LANES) {
      if (pair % 2 == 0) fetch_line<NEAR>(ahead);
      const vf scale = vload(twice[pair]), minimum = vload(twice[pair] + LANES);
      bf16* at = to + (pair * groups + g) * 2 * LANES;
      vstore(at, vfma(numbers_of(load_codes(from)), scale, minimum));
      vstore(at + LANES, vfma(numbers_of(load_codes(from + LANES)), scale, minimum));
    }
}

// Queries and softmax weights are rounded to integers of at most this absolute value. So a sum of 256 products with
// 8-bit codes fits into 32 bits.
enum { INT16_MOST = 32767 };

// Multiplies R rows a[R, 2 * steps * count] by `count` pieces, each with columns [steps][16][2], and sums over all
// pieces. Then it calls finish(row, sixteen sums as integers) for each row. For each piece, as many bytes as it has are prefetched
// from its address in `ahead`.
template <int R, bool NEAR, typename Finish>
CL_NOINLINE void product_of_codes(const int16_t* a, int64_t a_stride, const code8* const* pieces, const char* const* ahead,
                                  int count, int steps, const Finish& finish) {
  vi sum[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) sum[r] = iset(0);
  for (int piece = 0; piece < count; piece++) {
    const code8* column = pieces[piece];
    const char* next = ahead ? ahead[piece] : (const char*)column;  // an address in the cache costs little
    for (int step = 0; step < steps; step += 2, next += 64) {
      fetch_line<NEAR>(next);
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++, column += 2 * LANES, a += 2) {
        const vi y = load_pairs(column);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sum[r] = add_pairs(sum[r], four_at(a + r * a_stride), y);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) finish(r, sum[r]);
}

// Multiplies all rows by the pieces, in blocks of rows of nearly equal size whose sums fit into the registers.
template <bool NEAR, typename Finish>
static void product_of_codes(int rows, const int16_t* a, int64_t a_stride, const code8* const* pieces,
                             const char* const* ahead, int count, int steps, const Finish& finish) {
  const int blocks = (rows + ROWS - 1) / ROWS;
  for (int block = 0; block < blocks; block++) {
    const int row = rows * block / blocks;
    const int16_t* here = a + row * a_stride;
    const auto done = [&](int r, vi sums) { finish(row + r, sums); };
#define CL_CASE(R)                                                                                             \
  case R:                                                                                                      \
    product_of_codes<(R <= ROWS ? R : 1), NEAR>(here, a_stride, pieces, ahead, count, steps, done);            \
    break;
    switch (rows * (block + 1) / blocks - row) {
      CL_CASE(1) CL_CASE(2) CL_CASE(3) CL_CASE(4) CL_CASE(5) CL_CASE(6)
      CL_CASE(7) CL_CASE(8) CL_CASE(9) CL_CASE(10) CL_CASE(11) CL_CASE(12)
    }
#undef CL_CASE
    ahead = nullptr;
  }
}

// Rounds x[size] to 16-bit integers and returns their unit: x is about unit * integer. The unit is NaN if a number of x
// is not finite, so that results become NaN. If no absolute value exceeds 1e-33 all integers are zero, because the
// factor would overflow.
static float round_row(const float* x, int size, int16_t* to) {
  vf most = vset(0.0f), nothing = vset(0.0f);
  for (int i = 0; i < size; i += LANES) {
    const vf v = vload(x + i);
    most = vmax(most, vabs(v));
    nothing = vfma(v, vset(0.0f), nothing);
  }
  const float highest = vhighest(most), factor = highest > 1e-33f ? float(INT16_MOST) / highest : 0.0f;
  for (int i = 0; i < size; i += LANES) store_int16(to + i, vmul(vload(x + i), vset(factor)));
  return vsum(nothing) == 0.0f ? highest / float(INT16_MOST) : NAN;
}
CL_INLINE float sum_of(const int16_t* x, int size) {
  int32_t sum = 0;
  for (int i = 0; i < size; i++) sum += x[i];
  return float(sum);  // exact, because the sum is below 2^24
}

}  // namespace CL_NS
