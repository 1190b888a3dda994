// The AMX product: 32 x 32 outputs in four tiles. Same packed panels as the vector product, every number of rows.
//
// The tile instruction keeps its own rounding, so this path uses it for every row count. With CL_EMULATE_AMX the tiles are
// plain memory: slow, but the blocking and addressing can be tested on any processor.
#pragma once
#include "product.h"

namespace CL_NS {

enum { TILE_ROWS = 32, TILE_K = 32 };

#if defined(CL_EMULATE_AMX)

static thread_local float tile_memory[8][256];

CL_INLINE void tile_zero(int t) { memset(tile_memory[t], 0, 1024); }
CL_INLINE void tile_load(int t, const void* from, int64_t stride) {
  for (int r = 0; r < 16; r++) memcpy(tile_memory[t] + 16 * r, (const char*)from + r * stride, 64);
}
CL_INLINE void tile_store(int t, void* to, int64_t stride) {
  for (int r = 0; r < 16; r++) memcpy((char*)to + r * stride, tile_memory[t] + 16 * r, 64);
}
// Even and odd k are summed apart, then together, then into the tile: the order in which the instruction rounds.
CL_INLINE void tile_multiply(int out, int a, int b) {
  const bf16 *left = (const bf16*)tile_memory[a], *right = (const bf16*)tile_memory[b];
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float sum[2] = {0.0f, 0.0f};
      for (int k = 0; k < TILE_K; k++)
        sum[k % 2] += to_float(left[m * 32 + k]) * to_float(right[(k / 2) * 32 + 2 * n + k % 2]);
      tile_memory[out][m * 16 + n] += sum[0] + sum[1];
    }
}
CL_INLINE void tiles_begin() {}
CL_INLINE void tiles_end() {}
#define CL_TILE_ZERO(t) tile_zero(t)
#define CL_TILE_LOAD(t, from, stride) tile_load(t, from, stride)
#define CL_TILE_STORE(t, to, stride) tile_store(t, to, stride)
#define CL_TILE_MULTIPLY(out, a, b) tile_multiply(out, a, b)

#else

CL_INLINE void tiles_begin() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
}
CL_INLINE void tiles_end() { _tile_release(); }
#define CL_TILE_ZERO(t) _tile_zero(t)
#define CL_TILE_LOAD(t, from, stride) _tile_loadd(t, from, stride)
#define CL_TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define CL_TILE_MULTIPLY(out, a, b) _tile_dpbf16ps(out, a, b)

#endif

// out[32, 32] = (accumulate ? out : 0) + a[rows, k] @ panel. Reads 16 or 32 rows of a, whatever `rows` says, and writes as
// many: rows beyond are the caller's to ignore. Tiles: 0 to 3 sums, 4 and 5 rows, 6 and 7 columns.
static void tile_product(int rows, const bf16* a, int64_t a_stride, const bf16* panel, int64_t k, float* out,
                         int64_t out_stride, bool accumulate, Prefetch prefetch) {
  const int64_t a_bytes = a_stride * 2, out_bytes = out_stride * 4, panel_bytes = 128;
  const bool two = rows > 16;
  const bf16* a1 = a + 16 * a_stride;
  float* out1 = out + 16 * out_stride;
  const char* ahead = prefetch.lines > 0 ? prefetch.at[0] : nullptr;
  CL_ASSERT(rows >= 1 && rows <= TILE_ROWS && k % TILE_K == 0);
  if (accumulate) {
    CL_TILE_LOAD(0, out, out_bytes);
    CL_TILE_LOAD(1, out + 16, out_bytes);
    if (two) {
      CL_TILE_LOAD(2, out1, out_bytes);
      CL_TILE_LOAD(3, out1 + 16, out_bytes);
    }
  } else {
    CL_TILE_ZERO(0);
    CL_TILE_ZERO(1);
    CL_TILE_ZERO(2);
    CL_TILE_ZERO(3);
  }
  for (int64_t i = 0; i < k; i += TILE_K) {
    const bf16* columns = panel + i * CL_PANEL;
    for (int64_t line = 0; line < 16 * prefetch.lines * prefetch.stride; line += 64) fetch_line<false>(ahead + line);
    ahead += 16 * prefetch.lines * prefetch.stride;
    CL_TILE_LOAD(6, columns, panel_bytes);
    CL_TILE_LOAD(4, a + i, a_bytes);
    CL_TILE_MULTIPLY(0, 4, 6);
    CL_TILE_LOAD(7, columns + 32, panel_bytes);
    CL_TILE_MULTIPLY(1, 4, 7);
    if (two) {
      CL_TILE_LOAD(5, a1 + i, a_bytes);
      CL_TILE_MULTIPLY(2, 5, 6);
      CL_TILE_MULTIPLY(3, 5, 7);
    }
  }
  CL_TILE_STORE(0, out, out_bytes);
  CL_TILE_STORE(1, out + 16, out_bytes);
  if (two) {
    CL_TILE_STORE(2, out1, out_bytes);
    CL_TILE_STORE(3, out1 + 16, out_bytes);
  }
}

}  // namespace CL_NS
