// Matrix multiplication with AMX tiles: 32 x 32 results in four tiles, from the same packed panels that the vector code
// reads.
//
// The tile instruction rounds differently from vector instructions. So this path uses tiles for every number of rows,
// also in attention: otherwise a row's result would depend on the number of rows.
#pragma once
#include "product.h"

namespace CL_NS {

// Use of the eight tiles: 0 to 3 have sums, 4 and 5 have rows (16 each, or fewer if there are fewer rows), 6 and 7 have
// columns. A full tile has TILE_K elements of k. Only sixteen elements of a key or value are contiguous, so the tiles
// of attention have half that depth.
enum { TILE_ROWS = 32, TILE_K = 32, ATTENTION_K = CL_KV_TOKENS };

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  TileShapes(int depth, int num_rows) {
    for (int t = 0; t < 6; t++) rows[t] = uint8_t(num_rows);
    bytes_per_row[4] = bytes_per_row[5] = uint16_t(depth * sizeof(bf16));
    rows[6] = rows[7] = uint8_t(depth / 2);
  }
};

// Makes the compiler write all values to memory before it goes on. Not every compiler knows that tile loads read
// memory.
CL_INLINE void written(const void* at) { __asm__ volatile("" : : "r"(at) : "memory"); }

CL_INLINE void tiles_begin(int depth, int rows) {
  const TileShapes shapes(depth, rows < 16 ? rows : 16);
  written(&shapes);
  _tile_loadconfig(&shapes);
}
CL_INLINE void tiles_end() { _tile_release(); }

// Loads the sums of 16 or 32 rows and 16 or 32 columns into tiles 0 to 3. Without `accumulate` the tiles become zero.
CL_INLINE void load_sums(const float* out, int64_t stride, bool two_rows, bool two_columns, bool accumulate) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (!accumulate) return;
  const int64_t bytes = stride * sizeof(float);
  _tile_loadd(0, out, bytes);
  if (two_columns) _tile_loadd(1, out + 16, bytes);
  if (two_rows) _tile_loadd(2, out + 16 * stride, bytes);
  if (two_rows && two_columns) _tile_loadd(3, out + 16 * stride + 16, bytes);
}
CL_INLINE void store_sums(float* out, int64_t stride, bool two_rows, bool two_columns) {
  const int64_t bytes = stride * sizeof(float);
  _tile_stored(0, out, bytes);
  if (two_columns) _tile_stored(1, out + 16, bytes);
  if (two_rows) _tile_stored(2, out + 16 * stride, bytes);
  if (two_rows && two_columns) _tile_stored(3, out + 16 * stride + 16, bytes);
}

// Multiplies one tile's depth of k and adds the products to the sums. `first` has 16 columns. `second` has the next 16
// columns, or is null.
CL_INLINE void add_products(const bf16* a, int64_t a_stride, bool two_rows, const bf16* first, const bf16* second,
                            int64_t column_stride) {
  const int64_t a_bytes = a_stride * sizeof(bf16), column_bytes = column_stride * sizeof(bf16);
  _tile_loadd(6, first, column_bytes);
  _tile_loadd(4, a, a_bytes);
  _tile_dpbf16ps(0, 4, 6);
  if (second) {
    _tile_loadd(7, second, column_bytes);
    _tile_dpbf16ps(1, 4, 7);
  }
  if (!two_rows) return;
  _tile_loadd(5, a + 16 * a_stride, a_bytes);
  _tile_dpbf16ps(2, 5, 6);
  if (second) _tile_dpbf16ps(3, 5, 7);
}

// out[32, 32] = (accumulate ? out : 0) + a[rows, k] @ panel. It reads and writes 16 or 32 rows, even if `rows` is
// smaller; the caller ignores the rows after `rows`. Meanwhile it prefetches `bytes` bytes from `ahead` on, evenly over
// the steps.
static void tile_product(int rows, const bf16* a, int64_t a_stride, const bf16* panel, int64_t k, float* out,
                         int64_t out_stride, bool accumulate, const char* ahead, int64_t bytes) {
  const bool two_rows = rows > 16;
  const int64_t lines = bytes / 64, steps = k / TILE_K;
  CL_ASSERT(rows >= 1 && rows <= TILE_ROWS && k % TILE_K == 0);
  written(a);
  load_sums(out, out_stride, two_rows, true, accumulate);
  for (int64_t step = 0, line = 0; step < steps; step++) {
    for (const int64_t end = lines * (step + 1) / steps; line < end; line++) fetch_line<false>(ahead + line * 64);
    const bf16* columns = panel + step * TILE_K * CL_PANEL;
    add_products(a + step * TILE_K, a_stride, two_rows, columns, columns + 32, 2 * CL_PANEL);
  }
  store_sums(out, out_stride, two_rows, true);
}

// Multiplies rows by keys or values, which lie in memory in pieces of sixteen tokens. It reads and writes a multiple of
// 16 rows. The next data is prefetched into L2, because tiles need more cache lines at once than L1 can wait for.
template <Layout LAYOUT>
static void product_rows(int rows, int groups, const bf16* a, int64_t a_stride, const Columns<bf16>& b, float* out,
                         int64_t out_stride, bool accumulate, Prefetch prefetch) {
  enum { STEPS = ATTENTION_K / 2, STEP = 2 * LANES };  // elements of a step: a pair of k for 16 columns
  const int whole = b.last_steps / STEPS * STEPS, rest = b.last_steps - whole;
  // the end of the last piece, padded with zeros, because the memory after it may contain NaN
  alignas(64) bf16 filled[2][STEPS * STEP];
  for (int v = 0; v < groups; v += 2) {
    const bool two_columns = v + 1 < groups;
    const bf16* const* pieces[2] = {b.column + v * b.segments, b.column + (v + two_columns) * b.segments};
    for (int i = 0; i <= two_columns && rest > 0; i++) {
      memset(filled[i], 0, sizeof filled[i]);
      for (int step = 0; step < rest; step++)
        memcpy(filled[i] + step * STEP, pieces[i][b.segments - 1] + (whole + step) * b.stride, STEP * sizeof(bf16));
    }
    written(filled);
    for (int row = 0; row < rows; row += TILE_ROWS) {
      const bool two_rows = rows - row > 16;
      const bf16* left = a + row * a_stride;
      float* sums = out + row * out_stride + v * LANES;
      const int lines = v == 0 && row == 0 ? prefetch.lines : 0;
      load_sums(sums, out_stride, two_rows, two_columns, accumulate);
      for (int s = 0; s < b.segments; s++) {
        const int steps = s + 1 < b.segments ? b.steps : b.last_steps;
        for (int step = 0; step < steps; step += STEPS, left += ATTENTION_K) {
          for (int line = 0; line < lines; line++)
            for (int i = step; i < step + STEPS; i++) fetch_line<false>(prefetch.at[s * lines + line] + i * prefetch.stride);
          const bool last = step + STEPS > steps;
          const bf16* first = last ? filled[0] : pieces[0][s] + step * b.stride;
          const bf16* second = last ? filled[1] : pieces[1][s] + step * b.stride;
          add_products(left, a_stride, two_rows, first, two_columns ? second : nullptr, last ? int(STEP) : b.stride);
        }
      }
      store_sums(sums, out_stride, two_rows, two_columns);
    }
  }
}

}  // namespace CL_NS
