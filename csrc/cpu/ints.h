// Vectors of integers: sixteen sums of 32 bits, and the instructions that multiply 8-bit or 16-bit integers and add the
// products to them.
#pragma once
#include "vec.h"

#if !defined(CL_ARM)

namespace CL_NS {

// vi: a vector of sixteen integers of 32 bits, or of thirty-two integers of 16 bits.
#if defined(__AVX512F__)
typedef __m512i vi;
CL_INLINE vi iload(const void* p) { return _mm512_loadu_si512(p); }
CL_INLINE void istore(void* p, vi x) { _mm512_storeu_si512(p, x); }
CL_INLINE vi iset(int32_t x) { return _mm512_set1_epi32(x); }
CL_INLINE vi iand(vi a, vi b) { return _mm512_and_si512(a, b); }
CL_INLINE vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
template <int N>
CL_INLINE vi ishift16(vi a) { return _mm512_srli_epi16(a, N); }
CL_INLINE vf ifloat(vi a) { return _mm512_cvtepi32_ps(a); }
CL_INLINE vf load_halves(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
CL_INLINE vi imadd(vi a, vi b) { return _mm512_madd_epi16(a, b); }
CL_INLINE vi ilookup(const __m128i& table, vi i) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), i); }
#else
struct vi {
  __m256i lo, hi;
};
CL_INLINE vi iload(const void* p) {
  return vi{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
CL_INLINE void istore(void* p, vi x) {
  _mm256_storeu_si256((__m256i*)p, x.lo);
  _mm256_storeu_si256((__m256i*)p + 1, x.hi);
}
CL_INLINE vi iset(int32_t x) { return vi{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
CL_INLINE vi iand(vi a, vi b) { return vi{_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
CL_INLINE vi iadd(vi a, vi b) { return vi{_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
CL_INLINE vi imadd(vi a, vi b) { return vi{_mm256_madd_epi16(a.lo, b.lo), _mm256_madd_epi16(a.hi, b.hi)}; }
CL_INLINE vi ilookup(const __m128i& table, vi i) {
  const __m256i both = _mm256_broadcastsi128_si256(table);
  return vi{_mm256_shuffle_epi8(both, i.lo), _mm256_shuffle_epi8(both, i.hi)};
}
template <int N>
CL_INLINE vi ishift16(vi a) { return vi{_mm256_srli_epi16(a.lo, N), _mm256_srli_epi16(a.hi, N)}; }
CL_INLINE vf ifloat(vi a) { return vf{_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
CL_INLINE vf load_halves(const uint16_t* p) {
  return vf{_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
#endif

// Four bytes of memory, which may have any alignment and type.
struct __attribute__((may_alias)) Four {
  char bytes[4];
};
CL_INLINE const Four& four_at(const void* at) { return *static_cast<const Four*>(at); }
CL_INLINE vi ispread(const Four& four) {
  int32_t bits;
  memcpy(&bits, &four, 4);
  return iset(bits);
}

// Adds the products of four bytes of a row with the same four bytes of every column. add_pairs reads them as two 16-bit
// numbers and sums in 32 bits. add_bytes reads them as four 8-bit numbers and sums in 16 bits. Inline assembly keeps
// the sums in registers: compilers would reorder integer additions and move the sums to memory.
#if defined(__AVX512F__)
CL_INLINE vi add_pairs(vi sum, const Four& row, vi columns) {
  vi x;
  __asm__("vpbroadcastd %2, %1\n\tvpmaddwd %1, %3, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(x) : "m"(row), "v"(columns));
  return sum;
}
CL_INLINE vi add_bytes(vi sum, const Four& row, vi columns) {
  vi x;
  __asm__("vpbroadcastd %2, %1\n\tvpmaddubsw %1, %3, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=&v"(x) : "m"(row), "v"(columns));
  return sum;
}
#else
CL_INLINE vi add_pairs(vi sum, const Four& row, vi columns) {
  __m256i x, y;
  __asm__("vpbroadcastd %4, %2\n\tvpmaddwd %2, %5, %3\n\tvpmaddwd %2, %6, %2\n\tvpaddd %3, %0, %0\n\tvpaddd %2, %1, %1"
          : "+x"(sum.lo), "+x"(sum.hi), "=&x"(x), "=&x"(y)
          : "m"(row), "x"(columns.lo), "x"(columns.hi));
  return sum;
}
CL_INLINE vi add_bytes(vi sum, const Four& row, vi columns) {
  __m256i x, y;
  __asm__("vpbroadcastd %4, %2\n\tvpmaddubsw %2, %5, %3\n\tvpmaddubsw %2, %6, %2\n\tvpaddw %3, %0, %0\n\tvpaddw %2, %1, %1"
          : "+x"(sum.lo), "+x"(sum.hi), "=&x"(x), "=&x"(y)
          : "m"(row), "x"(columns.lo), "x"(columns.hi));
  return sum;
}
#endif

}  // namespace CL_NS
#endif
