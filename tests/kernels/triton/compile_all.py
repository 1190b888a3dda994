"""Compiles every Triton kernel to machine code for a compute capability, without a GPU: ``python -m ... 90``.

The interpreter runs kernels as Python, so it accepts much that the compiler does not. The script calls the package's
own functions on CPU tensors, and compiles each launch instead of running it. It prints one line per kernel, with the
registers and spills that the assembler reports, and the number of copies to shared memory that can be in progress while
a loop computes.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from chairlift.kernels.coded import CodedWeight
from chairlift.kernels.delta_rule import DeltaRule
from chairlift.kernels.grouped import GroupKind
from chairlift.kernels.low_rank_pool import LowRankPool, PoolLayout, SiteShape
from chairlift.kernels.mamba2 import Mamba2, Mamba2Shape
from chairlift.kernels.recurrent import Cell
from chairlift.kernels.routing import Routing
from chairlift.kernels.short_conv import ShortConv
from chairlift.kernels.triton import dependent
from chairlift.kernels.triton.coded_linear import coded_linear, decoded_rows
from chairlift.kernels.triton.decode_state import DecodeState
from chairlift.kernels.triton.experts import experts
from chairlift.kernels.triton.launch import MAX_GROUP, attention_launch, gemm_launch
from chairlift.kernels.triton.linear_small import linear_small
from chairlift.kernels.triton.low_rank import LowRankTerm, expand, shrink
from chairlift.kernels.triton.norms import add_rms_norm, rms_norm, silu_and_mul
from chairlift.kernels.triton.paged_attention import SharedTiles, paged_attention
from chairlift.kernels.triton.recurrences import cell_launch
from chairlift.kernels.triton.rope_cache import rope_and_cache, rotary_table
from chairlift.kernels.triton.sampling import kept_ids, sample
from chairlift.kernels.triton.scaled import quantize_rows
from chairlift.kernels.triton.states import StateRows

TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
CODES = (
    *(GroupKind(4, 32), GroupKind(4, 128, True), GroupKind(8, 32)),
    *(GroupKind(4, 32, e2m1=True), GroupKind(8, 128, e4m3=True)),
)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Compiler:
    """Replaces every launch of a Triton kernel by a compilation of the kernel."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.compiled: set[str] = set()

    def __call__(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = [param.name for param in function.params]
        values = dict(zip(names, args, strict=False)) | {k: v for k, v in options.items() if k in names}
        signature, constants, attributes = {}, {}, {}
        for place, param in enumerate(function.params):
            value = values[param.name]
            if (
                param.is_constexpr
                or value is None
                or (type(value) is int and value == 1 and not param.do_not_specialize)
            ):
                signature[param.name] = "constexpr"
                constants[(place,)] = value
            elif isinstance(value, torch.Tensor):
                signature[param.name] = TYPES[value.dtype]
                attributes[(place,)] = [["tt.divisibility", 16]]
            else:
                signature[param.name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize:
                    attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
        chosen = {k: v for k, v in options.items() if k not in names}
        sizes = [value for value in constants.values() if value is not None]
        line = f"{function.__name__} {' '.join(t for t in signature.values() if t != 'constexpr')} {sizes} {chosen}"
        if line not in self.compiled:
            self.compiled.add(line)
            binary = triton.compile(source, target=self.target, options=chosen)
            under_way = max(map(int, re.findall(r"async_wait .*num = (\d+)", binary.asm["ttgir"])), default=0)
            shared = f"{binary.metadata.shared} B shared, {under_way} copies"
            print(f"{resources(binary.asm['cubin'])}, {shared}: {line}", flush=True)


def resources(cubin: bytes) -> str:
    """Text with the number of registers and the bytes of stack that a thread of the compiled kernel ``cubin`` uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return f"{found[1]} registers, {found[2]} B stack" if found else "?"


def attention(
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    decode: bool,
    few: bool,
    shared: bool = False,
    cap: float | None = None,
    sinks: bool = False,
    int8: bool = False,
) -> None:
    rows, tokens = (4 if few else 512), 512
    launch = attention_launch(
        head_dim=head_dim,
        group=heads[0] // heads[1],
        num_kv_heads=heads[1],
        max_rows=rows,
        decode_only=decode,
        num_multiprocessors=132,
        itemsize=dtype.itemsize,
        int8_kv=int8,
    )
    cache = torch.empty((64, 16, heads[1], head_dim), dtype=torch.uint8 if int8 else dtype)
    scales = torch.empty((64, 16, heads[1], 2))
    members = torch.empty((rows // 2, launch.block_m // (heads[0] // heads[1])), dtype=torch.int32)
    paged_attention(
        torch.empty((rows if decode else tokens, heads[0], head_dim), dtype=dtype),
        cache,
        cache,
        torch.empty(rows, dtype=torch.int32),
        torch.empty((rows, 64), dtype=torch.int32),
        scale=0.125,
        window=window,
        launch=launch,
        cu_seqlens=None if decode else torch.empty(rows + 1, dtype=torch.int32),
        table_rows=torch.empty(rows, dtype=torch.int32) if decode else None,
        shared=SharedTiles(members, torch.empty(rows, dtype=torch.int32)) if shared else None,
        cap=cap,
        sinks=torch.empty(heads[0], dtype=dtype) if sinks else None,
        scales=(scales, scales) if int8 else None,
    )


def of_experts() -> None:
    """The shapes of Qwen3-30B-A3B, gpt-oss-20b and DeepSeek-V3's routing, with few and many rows."""
    grouped = {"scoring": "sigmoid", "normalise": True, "epsilon": 1e-20, "scale": 2.5, "groups": 8, "kept_groups": 4}
    for dtype, hidden, inner, clamp, routing in (
        (torch.bfloat16, 2048, 768, None, Routing(num_experts=128, top_k=8, normalise=True)),
        (torch.bfloat16, 2880, 2880, (1.702, 7.0), Routing(num_experts=32, top_k=4, scoring="softmax_chosen")),
        (torch.float16, 7168, 2048, None, Routing(num_experts=256, top_k=8, **grouped)),
        (torch.float32, 100, 50, None, Routing(num_experts=6, top_k=3)),
    ):
        count = routing.num_experts
        # Only shapes matter, and pages that nobody writes take no memory.
        gate_up, down = (
            torch.empty((count * 2 * inner, hidden), dtype=dtype),
            torch.empty((count * hidden, inner), dtype=dtype),
        )
        bias = (torch.empty(len(gate_up), dtype=dtype), torch.empty(len(down), dtype=dtype)) if clamp else None
        router_bias = torch.empty(count, dtype=dtype) if clamp else None
        correction = torch.empty(count) if routing.groups > 1 else None
        router, gate = torch.empty((count, hidden), dtype=dtype), torch.empty((1, hidden), dtype=dtype)
        for rows in (3, 100, 2000):
            x = torch.empty((rows, hidden), dtype=dtype)
            for shared, invariant in ((None, False), (x, True)):
                rest = (None if shared is None else gate, router_bias, bias, clamp)
                weights = (gate_up, down, router, routing, correction, *rest)
                experts(x, x, shared, *weights, num_multiprocessors=132, batch_invariant=invariant)
    up, down = torch.empty((8 * 1856, 1024), dtype=torch.bfloat16), torch.empty((8 * 1024, 1856), dtype=torch.bfloat16)
    x, routed = torch.empty((3, 1024), dtype=torch.bfloat16), torch.empty((3, 2688), dtype=torch.bfloat16)
    router, routing = torch.empty((8, 2688), dtype=torch.bfloat16), Routing(num_experts=8, top_k=2, scoring="sigmoid")
    experts(x, routed, None, up, down, router, routing, gated=False, num_multiprocessors=132)
    for dtype, kind in ((torch.float32, CODES[1]), *itertools.product((torch.bfloat16,), CODES)):
        of_coded_experts(dtype, kind)


def of_coded_experts(dtype: torch.dtype, kind: GroupKind) -> None:
    """Experts in codes of gpt-oss-20b's shape, and rows that pad a step."""
    count, width, cpu = 32, 2880, torch.device("cpu")
    routing = Routing(num_experts=count, top_k=4, scoring="softmax_chosen")
    gate_up, down = (CodedWeight(count * part * width, width, kind, dtype, cpu) for part in (2, 1))
    biases = (torch.empty(len(gate_up), dtype=dtype), torch.empty(len(down), dtype=dtype))
    router, bias = torch.empty((count, width), dtype=dtype), torch.empty(count, dtype=dtype)
    for rows in (3, 100, 2000):
        x, slots = torch.empty((rows, width), dtype=dtype), torch.empty(rows, dtype=torch.int64)
        rest = (router, routing, None, None, bias, biases, (1.702, 7.0))
        experts(x, x, None, gate_up, down, *rest, num_multiprocessors=132, slots=slots)


def in_fp8() -> None:
    for width in (896, 4864):
        quantize_rows(torch.empty((3, width), dtype=torch.bfloat16))
    for out, bias in ((896, None), (128 * 132 * 3, torch.empty(128 * 132 * 3, dtype=torch.bfloat16))):
        weight, scales = torch.empty((out, 896), dtype=torch.float8_e4m3fn), torch.empty(out)
        for rows, any_rows in ((3, False), (33, False), (3, True)):
            launch = gemm_launch(out, 896, 132, num_rows=rows, any_rows=any_rows)
            x = torch.empty((3, 896), dtype=torch.bfloat16)
            for gated in (False, True):
                linear_small(x, weight, bias, launch=launch, scales=scales, gated=gated)


def in_codes() -> None:
    ids = torch.zeros(3, dtype=torch.int32)
    for dtype, kind in ((torch.float32, CODES[1]), *itertools.product((torch.bfloat16,), CODES)):
        for out, bias in ((896, None), (128 * 132 * 3, torch.empty(128 * 132 * 3, dtype=dtype))):
            weight, x = CodedWeight(out, 896, kind, dtype, torch.device("cpu")), torch.empty((3, 896), dtype=dtype)
            for rows, any_rows, gated in itertools.product((3, 33), (False, True), (False, True)):
                launch = gemm_launch(out, 896, 132, num_rows=rows, any_rows=any_rows, itemsize=dtype.itemsize)
                coded_linear(x, weight, bias, launch=launch, gated=gated)
        decoded_rows(weight, dtype)
        decoded_rows(weight, dtype, ids=ids)


def short_conv_cell(channels: int, taps: int, dtype: torch.dtype, **how: Any) -> ShortConv:
    return ShortConv(torch.empty((channels, 1, taps), dtype=dtype), torch.empty(channels, dtype=dtype), **how)


def delta_cell(keys: int, values: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> DeltaRule:
    conv = torch.empty((2 * keys * key_dim + values * value_dim, 1, 4), dtype=dtype)
    heads = (torch.empty(values), torch.empty(values), torch.empty(value_dim, dtype=dtype))
    return DeltaRule(conv, *heads, 1e-6, keys, values, key_dim, value_dim)


def mamba_cell(shape: Mamba2Shape, dtype: torch.dtype, *, norm: bool = True, factors: bool = False) -> Mamba2:
    ranges = ((shape.inner, 0.5), (shape.channels - shape.inner, 2.0)) if factors else ()
    conv = short_conv_cell(shape.channels, 4, dtype, silu=True, factors=ranges)
    numbers = torch.empty(shape.heads)
    return Mamba2(shape, conv, numbers, numbers, numbers, torch.empty(shape.inner, dtype=dtype) if norm else None)


def recurrent() -> None:
    """The shapes of LFM2, Qwen3-Next, Mamba-Codestral, Falcon-H1 and odd ones, in decode steps and prompts."""
    codestral = Mamba2Shape(heads=128, head_dim=64, state_size=128, groups=8, norm_groups=8)
    hybrid = Mamba2Shape(heads=24, head_dim=64, state_size=256, gate_factor=0.4, step_factor=0.4)
    odd = Mamba2Shape(heads=6, head_dim=24, state_size=7, groups=2, time_limit=(0.1, 0.9), norm_first=True)
    cells: list[tuple[Cell, torch.dtype, list[int]]] = []
    for dtype in (torch.bfloat16, torch.float32):
        cells.append((short_conv_cell(2048, 3, dtype, gated=True), dtype, [3 * 2048]))
        for heads in ((16, 32, 128, 128), (2, 4, 12, 20)):
            delta = delta_cell(*heads, dtype)
            cells.append((delta, dtype, [delta.channels + heads[1] * heads[3], 2 * heads[1]]))
        for shape in (codestral, odd):
            cells.append((mamba_cell(shape, dtype), dtype, [shape.columns]))
    cells.append((mamba_cell(hybrid, torch.bfloat16, norm=False, factors=True), torch.bfloat16, [hybrid.columns]))
    for (cell, dtype, widths), one_token, span in itertools.product(cells, (True, False), (1024, 1 << 30)):
        num_rows, num_tokens = (4, 4) if one_token else (4, 100)
        starts, ids = torch.empty(num_rows + 1, dtype=torch.int32), torch.empty(num_rows, dtype=torch.int32)
        rows = StateRows(starts, ids, ids, torch.empty((64, 64), dtype=torch.int32), span, one_token)
        states = [torch.empty((2, *part.shape), dtype=part.dtype or dtype) for part in cell.parts]
        given = [torch.empty((num_tokens, width), dtype=dtype) for width in widths]
        cell_launch(cell, torch.device("cpu"))(given, states, rows)


def term_of(x: torch.Tensor, out: int, parts: int, max_rank: int, any_rows: bool = False) -> LowRankTerm:
    """Compile the product with matrices A, and return its result for a layer with ``out`` outputs."""
    layout = PoolLayout({"layer": SiteShape(out, x.shape[1], parts)}, max_rank, x.dtype)
    pool = LowRankPool(layout, 8, torch.device("cpu"))
    return shrink(x, pool.sites["layer"], torch.empty(len(x), dtype=torch.int32), any_rows=any_rows)


def of_adapters() -> None:
    """Layers with adapters: QKV, output and down, gate and up, and an output head, with few and many rows."""
    shapes = ((1152, 896, 3, False), (896, 4864, 1, False), (9728, 896, 2, True), (128 * 132 * 3, 896, 1, False))
    for dtype, (out, inputs, parts, gated) in itertools.product((torch.bfloat16, torch.float32), shapes):
        weight, bias = torch.empty((out, inputs), dtype=dtype), torch.empty(out, dtype=dtype)
        for rows, any_rows, rank in ((3, False, 16), (33, False, 64), (3, True, 64)):
            x = torch.empty((rows, inputs), dtype=dtype)
            term = term_of(x, out, parts, rank, any_rows)
            launch = gemm_launch(out, inputs, 132, num_rows=rows, any_rows=any_rows, itemsize=dtype.itemsize)
            linear_small(x, weight, bias, launch=launch, gated=gated, term=term)
        term = term_of(torch.empty((2000, inputs), dtype=dtype), out, parts, 64)
        expand(torch.empty((2000, out), dtype=dtype), term, bias if gated else None)
    kind, dtype = GroupKind(4, 128, True), torch.bfloat16
    coded = CodedWeight(1152, 896, kind, dtype, torch.device("cpu"))
    for rows in (3, 33):
        x = torch.empty((rows, 896), dtype=dtype)
        coded_linear(x, coded, None, launch=gemm_launch(1152, 896, 132, num_rows=rows), term=term_of(x, 1152, 3, 64))


def everything() -> None:
    for decode in (True, False):
        for few in (True, False):
            attention(torch.bfloat16, (14, 2), 64, None, decode, few)
    for decode, few in ((True, True), (True, False), (False, False)):
        attention(torch.bfloat16, (14, 2), 64, None, decode, few, shared=True)
    attention(torch.float16, (8, 2), 256, 1024, True, True, shared=True)
    attention(torch.bfloat16, (16, 8), 128, None, True, False, shared=True)
    attention(torch.float32, (8, 2), 128, None, True, False, shared=True)
    attention(torch.bfloat16, (16, 8), 128, 1024, True, True)
    attention(torch.bfloat16, (16, 8), 128, 1024, False, False)
    attention(torch.float16, (8, 1), 256, None, True, True)
    attention(torch.float16, (8, 1), 256, None, False, False)
    attention(torch.float32, (4, 4), 80, None, True, True)
    attention(torch.float32, (4, 4), 80, None, False, False)
    for decode in (True, False):  # Gemma 2 and gpt-oss
        attention(torch.bfloat16, (16, 8), 256, 4096, decode, True, cap=50.0)
        attention(torch.bfloat16, (64, 8), 64, 128, decode, True, sinks=True)
    attention(torch.bfloat16, (64, 8), 64, None, True, False, shared=True, cap=50.0, sinks=True)
    for decode in (True, False):
        attention(torch.bfloat16, (16, 8), 128, None, decode, False, int8=True)
        attention(torch.float16, (8, 1), 256, 1024, decode, True, int8=True)
        attention(torch.bfloat16, (64, 8), 64, 128, decode, True, sinks=True, int8=True)
    attention(torch.bfloat16, (14, 2), 64, None, True, True, shared=True, int8=True)
    attention(torch.float32, (4, 4), 80, None, True, True, int8=True)
    # These dtypes and head sizes include the case that needs the most shared memory.
    for dtype, head_dim in itertools.product((torch.bfloat16, torch.float32), (128, 256)):
        for decode in (True, False):
            attention(dtype, (MAX_GROUP, 1), head_dim, None, decode, False)
    cache = torch.empty((64, 16, 2, 64), dtype=torch.bfloat16)
    slots, norm = torch.empty(1, dtype=torch.int64), torch.empty(64, dtype=torch.bfloat16)
    qkv, half = torch.empty((1, 18 * 64), dtype=torch.bfloat16), torch.empty((1, 1, 32), dtype=torch.bfloat16)
    rope_and_cache(qkv, (half, half), cache, cache, slots, num_heads=14, q_norm=norm, k_norm=norm, eps=1e-6)
    rope_and_cache(qkv, (half, half), cache, cache, slots, num_heads=14)
    parts = torch.empty((3, 1, 18 * 64))
    rope_and_cache(parts, (half, half), cache, cache, slots, num_heads=14, q_norm=norm, k_norm=norm, bias=qkv[0])
    codes, scales = torch.empty((64, 16, 2, 64), dtype=torch.uint8), torch.empty((64, 16, 2, 2))
    how = {"num_heads": 14, "scales": (scales, scales), "dtype": torch.bfloat16}
    rope_and_cache(qkv, (half, half), codes, codes, slots, q_norm=norm, k_norm=norm, eps=1e-6, **how)
    rope_and_cache(parts, (half, half), codes, codes, slots, bias=qkv[0], **how)
    rotary_table(torch.empty(3, dtype=torch.int32), torch.empty(32), 1.0, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.empty((3, 896), dtype=dtype), torch.empty(896, dtype=dtype)
        rms_norm(x, weight, 1e-6)
        add_rms_norm(x, x, weight, 1e-6)
        for factor in (1.0, 0.3):
            silu_and_mul(torch.empty((3, 2 * 4864), dtype=dtype), factor)
        add_rms_norm(torch.empty((3, 3, 896)), x, weight, 1e-6, bias=weight)
        for out, bias in ((896, None), (128 * 132 * 3, torch.empty(128 * 132 * 3, dtype=dtype))):
            for rows, any_rows in ((3, False), (33, False), (3, True)):
                launch = gemm_launch(out, 896, 132, num_rows=rows, any_rows=any_rows, itemsize=dtype.itemsize)
                linear_small(x, torch.empty((out, 896), dtype=dtype), bias, launch=launch)
                linear_small(x, torch.empty((out, 896), dtype=dtype), bias, launch=launch, gated=True)
        logits, rows = torch.empty((2, 151_936), dtype=dtype), torch.zeros(2, dtype=torch.int32)
        state = DecodeState(4, 64, 2, 16, torch.device("cpu"))
        sample(logits, state.sampling, rows, rows, None)
        sample(logits, state.sampling, rows, rows, kept_ids(logits, state.sampling, rows))
        many, places = torch.empty((64, 151_936), dtype=dtype), torch.zeros(64, dtype=torch.int32)
        sample(many, state.sampling, places, places, None)
    state.note("tokens", np.arange(3), np.array([1, 2, 3]))
    state.flush()
    state.begin_step(state.inputs(2))
    state.store(rows, rows)
    of_experts()
    of_adapters()


if __name__ == "__main__":
    compiler = Compiler(int(sys.argv[1]))
    JITFunction.run = lambda self, *args, **options: compiler(self, *args, **options)
    dependent._is_known = lambda device: compiler.target.arch >= 90  # type: ignore[assignment]
    everything()
    recurrent()
    in_codes()
    if compiler.target.arch >= 89:  # with support of fp8
        in_fp8()
