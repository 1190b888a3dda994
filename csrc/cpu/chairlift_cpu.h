// Interface between Python and the CPU kernels: a C ABI of raw pointers and sizes, called through ctypes.
//
// Python owns every array that it passes and keeps it alive. The library owns only its thread pool. The structs are
// mirrored in chairlift/kernels/cpu/library.py, which compares their sizes at load. No function throws. Integers have
// the host's byte order. Sizes and strides in "elements" count elements of the program's dtype.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CL_EXPORT __attribute__((visibility("default")))

enum { CL_ABI_VERSION = 14 };

// Dtype of a program's activations, dense weights and KV cache (a KV layer may be stored in 8 bits instead: see
// cl_kv_kind). Sums are always float32.
enum cl_dtype { CL_F32 = 0, CL_BF16 = 1 };

// Number format of a weight. CL_DENSE has the program's dtype. The other formats store a code of 8 or 4 bits for each
// number; consecutive k form groups, and each group of a column has one scale. A number is scale * (code - 128) in
// CL_Q8, scale * (code - 8) in CL_Q4, and scale * code + minimum in CL_Q8_MIN and CL_Q4_MIN, where a group also has a
// minimum. A code of CL_E2M1 is a 4-bit float (MXFP4): the highest bit is the sign, and the other three bits select 0,
// 1, 2, 3, 4, 6, 8 or 12, which is multiplied by the scale.
enum cl_format { CL_DENSE = 0, CL_Q8 = 1, CL_Q4 = 2, CL_Q8_MIN = 3, CL_Q4_MIN = 4, CL_E2M1 = 5 };

// Instruction-set paths: those of x86-64 in ascending order of capability, then those of ARM64. Two paths may round
// differently. Within one path, a row's result never depends on the other rows of the batch.
enum cl_isa {
  CL_AVX2 = 0,
  CL_AVX512 = 1,
  CL_AVX512_VNNI = 2,
  CL_AVX512_BF16 = 3,
  CL_AMX = 4,
  CL_NEON = 5,
  CL_NEON_I8MM = 6,
  CL_NUM_ISAS = 7
};

// Kinds of matrix multiplication, by the type of the factors. Each has a fastest instruction in every path that has any.
enum cl_product { CL_F32_PRODUCT = 0, CL_BF16_PRODUCT = 1, CL_INT8_PRODUCT = 2, CL_NUM_PRODUCTS = 3 };

enum {
  CL_PANEL = 32,     // columns of a packed weight panel
  CL_K_MULTIPLE = 32,  // packed weights and activation rows are padded with zeros to a multiple of this
  // number of consecutive k of an activation row that share one scale when they are rounded to 8 bits; the group size
  // of a weight is a multiple of it
  CL_Q_BLOCK = 32,
  CL_SCALE_UNIT = 256,  // float16 scales and minimums are stored times this factor, so that few of them are subnormal
  CL_KV_TOKENS = 16,  // tokens of a packed KV tile; block sizes are multiples of it
};

// Kind of a fused operation. Unused fields are zero, unused buffers -1. Buffers are [T, width] rows of the program's
// dtype.
enum cl_op_kind {
  CL_OP_CALL = 0,         // ends a native run: Python computes `out`, then continues with the next operation
  CL_OP_EMBED = 1,        // out[T, k] = scale * rows token_ids of weight [n, k]; flags: CL_PACKED, CL_POSITIONS
  // writes the float32 cosines and sines of every token to rotary table number `layer`. weight: inverse frequencies
  // [head_dim / 2]. scale: factor of cosines and sines. bias: position axis (0, 1 or 2) of each frequency, or null
  CL_OP_ROTARY = 2,
  CL_OP_RMS_NORM = 3,     // out[T, k] = rms_norm(in) * weight[k] (float32), eps
  // out[T, n] = scale * f(in[T, k] @ weight.T + bias) (+ aux[T, n]). out may be the same buffer as aux. `flags` is a
  // cl_activation, which selects f
  CL_OP_LINEAR = 4,
  // out[T, n / 2] = silu(scale * gate) * up, where gate is the even and up the odd panels of in[T, k] @ weight.T + bias
  CL_OP_LINEAR_SILU = 5,
  // q, k, v = in[T, k] @ weight.T + bias, split into heads. Each head of q and k is normalised and rotated. Then k and
  // v are written to the KV cache of `layer`, and q to out[T, heads * head_dim]
  CL_OP_QKV = 6,
  // out[T, heads * head_dim] = causal attention of the queries `in` over the KV cache of `layer`. It uses window, cap
  // and sinks; flags CL_BOTH_WAYS, CL_APART
  CL_OP_ATTENTION = 7,
  CL_OP_ADD = 8,          // out[T, n] = in + aux
  // out[T, k] = weighted sum of the experts that the router chooses for each token of in[T, k] (+ aux[T, k]); see
  // cl_experts
  CL_OP_EXPERTS = 9,
  CL_OP_LAYER_NORM = 16,  // out[T, k] = layer_norm(in) * weight[k] + bias[k] (float32; bias may be null), eps
  CL_OP_LINEAR_GELU = 17,  // LINEAR_SILU with the tanh form of GELU in place of SiLU
  CL_OP_SCALE = 18,       // out[T, n] = in * scale
  // QKV without its matrix multiplication: q, k and v are already in in[T, (heads + 2 kv_heads) * head_dim], from
  // column `window` on; flag CL_ALL_HEADS
  CL_OP_HEADS = 19,
  // out[T, n] = causal convolution of each channel over the newest k tokens. Inputs of earlier steps come from the
  // recurrent states of `layer`. The input is in[T, n] from column `window` on. With CL_GATED the input is b * x, where
  // in[T, 3 n] = (b, c, x), and the sum is multiplied by c. weight: float32 [k, n]. q_norm: float32 [n], a factor of
  // each channel's input, or null. Flag CL_SILU
  CL_OP_SHORT_CONV = 20,
  // out[T, n] = scan of Mamba-2 with `heads` heads of head_dim columns and kv_heads groups of B and C. in[T, n + 2
  // kv_heads k] = (x, B, C). aux[T, heads], from column `window` on, has the time steps. `layer` has the states:
  // float32 [heads, head_dim / p, k, p], where p is 32 if 32 divides head_dim, else 16. weight: A_log, bias: added to
  // time steps, q_norm: D; all float32 [heads]. A time step is limited to the range from scale to cap, after its input
  // was multiplied by eps (0 means 1)
  CL_OP_MAMBA_SCAN = 24,
  // out[T, n] = rms_norm(in * silu(aux)) * weight[n] (float32), with one mean for each of `heads` groups of columns.
  // Without a weight, out = in * silu(aux). aux begins at column `window` and is multiplied by scale before silu. Flags
  // CL_NORM_FIRST, CL_SIGMOID_GATE
  CL_OP_GATED_NORM = 25,
  // out[T, n] = scan of a gated delta net. in = (q, k, v): q and k have kv_heads heads of k columns each, v has `heads`
  // heads of head_dim columns. aux[T, 2 heads] = (update rates, decays), before their activation functions. `layer` has
  // the states: float32 [heads, head_dim / p, k, p], where p is 32 if 32 divides head_dim, else 16. weight: logarithms
  // of the decay rates, bias: added to the decays; both float32 [heads]
  CL_OP_DELTA_SCAN = 26,
  // Waits until all processes of cl_program.comm have come to this operation. What they wrote to shared buffers before is
  // then visible to all. Without a communicator it does nothing
  CL_OP_GATHER = 27,
};
enum {
  CL_PACKED = 1,     // the weight is packed
  CL_POSITIONS = 2,  // EMBED: the rows are `positions` in place of token_ids
  CL_GATED = 8,      // SHORT_CONV: the input is (b, c, x)
  CL_SILU = 16,      // SHORT_CONV: silu of the sum
  CL_NORM_FIRST = 32,  // GATED_NORM: rms_norm(in) * silu(aux)
  // ATTENTION: not causal. A query attends to its whole sequence; with a window, to the tokens nearer than `window`
  CL_BOTH_WAYS = 64,
  // ATTENTION: rows whose block tables have equal blocks do not read them together. The result is the same, bit for bit;
  // only tests and benchmarks use this flag
  CL_APART = 256,
  CL_SIGMOID_GATE = 128,  // GATED_NORM: sigmoid(aux) in place of silu(aux)
  // EMBED: the weight has the rows of the ids from `window` to `window` + n - 1; rows of other tokens are not written
  CL_OWN_ROWS = 512,
  CL_ALL_HEADS = 4,  // HEADS: one norm over all heads of q together, and one over all heads of k
};
enum cl_activation { CL_NONE = 0, CL_GELU = 1, CL_GELU_TANH = 2, CL_RELU = 3, CL_RELU_SQUARED = 4 };

// Scores of experts from logits: softmax over all experts, softmax over the chosen experts, or sigmoid of each logit. A
// router with groups divides the experts into groups of neighbours. The score of a group is the sum of its two highest
// scores, or its highest score.
enum cl_scoring { CL_SOFTMAX = 0, CL_SOFTMAX_CHOSEN = 1, CL_SIGMOID = 2 };
enum cl_group_score { CL_BEST_TWO = 0, CL_BEST = 1 };
enum { CL_EXPERT_TOKENS = 512 };  // maximum number of tokens that are routed together

// Settings and weights of a mixture-of-experts layer. The weights of the experts are one after another in memory. The
// operation's `weight` has n columns of gate and up per expert in alternating panels. The operation's `bias` has the
// same order and may be null. `down` multiplies the activations, which are silu(gate) * up. With a limit above 0 they
// are gate * sigmoid(alpha * gate) * (up + 1), with gate <= limit and -limit <= up <= limit (gpt-oss). With activation
// CL_RELU_SQUARED there is no gate: `weight` has n columns of up per expert, and the activations are max(0, up)^2. Of
// two experts with equal scores, the one with the lower index is chosen.
typedef struct {
  int32_t num_experts, top_k, inner;  // inner: number of columns of `down`'s input, without padding
  int32_t scoring, normalise, groups, kept_groups, group_score;
  int32_t down_format, down_group;    // number format of `down` and its group size in k
  float epsilon, scale;               // epsilon: added to the sum of the weights; scale: factor of the weights
  float alpha, limit;                 // limit 0: no clamp
  int32_t activation;                 // cl_activation: CL_NONE (gated) or CL_RELU_SQUARED
  int32_t routed_k;                   // 0: the router reads `in`. Else it reads aux, which has routed_k columns
  // Columns that this process computes, if several processes share the layer. `weight` then has the n columns per expert
  // that belong to the columns of the activations from inner_first on. `down` has down_n columns per expert, and `out`
  // and aux begin at the first of them
  int32_t down_n, inner_first;
  const void* router;                 // [E, k] or [E, routed_k], padded with zeros, in the program's dtype
  const float* correction;            // [E]: added to the scores when experts are chosen, not to their weights; or null
  const void* shared_gate;            // [k], padded: aux is multiplied by sigmoid(in @ shared_gate); or null
  const void* down;                   // packed panels
  const float* router_bias;           // [E]: added to the router's logits; or null
  const float* down_bias;             // per expert, padded to whole panels; or null
  void* scratch;                      // memory of cl_expert_bytes(...) bytes
  // Memory that several processes share, for the activations of which each computes a part: [rows, inner], with as many
  // rows as in `scratch`, see ExpertScratch. Null: this process computes all
  void* shared_inner;
  int64_t* load;                      // [E]: counts the tokens of each expert over all steps; or null
  // cl_program.lora_stride, or 0 if no adapter may change the experts. From the operation's `site` on, cl_program.lora
  // has E columns for `weight`, E for `down`, one for the router and one for the gate of the shared expert
  int64_t lora_stride;
} cl_experts;

// One fused operation of a step program. Its kind says which fields it uses.
typedef struct {
  int32_t kind, flags;
  int32_t in, out, aux;   // buffer indices
  int32_t n, k;           // n: output columns, gate and up counted separately; k: input columns
  int32_t format, group;  // cl_format of the weight, and its group size in k
  int32_t layer;          // KV layer (QKV, ATTENTION)
  int32_t rotary;         // rotary table (ROTARY, QKV); -1: no rotation
  int32_t heads, kv_heads, head_dim;
  int32_t window;         // ATTENTION: maximum number of tokens that a query attends to, itself included; 0: all
  int32_t site;           // matmuls: 1 + the operation's column in cl_program.lora; 0: no adapter changes this matmul
  // MAMBA_SCAN, DELTA_SCAN: the heads that this process computes, if several processes share the scan. `layer` has their
  // states, and `out` begins at the columns of the first. own_heads 0: all
  int32_t first_head, own_heads;
  float eps, scale;       // scale 0 means 1
  // If above 0, each attention score or logit s becomes cap * tanh(s / cap) before masks are applied. 0: no cap
  float cap;
  const void* weight;     // matmuls: packed panels, see cl_pack
  const float* bias;      // float32 in packed column order, padded to whole panels; or null
  const float* q_norm;    // float32 [head_dim], with CL_ALL_HEADS [heads * head_dim]; or null
  const float* k_norm;    // float32 [head_dim], with CL_ALL_HEADS [kv_heads * head_dim]; or null
  const cl_experts* experts;  // for EXPERTS
  // ATTENTION: float32 [heads], the attention sinks, or null. A sink is one more logit in a head's softmax, without a
  // value
  const float* sinks;
} cl_op;

// KV cache of one layer, or (CL_KV_STATE) the states of one recurrent layer.
//
// CL_KV_PLAIN: the cache has a piece for each block, KV head and 16 tokens. A piece is K as [head_dim / P][16][P]
// elements, then V as [16 / P][head_dim][P], with P = 2 in bf16 and 1 in float32. So attention multiplies K and V
// without a transposition, and the hardware prefetcher, when it has read K, reads on into V.
//
// CL_KV_INT8: a piece has four parts: codes of K as uint8 [head_dim / 2][16][2]; float32 scales [16] and minima [16] of
// K; codes of V as uint8 [head_dim / 16][16 tokens / 2][16][2]; float32 scales [16] and minima [16] of V. A number is
// minimum + scale * code. Each token and head has its own scale and minimum, so that a token's stored numbers do not
// depend on other tokens. A scale of NaN means that a number of this token and head was not finite.
//
// CL_KV_STATE: each block is one state of `head_dim` bytes. Each entry of a block table covers `block_size` positions,
// and its block has the state after the newest token at these positions.
enum cl_kv_kind { CL_KV_PLAIN = 0, CL_KV_INT8 = 1, CL_KV_STATE = 2 };
typedef struct {
  void* kv;
  int32_t group;          // index of the cache group, whose block tables and slot mapping this layer uses
  int32_t kv_heads, head_dim, block_size;
  int64_t num_blocks;
  int32_t kind;           // cl_kv_kind
  int32_t reserved;
} cl_kv_layer;

// Change of one matmul by one adapter. The matmul's result before bias, activation and everything that follows becomes
// gains * (x @ w.T + (x @ a.T) @ b.T) + offsets. `w` is the matmul's weight, or `whole` if that is not null. a and b are
// LoRA's matrices (Hu et al., 2021), gains are those of DoRA (Liu et al., 2024). Matrices are packed panels in the
// program's dtype; x @ a.T is rounded to that dtype. `gains` and `offsets` have the order of the packed columns.
typedef struct {
  const void* a;          // [rank, k]; null: no matrices a and b
  const void* b;          // [n, rank], its columns in the order of the matmul's weight
  // Two numbers for each panel of n, (first, count): in this panel of b, only the `count` ranks from `first` on have
  // numbers other than zero. Both numbers are even
  const int32_t* slices;
  const void* whole;      // [n, k]; or null. Of an expert's router and of a shared expert's gate: rows as in cl_experts
  const float* gains;     // float32, padded to whole panels; or null
  const float* offsets;   // float32, padded to whole panels; or null
  int32_t rank;           // a multiple of 32
  int32_t used;           // 0: this adapter does not change the matmul
} cl_lora;

// Change of the embedding table [n, k] by one adapter: the row of a token is the row of `table`, or of `rows` if `index`
// has one for the token, or else of the embedding's own weight. Then a[token] @ b is added. Tables are in the program's
// dtype, a and b in float32.
typedef struct {
  const void* table;      // [n, k]; or null
  const int32_t* index;   // [n]: row of `rows`, or negative; or null
  const void* rows;       // [*, k]
  const float* a;         // [n, rank]; or null
  const float* b;         // [rank, k padded to 32]
  int32_t rank;
  int32_t reserved;
} cl_embedding;

// A communicator: processes that run programs with the same operations, each with its own columns of the weights.
typedef struct cl_comm cl_comm;

// A step program: the operations of a model, in order, and the memory that they use.
typedef struct {
  const cl_op* ops;
  void* const* buffers;
  // For each buffer, the number of elements from one row to the next: a multiple of 32. Padding columns are zero
  const int64_t* strides;
  float* const* rotary;          // tables [capacity, head_dim]: cosines, then sines
  const cl_kv_layer* kv_layers;
  int32_t num_ops, num_buffers, num_rotary, num_kv_layers;
  int32_t dtype, isa;
  int32_t capacity;              // rows of every buffer
  int32_t num_sites;             // number of matmuls that adapters can change
  void* codes;                   // scratch [capacity, cl_code_bytes(largest k)] if a weight is not CL_DENSE; or null
  const cl_lora* lora;           // [adapters, num_sites], or null
  void* lora_rows;               // scratch [capacity, lora_stride] float32, if there are adapters
  int64_t lora_stride;           // at least the largest rank plus 16
  const cl_embedding* embeddings;  // [adapters], or null
  cl_comm* comm;                 // processes that run the program together, or null
} cl_program;

// One step: N rows with T tokens in total. A row has the tokens of one sequence that this step computes.
typedef struct {
  const int32_t* token_ids;      // [T]
  const int32_t* positions;      // [T]
  const int32_t* cu_seqlens;     // [N + 1]: index of each row's first token, then T
  const int32_t* seq_lens;       // [N]: length of each row's sequence in tokens, including the tokens of this step
  const int32_t* block_tables;   // [groups, N, table_width]: block ids of each sequence
  const int64_t* slot_mapping;   // [groups, T]: where K and V are written: block id * block size + index in the block
  // [3, T]: positions in time, height and width, for rotary embeddings with axes; or null if all three are `positions`
  const int32_t* axes;
  // [T]: index of each token's adapter in cl_program's table `lora`, negative without one; or null if no token has one
  const int32_t* adapters;
  // Number of leading positions of its sequence that each token may attend to, [T]. It is larger than the token's
  // position plus one inside an image that attends both ways, never decreases within a row, and is at most the row's
  // seq_lens. Null if every token is causal
  const int32_t* seen_ends;
  int32_t num_tokens, num_rows, num_groups, table_width;
} cl_batch;

// Sampling parameters and results of one row. A pointer may be null if its count is zero.
typedef struct {
  uint64_t seed;
  double top_p;                  // 1: off
  const int32_t* history;        // token ids of the prompt, then of the output so far
  const int32_t* allowed;        // if num_allowed > 0, only these ids may be sampled
  const int32_t* bias_ids;
  const float* bias;
  const int32_t* masked;         // ids that must not be sampled
  const uint32_t* mask_bits;     // mask of a grammar: bit i % 32 of word i / 32 is set if id i is allowed; or null
  int32_t* top_ids;              // out [1 + num_logprobs]: the token, then the most likely ones
  float* top_logprobs;           // out, same order
  int32_t history_len, num_prompt_tokens;
  int32_t num_allowed, num_bias, num_masked;
  int32_t position;              // of the new token
  int32_t top_k;                 // 0: off
  int32_t num_logprobs;          // number of most likely ids to report; -1: report no log-probabilities
  int32_t target;                // >= 0: draw no token, report the log-probability of this id
  float temperature;             // 0: greedy
  float min_p;                   // 0: off
  float repetition, presence, frequency;  // 1, 0, 0: off
  int32_t token;                 // out: the sampled id; -1 if status is not CL_SAMPLED
  int32_t status;                // out: a cl_sample_status
  int32_t rank;                  // out, if log-probabilities are reported: 1 + number of ids more likely than token
  int32_t reserved;
} cl_sampling_row;

enum cl_sample_status {
  CL_SAMPLED = 0,
  CL_RAW_NAN = 1,       // a logit of the model is NaN
  CL_RAW_INF = 2,       // a logit of the model is +inf
  CL_RAW_NONE = 3,      // every logit of the model is -inf
  CL_SHAPED_NONE = 4,   // after masks and bias, every logit is -inf
  CL_SHAPED_INF = 5,    // after bias, penalties and temperature, a logit is +inf or NaN
};

typedef struct cl_pool cl_pool;

CL_EXPORT int32_t cl_abi_version(void);
// Sizes of cl_op, cl_kv_layer, cl_program, cl_batch, cl_sampling_row, cl_experts, cl_lora, cl_embedding.
CL_EXPORT void cl_struct_sizes(int64_t sizes[8]);
// Bit i is set if this processor, operating system and build can run instruction-set path i (a cl_isa).
CL_EXPORT int32_t cl_supported_isas(void);
// Bit i is set if this build contains instruction-set path i. The processor may be unable to run it.
CL_EXPORT int32_t cl_built_isas(void);

// Returns zeroed memory on huge pages, aligned to 2 MiB, or null if there is none. The system allocates each page when
// it is first used.
CL_EXPORT void* cl_alloc(size_t bytes);
CL_EXPORT void cl_free(void* memory, size_t bytes);
// Releases the pages of a file mapping from memory. The next access reads them from the file again.
CL_EXPORT void cl_release_pages(const void* memory, size_t bytes);

// Creates a pool of n threads: the caller of a run is thread 0; threads 1 to n - 1 sleep between runs. If `pin` is not
// 0, each thread is pinned to one of the processors that the process may use. Returns null on failure.
CL_EXPORT cl_pool* cl_pool_create(int32_t num_threads, int32_t pin);
CL_EXPORT void cl_pool_destroy(cl_pool* pool);

// Packs rows [first_row, first_row + rows) of a weight: row r becomes column r % 32 of panel first_panel + r / 32 *
// panel_step. A panel is [k / P][32][P], with P = 2 in bf16 and 1 in float32. src has the rows, src_stride elements
// apart.
CL_EXPORT void cl_pack(void* packed, int32_t dtype, int64_t k, int64_t first_row, int64_t rows, int64_t first_panel,
                       int64_t panel_step, const void* src, int64_t src_stride);

// Packs rows of a weight whose format is not CL_DENSE. A panel has for each group: 32 scales, and 32 minimums if the
// format has them, as float16 times CL_SCALE_UNIT; then the codes. Codes of 8 bits are [group / 4][32][4]. Codes of 4
// bits are [group / 8][32][4] bytes: of each eight k, the first four are in the low halves of four bytes, the last four
// in the high halves. `codes` has one code per byte, and codes_stride bytes per row. scales and minimums are float16
// already times CL_SCALE_UNIT, scales_stride per row.
CL_EXPORT void cl_pack_codes(void* packed, int32_t format, int32_t group, int64_t k, int64_t first_row, int64_t rows,
                             int64_t first_panel, int64_t panel_step, const uint8_t* codes, int64_t codes_stride,
                             const uint16_t* scales, const uint16_t* minimums, int64_t scales_stride);
// Bytes of a packed weight with n columns whose format is not CL_DENSE.
CL_EXPORT int64_t cl_packed_code_bytes(int32_t format, int32_t group, int64_t n, int64_t k);
// Bytes of an activation row of k numbers rounded to 8 bits; enough for every instruction-set path.
CL_EXPORT int64_t cl_code_bytes(int64_t k);
// Bytes of scratch for an operation of kind EXPERTS in a program of `dtype`, for steps of at most `tokens` tokens.
CL_EXPORT int64_t cl_expert_bytes(const cl_op* op, int32_t dtype, int32_t tokens);

// Runs the operations from first_op up to the next CL_OP_CALL, or to the end. Returns the index of the first operation
// that was not run, -1 if an argument is invalid or memory is short, or -2 if another process of the communicator has
// ended or does not answer.
CL_EXPORT int32_t cl_run(cl_pool* pool, const cl_program* program, const cl_batch* batch, int32_t first_op);

// Output head: multiplies the R = num_rows rows token_rows of `hidden` (`stride` elements apart) by the weight [n, k]
// of `product`, and samples one of n token ids for each row. Of `product` only n, k, format, group, weight, bias, cap
// and site are used. adapters [R]: index of each row's adapter in cl_program's table `lora`, negative without one; or
// null. logits: float32 scratch [number of rows for which cl_needs_logits is true, n rounded up to a multiple
// of 32]; or null if there is no such row. Returns 0, or -1 if an argument is invalid or memory is short.
CL_EXPORT int32_t cl_head(cl_pool* pool, const cl_program* program, const void* hidden, int64_t stride,
                          const int32_t* token_rows, const int32_t* adapters, int32_t num_rows, const cl_op* product,
                          cl_sampling_row* rows, float* logits, int64_t logits_rows);
// Logits alone: as cl_head, but the rows' logits are stored in logits [num_rows, logits_stride] for a later cl_sample,
// which then gives the results of cl_head. The weight may have a part of the vocabulary's rows; `logits` then points to
// the column of its first row. If n is not a multiple of 32, the columns up to the next multiple are written, too.
CL_EXPORT int32_t cl_logits(cl_pool* pool, const cl_program* program, const void* hidden, int64_t stride,
                            const int32_t* token_rows, const int32_t* adapters, int32_t num_rows, const cl_op* product,
                            float* logits, int64_t logits_stride);
// 1 if sampling this row needs all its logits in memory. For other rows the token is chosen while the logits are
// computed.
CL_EXPORT int32_t cl_needs_logits(const cl_sampling_row* row);
// Samples from given logits [num_rows, stride], for tests and for logits that another program computed.
CL_EXPORT int32_t cl_sample(cl_pool* pool, const float* logits, int64_t stride, int32_t num_rows, int32_t vocab,
                            cl_sampling_row* rows, int32_t isa);

// Processes that run programs together, at most 64. `shared` is memory of cl_comm_bytes() bytes that all of them have
// mapped, zero at first. `lives` are sockets whose other ends belong to processes of the group: when such a process ends,
// every wait ends. A process that lets the others wait for longer than `patience` seconds counts as ended. Returns null
// on failure. Functions that wait return 0, or -2 after such an end or after cl_comm_end.
CL_EXPORT int64_t cl_comm_bytes(void);
CL_EXPORT cl_comm* cl_comm_create(void* shared, int32_t rank, int32_t size, const int32_t* lives, int32_t num_lives,
                                  double patience);
CL_EXPORT void cl_comm_destroy(cl_comm* comm);
// Waits until every rank has called it as often as this one: the operation GATHER.
CL_EXPORT int32_t cl_comm_meet(cl_comm* comm);
// Messages of rank 0, of which the caller keeps the content in shared memory. Rank 0 waits until all have read the last
// one, writes the next, and sends. The other ranks wait for a message, without a limit of time, copy it, and say that it
// is read.
CL_EXPORT int32_t cl_comm_wait_for_readers(cl_comm* comm);
CL_EXPORT void cl_comm_send(cl_comm* comm);
CL_EXPORT int32_t cl_comm_wait_for_message(cl_comm* comm);
CL_EXPORT void cl_comm_read(cl_comm* comm);
// Returns -2 if this rank knows that another has ended, otherwise 0. Any thread may call it.
CL_EXPORT int32_t cl_comm_ended(const cl_comm* comm);
// Ends every wait of all ranks, now and in the future.
CL_EXPORT void cl_comm_end(cl_comm* comm);
// Rank 0, between two steps: looks whether the others live. Returns -2 if one has ended, or if one that should wait for a
// message has shown no sign of life for `patience` seconds in which this function was called at least every 2 seconds.
CL_EXPORT int32_t cl_comm_look(cl_comm* comm);
// Seconds that this rank has waited for others in meetings, and number of meetings.
CL_EXPORT double cl_comm_waited(const cl_comm* comm);
CL_EXPORT int64_t cl_comm_meetings(const cl_comm* comm);

// Measured limits of this machine. cl_measure_read: bytes/s at which all threads together read `bytes` bytes of memory.
// cl_measure_peak: operations/s of the fastest multiply-add instruction of an instruction-set path for a cl_product. 0 if
// the build, the processor or the path has none.
CL_EXPORT double cl_measure_read(cl_pool* pool, const void* memory, size_t bytes);
CL_EXPORT double cl_measure_peak(cl_pool* pool, int32_t isa, int32_t product, double seconds);

#ifdef __cplusplus
}
#endif
