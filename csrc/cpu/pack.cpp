// Writes weights in the order in which matrix multiplications read them.
#include <string.h>

#include "chairlift_cpu.h"

namespace {

int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Packs dense rows into panels [k / P][32][P]: P consecutive k of one row are adjacent, and the same k of the panel's
// 32 rows follow each other.
template <typename Element, int P>
void pack(Element* packed, int64_t k, int64_t first_row, int64_t rows, int64_t first_panel, int64_t panel_step,
          const Element* src, int64_t src_stride) {
  int64_t panel_size = rounded_up(k, CL_K_MULTIPLE) * CL_PANEL;
  // All 32 rows write to the same cache lines of a panel. One block of k at a time keeps these lines in the cache.
  constexpr int64_t kBlock = 256;
  for (int64_t begin = 0; begin < rows;) {
    int64_t row = first_row + begin, column = row % CL_PANEL;
    int64_t count = CL_PANEL - column < rows - begin ? CL_PANEL - column : rows - begin;
    Element* panel = packed + (first_panel + row / CL_PANEL * panel_step) * panel_size;
    for (int64_t from = 0; from < k; from += kBlock) {
      int64_t to = from + kBlock < k ? from + kBlock : k;
      for (int64_t r = 0; r < count; r++) {
        const Element* source = src + (begin + r) * src_stride;
        for (int64_t i = from; i < to; i++) panel[(i / P * CL_PANEL + column + r) * P + i % P] = source[i];
      }
    }
    begin += count;
  }
}

int64_t bits_of(int32_t format) { return format == CL_Q8 || format == CL_Q8_MIN ? 8 : 4; }
int64_t header_of(int32_t format) { return format == CL_Q8_MIN || format == CL_Q4_MIN ? 4 * CL_PANEL : 2 * CL_PANEL; }

int64_t panel_bytes(int32_t format, int64_t group, int64_t k) {
  const int64_t padded = rounded_up(k, CL_Q_BLOCK), groups = (padded + group - 1) / group;
  return groups * header_of(format) + padded * CL_PANEL * bits_of(format) / 8;
}

// Writes `count` codes of one row's group. `at` is the first byte of the codes of that group in the panel.
void put_codes(uint8_t* at, int64_t column, int64_t bits, const uint8_t* from, int64_t count) {
  if (bits == 8) {
    for (int64_t i = 0; i < count; i++) at[i / 4 * 4 * CL_PANEL + column * 4 + i % 4] = from[i];
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    uint8_t& pair = at[i / 8 * 4 * CL_PANEL + column * 4 + i % 4];
    const int shift = i % 8 < 4 ? 0 : 4;
    pair = uint8_t((pair & ~(15 << shift)) | (from[i] & 15) << shift);
  }
}

}  // namespace

int64_t cl_packed_code_bytes(int32_t format, int32_t group, int64_t n, int64_t k) {
  return rounded_up(n, CL_PANEL) / CL_PANEL * panel_bytes(format, group, k);
}

int64_t cl_code_bytes(int64_t k) { return rounded_up(k, CL_Q_BLOCK) / CL_Q_BLOCK * (2 * CL_Q_BLOCK + 16); }

void cl_pack_codes(void* packed, int32_t format, int32_t group, int64_t k, int64_t first_row, int64_t rows,
                   int64_t first_panel, int64_t panel_step, const uint8_t* codes, int64_t codes_stride,
                   const uint16_t* scales, const uint16_t* minimums, int64_t scales_stride) {
  const int64_t bits = bits_of(format), header = header_of(format), whole = header + group * CL_PANEL * bits / 8;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t row = first_row + r, column = row % CL_PANEL;
    uint8_t* at = static_cast<uint8_t*>(packed) +
                  (first_panel + row / CL_PANEL * panel_step) * panel_bytes(format, group, k);
    for (int64_t from = 0; from < k; from += group, at += whole) {
      memcpy(at + 2 * column, scales + r * scales_stride + from / group, 2);
      if (minimums) memcpy(at + 2 * (CL_PANEL + column), minimums + r * scales_stride + from / group, 2);
      put_codes(at + header, column, bits, codes + r * codes_stride + from, from + group < k ? group : k - from);
    }
  }
}

void cl_pack(void* packed, int32_t dtype, int64_t k, int64_t first_row, int64_t rows, int64_t first_panel,
             int64_t panel_step, const void* src, int64_t src_stride) {
  if (dtype == CL_BF16)
    pack<uint16_t, 2>(static_cast<uint16_t*>(packed), k, first_row, rows, first_panel, panel_step,
                      static_cast<const uint16_t*>(src), src_stride);
  else
    pack<float, 1>(static_cast<float*>(packed), k, first_row, rows, first_panel, panel_step,
                   static_cast<const float*>(src), src_stride);
}
