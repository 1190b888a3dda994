// A mixture-of-experts layer (Shazeer et al., 2017). A router chooses experts for each token. Rows are sorted by
// expert, and each group of rows is multiplied by its expert's weights, as in MegaBlocks (Gale et al., 2022). Then each
// token adds the results of its experts in the order of its choice. So a token's result does not depend on the other
// tokens of its experts.
#pragma once
#include <type_traits>

#include "comm.h"
#include "linear.h"

namespace CL_NS {

// Scratch memory for the tokens that are routed together, used by all threads. A barrier separates writes from reads. A
// "row" is one (token, chosen expert) pair. A "part" is an expert that at least one token chose.
struct ExpertScratch {
  int64_t rows;           // number of rows: tokens times top_k
  float* logits;          // [tokens, E], then scores
  int32_t* chosen;        // [tokens, top_k]: chosen experts, best first
  float* weights;         // [tokens, top_k]: factors of the chosen experts' results
  int32_t* place;         // [tokens, top_k]: index of the pair's row, when rows are sorted by expert
  int32_t* token;         // [rows]: token of each row
  int32_t* expert;        // [parts]: the expert of each part, ascending
  int32_t* first_row;     // [parts + 1]: first row of each part, then the number of rows
  int32_t* counts;        // [2]: number of parts; number of rows of the largest part
  void* gathered;         // [rows, k]: inputs sorted by expert, in the form that the multiplication reads
  void* inner;            // [rows, I]: activations between the two matmuls of an expert; perhaps shared with processes
  void* inner_codes;      // inner rounded to 8 bits, if `down` is in codes
  float* results;         // [rows, D]: results of the experts, of this process's columns
  int64_t* change;        // [rows]: number of the adapter's change of `weight` in cl_program.lora, or -1; if there are adapters
  void* low;              // [rows, lora_stride]: products with the adapters' matrices a
  int64_t row_stride, inner_stride, result_stride;

  // Sets the pointers of `s` to parts of the memory at `at`, and returns the number of bytes that they need. `at` may
  // be null. As in program buffers, the distance between rows is not a multiple of 1 KiB.
  static size_t lay_out(ExpertScratch& s, char* at, int item, const cl_op& op, int tokens) {
    const cl_experts& experts = *op.experts;
    size_t bytes = 0;
    const auto take = [&](size_t size) {
      void* here = at ? at + bytes : nullptr;
      bytes += (size + 63) / 64 * 64;
      return here;
    };
    const auto stride = [&](int64_t width) { return padded(width) + (padded(width) * item % 1024 == 0 ? 512 / item : 0); };
    const size_t E = experts.num_experts, rows = size_t(tokens) * experts.top_k, more = rows + MAX_ROW_BLOCK;
    s.rows = int64_t(rows);
    s.row_stride = stride(op.k), s.inner_stride = stride(experts.inner), s.result_stride = padded(experts.down_n);
    s.logits = static_cast<float*>(take(tokens * E * sizeof(float)));
    s.chosen = static_cast<int32_t*>(take(rows * sizeof(int32_t)));
    s.weights = static_cast<float*>(take(rows * sizeof(float)));
    s.place = static_cast<int32_t*>(take(rows * sizeof(int32_t)));
    s.token = static_cast<int32_t*>(take(rows * sizeof(int32_t)));
    s.expert = static_cast<int32_t*>(take((E + 1) * sizeof(int32_t)));
    s.first_row = static_cast<int32_t*>(take((E + 1) * sizeof(int32_t)));
    s.counts = static_cast<int32_t*>(take(2 * sizeof(int32_t)));
    const size_t plain = s.row_stride * item, codes = op.format == CL_DENSE ? 0 : size_t(cl_code_bytes(op.k));
    s.gathered = take(more * (plain > codes ? plain : codes));
    s.inner = experts.shared_inner ? experts.shared_inner : take(more * s.inner_stride * item);
    s.inner_codes = take(experts.down_format == CL_DENSE ? 0 : more * size_t(cl_code_bytes(experts.inner)));
    s.results = static_cast<float*>(take(rows * s.result_stride * sizeof(float)));
    s.change = static_cast<int64_t*>(take(experts.lora_stride ? rows * sizeof(int64_t) : 0));
    s.low = take(more * size_t(experts.lora_stride) * sizeof(float));
    return bytes;
  }
};

// Dot product of `size` (a multiple of 16) elements, summed in a fixed order in four chains.
template <typename T>
CL_INLINE float dot(const T* a, const T* b, int64_t size) {
  vf sum[4] = {vset(0.0f), vset(0.0f), vset(0.0f), vset(0.0f)};
  for (int64_t i = 0; i < size; i += LANES) sum[i / LANES % 4] = vfma(vload(a + i), vload(b + i), sum[i / LANES % 4]);
  return vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3])));
}

// Index of the highest score of scores[0, count) among those that are not `taken`. Of equal scores it is the first. A
// NaN is chosen only if it is the first score that is not taken.
static int best_of(const float* scores, int count, const bool* taken) {
  int best = -1;
  for (int i = 0; i < count; i++)
    if (!taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
  return best;
}

enum { MOST_EXPERTS = 4096 };

// Turns the router's logits of one token into scores in place. Exponentials are computed in double, so that scores are
// equal on every instruction set.
static void score(const cl_experts& experts, float* logits) {
  const int E = experts.num_experts;
  if (experts.scoring == CL_SIGMOID) {
    for (int e = 0; e < E; e++) logits[e] = float(1.0 / (1.0 + exp(-double(logits[e]))));
  } else if (experts.scoring == CL_SOFTMAX) {
    double highest = logits[0], sum = 0.0;
    for (int e = 1; e < E; e++) highest = logits[e] > highest ? double(logits[e]) : highest;
    for (int e = 0; e < E; e++) sum += exp(logits[e] - highest);
    for (int e = 0; e < E; e++) logits[e] = float(exp(logits[e] - highest) / sum);
  }
}

// Chooses the experts of one token from the router's logits, which are in `scores`. Writes their indices to `chosen`,
// best first, and the factors of their results to `weights`.
static void choose_experts(const cl_experts& experts, float* scores, int32_t* chosen, float* weights) {
  const int E = experts.num_experts, K = experts.top_k, groups = experts.groups, size = E / groups;
  bool taken[MOST_EXPERTS] = {};
  float choice[MOST_EXPERTS];
  score(experts, scores);
  for (int e = 0; e < E; e++) choice[e] = experts.correction ? scores[e] + experts.correction[e] : scores[e];
  if (groups > 1) {
    bool kept[MOST_EXPERTS] = {};
    float totals[MOST_EXPERTS];
    for (int g = 0; g < groups; g++) {
      const float* inside = choice + g * size;
      bool* used = taken + g * size;
      const int first = best_of(inside, size, used);
      totals[g] = inside[first];
      if (experts.group_score == CL_BEST_TWO) {
        used[first] = true;
        totals[g] += inside[best_of(inside, size, used)];
        used[first] = false;
      }
    }
    for (int i = 0; i < experts.kept_groups; i++) kept[best_of(totals, groups, kept)] = true;
    for (int e = 0; e < E; e++) taken[e] = !kept[e / size];
  }
  for (int j = 0; j < K; j++) {
    chosen[j] = best_of(choice, E, taken);
    taken[chosen[j]] = true;
    weights[j] = scores[chosen[j]];
  }
  if (experts.scoring == CL_SOFTMAX_CHOSEN) {
    double sum = 0.0;
    const double highest = weights[0];
    for (int j = 0; j < K; j++) sum += exp(weights[j] - highest);
    for (int j = 0; j < K; j++) weights[j] = float(exp(weights[j] - highest) / sum);
  }
  float total = weights[0];
  for (int j = 1; j < K; j++) total += weights[j];
  for (int j = 0; j < K; j++) {
    if (experts.normalise) weights[j] /= total + experts.epsilon;
    if (experts.scale != 1.0f) weights[j] *= experts.scale;
  }
}

// Sorts the (token, chosen expert) pairs by expert, and counts the tokens of each expert.
static void group_rows(const cl_experts& experts, const ExpertScratch& s, int tokens) {
  int32_t begin[MOST_EXPERTS + 1] = {};
  const int64_t rows = int64_t(tokens) * experts.top_k;
  for (int64_t i = 0; i < rows; i++) begin[s.chosen[i] + 1]++;
  int parts = 0, most = 0;
  for (int e = 0; e < experts.num_experts; e++) {
    const int count = begin[e + 1];
    if (experts.load) experts.load[e] += count;
    most = count > most ? count : most;
    begin[e + 1] += begin[e];
    if (count == 0) continue;
    s.expert[parts] = e;
    s.first_row[parts++] = begin[e];
  }
  s.first_row[parts] = int32_t(rows);
  s.counts[0] = parts, s.counts[1] = most;
  for (int64_t i = 0; i < rows; i++) {
    const int32_t place = begin[s.chosen[i]]++;
    s.place[i] = place;
    s.token[place] = int32_t(i / experts.top_k);
  }
}

// Index of the last element of first[0, count) that is at most `value`. The elements ascend, and first[0] <= value.
static int last_up_to(const int32_t* first, int count, int32_t value) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first[middle] <= value ? low : high) = middle;
  }
  return low;
}

// The expert that computes row number `row`, where the rows of all tokens are sorted by expert.
static int expert_of(const ExpertScratch& s, int row) { return s.expert[last_up_to(s.first_row, s.counts[0], row)]; }

// Items of work for gemm_items: the matrix multiplications of all experts in use, one expert after another.
template <typename Row, typename Weight>
struct ExpertItems {
  enum { SUPER = Blocking<Row, Weight>::SUPER };
  const Panels<Weight>& weight;  // weight of the first expert
  const ExpertScratch& s;
  const int chunks;
  int32_t first_super[MOST_EXPERTS + 1];

  ExpertItems(const Panels<Weight>& weight, const ExpertScratch& s, int chunk)
      : weight(weight), s(s), chunks((weight.count + chunk - 1) / chunk) {
    first_super[0] = 0;
    for (int p = 0; p < parts(); p++)
      first_super[p + 1] = first_super[p] + (s.first_row[p + 1] - s.first_row[p] + SUPER - 1) / SUPER;
  }
  int parts() const { return s.counts[0]; }
  int most_rows() const { return s.counts[1]; }
  int64_t count() const { return int64_t(first_super[parts()]) * chunks; }
  GemmItem<Weight> at(int64_t item) const {
    const int32_t super = int32_t(item / chunks);
    const int low = last_up_to(first_super, parts(), super);
    GemmItem<Weight> found{weight, s.first_row[low], s.first_row[low + 1] - s.first_row[low], int(item % chunks),
                           super - first_super[low], first_super[low + 1] - first_super[low]};
    found.weight.data = weight.panel(int64_t(s.expert[low]) * weight.count);
    return found;
  }

  // Number of panels in a chunk of the experts' weight, which a thread takes as one item. It is a multiple of `unit`,
  // because the results of `unit` panels belong together.
  static int chunk_of(Panels<Weight> weight, const ExpertScratch& s, int unit, int threads) {
    const int parts = s.counts[0], mean = (s.first_row[parts] + parts - 1) / parts;
    weight.count *= parts;
    return chunk_panels<Row>(weight, unit, mean, threads);
  }
};

// Epilogue: adds an expert's bias, if there is one, and applies the gate. `columns`: number of biases per expert.
template <typename T, typename Gate>
struct StoreGatedExpert {
  const ExpertScratch& s;
  StoreGated<T, Gate> store;
  int64_t columns;

  void fetch(int row0, int rows, int panel) const { store.fetch(row0, rows, panel); }

  void operator()(int row0, int rows, int panel0, int panels, const float* tile, int64_t tile_stride) const {
    StoreGated<T, Gate> own = store;
    if (own.bias) own.bias += expert_of(s, row0) * columns;
    own(row0, rows, panel0, panels, tile, tile_stride);
  }
};

// Epilogue of experts without a gate: adds the expert's bias, if there is one, then max(0, x)^2.
template <typename T>
struct StoreSquaredExpert {
  const ExpertScratch& s;
  const float* bias;
  int64_t columns, first;  // `first`: first column of the activations that this process computes

  T* row(int number, int panel) const {
    return static_cast<T*>(s.inner) + number * s.inner_stride + first + int64_t(panel) * CL_PANEL;
  }

  void fetch(int row0, int rows, int panel) const { fetch_to_write(row(row0, panel), s.inner_stride, rows); }

  void operator()(int row0, int rows, int panel0, int panels, const float* tile, int64_t tile_stride) const {
    const float* own = bias ? bias + expert_of(s, row0) * columns + int64_t(panel0) * CL_PANEL : nullptr;
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < panels * CL_PANEL; c += LANES) {
        vf x = vload(tile + r * tile_stride + c);
        if (own) x = vadd(x, vload(own + c));
        x = vmax(vset(0.0f), x);
        vstore(row(row0 + r, panel0) + c, vmul(x, x));
      }
  }
};

// Epilogue: adds the bias of an expert to its sums, if there is one, and stores the sums in `results`.
struct StoreSums {
  const ExpertScratch& s;
  const float* bias;
  int64_t columns;

  float* row(int number, int panel) const { return s.results + number * s.result_stride + int64_t(panel) * CL_PANEL; }

  void fetch(int row0, int rows, int panel) const { fetch_to_write(row(row0, panel), s.result_stride, rows); }

  void operator()(int row0, int rows, int panel0, int panels, const float* tile, int64_t tile_stride) const {
    const float* own = bias ? bias + expert_of(s, row0) * columns + int64_t(panel0) * CL_PANEL : nullptr;
    for (int r = 0; r < rows; r++) {
      float* to = row(row0 + r, panel0);
      const float* from = tile + r * tile_stride;
      if (own)
        for (int c = 0; c < panels * CL_PANEL; c += LANES) vstore(to + c, vadd(vload(from + c), vload(own + c)));
      else
        memcpy(to, from, sizeof(float) * panels * CL_PANEL);
    }
  }
};

template <typename Row, typename Weight, typename Epilogue>
static void expert_products(cl_pool& pool, int thread, const Panels<Weight>& weight, const ExpertScratch& s, int unit,
                            const Source<Row, Weight>* rows, int64_t stride, GemmScratch<Row>& scratch, const Epilogue& epilogue) {
  typedef ExpertItems<Row, Weight> Items;
  const int chunk = Items::chunk_of(weight, s, unit, pool.num_threads());
  const Items items(weight, s, chunk);
  gemm_items<Row>(pool, thread, rows, stride, items, weight, chunk, scratch, epilogue, NOTHING, static_cast<KVAhead<Row>*>(nullptr));
}

// Writes the number of the adapter's change of each row to s.change.
static void find_changes(const cl_op& op, const cl_program& program, const cl_batch& batch, const ExpertScratch& s, int first) {
  for (int row = 0; row < s.rows; row++) {
    const int32_t adapter = batch.adapters[first + s.token[row]];
    s.change[row] = adapter < 0 ? -1 : int64_t(adapter) * program.num_sites + op.site - 1 + expert_of(s, row);
  }
}

// The router's weight, or the shared expert's gate, for token number `t` of the step: `own`, or that of the token's
// adapter. `column`: its column among those of the layer of experts in cl_program.lora.
static const void* of_adapter(const void* own, const cl_op& op, const cl_program& program, const cl_batch& batch, int t, int column) {
  if (!batch.adapters || !op.site || batch.adapters[t] < 0) return own;
  const void* changed = program.lora[int64_t(batch.adapters[t]) * program.num_sites + op.site - 1 + column].whole;
  return changed ? changed : own;
}

// For each token: out = weighted sum of its experts' results, best expert first, plus aux times the shared gate.
template <typename Row>
static void sum_experts(const cl_op& op, const cl_program& program, const cl_batch& batch, const ExpertScratch& s, int first,
                        Share share) {
  const cl_experts& experts = *op.experts;
  const int64_t in_stride = program.strides[op.in], out_stride = program.strides[op.out];
  for (int t = share.begin; t < share.end; t++) {
    const Row* x = static_cast<const Row*>(program.buffers[op.in]) + (first + t) * in_stride;
    Row* out = static_cast<Row*>(program.buffers[op.out]) + (first + t) * out_stride;
    const Row* shared = op.aux < 0 || experts.routed_k ? nullptr : static_cast<const Row*>(program.buffers[op.aux]) + (first + t) * program.strides[op.aux];
    float gate = 1.0f;
    if (experts.shared_gate) {
      const int column = 2 * experts.num_experts + 1;
      const Row* weight = static_cast<const Row*>(of_adapter(experts.shared_gate, op, program, batch, first + t, column));
      gate = float(1.0 / (1.0 + exp(-double(dot(x, weight, padded(op.k))))));
    }
    const int32_t* place = s.place + int64_t(t) * experts.top_k;
    const float* weights = s.weights + int64_t(t) * experts.top_k;
    for (int64_t i = 0; i < experts.down_n; i += LANES) {
      vf sum = vmul(vset(weights[0]), vload(s.results + place[0] * s.result_stride + i));
      for (int j = 1; j < experts.top_k; j++)
        sum = vfma(vset(weights[j]), vload(s.results + place[j] * s.result_stride + i), sum);
      if (shared) sum = vfma(vset(gate), vload(shared + i), sum);
      vstore(out + i, sum);
    }
    clear_pad(out, experts.down_n);
  }
}

// Waits for the threads, and for the other processes that share the layer. Returns false if one of these has ended.
static bool meet_processes(cl_pool& pool, int thread, const cl_program& program) {
  pool.barrier(thread);
  if (thread == 0) program.comm->meet();
  pool.barrier(thread);
  return !program.comm->left();
}

// If several processes share the layer, each computes some columns of every expert's activations, then, from all
// activations, some columns of every expert's result. So no sum is divided, and each process has as much work whatever
// the router chooses. Returns false, in all threads, if another process has ended.
template <typename Row>
static bool experts(cl_pool& pool, int thread, const cl_op& op, const cl_program& program, const cl_batch& batch,
                    GemmScratch<Row>& scratch) {
  const cl_experts& experts = *op.experts;
  const int E = experts.num_experts, threads = pool.num_threads();
  const int64_t in_stride = program.strides[op.in], router_stride = padded(experts.routed_k ? experts.routed_k : op.k);
  const int routed = experts.routed_k ? op.aux : op.in;
  cl_op down = op;
  down.weight = experts.down, down.format = experts.down_format, down.group = experts.down_group;
  down.n = experts.down_n, down.k = experts.inner;
  const bool shared = experts.shared_inner && program.comm;
  for (int first = 0; first < batch.num_tokens; first += CL_EXPERT_TOKENS) {
    const int left = batch.num_tokens - first, tokens = left < CL_EXPERT_TOKENS ? left : int(CL_EXPERT_TOKENS);
    const Row* in = static_cast<const Row*>(program.buffers[op.in]) + first * in_stride;
    const Row* read = static_cast<const Row*>(program.buffers[routed]) + first * program.strides[routed];
    ExpertScratch s;
    ExpertScratch::lay_out(s, static_cast<char*>(experts.scratch), int(sizeof(Row)), op, tokens);
    // The threads divide (token, expert) pairs, so that all of them work even if there is a single token.
    const Share pairs = share_of(tokens * E, thread, threads);
    for (int i = pairs.begin; i < pairs.end; i++) {
      const Row* router = static_cast<const Row*>(of_adapter(experts.router, op, program, batch, first + i / E, 2 * E));
      s.logits[i] = dot(read + i / E * program.strides[routed], router + i % E * router_stride, router_stride);
      if (experts.router_bias) s.logits[i] += experts.router_bias[i % E];
    }
    pool.barrier(thread);
    const Share share = share_of(tokens, thread, threads);
    for (int t = share.begin; t < share.end; t++)
      choose_experts(experts, s.logits + int64_t(t) * E, s.chosen + t * experts.top_k, s.weights + t * experts.top_k);
    pool.barrier(thread);
    if (thread == 0) group_rows(experts, s, tokens);
    pool.barrier(thread);
    if (shared && first > 0 && !meet_processes(pool, thread, program)) return false;  // they read the tokens before
    const Share rows = share_of(int(s.rows), thread, threads);
    const bool adapted = batch.adapters && op.site && experts.lora_stride;
    if (adapted) {
      if (thread == 0) find_changes(op, program, batch, s, first);
      pool.barrier(thread);
    }
    Left<Row, Row>* low = static_cast<Left<Row, Row>*>(s.low);
    const auto gate_entries = [&](int row) { return s.change[row]; };
    const auto gate_rows = [&](int row) { return in + s.token[row] * in_stride; };
    const Changes<Row, decltype(gate_entries), decltype(gate_rows)> gate_changes{program, gate_entries, gate_rows, op.n, op.k, low};
    const auto down_entries = [&](int row) { return s.change[row] < 0 ? int64_t(-1) : s.change[row] + E; };
    const auto down_rows = [&](int row) { return static_cast<const Row*>(s.inner) + row * s.inner_stride; };
    const Changes<Row, decltype(down_entries), decltype(down_rows)> down_changes{program, down_entries, down_rows, down.n, down.k, low};
    const bool gate_adapted = adapted && low_rank<Row>(pool, thread, gate_changes, int(s.rows), in_stride, scratch);
    with_weight<Row>(op, [&](const auto& weight) {
      typedef std::decay_t<decltype(*weight.data)> Weight;
      Source<Row, Weight>* gathered = static_cast<Source<Row, Weight>*>(s.gathered);
      for (int r = rows.begin; r < rows.end; r++) put_row<Row>(weight, in + s.token[r] * in_stride, s.row_stride, r, gathered);
      const int64_t stride = put_row<Row>(weight, nullptr, s.row_stride, 0, gathered);
      pool.barrier(thread);
      const auto products = [&](const auto& gate) {
        typedef std::decay_t<decltype(gate)> Gate;
        const StoreGated<Row, Gate> store{static_cast<Row*>(s.inner) + experts.inner_first, s.inner_stride, op.bias, gate};
        const StoreGatedExpert<Row, Gate> result{s, store, int64_t(weight.count) * CL_PANEL};
        const WithAdapters<Row, StoreGatedExpert<Row, Gate>, decltype(gate_entries), decltype(gate_rows)> epilogue{
            result, gate_changes, in_stride, scratch, gate_adapted};
        expert_products<Row>(pool, thread, weight, s, 2, gathered, stride, scratch, epilogue);
      };
      if (experts.activation == CL_RELU_SQUARED) {
        const StoreSquaredExpert<Row> result{s, op.bias, int64_t(weight.count) * CL_PANEL, experts.inner_first};
        const WithAdapters<Row, StoreSquaredExpert<Row>, decltype(gate_entries), decltype(gate_rows)> epilogue{
            result, gate_changes, in_stride, scratch, gate_adapted};
        expert_products<Row>(pool, thread, weight, s, 1, gathered, stride, scratch, epilogue);
      } else if (experts.limit > 0.0f)
        products(ClampedGate{experts.alpha, experts.limit});
      else
        products(SiluGate());
    });
    if (!shared) {
      pool.barrier(thread);
    } else if (!meet_processes(pool, thread, program)) {
      return false;
    }
    const bool down_adapted = adapted && low_rank<Row>(pool, thread, down_changes, int(s.rows), s.inner_stride, scratch);
    with_weight<Row>(down, [&](const auto& weight) {
      typedef std::decay_t<decltype(*weight.data)> Weight;
      const bool codes = down.format != CL_DENSE;
      Source<Row, Weight>* inner = static_cast<Source<Row, Weight>*>(codes ? s.inner_codes : s.inner);
      const Row* plain = static_cast<const Row*>(s.inner);
      if (codes) {
        for (int r = rows.begin; r < rows.end; r++) put_row<Row>(weight, plain + r * s.inner_stride, s.inner_stride, r, inner);
        pool.barrier(thread);
      }
      const int64_t stride = put_row<Row>(weight, nullptr, s.inner_stride, 0, inner);
      const StoreSums result{s, experts.down_bias, int64_t(weight.count) * CL_PANEL};
      const WithAdapters<Row, StoreSums, decltype(down_entries), decltype(down_rows)> epilogue{
          result, down_changes, s.inner_stride, scratch, down_adapted};
      expert_products<Row>(pool, thread, weight, s, 1, inner, stride, scratch, epilogue);
    });
    pool.barrier(thread);
    sum_experts<Row>(op, program, batch, s, first, share);
  }
  return true;
}

}  // namespace CL_NS
