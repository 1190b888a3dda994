// The scan of recurrent layers whose state is a matrix for each head: Mamba-2 and gated delta nets.
//
// The tokens of a row are computed one after the other, always with the same order of operations, starting from the
// row's state. So a token's bits depend neither on other rows nor on the number of tokens that a step computes. Threads
// divide heads.
//
// A head's state [k, head_dim] is stored as [head_dim / columns][k][columns]: in panels of 2 * LANES columns, or of
// LANES columns if head_dim is not a multiple of 2 * LANES. So each panel is contiguous in memory.
#pragma once
#include "recurrent.h"

namespace CL_NS {

// MOST_STATE: maximum number of rows k of a head's state. SCAN_TOKENS: number of tokens whose inputs are read together.
enum { MOST_STATE = 256, SCAN_TOKENS = LANES };

// Softplus, computed as ln(1 + e^x) = max(x, 0) + ln(1 + u) with u = e^-|x|, and ln(1 + u) = 2 artanh(u / (2 + u)). The
// relative error is below 5e-7.
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

// Computes the tokens first to first + count - 1 of the row's `all` tokens, for one panel of a head's state. The Rule
// says what a token does with the state: Rule::Tokens has the inputs of a few tokens for one head, Rule::read fills it,
// and Rule::step updates the state by one token and computes its output.
template <typename Rule, int V, typename T>
static void scan_panel(const cl_op& op, const RowState& state, int head, int panel, int first, int count, int all,
                       const typename Rule::Tokens& tokens, const T* in, int64_t in_stride, T* out, int64_t out_stride) {
  enum { W = V * LANES };
  alignas(64) float work[MOST_STATE * W];
  const int each = op.k * W, own = head - op.first_head;
  const int column = head * op.head_dim + panel * W, result = own * op.head_dim + panel * W;
  const int64_t at = (int64_t(own) * (op.head_dim / W) + panel) * each;
  float* last = state.behind<float>(all - 1, all) + at;
  const float* from = first ? last : state.before<float>() ? state.before<float>() + at : nullptr;
  if (!from) memset(work, 0, sizeof(float) * each), from = work;
  for (int t = 0; t < count; t++) {
    float* to = t + 1 == count ? last : work;
    vf v[V], y[V];
    for (int c = 0; c < V; c++) v[c] = vload(in + t * in_stride + column + c * LANES);
    Rule::template step<V>(op, head, tokens, t, from, to, v, y);
    for (int c = 0; c < V; c++) vstore(out + t * out_stride + result + c * LANES, y[c]);
    float* kept = state.behind<float>(first + t, all);
    if (kept && first + t + 1 != all) memcpy(kept + at, to, sizeof(float) * each);  // the token completes a table entry
    from = to;
  }
}

template <typename Rule, typename T>
static void scan(const cl_op& op, const cl_program& program, const cl_batch& batch, int thread, int num_threads) {
  const T* mixed = static_cast<const T*>(program.buffers[op.in]);
  const T* steps = static_cast<const T*>(program.buffers[op.aux]);
  T* out = static_cast<T*>(program.buffers[op.out]);
  const int64_t mixed_stride = program.strides[op.in], steps_stride = program.strides[op.aux];
  const int64_t out_stride = program.strides[op.out];
  const Share heads = share_of(op.own_heads ? op.own_heads : op.heads, thread, num_threads);
  const bool wide = op.head_dim % (2 * LANES) == 0;
  const int panels = op.head_dim / (wide ? 2 * LANES : LANES), values = Rule::values(op);
  typename Rule::Tokens tokens;
  for (int row = 0; row < batch.num_rows; row++) {
    const int begin = batch.cu_seqlens[row], all = batch.cu_seqlens[row + 1] - begin;
    if (all == 0) continue;
    const RowState state(program.kv_layers[op.layer], batch, row);
    for (int head = op.first_head + heads.begin; head < op.first_head + heads.end; head++) {
      for (int first = 0; first < all; first += SCAN_TOKENS) {
        const int count = all - first < SCAN_TOKENS ? all - first : int(SCAN_TOKENS);
        const T* in = mixed + (begin + first) * mixed_stride;
        T* to = out + (begin + first) * out_stride;
        Rule::read(op, head, count, in, mixed_stride, steps + (begin + first) * steps_stride, steps_stride, tokens);
        for (int panel = 0; panel < panels; panel++) {
          const auto run = wide ? scan_panel<Rule, 2, T> : scan_panel<Rule, 1, T>;
          run(op, state, head, panel, first, count, all, tokens, in + values, mixed_stride, to, out_stride);
        }
      }
    }
  }
  const Share share = share_of(batch.num_tokens, thread, num_threads);
  for (int t = share.begin; t < share.end; t++)
    if (op.n % CL_K_MULTIPLE) memset(out + t * out_stride + op.n - op.first_head * op.head_dim, 0, sizeof(T) * LANES);
}

}  // namespace CL_NS
