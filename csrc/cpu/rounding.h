// Part of the interface between Python and the CPU kernels; see chairlift_cpu.h.
#pragma once
#include <stdint.h>

#include "chairlift_cpu.h"

// Rounds groups [first, first + count) of `columns` (at most 512) float32 numbers to codes of `bits` bits: scale * (code
// - zero) is near the number. The scale has `significant` bits (11 of float16, or 8 of bfloat16) and may be negative. The
// zero point is 2^(bits - 1), or with `zero_points` each group's own. Group g uses row g % importances of `importance`,
// which weighs the squared errors of its columns; null: all weigh the same. `codes` has one code per byte. A group with a
// number that is not finite gets the scale NaN.
extern "C" CL_EXPORT void cl_fit_groups(int32_t bits, int32_t zero_points, int32_t significant, int64_t first,
                                        int64_t count, int64_t columns, const float* groups, const float* importance,
                                        int64_t importances, uint8_t* codes, float* scales, uint8_t* zeros);
