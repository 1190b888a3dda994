// Operations without a matrix multiplication: embedding, rotary table, norms, scaling and addition. Rows are divided
// evenly among the threads.
#pragma once
#include "gemm.h"

namespace CL_NS {

// Writes zeros from column `width` to the next multiple of 32. Matrix multiplications read these columns, and an
// earlier, wider row of the same buffer may have written to them.
template <typename T>
CL_INLINE void clear_pad(T* row, int64_t width) {
  memset(row + width, 0, sizeof(T) * (padded(width) - width));
}

// Copies row `id` of a packed weight [n, k] to `row`, in the program's dtype.
template <typename T>
static void unpack_column(const Panels<T>& weight, int32_t id, int k, T* row) {
  enum { P = Packed<T>::P };
  const T* column = weight.panel(id / CL_PANEL) + id % CL_PANEL * P;
  for (int i = 0; i < k; i += P, column += CL_PANEL * P) memcpy(row + i, column, sizeof(T) * P);
}
template <typename T, int B, Meaning M>
static void unpack_column(const Panels<Code<B, M>>& weight, int32_t id, int k, T* row) {
  typedef Code<B, M> W;
  enum { STEP = 32 / B };  // number of k in four bytes
  const int column = id % CL_PANEL;
  for (int from = 0; from < k; from += weight.group) {
    const uint8_t* at = &weight.panel(id / CL_PANEL, from)->byte;
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(at) + column;
    const float unit = 1.0f / CL_SCALE_UNIT, scale = to_float32(scales[0]) * unit;
    const float minimum = M == MINIMUM ? to_float32(scales[CL_PANEL]) * unit : 0.0f;
    at += W::HEADER + column * 4;
    for (int i = 0; i < weight.group && from + i < k; i++) {
      const int byte = at[i / STEP * CL_PANEL * 4 + i % 4], code = B == 8 ? byte : i % 8 < 4 ? byte & 15 : byte >> 4;
      row[from + i] = from_float(scale * float((W::TABLE ? E2M1_VALUES[code & 15] : code) - W::ZERO) + minimum, T());
    }
  }
}

// Multiplies a row by a number, and sets the padding columns of the row to zero.
template <typename T>
CL_INLINE void scale_row(const T* from, T* to, int size, float factor) {
  for (int i = 0; i < size; i += LANES) vstore(to + i, vmul(vload(from + i), vset(factor)));
  clear_pad(to, size);
}

// Changes the embedding `row` [k] of token `id` as an adapter says.
template <typename T>
static void adapt_embedding(const cl_embedding& change, int32_t id, int k, T* row) {
  const int32_t place = change.index ? change.index[id] : -1;
  if (place >= 0)
    memcpy(row, static_cast<const T*>(change.rows) + int64_t(place) * k, k * sizeof(T));
  else if (change.table)
    memcpy(row, static_cast<const T*>(change.table) + int64_t(id) * k, k * sizeof(T));
  if (!change.a) return;
  const float* factors = change.a + int64_t(id) * change.rank;
  const int64_t stride = padded(k);
  for (int i = 0; i < k; i += LANES) {
    vf sum = vload(row + i);
    for (int r = 0; r < change.rank; r++) sum = vfma(vset(factors[r]), vload(change.b + r * stride + i), sum);
    vstore(row + i, sum);
  }
}

template <typename T>
static void embed(const cl_op& op, const cl_program& program, const cl_batch& batch, Share share) {
  T* out = static_cast<T*>(program.buffers[op.out]);
  const int64_t stride = program.strides[op.out];
  const int32_t* ids = op.flags & CL_POSITIONS ? batch.positions : batch.token_ids;
  const bool adapted = batch.adapters && program.embeddings && !(op.flags & CL_POSITIONS);
  for (int t = share.begin; t < share.end; t++) {
    const int32_t id = op.flags & CL_OWN_ROWS ? ids[t] - op.window : ids[t];  // row of the weight
    if (op.flags & CL_OWN_ROWS && (id < 0 || id >= op.n)) continue;
    CL_ASSERT(id >= 0 && id < op.n);
    T* row = out + t * stride;
    clear_pad(row, op.k);
    if (!(op.flags & CL_PACKED)) {
      memcpy(row, static_cast<const T*>(op.weight) + int64_t(id) * op.k, op.k * sizeof(T));
    } else {
      with_weight<T>(op, [&](const auto& weight) { unpack_column(weight, id, op.k, row); });
    }
    if (adapted && batch.adapters[t] >= 0) {
      adapt_embedding(program.embeddings[batch.adapters[t]], ids[t], op.k, row);
      clear_pad(row, op.k);
    }
    if (op.scale != 0.0f && op.scale != 1.0f) scale_row(row, row, op.k, op.scale);
  }
}

// Writes the cosines and sines of each token's rotary angles. An angle is the position times a frequency, both as
// float32, as in transformers. A frequency of 0 marks a pair of dimensions that is not rotated: its cosine is 1, whatever
// the scale of the others is. The C library computes one cosine or sine at a time, so that no value depends on its
// neighbours.
static void rotary_table(const cl_op& op, const cl_program& program, const cl_batch& batch, Share share) {
  const float* frequencies = static_cast<const float*>(op.weight);
  const float* axes = batch.axes ? op.bias : nullptr;
  const int half = op.head_dim / 2;
  for (int t = share.begin; t < share.end; t++) {
    float* row = program.rotary[op.layer] + int64_t(t) * op.head_dim;
    for (int i = 0; i < half; i++) {
      const int32_t position = axes ? batch.axes[int64_t(axes[i]) * batch.num_tokens + t] : batch.positions[t];
      const float angle = float(position) * frequencies[i];
      const float scale = frequencies[i] == 0.0f ? 1.0f : op.scale;
      row[i] = cosf(angle) * scale;
      row[half + i] = sinf(angle) * scale;
    }
  }
}

// Sum of squares of `size` (a multiple of 16) elements, summed in a fixed order in four chains.
template <typename T>
CL_INLINE float sum_of_squares(const T* x, int size) {
  vf sum[4] = {vset(0.0f), vset(0.0f), vset(0.0f), vset(0.0f)};
  for (int i = 0; i < size; i += LANES) {
    vf v = vload(x + i);
    sum[i / LANES % 4] = vfma(v, v, sum[i / LANES % 4]);
  }
  return vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3])));
}

// RMS norm of each row. As in Hugging Face models, a number is normalised, rounded to T, then multiplied by the weight.
// The padding columns are zero, so the sum of squares may include them.
template <typename T>
static void rms_norm(const cl_op& op, const cl_program& program, Share share) {
  const T* in = static_cast<const T*>(program.buffers[op.in]);
  T* out = static_cast<T*>(program.buffers[op.out]);
  const float* weight = static_cast<const float*>(op.weight);
  const int whole = op.k / LANES * LANES;
  for (int t = share.begin; t < share.end; t++) {
    const T* x = in + t * program.strides[op.in];
    T* y = out + t * program.strides[op.out];
    const int padded_size = (op.k + LANES - 1) / LANES * LANES;
    const float mean = sum_of_squares(x, padded_size) / float(op.k);
    const float factor = 1.0f / sqrtf(mean + op.eps);
    for (int i = 0; i < whole; i += LANES)
      vstore(y + i, vmul(vload(weight + i), vrounded(vmul(vload(x + i), vset(factor)), T())));
    for (int i = whole; i < op.k; i++)
      y[i] = from_float(weight[i] * to_float(from_float(to_float(x[i]) * factor, T())), T());
    clear_pad(y, op.k);
  }
}

// Sum of x - mean, or of (x - mean)^2, over `size` elements, in a fixed order in four chains. Elements after `size`, up
// to a multiple of 16, are excluded.
template <bool SQUARED, typename T>
CL_INLINE float sum_around(const T* x, int size, float mean) {
  vf sum[4] = {vset(0.0f), vset(0.0f), vset(0.0f), vset(0.0f)};
  for (int i = 0; i < size; i += LANES) {
    vf v = vsub(vload(x + i), vset(mean));
    if (i + LANES > size) v = vkeep(v, 0, size - i, 0.0f);
    sum[i / LANES % 4] = SQUARED ? vfma(v, v, sum[i / LANES % 4]) : vadd(v, sum[i / LANES % 4]);
  }
  return vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3])));
}

// Layer norm of each row. Results are rounded to T only once, after weight and bias, as in PyTorch.
template <typename T>
static void layer_norm(const cl_op& op, const cl_program& program, Share share) {
  const T* in = static_cast<const T*>(program.buffers[op.in]);
  T* out = static_cast<T*>(program.buffers[op.out]);
  const float* weight = static_cast<const float*>(op.weight);
  const int whole = op.k / LANES * LANES;
  for (int t = share.begin; t < share.end; t++) {
    const T* x = in + t * program.strides[op.in];
    T* y = out + t * program.strides[op.out];
    const float mean = sum_around<false>(x, op.k, 0.0f) / float(op.k);
    const float factor = 1.0f / sqrtf(sum_around<true>(x, op.k, mean) / float(op.k) + op.eps);
    for (int i = 0; i < whole; i += LANES) {
      const vf v = vmul(vmul(vsub(vload(x + i), vset(mean)), vset(factor)), vload(weight + i));
      vstore(y + i, op.bias ? vadd(v, vload(op.bias + i)) : v);
    }
    for (int i = whole; i < op.k; i++) {
      const float v = (to_float(x[i]) - mean) * factor * weight[i];
      y[i] = from_float(op.bias ? v + op.bias[i] : v, T());
    }
    clear_pad(y, op.k);
  }
}

template <typename T>
static void scale(const cl_op& op, const cl_program& program, Share share) {
  const T* in = static_cast<const T*>(program.buffers[op.in]);
  T* out = static_cast<T*>(program.buffers[op.out]);
  for (int t = share.begin; t < share.end; t++)
    scale_row(in + t * program.strides[op.in], out + t * program.strides[op.out], op.n, op.scale);
}

template <typename T>
static void add(const cl_op& op, const cl_program& program, Share share) {
  const T *a = static_cast<const T*>(program.buffers[op.in]), *b = static_cast<const T*>(program.buffers[op.aux]);
  T* out = static_cast<T*>(program.buffers[op.out]);
  for (int t = share.begin; t < share.end; t++) {
    T* sum = out + t * program.strides[op.out];
    for (int i = 0; i < op.n; i += LANES)
      vstore(sum + i, vadd(vload(a + t * program.strides[op.in] + i), vload(b + t * program.strides[op.aux] + i)));
    clear_pad(sum, op.n);
  }
}

}  // namespace CL_NS
