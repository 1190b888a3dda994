// Chooses scales and zero points of groups of integers by least squares. The plain definition is fit_plainly in
// chairlift/kernels/rounding.py, and both give the same bits: the sums are float32 in the order of the columns.
#include <math.h>
#include <string.h>

#include "rounding.h"

// The functions below are compiled for several processors, and the fastest that can run is chosen when the library is
// loaded. All copies give the same results, because no multiplication is fused with an addition.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
#define CL_FOR_EACH_PROCESSOR __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#else
#define CL_FOR_EACH_PROCESSOR
#endif
#define CL_INLINE inline __attribute__((always_inline))

namespace {

// Groups are processed side by side: entry l of a Lane belongs to group l.
constexpr int kLanes = 16;
constexpr int kMostColumns = 512;
struct Lane {
  float of[kLanes];
};
constexpr float kRound = 12582912.0f;       // 1.5 * 2^23: adding and subtracting it rounds to an integer, half to even
constexpr float kLeast = 5.9604645e-08f;    // 2^-24, the smallest positive float16
constexpr float kNormal = 6.1035156e-05f;   // 2^-14, the smallest normal float16

#define CL_LANES for (int l = 0; l < kLanes; l++)

struct Values {
  Lane x[kMostColumns];
  Lane w[kMostColumns];  // importance
  int columns;
};

// Best scale and zero point so far, with the weighted squared error.
struct Best {
  Lane scale, zero, error;
};

// Rounds to `bits` significant bits. With 11 bits (float16), small numbers become multiples of 2^-24. No scale becomes 0.
CL_INLINE float rounded(float value, int bits) {
  uint32_t word;
  memcpy(&word, &value, 4);
  const uint32_t sign = word & 0x80000000u, below = 24 - bits;
  word &= 0x7fffffffu;
  uint32_t even = (word + ((1u << (below - 1)) - 1) + (word >> below & 1)) & ~((1u << below) - 1);
  float size, small, normal;
  memcpy(&size, &word, 4);
  memcpy(&normal, &even, 4);
  small = (size * 16777216.0f + kRound - kRound) * kLeast;
  float result = bits == 11 && size < kNormal ? small : normal;
  result = result > kLeast ? result : kLeast;
  memcpy(&even, &result, 4);
  even |= sign;
  memcpy(&result, &even, 4);
  return result;
}

// `scale`, but at least kLeast in magnitude.
CL_INLINE float not_zero(float scale) { return fabsf(scale) < kLeast ? copysignf(kLeast, scale) : scale; }

CL_INLINE float nearest(float x, float inverse, float low, float high) {
  float q = x * inverse;
  q = q > low ? q : low;
  q = q < high ? q : high;
  return q + kRound - kRound;
}

// Sums over the columns of w * x * q and w * q * q, where q are the nearest codes minus the zero point.
CL_INLINE void sums(const Values& values, const Lane& scale, const Lane& zero, float top, Lane& xq, Lane& qq) {
  Lane inverse, low, high;
  CL_LANES {
    inverse.of[l] = 1.0f / scale.of[l];
    low.of[l] = -zero.of[l];
    high.of[l] = top - zero.of[l];
    xq.of[l] = qq.of[l] = 0.0f;
  }
  for (int i = 0; i < values.columns; i++) CL_LANES {
    const float x = values.x[i].of[l], q = nearest(x, inverse.of[l], low.of[l], high.of[l]);
    const float wq = values.w[i].of[l] * q;
    xq.of[l] += wq * x;
    qq.of[l] += wq * q;
  }
}

// Replaces the best scale and zero point where the given ones have a smaller error. `scale` is rounded first.
CL_INLINE void consider(const Values& values, const Lane& scale, const Lane& zero, float top, int bits, Best& best) {
  Lane rounded_scale, inverse, low, high, error;
  CL_LANES {
    rounded_scale.of[l] = rounded(scale.of[l], bits);
    inverse.of[l] = 1.0f / rounded_scale.of[l];
    low.of[l] = -zero.of[l];
    high.of[l] = top - zero.of[l];
    error.of[l] = 0.0f;
  }
  for (int i = 0; i < values.columns; i++) CL_LANES {
    const float x = values.x[i].of[l], q = nearest(x, inverse.of[l], low.of[l], high.of[l]);
    const float lost = x - q * rounded_scale.of[l];
    error.of[l] += values.w[i].of[l] * (lost * lost);
  }
  CL_LANES {
    const bool better = error.of[l] < best.error.of[l];
    best.scale.of[l] = better ? rounded_scale.of[l] : best.scale.of[l];
    best.zero.of[l] = better ? zero.of[l] : best.zero.of[l];
    best.error.of[l] = better ? error.of[l] : best.error.of[l];
  }
}

// The candidate of a search with the smallest error if its scale needed no rounding.
struct Found {
  Lane scale, zero, gain;
};

CL_INLINE void search(const Values& values, const Lane& scale, const Lane& zero, float top, Found& found) {
  Lane xq, qq;
  sums(values, scale, zero, top, xq, qq);
  CL_LANES {
    const float least = qq.of[l] > 0.0f ? xq.of[l] / qq.of[l] : 0.0f, gain = least * xq.of[l];
    const bool better = gain > found.gain.of[l];
    found.scale.of[l] = better ? least : found.scale.of[l];
    found.zero.of[l] = better ? zero.of[l] : found.zero.of[l];
    found.gain.of[l] = better ? gain : found.gain.of[l];
  }
}

CL_INLINE void refine(const Values& values, float top, int bits, Best& best) {
  for (int round = 0; round < 2; round++) {
    Found found;
    CL_LANES {
      found.scale.of[l] = best.scale.of[l];
      found.zero.of[l] = best.zero.of[l];
      found.gain.of[l] = 0.0f;
    }
    search(values, Lane(best.scale), Lane(best.zero), top, found);
    consider(values, found.scale, found.zero, top, bits, best);
  }
}

CL_INLINE void fit_symmetric(const Values& values, float half, int bits, Best& best) {
  const float top = 2 * half - 1;
  Lane largest, zero, scale;
  CL_LANES largest.of[l] = 0.0f;
  for (int i = 0; i < values.columns; i++) CL_LANES {
    const float x = values.x[i].of[l];
    largest.of[l] = fabsf(x) > fabsf(largest.of[l]) ? x : largest.of[l];
  }
  CL_LANES {
    zero.of[l] = half;
    scale.of[l] = fabsf(largest.of[l]) / (half - 1);
    best.scale.of[l] = rounded(scale.of[l], bits);
    best.zero.of[l] = half;
    best.error.of[l] = INFINITY;
  }
  consider(values, scale, zero, top, bits, best);
  CL_LANES scale.of[l] = -largest.of[l] / half;
  consider(values, scale, zero, top, bits, best);
  Found found;
  CL_LANES {
    found.scale.of[l] = best.scale.of[l];
    found.zero.of[l] = half;
    found.gain.of[l] = 0.0f;
  }
  for (int step = -9; step <= 9; step++) {
    const float range = -(half + 0.1f * float(step));
    CL_LANES scale.of[l] = not_zero(largest.of[l] / range);
    search(values, scale, zero, top, found);
  }
  consider(values, found.scale, found.zero, top, bits, best);
  refine(values, top, bits, best);
}

CL_INLINE void fit_with_zeros(const Values& values, float half, int bits, Best& best) {
  const float top = 2 * half - 1;
  Lane low, high, scale, zero;
  CL_LANES low.of[l] = high.of[l] = 0.0f;
  for (int i = 0; i < values.columns; i++) CL_LANES {
    const float x = values.x[i].of[l];
    low.of[l] = x < low.of[l] ? x : low.of[l];
    high.of[l] = x > high.of[l] ? x : high.of[l];
  }
  CL_LANES {
    scale.of[l] = rounded((high.of[l] - low.of[l]) / top, bits);
    zero.of[l] = nearest(-low.of[l], 1.0f / scale.of[l], 0.0f, top);
    best.scale.of[l] = scale.of[l];
    best.zero.of[l] = zero.of[l];
    best.error.of[l] = INFINITY;
  }
  consider(values, scale, zero, top, bits, best);
  Found found;
  CL_LANES {
    found.scale.of[l] = best.scale.of[l];
    found.zero.of[l] = best.zero.of[l];
    found.gain.of[l] = 0.0f;
  }
  for (float point = 0; point <= top; point++) {
    Lane whole;
    CL_LANES {
      const float above = point < top ? high.of[l] / (top - point) : 0.0f, below = point > 0 ? -low.of[l] / point : 0.0f;
      zero.of[l] = point;
      whole.of[l] = above > below ? above : below;
    }
    for (int step = 0; step <= 5; step++) {
      const float ratio = 1.0f - 0.06f * float(step);
      CL_LANES scale.of[l] = not_zero(whole.of[l] * ratio);
      search(values, scale, zero, top, found);
    }
  }
  consider(values, found.scale, found.zero, top, bits, best);
  refine(values, top, bits, best);
}

CL_FOR_EACH_PROCESSOR void fit_lanes(const Values& values, float half, int significant, int zeros, Best& best) {
  if (zeros)
    fit_with_zeros(values, half, significant, best);
  else
    fit_symmetric(values, half, significant, best);
}

CL_FOR_EACH_PROCESSOR void write_codes(const Values& values, float top, const Best& best, int used, uint8_t* codes,
                                       float* scales, uint8_t* zeros) {
  for (int l = 0; l < used; l++) {
    const float scale = best.scale.of[l], zero = best.zero.of[l], inverse = 1.0f / scale;
    float broken = 0.0f;  // NaN if a value is not finite
    for (int i = 0; i < values.columns; i++) {
      const float x = values.x[i].of[l];
      broken += x * 0.0f;
      codes[l * values.columns + i] = uint8_t(int(nearest(x, inverse, -zero, top - zero) + zero));
    }
    scales[l] = scale + broken;
    zeros[l] = uint8_t(int(zero));
  }
}

}  // namespace

void cl_fit_groups(int32_t bits, int32_t zero_points, int32_t significant, int64_t first, int64_t count,
                   int64_t columns, const float* groups, const float* importance, int64_t importances, uint8_t* codes,
                   float* scales, uint8_t* zeros) {
  static thread_local Values values;
  Best best;
  const float half = float(1 << (bits - 1));
  values.columns = int(columns);
  for (int64_t start = first; start < first + count; start += kLanes) {
    const int used = int(first + count - start < kLanes ? first + count - start : kLanes);
    for (int l = 0; l < kLanes; l++) {
      const int64_t group = start + (l < used ? l : 0);
      for (int64_t i = 0; i < columns; i++) {
        values.x[i].of[l] = groups[group * columns + i];
        values.w[i].of[l] = importance ? importance[group % importances * columns + i] : 1.0f;
      }
    }
    fit_lanes(values, half, significant, zero_points, best);
    write_codes(values, 2 * half - 1, best, used, codes + start * columns, scales + start, zeros + start);
  }
}
