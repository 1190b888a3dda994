// Interface between Python and the CPU kernels: a C ABI of raw pointers and sizes, called through ctypes.
//
// Python owns every array that it passes and keeps it alive. The library owns only its thread pool. The structs are
// mirrored in chairlift/kernels/cpu/library.py, which compares their sizes at load. No function throws, and none
// allocates memory in a step. All integers are host integers; "elements" are elements of the program's dtype.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CL_EXPORT __attribute__((visibility("default")))

enum { CL_ABI_VERSION = 9 };

// Dtype of a program's activations, KV and dense weights (a KV layer may have another kind). Sums are always float32.
enum cl_dtype { CL_F32 = 0, CL_BF16 = 1 };

// Number format of a weight. CL_DENSE: the program's dtype. The others are codes of 8 or 4 bits in groups of k, each
// with a scale and either a fixed zero or a minimum: scale * (code - 128), scale * (code - 8), scale * code + minimum.
// CL_E2M1 has floats of 4 bits (MXFP4): the highest bit is the sign, the others mean 0, 1, 2, 3, 4, 6, 8 or 12 times
// the scale.
enum cl_format { CL_DENSE = 0, CL_Q8 = 1, CL_Q4 = 2, CL_Q8_MIN = 3, CL_Q4_MIN = 4, CL_E2M1 = 5 };

// Instruction-set paths, weakest first. Each has its own rounding. Within one path, a row's result never depends on
// other rows.
enum cl_isa { CL_AVX2 = 0, CL_AVX512 = 1, CL_AVX512_BF16 = 2, CL_AMX = 3, CL_NUM_ISAS = 4 };

enum {
  CL_PANEL = 32,     // columns of a packed weight panel
  CL_K_MULTIPLE = 32,  // packed weights and activation rows are padded with zeros to a multiple of this
  // number of k that are rounded to 8 bits together in a row; groups of a weight are multiples of it
  CL_Q_BLOCK = 32,
  CL_SCALE_UNIT = 256,  // factor of the stored float16 scales and minimums, so that few of them are subnormal
  CL_KV_TOKENS = 16,  // tokens of a packed KV tile; block sizes are multiples of it
};

// Kind of a fused operation. Unused fields are zero, unused buffers -1. Buffers are [T, width] rows of the program's
// dtype.
enum cl_op_kind {
  CL_OP_CALL = 0,         // ends a native run: Python computes `out`, then continues with the next operation
  CL_OP_EMBED = 1,        // out[T, k] = rows token_ids of weight [n, k], times scale; flags: CL_PACKED, CL_POSITIONS
  CL_OP_ROTARY = 2,       // float32 cos and sin of every token into rotary table `layer`: weight = inverse frequencies [head_dim / 2], scale = factor; bias = axis (0, 1, 2) of each frequency, or null
  CL_OP_RMS_NORM = 3,     // out[T, k] = rms_norm(in) * weight[k] (float32), eps
  CL_OP_LINEAR = 4,       // out[T, n] = scale * f(in[T, k] @ weight.T + bias) (+ aux[T, n]); out may be aux; flags: f, a cl_activation
  CL_OP_LINEAR_SILU = 5,  // out[T, n / 2] = silu(scale * gate) * up of the LINEAR product; gate and up panels alternate
  // the LINEAR product as heads: norm, rotation, K and V to the cache of `layer`, q to out[T, heads * head_dim]
  CL_OP_QKV = 6,
  // out[T, heads * head_dim] = causal attention of in (q) over the cache of `layer`; see cap, sinks; flag CL_BOTH_WAYS
  CL_OP_ATTENTION = 7,
  CL_OP_ADD = 8,          // out[T, n] = in + aux
  // out[T, k] = sum of the chosen experts for each token of in[T, k] (+ aux[T, k]); see cl_experts
  CL_OP_EXPERTS = 9,
  CL_OP_LAYER_NORM = 16,  // out[T, k] = layer_norm(in) * weight[k] + bias[k] (float32; bias may be null), eps
  CL_OP_LINEAR_GELU = 17,  // as LINEAR_SILU, with the tanh form of GELU
  CL_OP_SCALE = 18,       // out[T, n] = in * scale
  // what QKV does after its product, for rows in[T, (heads + 2 kv_heads) * head_dim] from column `window` on; flags:
  // CL_ALL_HEADS
  CL_OP_HEADS = 19,
  // out[T, n] = causal convolution over k tokens of each channel, with the states of `layer`. The input is in[T, n]; with
  // CL_GATED it is b * x of in[T, 3 n] = (b, c, x), and the sum is multiplied with c. weight float32 [k, n]; flag CL_SILU.
  // The input begins at column `window`. q_norm: float32 [n], a factor of each channel's input, or null
  CL_OP_SHORT_CONV = 20,
  // out[T, n] = scan of Mamba-2 over in[T, n + 2 kv_heads k] = (x, B, C) and the steps of `heads` heads of head_dim from
  // column `window` of aux on, with kv_heads groups and states [heads, head_dim / p, k, p] float32 of `layer`, where p is 32
  // if that divides head_dim, else 16. float32 [heads]: weight (A_log), bias (of steps), q_norm (D). Steps lie between
  // scale and cap; eps is a factor of their input (0: 1)
  CL_OP_MAMBA_SCAN = 24,
  // out[T, n] = rms_norm(in * silu(aux)) * weight[n] (float32), with one mean for each of `heads` groups, and eps; flag
  // CL_NORM_FIRST. Without a weight it is in * silu(aux); flag CL_SIGMOID_GATE: sigmoid in place of silu. scale is a factor of aux, which begins at column `window`
  CL_OP_GATED_NORM = 25,
  // out[T, n] = what gated delta nets read, for in = (q, k of kv_heads heads of k columns each; v of `heads` heads of
  // head_dim) and aux[T, 2 heads] = (rates, decays), with memories [heads, head_dim / p, k, p] float32 of `layer`, where p
  // is 32 if that divides head_dim, else 16. float32 [heads]: weight (logarithms of decays), bias (of decays)
  CL_OP_DELTA_SCAN = 26,
};
enum {
  CL_PACKED = 1,     // the weight is packed
  CL_POSITIONS = 2,  // rows by positions, not by token_ids
  CL_GATED = 8,      // SHORT_CONV: the input is (b, c, x)
  CL_SILU = 16,      // SHORT_CONV: silu of the sum
  CL_NORM_FIRST = 32,  // GATED_NORM: rms_norm(in) * silu(aux)
  CL_BOTH_WAYS = 64,   // ATTENTION: every query sees its whole sequence, which has no window
  CL_SIGMOID_GATE = 128,  // GATED_NORM: sigmoid(aux) in place of silu(aux)
  CL_ALL_HEADS = 4,  // q_norm [heads * head_dim] and k_norm [kv_heads * head_dim] are norms over all heads together
};
enum cl_activation { CL_NONE = 0, CL_GELU = 1, CL_GELU_TANH = 2, CL_RELU = 3, CL_RELU_SQUARED = 4 };

// Scores of experts from logits: softmax over all experts, softmax over the chosen experts, or sigmoid of each logit.
// The group score of neighbouring experts is the sum of the best two scores, or the best score.
enum cl_scoring { CL_SOFTMAX = 0, CL_SOFTMAX_CHOSEN = 1, CL_SIGMOID = 2 };
enum cl_group_score { CL_BEST_TWO = 0, CL_BEST = 1 };
enum { CL_EXPERT_TOKENS = 512 };  // most tokens that are routed together

// A layer of experts. The weights of the experts are one after another in memory. `weight` of its operation has gate
// and up of n columns per expert in alternating panels; `bias` has the same order and may be null. An expert is
// silu(gate) * up. With a limit above 0 it is gate * sigmoid(alpha * gate) * (up + 1), with gate <= limit and -limit <=
// up <= limit (gpt-oss). With CL_RELU_SQUARED as activation there is no gate: `weight` has n columns per expert, and an
// expert is max(0, up)^2. Among equal scores the lower expert is chosen.
typedef struct {
  int32_t num_experts, top_k, inner;  // inner: rows of `down`'s input, without padding
  int32_t scoring, normalise, groups, kept_groups, group_score;
  int32_t down_format, down_group;    // like format and group of an operation
  float epsilon, scale;               // added to the sum of the weights; factor of the weights
  float alpha, limit;                 // limit 0: no clamp
  int32_t activation;                 // cl_activation: CL_NONE (gated) or CL_RELU_SQUARED
  int32_t routed_k;                   // 0: the router reads `in`; else aux, which has so many columns and is not added
  const void* router;                 // [E, k] or [E, routed_k], padded with zeros, in the program's dtype
  const float* correction;            // [E]: added to scores for the choice; or null
  const void* shared_gate;            // [k], padded: aux is multiplied by the sigmoid of the product with it; or null
  const void* down;                   // packed panels
  const float* router_bias;           // [E]: added to the router's products; or null
  const float* down_bias;             // per expert, padded to whole panels; or null
  void* scratch;                      // cl_expert_bytes
  int64_t* load;                      // [E]: the number of tokens of each expert is added; or null
} cl_experts;

typedef struct {
  int32_t kind, flags;
  int32_t in, out, aux;   // buffer indices
  int32_t n, k;           // output columns, counting gate and up separately; input columns
  int32_t format, group;  // cl_format of the weight, and its group size in k
  int32_t layer;          // KV layer (QKV, ATTENTION)
  int32_t rotary;         // rotary table (ROTARY, QKV); -1: no rotation
  int32_t heads, kv_heads, head_dim;
  int32_t window;         // number of tokens that a query sees, itself included; 0: all
  int32_t site;           // of a product: 1 + its column in the table of adapters; 0: no adapter changes it
  int32_t reserved;
  float eps, scale;       // scale 0 means 1
  // c > 0: scores (ATTENTION) and logits (cl_head) s become c * tanh(s / c), before masks; 0: no cap
  float cap;
  const void* weight;     // packed panels (see cl_pack) for products
  const float* bias;      // float32 in packed column order, padded to whole panels; or null
  const float* q_norm;    // float32 [head_dim] or null
  const float* k_norm;
  const cl_experts* experts;  // for EXPERTS
  const float* sinks;     // ATTENTION: float32 [heads], one more logit in the softmax of each head, without a value; or null
} cl_op;

// K and V of one layer. For each block, KV head and 16 tokens: K as [head_dim / P][16][P] elements, then V as [16 /
// P][head_dim][P], with P = 2 in bf16 and 1 in float32. So products need no transposition, and hardware prefetching
// after K loads V.
//
// In 8 bits there are four parts: codes of K as uint8 [head_dim / 2][16][2]; float32 scales [16] and minima [16] of K;
// codes of V as uint8 [head_dim / 16][16 tokens / 2][16][2]; float32 scales [16] and minima [16] of V. A number is
// minimum + scale * code. Each token and head has its own scale and minimum, so that stored numbers of a token depend
// on that token alone. A scale of NaN means that some number was not finite.
//
// With CL_KV_STATE it is a part of the states of a recurrent layer. Each block is one state of `head_dim` bytes. An entry
// of a block table stands for `block_size` positions, and its block holds the state after the newest token among them.
enum cl_kv_kind { CL_KV_PLAIN = 0, CL_KV_INT8 = 1, CL_KV_STATE = 2 };
typedef struct {
  void* kv;
  int32_t group;          // cache group, which selects the block table and slot mapping
  int32_t kv_heads, head_dim, block_size;
  int64_t num_blocks;
  int32_t kind;           // cl_kv_kind
  int32_t reserved;
} cl_kv_layer;

// Addition of an adapter to one product (LoRA; Hu et al., 2021): (x @ a.T) @ b.T, before everything else that is done with the
// product's result. Both are packed panels in the program's dtype. The first product is rounded to that dtype.
typedef struct {
  const void* a;          // [rank, k]; null: this adapter leaves the product alone
  const void* b;          // [n, rank], its columns in the order of the product's weight
  const int32_t* slices;  // [panels of n][2]: which piece of rank a panel of b has numbers in: first and count, multiples of 32
  int32_t rank;           // a multiple of 32
  int32_t reserved;
} cl_lora;

typedef struct {
  const cl_op* ops;
  void* const* buffers;
  // elements between rows of each buffer; a multiple of 32, with zeros in the padding columns
  const int64_t* strides;
  float* const* rotary;          // tables [capacity, head_dim]: cosines, then sines
  const cl_kv_layer* kv_layers;
  int32_t num_ops, num_buffers, num_rotary, num_kv_layers;
  int32_t dtype, isa;
  int32_t capacity;              // rows of every buffer
  int32_t num_sites;             // products that adapters may change
  void* codes;                   // scratch [capacity, cl_code_bytes(largest k)], if there are weights in codes
  const cl_lora* lora;           // [adapters, num_sites], or null
  void* lora_rows;               // scratch [capacity, lora_stride] float32, if there are adapters
  int64_t lora_stride;           // at least the largest rank, and 16
} cl_program;

// One step: N rows with T tokens in total. A row is the newest tokens of a sequence.
typedef struct {
  const int32_t* token_ids;      // [T]
  const int32_t* positions;      // [T]
  const int32_t* cu_seqlens;     // [N + 1]
  const int32_t* seq_lens;       // [N]
  const int32_t* block_tables;   // [groups, N, table_width]
  const int64_t* slot_mapping;   // [groups, T]
  const int32_t* axes;           // [3, T] positions in time, height and width, for rotations that have axes; or null where all are `positions`
  const int32_t* adapters;       // [T] row of each token's adapter in the table, negative: none; or null where no token has one
  int32_t num_tokens, num_rows, num_groups, table_width;
} cl_batch;

// Sampling parameters and results of one row. Pointers may be null when their count is zero.
typedef struct {
  uint64_t seed;
  double top_p;                  // 1: off
  const int32_t* history;        // prompt and output so far
  const int32_t* allowed;        // only these ids, when num_allowed > 0
  const int32_t* bias_ids;
  const float* bias;
  const int32_t* masked;         // never these ids
  const uint32_t* mask_bits;     // grammar: bit i % 32 of word i / 32 set where id i is allowed; or null
  int32_t* top_ids;              // out [1 + num_logprobs]: the token, then the most likely ones
  float* top_logprobs;           // out, same order
  int32_t history_len, num_prompt_tokens;
  int32_t num_allowed, num_bias, num_masked;
  int32_t position;              // of the new token
  int32_t top_k;                 // 0: off
  int32_t num_logprobs;          // -1: none asked for
  int32_t target;                // >= 0: draw no token, report the log-probability of this id
  float temperature;             // 0: greedy
  float min_p;                   // 0: off
  float repetition, presence, frequency;  // 1, 0, 0: off
  int32_t token;                 // out; -1 with a status other than CL_SAMPLED
  int32_t status;                // out
  int32_t rank;                  // out, with logprobs: 1 + ids strictly more likely than token
  int32_t reserved;
} cl_sampling_row;

enum cl_sample_status {
  CL_SAMPLED = 0,
  CL_RAW_NAN = 1,       // the model's logits hold NaN
  CL_RAW_INF = 2,       // ... or +inf
  CL_RAW_NONE = 3,      // every raw logit is -inf
  CL_SHAPED_NONE = 4,   // masks and bias leave no id
  CL_SHAPED_INF = 5,    // penalties or temperature overflow, or NaN
};

typedef struct cl_pool cl_pool;

CL_EXPORT int32_t cl_abi_version(void);
// Sizes of cl_op, cl_kv_layer, cl_program, cl_batch, cl_sampling_row, cl_experts, cl_lora.
CL_EXPORT void cl_struct_sizes(int64_t sizes[7]);
// Bit i set: this processor, operating system and build can run isa i.
CL_EXPORT int32_t cl_supported_isas(void);

// Zeroed memory on huge pages, 2 MiB aligned. The system allocates a page when it is first used. Null if it fails.
CL_EXPORT void* cl_alloc(size_t bytes);
CL_EXPORT void cl_free(void* memory, size_t bytes);
// Releases the pages of a file mapping that were read; another access reads them from the file again.
CL_EXPORT void cl_release_pages(const void* memory, size_t bytes);

// Creates a pool. Threads 1 .. n-1 sleep until a run needs them; the caller is thread 0. pin: pin one thread to each
// allowed processor. Null on failure.
CL_EXPORT cl_pool* cl_pool_create(int32_t num_threads, int32_t pin);
CL_EXPORT void cl_pool_destroy(cl_pool* pool);

// Writes rows [first_row, first_row + rows) of a weight: row r goes to column r % 32 of panel first_panel + r / 32 *
// panel_step. Layout per panel: [k / P][32][P], P = 2 in bf16 and 1 in float32. src: row-major, src_stride elements per
// row.
CL_EXPORT void cl_pack(void* packed, int32_t dtype, int64_t k, int64_t first_row, int64_t rows, int64_t first_panel,
                       int64_t panel_step, const void* src, int64_t src_stride);

// Writes rows of a weight of codes. Per panel and group: 32 scales, then 32 minimums if the format has them, in float16
// times CL_SCALE_UNIT; then the codes. Codes of 8 bits are [group / 4][32][4], codes of 4 bits [group / 8][32][4] with
// the first four of eight k in the low halves. codes: one per byte, codes_stride per row; scales and minimums: as
// stored, scales_stride per row.
CL_EXPORT void cl_pack_codes(void* packed, int32_t format, int32_t group, int64_t k, int64_t first_row, int64_t rows,
                             int64_t first_panel, int64_t panel_step, const uint8_t* codes, int64_t codes_stride,
                             const uint16_t* scales, const uint16_t* minimums, int64_t scales_stride);
// Bytes of a packed weight with n columns; and bytes of a row with k numbers in codes, on any path.
CL_EXPORT int64_t cl_packed_code_bytes(int32_t format, int32_t group, int64_t n, int64_t k);
CL_EXPORT int64_t cl_code_bytes(int64_t k);
// Bytes of scratch for an operation of kind EXPERTS in a program of `dtype`, for steps of at most `tokens` tokens.
CL_EXPORT int64_t cl_expert_bytes(const cl_op* op, int32_t dtype, int32_t tokens);

// Runs operations from first_op to the next CL_OP_CALL or the end. Returns the index of the operation where it stopped,
// or -1 for a bad argument or too little memory.
CL_EXPORT int32_t cl_run(cl_pool* pool, const cl_program* program, const cl_batch* batch, int32_t first_op);

// Output head: rows token_rows[R] of hidden (`stride` elements per row) times the weight [n, k] of `product`, then one
// of n token ids per row. It uses the fields n, k, format, group, weight, bias and cap of `product`. logits: float32
// scratch [rows that need stored logits, stride vocab rounded up to 32], or null if no row needs it.
CL_EXPORT int32_t cl_head(cl_pool* pool, const cl_program* program, const void* hidden, int64_t stride,
                          const int32_t* token_rows, int32_t num_rows, const cl_op* product, cl_sampling_row* rows,
                          float* logits, int64_t logits_rows);
// Whether a row's logits must be stored. For other rows sampling is fused with the product.
CL_EXPORT int32_t cl_needs_logits(const cl_sampling_row* row);
// The sampler alone, on given logits [num_rows, stride]: for tests, and for logits computed elsewhere.
CL_EXPORT int32_t cl_sample(cl_pool* pool, const float* logits, int64_t stride, int32_t num_rows, int32_t vocab,
                            cl_sampling_row* rows, int32_t isa);

// Measured limits of this machine: bytes/s of reading `bytes` of memory; operations/s of the isa's product instruction.
CL_EXPORT double cl_measure_read(cl_pool* pool, const void* memory, size_t bytes);
CL_EXPORT double cl_measure_peak(cl_pool* pool, int32_t isa, int32_t int8, double seconds);

#ifdef __cplusplus
}
#endif
