// Multiplications of codes by the matrix instructions of ARMv8.6 (I8MM). grouped.h includes this file.
//
// USMMLA multiplies two columns by two rows, with eight k of each, and adds to four sums of 32 bits: twice as many
// products as SDOT. The sums are exact, so they are those of every other path. The packed codes have four k of each
// column together. Two ZIPs bring eight k of two columns together, for all rows of a block.
#pragma once
#include "../grouped.h"

namespace CL_NS {

enum { FEWEST_PAIRED_ROWS = 3 };  // two rows take as many instructions as with SDOT, because of the ZIPs

// Sixteen bytes of memory. Volatile assembly is not reordered: compilers would otherwise load codes early, and move sums to
// memory, because the sums of six rows take 24 of 32 registers.
struct __attribute__((may_alias)) Sixteen {
  char bytes[16];
};
CL_INLINE uint8x16_t load_in_order(const uint8_t* from) {
  uint8x16_t out;
  __asm__ volatile("ldr %q0, %1" : "=w"(out) : "m"(*reinterpret_cast<const Sixteen*>(from)));
  return out;
}

// Four columns with eight k of each: two columns per register.
struct FourColumns {
  uint8x16_t q[2];
};
// Brings eight k of a column together. low: four columns with four k of each; high: the same columns with the next four k.
CL_INLINE FourColumns zipped(uint8x16_t low, uint8x16_t high) {
  const uint32x4_t a = vreinterpretq_u32_u8(low), b = vreinterpretq_u32_u8(high);
  return FourColumns{{vreinterpretq_u8_u32(vzip1q_u32(a, b)), vreinterpretq_u8_u32(vzip2q_u32(a, b))}};
}
// Codes of eight k of four columns. `at` is the address of the first four columns of a step; `quad` counts the columns.
template <int B, bool TABLE>
CL_INLINE FourColumns four_columns(const uint8_t* at, int quad) {
  const uint8x16_t codes = load_in_order(at + 16 * quad);
  if (B == 8) return zipped(codes, load_in_order(at + CL_PANEL * 4 + 16 * quad));
  uint8x16_t low = vandq_u8(codes, vdupq_n_u8(0x0f)), high = vshrq_n_u8(codes, 4);
  if (TABLE) {
    const uint8x16_t entries = vld1q_u8(E2M1_VALUES);
    low = vqtbl1q_u8(entries, low);
    high = vqtbl1q_u8(entries, high);
  }
  return zipped(low, high);
}

// Adds the products of two columns with two rows.
CL_INLINE int32x4_t add_matrix(int32x4_t sum, uint8x16_t columns, int8x16_t rows) {
  __asm__ volatile("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(columns), "w"(rows));
  return sum;
}

// The sums of two rows with sixteen columns. Register i has columns 2 i and 2 i + 1: the sum of the first column with
// the first row and with the second row, then those of the second column.
struct PairSums {
  int32x4_t q[LANES / 2];
};
CL_INLINE PairSums start_pair(int32_t first, int32_t second) {
  const int32x2_t both = vset_lane_s32(second, vdup_n_s32(first), 1);
  PairSums out;
#pragma GCC unroll 8
  for (int i = 0; i < LANES / 2; i++) out.q[i] = vcombine_s32(both, both);
  return out;
}
CL_INLINE vi row_of(const PairSums& sums, int second) {
  vi out;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    out.q[i] = second ? vuzp2q_s32(sums.q[2 * i], sums.q[2 * i + 1]) : vuzp1q_s32(sums.q[2 * i], sums.q[2 * i + 1]);
  return out;
}

// The same as code_product_of, with equal bits, for sixteen columns and three to six rows. If R is odd, the last row is
// multiplied twice.
template <typename Weight, int R>
CL_NOINLINE void product_of_row_pairs(const typename Pair<float, Weight>::Left* a, int64_t a_stride, const Weight* panel,
                                      int first, int per_group, int blocks, float* out, int64_t out_stride,
                                      Prefetch prefetch) {
  typedef Dot<Weight::BITS, Weight::TABLE> D;
  enum { PAIRS = (R + 1) / 2, STEPS = CL_Q_BLOCK / 8, PER_STEP = D::STEPS / STEPS };
  alignas(64) float total[R][LANES];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) vstore(total[r], vload(out + r * out_stride));
  const uint8_t* at = &panel->byte;
  const uint16_t* scales = nullptr;
  const char* ahead = prefetch.lines > 0 ? prefetch.at[0] : reinterpret_cast<const char*>(at);
  for (int block = 0, left = 0; block < blocks; block++, left--, a++) {
    if (left == 0) {
      scales = reinterpret_cast<const uint16_t*>(at) + first * LANES;
      at += Weight::HEADER;
      left = per_group;
    }
    PairSums sum[PAIRS];
#pragma GCC unroll 3
    for (int p = 0; p < PAIRS; p++) {
      const int second = 2 * p + 1 < R ? 2 * p + 1 : 2 * p;
      sum[p] = start_pair(a[2 * p * a_stride].offset, a[second * a_stride].offset);
    }
#pragma GCC unroll 4
    for (int step = 0; step < STEPS; step++) {
#pragma GCC unroll 2
      for (int i = 0; i < PER_STEP; i++) {
        fetch_line<false>(ahead);
        if (R <= FEW_CODE_ROWS) fetch_line<false>(ahead + 64);
        ahead += prefetch.stride;
      }
      int8x16_t rows[PAIRS];
#pragma GCC unroll 3
      for (int p = 0; p < PAIRS; p++) {
        const int second = 2 * p + 1 < R ? 2 * p + 1 : 2 * p;
        rows[p] = vcombine_s8(vld1_s8(a[2 * p * a_stride].code + 8 * step), vld1_s8(a[second * a_stride].code + 8 * step));
      }
      const uint8_t* codes = at + step * PER_STEP * CL_PANEL * 4 + first * STEP_BYTES;
#pragma GCC unroll 4
      for (int quad = 0; quad < 4; quad++) {
        const FourColumns columns = four_columns<Weight::BITS, Weight::TABLE>(codes, quad);
#pragma GCC unroll 3
        for (int p = 0; p < PAIRS; p++) {
          sum[p].q[2 * quad] = add_matrix(sum[p].q[2 * quad], columns.q[0], rows[p]);
          sum[p].q[2 * quad + 1] = add_matrix(sum[p].q[2 * quad + 1], columns.q[1], rows[p]);
        }
      }
    }
    const vf scale = load_halves(scales);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const auto& row = a[r * a_stride];
      vf next = vfma(vmul(ifloat(row_of(sum[r / 2], r % 2)), scale), vset(row.scale), vload(total[r]));
      if (Weight::HEADER > CL_PANEL * 2) next = vfma(load_halves(scales + CL_PANEL), vset(row.scaled_sum), next);
      vstore(total[r], next);
    }
    at += Weight::BLOCK;
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) vstore(out + r * out_stride, vload(total[r]));
}

// Executes the instruction of add_matrix 4 * CHAINS times in each round, to measure its speed.
template <int CHAINS>
CL_NOINLINE void matrix_peak(int64_t rounds) {
  int32x4_t sum[4 * CHAINS];
  for (int32x4_t& each : sum) each = vdupq_n_s32(0);
  const uint8x16_t columns = vdupq_n_u8(0);
  const int8x16_t rows = vdupq_n_s8(0);
  for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 24
    for (int j = 0; j < 4 * CHAINS; j++) {
      sum[j] = add_matrix(sum[j], columns, rows);
      __asm__ volatile("" : : "w"(sum[j]));
    }
}

// Multiplies one or two rows by SDOT, and more by matrix instructions.
template <typename Weight, int R, int V>
CL_INLINE void code_product_of_pairs(const typename Pair<float, Weight>::Left* a, int64_t a_stride, const Weight* panel,
                                     int first, int per_group, int blocks, float* out, int64_t out_stride,
                                     Prefetch prefetch) {
  if constexpr (V == 1 && R >= FEWEST_PAIRED_ROWS)
    product_of_row_pairs<Weight, R>(a, a_stride, panel, first, per_group, blocks, out, out_stride, prefetch);
  else
    code_product_of<Weight, R, V>(a, a_stride, panel, first, per_group, blocks, out, out_stride, prefetch);
}

}  // namespace CL_NS
