// Multiplication by weights in codes with AMX tiles: a tile has the integer sums of one block of 32 k for sixteen rows and
// sixteen columns. These sums are exact, and the same float operations follow in the same order as in code_product. So
// both give the same bits, and the number of rows may decide which of them is used.
#pragma once
#include "grouped.h"
#include "tiles.h"

namespace CL_NS {

// MOST_TILED_ROWS: rows that use a piece of a panel while it is in L1. CODE_BLOCKS: blocks of 32 k in such a piece.
// LEAST_TILED_ROWS: with fewer rows, vector instructions are as fast, because they unpack codes in registers.
enum { LEAST_TILED_ROWS = 96, MOST_TILED_ROWS = 128, CODE_BLOCKS = 16, BLOCK_BYTES = CL_Q_BLOCK * CL_PANEL };

// Writes one block of a panel's codes as bytes that a tile multiplies, [8][32][4]: less the code of the number zero.
// Codes from 0 to 255 do not fit into signed bytes. They stay where they are.
template <typename Weight>
CL_INLINE const uint8_t* tile_columns(const uint8_t* at, uint8_t* to) {
  typedef Dot<Weight::BITS, Weight::TABLE> D;
  if (Weight::BITS == 8 && Weight::ZERO == 0) return at;
  const vi zero = _mm512_set1_epi8(char(Weight::ZERO));
#pragma GCC unroll 8
  for (int step = 0; step < D::STEPS; step++)
#pragma GCC unroll 2
    for (int part = 0; part < D::PARTS; part++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const vi codes = D::part(at + step * CL_PANEL * 4 + v * STEP_BYTES, part);
        istore(to + (step * D::PARTS + part) * CL_PANEL * 4 + v * STEP_BYTES, _mm512_sub_epi8(codes, zero));
      }
  return to;
}

// Blocks of one panel: the address of each one's codes and scales.
struct CodeBlocks {
  const uint8_t* codes[CODE_BLOCKS];
  const uint16_t* scales[CODE_BLOCKS];
  int count;
};

// Adds the products of sixteen rows and sixteen columns, summed over some blocks of k, to `out`. It writes `rows` rows.
// While vector instructions scale the sums of one block, tile instructions multiply the next one.
template <typename Weight, typename Block>
CL_NOINLINE void tile_of_codes(int rows, const Block* a, int64_t a_stride, const CodeBlocks& blocks, int column, float* out,
                               int64_t out_stride) {
  constexpr bool MINIMA = int(Weight::HEADER) > int(CL_PANEL) * 2;
  enum { R = 16 };
  const int64_t bytes = a_stride * int64_t(sizeof(Block));
  alignas(64) int32_t sums[2][R * LANES];
  const Block* rows_at[(R + 2) / 3];  // one address serves three rows
#pragma GCC unroll 6
  for (int i = 0; i < (R + 2) / 3; i++) {
    rows_at[i] = a + 3 * i * a_stride;
    __asm__("" : "+r"(rows_at[i]));
  }
  vf total[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) total[r] = vload(out + (r < rows ? r : 0) * out_stride);
  for (int block = 0; block <= blocks.count; block++) {
    if (block < blocks.count) {
      _tile_zero(0);
      _tile_loadd(6, blocks.codes[block] + column * 4, CL_PANEL * 4);
      _tile_loadd(4, a[block].code, bytes);
      if (Weight::BITS == 8 && Weight::ZERO == 0)
        _tile_dpbsud(0, 4, 6);
      else
        _tile_dpbssd(0, 4, 6);
      _tile_stored(0, sums[block % 2], 4 * LANES);
      written(sums);
    }
    if (block == 0) continue;
    const uint16_t* scales = blocks.scales[block - 1] + column;
    const vf scale = load_halves(scales), minimum = load_halves(scales + (MINIMA ? int(CL_PANEL) : 0));
    const int32_t* of = sums[(block - 1) % 2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Block& row = rows_at[r / 3][r % 3 * a_stride];
      total[r] = vfma(vmul(ifloat(iload(of + r * LANES)), scale), vset(row.scale), total[r]);
      if (MINIMA) total[r] = vfma(minimum, vset(row.scaled_sum), total[r]);
    }
#pragma GCC unroll 6
    for (int i = 0; i < (R + 2) / 3; i++) rows_at[i]++;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
    if (r < rows) vstore(out + r * out_stride, total[r]);
}

// out[rows, 32] += a[rows, k] @ panel, over `blocks` blocks of 32 k, with `per_group` blocks per group. It reads a multiple
// of sixteen rows, and writes `rows`. Meanwhile it prefetches `bytes` bytes from `ahead` on, evenly over the pieces of k.
template <typename Weight>
void code_tiles(int rows, const typename Pair<float, Weight>::Left* a, int64_t a_stride, const Weight* panel, int per_group,
                int blocks, float* out, int64_t out_stride, const char* ahead, int64_t bytes) {
  alignas(64) uint8_t columns[CODE_BLOCKS * BLOCK_BYTES];
  CL_ASSERT(rows >= 1 && rows <= MOST_TILED_ROWS);
  written(a);
  const uint8_t* at = &panel->byte;
  const uint16_t* scales = nullptr;
  const int64_t lines = bytes / 64;
  int64_t line = 0;
  for (int first = 0, left = 0; first < blocks; first += CODE_BLOCKS) {
    CodeBlocks here;
    here.count = blocks - first < CODE_BLOCKS ? blocks - first : int(CODE_BLOCKS);
    for (int i = 0; i < here.count; i++, left--) {
      if (left == 0) {
        scales = reinterpret_cast<const uint16_t*>(at);
        at += Weight::HEADER;
        left = per_group;
      }
      here.scales[i] = scales;
      here.codes[i] = tile_columns<Weight>(at, columns + i * BLOCK_BYTES);
      at += Weight::BLOCK;
    }
    written(columns);
    for (const int64_t end = lines * (first + here.count) / blocks; line < end; line++) fetch_line<false>(ahead + line * 64);
    for (int row = 0; row < rows; row += 16)
      for (int column = 0; column < CL_PANEL; column += LANES)
        tile_of_codes<Weight>(rows - row, a + row * a_stride + first, a_stride, here, column, out + row * out_stride + column,
                              out_stride);
  }
}

}  // namespace CL_NS
