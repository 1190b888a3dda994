// Vectors of sixteen float32 lanes, as one __m512, two __m256 or (isa/neon.h) four float32x4_t. Each instruction-set
// path includes this file once, inside its own namespace CL_NS. Everything has internal linkage, so that the linker cannot use one path's code in
// another path.
#pragma once
#if defined(__aarch64__)
#define CL_ARM
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(CL_CHECK_BOUNDS)
#include <stdio.h>
#include <stdlib.h>
#define CL_ASSERT(condition)                                                               \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      fprintf(stderr, "%s:%d: out of bounds: %s\n", __FILE__, __LINE__, #condition);       \
      abort();                                                                             \
    }                                                                                      \
  } while (0)
#else
#define CL_ASSERT(condition) ((void)0)
#endif

#define CL_INLINE static inline __attribute__((always_inline))
#define CL_NOINLINE static __attribute__((noinline))

namespace CL_NS {

enum { LANES = 16 };

struct bf16 {
  uint16_t bits;
};

CL_INLINE float to_float(float x) { return x; }
CL_INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// On ARM64, isa/neon.h defines this section and its counterparts in the other headers.
#if !defined(CL_ARM)
#if defined(__AVX512F__)

typedef __m512 vf;

CL_INLINE vf vset(float x) { return _mm512_set1_ps(x); }
CL_INLINE vf vload(const float* p) { return _mm512_loadu_ps(p); }
CL_INLINE vf vload(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
CL_INLINE void vstore(float* p, vf x) { _mm512_storeu_ps(p, x); }
CL_INLINE vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
CL_INLINE vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
CL_INLINE vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
CL_INLINE vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
CL_INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
// Maximum and minimum per lane. If one argument is NaN, vmax and vmin return the second argument. So a NaN is kept only
// if it is the second argument.
CL_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
CL_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
CL_INLINE vf vabs(vf a) { return _mm512_abs_ps(a); }
// Selects per lane: lane i is x[i] if a[i] > b[i], otherwise y[i].
CL_INLINE vf vselect_gt(vf a, vf b, vf x, vf y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x); }
CL_INLINE vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x * 2^n for integers n from -127 to 127 and x below 2. Results that would be subnormal are 0.
CL_INLINE vf vscale2(vf x, vf n) { return _mm512_scalef_ps(x, n); }
// Replaces lanes outside [low, high) by `fill`: lane i is x[i] if low <= i < high.
CL_INLINE vf vkeep(vf x, int low, int high, float fill) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __mmask16 keep = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(low)) &
                   _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(high));
  return _mm512_mask_blend_ps(keep, _mm512_set1_ps(fill), x);
}
// Bit i of the result is set if a[i] > b[i] (gt), a[i] >= b[i] (ge), a[i] == b[i] (eq), or a[i] is NaN (nan).
CL_INLINE uint32_t vmask_gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
CL_INLINE uint32_t vmask_ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
CL_INLINE uint32_t vmask_eq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
CL_INLINE uint32_t vmask_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }

#else

struct vf {
  __m256 lo, hi;
};

#define CL_PAIRWISE(name, call)                                                  \
  CL_INLINE vf name(vf a, vf b) {                                                \
    return vf{_mm256_##call##_ps(a.lo, b.lo), _mm256_##call##_ps(a.hi, b.hi)};   \
  }
CL_PAIRWISE(vadd, add)
CL_PAIRWISE(vsub, sub)
CL_PAIRWISE(vmul, mul)
CL_PAIRWISE(vdiv, div)
CL_PAIRWISE(vmax, max)
CL_PAIRWISE(vmin, min)
#undef CL_PAIRWISE

CL_INLINE vf vset(float x) { return vf{_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
CL_INLINE vf vload(const float* p) { return vf{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
CL_INLINE __m256 load_half(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
CL_INLINE vf vload(const bf16* p) { return vf{load_half(p), load_half(p + 8)}; }
CL_INLINE void vstore(float* p, vf x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
CL_INLINE vf vfma(vf a, vf b, vf c) { return vf{_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
CL_INLINE __m256 abs_half(__m256 x) { return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
CL_INLINE vf vabs(vf a) { return vf{abs_half(a.lo), abs_half(a.hi)}; }
CL_INLINE vf vselect_gt(vf a, vf b, vf x, vf y) {
  return vf{_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
            _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
}
CL_INLINE vf vround(vf a) {
  const int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return vf{_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
}
CL_INLINE __m256 scale2_half(__m256 x, __m256 n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
CL_INLINE vf vscale2(vf x, vf n) { return vf{scale2_half(x.lo, n.lo), scale2_half(x.hi, n.hi)}; }
CL_INLINE __m256 keep_half(__m256 x, __m256i lane, int low, int high, float fill) {
  __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), lane),
                                    _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(high - 1)));
  return _mm256_blendv_ps(x, _mm256_set1_ps(fill), _mm256_castsi256_ps(outside));
}
CL_INLINE vf vkeep(vf x, int low, int high, float fill) {
  const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), last = _mm256_add_epi32(first, _mm256_set1_epi32(8));
  return vf{keep_half(x.lo, first, low, high, fill), keep_half(x.hi, last, low, high, fill)};
}
#define CL_COMPARE(name, how)                                                                  \
  CL_INLINE uint32_t name(vf a, vf b) {                                                        \
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, how))) |                      \
           uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, how))) << 8;                  \
  }
CL_COMPARE(vmask_gt, _CMP_GT_OQ)
CL_COMPARE(vmask_ge, _CMP_GE_OQ)
CL_COMPARE(vmask_eq, _CMP_EQ_OQ)
CL_COMPARE(vmask_unordered, _CMP_UNORD_Q)
#undef CL_COMPARE
CL_INLINE uint32_t vmask_nan(vf a) { return vmask_unordered(a, a); }

#endif

#if defined(__AVX512F__)
CL_INLINE __m256 lower_half(vf x) { return _mm512_castps512_ps256(x); }
CL_INLINE __m256 upper_half(vf x) { return _mm512_extractf32x8_ps(x, 1); }
CL_INLINE vf join(__m256 lo, __m256 hi) { return _mm512_insertf32x8(_mm512_castps256_ps512(lo), hi, 1); }
#else
CL_INLINE __m256 lower_half(vf x) { return x.lo; }
CL_INLINE __m256 upper_half(vf x) { return x.hi; }
CL_INLINE vf join(__m256 lo, __m256 hi) { return vf{lo, hi}; }
#endif

// Conversions to bf16: round to nearest even; NaN stays NaN. Subnormals become zero on every instruction set, because
// the instruction that converts to bf16 makes them zero.
#if defined(__AVX512BF16__)
CL_INLINE void vstore(bf16* p, vf x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
CL_INLINE bf16 to_bf16(float x) {
  return bf16{uint16_t(_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0))};
}
#else
CL_INLINE bf16 to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16{uint16_t(bits >> 16 | 0x40)};
  if ((bits & 0x7f800000) == 0) return bf16{uint16_t(bits >> 16 & 0x8000)};
  return bf16{uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
CL_INLINE __m256 round_half(__m256 x) {
  __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
  __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), magnitude);
  rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
  rounded = _mm256_blendv_epi8(rounded, _mm256_and_si256(bits, _mm256_set1_epi32(int(0x80000000))), tiny);
  return _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(int(0xffff0000))));
}
CL_INLINE __m256i upper_halves(__m256 x) { return _mm256_srli_epi32(_mm256_castps_si256(round_half(x)), 16); }
CL_INLINE void vstore(bf16* p, vf x) {
  __m256i packed = _mm256_packus_epi32(upper_halves(lower_half(x)), upper_halves(upper_half(x)));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
#endif

#endif
}  // namespace CL_NS
#if defined(CL_ARM)
#include "isa/neon.h"
#endif
namespace CL_NS {

CL_INLINE float from_float(float x, float) { return x; }
CL_INLINE bf16 from_float(float x, bf16) { return to_bf16(x); }

// Rounds x to float or bf16, whichever type the second argument has. The result is a vector of float32.
CL_INLINE vf vrounded(vf x, float) { return x; }
#if defined(CL_ARM)
// In isa/neon.h.
#elif defined(__AVX512BF16__)
CL_INLINE vf vrounded(vf x, bf16) {
  bf16 rounded[LANES];
  vstore(rounded, x);
  return vload(rounded);
}
#else
CL_INLINE vf vrounded(vf x, bf16) { return join(round_half(lower_half(x)), round_half(upper_half(x))); }
#endif
// Rounds x to float or bf16, whichever type the third argument has, and stores the result at p as T. The value of the
// third argument is not used.
template <typename T>
CL_INLINE void store_rounded(T* p, vf x, T) { vstore(p, x); }
CL_INLINE void store_rounded(float* p, vf x, bf16) { vstore(p, vrounded(x, bf16())); }
// store_rounded for results of vexp2, which need no checks: they are never subnormal. A NaN among them comes from bf16,
// so its low bits are zero, and rounding it does not carry into its sign.
template <typename To, typename T>
CL_INLINE void store_power(To* p, vf x, T) { store_rounded(p, x, T()); }
#if !defined(CL_ARM) && !defined(__AVX512BF16__)
CL_INLINE __m256 round_power(__m256 x) {
  __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(int(0xffff0000))));
}
CL_INLINE void store_power(float* p, vf x, bf16) { vstore(p, join(round_power(lower_half(x)), round_power(upper_half(x)))); }
#endif

#if !defined(CL_ARM)
// vfirst: lane 0. vsum: sum of all lanes. vhighest: maximum of all lanes. vsum and vhighest halve the number of lanes
// in each step, in the same order on every instruction set.
CL_INLINE float vfirst(vf x) { return _mm256_cvtss_f32(lower_half(x)); }
CL_INLINE float vsum(vf x) {
  __m256 eight = _mm256_add_ps(lower_half(x), upper_half(x));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
CL_INLINE float vhighest(vf x) {
  __m256 eight = _mm256_max_ps(lower_half(x), upper_half(x));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#endif

// 2^x with a relative error below 2e-7. It is exactly 0 for x below -126, also for -inf. NaN stays NaN.
CL_INLINE vf vexp2(vf x) {
  x = vmin(vset(127.0f), vmax(vset(-127.0f), x));
  vf n = vround(x), f = vsub(x, n);
  vf p = vset(1.5403530e-4f);
  p = vfma(p, f, vset(1.3333558e-3f));
  p = vfma(p, f, vset(9.6181291e-3f));
  p = vfma(p, f, vset(5.5504109e-2f));
  p = vfma(p, f, vset(2.4022651e-1f));
  p = vfma(p, f, vset(6.9314718e-1f));
  p = vfma(p, f, vset(1.0f));
  return vscale2(p, n);
}
CL_INLINE vf vexp(vf x) { return vexp2(vmul(x, vset(1.44269504f))); }

// tanh(x) as a quotient of two polynomials (from Eigen). The relative error is below 4e-7, also near zero. NaN stays
// NaN.
CL_INLINE vf vtanh(vf x) {
  x = vmin(vset(7.90531111f), vmax(vset(-7.90531111f), x));
  const vf s = vmul(x, x);
  vf p = vset(-2.76076847742355e-16f), q = vset(1.19825839466702e-06f);
  p = vfma(p, s, vset(2.00018790482477e-13f));
  p = vfma(p, s, vset(-8.60467152213735e-11f));
  p = vfma(p, s, vset(5.12229709037114e-08f));
  p = vfma(p, s, vset(1.48572235717979e-05f));
  p = vfma(p, s, vset(6.37261928875436e-04f));
  p = vfma(p, s, vset(4.89352455891786e-03f));
  q = vfma(q, s, vset(1.18534705686654e-04f));
  q = vfma(q, s, vset(2.26843463243900e-03f));
  q = vfma(q, s, vset(4.89352518554385e-03f));
  return vdiv(vmul(x, p), q);
}

// Cumulative distribution function of the standard normal distribution, computed by the two cases of N. Juffa's erf:
// absolute error below 1.2e-7.
CL_INLINE vf vnormal_share(vf x) {
  const vf a = vmul(x, vset(0.707106781f)), t = vabs(a), s = vmul(a, a);
  vf r = vfma(vset(-1.72853470e-5f), t, vset(3.83197126e-4f));
  r = vfma(r, s, vfma(vset(-3.88396438e-3f), t, vset(2.42546219e-2f)));
  r = vfma(r, t, vset(-1.06777877e-1f));
  r = vfma(r, t, vset(-6.34846687e-1f));
  r = vfma(r, t, vset(-1.28717512e-1f));
  r = vfma(r, t, vsub(vset(0.0f), t));
  const vf tail = vmul(vset(0.5f), vexp(r));
  vf w = vfma(vset(-5.96761703e-4f), s, vset(4.99119423e-3f));
  w = vfma(w, s, vset(-2.67681349e-2f));
  w = vfma(w, s, vset(1.12819925e-1f));
  w = vfma(w, s, vset(-3.76125336e-1f));
  w = vfma(w, s, vset(1.28379166e-1f));
  const vf middle = vfma(vfma(w, a, a), vset(0.5f), vset(0.5f));
  const vf outer = vselect_gt(x, vset(0.0f), vsub(vset(1.0f), tail), tail);
  return vselect_gt(t, vset(0.927734375f), outer, middle);
}

CL_INLINE vf vgelu(vf x) { return vmul(x, vnormal_share(x)); }
// The tanh form of GELU: x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), with u = sqrt(2 / pi) (x + 0.044715 x^3).
CL_INLINE vf vgelu_tanh(vf x) {
  const vf u = vmul(x, vfma(vmul(x, x), vset(-0.0713548163f), vset(-1.59576912f)));  // -2 u
  return vmul(x, vdiv(vset(1.0f), vadd(vset(1.0f), vexp(u))));
}

}  // namespace CL_NS
