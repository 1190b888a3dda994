// LoRA adapters (Hu et al., 2021): (x @ a.T) @ b.T is added to a matmul's sums before its epilogue.
//
// Neighbouring rows with the same adapter are computed together, as in Punica (Chen et al., 2023). The sums of rows
// without an adapter do not change. A row's sums do not depend on other rows: each is one chain of additions over k,
// then one over the rank. AMX tiles are not used, because there are few rows with the same adapter.
#pragma once
#include "gemm.h"

namespace CL_NS {

// Calls then(first token, token after the last, adapter) for each run of neighbouring tokens that have the same
// adapter, if this adapter changes the matmul `op`.
template <typename Then>
CL_INLINE void adapter_runs(const cl_op& op, const cl_program& program, const cl_batch& batch, int begin, int end,
                            const Then& then) {
  for (int t = begin, next; t < end; t = next) {
    const int32_t adapter = batch.adapters[t];
    for (next = t + 1; next < end && batch.adapters[next] == adapter;) next++;
    if (adapter < 0) continue;
    const cl_lora& lora = program.lora[int64_t(adapter) * program.num_sites + op.site - 1];
    if (lora.a) then(t, next, lora);
  }
}

// Multiplies some rows by one panel of `a`. The results are rounded to Row and stored in `to`.
template <typename Row>
static void low_rank_rows(const Row* in, int64_t in_stride, int rows, const Panels<Row>& a, int panel, Left<Row, Row>* to,
                          int64_t to_stride, GemmScratch<Row>& scratch) {
  typedef Blocking<Row, Row> B;
  const int64_t tile_stride = CL_PANEL + TILE_PAD;
  float* tile = scratch.tile;
  for (int64_t k = 0; k < a.k; k += B::K_BLOCK) {
    const int64_t here = a.k - k < B::K_BLOCK ? a.k - k : int64_t(B::K_BLOCK);
    const Left<Row, Row>* left;
    if constexpr (B::WIDENED)
      left = widened(in + k, in_stride, rows, here, scratch.widened);
    else
      left = in + k;
    vector_product<Row, Row>(rows, left, B::WIDENED ? here + LANES : in_stride, a.panel(panel, k), here, tile, tile_stride,
                             k > 0, NOTHING, nullptr);
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < CL_PANEL; c += LANES)
      vstore(to + r * to_stride + panel * CL_PANEL + c, vrounded(vload(tile + r * tile_stride + c), Row()));
}

// Computes x @ a.T for all rows that have an adapter; the threads divide the work. Returns false if no adapter of this
// step changes the matmul `op`.
template <typename Row>
static bool low_rank(cl_pool& pool, int thread, const cl_op& op, const cl_program& program, const cl_batch& batch,
                     GemmScratch<Row>& scratch) {
  if (!batch.adapters || !op.site) return false;
  enum { AT_ONCE = Blocking<Row, Row>::ROW_BLOCK };
  const Row* in = static_cast<const Row*>(program.buffers[op.in]);
  const int64_t stride = program.strides[op.in];
  Left<Row, Row>* to = static_cast<Left<Row, Row>*>(program.lora_rows);
  int item = 0;
  adapter_runs(op, program, batch, 0, batch.num_tokens, [&](int begin, int end, const cl_lora& lora) {
    const Panels<Row> a = panels_of<Row>(lora.a, lora.rank, op.k);
    CL_ASSERT(lora.rank + LANES <= program.lora_stride);
    for (int t = begin; t < end; t += AT_ONCE)
      for (int panel = 0; panel < a.count; panel++, item++)
        if (item % pool.num_threads() == thread)
          low_rank_rows<Row>(in + t * stride, stride, end - t < AT_ONCE ? end - t : int(AT_ONCE), a, panel,
                             to + t * program.lora_stride, program.lora_stride, scratch);
  });
  if (item) pool.barrier(thread);
  return item > 0;
}

// An epilogue that first adds the adapters' (x @ a.T) @ b.T, then calls another epilogue.
template <typename Row, typename Epilogue>
struct WithAdapters {
  const Epilogue& epilogue;
  const cl_op& op;
  const cl_program& program;
  const cl_batch& batch;
  bool any;

  void fetch(int row0, int rows, int panel) const { epilogue.fetch(row0, rows, panel); }

  void operator()(int row0, int rows, int panel0, int panels, float* tile, int64_t tile_stride) const {
    if (any) add(row0, rows, panel0, panels, tile, tile_stride);
    epilogue(row0, rows, panel0, panels, tile, tile_stride);
  }

 private:
  void add(int row0, int rows, int panel0, int panels, float* tile, int64_t tile_stride) const {
    const int64_t stride = program.lora_stride;
    const Left<Row, Row>* from = static_cast<const Left<Row, Row>*>(program.lora_rows);
    adapter_runs(op, program, batch, row0, row0 + rows, [&](int begin, int end, const cl_lora& lora) {
      const Panels<Row> b = panels_of<Row>(lora.b, op.n, lora.rank);
      for (int p = 0; p < panels; p++) {
        const int32_t first = lora.slices[2 * (panel0 + p)], count = lora.slices[2 * (panel0 + p) + 1];
        if (count)
          vector_product<Row, Row>(end - begin, from + begin * stride + first, stride, b.panel(panel0 + p, first), count,
                                   tile + (begin - row0) * tile_stride + p * CL_PANEL, tile_stride, true, NOTHING, nullptr);
      }
    });
  }
};

}  // namespace CL_NS
