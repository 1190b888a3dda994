// Weights laid out once, in the order in which the products read them.
#include <string.h>

#include "chairlift_cpu.h"

namespace {

int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Pairs P of consecutive k stay together, and the 32 rows of a panel follow each other: [k / P][32][P].
template <typename Element, int P>
void pack(Element* packed, int64_t k, int64_t first_row, int64_t rows, int64_t first_panel, int64_t panel_step,
          const Element* src, int64_t src_stride) {
  int64_t panel_size = rounded_up(k, CL_K_MULTIPLE) * CL_PANEL;
  // A block of k at a time, so that the lines of a panel which the 32 rows share stay in the cache.
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

}  // namespace

void cl_pack(void* packed, int32_t dtype, int64_t k, int64_t first_row, int64_t rows, int64_t first_panel,
             int64_t panel_step, const void* src, int64_t src_stride) {
  if (dtype == CL_BF16)
    pack<uint16_t, 2>(static_cast<uint16_t*>(packed), k, first_row, rows, first_panel, panel_step,
                      static_cast<const uint16_t*>(src), src_stride);
  else
    pack<float, 1>(static_cast<float*>(packed), k, first_row, rows, first_panel, panel_step,
                   static_cast<const float*>(src), src_stride);
}
