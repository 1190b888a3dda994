// Multiplies rows, rounded to 8 bits in blocks of 32, by weights in codes of 8 or 4 bits. The sum of each block is an
// integer. One float32 sum per row and column adds the blocks in order, so a row's sums never depend on the number of
// rows.
#pragma once
#include "chairlift_cpu.h"
#include "ints.h"
#include "product.h"

// CL_TILE_CODES: AMX tiles multiply codes. Tiles read bytes, and rows are stored in bytes only with VNNI.
#if defined(CL_USE_AMX) && defined(__AVX512VNNI__)
#define CL_TILE_CODES
#endif

namespace CL_NS {

// Meaning of a code. FIXED_ZERO: the number is scale * (code - half the range of codes). MINIMUM: scale * code +
// minimum of the group. E2M1: 4-bit floats (MXFP4). A table maps these codes to twice the float's value, which is an
// integer, plus 12, so that no entry is negative.
enum Meaning { FIXED_ZERO, MINIMUM, E2M1 };

// Type of the elements of a packed weight whose codes have B bits. It is one byte for every B, because panels of codes
// are addressed in bytes. ZERO: code of the number zero. HEADER: bytes of a group's scales and minimums. BLOCK: bytes
// of the codes of 32 k of a panel.
template <int B, Meaning M>
struct Code {
  uint8_t byte;
  enum { BITS = B, ZERO = M == MINIMUM ? 0 : M == E2M1 ? 12 : 1 << (B - 1), HEADER = (M == MINIMUM ? 2 : 1) * CL_PANEL * 2 };
  enum { BLOCK = CL_Q_BLOCK * CL_PANEL * B / 8 };
  static constexpr bool TABLE = M == E2M1;
};

alignas(16) static const uint8_t E2M1_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// 32 elements of a row, each rounded to code * scale * CL_SCALE_UNIT. `scale` lacks the factor CL_SCALE_UNIT because
// the stored scales of weights have it. ZERO: that of the weight's codes.
template <typename Lane, int ZERO>
struct RowBlock {
  Lane code[CL_Q_BLOCK];
  float scale;
  int32_t offset;    // -ZERO * (sum of the codes): the weight's codes are ZERO larger than the integers that they mean
  float scaled_sum;  // scale * (sum of the codes)
  int32_t zeros;     // start value of 16-bit sums for E2M1: see Dot and zeros_of
};

// LaneOf<B>: integer type of a row's codes, for weights of B bits. Without VNNI, two products of 8-bit codes can
// overflow 16 bits when they are added, so rows are stored as 16-bit integers. Products of 4-bit and 8-bit codes never
// overflow.
#if defined(__AVX512VNNI__) || defined(CL_ARM)
template <int B>
struct LaneOf {
  typedef int8_t Lane;
};
#else
template <int B>
struct LaneOf {
  typedef int16_t Lane;
};
template <>
struct LaneOf<4> {
  typedef int8_t Lane;
};
#endif

template <typename Row, int B, Meaning M>
struct Pair<Row, Code<B, M>> {
  typedef RowBlock<typename LaneOf<B>::Lane, Code<B, M>::ZERO> Left, Source;
  enum { PARTS = 1 };
};

#if !defined(CL_ARM)
CL_INLINE float to_float32(uint16_t half) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half))); }
#endif

// Dot products of one block of 32 k of one row with sixteen columns. They are integers, so they are exact in any order.
// A step has four k of 8 bits, or eight k of 4 bits.
template <int B, bool TABLE = false>
struct Dot {
  enum { STEPS = CL_Q_BLOCK * B / 32, PARTS = 2 };
  typedef typename LaneOf<B>::Lane Lane;
#if defined(__AVX512VNNI__)
  CL_INLINE vi start(const int32_t& offset, const int32_t&) { return ispread(four_at(&offset)); }
  CL_INLINE vi finish(vi sum, int32_t) { return sum; }
  CL_INLINE vi add(vi sum, vi codes, const Four& row) { return _mm512_dpbusd_epi32(sum, codes, ispread(row)); }
#elif defined(CL_ARM)
  CL_INLINE vi start(const int32_t& offset, const int32_t& zeros) { return iset(B == 8 ? offset + zeros : offset); }
  CL_INLINE vi finish(vi sum, int32_t) { return sum; }
  CL_INLINE vi add(vi sum, vi codes, const Four& row) { return add_products(sum, codes, row); }
#else
  // 4-bit codes are summed in 16 bits over a whole block: a sum is at most 8 * 2 * 15 * 127 = 30480. With the table's
  // values, which are up to 24, a sum can exceed 16 bits and wrap around. But sums begin at `zeros`, so the final sums
  // are within 16 * 12 * 127, which fits, and wrapping around in between does not change them.
  CL_INLINE vi start(const int32_t& offset, const int32_t& zeros) { return iset(B == 8 ? offset : TABLE ? zeros : 0); }
  CL_INLINE vi finish(vi sum, int32_t offset) {
    if (B == 8) return sum;
    const vi both = imadd(sum, iset(0x00010001));
    return TABLE ? both : iadd(both, iset(offset));
  }
  CL_INLINE vi add(vi sum, vi codes, const Four& row) {
    return B == 8 ? add_pairs(sum, row, codes) : add_bytes(sum, row, codes);
  }
#endif
  // Part 0 or 1 of a step's codes. Codes of 4 bits: part 0 has the low halves of the bytes, part 1 the high halves.
  // Codes of 8 bits, as 16-bit integers: part 0 has the even ones, part 1 the odd ones.
  CL_INLINE vi part(const uint8_t* codes, int part) {
    const vi all = iload(codes);
    if (B == 4) {
      const vi nibbles = iand(part == 0 ? all : ishift16<4>(all), iset(0x0f0f0f0f));
#if defined(CL_ARM)
      return TABLE ? ilookup(E2M1_VALUES, nibbles) : nibbles;
#else
      return TABLE ? ilookup(_mm_load_si128((const __m128i*)E2M1_VALUES), nibbles) : nibbles;
#endif
    }
    return part == 0 ? iand(all, iset(0x00ff00ff)) : ishift16<8>(all);
  }
  // The four bytes of the row by which this part of all columns is multiplied.
  CL_INLINE const Four& row(const Lane* code, int step, int part) {
    return four_at(code + (step * PARTS + part) * int(4 / sizeof(Lane)));
  }
};
#if defined(__AVX512VNNI__)
template <>
struct Dot<8, false> {
  enum { STEPS = 8, PARTS = 1 };
  typedef int8_t Lane;
  CL_INLINE vi start(const int32_t& offset, const int32_t&) { return ispread(four_at(&offset)); }
  CL_INLINE vi finish(vi sum, int32_t) { return sum; }
  CL_INLINE vi add(vi sum, vi codes, const Four& row) { return _mm512_dpbusd_epi32(sum, codes, ispread(row)); }
  CL_INLINE vi part(const uint8_t* codes, int) { return iload(codes); }
  CL_INLINE const Four& row(const int8_t* code, int step, int) { return four_at(code + 4 * step); }
};
#elif defined(CL_ARM)
template <>
struct Dot<8, false> {
  enum { STEPS = 8, PARTS = 1 };
  typedef int8_t Lane;
  CL_INLINE vi start(const int32_t& offset, const int32_t& zeros) { return iset(offset + zeros); }
  CL_INLINE vi finish(vi sum, int32_t) { return sum; }
  CL_INLINE vi add(vi sum, vi codes, const Four& row) { return add_products(sum, codes, row); }
  CL_INLINE vi part(const uint8_t* codes, int) { return load_factors(codes); }
  CL_INLINE const Four& row(const int8_t* code, int step, int) { return four_at(code + 4 * step); }
};
#endif

enum { FEW_CODE_ROWS = 3 };  // with at most this many rows, the multiplication waits for memory

// Maximum number of rows whose sums fit into the registers with `groups` groups of sixteen columns.
#if defined(__AVX512F__)
CL_INLINE constexpr int most_code_rows(int) { return ROWS; }
#elif defined(__ARM_FEATURE_MATMUL_INT8)
CL_INLINE constexpr int most_code_rows(int groups) { return groups == 2 ? 2 : 6; }
#else
CL_INLINE constexpr int most_code_rows(int groups) { return groups == 2 ? 2 : 5; }
#endif

// out[R, 16 V] += a[R, k] @ codes, over `blocks` blocks of 32 k, with `per_group` blocks per group. `panel` is the
// address of the first group. The columns are 16 * first to 16 * (first + V) of the panel. Each step prefetches one
// cache line, or two for few rows, even if there is nothing to prefetch: a branch would make multiplications of many
// rows a tenth slower.
template <typename Weight, int R, int V>
CL_NOINLINE void code_product_of(const typename Pair<float, Weight>::Left* a, int64_t a_stride, const Weight* panel, int first,
                                 int per_group, int blocks, float* out, int64_t out_stride, Prefetch prefetch) {
  typedef Dot<Weight::BITS, Weight::TABLE> D;
  typedef typename Pair<float, Weight>::Left Block;
  const Block* rows[(R + 2) / 3];  // one address serves three rows
#pragma GCC unroll 4
  for (int i = 0; i < (R + 2) / 3; i++) {
    rows[i] = a + 3 * i * a_stride;
    __asm__("" : "+r"(rows[i]));
  }
  // The sums of all blocks, at constant distances: addresses in `out` would take instructions in each block.
  alignas(64) float total[R][V * LANES];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) vstore(total[r] + v * LANES, vload(out + r * out_stride + v * LANES));
  const uint8_t* at = &panel->byte;
  const uint16_t* scales = nullptr;
  const char* ahead = prefetch.lines > 0 ? prefetch.at[0] : reinterpret_cast<const char*>(at);
  // One loop over the blocks of all groups: a loop for each group would move addresses to memory between groups.
  for (int block = 0, left = 0; block < blocks; block++, left--) {
    if (left == 0) {
      scales = reinterpret_cast<const uint16_t*>(at) + first * LANES;
      at += Weight::HEADER;
      left = per_group;
    }
    vi sum[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        const Block& row = rows[r / 3][r % 3 * a_stride];
        sum[r][v] = D::start(row.offset, row.zeros);
      }
#pragma GCC unroll 8
    for (int step = 0; step < D::STEPS; step++) {
      fetch_line<false>(ahead);
      if (R <= FEW_CODE_ROWS) fetch_line<false>(ahead + 64);
      ahead += prefetch.stride;
#pragma GCC unroll 2
      for (int part = 0; part < D::PARTS; part++) {
        vi codes[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) codes[v] = D::part(at + step * CL_PANEL * 4 + (first + v) * STEP_BYTES, part);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const Four& row = D::row(rows[r / 3][r % 3 * a_stride].code, step, part);
#pragma GCC unroll 2
          for (int v = 0; v < V; v++) sum[r][v] = D::add(sum[r][v], codes[v], row);
        }
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const vf scale = load_halves(scales + v * LANES);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const Block& row = rows[r / 3][r % 3 * a_stride];
        float* to = total[r] + v * LANES;
        const vf product = vmul(ifloat(D::finish(sum[r][v], row.offset)), scale);
        vf next = vfma(product, vset(row.scale), vload(to));
        if (Weight::HEADER > CL_PANEL * 2)
          next = vfma(load_halves(scales + CL_PANEL + v * LANES), vset(row.scaled_sum), next);
        vstore(to, next);
      }
    }
    at += Weight::BLOCK;
#pragma GCC unroll 4
    for (int i = 0; i < (R + 2) / 3; i++) rows[i]++;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) vstore(out + r * out_stride + v * LANES, vload(total[r] + v * LANES));
}

}  // namespace CL_NS
#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "isa/i8mm.h"
#define CL_CODE_ROWS code_product_of_pairs
#else
#define CL_CODE_ROWS code_product_of
#endif
namespace CL_NS {

template <typename Weight, int V>
void code_product(int rows, const typename Pair<float, Weight>::Left* a, int64_t a_stride, const Weight* panel, int first,
                         int per_group, int blocks, float* out, int64_t out_stride, Prefetch prefetch) {
  CL_ASSERT(rows >= 1 && rows <= most_code_rows(V));
#define CL_CASE(R)                                                            \
  case R:                                                                     \
    return CL_CODE_ROWS<Weight, (R <= most_code_rows(V) ? R : 1), V>(      \
        a, a_stride, panel, first, per_group, blocks, out, out_stride, prefetch);
  switch (rows) {
    CL_CASE(1) CL_CASE(2) CL_CASE(3) CL_CASE(4) CL_CASE(5) CL_CASE(6)
    CL_CASE(7) CL_CASE(8) CL_CASE(9) CL_CASE(10) CL_CASE(11) CL_CASE(12)
  }
#undef CL_CASE
}

#if !defined(CL_ARM)
// Stores sixteen numbers, already rounded to the range of 8 bits, as codes of a row.
CL_INLINE void store_codes(int16_t* to, vf x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(lower_half(x)), _mm256_cvtps_epi32(upper_half(x)));
  // Reorders every four codes to first, third, second, fourth: Dot multiplies the even codes in part 0, and the odd
  // codes in part 1.
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  _mm256_storeu_si256((__m256i*)to, _mm256_shuffle_epi8(_mm256_permute4x64_epi64(words, 0xd8), order));
}
CL_INLINE void store_codes(int8_t* to, vf x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(lower_half(x)), _mm256_cvtps_epi32(upper_half(x)));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128((__m128i*)to, bytes);
}

// Start values of two 16-bit sums, in one 32-bit number: -12 times the sum of the row's codes that each sum uses. It
// cancels the 12 that the E2M1 table adds to each value. The first sum uses the first two of every four codes, the
// second sum the last two. Rows of 16-bit codes do not need it.
CL_INLINE int32_t zeros_of(const int16_t*) { return 0; }
CL_INLINE int32_t zeros_of(const int8_t* code) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i*)code));
  __m128i sum = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0x4e));
  sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0xb1));
  return _mm_cvtsi128_si32(_mm_mullo_epi16(sum, _mm_set1_epi16(-12)));
}
#endif

// Rounds 32 numbers to 8 bits. If one is not finite, the scale is NaN, and so are the results of this row only.
template <typename T, typename Lane, int ZERO>
CL_INLINE void quantize_block(const T* x, RowBlock<Lane, ZERO>& to) {
  const vf a = vload(x), b = vload(x + LANES), zero = vset(0.0f);
  const float highest = vhighest(vmax(vmax(a, vsub(zero, a)), vmax(b, vsub(zero, b))));
  to.scale = to.scaled_sum = 0.0f;
  to.offset = to.zeros = 0;
  memset(to.code, 0, sizeof to.code);
  if (vmask_nan(vadd(vmul(a, zero), vmul(b, zero)))) {
    to.scale = to.scaled_sum = NAN;
  } else if (highest > 0x1p-100f) {
    const vf inverse = vset(127.0f / highest), first = vround(vmul(a, inverse)), second = vround(vmul(b, inverse));
    store_codes(to.code, first);
    store_codes(to.code + LANES, second);
    to.scale = highest * float(1.0 / (127.0 * CL_SCALE_UNIT));
    const float sum = vsum(vadd(first, second));
    to.offset = -ZERO * int32_t(sum);
    to.scaled_sum = to.scale * sum;
    to.zeros = zeros_of(to.code);
  }
}

// Distance between rows of k numbers, counted in RowBlocks. k includes the padding.
CL_INLINE int64_t code_stride(int64_t k) { return k / CL_Q_BLOCK; }
template <typename T, typename Lane, int ZERO>
CL_INLINE void quantize(const T* x, int64_t k, RowBlock<Lane, ZERO>* to) {
  for (int64_t i = 0; i < k; i += CL_Q_BLOCK) quantize_block(x + i, to[i / CL_Q_BLOCK]);
}

}  // namespace CL_NS
