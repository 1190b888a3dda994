// Recurrent layers. The tokens of a row are computed one after the other, starting from the row's state. Threads divide
// channels, not tokens, so no thread waits for another, and a token's bits depend neither on other rows nor on the
// number of tokens that a step computes.
//
// A row's block table has an entry for every `block_size` positions of the layer. The entry's block has the state after
// the newest token at these positions. A row whose first token is at position 0 begins with zeros, so the old contents
// of its block are not read.
#pragma once
#include "gemm.h"

namespace CL_NS {

// Finds where the states of one row in one layer are read and written.
struct RowState {
  const int32_t* table;
  char* states;
  int64_t bytes;
  int span, position;  // position of the row's first token of the step

  RowState(const cl_kv_layer& layer, const cl_batch& batch, int row)
      : table(batch.block_tables + (int64_t(layer.group) * batch.num_rows + row) * batch.table_width),
        states(static_cast<char*>(layer.kv)),
        bytes(layer.head_dim),
        span(layer.block_size),
        position(batch.positions[batch.cu_seqlens[row]]) {}

  // Where the state before the row's first token of this step is; null if that token is the first of its sequence.
  template <typename T>
  const T* before() const {
    return position == 0 ? nullptr : at<T>((position - 1) / span);
  }
  // Where the state after token `i` of the row's `count` tokens is written; null if that state is not stored. States
  // are stored after the last token, and after each token that completes a table entry.
  template <typename T>
  T* behind(int i, int count) const {
    const int place = position + i;
    return i + 1 == count || (place + 1) % span == 0 ? at<T>(place / span) : nullptr;
  }

 private:
  template <typename T>
  T* at(int entry) const {
    return reinterpret_cast<T*>(states + int64_t(table[entry]) * bytes);
  }
};

enum { MOST_TAPS = 8 };  // maximum number of tokens k of a convolution

// Convolves LANES channels of one row. `in` has the inputs of its first token, `out` gets that token's results.
template <typename T, bool GATED>
static void convolve(const cl_op& op, const RowState& state, int channel, int count, const T* in, int64_t in_stride, T* out,
                     int64_t out_stride) {
  const int width = op.n, kept = op.k - 1;
  const float* weight = static_cast<const float*>(op.weight) + channel;
  vf tail[MOST_TAPS], taps[MOST_TAPS];
  const T* before = state.before<T>();
  const vf factor = op.q_norm ? vload(op.q_norm + channel) : vset(1.0f);
  for (int i = 0; i < op.k; i++) taps[i] = vmul(vload(weight + int64_t(i) * width), factor);
  for (int i = 0; i < kept; i++) tail[i] = before ? vload(before + int64_t(i) * width + channel) : vset(0.0f);
  const vf bias = op.bias ? vload(op.bias + channel) : vset(0.0f);
  for (int t = 0; t < count; t++, in += in_stride, out += out_stride) {
    vf x = vload(in + (GATED ? 2 * width : 0));
    if (GATED) x = vrounded(vmul(vload(in), x), T());
    vf sum = bias;
    for (int i = 0; i < kept; i++) sum = vfma(tail[i], taps[i], sum);
    sum = vfma(x, taps[kept], sum);
    if (op.flags & CL_SILU) sum = vdiv(sum, vadd(vset(1.0f), vexp(vsub(vset(0.0f), sum))));
    if (GATED) sum = vmul(vload(in + width), vrounded(sum, T()));
    vstore(out, sum);
    for (int i = 0; i + 1 < kept; i++) tail[i] = tail[i + 1];
    if (kept > 0) tail[kept - 1] = x;
    if (T* behind = state.behind<T>(t, count))
      for (int i = 0; i < kept; i++) vstore(behind + int64_t(i) * width + channel, tail[i]);
  }
}

template <typename T>
static void short_conv(const cl_op& op, const cl_program& program, const cl_batch& batch, int thread, int num_threads) {
  const cl_kv_layer& layer = program.kv_layers[op.layer];
  const T* in = static_cast<const T*>(program.buffers[op.in]);
  T* out = static_cast<T*>(program.buffers[op.out]);
  const int64_t in_stride = program.strides[op.in], out_stride = program.strides[op.out];
  const Share share = share_of(op.n / LANES, thread, num_threads);
  for (int row = 0; row < batch.num_rows; row++) {
    const int first = batch.cu_seqlens[row], count = batch.cu_seqlens[row + 1] - first;
    if (count == 0) continue;
    const RowState state(layer, batch, row);
    for (int lane = share.begin; lane < share.end; lane++) {
      const int channel = lane * LANES;
      const T* from = in + first * in_stride + op.window + channel;
      T* to = out + first * out_stride + channel;
      if (op.flags & CL_GATED)
        convolve<T, true>(op, state, channel, count, from, in_stride, to, out_stride);
      else
        convolve<T, false>(op, state, channel, count, from, in_stride, to, out_stride);
    }
  }
}

}  // namespace CL_NS
