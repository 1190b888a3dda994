// The scan of gated delta nets (Yang et al., 2024). The convolution before it is that of recurrent.h, the gated norm
// behind it that of mamba2.h.
//
// Tokens of a row pass one behind the other, in one order of operations, from the memories of the row on. So a token's
// bits depend neither on the chunk it is in nor on other rows. Threads divide heads.
#pragma once
#include "mamba2.h"

namespace CL_NS {

// What a few tokens of a row give to one head: rates, decays, and q and k divided by their lengths.
struct DeltaTokens {
  float rates[SCAN_TOKENS], decays[SCAN_TOKENS];
  float q[SCAN_TOKENS][MOST_STATE], k[SCAN_TOKENS][MOST_STATE];
};

// x / sqrt(sum of squares + 1e-6) * factor.
template <typename T>
static void unit(const T* x, int size, float factor, float* to) {
  vf sum = vset(0.0f);
  for (int i = 0; i < size; i += LANES) sum = vfma(vload(x + i), vload(x + i), sum);
  const vf scale = vset(factor / sqrtf(vsum(sum) + 1e-6f));
  for (int i = 0; i < size; i += LANES) vstore(to + i, vmul(vload(x + i), scale));
}

template <typename T>
static void read_tokens(const cl_op& op, int head, int count, const T* mixed, int64_t mixed_stride, const T* rates,
                        int64_t rates_stride, DeltaTokens& tokens) {
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

// One token of V * LANES columns of a head's memory [size, V * LANES], from `from` to `to`, which may be equal. It fades,
// the share `rate` of its answer to k becomes v, and its answer to q is y. Two sums per vector, of even and of odd rows.
template <int V>
CL_INLINE void renew(const float* from, float* to, int size, float decay, float rate, const float* q, const float* k,
                     const vf* v, vf* y) {
  enum { W = V * LANES };
  vf even[V], odd[V], change[V];
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

// `count` tokens from token `first` of the row's `all` on, for one panel of a head's memory.
template <int V, typename T>
static void renew_panel(const cl_op& op, const RowState& state, int head, int panel, int first, int count, int all,
                        const DeltaTokens& tokens, const T* in, int64_t in_stride, T* out, int64_t out_stride) {
  enum { W = V * LANES };
  alignas(64) float work[MOST_STATE * W];
  const int size = op.k, each = size * W, column = head * op.head_dim + panel * W;
  const int64_t at = (int64_t(head) * (op.head_dim / W) + panel) * each;
  float* last = state.behind<float>(all - 1, all) + at;
  const float* from = first ? last : state.before<float>() ? state.before<float>() + at : nullptr;
  if (!from) memset(work, 0, sizeof(float) * each), from = work;
  for (int t = 0; t < count; t++) {
    float* to = t + 1 == count ? last : work;
    const T* values = in + t * in_stride + 2 * op.kv_heads * size + column;
    vf v[V], y[V];
    for (int c = 0; c < V; c++) v[c] = vload(values + c * LANES);
    renew<V>(from, to, size, tokens.decays[t], tokens.rates[t], tokens.q[t], tokens.k[t], v, y);
    for (int c = 0; c < V; c++) vstore(out + t * out_stride + column + c * LANES, y[c]);
    float* kept = state.behind<float>(first + t, all);
    if (kept && first + t + 1 != all) memcpy(kept + at, to, sizeof(float) * each);  // a snapshot
    from = to;
  }
}

template <typename T>
static void delta_scan(const cl_op& op, const cl_program& program, const cl_batch& batch, int thread, int num_threads) {
  const T* mixed = static_cast<const T*>(program.buffers[op.in]);
  const T* rates = static_cast<const T*>(program.buffers[op.aux]);
  T* out = static_cast<T*>(program.buffers[op.out]);
  const int64_t mixed_stride = program.strides[op.in], rates_stride = program.strides[op.aux];
  const int64_t out_stride = program.strides[op.out];
  const Share heads = share_of(op.heads, thread, num_threads);
  const bool wide = op.head_dim % (2 * LANES) == 0;
  const int panels = op.head_dim / (wide ? 2 * LANES : LANES);
  DeltaTokens tokens;
  for (int row = 0; row < batch.num_rows; row++) {
    const int begin = batch.cu_seqlens[row], all = batch.cu_seqlens[row + 1] - begin;
    if (all == 0) continue;
    const RowState state(program.kv_layers[op.layer], batch, row);
    for (int head = heads.begin; head < heads.end; head++) {
      for (int first = 0; first < all; first += SCAN_TOKENS) {
        const int count = all - first < SCAN_TOKENS ? all - first : int(SCAN_TOKENS);
        const T* in = mixed + (begin + first) * mixed_stride;
        T* to = out + (begin + first) * out_stride;
        read_tokens(op, head, count, in, mixed_stride, rates + (begin + first) * rates_stride, rates_stride, tokens);
        for (int panel = 0; panel < panels; panel++) {
          if (wide)
            renew_panel<2>(op, state, head, panel, first, count, all, tokens, in, mixed_stride, to, out_stride);
          else
            renew_panel<1>(op, state, head, panel, first, count, all, tokens, in, mixed_stride, to, out_stride);
        }
      }
    }
  }
  const Share share = share_of(batch.num_tokens, thread, num_threads);
  for (int t = share.begin; t < share.end; t++)
    if (op.n % CL_K_MULTIPLE) memset(out + t * out_stride + op.n, 0, sizeof(T) * LANES);
}

}  // namespace CL_NS
