"""A product fetches all weights that it reads next, and the beginning of those behind them, once. And the KV of
the next attention, where arithmetic leaves memory the time.

Twice would cost half of the memory's rate, and show nowhere but in the time.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import NamedTuple

import pytest

from chairlift.kernels.cpu.library import supported_isas
from tests.kernels.cpu.emulated_tiles import AMX, AVX2, AVX512_BF16, SOURCES, TRAP
from tests.tiers import one_in

WATCHED = r"""
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <atomic>
#include <vector>
static void fetched(const void* at);
#undef _mm_prefetch
#define _mm_prefetch(at, hint) fetched(at)
#include "attention_tasks.h"
#include "linear.h"
#include "sharing.h"
using namespace CL_NS;

static KVAhead<bf16>* const no_kv = nullptr;
struct Ignore {
  void fetch(int, int, int) const {}
  void operator()(int, int, int, int, float*, int64_t) const {}
};
static int kind = CL_KV_PLAIN;  // of caches; the last argument may be "int8"
static int64_t kv_piece(int dim) { return kind == CL_KV_INT8 ? piece_bytes(dim, code8()) : piece_bytes(dim, bf16()); }
static const char* begin;
static int64_t size, outside, again, now;
static bool watching;
static std::vector<int64_t> latest;  // per line: when it was fetched, or 0
static void fetched(const void* at) {
  if (!watching) return;
  const int64_t offset = (const char*)at - begin;
  if (offset < 0 || offset >= size) {
    outside++;
    return;
  }
  int64_t& before = latest[offset / 64];
  now++;
  again += before && now - before > 16;  // parts of a line, one after the other, are one fetch
  before = now;
}

// A product before attention by two threads, one after the other: of `rows` sequences all but one decode behind 30, 37
// .. tokens, and the last is a chunk of 20 behind 100. Prints lines of KV that attention reads of earlier steps, those
// that were never fetched, fetches that came again, and lines fetched that nobody reads. With `shared`, all that decode
// are longer, and have the blocks of their first 288 tokens in common.
static void fetch_kv(int rows, int window, bool shared) {
  enum { BLOCK = 32, HEADS = 2, DIM = 64, K = 576, PANELS = 96, THREADS = 2, WIDTH = 24 };
  const int tokens = rows + 19, blocks = rows * WIDTH;
  const int64_t block_lines = 2 * BLOCK / CL_KV_TOKENS * HEADS * kv_piece(DIM) / 64;
  size = blocks * block_lines * 64;
  void* memory = aligned_alloc(64, size);
  begin = (const char*)memory, outside = again = now = 0, latest.assign(size / 64, 0);
  std::vector<int32_t> table(blocks, -1), starts, lengths;
  std::vector<AttentionSpan> spans;
  std::vector<bool> read(blocks);
  for (int row = 0; row < rows; row++) {
    const bool decodes = row + 1 < rows;
    const int known = !decodes ? 100 : shared ? 300 + 7 * row % 100 : 30 + 7 * row % 400;
    starts.push_back(row), lengths.push_back(known + (decodes ? 1 : 20));
    spans.push_back({row, row, decodes ? 1 : 16, 0});
    for (int b = (window && known >= window ? known + 1 - window : 0) / BLOCK; b <= known / BLOCK; b++) {
      table[row * WIDTH + b] = ((shared && decodes && b < 9 ? 0 : row * WIDTH) + b) * 17 % blocks;
      read[table[row * WIDTH + b]] = true;
    }
  }
  starts.push_back(tokens), spans.push_back({rows - 1, rows + 15, 4, 0});
  cl_batch batch{};
  batch.cu_seqlens = starts.data(), batch.seq_lens = lengths.data(), batch.block_tables = table.data();
  batch.table_width = WIDTH, batch.num_tokens = tokens, batch.num_rows = rows;
  cl_op ops[2] = {};
  ops[0].kind = CL_OP_LINEAR, ops[0].n = PANELS * CL_PANEL, ops[0].k = K;
  ops[1].kind = CL_OP_ATTENTION, ops[1].window = window, ops[1].heads = ops[1].kv_heads = HEADS;
  const cl_kv_layer layer{memory, 0, HEADS, DIM, BLOCK, blocks, kind, 0};
  cl_program program{};
  program.ops = ops, program.kv_layers = &layer;
  StepPlan plan{spans.data(), int(spans.size()), 1, 16, THREADS, nullptr};
  SharingPlan sharing{0, BLOCK, window, HEADS, 1};
  std::vector<char> room(SharingPlanner::bytes(1, spans.size(), 1));
  char* here = room.data();
  plan.sharing = &sharing, plan.num_sharing = SharingPlanner(batch, plan, 64).make(sharing, here);
  std::vector<bf16> a(int64_t(tokens + MAX_ROW_BLOCK) * K), weight(PANELS * CL_PANEL * K);
  static GemmScratch<bf16> scratch;
  cl_pool pool(1, false);
  for (int thread = 0; thread < THREADS; thread++) {
    KVAhead<bf16> kv(program, batch, plan, thread);
    kv.look(0, 2);
    kv.begin(ops[0]);
    watching = true;
    gemm<bf16>(pool, 0, a.data(), K, tokens, Panels<bf16>{weight.data(), PANELS, K}, 2, scratch,
         Ignore{}, NOTHING, &kv);
    watching = false;
    pool.barrier(0);
  }
  int64_t lines = 0, never = 0, unread = 0;
  for (int64_t line = 0; line < size / 64; line++) {
    const bool wanted = read[line / block_lines];
    lines += wanted, never += wanted && !latest[line], unread += !wanted && latest[line];
  }
  printf("%ld %ld %ld %ld\n", long(lines), long(never), long(again), long(unread));
  free(memory);
}

// Whether each thread's first item of a product is what the operation before it fetches the beginning of. Prints how
// many were looked at, and how many differ.
static void first_items() {
  enum { K = 64 };
  int looked = 0, wrong = 0;
  for (int threads : {1, 2, 3, 7})
    for (int m : {1, 40, 800})
      for (int panels : {1, 5, 12, 37}) {
        cl_pool pool(threads, false);
        std::vector<bf16> memory(panels * CL_PANEL * K);
        cl_op ops[2] = {};
        ops[0].kind = CL_OP_RMS_NORM, ops[1].kind = CL_OP_LINEAR;
        ops[1].n = panels * CL_PANEL, ops[1].k = K, ops[1].weight = memory.data();
        cl_program program{};
        program.ops = ops, program.num_ops = 2;
        const Panels<bf16> weight = panels_of<bf16>(memory.data(), ops[1].n, K);
        const int chunk = chunk_of<bf16>(ops[1], weight, m, threads);
        const GemmItems<bf16, bf16> items(weight, chunk, m);
        for (int thread = 0; thread < threads; thread++) {
          const int64_t count = items.count();
          if (Turns::begin(count, thread, threads) == Turns::begin(count, thread + 1, threads)) continue;
          const int64_t first = Turns(pool, thread, count, Turns::CONTIGUOUS).take();
          looked++;
          wrong += first_weights<bf16>(program, -1, 2, m, thread, threads).at !=
                   (const char*)weight.panel(first % items.chunks * chunk);
        }
      }
  printf("%d %d\n", looked, wrong);
}

// Attention of one thread over sequences of 64 to 16 * `most` tokens, or one less each, that decode: prints lines of KV
// of the pieces (K or V of sixteen tokens and a head), those never fetched, fetches that came again, lines of a piece.
static void fetch_attended(int most, int less, bool far) {
  enum { BLOCK = 32, KV_HEADS = 2, GROUP = 3, DIM = 64, ROWS_HERE = 9 };
  const int width = (most + 1) / 2, blocks = ROWS_HERE * width;
  const int64_t piece_bytes = kv_piece(DIM);
  size = blocks * (BLOCK / CL_KV_TOKENS) * KV_HEADS * 2 * piece_bytes;
  const int64_t guard = 1 << 16;
  char* memory = (char*)aligned_alloc(64, size + 2 * guard);
  memset(memory, 0, size + 2 * guard);
  begin = memory + guard, outside = again = now = 0, latest.assign(size / 64, 0);
  std::vector<int32_t> table(blocks), starts, lengths;
  std::vector<AttentionSpan> spans;
  int64_t pieces = 0;
  for (int b = 0; b < blocks; b++) table[b] = (b * 17 + 5) % blocks;
  for (int row = 0; row < ROWS_HERE; row++) {
    const int sixteens = 4 + row * (most - 4) / (ROWS_HERE - 1);
    pieces += 2 * KV_HEADS * sixteens;
    starts.push_back(row), lengths.push_back(16 * sixteens - less), spans.push_back({row, row, 1, 0});
  }
  starts.push_back(ROWS_HERE);
  cl_batch batch{};
  batch.cu_seqlens = starts.data(), batch.seq_lens = lengths.data(), batch.block_tables = table.data();
  batch.table_width = width, batch.num_tokens = batch.num_rows = ROWS_HERE;
  cl_op op{};
  op.kind = CL_OP_ATTENTION, op.in = 0, op.out = 1, op.scale = 0.125f;
  op.heads = KV_HEADS * GROUP, op.kv_heads = KV_HEADS, op.head_dim = DIM;
  const cl_kv_layer layer{(void*)begin, 0, KV_HEADS, DIM, BLOCK, blocks, kind, 0};
  std::vector<bf16> q(64 * KV_HEADS * GROUP * DIM), out(64 * KV_HEADS * GROUP * DIM);
  void* buffers[] = {q.data(), out.data()};
  const int64_t strides[] = {KV_HEADS * GROUP * DIM, KV_HEADS * GROUP * DIM};
  cl_program program{};
  program.ops = &op, program.num_ops = 1, program.kv_layers = &layer;
  program.buffers = buffers, program.strides = strides;
  const StepPlan plan{spans.data(), int(spans.size()), 1, 16, 1, nullptr};
  static AttentionScratch<bf16> scratch;
  cl_pool pool(1, false);
  watching = true;
  attention<bf16>(pool, 0, op, program, batch, plan, scratch, far);
  watching = false;
  int64_t lines = 0;
  for (int64_t line = 0; line < size / 64; line++) lines += latest[line] != 0;
  const int64_t all = pieces * piece_bytes / 64;
  printf("%ld %ld %ld %ld\n", long(all), long(all - lines), long(again), long(piece_bytes / 64));
  free(memory);
}

// What products of `rows` rows write: q of heads, sums, and gated sums. Prints lines of results, those never fetched
// before they are written, and fetches that came again.
static void fetch_results(int rows) {
  enum { BLOCK = 32, HEADS = 3, KV_HEADS = 1, DIM = 64, K = 576, N = 320 };
  for (int kind : {CL_OP_QKV, CL_OP_LINEAR, CL_OP_LINEAR_SILU}) {
    const int n = kind == CL_OP_LINEAR_SILU ? 2 * N : N, width = kind == CL_OP_QKV ? HEADS * DIM : N;
    std::vector<int64_t> slots(rows);
    for (int row = 0; row < rows; row++) slots[row] = row;
    std::vector<bf16> in(int64_t(rows + MAX_ROW_BLOCK) * K), weight(int64_t(n) * K);
    std::vector<bf16> kv((rows + BLOCK) * 2 * KV_HEADS * DIM);
    size = int64_t(rows) * width * sizeof(bf16);
    const int64_t guard = 1 << 20;  // what is fetched a little beyond a weight must not count
    char* memory = (char*)aligned_alloc(64, size + 2 * guard);
    void* out = memory + guard;
    void* buffers[] = {in.data(), out};
    const int64_t strides[] = {K, width};
    cl_op op{};
    op.kind = kind, op.in = 0, op.out = 1, op.aux = op.rotary = -1, op.n = n, op.k = K, op.weight = weight.data();
    op.heads = HEADS, op.kv_heads = KV_HEADS, op.head_dim = DIM;
    const cl_kv_layer layer{kv.data(), 0, KV_HEADS, DIM, BLOCK, rows / BLOCK + 1};
    cl_program program{};
    program.ops = &op, program.num_ops = 1, program.kv_layers = &layer;
    program.buffers = buffers, program.strides = strides;
    cl_batch batch{};
    batch.num_tokens = rows, batch.slot_mapping = slots.data();
    const StepPlan plan{};
    cl_pool pool(1, false);
    static GemmScratch<bf16> scratch;
    KVAhead<bf16> ahead(program, batch, plan, 0);
    begin = (const char*)out, outside = again = now = 0, latest.assign(size / 64, 0);
    watching = true;
    linear(pool, 0, op, panels_of<bf16>(op.weight, op.n, op.k), program, batch, scratch, NOTHING, ahead);
    watching = false;
    int64_t never = 0;
    for (int64_t line = 0; line < size / 64; line++) never += latest[line] == 0;
    printf("%ld %ld %ld\n", long(size / 64), long(never), long(again));
    free(memory);
  }
}

// For each line of standard input (rows, panels, k, unit of panels): lines of the weight and of what is read behind it,
// those behind the first item, or the first few, that are never fetched, fetches that come again, and fetches outside.
// Given rows and a window instead, what is fetched of KV; given "results" and rows, of what is written; given three
// numbers, of KV by attention itself; given "shared", rows and a window, of KV that sequences share.
int main(int argc, char** argv) {
  int m, panels, k, unit;
  if (argc > 1 && !strcmp(argv[argc - 1], "int8")) kind = CL_KV_INT8, argc--;
  if (argc == 4 && !strcmp(argv[1], "shared"))
    fetch_kv(atoi(argv[2]), atoi(argv[3]), true);
  else if (argc == 4)
    fetch_attended(atoi(argv[1]), atoi(argv[2]), atoi(argv[3]));
  if (argc == 3 && !strcmp(argv[1], "results"))
    fetch_results(atoi(argv[2]));
  else if (argc == 3)
    fetch_kv(atoi(argv[1]), atoi(argv[2]), false);
  if (argc == 2) first_items();
  while (argc == 1 && scanf("%d %d %d %d", &m, &panels, &k, &unit) == 4) {
    cl_pool pool(1, false);
    const int chunk = chunk_panels<bf16>(Panels<bf16>{nullptr, panels, k}, unit, m, 1);
    const int64_t own = int64_t(panels) * k * 64, last = Blocking<bf16, bf16>::FLOAT32 ? 1 : (panels - 1) % chunk + 1;
    const bool streams = Blocking<bf16, bf16>::STREAMS && one_pass(Panels<bf16>{nullptr, panels, k}, m);
    // At most as much as the last item reads at a time, or as is fetched ahead.
    const int64_t then = streams ? int64_t(STREAM_AHEAD) : last * 256 * 64;
    size = own + then;
    bf16* weight = (bf16*)aligned_alloc(64, size);
    std::vector<bf16> a(int64_t(m + MAX_ROW_BLOCK) * k);
    memset((void*)weight, 0, size);
    begin = (const char*)weight, outside = again = now = 0, latest.assign(size / 64, 0);
    static GemmScratch<bf16> scratch;
    watching = true;
    const Panels<bf16> packed{weight, panels, k};
    gemm<bf16>(pool, 0, a.data(), k, m, packed, chunk, scratch, Ignore{}, {begin + own, then}, no_kv);
    watching = false;
    int64_t never = 0;
    const int64_t first = streams ? STREAM_AHEAD / 64 : int64_t(chunk) * k;
    for (int64_t line = first; line < size / 64; line++) never += latest[line] == 0;
    printf("%ld %ld %ld %ld\n", long(size / 64), long(never), long(again), long(outside));
    free(weight);
  }
  if (argc > 1) return 0;
  // With one item for each of two threads, both get one: none takes the other's while it is busy with its own.
  struct Two {
    cl_pool pool{2, false};
    GemmScratch<bf16> scratch[2];
    std::vector<bf16> a = std::vector<bf16>(160 * 64), weight = std::vector<bf16>(2 * CL_PANEL * 64);
    std::atomic<int> calls[2] = {};
  };
  struct Wait : Ignore {
    std::atomic<int>* calls;
    int thread;
    void operator()(int, int rows, int, int, float*, int64_t) const {
      calls[thread] += rows;
      for (int look = 0; look < 10000 && calls[1 - thread] == 0; look++) usleep(1000);
    }
  };
  static Two two;
  two.pool.run([](void*, int thread) {
    gemm<bf16>(two.pool, thread, two.a.data(), 64, 80, Panels<bf16>{two.weight.data(), 2, 64}, 1, two.scratch[thread],
         Wait{{}, two.calls, thread}, NOTHING, no_kv);
  }, nullptr);
  printf("%d %d\n", two.calls[0].load(), two.calls[1].load());
}
"""


class Fetched(NamedTuple):
    """Lines of a weight."""

    lines: int
    never: int
    again: int
    outside: int


@pytest.fixture(scope="module", params=one_in(3, ["avx2", "avx512_bf16", "amx"]))
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a program that counts what a path fetches; AMX's instructions are done by a handler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the counting with")
    has_bf16 = "avx512_bf16" in supported_isas()
    if request.param == "avx512_bf16" and not has_bf16:
        pytest.skip("this processor has no AVX512-BF16")
    instructions = AVX512_BF16 if has_bf16 and request.param != "avx2" else AVX2
    folder = tmp_path_factory.mktemp("fetching")
    (folder / "watched.cpp").write_text(WATCHED)
    command = [compiler, "-std=c++17", "-O3", "-pthread", "-DCL_NS=watched", f"-I{SOURCES}"]
    command += [f"-m{name}" for name in instructions]
    sources = [folder / "watched.cpp", SOURCES / "pool.cpp", SOURCES / "memory.cpp", SOURCES / "system.cpp"]
    if request.param == "amx":
        command += ["-DCL_USE_AMX", *(f"-m{name}" for name in AMX)]
        sources.append(TRAP)
    done = subprocess.run([*command, *map(str, sources), "-o", str(folder / "watched")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [str(folder / "watched"), *(["tiles"] if request.param == "amx" else [])]


@pytest.mark.nightly
@pytest.mark.parametrize("rows", one_in(3, [1, 7, 16, 17, 33, 64, 65, 96, 128]))
def test_the_weights_of_the_next_product_are_fetched_once(rows: int, watched: list[str]) -> None:
    cases = [(rows, panels, k, unit) for panels, unit in ((12, 2), (17, 1)) for k in (576, 896, 1536, 4864)]
    text = "\n".join(" ".join(map(str, case)) for case in cases)
    done = subprocess.run(watched[:1], input=text, capture_output=True, text=True, check=True)
    *counts, rows_of_threads = done.stdout.splitlines()
    assert rows_of_threads == "80 80"
    for case, line in zip(cases, counts, strict=True):
        found = Fetched(*map(int, line.split()))
        # Pieces of k are not quite equally long, nor quite evenly fetched.
        assert found.lines > case[1] * case[2]
        assert found.never + found.again + found.outside <= found.lines / 20, f"{case}: {found}"


@pytest.mark.full
def test_a_product_begins_with_what_was_fetched_for_it(watched: list[str]) -> None:
    done = subprocess.run([watched[0], "first"], capture_output=True, text=True, check=True)
    looked, wrong = map(int, done.stdout.split())
    assert looked > 100
    assert wrong == 0


KINDS = pytest.mark.parametrize("kind", [[], ["int8"]], ids=["plain", "int8"])


@KINDS
@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("rows", one_in(2, [1, 4, 32, 48, 64]))
def test_kv_is_fetched_once_where_memory_has_time(rows: int, window: int, kind: list[str], watched: list[str]) -> None:
    program, *tiles = watched
    done = subprocess.run([program, str(rows), str(window), *kind], capture_output=True, text=True, check=True)
    found = Fetched(*map(int, done.stdout.split()))
    assert found.again == found.outside == 0
    assert found.never == (found.lines if tiles else 0)


@KINDS
@pytest.mark.parametrize("rows", one_in(2, [8, 32, 48, 64]))
def test_kv_that_sequences_share_is_fetched_once(rows: int, kind: list[str], watched: list[str]) -> None:
    program, *tiles = watched
    done = subprocess.run([program, "shared", str(rows), "0", *kind], capture_output=True, text=True, check=True)
    found = Fetched(*map(int, done.stdout.split()))
    assert found.again == found.outside == 0
    assert found.never == (found.lines if tiles else 0)


@KINDS
def test_no_kv_is_left_out_because_it_is_shared_in_windows(kind: list[str], watched: list[str]) -> None:
    """Windows begin at different positions, so a block may be fetched for two rows, but not for each."""
    program, *tiles = watched
    done = subprocess.run([program, "shared", "64", "200", *kind], capture_output=True, text=True, check=True)
    found = Fetched(*map(int, done.stdout.split()))
    assert found.outside == 0
    assert found.never == (found.lines if tiles else 0)
    assert found.again < found.lines  # 72,000 lines come again if every row fetches what it reads


@pytest.mark.parametrize("rows", [1, 12, 13, 64, 400])
def test_results_are_fetched_before_they_are_written(rows: int, watched: list[str]) -> None:
    program, *tiles = watched
    done = subprocess.run([program, "results", str(rows)], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        lines, never, again = map(int, line.split())
        assert again == 0
        # Results of few rows are still in the cache.
        assert never in ([0] if tiles or rows > 12 else [0, lines])


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("sixteens", [4, 9, 16, 17, 40, 140])
@KINDS
def test_attention_fetches_each_cache_line_once(
    kind: list[str], sixteens: int, less: int, far: bool, watched: list[str]
) -> None:
    command = [watched[0], str(sixteens), str(less), str(int(far)), *kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines, never, again, of_a_piece = map(int, done.stdout.split())
    assert lines > 0
    assert again == 0
    assert never == (8 if far else 4) * of_a_piece  # the first have nothing before them
