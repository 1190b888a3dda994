// The Rule of scan.h for Mamba-2 layers, and their gated norm. Their convolution is in recurrent.h.
#pragma once
#include "scan.h"

namespace CL_NS {

CL_INLINE vf vsilu(vf x) { return vdiv(x, vadd(vset(1.0f), vexp(vsub(vset(0.0f), x)))); }

// For each token: state = decay * state + B (time step * x), and y = C @ state + D * x.
struct MambaRule {
  // Inputs of a few tokens of a row for one head: time steps, decays of the state, and the vectors B and C.
  struct Tokens {
    float steps[SCAN_TOKENS], decays[SCAN_TOKENS];
    float b[SCAN_TOKENS][MOST_STATE], c[SCAN_TOKENS][MOST_STATE];
  };

  static int values(const cl_op&) { return 0; }  // index of the first column of x in the operation's input

  template <typename T>
  static void read(const cl_op& op, int head, int count, const T* mixed, int64_t mixed_stride, const T* steps,
                   int64_t steps_stride, Tokens& tokens) {
    const int states = op.k, group = head / (op.heads / op.kv_heads);
    const float factor = op.eps != 0.0f ? op.eps : 1.0f;
    alignas(64) float given[LANES] = {};
    for (int t = 0; t < count; t++) {
      given[t] = to_float(steps[t * steps_stride + op.window + head]) * factor + op.bias[head];
      const T* b = mixed + t * mixed_stride + op.n + group * states;
      const T* c = b + op.kv_heads * states;
      for (int i = 0; i < states; i++) tokens.b[t][i] = to_float(b[i]);
      for (int i = 0; i < states; i++) tokens.c[t][i] = to_float(c[i]);
    }
    const float rate = expf(static_cast<const float*>(op.weight)[head]);
    const vf step = vmin(vset(op.cap), vmax(vset(op.scale), vsoftplus(vload(given))));
    vstore(tokens.steps, step);
    vstore(tokens.decays, vexp(vmul(step, vset(-rate))));
  }

  // Computes token `t` of one head for V vectors of columns: reads the state at `from`, writes the new state to `to`,
  // and the output to `y`. The sum in an output adds the even rows of the state, then the odd rows.
  template <int V>
  CL_INLINE void step(const cl_op& op, int head, const Tokens& tokens, int t, const float* from, float* to,
                             const vf* x, vf* y) {
    enum { W = V * LANES };
    const float *b = tokens.b[t], *c = tokens.c[t];
    vf even[V], odd[V], scaled[V];
    for (int v = 0; v < V; v++) {
      even[v] = odd[v] = vset(0.0f);
      scaled[v] = vmul(x[v], vset(tokens.steps[t]));
    }
    const vf kept = vset(tokens.decays[t]);
    for (int i = 0; i < op.k; i += 2) {
      const float* row = from + i * W;
      const vf b0 = vset(b[i]), b1 = vset(b[i + 1]), c0 = vset(c[i]), c1 = vset(c[i + 1]);
      for (int v = 0; v < V; v++) {
        const vf s = vfma(vload(row + v * LANES), kept, vmul(b0, scaled[v]));
        vstore(to + i * W + v * LANES, s);
        even[v] = vfma(s, c0, even[v]);
      }
      for (int v = 0; v < V; v++) {
        const vf s = vfma(vload(row + W + v * LANES), kept, vmul(b1, scaled[v]));
        vstore(to + (i + 1) * W + v * LANES, s);
        odd[v] = vfma(s, c1, odd[v]);
      }
    }
    for (int v = 0; v < V; v++) y[v] = vfma(vset(op.q_norm[head]), x[v], vadd(even[v], odd[v]));
  }
};

// The operation GATED_NORM: gates the input, and normalises each group of columns if there is a weight. It computes in
// float32.
template <typename T>
static void gated_norm(const cl_op& op, const cl_program& program, const cl_batch& batch, int thread, int num_threads) {
  const T* in = static_cast<const T*>(program.buffers[op.in]);
  const T* gate = static_cast<const T*>(program.buffers[op.aux]) + op.window;
  T* out = static_cast<T*>(program.buffers[op.out]);
  const float* weight = static_cast<const float*>(op.weight);
  const int size = op.n / op.heads;
  const bool first = op.flags & CL_NORM_FIRST, sigmoid = op.flags & CL_SIGMOID_GATE;
  const vf opened = vset(op.scale != 0.0f ? op.scale : 1.0f);
  const Share share = share_of(batch.num_tokens * op.heads, thread, num_threads);
  for (int each = share.begin; each < share.end; each++) {
    const int t = each / op.heads, at = each % op.heads * size;
    const T* x = in + t * program.strides[op.in] + at;
    const T* z = gate + t * program.strides[op.aux] + at;
    T* y = out + t * program.strides[op.out] + at;
    const auto silu = [&](int i) {
      const vf given = vmul(vload(z + i), opened);
      return sigmoid ? vdiv(vset(1.0f), vadd(vset(1.0f), vexp(vsub(vset(0.0f), given)))) : vsilu(given);
    };
    const auto value = [&](int i) { return first || !weight ? vload(x + i) : vmul(vload(x + i), silu(i)); };
    vf factor = vset(1.0f);
    if (weight) {
      vf sum[4] = {vset(0.0f), vset(0.0f), vset(0.0f), vset(0.0f)};
      for (int i = 0; i < size; i += LANES) sum[i / LANES % 4] = vfma(value(i), value(i), sum[i / LANES % 4]);
      factor = vset(1.0f / sqrtf(vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3]))) / float(size) + op.eps));
    }
    for (int i = 0; i < size; i += LANES) {
      vf result = value(i);
      if (weight) result = vmul(vmul(result, factor), vload(weight + at + i));
      if (first || !weight) result = vmul(result, silu(i));
      vstore(y + i, result);
    }
    if (each % op.heads + 1 == op.heads && op.n % CL_K_MULTIPLE) memset(y + size, 0, sizeof(T) * LANES);
  }
}

}  // namespace CL_NS
