// The one inner product everything is made of: rows times packed columns, summed over k in one fixed order.
//
// A row's sums never depend on how many rows are computed with it: each accumulator runs over k from first to last, alone.
#pragma once
#include "chairlift_cpu.h"
#include "vec.h"

namespace CL_NS {

// What differs per dtype: elements that are multiplied together in one step of k.
template <typename T>
struct Pairs;
template <>
struct Pairs<float> {
  enum { P = 1 };
};
template <>
struct Pairs<bf16> {
  enum { P = 2 };
};

// Packed columns: `segments` pieces of `steps` steps each (the last may be shorter), consecutive steps `stride` elements apart.
// column[v * segments + s] is where piece s of the v-th group of 16 columns starts. Attention's pieces are KV tiles.
template <typename T>
struct Columns {
  const T* const* column;
  int segments, steps, last_steps;
  int64_t stride;
};

// What to fetch while computing: at every step of piece s, for each of `lines` (0, 1, 2 or 4), the cache line at
// at[s * lines + line] + step * stride, into L1 for attention, whose
// columns are used soon, and L2 for weights. One at a time, because a burst stalls the product until memory has answered.
struct Prefetch {
  const char* const* at;
  int lines;
  int64_t stride;
};
static const Prefetch NO_PREFETCH = {nullptr, 0, 0};

template <bool NEAR>
CL_INLINE void fetch_line(const char* at) {
  if (NEAR)
    _mm_prefetch(at, _MM_HINT_T0);
  else
    _mm_prefetch(at, _MM_HINT_T1);
}

#if defined(__AVX512F__)
enum { ROWS = 12, GROUPS = 2, MAX_GROUPS = 4 };  // at most 24 accumulators of 32 registers
#else
enum { ROWS = 4, GROUPS = 1, MAX_GROUPS = 1 };  // at most 4 pairs of accumulators of 16 registers
#endif

#if defined(__AVX512BF16__)
struct Step16 {
  __m512bh v;
};
CL_INLINE Step16 load_step(const bf16* p) { return Step16{(__m512bh)_mm512_loadu_si512(p)}; }
CL_INLINE Step16 broadcast_step(const bf16* p) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return Step16{(__m512bh)_mm512_set1_epi32(pair)};
}
CL_INLINE vf multiply_add(vf sum, Step16 a, Step16 b) { return _mm512_dpbf16_ps(sum, b.v, a.v); }
#else
// Even and odd elements as float32: a bf16 is the upper half of one.
struct Step16 {
  vf even, odd;
};
CL_INLINE Step16 broadcast_step(const bf16* p) { return Step16{vset(to_float(p[0])), vset(to_float(p[1]))}; }
#if defined(__AVX512F__)
CL_INLINE Step16 load_step(const bf16* p) {
  __m512i both = _mm512_loadu_si512(p);
  return Step16{_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
                _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))))};
}
#else
CL_INLINE Step16 load_step(const bf16* p) {
  __m256i lo = _mm256_loadu_si256((const __m256i*)p), hi = _mm256_loadu_si256((const __m256i*)(p + LANES));
  __m256i mask = _mm256_set1_epi32(int(0xffff0000));
  return Step16{vf{_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))},
                vf{_mm256_castsi256_ps(_mm256_and_si256(lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(hi, mask))}};
}
#endif
CL_INLINE vf multiply_add(vf sum, const Step16& a, const Step16& b) {
  return vfma(a.odd, b.odd, vfma(a.even, b.even, sum));
}
#endif
CL_INLINE vf load_step(const float* p) { return vload(p); }
CL_INLINE vf broadcast_step(const float* p) { return vset(*p); }
CL_INLINE vf multiply_add(vf sum, vf a, vf b) { return vfma(a, b, sum); }

// One step: the lines behind `behind` fetched, R x V sums brought forward by the products of one element or pair of k.
template <typename T, int R, int V, bool PIECES>
CL_INLINE void product_step(const T* a, int64_t a_stride, const T* const (&column)[V], const char* const (&ahead)[4],
                            int lines, int64_t behind, vf (&sum)[R][V]) {
  if (lines > 0) {
    fetch_line<PIECES>(ahead[0] + behind);
    if (lines > 1) fetch_line<PIECES>(ahead[1] + behind);
    if (lines > 2) {
      fetch_line<PIECES>(ahead[2] + behind);
      fetch_line<PIECES>(ahead[3] + behind);
    }
  }
  decltype(load_step(a)) y[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) y[v] = load_step(column[v]);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    auto x = broadcast_step(a + r * a_stride);
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sum[r][v] = multiply_add(sum[r][v], x, y[v]);
  }
}

// out[R, 16 V] = (accumulate ? out : 0) + a[R, k] @ columns. Rows of a are a_stride elements apart, of out out_stride floats.
template <typename T, int R, int V, bool PIECES>
static void product_of(const T* a, int64_t a_stride, const Columns<T>& b, float* out, int64_t out_stride,
                       bool accumulate, Prefetch prefetch) {
  enum { P = Pairs<T>::P };
  vf sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sum[r][v] = accumulate ? vload(out + r * out_stride + LANES * v) : vset(0.0f);
  const T* column[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) column[v] = b.column[v * b.segments];
  const char* ahead[4] = {};
  for (int line = 0; line < prefetch.lines; line++) ahead[line] = prefetch.at[line];
  int64_t behind = 0;
  const int total = (b.segments - 1) * b.steps + b.last_steps;
  // One loop over the steps of all pieces: compilers keep the sums in registers only across a single loop.
  for (int i = 0, left = b.steps, s = 0; i < total; i++) {
    if (PIECES && left-- == 0) {
      left = b.steps - 1;
      behind = 0;
      s++;
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) column[v] = b.column[v * b.segments + s];
      for (int line = 0; line < prefetch.lines; line++) ahead[line] = prefetch.at[s * prefetch.lines + line];
    }
    product_step<T, R, V, PIECES>(a, a_stride, column, ahead, prefetch.lines, behind, sum);
    behind += prefetch.stride;
    a += P;
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) column[v] += b.stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) vstore(out + r * out_stride + LANES * v, sum[r][v]);
}

// The most rows that V groups of columns leave registers for.
CL_INLINE constexpr int most_rows(int groups) { return groups <= GROUPS ? int(ROWS) : ROWS * GROUPS / groups; }

// PIECES: the columns may come in pieces, as attention's do.
template <typename T, int V, bool PIECES>
static void product(int rows, const T* a, int64_t a_stride, const Columns<T>& b, float* out, int64_t out_stride,
                    bool accumulate, Prefetch prefetch) {
  CL_ASSERT(rows >= 1 && rows <= most_rows(V));
  CL_ASSERT(PIECES || b.segments == 1);
#define CL_CASE(R) \
  case R:          \
    return product_of<T, (R <= most_rows(V) ? R : 1), V, PIECES>(a, a_stride, b, out, out_stride, accumulate, prefetch);
  switch (rows) {
    CL_CASE(1) CL_CASE(2) CL_CASE(3) CL_CASE(4) CL_CASE(5) CL_CASE(6)
    CL_CASE(7) CL_CASE(8) CL_CASE(9) CL_CASE(10) CL_CASE(11) CL_CASE(12)
  }
#undef CL_CASE
}

// Rows in blocks, with as many groups of columns at a time as the registers hold: `groups` is 1, 2 or 4.
template <typename T>
static void product_rows(int rows, int groups, const T* a, int64_t a_stride, const Columns<T>& b, float* out,
                         int64_t out_stride, bool accumulate, Prefetch prefetch) {
  for (int row = 0, here; row < rows; row += here) {
    here = rows - row < most_rows(groups) ? rows - row : most_rows(groups);
    const T* a_here = a + row * a_stride;
    float* out_here = out + row * out_stride;
    const Prefetch once = row == 0 ? prefetch : NO_PREFETCH;
    if (groups == 1)
      product<T, 1, true>(here, a_here, a_stride, b, out_here, out_stride, accumulate, once);
#if defined(__AVX512F__)
    else if (groups == 2)
      product<T, 2, true>(here, a_here, a_stride, b, out_here, out_stride, accumulate, once);
    else
      product<T, 4, true>(here, a_here, a_stride, b, out_here, out_stride, accumulate, once);
#endif
  }
}

// How many groups to take at once for so many rows, where `left` groups are left.
CL_INLINE int groups_at_once(int rows, int left) {
  if (MAX_GROUPS >= 4 && left >= 4 && rows <= most_rows(4)) return 4;
  return left >= GROUPS ? int(GROUPS) : 1;
}

}  // namespace CL_NS
