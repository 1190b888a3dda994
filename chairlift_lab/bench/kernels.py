"""``bench kernels``: compares the speed of the CPU kernels, or of the Triton kernels on a GPU, with the machine's
limits.

The cases are matrix multiplications, layers of experts, attention over the paged cache, and the output head with
sampling. Every case is timed several times, in turn with all other cases of its kind, so that a slow minute of the
machine affects all of them. The median is reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

from chairlift.errors import ConfigError, InvariantError
from chairlift.executor.kv_tensors import available_memory
from chairlift.kernels.cpu.library import ThreadPool
from chairlift.kernels.grouped import GroupKind
from chairlift.kernels.roof import GPU, Roof
from chairlift_lab.bench.limits import Limits, LimitsNow, beyond_cache
from chairlift_lab.bench.machine import HostMachine
from chairlift_lab.bench.programs import (
    BLOCK_SIZE,
    ExpertTokens,
    Kernels,
    Prepare,
    expert_bytes,
    kv_bytes,
    weight_bytes,
)
from chairlift_lab.bench.shapes import ExpertLayer, LayerShapes, Shapes

if TYPE_CHECKING:
    from chairlift_lab.bench.device_programs import DeviceKernels

    AnyKernels: TypeAlias = Kernels | DeviceKernels

__all__ = ["KernelSettings", "KernelTiming", "Measurement", "measure_kernels"]

Kind = Literal["product", "experts", "decode", "shared", "prefill", "head"]

_MOST_HEAD_ROWS: Final = 256
"""Maximum number of rows of an output head. It needs one row per sequence, not one per prompt token."""
_LEAST_PREFILL: Final = 512
"""Minimum number of tokens in a measured prefill step. Several short prompts are put into one step."""
_MOST_COUNT: Final = 512
_ANSWERS: Final = 16
"""Number of sequences that share a prefix. Each has :data:`_OWN_TOKENS` tokens of its own."""
_OWN_TOKENS: Final = 48


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSettings:
    """Choice of kernels and sizes to measure, and the time to spend on them."""

    threads: int
    isa: str
    """Instruction set of the CPU kernels, or ``gpu`` for the Triton kernels on ``device``; then ``threads`` is 1."""
    dtype: torch.dtype
    """Dtype of all numbers. With float8_e4m3fn (GPU only), only matrix multiplications with weights of this dtype are
    measured."""
    shapes: Shapes
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 256, 1024)
    """Numbers of rows (tokens) of the measured matrix multiplications and experts."""
    contexts: tuple[int, ...] = (128, 512, 2048, 8192)
    """Numbers of tokens that a query attends to."""
    batches: tuple[int, ...] = (1, 8, 32)
    """Numbers of sequences that decode together."""
    repeats: int = 5
    seconds: float = 0.02
    """Length of a run. The number of operations is chosen so that a run would take this time at the machine's
    limits."""
    device: str = "cpu"
    kind: GroupKind | None = None
    """Format of quantised weights; attention is then not measured. None: the weights have type ``dtype``."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelTiming:
    """Times of all runs of one kernel variant, in seconds per operation."""

    median: float
    best: float
    worst: float
    share: float
    """Fraction of the limit that was reached: the minimum time at the measured limits, divided by the time of the run.
    The median over the runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """Measured times of one case (an operation with given sizes), in all its variants."""

    kind: Kind
    labels: dict[str, int | str]
    nbytes: int
    """Number of bytes that one operation reads: weights, or K and V. In a layer of experts, only chosen experts are
    counted."""
    operations: int
    """Number of additions and multiplications of one operation."""
    count: int
    """Number of times that a run repeats the operation."""
    timings: dict[str, KernelTiming]
    """Variant -> times. Matrix multiplications and experts have ``all``; on a GPU they have ``streamed`` (for few rows)
    and ``library`` (cuBLAS). Attention has ``paged`` (shuffled blocks) and ``in order``, or, with a shared prefix,
    ``together`` and ``apart``. Output heads have ``greedy``
    and ``drawn``."""
    extra_cost: float | None
    """Additional time of one variant relative to another, as a fraction (median over the rounds): ``paged`` to ``in
    order``, ``drawn`` to ``greedy``, ``streamed`` to ``library``, or ``apart`` to ``together``.
    None if the case has only one variant."""

    @property
    def main(self) -> KernelTiming:
        """Times of the first variant, which the tables show."""
        return next(iter(self.timings.values()))


@dataclasses.dataclass(frozen=True, slots=True)
class _Case:
    kind: Kind
    labels: dict[str, int | str]
    nbytes: int
    operations: int
    footprint: int
    """Number of bytes that the operands of one operation occupy, with padding."""
    variants: Callable[[AnyKernels, int], dict[str, Prepare]]
    """Function of the kernels and a number of repetitions. Returns variant -> prepared run."""


def measure_kernels(
    settings: KernelSettings, machine: HostMachine, limits: Limits, now: Callable[[], Roof] | None = None
) -> Iterator[list[Measurement]]:
    """Measure all cases. Yields one list per kind of kernel; a kind without cases is left out.

    Args:
        settings: What to measure. machine: This machine. limits: Measured limits. They determine the number of
        operations per run; on a GPU, also the ``share`` of timings. now: Function that returns the present limits, for
        the ``share`` of timings on a CPU. By default the limits are
            measured between the runs.

    Raises ConfigError when an operation reads more than a quarter of the memory, OSError when the compiled kernels are
    missing or there are too few processors, and torch.OutOfMemoryError when the GPU has too little memory.
    """
    products_of = torch.int8 if settings.kind else settings.dtype
    roof = limits.roof(settings.isa, products_of, settings.threads)
    device = torch.device(settings.device)
    kinds = [list(_products(settings)), list(_experts(settings))]
    if settings.kind is not None:
        kinds += [list(_heads(settings))]
    elif settings.dtype != torch.float8_e4m3fn:
        shared = _shared(settings) if settings.isa != GPU else ()
        kinds += [list(cases) for cases in (_decodes(settings), shared, _prefills(settings), _heads(settings))]
    largest = max((case for cases in kinds for case in cases), key=lambda case: case.footprint)
    limit = available_memory(device) // 4
    if largest.footprint > limit:
        labels = ", ".join(f"{name} {value}" for name, value in largest.labels.items())
        raise ConfigError(
            f"{labels}: one {largest.kind} reads {largest.footprint / 2**30:.1f} GiB, but the limit is"
            f" {limit / 2**30:.1f} GiB, a quarter of the memory; give smaller shapes, contexts or batches"
        )
    with contextlib.ExitStack() as stack:
        kernels: AnyKernels
        if settings.isa == GPU:
            from chairlift_lab.bench.device_programs import DeviceKernels  # Triton may not be installed

            kernels = DeviceKernels(device, settings.dtype, largest.footprint)
            now = now or (lambda: roof)
        else:
            pool = ThreadPool(settings.threads)
            stack.callback(pool.close)
            region = max(beyond_cache(machine), largest.footprint)
            kernels = Kernels(pool, settings.isa, settings.dtype, region, settings.kind)
            now = now or LimitsNow(pool, machine, settings.isa, products_of)
        for cases in filter(None, kinds):
            yield _measure(cases, kernels, roof, settings, now)


def _products(settings: KernelSettings) -> Iterator[_Case]:
    itemsize = settings.dtype.itemsize
    for shape, rows in itertools.product(settings.shapes.products, settings.rows):
        k = shape.k
        n = shape.n

        def variants(kernels: AnyKernels, count: int, k: int = k, n: int = n, rows: int = rows) -> dict[str, Prepare]:
            return kernels.products(k, n, rows, count)

        labels: dict[str, int | str] = {"shape": shape.name, "k": k, "n": n, "rows": rows}
        nbytes = k * n * itemsize if settings.kind is None else weight_bytes(n, k, settings.dtype, settings.kind)
        footprint = nbytes if settings.isa == GPU else weight_bytes(n, k, settings.dtype, settings.kind)
        yield _Case("product", labels, nbytes, 2 * rows * k * n, footprint, variants)


def _experts(settings: KernelSettings) -> Iterator[_Case]:
    dtype = settings.dtype
    kind = settings.kind
    for layer, rows in itertools.product(settings.shapes.experts, settings.rows):
        tokens = ExpertTokens(layer, rows, dtype)

        def variants(
            kernels: AnyKernels, count: int, layer: ExpertLayer = layer, tokens: ExpertTokens = tokens
        ) -> dict[str, Prepare]:
            if not isinstance(kernels, Kernels):
                raise InvariantError("a GPU has no kernels for experts")
            return kernels.experts(layer, tokens, count)

        labels: dict[str, int | str] = {"shape": layer.name, "experts": layer.num_experts, "chosen": layer.chosen}
        labels |= {"k": layer.k, "inner": layer.inner, "rows": rows, "touched": tokens.touched}
        footprint = sum(expert_bytes(layer, dtype, kind))
        numbers = 3 * layer.k * layer.inner
        each = numbers * dtype.itemsize if kind is None else footprint // layer.num_experts
        yield _Case("experts", labels, tokens.touched * each, 2 * rows * layer.chosen * numbers, footprint, variants)


def _decodes(settings: KernelSettings) -> Iterator[_Case]:
    for model, batch, context in itertools.product(settings.shapes.models, settings.batches, settings.contexts):
        yield _attention("decode", model, 1, context, batch, settings.dtype)


def _shared(settings: KernelSettings) -> Iterator[_Case]:
    """Decode attention of several answers to one prompt. Bytes are counted once for all that share them."""
    for model, context in itertools.product(settings.shapes.models, settings.contexts):
        prefix = (context - _OWN_TOKENS) // BLOCK_SIZE * BLOCK_SIZE
        if prefix < _OWN_TOKENS:
            continue

        def variants(
            kernels: AnyKernels, count: int, model: LayerShapes = model, context: int = context, prefix: int = prefix
        ) -> dict[str, Prepare]:
            if not isinstance(kernels, Kernels):
                raise InvariantError("a GPU has no kernels for shared prefixes")
            case = {"queries": 1, "context": context, "batch": _ANSWERS, "count": count, "shared": prefix}
            return {name: kernels.attention(model, shuffled=True, apart=name == "apart", **case) for name in _WAYS}

        labels: dict[str, int | str] = {"shape": model.name, "heads": model.heads, "kv_heads": model.kv_heads}
        labels |= {"head_dim": model.head_dim, "batch": _ANSWERS, "context": context, "prefix": prefix}
        tokens = prefix + _ANSWERS * (context - prefix)
        nbytes = 2 * tokens * model.kv_heads * model.head_dim * settings.dtype.itemsize
        operations = 4 * model.heads * model.head_dim * _ANSWERS * context
        footprint = kv_bytes(model, 1, prefix, settings.dtype) + kv_bytes(
            model, _ANSWERS, context - prefix, settings.dtype
        )
        yield _Case("shared", labels, nbytes, operations, footprint, variants)


_WAYS: Final = ("together", "apart")


def _prefills(settings: KernelSettings) -> Iterator[_Case]:
    for model, context in itertools.product(settings.shapes.models, settings.contexts):
        yield _attention("prefill", model, context, context, max(1, _LEAST_PREFILL // context), settings.dtype)


def _attention(kind: Kind, model: LayerShapes, queries: int, context: int, batch: int, dtype: torch.dtype) -> _Case:
    def variants(kernels: AnyKernels, count: int) -> dict[str, Prepare]:
        of_order = functools.partial(
            kernels.attention, model, queries=queries, context=context, batch=batch, count=count
        )
        return {"paged": of_order(shuffled=True), "in order": of_order(shuffled=False)}

    seen = batch * (queries * context - queries * (queries - 1) // 2)  # query-key pairs under the causal mask
    labels: dict[str, int | str] = {"shape": model.name, "heads": model.heads, "kv_heads": model.kv_heads}
    labels |= {"head_dim": model.head_dim, "batch": batch, "context": context}
    nbytes = 2 * batch * context * model.kv_heads * model.head_dim * dtype.itemsize
    footprint = kv_bytes(model, batch, context, dtype)
    return _Case(kind, labels, nbytes, 4 * model.heads * model.head_dim * seen, footprint, variants)


def _heads(settings: KernelSettings) -> Iterator[_Case]:
    for model, rows in itertools.product(settings.shapes.models, settings.rows):
        if rows > _MOST_HEAD_ROWS:
            continue
        k = model.hidden
        vocab = model.vocab_size

        def variants(
            kernels: AnyKernels, count: int, k: int = k, vocab: int = vocab, rows: int = rows
        ) -> dict[str, Prepare]:
            temperatures = {"greedy": 0.0, "drawn": 1.0}
            return {
                name: kernels.head(k, vocab, rows, temperature=value, count=count)
                for name, value in temperatures.items()
            }

        labels: dict[str, int | str] = {"shape": model.name, "k": k, "n": vocab, "rows": rows}
        footprint = weight_bytes(vocab, k, settings.dtype, settings.kind)
        nbytes = k * vocab * settings.dtype.itemsize if settings.kind is None else footprint
        yield _Case("head", labels, nbytes, 2 * rows * k * vocab, footprint, variants)


def _measure(
    cases: Sequence[_Case], kernels: AnyKernels, roof: Roof, settings: KernelSettings, now: Callable[[], Roof]
) -> list[Measurement]:
    """Time every variant of every case once per round. The first round is a warm-up."""
    bounds = [(case.nbytes, case.operations) for case in cases]
    counts = [int(min(max(settings.seconds / roof.seconds(*bound), 1), _MOST_COUNT)) for bound in bounds]
    prepares = [case.variants(kernels, count) for case, count in zip(cases, counts, strict=True)]
    times = [{name: list[float]() for name in variants} for variants in prepares]
    shares = [{name: list[float]() for name in variants} for variants in prepares]
    before = now()
    for round_number in range(1 + settings.repeats):
        for bound, variants, count, timings, fractions in zip(bounds, prepares, counts, times, shares, strict=True):
            for name, prepare in variants.items():
                run = prepare()
                begin = time.perf_counter()
                run()
                seconds = (time.perf_counter() - begin) / count
                after = now()
                if round_number > 0:
                    timings[name].append(seconds)
                    fractions[name].append((before.seconds(*bound) + after.seconds(*bound)) / 2 / seconds)
                before = after
    return [
        Measurement(
            case.kind,
            case.labels,
            case.nbytes,
            case.operations,
            count,
            {name: _timing(each, fractions[name]) for name, each in timings.items()},
            _extra_cost(timings),
        )
        for case, count, timings, fractions in zip(cases, counts, times, shares, strict=True)
    ]


def _timing(times: Sequence[float], shares: Sequence[float]) -> KernelTiming:
    return KernelTiming(statistics.median(times), min(times), max(times), statistics.median(shares))


def _extra_cost(timings: Mapping[str, Sequence[float]]) -> float | None:
    """Compute ``Measurement.extra_cost``. Times are compared within a round, because a disturbance of the machine
    affects all variants of the round."""
    for costly, plain in (("paged", "in order"), ("drawn", "greedy"), ("streamed", "library"), ("apart", "together")):
        if costly in timings:
            return (
                statistics.median(one / other for one, other in zip(timings[costly], timings[plain], strict=True)) - 1
            )
    return None
