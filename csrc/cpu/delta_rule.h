// The Rule of scan.h for gated delta nets (Yang et al., 2024). The convolution before the scan is in recurrent.h, the
// gated norm after the scan is in mamba2.h.
#pragma once
#include "scan.h"

namespace CL_NS {

// Normalises x to length 1 and multiplies it by `factor`: to = factor * x / sqrt(sum of squares of x + 1e-6).
template <typename T>
static void unit(const T* x, int size, float factor, float* to) {
  vf sum = vset(0.0f);
  for (int i = 0; i < size; i += LANES) sum = vfma(vload(x + i), vload(x + i), sum);
  const vf scale = vset(factor / sqrtf(vsum(sum) + 1e-6f));
  for (int i = 0; i < size; i += LANES) vstore(to + i, vmul(vload(x + i), scale));
}

// For each token: state = decay * state, then state += k (rate * (v - k @ state)), and y = q @ state.
struct DeltaRule {
  // Inputs of a few tokens of a row for one head: update rates, decays of the state, and q and k divided by their
  // lengths.
  struct Tokens {
    float rates[SCAN_TOKENS], decays[SCAN_TOKENS];
    float q[SCAN_TOKENS][MOST_STATE], k[SCAN_TOKENS][MOST_STATE];
  };

  static int values(const cl_op& op) { return 2 * op.kv_heads * op.k; }  // index of the first column of v in the input

  template <typename T>
  static void read(const cl_op& op, int head, int count, const T* mixed, int64_t mixed_stride, const T* rates,
                   int64_t rates_stride, Tokens& tokens) {
    const int size = op.k, key = head / (op.heads / op.kv_heads);
    alignas(64) float given[LANES] = {}, steps[LANES] = {};
    for (int t = 0; t < count; t++) {
      given[t] = to_float(rates[t * rates_stride + head]);
      steps[t] = to_float(rates[t * rates_stride + op.heads + head]) + op.bias[head];
      const T* q = mixed + t * mixed_stride + key * size;
      unit(q, size, 1.0f / sqrtf(float(size)), tokens.q[t]);
      unit(q + op.kv_heads * size, size, 1.0f, tokens.k[t]);
    }
    const float fade = expf(static_cast<const float*>(op.weight)[head]);
    vstore(tokens.rates, vdiv(vset(1.0f), vadd(vset(1.0f), vexp(vsub(vset(0.0f), vload(given))))));
    vstore(tokens.decays, vexp(vmul(vsoftplus(vload(steps)), vset(-fade))));
  }

  // Computes token `t` of one head for V vectors of columns: reads the state at `from`, writes the new state to `to`,
  // and the output to `y`. A sum over the rows of the state is the sum of its even rows plus the sum of its odd rows.
  template <int V>
  CL_INLINE void step(const cl_op& op, int, const Tokens& tokens, int t, const float* from, float* to, const vf* v,
                             vf* y) {
    enum { W = V * LANES };
    vf even[V], odd[V], change[V];
    const int size = op.k;
    const float decay = tokens.decays[t], rate = tokens.rates[t], *q = tokens.q[t], *k = tokens.k[t];
    for (int c = 0; c < V; c++) even[c] = odd[c] = vset(0.0f);
    for (int i = 0; i < size; i += 2) {
      const vf k0 = vset(k[i]), k1 = vset(k[i + 1]);
      for (int c = 0; c < V; c++) even[c] = vfma(vload(from + i * W + c * LANES), k0, even[c]);
      for (int c = 0; c < V; c++) odd[c] = vfma(vload(from + (i + 1) * W + c * LANES), k1, odd[c]);
    }
    const vf kept = vset(decay);
    for (int c = 0; c < V; c++) {
      change[c] = vmul(vsub(v[c], vmul(vadd(even[c], odd[c]), kept)), vset(rate));
      even[c] = odd[c] = vset(0.0f);
    }
    for (int i = 0; i < size; i += 2) {
      const vf k0 = vset(k[i]), k1 = vset(k[i + 1]), q0 = vset(q[i]), q1 = vset(q[i + 1]);
      for (int c = 0; c < V; c++) {
        const vf s = vfma(vload(from + i * W + c * LANES), kept, vmul(k0, change[c]));
        vstore(to + i * W + c * LANES, s);
        even[c] = vfma(s, q0, even[c]);
      }
      for (int c = 0; c < V; c++) {
        const vf s = vfma(vload(from + (i + 1) * W + c * LANES), kept, vmul(k1, change[c]));
        vstore(to + (i + 1) * W + c * LANES, s);
        odd[c] = vfma(s, q1, odd[c]);
      }
    }
    for (int c = 0; c < V; c++) y[c] = vadd(even[c], odd[c]);
  }
};

}  // namespace CL_NS
