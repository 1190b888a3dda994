"""Small fixed inputs for each kernel, and digests of the bits that a kernel computes from them.

The inputs are integers from a formula, divided by powers of two. They depend on no library's random numbers, so a
digest changes only if a kernel's arithmetic changes: its order of sums, its polynomials, its roundings. Rotary tables
are inputs too, because the kernels take cosines from the C library, which may change on its own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chairlift.kernels.cpu import library as lib
from chairlift.kernels.cpu import packed_codes
from chairlift.kernels.cpu.fused_op import OpFlag, OpKind
from chairlift.kernels.cpu.packed_codes import PackedCodes
from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.kernels.routing import Routing
from chairlift.kernels.weights import Native
from tests.kernels.cpu.one_op import Batch, Buffer, Machine, make_cache, packed, packed_bias, pool, run
from tests.kernels.cpu.test_experts import Program
from tests.kernels.cpu.test_head import STORED, Head
from tests.kernels.expert_layers import ExpertLayer

__all__ = ["CASES", "RECORD", "Record", "digest_of", "hashes", "numbers", "read_record"]

RECORD = Path(__file__).with_name("bits.json")
"""The record: {"epoch": number, "epochs": {number: why bits changed}, "digests": {case: {set: digest}}}."""
Record = dict[str, Any]
Case = Callable[[str], Sequence[Tensor]]
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def hashes(seed: int, *shape: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """24 bits of a hash of ``seed`` and of each element's index."""
    index = np.arange(int(np.prod(shape)), dtype=np.uint64)
    mixed = (index + np.uint64(seed * 1_000_003 + 1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(40)).astype(np.int64).reshape(shape)


def numbers(seed: int, *shape: int, unit: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tensor of numbers between -2 and 2, times ``unit``. Their exponents differ, so that sums are rounded, and another
    order of a sum gives other bits."""
    drawn = hashes(seed, *shape)
    whole = drawn % 65535 - 32767
    numbers = whole.astype(np.float32) / np.exp2(14 + (drawn >> 21)).astype(np.float32)
    return torch.from_numpy(numbers * np.float32(unit)).to(dtype)


def digest_of(case: str, isa: str) -> str:
    """Digest of the results of one of CASES with the kernels of one instruction set."""
    state = hashlib.sha256()
    for result in CASES[case](isa):
        state.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


def read_record() -> Record:
    """Content of RECORD."""
    record: Record = json.loads(RECORD.read_text())
    return record


# -- the cases ---------------------------------------------------------------------------------------------------------


def _machine(isa: str, dtype: str, int8_kv: bool = False) -> Machine:
    return Machine(isa, DTYPES[dtype], 2, int8_kv)


def _matmul(isa: str, dtype: str, rows: int, n: int, k: int, kind: OpKind, fields: dict[str, Any]) -> list[Tensor]:
    """A matmul with a dense weight, a bias and (without a gate) a residual."""
    machine, rng, gated = _machine(isa, dtype), random.Random(0), kind != OpKind.LINEAR
    x = Buffer(rng, machine, rows, k, numbers(1, rows, k))
    weight = numbers(2, n, k, unit=1 / 8, dtype=machine.dtype)
    out = Buffer(rng, machine, rows, n // 2 if gated else n)
    buffers = [x, out]
    if not gated:
        buffers.append(Buffer(rng, machine, rows, n, numbers(4, rows, n)))
        fields = {**fields, "aux": 2}
    bias, panels = packed_bias(numbers(3, n), gated=gated), packed(weight, gated=gated)
    run(machine, kind, Batch.flat(rows), buffers, n=n, k=k, in_=0, out=1, weight=panels, bias=bias, **fields)
    return [out.rows]


def _grouped(n: int, k: int, kind: GroupKind) -> GroupedRows:
    codes = torch.from_numpy(hashes(5, n, k) % (1 << kind.bits))
    groups = -(-k // kind.group)
    scales = torch.from_numpy(hashes(6, n, groups) % 1024 + 1).float() / 65536
    minimums = numbers(7, n, groups, unit=1 / 16).half().float() if kind.minimum else None
    return GroupedRows(kind, codes.to(torch.uint8), scales, minimums)


def _codes(isa: str, dtype: str, rows: int, n: int, k: int, kind: GroupKind) -> list[Tensor]:
    """A matmul with a weight in codes."""
    machine, rng = _machine(isa, dtype), random.Random(0)
    weight = PackedCodes(n, k, kind)
    weight.pack_rows(_grouped(n, k, kind))
    x, out = Buffer(rng, machine, rows, k, numbers(8, rows, k)), Buffer(rng, machine, rows, n)
    fields = {"format": weight.format, "group": weight.group, "weight": weight.memory.address}
    run(machine, OpKind.LINEAR, Batch.flat(rows), [x, out], n=weight.n, k=k, in_=0, out=1, **fields)
    return [out.rows]


def _attention(isa: str, dtype: str, int8_kv: bool, rows: Sequence[tuple[int, int]], fields: dict[str, Any]) -> Any:
    """Attention of rows (new tokens, context), 6 heads of 64 that share 2 KV heads, blocks of 16 tokens."""
    machine, rng, heads, kv_heads, dim = _machine(isa, dtype, int8_kv), random.Random(0), 6, 2, 64
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": dim}
    cache = make_cache(rng, machine, [end for _, end in rows], block_size=16, **sizes)
    for i, (_, end) in enumerate(rows):
        keys, values = (numbers(seed + i, end, kv_heads, dim, dtype=machine.dtype) for seed in (10, 20))
        cache.write(i, 0, keys, values)
    tokens = sum(new for new, _ in rows)
    queries = Buffer(rng, machine, tokens, heads * dim, numbers(30, tokens, heads * dim))
    out = Buffer(rng, machine, tokens, heads * dim)
    fields = {"sinks": numbers(31, heads), "scale": 0.125, "heads": heads, **sizes, **fields}
    run(machine, OpKind.ATTENTION, Batch(rows, [cache]), [queries, out], [cache], in_=0, out=1, **fields)
    return [out.rows]


def _head(isa: str, dtype: str) -> list[Tensor]:
    """Logits of an output head in float32, and its log-probabilities."""
    machine, rows, k, vocab = _machine(isa, dtype), 20, 600, 500
    hidden, weight = numbers(110, rows, k, dtype=machine.dtype), numbers(111, vocab, k, unit=1 / 8, dtype=machine.dtype)
    found = Head(hidden, weight, None, list(range(rows))).sample(
        machine, random.Random(0), list(range(rows)), [STORED] * rows
    )
    return [found.logits, torch.from_numpy(found.top_ids), torch.from_numpy(found.top_logprobs)]


def _heads(isa: str, dtype: str, int8_kv: bool) -> list[Tensor]:
    """q, k and v of 9 tokens, normalised, rotated by given cosines and sines, and written to the cache."""
    machine, rng, heads, kv_heads, dim, k = _machine(isa, dtype, int8_kv), random.Random(0), 4, 2, 32, 96
    n = (heads + 2 * kv_heads) * dim
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": dim}
    cache = make_cache(rng, machine, [9], block_size=16, **sizes)
    x, out = Buffer(rng, machine, 9, k, numbers(40, 9, k)), Buffer(rng, machine, 9, heads * dim)
    fields: dict[str, Any] = {
        "q_norm": numbers(41, dim),
        "k_norm": numbers(42, dim),
        "bias": packed_bias(numbers(43, n)),
    }
    fields["weight"] = packed(numbers(44, n, k, unit=1 / 8, dtype=machine.dtype))
    table = numbers(45, 9, dim, unit=1 / 2)
    batch = Batch([(9, 9)], [cache])
    fields |= {"in_": 0, "out": 1, "n": n, "k": k, "heads": heads, "eps": 1e-5, "rotary": 0, **sizes}
    run(machine, OpKind.QKV, batch, [x, out], [cache], [table], **fields)
    return [out.rows, *cache.read(0, 0, 9)]


def _norm(isa: str, dtype: str, kind: OpKind, width: int) -> list[Tensor]:
    machine, rng = _machine(isa, dtype), random.Random(0)
    x, out = Buffer(rng, machine, 7, width, numbers(50, 7, width)), Buffer(rng, machine, 7, width)
    fields = {"weight": numbers(51, width), "bias": numbers(52, width) if kind == OpKind.LAYER_NORM else None}
    run(machine, kind, Batch.flat(7), [x, out], in_=0, out=1, k=width, eps=1e-5, **fields)
    return [out.rows]


def _gated_norm(isa: str, dtype: str, flags: int) -> list[Tensor]:
    machine, rng, width = _machine(isa, dtype), random.Random(0), 96
    buffers = [Buffer(rng, machine, 5, width, numbers(seed, 5, width)) for seed in (60, 61)]
    out, weight = Buffer(rng, machine, 5, width), numbers(62, width)
    fields = {"in_": 0, "aux": 1, "out": 2, "n": width, "heads": 3, "eps": 1e-5, "flags": flags, "weight": weight}
    run(machine, OpKind.GATED_NORM, Batch.flat(5), [*buffers, out], **fields)
    return [out.rows]


class _States:
    """States of one recurrent layer, ``size`` bytes for each of two rows. It stands for a cache of ``one_op``."""

    def __init__(self, size: int) -> None:
        self.memory = torch.zeros(2, size, dtype=torch.uint8)
        self.table = np.arange(2, dtype=np.int32)[:, None]
        self.struct = lib.KVLayer(
            kv=self.memory.data_ptr(), group=0, kv_heads=1, head_dim=size, block_size=1 << 20,
            num_blocks=2, kind=lib.STATE_KIND,
        )  # fmt: skip

    def slots(self, row: int, start: int, end: int) -> Any:
        return np.zeros(end - start, dtype=np.int64)


def _recurrent(isa: str, dtype: str, kind: OpKind, widths: Sequence[int], size: int, fields: dict[str, Any]) -> Any:
    """Two rows of 19 tokens, then one more token for each: results and states. ``widths`` are the columns of the
    inputs."""
    machine, rng, states, results = _machine(isa, dtype), random.Random(0), _States(size), []
    for step, (new, end) in enumerate(((19, 19), (1, 20))):
        inputs = [Buffer(rng, machine, 2 * new, w, numbers(70 + step + i, 2 * new, w)) for i, w in enumerate(widths)]
        out = Buffer(rng, machine, 2 * new, fields["n"])
        more = {"aux": 1} if len(widths) > 1 else {}
        batch: Any = Batch([(new, end)] * 2, [states])  # type: ignore[list-item]
        buffers, caches = [*inputs, out], [states]
        run(machine, kind, batch, buffers, caches, in_=0, out=len(widths), layer=0, **more, **fields)  # type: ignore[arg-type]
        results.append(out.rows)
    return [*results, states.memory]


def _short_conv(isa: str, dtype: str) -> Any:
    width, taps = 64, 4
    size = (taps - 1) * width * DTYPES[dtype].itemsize
    fields = {
        "n": width,
        "k": taps,
        "flags": OpFlag.SILU,
        "weight": numbers(80, taps, width),
        "bias": numbers(81, width),
    }
    return _recurrent(isa, dtype, OpKind.SHORT_CONV, [width], size, fields)


def _mamba(isa: str, dtype: str) -> Any:
    heads, dim, groups, state = 4, 32, 2, 16
    fields: dict[str, Any] = {"n": heads * dim, "k": state, "heads": heads, "kv_heads": groups, "head_dim": dim}
    fields |= {"weight": torch.zeros(heads), "bias": numbers(82, heads), "q_norm": numbers(83, heads)}
    widths = [heads * dim + 2 * groups * state, heads]
    return _recurrent(
        isa, dtype, OpKind.MAMBA_SCAN, widths, 4 * heads * dim * state, fields | {"scale": 0.0, "cap": 8.0}
    )


def _delta(isa: str, dtype: str) -> Any:
    heads, dim, key_heads, size = 4, 32, 2, 32
    fields: dict[str, Any] = {"n": heads * dim, "k": size, "heads": heads, "kv_heads": key_heads, "head_dim": dim}
    fields |= {"weight": torch.zeros(heads), "bias": numbers(84, heads)}
    widths = [2 * key_heads * size + heads * dim, 2 * heads]
    return _recurrent(isa, dtype, OpKind.DELTA_SCAN, widths, 4 * heads * dim * size, fields)


def _experts(isa: str, dtype: str, codes: GroupKind | None) -> list[Tensor]:
    """40 tokens, 6 experts of which 3 are chosen, and a shared expert's rows."""
    count, hidden, inner, to = 6, 96, 64, DTYPES[dtype]
    routing = Routing(num_experts=count, top_k=3, scoring="softmax", normalise=True)
    gate_up = numbers(90, count * 2 * inner, hidden, unit=1 / 8, dtype=to)
    down = numbers(91, count * hidden, inner, unit=1 / 8, dtype=to)
    router = numbers(92, count, hidden, unit=1 / 8, dtype=to)
    shared_gate = numbers(93, 1, hidden, unit=1 / 8, dtype=to)
    layer = ExpertLayer(routing, gate_up, down, router, None, shared_gate, True)
    x, shared = (numbers(seed, 40, hidden, dtype=to) for seed in (94, 95))
    with pytest.MonkeyPatch.context() as patch:
        # The record is of kernels. A better search of scales gives other weights, but no kernel other bits.
        patch.setattr(packed_codes, "rounded_rows", GroupedRows.quantize)
        program = Program(layer, x, shared, isa=isa, threads=2, weight_format=Native(codes), max_tokens=40)
    return [program(list(range(40)))]


def _sampled(isa: str, settings: dict[str, float]) -> list[Tensor]:
    """Tokens and log-probabilities of 64 rows with their own seeds and positions, 3,001 ids."""
    count, vocab, tops = 64, 3001, 4
    logits = torch.zeros(count, -(-vocab // 16) * 16)
    logits[:, :vocab] = numbers(100, count, vocab)
    rows: np.ndarray[Any, Any] = np.zeros(count, dtype=lib.SAMPLING_ROW)
    top_ids, top = np.zeros((count, tops + 1), np.int32), np.zeros((count, tops + 1), np.float32)
    for i in range(count):
        plain: dict[str, Any] = {
            "top_p": 1.0,
            "repetition": 1.0,
            "target": -1,
            "num_logprobs": tops,
            "temperature": 1.0,
        }
        plain |= {"seed": 7919 * i, "position": 3 * i, "top_ids": top_ids[i].ctypes.data}
        plain |= {"top_logprobs": top[i].ctypes.data, **settings}
        for name, value in plain.items():
            rows[i][name] = value
    arguments = logits.data_ptr(), logits.stride(0), count, vocab, rows.ctypes.data, lib.ISA_NAMES.index(isa)
    assert lib.require().cl_sample(pool(2).handle, *arguments) == 0
    return [torch.from_numpy(rows["token"].copy()), torch.from_numpy(top_ids), torch.from_numpy(top)]


def _cases() -> dict[str, Case]:
    """Name of a case -> function of an instruction set."""
    part, cases = functools.partial, dict[str, Case]()
    kinds = [GroupKind(bits, group, low) for bits in (8, 4) for group, low in ((32, False), (128, True))]
    kinds += [GroupKind(4, 32, e2m1=True)]
    for name in DTYPES:
        for rows, n, k in ((64, 512, 600), (24, 512, 4100)):
            cases[f"matmul {name} {rows}x{n}x{k}"] = part(
                _matmul, dtype=name, rows=rows, n=n, k=k, kind=OpKind.LINEAR, fields={}
            )
        cases[f"matmul silu {name} 40x128x600"] = part(
            _matmul, dtype=name, rows=40, n=128, k=600, kind=OpKind.LINEAR_SILU, fields={}
        )
        cases[f"matmul gelu {name} 40x128x600"] = part(
            _matmul, dtype=name, rows=40, n=128, k=600, kind=OpKind.LINEAR_GELU, fields={}
        )
        cases[f"output head {name} 20x500x600"] = part(_head, dtype=name)
        for kind in kinds:
            what = f"{'e2m1' if kind.e2m1 else f'int{kind.bits}'}-g{kind.group}{'-min' if kind.minimum else ''}"
            cases[f"matmul {what} {name} 40x96x700"] = part(_codes, dtype=name, rows=40, n=96, k=700, kind=kind)
        for int8_kv, kv in ((False, name), (True, "int8")):
            settings: dict[str, Any] = {"dtype": name, "int8_kv": int8_kv}
            decode = part(_attention, rows=[(1, 300), (1, 2100), (1, 17)], fields={}, **settings)
            cases[f"attention decode {name} kv-{kv}"] = decode
            chunk = part(_attention, rows=[(33, 300), (20, 20)], fields={"window": 250, "cap": 30.0}, **settings)
            cases[f"attention chunk {name} kv-{kv}"] = chunk
            cases[f"heads {name} kv-{kv}"] = part(_heads, **settings)
        for kind_of_norm in (OpKind.RMS_NORM, OpKind.LAYER_NORM):
            for width in (576, 100):
                what = kind_of_norm.name.lower().replace("_", " ")
                cases[f"{what} {name} 7x{width}"] = part(_norm, dtype=name, kind=kind_of_norm, width=width)
        cases[f"gated norm {name} 5x96"] = part(_gated_norm, dtype=name, flags=0)
        cases[f"gated norm first {name} 5x96"] = part(_gated_norm, dtype=name, flags=OpFlag.NORM_FIRST)
        cases[f"short conv {name}"] = part(_short_conv, dtype=name)
        cases[f"mamba scan {name}"] = part(_mamba, dtype=name)
        cases[f"delta scan {name}"] = part(_delta, dtype=name)
        for codes, what in ((None, "dense"), (GroupKind(8, 32), "int8-g32"), (GroupKind(4, 32), "int4-g32")):
            cases[f"experts {what} {name}"] = part(_experts, dtype=name, codes=codes)
    cases["sampling"] = part(_sampled, settings={})
    cases["sampling top-k top-p"] = part(_sampled, settings={"top_k": 50, "top_p": 0.9, "temperature": 0.7})
    return cases


CASES = _cases()
