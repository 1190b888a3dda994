// Adapters of matmuls: LoRA (Hu et al., 2021), DoRA (Liu et al., 2024), replaced weights and biases. cl_lora has the
// formula. A matmul's sums change before its epilogue.
//
// Neighbouring rows with the same adapter are computed together, as in Punica (Chen et al., 2023). The sums of rows
// without an adapter do not change. A row's sums do not depend on other rows: each is one chain of additions over k,
// then one over the rank. AMX tiles are not used, because there are few rows with the same adapter.
#pragma once
#include "gemm.h"

namespace CL_NS {

// The changes of one matmul in a step. Row t has the change number entries(t) of cl_program.lora; a negative number
// means that no adapter changes the row. Row t of the matmul's input is at rows(t), in the program's dtype.
template <typename Row, typename Entries, typename Rows>
struct Changes {
  const cl_program& program;
  const Entries& entries;
  const Rows& rows;
  int64_t n, k;
  Left<Row, Row>* low;  // x @ a.T of each row, program.lora_stride elements apart
};

// Calls then(first row, row after the last, change) for each run of neighbouring rows that have the same change.
template <typename Entries, typename Then>
CL_INLINE void adapter_runs(const cl_program& program, const Entries& entries, int begin, int end, const Then& then) {
  for (int t = begin, next; t < end; t = next) {
    const int64_t entry = entries(t);
    for (next = t + 1; next < end && entries(next) == entry;) next++;
    if (entry < 0) continue;
    const cl_lora& lora = program.lora[entry];
    if (lora.used) then(t, next, lora);
  }
}

// Multiplies some rows by panels [panel0, panel0 + panels) of a weight; sums are float32 in `tile`.
template <typename Row>
static void rows_by_panels(const Row* in, int64_t in_stride, int rows, const Panels<Row>& weight, int panel0, int panels, float* tile,
                           int64_t tile_stride, float* widened_rows) {
  typedef Blocking<Row, Row> B;
  for (int64_t k = 0; k < weight.k; k += B::K_BLOCK) {
    const int64_t here = weight.k - k < B::K_BLOCK ? weight.k - k : int64_t(B::K_BLOCK);
    const Left<Row, Row>* left;
    if constexpr (B::WIDENED)
      left = widened(in + k, in_stride, rows, here, widened_rows);
    else
      left = in + k;
    for (int p = 0; p < panels; p++)
      vector_product<Row, Row>(rows, left, B::WIDENED ? here + LANES : in_stride, weight.panel(panel0 + p, k), here,
                               tile + p * CL_PANEL, tile_stride, k > 0, NOTHING, nullptr);
  }
}

// Number of rows from `first` on, at most `most`, that lie in memory one after another. `stride`: their distance.
template <typename Rows>
CL_INLINE int rows_together(const Rows& rows, int first, int end, int most, int64_t stride) {
  int count = 1;
  while (count < most && first + count < end && rows(first + count) == rows(first) + count * stride) count++;
  return count;
}

// Computes x @ a.T for all rows [0, count) that have an adapter; the threads divide the work. `stride`: distance between
// neighbouring rows of the input. Returns false if no adapter of this step changes the matmul.
template <typename Row, typename Entries, typename Rows>
static bool low_rank(cl_pool& pool, int thread, const Changes<Row, Entries, Rows>& changes, int count, int64_t stride,
                     GemmScratch<Row>& scratch) {
  enum { AT_ONCE = Blocking<Row, Row>::ROW_BLOCK };
  const int64_t tile_stride = CL_PANEL + TILE_PAD, to_stride = changes.program.lora_stride;
  int item = 0;
  bool any = false;
  adapter_runs(changes.program, changes.entries, 0, count, [&](int begin, int end, const cl_lora& lora) {
    any = true;
    if (!lora.a) return;
    const Panels<Row> a = panels_of<Row>(lora.a, lora.rank, changes.k);
    CL_ASSERT(lora.rank + LANES <= to_stride);
    for (int t = begin, here; t < end; t += here) {
      here = rows_together(changes.rows, t, end, AT_ONCE, stride);
      for (int panel = 0; panel < a.count; panel++, item++) {
        if (item % pool.num_threads() != thread) continue;
        rows_by_panels<Row>(changes.rows(t), stride, here, a, panel, 1, scratch.tile, tile_stride, scratch.widened);
        for (int r = 0; r < here; r++)
          for (int c = 0; c < CL_PANEL; c += LANES)
            vstore(changes.low + (t + r) * to_stride + panel * CL_PANEL + c,
                   vrounded(vload(scratch.tile + r * tile_stride + c), Row()));
      }
    }
  });
  if (item) pool.barrier(thread);
  return any;
}

// An epilogue that first changes the sums as the adapters say, then calls another epilogue.
template <typename Row, typename Epilogue, typename Entries, typename Rows>
struct WithAdapters {
  const Epilogue& epilogue;
  const Changes<Row, Entries, Rows>& changes;
  int64_t in_stride;
  GemmScratch<Row>& scratch;
  bool any;

  void fetch(int row0, int rows, int panel) const { epilogue.fetch(row0, rows, panel); }

  void operator()(int row0, int rows, int panel0, int panels, float* tile, int64_t tile_stride) const {
    if (any)
      adapter_runs(changes.program, changes.entries, row0, row0 + rows, [&](int begin, int end, const cl_lora& lora) {
        change(begin, end, lora, panel0, panels, tile + (begin - row0) * tile_stride, tile_stride);
      });
    epilogue(row0, rows, panel0, panels, tile, tile_stride);
  }

 private:
  void change(int begin, int end, const cl_lora& lora, int panel0, int panels, float* tile, int64_t tile_stride) const {
    if (lora.whole) {
      enum { AT_ONCE = Blocking<Row, Row>::ROW_BLOCK };
      const Panels<Row> whole = panels_of<Row>(lora.whole, changes.n, changes.k);
      for (int t = begin, here; t < end; t += here) {
        here = rows_together(changes.rows, t, end, AT_ONCE, in_stride);
        rows_by_panels<Row>(changes.rows(t), in_stride, here, whole, panel0, panels, tile + (t - begin) * tile_stride, tile_stride,
                            scratch.widened);
      }
    }
    if (lora.a) {
      const int64_t stride = changes.program.lora_stride;
      const Panels<Row> b = panels_of<Row>(lora.b, changes.n, lora.rank);
      for (int p = 0; p < panels; p++) {
        const int32_t first = lora.slices[2 * (panel0 + p)], count = lora.slices[2 * (panel0 + p) + 1];
        if (count)
          vector_product<Row, Row>(end - begin, changes.low + begin * stride + first, stride, b.panel(panel0 + p, first), count,
                                   tile + p * CL_PANEL, tile_stride, true, NOTHING, nullptr);
      }
    }
    if (!lora.gains && !lora.offsets) return;
    for (int t = begin; t < end; t++, tile += tile_stride)
      for (int c = 0; c < panels * CL_PANEL; c += LANES) {
        vf sum = vload(tile + c);
        if (lora.gains) sum = vmul(sum, vload(lora.gains + panel0 * CL_PANEL + c));
        if (lora.offsets) sum = vadd(sum, vload(lora.offsets + panel0 * CL_PANEL + c));
        vstore(tile + c, sum);
      }
  }
};

}  // namespace CL_NS
