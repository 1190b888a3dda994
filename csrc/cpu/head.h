// The output head: multiplies hidden rows by the vocabulary's weight, and chooses each row's token while it computes
// the logits.
#pragma once
#include "gemm.h"
#include "lora.h"
#include "kernels.h"
#include "sampling.h"

namespace CL_NS {

// Memory that all threads of one call of the output head share.
struct HeadShared {
  void* rows;       // the R hidden rows that sample, one after another
  void* plain;      // the same in the program's dtype, if rows have adapters
  Best* best;       // [threads, R]: best id of each row among the ids that the thread computed
  int32_t* stored;  // [R]: index of the row in HeadCall::logits, or -1 if its logits are not stored
};

CL_INLINE size_t aligned64(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Bytes of HeadShared::rows: the rows are in the program's dtype or rounded to 8 bits, whichever is larger.
static size_t rows_bytes(int num_rows, int64_t stride, int dtype, int32_t k) {
  const size_t dense = stride * (dtype == CL_BF16 ? sizeof(bf16) : sizeof(float)), codes = cl_code_bytes(k);
  return aligned64(size_t(num_rows + MAX_ROW_BLOCK) * (dense > codes ? dense : codes));
}

static HeadShared head_shared(const HeadCall& call, int threads) {
  char* at = static_cast<char*>(call.shared);
  HeadShared shared;
  shared.rows = at;
  const size_t bytes = rows_bytes(call.num_rows, call.stride, call.program.dtype, call.product->k);
  at += bytes;
  shared.plain = at;
  at += bytes;
  shared.best = reinterpret_cast<Best*>(at);
  at += aligned64(sizeof(Best) * threads * call.num_rows);
  shared.stored = reinterpret_cast<int32_t*>(at);
  return shared;
}

static size_t head_shared_bytes(int num_threads, int num_rows, int64_t stride, int dtype, int32_t k) {
  return 2 * rows_bytes(num_rows, stride, dtype, k) + aligned64(sizeof(Best) * num_threads * num_rows) + aligned64(sizeof(int32_t) * num_rows);
}

static void cap_logits(float* logits, int count, float cap) {
  for (int c = 0; c < count; c += LANES) vstore(logits + c, vmul(vset(cap), vtanh(vdiv(vload(logits + c), vset(cap)))));
}

// Epilogue of the output head: for each row it updates the best id so far, or stores the logits if sampling needs all
// of them.
struct ChooseOrStore {
  const HeadCall& call;
  const HeadShared& shared;
  Best* best;  // best ids of this thread

  void fetch(int, int, int) const {}

  void operator()(int row0, int rows, int panel0, int panels, float* tile, int64_t tile_stride) const {
    const int first_id = panel0 * CL_PANEL;
    int count = panels * CL_PANEL;
    count = count < call.vocab - first_id ? count : call.vocab - first_id;
    for (int r = 0; r < rows; r++) {
      float* logits = tile + r * tile_stride;
      if (const float* bias = call.product->bias)
        for (int c = 0; c < panels * CL_PANEL; c += LANES)
          vstore(logits + c, vadd(vload(logits + c), vload(bias + first_id + c)));
      if (call.product->cap > 0.0f) cap_logits(logits, panels * CL_PANEL, call.product->cap);
      const int row = row0 + r;
      if (shared.stored[row] < 0)
        consider(best[row], logits, first_id, count, call.rows[row]);
      else
        memcpy(call.logits + shared.stored[row] * call.logits_stride + first_id, logits,
               sizeof(float) * panels * CL_PANEL);
    }
  }
};

static void choose(cl_pool& pool, int thread, const HeadCall& call, const Best* best, const int32_t* stored,
                   int num_best) {
  void* scratch = pool.scratch(thread, sample_scratch_bytes(call.vocab));
  Turns turns(pool, thread, call.num_rows, Turns::SPREAD);
  for (int64_t row = turns.take(); row < call.num_rows; row = turns.take()) {
    if (stored[row] >= 0) {
      sample_row(call.logits + stored[row] * call.logits_stride, call.vocab, call.rows[row], scratch);
      continue;
    }
    Best all = best[row];
    for (int i = 1; i < num_best; i++) merge(all, best[int64_t(i) * call.num_rows + row]);
    finish(all, call.rows[row]);
  }
}

static const Best NO_BEST = {-INFINITY, INT32_MAX, 0};

template <typename Row, typename Weight>
static void head_of(cl_pool& pool, int thread, const HeadCall& call, const Panels<Weight>& weight) {
  const int threads = pool.num_threads();
  const HeadShared shared = head_shared(call, threads);
  const Share share = share_of(call.num_rows, thread, threads);
  Source<Row, Weight>* rows = static_cast<Source<Row, Weight>*>(shared.rows);
  Row* plain = static_cast<Row*>(shared.plain);
  for (int row = share.begin; row < share.end; row++) {
    const Row* from = static_cast<const Row*>(call.hidden) + call.token_rows[row] * call.stride;
    put_row<Row>(weight, from, call.stride, row, rows);
    if (call.adapters) memcpy(plain + row * call.stride, from, padded(call.product->k) * sizeof(Row));
  }
  Best* best = shared.best + int64_t(thread) * call.num_rows;
  for (int row = 0; row < call.num_rows; row++) best[row] = NO_BEST;
  if (thread == 0)
    for (int row = 0, next = 0; row < call.num_rows; row++)
      shared.stored[row] = !call.rows || needs_logits(call.rows[row]) ? next++ : -1;
  typedef GemmScratch<Row> Scratch;
  Scratch& scratch = *static_cast<Scratch*>(pool.scratch(thread, sizeof(Scratch)));
  pool.barrier(thread);
  const int64_t stride = put_row<Row>(weight, nullptr, call.stride, 0, rows);
  const int site = call.product->site;
  const auto entries = [&](int row) {
    return call.adapters[row] < 0 ? int64_t(-1) : int64_t(call.adapters[row]) * call.program.num_sites + site - 1;
  };
  const auto input = [&](int row) { return static_cast<const Row*>(plain) + row * call.stride; };
  typedef Changes<Row, decltype(entries), decltype(input)> Adapted;
  const Adapted changes{call.program, entries, input, call.product->n, call.product->k,
                        static_cast<Left<Row, Row>*>(call.program.lora_rows)};
  const bool adapted = call.adapters && site && low_rank<Row>(pool, thread, changes, call.num_rows, call.stride, scratch);
  const ChooseOrStore choice{call, shared, best};
  const WithAdapters<Row, ChooseOrStore, decltype(entries), decltype(input)> epilogue{choice, changes, call.stride, scratch, adapted};
  gemm<Row>(pool, thread, rows, stride, call.num_rows, weight, 4, scratch, epilogue, NOTHING, static_cast<KVAhead<Row>*>(nullptr));
  pool.barrier(thread);
  if (call.rows) choose(pool, thread, call, shared.best, shared.stored, threads);
}

static void head(cl_pool& pool, int thread, const HeadCall& call) {
  if (call.program.dtype == CL_BF16)
    with_weight<bf16>(*call.product, [&](const auto& weight) { head_of<bf16>(pool, thread, call, weight); });
  else
    with_weight<float>(*call.product, [&](const auto& weight) { head_of<float>(pool, thread, call, weight); });
}

// Samples from rows of given logits. It reads the logits in the same pieces in which `head` computes them, so the
// results are equal.
static void sample(cl_pool& pool, int thread, const HeadCall& call) {
  void* scratch = pool.scratch(thread, sample_scratch_bytes(call.vocab));
  Turns turns(pool, thread, call.num_rows, Turns::SPREAD);
  for (int64_t row = turns.take(); row < call.num_rows; row = turns.take()) {
    const float* logits = call.logits + row * call.logits_stride;
    if (needs_logits(call.rows[row])) {
      sample_row(logits, call.vocab, call.rows[row], scratch);
      continue;
    }
    Best best = NO_BEST;
    for (int first = 0; first < call.vocab; first += 128)
      consider(best, logits + first, first, call.vocab - first < 128 ? call.vocab - first : 128, call.rows[row]);
    finish(best, call.rows[row]);
  }
}

}  // namespace CL_NS
