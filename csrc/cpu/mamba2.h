// The scan and the gated norm of a Mamba-2 layer. Its convolution is that of recurrent.h.
//
// Tokens of a row pass one behind the other, in one order of operations, from the state of the row on. So a token's bits
// depend neither on the chunk it is in nor on other rows. Threads divide heads.
#pragma once
#include "recurrent.h"

namespace CL_NS {

enum { MOST_STATE = 256, SCAN_TOKENS = LANES };  // rows of a head's state; tokens whose steps, B and C are read together

// ln(1 + e^x) = max(x, 0) + ln(1 + u), u = e^-|x|; ln(1 + u) = 2 artanh(u / (2 + u)): relative error below 5e-7.
CL_INLINE vf vsoftplus(vf x) {
  const vf u = vexp(vsub(vset(0.0f), vabs(x))), s = vdiv(u, vadd(vset(2.0f), u)), q = vmul(s, s);
  vf p = vset(1.0f / 15.0f);
  p = vfma(p, q, vset(1.0f / 13.0f));
  p = vfma(p, q, vset(1.0f / 11.0f));
  p = vfma(p, q, vset(1.0f / 9.0f));
  p = vfma(p, q, vset(1.0f / 7.0f));
  p = vfma(p, q, vset(1.0f / 5.0f));
  p = vfma(p, q, vset(1.0f / 3.0f));
  p = vfma(p, q, vset(1.0f));
  return vadd(vmax(vset(0.0f), x), vmul(vmul(vset(2.0f), s), p));
}

CL_INLINE vf vsilu(vf x) { return vdiv(x, vadd(vset(1.0f), vexp(vsub(vset(0.0f), x)))); }

// What a few tokens of a row give to one head.
struct ScanTokens {
  float steps[SCAN_TOKENS], decays[SCAN_TOKENS];
  float b[SCAN_TOKENS][MOST_STATE], c[SCAN_TOKENS][MOST_STATE];
};

template <typename T>
static void read_tokens(const cl_op& op, int head, int count, const T* mixed, int64_t mixed_stride, const T* steps,
                        int64_t steps_stride, ScanTokens& tokens) {
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

// One token of V * LANES channels of a head: its state [states, V * LANES] from `from` to `to`, which may be equal, and
// its result without the direct part. Two sums per vector, of even and of odd rows, in that order.
template <int V>
CL_INLINE void advance(const float* from, int64_t from_stride, float* to, int64_t to_stride, int states, float decay,
                       const float* b, const float* c, const vf* x, vf* y) {
  vf even[V], odd[V];
  for (int v = 0; v < V; v++) even[v] = odd[v] = vset(0.0f);
  const vf kept = vset(decay);
  for (int i = 0; i < states; i += 2) {
    const vf b0 = vset(b[i]), b1 = vset(b[i + 1]), c0 = vset(c[i]), c1 = vset(c[i + 1]);
    for (int v = 0; v < V; v++) {
      const vf s = vfma(vload(from + i * from_stride + v * LANES), kept, vmul(b0, x[v]));
      vstore(to + i * to_stride + v * LANES, s);
      even[v] = vfma(s, c0, even[v]);
    }
    for (int v = 0; v < V; v++) {
      const vf s = vfma(vload(from + (i + 1) * from_stride + v * LANES), kept, vmul(b1, x[v]));
      vstore(to + (i + 1) * to_stride + v * LANES, s);
      odd[v] = vfma(s, c1, odd[v]);
    }
  }
  for (int v = 0; v < V; v++) y[v] = vadd(even[v], odd[v]);
}

// `count` tokens from token `first` of the row's `all` on, for V * LANES channels of a head from `channel` on.
template <int V, typename T>
static void scan_channels(const cl_op& op, const RowState& state, int head, int channel, int first, int count, int all,
                          const ScanTokens& tokens, const T* in, int64_t in_stride, T* out, int64_t out_stride) {
  alignas(64) float work[MOST_STATE][V * LANES];
  const int states = op.k, size = op.head_dim, at = head * states * size + channel;
  float* last = state.behind<float>(all - 1, all) + at;
  const float* from = first ? last : state.before<float>() ? state.before<float>() + at : nullptr;
  int64_t stride = size;
  if (!from) {
    memset(work, 0, sizeof(float) * states * V * LANES);
    from = work[0], stride = V * LANES;
  }
  const vf skip = vset(op.q_norm[head]);
  const int column = head * size + channel;
  for (int t = 0; t < count; t++) {
    const bool ends = t + 1 == count;
    float* to = ends ? last : work[0];
    const int64_t to_stride = ends ? size : V * LANES;
    vf x[V], scaled[V], y[V];
    for (int v = 0; v < V; v++) {
      x[v] = vload(in + t * in_stride + column + v * LANES);
      scaled[v] = vmul(x[v], vset(tokens.steps[t]));
    }
    advance<V>(from, stride, to, to_stride, states, tokens.decays[t], tokens.b[t], tokens.c[t], scaled, y);
    for (int v = 0; v < V; v++) vstore(out + t * out_stride + column + v * LANES, vfma(skip, x[v], y[v]));
    float* kept = state.behind<float>(first + t, all);
    if (kept && first + t + 1 != all)  // a snapshot
      for (int i = 0; i < states; i++) memcpy(kept + at + i * size, to + i * to_stride, sizeof(float) * V * LANES);
    from = to, stride = to_stride;
  }
}

template <typename T>
static void mamba_scan(const cl_op& op, const cl_program& program, const cl_batch& batch, int thread, int num_threads) {
  const T* mixed = static_cast<const T*>(program.buffers[op.in]);
  const T* steps = static_cast<const T*>(program.buffers[op.aux]);
  T* out = static_cast<T*>(program.buffers[op.out]);
  const int64_t mixed_stride = program.strides[op.in], steps_stride = program.strides[op.aux];
  const int64_t out_stride = program.strides[op.out];
  const Share heads = share_of(op.heads, thread, num_threads);
  ScanTokens tokens;
  for (int row = 0; row < batch.num_rows; row++) {
    const int begin = batch.cu_seqlens[row], all = batch.cu_seqlens[row + 1] - begin;
    if (all == 0) continue;
    const RowState state(program.kv_layers[op.layer], batch, row);
    for (int head = heads.begin; head < heads.end; head++) {
      for (int first = 0; first < all; first += SCAN_TOKENS) {
        const int count = all - first < SCAN_TOKENS ? all - first : int(SCAN_TOKENS);
        const T* in = mixed + (begin + first) * mixed_stride;
        T* to = out + (begin + first) * out_stride;
        read_tokens(op, head, count, in, mixed_stride, steps + (begin + first) * steps_stride, steps_stride, tokens);
        int channel = 0;
        for (; channel + 2 * LANES <= op.head_dim; channel += 2 * LANES)
          scan_channels<2>(op, state, head, channel, first, count, all, tokens, in, mixed_stride, to, out_stride);
        if (channel < op.head_dim)
          scan_channels<1>(op, state, head, channel, first, count, all, tokens, in, mixed_stride, to, out_stride);
      }
    }
  }
  const Share share = share_of(batch.num_tokens, thread, num_threads);
  for (int t = share.begin; t < share.end; t++)
    if (op.n % CL_K_MULTIPLE) memset(out + t * out_stride + op.n, 0, sizeof(T) * LANES);
}

// A gate, and maybe a norm of each group of columns, in float32.
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
