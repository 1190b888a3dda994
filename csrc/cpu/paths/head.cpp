// The output head, sampling, the measurement of peak speed, and the table of the path's functions.
#include "../head.h"

#include <time.h>

#include "../experts.h"
#include "../path.h"
#include "../scratch.h"
#include "../shared_keys.h"

namespace CL_NS {

static void run(cl_pool& pool, int thread, const cl_program& program, const cl_batch& batch, const StepPlan& plan,
                int first_op, int end_op) {
  FlushSubnormals flush;
  Tiles tiles;
  if (program.dtype == CL_BF16)
    run_bf16(pool, thread, program, batch, plan, first_op, end_op);
  else
    run_f32(pool, thread, program, batch, plan, first_op, end_op);
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

// Operations of one sum of code_peak: twice the number of multiply-adds.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr double CODE_OPERATIONS = LANES * 16.0;
static void code_peak(int64_t rounds) { matrix_peak<PEAK_CHAINS>(rounds); }
#elif !defined(CL_USE_AMX)
constexpr double CODE_OPERATIONS = LANES * 8.0 / Dot<8>::PARTS;
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
#elif defined(CL_ARM)
      compute(sum[j]);
#else
      __asm__ volatile("" : : "x"(sum[j].lo), "x"(sum[j].hi));
#endif
    }
  }
}
#endif

// T: type of the factors, float or bf16.
template <typename T>
static void sum_peak(int64_t rounds) {
  const T zeros[2 * LANES] = {};
  vf sum[PEAK_CHAINS];
  for (vf& each : sum) each = vset(0.0f);
  const auto a = load_part<1>(zeros, 0), b = a;
  for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 24
    for (int j = 0; j < PEAK_CHAINS; j++) {
      sum[j] = multiply_add(sum[j], b, a);
#if defined(__AVX512F__)
      __asm__ volatile("" : : "v"(sum[j]));
#elif defined(CL_ARM)
      compute(sum[j]);
#else
      __asm__ volatile("" : : "x"(sum[j].lo), "x"(sum[j].hi));
#endif
    }
}

#if defined(CL_USE_AMX)
static void tile_peak(int64_t rounds, bool int8) {
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
}
#endif

static double peak(int64_t rounds, int product) {
  const double start = seconds();
  if (product == CL_F32_PRODUCT)
    sum_peak<float>(rounds);
#if defined(CL_USE_AMX)
  else
    tile_peak(rounds, product == CL_INT8_PRODUCT);
#else
  else if (product == CL_INT8_PRODUCT)
    code_peak(rounds);
  else
    sum_peak<bf16>(rounds);
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

const Kernels table = {
    run, run_head, run_sample, peak,
#if defined(CL_USE_AMX)
    {PEAK_CHAINS * LANES * 2.0, 4 * 16384.0, 4 * 32768.0},
#else
    {PEAK_CHAINS * LANES * 2.0, Pair<bf16, bf16>::PARTS == 1 ? PEAK_CHAINS * LANES * 4.0 : 0.0,
     PEAK_CHAINS * CODE_OPERATIONS},
#endif
    split_state_bytes, scratch_bytes, head_shared_bytes, expert_bytes, LEAST_SHARED,
};

}  // namespace CL_NS
