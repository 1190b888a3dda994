// ARM64 with NEON and the dot-product instructions (ARMv8.2): a vector of sixteen lanes is four registers. vec.h,
// which includes this file, and the headers of the kernels describe the functions. All of them compute the bits that
// those of AVX2 compute, except for NaN (its sign and payload) and for results that are rounded up to the smallest normal
// number, which ARM64 makes zero because it looks at them before they are rounded.
#pragma once
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

namespace CL_NS {

struct vf {
  float32x4_t q[4];
};

CL_INLINE vf vset(float x) { return vf{{vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}}; }
CL_INLINE vf vload(const float* p) { return vf{{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
CL_INLINE void vstore(float* p, vf x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.q[i]);
}
// Calls `of` with each of the four registers of the arguments.
template <typename Of>
CL_INLINE vf each(const Of& of, vf a) {
  return vf{{of(a.q[0]), of(a.q[1]), of(a.q[2]), of(a.q[3])}};
}
template <typename Of>
CL_INLINE vf each(const Of& of, vf a, vf b) {
  return vf{{of(a.q[0], b.q[0]), of(a.q[1], b.q[1]), of(a.q[2], b.q[2]), of(a.q[3], b.q[3])}};
}

// The larger and the smaller number as x86-64 has them: the second argument if the numbers are equal or one is NaN.
CL_INLINE float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
CL_INLINE float32x4_t smaller(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

CL_INLINE vf vadd(vf a, vf b) { return each([](float32x4_t x, float32x4_t y) { return vaddq_f32(x, y); }, a, b); }
CL_INLINE vf vsub(vf a, vf b) { return each([](float32x4_t x, float32x4_t y) { return vsubq_f32(x, y); }, a, b); }
CL_INLINE vf vmul(vf a, vf b) { return each([](float32x4_t x, float32x4_t y) { return vmulq_f32(x, y); }, a, b); }
CL_INLINE vf vdiv(vf a, vf b) { return each([](float32x4_t x, float32x4_t y) { return vdivq_f32(x, y); }, a, b); }
CL_INLINE vf vmax(vf a, vf b) { return each(larger, a, b); }
CL_INLINE vf vmin(vf a, vf b) { return each(smaller, a, b); }
CL_INLINE vf vabs(vf a) { return each([](float32x4_t x) { return vabsq_f32(x); }, a); }
CL_INLINE vf vround(vf a) { return each([](float32x4_t x) { return vrndnq_f32(x); }, a); }
CL_INLINE vf vfma(vf a, vf b, vf c) {
  return vf{{vfmaq_f32(c.q[0], a.q[0], b.q[0]), vfmaq_f32(c.q[1], a.q[1], b.q[1]), vfmaq_f32(c.q[2], a.q[2], b.q[2]),
             vfmaq_f32(c.q[3], a.q[3], b.q[3])}};
}
CL_INLINE vf vselect_gt(vf a, vf b, vf x, vf y) {
  vf out;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) out.q[i] = vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), x.q[i], y.q[i]);
  return out;
}
CL_INLINE vf vscale2(vf x, vf n) {
  return each(
      [](float32x4_t number, float32x4_t power) {
        const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(power), vdupq_n_s32(127));
        return vmulq_f32(number, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
      },
      x, n);
}
CL_INLINE int32x4_t lanes_from(int first) {
  const int32_t lane[4] = {0, 1, 2, 3};
  return vaddq_s32(vld1q_s32(lane), vdupq_n_s32(first));
}
CL_INLINE vf vkeep(vf x, int low, int high, float fill) {
  vf out;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const int32x4_t lane = lanes_from(4 * i);
    const uint32x4_t inside = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(low)), vcltq_s32(lane, vdupq_n_s32(high)));
    out.q[i] = vbslq_f32(inside, x.q[i], vdupq_n_f32(fill));
  }
  return out;
}

// Bit i of the result is set if all bits of lane i are set.
CL_INLINE uint32_t mask_of(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  const uint16x8_t low = vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b));
  const uint16x8_t high = vuzp1q_u16(vreinterpretq_u16_u32(c), vreinterpretq_u16_u32(d));
  const uint8x16_t bytes = vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
  const uint8_t bit[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t bits = vandq_u8(bytes, vld1q_u8(bit));
  return vaddv_u8(vget_low_u8(bits)) | uint32_t(vaddv_u8(vget_high_u8(bits))) << 8;
}
#define CL_COMPARE(name, call)                                                                                     \
  CL_INLINE uint32_t name(vf a, vf b) {                                                                            \
    return mask_of(call(a.q[0], b.q[0]), call(a.q[1], b.q[1]), call(a.q[2], b.q[2]), call(a.q[3], b.q[3])); \
  }
CL_COMPARE(vmask_gt, vcgtq_f32)
CL_COMPARE(vmask_ge, vcgeq_f32)
CL_COMPARE(vmask_eq, vceqq_f32)
#undef CL_COMPARE
CL_INLINE uint32_t vmask_nan(vf a) { return vmask_eq(a, a) ^ 0xffff; }

// Conversions from and to bf16. Subnormals become zero, as on every instruction set.
CL_INLINE vf vload(const bf16* p) {
  vf out;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    out.q[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p) + 4 * i), 16));
  return out;
}
CL_INLINE bf16 to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16{uint16_t(bits >> 16 | 0x40)};
  if ((bits & 0x7f800000) == 0) return bf16{uint16_t(bits >> 16 & 0x8000)};
  return bf16{uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
// Rounds to sixteen bits. The low halves of the results are not zero.
CL_INLINE uint32x4_t round_bits(uint32x4_t bits) {
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  return vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
}
CL_INLINE uint32x4_t round_quarter(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), magnitude = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
  const uint32x4_t nan = vcgtq_u32(magnitude, vdupq_n_u32(0x7f800000)), tiny = vcltq_u32(magnitude, vdupq_n_u32(0x00800000));
  const uint32x4_t rounded = vbslq_u32(nan, vorrq_u32(bits, vdupq_n_u32(0x400000)), round_bits(bits));
  return vbslq_u32(tiny, vandq_u32(bits, vdupq_n_u32(0x80000000)), rounded);
}
CL_INLINE float32x4_t upper_half(uint32x4_t bits) {
  return vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000)));
}
CL_INLINE void vstore(bf16* p, vf x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) vst1_u16(reinterpret_cast<uint16_t*>(p) + 4 * i, vshrn_n_u32(round_quarter(x.q[i]), 16));
}
CL_INLINE vf vrounded(vf x, bf16) { return each([](float32x4_t y) { return upper_half(round_quarter(y)); }, x); }
CL_INLINE void store_power(float* p, vf x, bf16) {
  vstore(p, each([](float32x4_t y) { return upper_half(round_bits(vreinterpretq_u32_f32(y))); }, x));
}

// vsum and vhighest halve the number of lanes in each step, in the same order on every instruction set.
CL_INLINE float vfirst(vf x) { return vgetq_lane_f32(x.q[0], 0); }
CL_INLINE float vsum(vf x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
CL_INLINE float vhighest(vf x) {
  const float32x4_t four = larger(larger(x.q[0], x.q[2]), larger(x.q[1], x.q[3]));
  const float32x4_t two = larger(four, vextq_f32(four, four, 2));
  const float first = vgetq_lane_f32(two, 0), second = vgetq_lane_f32(two, 1);
  return first > second ? first : second;
}

struct vi {
  int32x4_t q[4];
};
CL_INLINE int32x4_t of_bytes(uint8x16_t x) { return vreinterpretq_s32_u8(x); }
CL_INLINE vi iload(const void* p) {
  const uint8_t* at = static_cast<const uint8_t*>(p);
  return vi{{of_bytes(vld1q_u8(at)), of_bytes(vld1q_u8(at + 16)), of_bytes(vld1q_u8(at + 32)), of_bytes(vld1q_u8(at + 48))}};
}
CL_INLINE void istore(void* p, vi x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) vst1q_u8(static_cast<uint8_t*>(p) + 16 * i, vreinterpretq_u8_s32(x.q[i]));
}
CL_INLINE vi iset(int32_t x) { return vi{{vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}}; }
template <typename Of>
CL_INLINE vi each(const Of& of, vi a) {
  return vi{{of(a.q[0]), of(a.q[1]), of(a.q[2]), of(a.q[3])}};
}
CL_INLINE vi iand(vi a, vi b) {
  return vi{{vandq_s32(a.q[0], b.q[0]), vandq_s32(a.q[1], b.q[1]), vandq_s32(a.q[2], b.q[2]), vandq_s32(a.q[3], b.q[3])}};
}
CL_INLINE vi iadd(vi a, vi b) {
  return vi{{vaddq_s32(a.q[0], b.q[0]), vaddq_s32(a.q[1], b.q[1]), vaddq_s32(a.q[2], b.q[2]), vaddq_s32(a.q[3], b.q[3])}};
}
template <int N>
CL_INLINE vi ishift16(vi a) {
  return each([](int32x4_t x) { return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(x), N)); }, a);
}
CL_INLINE vf ifloat(vi a) {
  return vf{{vcvtq_f32_s32(a.q[0]), vcvtq_f32_s32(a.q[1]), vcvtq_f32_s32(a.q[2]), vcvtq_f32_s32(a.q[3])}};
}
CL_INLINE float32x4_t four_halves(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
CL_INLINE vf load_halves(const uint16_t* p) {
  return vf{{four_halves(p), four_halves(p + 4), four_halves(p + 8), four_halves(p + 12)}};
}
CL_INLINE float to_float32(uint16_t half) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0); }
CL_INLINE vi ilookup(const uint8_t (&table)[16], vi i) {
  const uint8x16_t entries = vld1q_u8(table);
  return each([&](int32x4_t x) { return of_bytes(vqtbl1q_u8(entries, vreinterpretq_u8_s32(x))); }, i);
}

// Four bytes of memory, which may have any alignment and type.
struct __attribute__((may_alias)) Four {
  char bytes[4];
};
CL_INLINE const Four& four_at(const void* at) { return *static_cast<const Four*>(at); }

// Adds the products of four bytes of a row with the same four bytes of every column, as signed numbers. Codes of 8 bits
// are from 0 to 255, so load_factors subtracts 128 from them, and sums begin with 128 * (sum of the row's codes), which is
// the field `zeros` of RowBlock. The sums are exact, as on every instruction set.
// Inline assembly keeps the sums in registers: compilers would load elements of several rows at once, and move sums to
// memory.
CL_INLINE vi add_products(vi sum, vi codes, const Four& row) {
  int32x4_t x;
  __asm__("ldr %s4, %5\n\tsdot %0.4s, %6.16b, %4.4b[0]\n\tsdot %1.4s, %7.16b, %4.4b[0]\n\t"
          "sdot %2.4s, %8.16b, %4.4b[0]\n\tsdot %3.4s, %9.16b, %4.4b[0]"
          : "+w"(sum.q[0]), "+w"(sum.q[1]), "+w"(sum.q[2]), "+w"(sum.q[3]), "=&w"(x)
          : "m"(row), "w"(codes.q[0]), "w"(codes.q[1]), "w"(codes.q[2]), "w"(codes.q[3]));
  return sum;
}
CL_INLINE vi load_factors(const uint8_t* codes) {
  return each([](int32x4_t x) { return of_bytes(veorq_u8(vreinterpretq_u8_s32(x), vdupq_n_u8(0x80))); }, iload(codes));
}
CL_INLINE int32_t zeros_of(const int8_t* code) {
  const int8x16_t ones = vdupq_n_s8(1);
  return 128 * vaddvq_s32(vdotq_s32(vdotq_s32(vdupq_n_s32(0), vld1q_s8(code), ones), vld1q_s8(code + 16), ones));
}
// Stores sixteen numbers, already rounded to the range of 8 bits, as codes of a row.
CL_INLINE void store_codes(int8_t* to, vf x) {
  const int16x8_t low = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.q[0])), vmovn_s32(vcvtnq_s32_f32(x.q[1])));
  const int16x8_t high = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.q[2])), vmovn_s32(vcvtnq_s32_f32(x.q[3])));
  vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

struct wide {
  uint64x2_t q[2];
};
enum { WIDE = 4 };
CL_INLINE wide wset(uint64_t x) { return wide{{vdupq_n_u64(x), vdupq_n_u64(x)}}; }
CL_INLINE wide wcount() {
  const uint64_t lane[4] = {0, 1, 2, 3};
  return wide{{vld1q_u64(lane), vld1q_u64(lane + 2)}};
}
CL_INLINE wide wadd(wide a, wide b) { return wide{{vaddq_u64(a.q[0], b.q[0]), vaddq_u64(a.q[1], b.q[1])}}; }
CL_INLINE wide wmul(wide a, wide b) {
  return wide{{vmull_u32(vmovn_u64(a.q[0]), vmovn_u64(b.q[0])), vmull_u32(vmovn_u64(a.q[1]), vmovn_u64(b.q[1]))}};
}
CL_INLINE wide whigh(wide a) { return wide{{vshrq_n_u64(a.q[0], 32), vshrq_n_u64(a.q[1], 32)}}; }
CL_INLINE wide wxor(wide a, wide b, wide c) {
  return wide{{veorq_u64(veorq_u64(a.q[0], b.q[0]), c.q[0]), veorq_u64(veorq_u64(a.q[1], b.q[1]), c.q[1])}};
}
CL_INLINE uint64x2_t wmax_of(uint64x2_t a, uint64x2_t b) {
  return vreinterpretq_u64_u32(vmaxq_u32(vreinterpretq_u32_u64(a), vreinterpretq_u32_u64(b)));
}
CL_INLINE wide wmax(wide a, wide b) { return wide{{wmax_of(a.q[0], b.q[0]), wmax_of(a.q[1], b.q[1])}}; }
CL_INLINE bool wreaches(wide a, uint32_t bar) {
  return vmaxv_u32(vmax_u32(vmovn_u64(a.q[0]), vmovn_u64(a.q[1]))) >= bar;
}
CL_INLINE void wstore(uint64_t* p, wide a) {
  vst1q_u64(p, a.q[0]);
  vst1q_u64(p + 2, a.q[1]);
}

CL_INLINE vf vselect(uint32_t mask, vf x, vf otherwise) {
  vf out;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const int32_t bit[4] = {1 << 4 * i, 2 << 4 * i, 4 << 4 * i, 8 << 4 * i};
    out.q[i] = vbslq_f32(vtstq_s32(vdupq_n_s32(int32_t(mask)), vld1q_s32(bit)), x.q[i], otherwise.q[i]);
  }
  return out;
}
CL_INLINE void vcompress(float* p, uint32_t mask, vf x) {
  float lane[LANES];
  vstore(lane, x);
  for (; mask; mask &= mask - 1) *p++ = lane[__builtin_ctz(mask)];
}
CL_INLINE vf lane_ids(int32_t first) {
  vf out;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) out.q[i] = vreinterpretq_f32_s32(lanes_from(first + 4 * i));
  return out;
}

// At most 24 accumulators of 32 registers.
enum { ROWS = 6, GROUPS = 1, MAX_GROUPS = 2, GROUPS_AT_ONCE = 1 };

template <int V>
CL_INLINE vf load_part(const float* p, int) {
  return vload(p);
}
CL_INLINE vf multiply_add(vf sum, vf a, vf b) { return vfma(a, b, sum); }
struct Element {
  const float* at;
};
CL_INLINE Element broadcast_part(const float* p, int part) { return Element{p + part}; }
CL_INLINE vf multiply_add(vf sum, Element a, vf b) {
  float32x4_t x;
  __asm__("ldr %s4, %5\n\tfmla %0.4s, %6.4s, %4.s[0]\n\tfmla %1.4s, %7.4s, %4.s[0]\n\t"
          "fmla %2.4s, %8.4s, %4.s[0]\n\tfmla %3.4s, %9.4s, %4.s[0]"
          : "+w"(sum.q[0]), "+w"(sum.q[1]), "+w"(sum.q[2]), "+w"(sum.q[3]), "=&w"(x)
          : "m"(*a.at), "w"(b.q[0]), "w"(b.q[1]), "w"(b.q[2]), "w"(b.q[3]));
  return sum;
}
template <int V>
CL_INLINE vf load_part(const bf16* p, int part) {
  vf out;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p) + 8 * i));
    out.q[i] = part == 0 ? vreinterpretq_f32_u32(vshlq_n_u32(both, 16)) : upper_half(both);
  }
  return out;
}
template <bool NEAR>
CL_INLINE void fetch_line(const char* at) {
  if (NEAR)
    __builtin_prefetch(at, 0, 3);
  else
    __builtin_prefetch(at, 0, 2);
}
CL_INLINE void load_anew() { __asm__ volatile("" ::: "memory"); }

struct code8;
// load_pairs separates the codes of even and odd k, so that add_pairs multiplies each by one number of the row.
CL_INLINE vi load_pairs(const code8* p) {
  const uint8x16x2_t both = vld2q_u8(reinterpret_cast<const uint8_t*>(p));
  vi out;
#pragma GCC unroll 2
  for (int part = 0; part < 2; part++) {
    out.q[2 * part] = vreinterpretq_s32_u16(vmovl_u8(vget_low_u8(both.val[part])));
    out.q[2 * part + 1] = vreinterpretq_s32_u16(vmovl_high_u8(both.val[part]));
  }
  return out;
}
CL_INLINE vi add_pairs(vi sum, const Four& row, vi columns) {
  int16x8_t x;
  __asm__("ldr %s4, %5\n\tsmlal %0.4s, %6.4h, %4.h[0]\n\tsmlal2 %1.4s, %6.8h, %4.h[0]\n\t"
          "smlal %2.4s, %7.4h, %4.h[0]\n\tsmlal2 %3.4s, %7.8h, %4.h[0]\n\tsmlal %0.4s, %8.4h, %4.h[1]\n\t"
          "smlal2 %1.4s, %8.8h, %4.h[1]\n\tsmlal %2.4s, %9.4h, %4.h[1]\n\tsmlal2 %3.4s, %9.8h, %4.h[1]"
          : "+w"(sum.q[0]), "+w"(sum.q[1]), "+w"(sum.q[2]), "+w"(sum.q[3]), "=&x"(x)
          : "m"(row), "w"(columns.q[0]), "w"(columns.q[1]), "w"(columns.q[2]), "w"(columns.q[3]));
  return sum;
}
CL_INLINE uint8x16_t load_codes(const code8* p) { return vld1q_u8(reinterpret_cast<const uint8_t*>(p)); }
CL_INLINE void store_codes(code8* p, uint8x16_t codes) { vst1q_u8(reinterpret_cast<uint8_t*>(p), codes); }
CL_INLINE vf numbers_of(uint8x16_t codes) {
  const uint16x8_t low = vmovl_u8(vget_low_u8(codes)), high = vmovl_high_u8(codes);
  return vf{{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))}};
}
// Rounds to nearest even. Numbers that do not fit become the lowest integer, as on x86-64.
CL_INLINE int32x4_t integers_of(float32x4_t x) {
  const uint32x4_t fits = vcltq_f32(vabsq_f32(x), vdupq_n_f32(0x1p31f));
  return vbslq_s32(fits, vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN));
}
// Limits two vectors of integers to the range of int16.
CL_INLINE int16x8_t words_of(float32x4_t low, float32x4_t high) {
  return vcombine_s16(vqmovn_s32(integers_of(low)), vqmovn_s32(integers_of(high)));
}
CL_INLINE uint8x16_t codes_of(vf x) {
  return vcombine_u8(vqmovun_s16(words_of(x.q[0], x.q[1])), vqmovun_s16(words_of(x.q[2], x.q[3])));
}
CL_INLINE void store_int16(int16_t* p, vf x) {
  vst1q_s16(p, words_of(x.q[0], x.q[1]));
  vst1q_s16(p + 8, words_of(x.q[2], x.q[3]));
}

// Makes the processor treat subnormal numbers as zero during a run: bit FZ of the floating-point control register.
struct FlushSubnormals {
  uint64_t before;
  FlushSubnormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | uint64_t(1) << 24) : "memory");
  }
  ~FlushSubnormals() { __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory"); }
};

// Makes the compiler compute x, even if nothing uses it.
CL_INLINE void compute(vf x) { __asm__ volatile("" : : "w"(x.q[0]), "w"(x.q[1]), "w"(x.q[2]), "w"(x.q[3])); }
CL_INLINE void compute(vi x) { __asm__ volatile("" : : "w"(x.q[0]), "w"(x.q[1]), "w"(x.q[2]), "w"(x.q[3])); }

}  // namespace CL_NS
