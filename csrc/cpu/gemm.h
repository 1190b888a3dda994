// Multiplies activations by a packed weight. A function called epilogue processes each block of results while it is in
// the cache.
#pragma once
#include "grouped.h"
#include "kv_ahead.h"
#include "pool.h"
#include "product.h"
#if defined(CL_USE_AMX)
#include "tiles.h"
#endif
#if defined(CL_TILE_CODES)
#include "tile_codes.h"
#endif

namespace CL_NS {

enum { STREAM_AHEAD = 8192, TILE_COLUMNS = 512, TILE_PAD = 16, MAX_ROW_BLOCK = 32, ROW_UNIT = 16 };

// The rows [begin, end) that one thread computes, if rows are divided evenly among threads.
struct Share {
  int begin, end;
};
CL_INLINE Share share_of(int rows, int share, int shares) {
  return Share{int(int64_t(rows) * share / shares), int(int64_t(rows) * (share + 1) / shares)};
}

// Block sizes for multiplying rows of one type by a weight of another. A thread reads the weight once for each SUPER
// rows. Inside these rows it computes ROW_BLOCK rows at a time, and K_BLOCK elements of k.
// TILE_DEPTH: elements of k of an AMX tile, counted in bf16; 0 if tiles are not used.
template <typename Row, typename Weight>
struct Blocking {
  static constexpr bool FLOAT32 = sizeof(Left<Row, Weight>) == sizeof(float), STREAMS = true;
  static constexpr int TILE_DEPTH = 0;
  static constexpr bool WIDENED = sizeof(Row) < sizeof(Left<Row, Weight>);
  // Multiplying float32 is slow: computing one block of rows takes longer than prefetching the weights for the next
  // block. A piece of a weight (K_BLOCK elements of k) and the rows to multiply stay in L2. Rows that were widened to
  // float32 are used for several panels.
  static constexpr int ROW_BLOCK = FLOAT32 ? MAX_ROW_BLOCK / ROWS * ROWS : int(ROWS), K_BLOCK = FLOAT32 ? 1024 : 4096;
  static constexpr int SUPER = 384;
  static int most_panels(int, int64_t) { return WIDENED ? 4 : 1; }
  // fetching: number of row blocks that prefetch a part of the next data. first_row: first row of block number `block`.
  static int fetching(int blocks) { return blocks < 2 ? 1 : blocks < 4 ? 2 : 4; }
  static int first_row(int rows, int block, int blocks) { return rows * block / blocks; }
};
#if defined(CL_USE_AMX)
// With tiles, 32 rows of 256 k are 16 KiB. They stay in L1 while a part of each panel, also 16 KiB, and the sums are
// read through it. Tiles compute so fast that rows must be used for several panels once they are in L1, especially if k
// is long and the rows come from L3. But panels whose distance is a multiple of 128 KiB compete for the same sets of
// L2, so fewer of them are computed at once.
template <>
struct Blocking<bf16, bf16> {
  static constexpr bool FLOAT32 = false, WIDENED = false, STREAMS = false;
  static constexpr int ROW_BLOCK = TILE_ROWS, K_BLOCK = 256, SUPER = 256, TILE_DEPTH = TILE_K;
  // Tiles compute faster than memory delivers, so all row blocks prefetch. Blocks are whole tiles, because a tile that
  // is half full takes as long as a full one.
  static int fetching(int blocks) { return blocks; }
  static int first_row(int rows, int block, int) { return block * ROW_BLOCK < rows ? block * ROW_BLOCK : rows; }
  static int most_panels(int m, int64_t k) { return m <= 64 ? 1 : k <= 2048 || k % 2048 == 0 ? 8 : 16; }
};
#endif

// Weights in codes: rows are not widened. Without AVX-512 the sums of only few rows fit into the registers, so the same
// piece of a panel is read many times, and K_BLOCK is small enough that the piece stays in L1.
template <typename Row, int BITS, Meaning M>
struct Blocking<Row, Code<BITS, M>> {
  static constexpr bool FLOAT32 = false, WIDENED = false, STREAMS = true;
  static int most_panels(int, int64_t) { return 1; }
#if defined(CL_TILE_CODES)
  static constexpr int ROW_BLOCK = MOST_TILED_ROWS, K_BLOCK = 4096, SUPER = 384, TILE_DEPTH = CL_Q_BLOCK / sizeof(bf16);
  static int fetching(int blocks) { return blocks; }
  static int first_row(int rows, int block, int) { return block * ROW_BLOCK < rows ? block * ROW_BLOCK : rows; }
#else
  static constexpr int TILE_DEPTH = 0;
#if defined(__AVX512F__)
  static constexpr int ROW_BLOCK = ROWS, K_BLOCK = 4096, SUPER = 384;
#else
  static constexpr int ROW_BLOCK = 30, K_BLOCK = 512, SUPER = 384;
#endif
  static int fetching(int blocks) { return blocks < 2 ? 1 : blocks < 4 ? 2 : 4; }
  static int first_row(int rows, int block, int blocks) { return rows * block / blocks; }
#endif
};

// Scratch memory of one thread for multiplying rows of type Row by a weight of any format.
template <typename Row>
struct GemmScratch {
  typedef Blocking<Row, Row> B;
  enum { MOST = int(B::SUPER) > int(Blocking<Row, Code<8, FIXED_ZERO>>::SUPER) ? int(B::SUPER) : int(Blocking<Row, Code<8, FIXED_ZERO>>::SUPER) };
  alignas(64) float tile[(MOST + MAX_ROW_BLOCK) * (TILE_COLUMNS + TILE_PAD)];
  alignas(64) float widened[B::WIDENED ? B::ROW_BLOCK * (B::K_BLOCK + LANES) : 1];
};

// A packed weight: `count` panels of [k / P][32][P]. k includes the padding.
template <typename Weight>
struct Panels {
  const Weight* data;
  int count;
  int64_t k;
  // panel: address of panel `index`, at element `from` of k. bytes: number of bytes of `k` elements of k in one panel.
  const Weight* panel(int64_t index, int64_t from = 0) const { return data + (index * k + from) * CL_PANEL; }
  static int64_t bytes(int64_t k) { return k * CL_PANEL * int64_t(sizeof(Weight)); }
  // k may be divided into pieces only at multiples of this number of elements.
  static int64_t unit() { return CL_K_MULTIPLE; }
};

// A weight in codes: a panel is a sequence of groups, and k is divided into pieces only between groups.
template <int B, Meaning M>
struct Panels<Code<B, M>> {
  typedef Code<B, M> Weight;
  const Weight* data;
  int count;
  int64_t k;
  int group;
  const Weight* panel(int64_t index, int64_t from = 0) const { return data + index * bytes(k) + bytes(from); }
  int64_t bytes(int64_t k) const { return (k + group - 1) / group * Weight::HEADER + k * (Weight::BLOCK / CL_Q_BLOCK); }
  int64_t unit() const { return group; }
};

CL_INLINE int64_t padded(int64_t k) { return (k + CL_K_MULTIPLE - 1) / CL_K_MULTIPLE * CL_K_MULTIPLE; }

template <typename Weight>
static Panels<Weight> panels_of(const void* data, int64_t n, int64_t k) {
  return Panels<Weight>{static_cast<const Weight*>(data), int((n + CL_PANEL - 1) / CL_PANEL), padded(k)};
}

template <int B, Meaning M>
static Panels<Code<B, M>> code_panels_of(const cl_op& op) {
  CL_ASSERT(op.group > 0 && op.group % CL_Q_BLOCK == 0);
  return {static_cast<const Code<B, M>*>(op.weight), int((op.n + CL_PANEL - 1) / CL_PANEL), padded(op.k), op.group};
}

// Calls `then` with the panels of the operation's weight, in the type that belongs to its format.
template <typename Row, typename Then>
static void with_weight(const cl_op& op, const Then& then) {
  switch (op.format) {
    case CL_Q8: return then(code_panels_of<8, FIXED_ZERO>(op));
    case CL_Q4: return then(code_panels_of<4, FIXED_ZERO>(op));
    case CL_Q8_MIN: return then(code_panels_of<8, MINIMUM>(op));
    case CL_Q4_MIN: return then(code_panels_of<4, MINIMUM>(op));
    case CL_E2M1: return then(code_panels_of<4, E2M1>(op));
    default: return then(panels_of<Row>(op.weight, op.n, op.k));
  }
}

// Address of a row's element number `from`, counted along k.
template <typename T>
CL_INLINE const T* forward(const T* row, int64_t from) { return row + from; }
template <typename Lane, int ZERO>
CL_INLINE const RowBlock<Lane, ZERO>* forward(const RowBlock<Lane, ZERO>* row, int64_t from) {
  return row + from / CL_Q_BLOCK;
}

// Memory that a thread will read next. A multiplication prefetches it evenly over its steps.
struct Ahead {
  const char* at;
  int64_t bytes;
};
static const Ahead NOTHING = {nullptr, 0};

// out[rows, 32] = (accumulate ? out : 0) + a[rows, k] @ panel, with vector instructions. Every instruction set has it.
template <typename Row, typename Weight>
static void vector_product(int rows, const Left<Row, Weight>* a, int64_t a_stride, const Weight* panel, int64_t k, float* out,
                           int64_t out_stride, bool accumulate, Ahead fetched, KVAhead<Row>* kv) {
  enum { P = Packed<Weight>::P };
  const int steps = int(k / P), groups = groups_at_once(rows, CL_PANEL / LANES);
  const int blocks = (rows + most_rows(groups) - 1) / most_rows(groups), calls = CL_PANEL / LANES / groups * blocks;
  const int64_t bytes = (fetched.bytes / steps + calls - 1) / calls;
  const char* ahead[2] = {fetched.at};
  Prefetch share{ahead, bytes > 64 ? 2 : bytes > 0, bytes};
  for (int v = 0; v < CL_PANEL / LANES; v += groups) {
    const Weight* column[2] = {panel + v * LANES * P, panel + (v + groups - 1) * LANES * P};
    const Columns<Weight> columns{column, 1, steps, steps, CL_PANEL * P};
    for (int block = 0; block < blocks; block++, ahead[0] += steps * bytes) {
      const int row = rows * block / blocks, here = rows * (block + 1) / blocks - row;
      ahead[1] = ahead[0] + 64;
      if (kv) kv->join(share, here, groups, steps, Pair<Row, Weight>::PARTS, bytes);
      const auto* a_here = a + row * a_stride;
      float* out_here = out + row * out_stride + v * LANES;
      if (groups == 1)
        product<Row, Weight, 1, PANEL, true>(here, a_here, a_stride, columns, out_here, out_stride, accumulate, share);
      else
        product<Row, Weight, 2, PANEL, true>(here, a_here, a_stride, columns, out_here, out_stride, accumulate, share);
    }
  }
}
template <typename Row, typename Weight>
static void panel_product(const Panels<Weight>&, int rows, const Left<Row, Weight>* a, int64_t a_stride, const Weight* panel,
                          int64_t k, float* out, int64_t out_stride, bool accumulate, Ahead fetched, KVAhead<Row>* kv) {
  vector_product<Row, Weight>(rows, a, a_stride, panel, k, out, out_stride, accumulate, fetched, kv);
}
#if defined(CL_USE_AMX)
template <>
void panel_product<bf16, bf16>(const Panels<bf16>&, int rows, const bf16* a, int64_t a_stride, const bf16* panel, int64_t k,
                               float* out, int64_t out_stride, bool accumulate, Ahead fetched, KVAhead<bf16>*) {
  tile_product(rows, a, a_stride, panel, k, out, out_stride, accumulate, fetched.at, fetched.bytes);
}
#endif


// out[rows, 32] = (accumulate ? out : 0) + a[rows, k] @ panel, for a panel of codes. `a_stride` counts blocks of 32 k.
template <typename Row, int B, Meaning M>
static void panel_product(const Panels<Code<B, M>>& weight, int rows, const Left<Row, Code<B, M>>* a, int64_t a_stride,
                          const Code<B, M>* panel, int64_t k, float* out, int64_t out_stride, bool accumulate, Ahead fetched,
                          KVAhead<Row>*) {
  for (int r = 0; r < rows && !accumulate; r++) memset(out + r * out_stride, 0, sizeof(float) * CL_PANEL);
#if defined(CL_TILE_CODES)
  if (rows >= LEAST_TILED_ROWS)
    return code_tiles(rows, a, a_stride, panel, weight.group / CL_Q_BLOCK, int(k / CL_Q_BLOCK), out, out_stride, fetched.at,
                      fetched.bytes);
#endif
  const int groups = rows <= most_code_rows(2) ? 2 : 1, most = most_code_rows(groups), blocks = (rows + most - 1) / most;
  const int q_blocks = int(k / CL_Q_BLOCK), steps = q_blocks * Dot<B>::STEPS, calls = CL_PANEL / LANES / groups * blocks;
  const int64_t bytes = (fetched.bytes / steps + calls - 1) / calls;
  const char* ahead = fetched.at;
  for (int block = 0; block < blocks; block++) {
    const int row = rows * block / blocks, here = rows * (block + 1) / blocks - row;
    for (int v = 0; v < CL_PANEL / LANES; v += groups, ahead += steps * bytes) {
      const Prefetch share{&ahead, bytes > 64 ? 2 : bytes > 0, bytes};
      float* out_here = out + row * out_stride + v * LANES;
      if (groups == 2)
        code_product<Code<B, M>, 2>(here, a + row * a_stride, a_stride, panel, v, weight.group / CL_Q_BLOCK, q_blocks, out_here,
                                    out_stride, share);
      else
        code_product<Code<B, M>, 1>(here, a + row * a_stride, a_stride, panel, v, weight.group / CL_Q_BLOCK, q_blocks, out_here,
                                    out_stride, share);
    }
  }
}

// Whether all `rows` rows can be multiplied while the weight is read only once.
template <typename Weight>
CL_INLINE bool one_pass(const Panels<Weight>&, int rows) {
  const int groups = groups_at_once(rows, CL_PANEL / LANES);
  return groups == CL_PANEL / LANES && rows <= most_rows(groups);
}
template <int B, Meaning M>
CL_INLINE bool one_pass(const Panels<Code<B, M>>&, int rows) { return rows <= most_code_rows(2); }

// Multiplies all rows by a panel in one pass, so that the panel is read only once. Its memory is prefetched
// STREAM_AHEAD bytes ahead. If this panel is the `last` of the thread, the first bytes of `then` are prefetched near
// the panel's end.
template <typename Row, typename Weight>
static void stream_product(const Panels<Weight>& weight, int rows, const Left<Row, Weight>* a, int64_t a_stride,
                           const Weight* panel, int64_t k, float* out, int64_t out_stride, bool accumulate, bool last,
                           Ahead then, KVAhead<Row>* kv) {
  const int64_t unit = weight.unit(), ahead = STREAM_AHEAD * unit / weight.bytes(unit) / unit * unit;
  const int64_t body = !last || k <= ahead ? (last ? 0 : k) : (k - ahead) / unit * unit, tail = k - body;
  const int64_t bytes = weight.bytes(tail);
  const Ahead own{(const char*)panel + STREAM_AHEAD, weight.bytes(body)};
  if (body > 0) panel_product<Row>(weight, rows, a, a_stride, panel, body, out, out_stride, accumulate, own, kv);
  if (tail == 0) return;
  const Weight* rest = weight.panel(0, body) - weight.panel(0) + panel;
  panel_product<Row>(weight, rows, forward(a, body), a_stride, rest, tail, out, out_stride, accumulate || body > 0,
                     Ahead{then.at, then.bytes < bytes ? then.bytes : bytes}, kv);
}

// Copies rows to `to` as float32, k + LANES elements apart. If rows were a power of two apart, they would compete for
// the same sets of L1.
template <typename Row>
static const float* widened(const Row* a, int64_t a_stride, int rows, int64_t k, float* to) {
  for (int r = 0; r < rows; r++)
    for (int64_t i = 0; i < k; i += LANES) vstore(to + r * (k + LANES) + i, vload(a + r * a_stride + i));
  return to;
}

// Number of panels in a chunk, a multiple of `unit`: large enough to be efficient, and small enough that no thread
// waits long for another.
template <typename Row, typename Weight>
static int chunk_panels(const Panels<Weight>& weight, int unit, int m, int threads) {
  const int units = weight.count / unit;
  for (int most = Blocking<Row, Weight>::most_panels(m, weight.k) / unit; most > 1; most--) {
    const int chunks = (units + most - 1) / most, rounds = (chunks + threads - 1) / threads;
    if (int64_t(rounds) * threads * most * 100 <= int64_t(units) * 107) return most * unit;
  }
  return unit;
}

// Divides a multiplication into items, which threads take. An item is one chunk of panels times one block of at most
// SUPER rows: item i has chunk i % chunks and block i / chunks.
template <typename Row, typename Weight>
struct GemmItems {
  enum { SUPER = Blocking<Row, Weight>::SUPER };
  int chunks, supers;

  GemmItems(const Panels<Weight>& weight, int chunk_panels, int m)
      : chunks((weight.count + chunk_panels - 1) / chunk_panels), supers((m + SUPER - 1) / SUPER) {}
  int64_t count() const { return int64_t(chunks) * supers; }
};

template <typename Row, typename Weight>
static GemmItems<Row, Weight> items_of(const Panels<Weight>& weight, int chunk_panels, int m) {
  return GemmItems<Row, Weight>(weight, chunk_panels, m);
}

// One item of a matrix multiplication, which one thread computes: chunk number `chunk` of the weight's panels, times
// block number `super` of `supers` blocks of m rows. The rows begin at first_row.
template <typename Weight>
struct GemmItem {
  Panels<Weight> weight;
  int first_row, m, chunk, super, supers;
};

// All items of a matrix multiplication of m rows by one weight.
template <typename Row, typename Weight>
struct OneWeight {
  const Panels<Weight>& weight;
  const int m;
  const GemmItems<Row, Weight> all;

  int most_rows() const { return m; }
  int64_t count() const { return all.count(); }
  GemmItem<Weight> at(int64_t item) const {
    return GemmItem<Weight>{weight, 0, m, int(item % all.chunks), int(item / all.chunks), all.supers};
  }
};

// Writes row number `row` to `rows` in the form that the multiplication reads: unchanged, or rounded to 8 bits for a
// weight in codes. Returns the distance between two rows. If `from` is null, only the distance is returned.
template <typename Row, typename Weight>
CL_INLINE int64_t put_row(const Panels<Weight>& weight, const Row* from, int64_t stride, int64_t row, Row* rows) {
  if (from) memcpy(rows + row * stride, from, weight.k * sizeof(Row));
  return stride;
}
template <typename Row, int B, Meaning M>
CL_INLINE int64_t put_row(const Panels<Code<B, M>>& weight, const Row* from, int64_t, int64_t row,
                          Source<Row, Code<B, M>>* rows) {
  if (from) quantize(from, weight.k, rows + row * code_stride(weight.k));
  return code_stride(weight.k);
}

// Computes all items of `all`. Every thread of the pool calls this; a thread that is free takes the next item, which
// has `chunk_panels` panels. All weights of `all` have the shape of `weight`. For each finished block of a @ weight.T,
// epilogue(first row, rows, first panel, panels, tile, tile_stride) is called once, with the results as float32 in
// `tile`. Before that, epilogue.fetch(first row, rows, panel) may prefetch the memory that the epilogue will write. k
// is never divided among threads. Memory of MAX_ROW_BLOCK rows after the last row of `a` must be readable. `then`:
// memory that this thread reads after the last item. `kv`: keys and values to prefetch while memory has spare time, or
// null. AMX code ignores `kv`, because with tiles memory has no spare time.
template <typename Row, typename Weight, typename Items, typename Epilogue>
static void gemm_items(cl_pool& pool, int thread, const Source<Row, Weight>* a, int64_t a_stride, const Items& all,
                       const Panels<Weight>& weight, int chunk_panels, GemmScratch<Row>& scratch, const Epilogue& epilogue,
                       Ahead then, KVAhead<Row>* kv) {
  typedef Blocking<Row, Weight> B;
  // A row of the tile has one cache line more than its results. If rows were 1 KiB apart, they would compete for few
  // sets of L1.
  const int64_t items = all.count(), tile_stride = int64_t(chunk_panels) * CL_PANEL + TILE_PAD;
  // The pieces of k have about equal length, because an equal amount of the next data is prefetched during each piece.
  const int64_t unit = weight.unit(), units = (weight.k + unit - 1) / unit, wanted = (weight.k + B::K_BLOCK - 1) / B::K_BLOCK;
  const int64_t pieces = wanted < units ? wanted : units;
  float* tile = scratch.tile;
#if defined(CL_USE_AMX)
  if (B::TILE_DEPTH > 0) tiles_begin(B::TILE_DEPTH, all.most_rows());
#endif
  CL_ASSERT(chunk_panels * CL_PANEL <= TILE_COLUMNS && forward(a, weight.k) <= a + a_stride);
  Turns turns(pool, thread, items, Turns::CONTIGUOUS);
  for (int64_t item = turns.take(); item < items; item = turns.take()) {
    const int64_t following = turns.peek();  // next item, whose weights can be prefetched
    const GemmItem<Weight> now = all.at(item), after = following < items ? all.at(following) : now;
    // Rows are divided at multiples of ROW_UNIT, the number of rows in an AMX tile.
    const Share share = share_of((now.m + ROW_UNIT - 1) / ROW_UNIT, now.super, now.supers);
    const int first_panel = now.chunk * chunk_panels, super = now.first_row + share.begin * ROW_UNIT;
    const int rows_here = (share.end * ROW_UNIT < now.m ? share.end * ROW_UNIT : now.m) - share.begin * ROW_UNIT;
    const int panels = weight.count - first_panel < chunk_panels ? weight.count - first_panel : chunk_panels;
    const int next_panel = after.chunk * chunk_panels;
    const bool other = next_panel != first_panel || after.weight.data != now.weight.data;
    const int fetched = following < items && other ? weight.count - next_panel : 0;
    const int blocks = (rows_here + B::ROW_BLOCK - 1) / B::ROW_BLOCK;
    const int fetching = B::fetching(blocks);
    const bool streams = B::STREAMS && blocks == 1 && one_pass(weight, rows_here);
    KVAhead<Row>* also = kv && kv->due(turns.left(item) * chunk_panels * weight.bytes(weight.k)) ? kv : nullptr;
    // All rows are multiplied by one piece of k before the next piece begins. So the piece and the sums stay in L2.
    for (int64_t piece = 0; piece < pieces; piece++) {
      const int64_t k = units * piece / pieces * unit, next_k = units * (piece + 1) / pieces * unit;
      const int64_t k_here = (next_k < weight.k ? next_k : weight.k) - k;
      const bool last_piece = piece + 1 == pieces, last = last_piece && following >= items;
      // Data to prefetch: the next piece of k of these panels; in the last piece, the first piece of the next item's
      // panels; in the last item, `then`. As much is prefetched as there is time for. All panels of this item prefetch
      // an equal part; in float32 the last panel prefetches all.
      const int64_t bytes_here = weight.bytes(k_here), bytes_then = then.bytes / (B::FLOAT32 ? 1 : panels) / 64 * 64;
      const int64_t next_bytes = last && bytes_then < bytes_here ? bytes_then : bytes_here;
      const int64_t next_stride = last ? next_bytes : weight.bytes(weight.k);
      const Weight* own = last_piece ? after.weight.panel(next_panel) : now.weight.panel(first_panel, k + k_here);
      const char* next = last ? then.at : (const char*)own;
      const int next_panels = last ? panels : last_piece ? fetched : panels;
      for (int block = 0; block < blocks; block++) {
        const int begin = super + B::first_row(rows_here, block, blocks);
        const int rows = super + B::first_row(rows_here, block + 1, blocks) - begin;
        float* sums = tile + (pieces > 1 ? block * B::ROW_BLOCK * tile_stride : 0);
        const int64_t left_stride = B::WIDENED ? k_here + LANES : a_stride;
        const Left<Row, Weight>* left;
        if constexpr (B::WIDENED)
          left = widened(a + begin * a_stride + k, a_stride, rows, k_here, scratch.widened);
        else
          left = forward(a + begin * a_stride, k);
        for (int p = 0; p < panels; p++) {
          const Weight* here = now.weight.panel(first_panel + p, k);
          Ahead ahead = NOTHING;
          if (!B::FLOAT32 && p < next_panels && block < fetching) {
            // A block of rows prefetches lines [line, end): its part of the lines that all blocks prefetch.
            const int64_t lines = next_bytes / 64, line = lines * block / fetching, end = lines * (block + 1) / fetching;
            ahead = Ahead{next + p * next_stride + line * 64, (end - line) * 64};
          } else if (B::FLOAT32 && (p + 1 < panels ? block == 0 : block + 1 == blocks && next_panels > 0)) {
            // The first row block prefetches this piece of the next panel; later blocks find it in L2. During the last
            // panel, the last row block prefetches the next data.
            const bool same = p + 1 < panels;
            ahead = Ahead{same ? (const char*)now.weight.panel(first_panel + p + 1, k) : next, same ? bytes_here : next_bytes};
          }
          float* out = sums + p * CL_PANEL;
          if (last_piece && !streams) epilogue.fetch(begin, rows, first_panel + p);
          if (streams)
            stream_product<Row>(weight, rows, left, left_stride, here, k_here, out, tile_stride, k > 0, last && p + 1 == panels,
                                then, also);
          else
            panel_product<Row>(weight, rows, left, left_stride, here, k_here, out, tile_stride, k > 0, ahead, also);
        }
        if (last_piece) epilogue(begin, rows, first_panel, panels, sums, tile_stride);
      }
    }
  }
}

// Multiplies m rows by one weight. The arguments are those of gemm_items.
template <typename Row, typename Weight, typename Epilogue>
static void gemm(cl_pool& pool, int thread, const Source<Row, Weight>* a, int64_t a_stride, int m, const Panels<Weight>& weight,
                 int chunk_panels, GemmScratch<Row>& scratch, const Epilogue& epilogue, Ahead then, KVAhead<Row>* kv) {
  const OneWeight<Row, Weight> all{weight, m, items_of<Row>(weight, chunk_panels, m)};
  gemm_items<Row>(pool, thread, a, a_stride, all, weight, chunk_panels, scratch, epilogue, then, kv);
}

}  // namespace CL_NS
