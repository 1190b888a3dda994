// All code of one instruction-set path. Each kernels_*.cpp file defines the path's namespace and includes this file.
// Only the function that returns the path's table has external linkage, because the linker must never mix code of two
// paths.
#include <time.h>

#include "attention.h"
#include "delta_rule.h"
#include "experts.h"
#include "head.h"
#include "linear.h"
#include "mamba2.h"
#include "recurrent.h"

namespace CL_NS {

// Makes the processor treat subnormal numbers as zero during a run. Instructions that multiply bf16 always do so, and
// all instruction sets must give results of the same kind.
struct FlushSubnormals {
  const unsigned before = _mm_getcsr();
  FlushSubnormals() { _mm_setcsr(before | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before); }
};

// Releases the AMX tile registers after a run. Code that uses tiles sets their shapes first.
struct Tiles {
#if defined(CL_USE_AMX)
  ~Tiles() { tiles_end(); }
#else
  ~Tiles() {}
#endif
};

template <typename T>
struct Scratch {
  GemmScratch<T> gemm;
  AttentionScratch<T> attention;
};

template <typename T>
static void run_of(cl_pool& pool, int thread, const cl_program& program, const cl_batch& batch, const StepPlan& plan,
                   int first_op, int end_op) {
  Scratch<T>& scratch = *static_cast<Scratch<T>*>(pool.scratch(thread, sizeof(Scratch<T>)));
  const Share share = share_of(batch.num_tokens, thread, pool.num_threads());
  KVAhead<T> kv(program, batch, plan, thread);
  kv.look(first_op, end_op);
  for (int i = first_op; i < end_op; i++) {
    const cl_op& op = program.ops[i];
    switch (op.kind) {
      case CL_OP_EMBED: embed<T>(op, program, batch, share); break;
      case CL_OP_ROTARY: rotary_table(op, program, batch, share); break;
      case CL_OP_RMS_NORM: rms_norm<T>(op, program, share); break;
      case CL_OP_ADD: add<T>(op, program, share); break;
      case CL_OP_LAYER_NORM: layer_norm<T>(op, program, share); break;
      case CL_OP_SCALE: scale<T>(op, program, share); break;
      case CL_OP_HEADS: heads<T>(op, program, batch, share); break;
      case CL_OP_SHORT_CONV: short_conv<T>(op, program, batch, thread, pool.num_threads()); break;
      case CL_OP_MAMBA_SCAN: scan<MambaRule, T>(op, program, batch, thread, pool.num_threads()); break;
      case CL_OP_DELTA_SCAN: scan<DeltaRule, T>(op, program, batch, thread, pool.num_threads()); break;
      case CL_OP_GATED_NORM: gated_norm<T>(op, program, batch, thread, pool.num_threads()); break;
      case CL_OP_ATTENTION:
        attention<T>(pool, thread, op, program, batch, plan, scratch.attention, fetches_far());
        kv.look(i + 1, end_op);
        break;
      case CL_OP_EXPERTS: experts<T>(pool, thread, op, program, batch, scratch.gemm); break;
      default:
        with_weight<T>(op, [&](const auto& weight) {
          linear<T>(pool, thread, op, weight, program, batch, scratch.gemm,
                    first_weights<T>(program, i, end_op, batch.num_tokens, thread, pool.num_threads()), kv);
        });
    }
    pool.barrier(thread);
  }
}

static void run(cl_pool& pool, int thread, const cl_program& program, const cl_batch& batch, const StepPlan& plan,
                int first_op, int end_op) {
  FlushSubnormals flush;
  Tiles tiles;
  if (program.dtype == CL_BF16)
    run_of<bf16>(pool, thread, program, batch, plan, first_op, end_op);
  else
    run_of<float>(pool, thread, program, batch, plan, first_op, end_op);
}

static void run_head(cl_pool& pool, int thread, const HeadCall& call) {
  FlushSubnormals flush;
  Tiles tiles;
  head(pool, thread, call);
}

static void run_sample(cl_pool& pool, int thread, const HeadCall& call) {
  FlushSubnormals flush;
  sample(pool, thread, call);
}

static double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// Number of independent sums in the measurement of peak speed: enough to hide the latency of the instruction, few
// enough to fit into the registers.
enum { PEAK_CHAINS = GROUPS == 2 ? 24 : 6 };

#if !defined(CL_USE_AMX)
static void code_peak(int64_t rounds) {
  alignas(64) const Dot<8>::Lane zeros[64] = {};
  vi sum[PEAK_CHAINS];
  for (vi& each : sum) each = iset(0);
  const vi codes = Dot<8>::part(reinterpret_cast<const uint8_t*>(zeros), 0);
  for (int64_t i = 0; i < rounds; i++) {
    const Four& row = Dot<8>::row(zeros, 0, 0);
#pragma GCC unroll 24
    for (int j = 0; j < PEAK_CHAINS; j++) {
      sum[j] = Dot<8>::add(sum[j], codes, row);
#if defined(__AVX512F__)
      __asm__ volatile("" : : "v"(sum[j]));
#else
      __asm__ volatile("" : : "x"(sum[j].lo), "x"(sum[j].hi));
#endif
    }
  }
}
#endif

static double peak(int64_t rounds, bool int8) {
  const double start = seconds();
#if defined(CL_USE_AMX)
  tiles_begin(TILE_K, 16);
  for (int64_t i = 0; i < rounds; i++) {
    if (int8) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  tiles_end();
#else
  if (int8) {
    code_peak(rounds);
    return seconds() - start;
  }
  const bf16 zeros[2 * LANES] = {};
  vf sum[PEAK_CHAINS];
  for (vf& each : sum) each = vset(0.0f);
  const auto a = load_part<1>(zeros, 0), b = a;
  for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 24
    for (int j = 0; j < PEAK_CHAINS; j++) {
      sum[j] = multiply_add(sum[j], b, a);
#if defined(__AVX512F__)
      __asm__ volatile("" : : "v"(sum[j]));
#else
      __asm__ volatile("" : : "x"(sum[j].lo), "x"(sum[j].hi));
#endif
    }
#endif
  return seconds() - start;
}

static size_t split_state_bytes() { return sizeof(SoftmaxState); }

static size_t expert_bytes(const cl_op& op, int dtype, int32_t tokens) {
  ExpertScratch none;
  const int item = dtype == CL_BF16 ? int(sizeof(bf16)) : int(sizeof(float));
  return ExpertScratch::lay_out(none, nullptr, item, op, tokens < CL_EXPERT_TOKENS ? tokens : int(CL_EXPERT_TOKENS));
}

static size_t scratch_bytes(int dtype, int32_t vocab) {
  const size_t products = dtype == CL_BF16 ? sizeof(Scratch<bf16>) : sizeof(Scratch<float>);
  const size_t choice = sample_scratch_bytes(vocab);
  return products > choice ? products : choice;
}

static const Kernels table = {
    run, run_head, run_sample, peak,
#if defined(CL_USE_AMX)
    {4 * 16384.0, 4 * 32768.0},
#else
    {PEAK_CHAINS * LANES * 4.0 / Pair<bf16, bf16>::PARTS, PEAK_CHAINS * LANES * 8.0 / Dot<8>::PARTS},
#endif
    split_state_bytes, scratch_bytes, head_shared_bytes, expert_bytes,
};

}  // namespace CL_NS
