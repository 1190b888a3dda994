// The innermost loop of all matrix multiplications: rows times packed columns, summed over k in a fixed order.
//
// A row's sums never depend on the number of rows: each result has one accumulator, which adds k from first to last.
#pragma once
#include "chairlift_cpu.h"
#include "vec.h"

namespace CL_NS {

// Packed columns of type T: P consecutive elements of k are adjacent, 32 bits in total. A step of k is these P
// elements.
template <typename T>
struct Packed {
  enum { P = 4 / sizeof(T) };
};
enum { STEP_BYTES = 4 * LANES };  // bytes of one step of sixteen columns

// Types for multiplying rows of one type by columns of another. Each step of k takes PARTS multiply-add instructions.
// Rows are stored as `Source` and multiplied as `Left`: the same type, or float32 on instruction sets that multiply
// only float32. Each supported pair of types has a specialisation.
template <typename Row, typename Weight>
struct Pair;
template <>
struct Pair<float, float> {
  typedef float Left, Source;
  enum { PARTS = 1 };
};
template <>
struct Pair<bf16, bf16> {
  typedef bf16 Source;
// On the AMX path, tiles multiply bf16 numbers directly, so they are not widened.
#if defined(__AVX512BF16__) || defined(CL_USE_AMX)
  typedef bf16 Left;
#else
  typedef float Left;
#endif
#if defined(__AVX512BF16__)
  enum { PARTS = 1 };
#else
  enum { PARTS = 2 };
#endif
};
template <typename Row, typename Weight>
using Left = typename Pair<Row, Weight>::Left;
template <typename Row, typename Weight>
using Source = typename Pair<Row, Weight>::Source;

// Addresses of packed columns, in groups of 16 columns. Each group consists of `segments` pieces in memory. A piece has
// `steps` steps of k (the last piece has last_steps), which are `stride` elements apart. column[v * segments + s] is
// the first element of piece s of group v. In attention a piece is the K or V of sixteen tokens.
template <typename Weight>
struct Columns {
  const Weight* const* column;
  int segments, steps, last_steps;
  int64_t stride;
};

// Layout of groups of columns. PANEL: neighbouring groups of a weight's panel, in one piece. KEYS: groups at any
// addresses, each in one piece. VALUES: neighbouring groups, in several pieces.
enum Layout { PANEL, KEYS, VALUES };

// Cache lines to prefetch during a multiplication. In each step of piece s, `lines` lines (0, 1, 2 or 4) are
// prefetched: line number i is at at[s * lines + i] + step * stride. The prefetches are spread over the steps, because
// a burst of prefetches would stall the multiplication. All lines are contiguous, except those of keys. For keys and
// values `lines` is 0 or the number of groups, and `stride` is that of the columns.
struct Prefetch {
  const char* const* at;
  int lines;
  int64_t stride;
  bool far = true;  // true: prefetch into L2; false: into L1
  // Further lines, which are prefetched only if the layout is PANEL and there are at least MANY_ROWS rows: one line
  // every `gap` steps. They are in `pieces` pieces of memory, each with piece_lines lines.
  const char* const* piece = nullptr;
  int pieces = 0, piece_lines = 0, gap = 0;
};

CL_INLINE void first_lines(const Prefetch& prefetch, int piece, const char* (&ahead)[4]) {
  const char* const* at = prefetch.at + piece * prefetch.lines;
  if (prefetch.lines > 0) ahead[0] = at[0];
  if (prefetch.lines > 1) ahead[1] = at[1];
  if (prefetch.lines > 2) ahead[2] = at[2], ahead[3] = at[3];
}

#if !defined(CL_ARM)
template <bool NEAR>
CL_INLINE void fetch_line(const char* at) {
  if (NEAR)
    _mm_prefetch(at, _MM_HINT_T0);
  else
    _mm_prefetch(at, _MM_HINT_T1);
}
#endif

#if defined(CL_ARM)
// In isa/neon.h.
#elif defined(__AVX512F__)
enum { ROWS = 12, GROUPS = 2, MAX_GROUPS = 4, GROUPS_AT_ONCE = 4 };  // at most 24 accumulators of 32 registers
#else
enum { ROWS = 6, GROUPS = 1, MAX_GROUPS = 2, GROUPS_AT_ONCE = 1 };  // at most 6 pairs of accumulators of 16 registers
#endif

// Minimum number of rows for which loops prefetch the further lines of Prefetch::piece. With fewer rows there is only
// time to prefetch the next data, so loops for fewer rows have no code for it.
enum { MANY_ROWS = ROWS / 2 + 1 };

#if !defined(CL_ARM)
// Loads one part of a step of sixteen columns, in the form that multiply_add multiplies by an element of a row.
template <int V>
CL_INLINE vf load_part(const float* p, int) {
  return vload(p);
}
CL_INLINE vf multiply_add(vf sum, vf a, vf b) { return vfma(a, b, sum); }
#if defined(__AVX512F__)
CL_INLINE vf broadcast_part(const float* p, int part) { return vset(p[part]); }
#else
// With only 16 registers, an element of a row is loaded in the instruction sequence that uses it. Otherwise compilers
// load elements of several rows at once, and move sums to memory.
struct Element {
  const float* at;
};
CL_INLINE Element broadcast_part(const float* p, int part) { return Element{p + part}; }
CL_INLINE vf multiply_add(vf sum, Element a, vf b) {
  __m256 x;
  __asm__("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
          : "+x"(sum.lo), "+x"(sum.hi), "=&x"(x)
          : "m"(*a.at), "x"(b.lo), "x"(b.hi));
  return sum;
}
#endif
#if defined(__AVX512BF16__)
template <int V>
CL_INLINE __m512bh load_part(const bf16* p, int) {
  return (__m512bh)_mm512_loadu_si512(p);
}
CL_INLINE __m512bh broadcast_part(const bf16* p, int) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}
CL_INLINE vf multiply_add(vf sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, b, a); }
#elif defined(__AVX512F__)
// Widens bf16 numbers to float32. A 32-bit word has two of them; a bf16 is the upper half of the float32 with the same
// value. Part 0 gives the numbers in the lower halves of the words, part 1 those in the upper halves.
template <int V>
CL_INLINE vf load_part(const bf16* p, int part) {
  const __m512i both = _mm512_loadu_si512(p), odd = _mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000)));
  return _mm512_castsi512_ps(part == 0 ? _mm512_slli_epi32(both, 16) : odd);
}
#else
template <bool MASK>
CL_INLINE __m256 load_eight(const bf16* p, int part) {
  const __m256i both = _mm256_loadu_si256((const __m256i*)p);
  if (part == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  if (MASK) return _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))));
  __m256i odd = _mm256_srli_epi32(both, 16);
  __asm__("" : "+x"(odd));  // prevents the compiler from replacing the two shifts by a mask in a register
  return _mm256_castsi256_ps(_mm256_slli_epi32(odd, 16));
}
// Widens part 0 or 1 of 32 bf16 numbers to float32. With V == 1 a mask stays in a register. With V == 2 (two groups of
// columns and three rows) no register is free for it, so load_eight shifts instead.
template <int V>
CL_INLINE vf load_part(const bf16* p, int part) {
  return vf{load_eight<V == 1>(p, part), load_eight<V == 1>(p + LANES, part)};
}
#endif

// The AMX path compiled without AVX512-BF16. Only tests build it: every processor with AMX also has AVX512-BF16.
#if defined(CL_USE_AMX) && !defined(__AVX512BF16__)
CL_INLINE vf broadcast_part(const bf16* p, int part) { return vset(to_float(p[part])); }
#endif

// Makes the compiler load data from memory again instead of keeping it in a register. Without AVX-512, registers are
// scarce.
#if defined(__AVX512F__)
CL_INLINE void load_anew() {}
#else
CL_INLINE void load_anew() { __asm__ volatile("" ::: "memory"); }
#endif
#endif

// One step of k: prefetches the lines at offset `behind` from `ahead`, and adds the products of P elements of k to R x
// V sums. FOUR: up to four lines per step may be prefetched, as attention needs. Without FOUR there are at most two,
// because addresses of more lines would take registers from the sums.
template <typename Row, typename Weight, int R, int V, bool NEAR, bool FOUR>
CL_INLINE void product_step(const Left<Row, Weight>* const (&a)[(R + 2) / 3], int64_t a_stride,
                            const Weight* const (&column)[V], const char* const (&ahead)[4], int lines, int64_t behind,
                            vf (&sum)[R][V]) {
  if (lines > 0) {
    fetch_line<NEAR>(ahead[0] + behind);
    if (lines > 1) fetch_line<NEAR>(ahead[1] + behind);
    if (FOUR && lines > 2) {
      fetch_line<NEAR>(ahead[2] + behind);
      fetch_line<NEAR>(ahead[3] + behind);
    }
  }
#pragma GCC unroll 2
  for (int part = 0; part < Pair<Row, Weight>::PARTS; part++) {
    constexpr int AT_ONCE = V < GROUPS_AT_ONCE ? V : int(GROUPS_AT_ONCE);
#pragma GCC unroll 4
    for (int group = 0; group < V; group += AT_ONCE) {
      if (part > 0 || group > 0) load_anew();
      decltype(load_part<V>(column[0], part)) y[AT_ONCE];
#pragma GCC unroll 4
      for (int v = 0; v < AT_ONCE; v++) y[v] = load_part<V>(column[group + v], part);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const auto x = broadcast_part(a[r / 3] + r % 3 * a_stride, part);
#pragma GCC unroll 4
        for (int v = 0; v < AT_ONCE; v++) sum[r][group + v] = multiply_add(sum[r][group + v], x, y[v]);
      }
    }
  }
}

// out[R, 16 V] = (accumulate ? out : 0) + a[R, k] @ columns. Rows of a are a_stride elements apart, rows of out
// out_stride floats. The function is not inlined: with the caller's variables, compilers would move the sums to memory.
template <typename Row, typename Weight, int R, int V, Layout LAYOUT, bool FAR>
CL_NOINLINE void product_of(const Left<Row, Weight>* a, int64_t a_stride, const Columns<Weight>& b, float* out,
                            int64_t out_stride, bool accumulate, Prefetch prefetch) {
  enum { P = Packed<Weight>::P };
  constexpr bool PIECES = LAYOUT == VALUES, MORE = LAYOUT == PANEL && R >= MANY_ROWS;
  vf sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sum[r][v] = accumulate ? vload(out + r * out_stride + LANES * v) : vset(0.0f);
  const Weight* column[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) column[v] = b.column[v * b.segments];
  // One register has the address of three rows: the second and third are at the stride and at twice the stride.
  const Left<Row, Weight>* rows[(R + 2) / 3];
#pragma GCC unroll 4
  for (int i = 0; i < (R + 2) / 3; i++) {
    rows[i] = a + 3 * i * a_stride;
    __asm__("" : "+r"(rows[i]));
  }
  const char* ahead[4] = {};
  first_lines(prefetch, 0, ahead);
  int64_t behind = 0;
  const char* const* piece = prefetch.piece;
  const char* more = MORE && prefetch.pieces ? *piece : nullptr;
  int until = more ? prefetch.gap : 0, lines_left = prefetch.piece_lines, pieces_left = prefetch.pieces;
  const int total = (b.segments - 1) * b.steps + b.last_steps;
  // One loop over the steps of all pieces, because compilers keep the sums in registers only across a single loop.
  for (int i = 0, left = b.steps, s = 0; i < total; i++) {
    if (PIECES && left-- == 0) {
      left = b.steps - 1;
      behind = 0;
      s++;
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) column[v] = b.column[v * b.segments + s];
      first_lines(prefetch, s, ahead);
    }
    if (MORE && --until == 0) {
      fetch_line<false>(more);
      more += 64;
      until = prefetch.gap;
      if (--lines_left == 0) {
        lines_left = prefetch.piece_lines;
        if (--pieces_left > 0)
          more = *++piece;
        else
          until = 0;
      }
    }
    // Derives the addresses of neighbouring data from one address. Otherwise compilers keep addresses in vector
    // registers, and a multiplication of many rows takes 1.04 times as long.
    if (LAYOUT == VALUES || MORE) {
#pragma GCC unroll 4
      for (int v = 1; v < V; v++) column[v] = column[0] + v * LANES * P;
#pragma GCC unroll 4
      for (int line = 1; line < 4; line++) ahead[line] = ahead[0] + 64 * line;
    }
    // Only attention prefetches four lines. But for few rows, GCC's code is up to 1.05 times faster with FOUR.
    product_step<Row, Weight, R, V, !FAR, !MORE>(rows, a_stride, column, ahead, prefetch.lines, behind, sum);
    behind += LAYOUT == KEYS ? 64 : prefetch.stride;
#pragma GCC unroll 4
    for (int i = 0; i < (R + 2) / 3; i++) rows[i] += P;
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) column[v] += MORE ? CL_PANEL * P : LAYOUT == KEYS ? CL_KV_TOKENS * P : b.stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) vstore(out + r * out_stride + LANES * v, sum[r][v]);
}

// Maximum number of rows whose sums fit into the registers with `groups` groups of columns.
CL_INLINE constexpr int most_rows(int groups) { return groups <= GROUPS ? int(ROWS) : ROWS * GROUPS / groups; }

template <typename Row, typename Weight, int V, Layout LAYOUT, bool FAR>
static void product(int rows, const Left<Row, Weight>* a, int64_t a_stride, const Columns<Weight>& b, float* out,
                    int64_t out_stride, bool accumulate, Prefetch prefetch) {
  CL_ASSERT(rows >= 1 && rows <= most_rows(V));
  CL_ASSERT(LAYOUT == VALUES ||
            (b.segments == 1 && b.stride == (LAYOUT == KEYS ? CL_KV_TOKENS : CL_PANEL) * Packed<Weight>::P));
#define CL_CASE(R)                                                               \
  case R:                                                                        \
    return product_of<Row, Weight, (R <= most_rows(V) ? R : 1), V, LAYOUT, FAR>( \
        a, a_stride, b, out, out_stride, accumulate, prefetch);
  switch (rows) {
    CL_CASE(1) CL_CASE(2) CL_CASE(3) CL_CASE(4) CL_CASE(5) CL_CASE(6)
    CL_CASE(7) CL_CASE(8) CL_CASE(9) CL_CASE(10) CL_CASE(11) CL_CASE(12)
  }
#undef CL_CASE
}

// Number of groups of columns to compute at once for `rows` rows, if `left` groups remain.
CL_INLINE int groups_at_once(int rows, int left) {
  for (int groups = MAX_GROUPS; groups > GROUPS; groups /= 2)
    if (left >= groups && rows <= most_rows(groups)) return groups;
  return left >= GROUPS ? int(GROUPS) : 1;
}

// Multiplies rows by 1, 2 or 4 groups of columns at once; the sums must fit into the registers.
template <typename Row, typename Weight, Layout LAYOUT, bool FAR>
static void product_of_groups(int groups, int rows, const Left<Row, Weight>* a, int64_t a_stride, const Columns<Weight>& b,
                              float* out, int64_t out_stride, bool accumulate, Prefetch prefetch) {
  if (groups == 1)
    product<Row, Weight, 1, LAYOUT, FAR>(rows, a, a_stride, b, out, out_stride, accumulate, prefetch);
  else if (groups == 2)
    product<Row, Weight, 2, LAYOUT, FAR>(rows, a, a_stride, b, out, out_stride, accumulate, prefetch);
  else
    product<Row, Weight, MAX_GROUPS, LAYOUT, FAR>(rows, a, a_stride, b, out, out_stride, accumulate, prefetch);
}

// Multiplies all rows of an attention task, in blocks of nearly equal size whose sums fit into the registers.
template <Layout LAYOUT, typename T>
static void product_rows(int rows, int groups, const Left<T, T>* a, int64_t a_stride, const Columns<T>& b, float* out,
                         int64_t out_stride, bool accumulate, Prefetch prefetch) {
  const int blocks = (rows + most_rows(groups) - 1) / most_rows(groups);
  for (int block = 0; block < blocks; block++) {
    const int row = rows * block / blocks, here = rows * (block + 1) / blocks - row;
    const Left<T, T>* a_here = a + row * a_stride;
    float* out_here = out + row * out_stride;
    if (block > 0) prefetch.lines = 0;
    if (prefetch.far)
      product_of_groups<T, T, LAYOUT, true>(groups, here, a_here, a_stride, b, out_here, out_stride, accumulate, prefetch);
    else
      product_of_groups<T, T, LAYOUT, false>(groups, here, a_here, a_stride, b, out_here, out_stride, accumulate, prefetch);
  }
}

}  // namespace CL_NS
