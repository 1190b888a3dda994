// The matmul operations of a step program, and their epilogues, which add bias and residual, apply gates, or store the
// heads of attention.
#pragma once
#include <type_traits>

#include "elementwise.h"
#include "gemm.h"
#include "kv8.h"
#include "lora.h"

namespace CL_NS {

// For each row, prefetches the cache line to which the results of a panel will be written.
template <typename T>
CL_INLINE void fetch_to_write(T* at, int64_t stride, int rows) {
  for (int r = 0; r < rows; r++) fetch_line<true>((const char*)(at + r * stride));
}

// Calls `act` with the function of the given cl_activation. So the function is selected once per tile, not once per
// element.
template <typename Do>
static void with_activation(int activation, const Do& act) {
  switch (activation) {
    case CL_GELU: return act([](vf x) { return vgelu(x); });
    case CL_GELU_TANH: return act([](vf x) { return vgelu_tanh(x); });
    case CL_RELU: return act([](vf x) { return vmax(vset(0.0f), x); });
    case CL_RELU_SQUARED:
      return act([](vf x) {
        const vf positive = vmax(vset(0.0f), x);
        return vmul(positive, positive);
      });
    default: return act([](vf x) { return x; });
  }
}

// Epilogue: out = scale * activation(tile + bias) (+ residual). Columns from n on are set to zero. Their weights are
// zero, but zero times NaN is NaN, so without this a row with NaN would leave NaN in them.
template <typename T>
struct StoreResult {
  T* out;
  int64_t stride;
  const T* residual;
  int64_t residual_stride;
  const float* bias;
  int n;
  int activation;
  float scale;  // 1: results are not scaled

  void fetch(int row0, int rows, int panel) const {
    fetch_to_write(out + row0 * stride + int64_t(panel) * CL_PANEL, stride, rows);
  }

  void operator()(int row0, int rows, int panel0, int panels, const float* tile, int64_t tile_stride) const {
    if (activation == CL_NONE && scale == 1.0f)
      store<false>(row0, rows, panel0, panels, tile, tile_stride, [](vf x) { return x; });
    else
      with_activation(activation, [&](const auto& act) { store<true>(row0, rows, panel0, panels, tile, tile_stride, act); });
  }

 private:
  template <bool SCALED, typename Act>
  void store(int row0, int rows, int panel0, int panels, const float* tile, int64_t tile_stride, const Act& act) const {
    const int64_t column0 = int64_t(panel0) * CL_PANEL;
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < panels * CL_PANEL; c += LANES) {
        const int64_t column = column0 + c;
        vf x = vload(tile + r * tile_stride + c);
        if (bias) x = vadd(x, vload(bias + column));
        x = act(x);
        if (SCALED) x = vmul(x, vset(scale));
        if (residual) x = vadd(x, vload(residual + (row0 + r) * residual_stride + column));
        if (column + LANES > n) x = vkeep(x, 0, int(n - column), 0.0f);
        vstore(out + (row0 + r) * stride + column, x);
      }
  }
};

// The gate of SwiGLU: silu(factor * gate) * up.
struct SiluGate {
  float factor = 1.0f;
  vf operator()(vf gate, vf up) const {
    gate = vmul(gate, vset(factor));
    return vmul(vdiv(gate, vadd(vset(1.0f), vexp(vsub(vset(0.0f), gate)))), up);
  }
};
struct GeluGate {
  vf operator()(vf gate, vf up) const { return vmul(vgelu_tanh(gate), up); }
};
// The gate of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), with gate <= limit and -limit <= up <= limit.
struct ClampedGate {
  float alpha, limit;
  vf operator()(vf gate, vf up) const {
    gate = vmin(vset(limit), gate);  // vmin and vmax return the second argument if it is NaN, so NaN is kept
    up = vmin(vset(limit), vmax(vset(-limit), up));
    const vf closed = vexp(vsub(vset(0.0f), vmul(vset(alpha), gate)));
    return vmul(vadd(up, vset(1.0f)), vdiv(gate, vadd(vset(1.0f), closed)));
  }
};

// Epilogue of a layer with a gate: out = opened(gate, up), where `opened` is a gate function, for example that of
// SwiGLU. Even panels of the tile are gate, odd panels are up.
template <typename T, typename Gate>
struct StoreGated {
  T* out;
  int64_t stride;
  const float* bias;
  Gate opened;

  void fetch(int row0, int rows, int panel) const {
    if (panel % 2 == 0) fetch_to_write(out + row0 * stride + panel / 2 * CL_PANEL, stride, rows);
  }

  void operator()(int row0, int rows, int panel0, int panels, const float* tile, int64_t tile_stride) const {
    for (int r = 0; r < rows; r++)
      for (int p = 0; p < panels; p += 2)
        for (int c = 0; c < CL_PANEL; c += LANES) {
          const float* at = tile + r * tile_stride + p * CL_PANEL + c;
          vf gate = vload(at), up = vload(at + CL_PANEL);
          if (bias) {
            gate = vadd(gate, vload(bias + (panel0 + p) * CL_PANEL + c));
            up = vadd(up, vload(bias + (panel0 + p + 1) * CL_PANEL + c));
          }
          vstore(out + (row0 + r) * stride + (panel0 + p) / 2 * CL_PANEL + c, opened(gate, up));
        }
  }
};

// Epilogue of QKV: normalises (Qwen3) and rotates each head of q and k, then writes q to its buffer, and k and v to
// their slots of the KV cache.
template <typename T>
struct StoreHeads {
  const cl_op& op;
  const cl_kv_layer& kv;
  const int64_t* slots;  // [T] slot of each token's K and V, see cl_batch::slot_mapping
  int num_tokens;
  const float* rotary;  // [T, head_dim] or null
  T* q;
  int64_t q_stride;

  void fetch(int row0, int rows, int panel) const {
    if (panel * CL_PANEL < op.heads * op.head_dim) fetch_to_write(q + row0 * q_stride + panel * CL_PANEL, q_stride, rows);
  }

  void operator()(int row0, int rows, int panel0, int panels, float* tile, int64_t tile_stride) const {
    if (kv.kind == CL_KV_INT8)
      store_heads<code8>(row0, rows, panel0, panels, tile, tile_stride);
    else
      store_heads<T>(row0, rows, panel0, panels, tile, tile_stride);
  }

  // Normalises, rotates and stores the heads of the rows `share` of a buffer `in`, whose rows are [(heads + 2 kv_heads)
  // * head_dim].
  void store(const T* in, int64_t stride, Share share) const {
    if (kv.kind == CL_KV_INT8)
      store_rows<code8>(in, stride, share);
    else
      store_rows<T>(in, stride, share);
  }

 private:
  enum { P = Packed<T>::P };

  template <typename Stored>
  void store_heads(int row0, int rows, int panel0, int panels, float* tile, int64_t tile_stride) const {
    const int dim = op.head_dim, first_head = panel0 * CL_PANEL / dim;
    int last_head = (panel0 + panels) * CL_PANEL / dim;
    last_head = last_head < op.heads + 2 * op.kv_heads ? last_head : op.heads + 2 * op.kv_heads;
    for (int r = 0; r < rows; r++)
      for (int h = first_head; h < last_head; h++) {
        float* x = tile + r * tile_stride + (h - first_head) * dim;
        if (op.bias)
          for (int d = 0; d < dim; d += LANES) vstore(x + d, vadd(vload(x + d), vload(op.bias + h * dim + d)));
        if (h < op.heads + op.kv_heads) shape(x, h < op.heads ? op.q_norm : op.k_norm, row0 + r);
        store_head<Stored>(x, h, row0 + r);
      }
  }

  template <typename Stored>
  void store_head(const float* x, int h, int t) const {
    const int dim = op.head_dim;
    if (h < op.heads) {
      for (int d = 0; d < dim; d += LANES) vstore(q + t * q_stride + h * dim + d, vload(x + d));
    } else if (h < op.heads + op.kv_heads) {
      store_key(x, keys_of<Stored>(slots[t], h - op.heads), t);
    } else {
      store_value(x, keys_of<Stored>(slots[t], h - op.heads - op.kv_heads), t);
    }
  }

  // Factor of an RMS norm over `width` numbers: all heads of q, or all heads of k.
  float all_heads_factor(const T* row, int width) const {
    return 1.0f / sqrtf(sum_of_squares(row, width) / float(width) + op.eps);
  }

  template <typename Stored>
  void store_rows(const T* in, int64_t stride, Share share) const {
    const int dim = op.head_dim, width = op.heads * dim, kv_width = op.kv_heads * dim;
    const bool all = op.flags & CL_ALL_HEADS;
    for (int t = share.begin; t < share.end; t++) {
      const T* row = in + t * stride;
      const float q_factor = all && op.q_norm ? all_heads_factor(row, width) : 1.0f;
      const float k_factor = all && op.k_norm ? all_heads_factor(row + width, kv_width) : 1.0f;
      for (int h = 0; h < op.heads + 2 * op.kv_heads; h++) {
        float x[512];
        for (int d = 0; d < dim; d += LANES) vstore(x + d, vload(row + h * dim + d));
        const float* norm = h < op.heads ? op.q_norm : h < op.heads + op.kv_heads ? op.k_norm : nullptr;
        if (all && norm) {  // rounded twice: before the weight as in rms_norm, and when the norm's result is stored
          const float factor = h < op.heads ? q_factor : k_factor;
          const float* weight = norm + (h < op.heads ? h : h - op.heads) * dim;
          for (int d = 0; d < dim; d += LANES) {
            const vf normed = vmul(vload(weight + d), vrounded(vmul(vload(x + d), vset(factor)), T()));
            vstore(x + d, vrounded(normed, T()));
          }
        }
        if (h < op.heads + op.kv_heads) shape(x, all ? nullptr : norm, t);
        store_head<Stored>(x, h, t);
      }
    }
  }

  void shape(float* x, const float* norm, int t) const {
    const int dim = op.head_dim, half = dim / 2;
    if (norm) {
      const float factor = 1.0f / sqrtf(sum_of_squares(x, dim) / float(dim) + op.eps);
      for (int d = 0; d < dim; d += LANES)
        vstore(x + d, vmul(vload(norm + d), vrounded(vmul(vload(x + d), vset(factor)), T())));
    }
    if (!rotary) return;
    const float *cosine = rotary + int64_t(t) * dim, *sine = cosine + half;
    int d = 0;
    for (; d + LANES <= half; d += LANES) {
      const vf first = vload(x + d), second = vload(x + d + half), c = vload(cosine + d), s = vload(sine + d);
      vstore(x + d, vsub(vmul(first, c), vmul(second, s)));
      vstore(x + d + half, vadd(vmul(second, c), vmul(first, s)));
    }
    for (; d < half; d++) {
      const float first = x[d], second = x[d + half];
      x[d] = first * cosine[d] - second * sine[d];
      x[d + half] = second * cosine[d] + first * sine[d];
    }
  }

  // Address of the K of one KV head, for the 16 tokens that share a piece of the cache with `slot`. The V of these
  // tokens follows it.
  template <typename Stored>
  Stored* keys_of(int64_t slot, int head) const {
    const int64_t block = slot / kv.block_size;
    CL_ASSERT(block >= 0 && block < kv.num_blocks);
    const int per_block = kv.block_size / CL_KV_TOKENS, inside = int(slot % kv.block_size) / CL_KV_TOKENS;
    const int64_t piece = ((block * kv.kv_heads + head) * per_block + inside) * 2;
    return reinterpret_cast<Stored*>(static_cast<char*>(kv.kv) + piece * piece_bytes(op.head_dim, Stored()));
  }

  void store_key(const float* x, T* keys, int t) const {
    T* to = keys + slots[t] % CL_KV_TOKENS * P;
    T rounded[512];
    for (int d = 0; d < op.head_dim; d += LANES) vstore(rounded + d, vload(x + d));
    for (int d = 0; d < op.head_dim; d += P) memcpy(to + d * CL_KV_TOKENS, rounded + d, sizeof(T) * P);
  }

  // In bf16 attention reads the values of an even token and the next one as a pair. If this step does not write the
  // next token, its value is set to zero, because NaN of another request may still be there.
  void store_value(const float* x, T* keys, int t) const {
    const int64_t slot = slots[t];
    const int token = int(slot % CL_KV_TOKENS);
    T* to = keys + (CL_KV_TOKENS + token / P * P) * op.head_dim + token % P;
    const bool last = t + 1 == num_tokens || slots[t + 1] != slot + 1;
    const bool clear_next = P == 2 && token % 2 == 0 && last;
    T rounded[512];
    for (int d = 0; d < op.head_dim; d += LANES) vstore(rounded + d, vload(x + d));
    for (int d = 0; d < op.head_dim; d++) {
      to[d * P] = rounded[d];
      if (clear_next) to[d * P + 1] = T{0};
    }
  }

  // In 8 bits nothing is set to zero, because attention excludes the tokens after a sequence's end.
  void store_key(const float* x, code8* keys, int t) const {
    code8 codes[512];
    const int token = store_scales(x, keys, t, codes);
    for (int d = 0; d < op.head_dim; d += 2) memcpy(keys + d * CL_KV_TOKENS + 2 * token, codes + d, 2);
  }

  void store_value(const float* x, code8* keys, int t) const {
    code8* values = keys + piece_bytes(op.head_dim, code8());
    code8 codes[512];
    const int token = store_scales(x, values, t, codes);
    code8* to = values + token / 2 * 2 * LANES + token % 2;
    for (int d = 0; d < op.head_dim; d += LANES, to += CL_KV_TOKENS * LANES)
      for (int i = 0; i < LANES; i++) to[2 * i] = codes[d + i];
  }

  // Rounds the key or value x of one head of token t to `codes`, and writes its scale and minimum to `piece`, which has
  // the keys or values of sixteen tokens. Returns the index of the token among these sixteen.
  int store_scales(const float* x, code8* piece, int t, code8* codes) const {
    const int token = int(slots[t] % CL_KV_TOKENS);
    float scale, minimum;
    round_head(x, op.head_dim, codes, scale, minimum);
    float* to = const_cast<float*>(scales_of(piece, op.head_dim)) + token;
    to[0] = scale, to[CL_KV_TOKENS] = minimum;
    return token;
  }
};

// Smallest number of panels whose columns are a whole number of heads of size head_dim.
CL_INLINE int panels_per_heads(int head_dim) {
  int columns = head_dim;
  while (columns % CL_PANEL) columns += head_dim;
  return columns / CL_PANEL;
}

CL_INLINE bool gated(const cl_op& op) { return op.kind == CL_OP_LINEAR_SILU || op.kind == CL_OP_LINEAR_GELU; }

// Number of panels in a chunk of the operation's weight. Panels whose results belong together are in one chunk.
template <typename Row, typename Weight>
static int chunk_of(const cl_op& op, const Panels<Weight>& weight, int m, int threads) {
  const int unit = op.kind == CL_OP_QKV ? panels_per_heads(op.head_dim) : gated(op) ? 2 : 1;
  return chunk_panels<Row>(weight, unit, m, threads);
}

// The memory that a thread reads first in the next matmul after operation `at`, so that it can be prefetched. It is
// NOTHING if another operation in between would replace it in the cache.
template <typename Row>
static Ahead first_weights(const cl_program& program, int at, int end, int m, int thread, int threads) {
  do at++;
  while (at < end && (program.ops[at].kind == CL_OP_RMS_NORM || program.ops[at].kind == CL_OP_ADD ||
                      program.ops[at].kind == CL_OP_LAYER_NORM || program.ops[at].kind == CL_OP_SCALE ||
                      program.ops[at].kind == CL_OP_GATHER));
  if (at == end) return NOTHING;
  const cl_op& op = program.ops[at];
  if (op.kind != CL_OP_LINEAR && !gated(op) && op.kind != CL_OP_QKV) return NOTHING;
  Ahead found = NOTHING;
  with_weight<Row>(op, [&](const auto& weight) {
    const int chunk = chunk_of<Row>(op, weight, m, threads);
    const auto items = items_of<Row>(weight, chunk, m);
    const int first = int(Turns::begin(items.count(), thread, threads) % items.chunks) * chunk, left = weight.count - first;
    found = Ahead{(const char*)weight.panel(first), (chunk < left ? chunk : left) * weight.bytes(weight.k)};
  });
  return found;
}

// The rows `in` in the form that the multiplication reads: unchanged, or rounded to 8 bits if the weight is in codes.
// All threads round rows, then wait for each other. `stride` becomes the distance between the returned rows.
template <typename Row, typename Weight>
static const Row* product_rows_of(cl_pool&, int, const Panels<Weight>&, const cl_program&, int, const Row* in, int64_t&) {
  return in;
}
template <typename Row, int B, Meaning M>
static const Source<Row, Code<B, M>>* product_rows_of(cl_pool& pool, int thread, const Panels<Code<B, M>>& weight,
                                                      const cl_program& program, int m, const Row* in, int64_t& stride) {
  typedef Source<Row, Code<B, M>> Block;
  Block* rows = static_cast<Block*>(program.codes);
  const Share share = share_of(m, thread, pool.num_threads());
  for (int row = share.begin; row < share.end; row++) quantize(in + row * stride, weight.k, rows + row * code_stride(weight.k));
  stride = code_stride(weight.k);
  pool.barrier(thread);
  return rows;
}

template <typename Row, typename Weight>
static void linear(cl_pool& pool, int thread, const cl_op& op, const Panels<Weight>& weight, const cl_program& program,
                   const cl_batch& batch, GemmScratch<Row>& scratch, Ahead then, KVAhead<Row>& kv) {
  kv.begin(op);
  const int m = batch.num_tokens, chunk = chunk_of<Row>(op, weight, m, pool.num_threads());
  int64_t in_stride = program.strides[op.in];
  const Row* plain = static_cast<const Row*>(program.buffers[op.in]);
  const int64_t plain_stride = in_stride;
  const auto entries = [&](int t) {
    return batch.adapters[t] < 0 ? int64_t(-1) : int64_t(batch.adapters[t]) * program.num_sites + op.site - 1;
  };
  const auto input = [&](int t) { return plain + t * plain_stride; };
  typedef Changes<Row, decltype(entries), decltype(input)> Adapted;
  const Adapted changes{program, entries, input, op.n, op.k, static_cast<Left<Row, Row>*>(program.lora_rows)};
  const bool adapted = batch.adapters && op.site && low_rank<Row>(pool, thread, changes, m, plain_stride, scratch);
  const auto* in = product_rows_of(pool, thread, weight, program, m, plain, in_stride);
  Row* out = static_cast<Row*>(program.buffers[op.out]);
  const int64_t out_stride = program.strides[op.out];
  const auto multiply = [&](const auto& store) {
    typedef std::decay_t<decltype(store)> Store;
    const WithAdapters<Row, Store, decltype(entries), decltype(input)> whole{store, changes, plain_stride, scratch, adapted};
    gemm<Row>(pool, thread, in, in_stride, m, weight, chunk, scratch, whole, then, &kv);
  };
  if (op.kind == CL_OP_LINEAR) {
    const Row* residual = op.aux >= 0 ? static_cast<const Row*>(program.buffers[op.aux]) : nullptr;
    multiply(StoreResult<Row>{out, out_stride, residual, op.aux >= 0 ? program.strides[op.aux] : 0, op.bias, op.n, op.flags,
                              op.scale != 0.0f ? op.scale : 1.0f});
  } else if (op.kind == CL_OP_LINEAR_SILU) {
    multiply(StoreGated<Row, SiluGate>{out, out_stride, op.bias, {op.scale != 0.0f ? op.scale : 1.0f}});
  } else if (op.kind == CL_OP_LINEAR_GELU) {
    multiply(StoreGated<Row, GeluGate>{out, out_stride, op.bias, {}});
  } else {
    const float* rotary = op.rotary >= 0 ? program.rotary[op.rotary] : nullptr;
    const cl_kv_layer& layer = program.kv_layers[op.layer];
    const int64_t* slots = batch.slot_mapping + int64_t(layer.group) * m;
    multiply(StoreHeads<Row>{op, layer, slots, m, rotary, out, out_stride});
  }
}

// The operation HEADS: normalises, rotates and stores heads as QKV does. Another operation has written q, k and v to
// `in`.
template <typename T>
static void heads(const cl_op& op, const cl_program& program, const cl_batch& batch, Share share) {
  const cl_kv_layer& layer = program.kv_layers[op.layer];
  const int m = batch.num_tokens;
  const float* rotary = op.rotary >= 0 ? program.rotary[op.rotary] : nullptr;
  T* q = static_cast<T*>(program.buffers[op.out]);
  const int64_t stride = program.strides[op.out];
  const StoreHeads<T> store{op, layer, batch.slot_mapping + int64_t(layer.group) * m, m, rotary, q, stride};
  store.store(static_cast<const T*>(program.buffers[op.in]) + op.window, program.strides[op.in], share);
  for (int t = share.begin; t < share.end; t++) clear_pad(q + t * stride, op.heads * op.head_dim);
}

}  // namespace CL_NS
