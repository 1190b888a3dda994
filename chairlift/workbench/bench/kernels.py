"""``bench kernels``: the compiled kernels relative to this machine's limits, or the Triton kernels relative to a GPU's.

Cases are products, layers of experts, attention over the paged cache, and the output head with the choice of the
token. Every case is timed several times, in turns with all others of its kind, so that a slow minute of the machine
affects all of them. The median counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

from chairlift.errors import ConfigError, InvariantError
from chairlift.executor.kv_tensors import available_memory
from chairlift.kernels.cpu.library import Pool
from chairlift.kernels.grouped import GroupKind
from chairlift.kernels.roof import GPU, Roof
from chairlift.workbench.bench.limits import Limits, LimitsNow, beyond_cache
from chairlift.workbench.bench.machine import Machine
from chairlift.workbench.bench.programs import ExpertTokens, Kernels, Prepare, expert_bytes, kv_bytes, weight_bytes
from chairlift.workbench.bench.shapes import ExpertLayer, ModelShape, Shapes

if TYPE_CHECKING:
    from chairlift.workbench.bench.device_programs import DeviceKernels

    AnyKernels: TypeAlias = Kernels | DeviceKernels

__all__ = ["KernelSettings", "Measurement", "Timing", "measure_kernels"]

Kind = Literal["product", "experts", "decode", "prefill", "head"]

_MOST_HEAD_ROWS: Final = 256
"""An output head has a row per sequence, so prompts don't add to it."""
_LEAST_PREFILL: Final = 512
"""Tokens in a step of prefill: short prompts come several at a time."""
_MOST_COUNT: Final = 512


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSettings:
    """Choice of kernels and sizes to measure, and the time to spend on them."""

    threads: int
    isa: str
    """A path of the compiled kernels, or ``gpu`` for the Triton kernels on ``device``, which count as one thread."""
    dtype: torch.dtype
    """Type of all numbers. float8_e4m3fn (GPU only) is that of product weights, and only products are measured."""
    shapes: Shapes
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 256, 1024)
    """Tokens of a product."""
    contexts: tuple[int, ...] = (128, 512, 2048, 8192)
    """Tokens that a query sees."""
    batches: tuple[int, ...] = (1, 8, 32)
    """Sequences that decode together."""
    repeats: int = 5
    seconds: float = 0.02
    """Seconds that a run would take at the speed of the limits: one operation, or several up to this time."""
    device: str = "cpu"
    kind: GroupKind | None = None
    """Format of weights in codes; then products, experts and output heads are measured. None: weights in ``dtype``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Runs of one variant; times are per operation, in seconds."""

    median: float
    best: float
    worst: float
    share: float
    """The least time that the limits around a run allow, divided by the time it took: the median."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """One case and its variants."""

    kind: Kind
    labels: dict[str, int | str]
    nbytes: int
    """Bytes of weights, or of K and V, that one operation reads. Of experts only those that its tokens choose."""
    operations: int
    """Additions and multiplications of one operation."""
    count: int
    """Operations per run."""
    timings: dict[str, Timing]
    """Times of variants. Products and experts have ``all``, on GPUs ``streamed`` (few rows) and ``library`` (cuBLAS);
    attention has ``paged`` and ``in order``; output heads have ``greedy`` and ``drawn``."""
    extra_cost: float | None
    """Additional time as a fraction (median over rounds): of paged attention over attention in order, of sampling over
    the arg max, or of the product that streams its weight over cuBLAS. None for other products."""

    @property
    def main(self) -> Timing:
        """The first of the variants."""
        return next(iter(self.timings.values()))


@dataclasses.dataclass(frozen=True, slots=True)
class _Case:
    kind: Kind
    labels: dict[str, int | str]
    nbytes: int
    operations: int
    taken: int
    """Bytes that one operation takes up, with padding."""
    variants: Callable[[AnyKernels, int], dict[str, Prepare]]
    """Makes runs with ``count`` repetitions."""


def measure_kernels(
    settings: KernelSettings, machine: Machine, limits: Limits, now: Callable[[], Roof] | None = None
) -> Iterator[list[Measurement]]:
    """Measure all cases, kind by kind. A kind without cases is left out.

    ``limits`` have the length of a run, and on a GPU the limits for the shares. On a CPU the shares are relative to the
    limits ``now``, measured between the runs unless given. Raises ConfigError when a case reads more at once than a
    quarter of the memory, OSError without the compiled kernels or enough threads, and torch.OutOfMemoryError on a GPU
    without free memory.
    """
    products_of = torch.int8 if settings.kind else settings.dtype
    roof = limits.roof(settings.isa, products_of, settings.threads)
    device = torch.device(settings.device)
    kinds = [list(_products(settings)), list(_experts(settings))]
    if settings.kind is not None:
        kinds += [list(_heads(settings))]
    elif settings.dtype != torch.float8_e4m3fn:
        kinds += [list(cases) for cases in (_decodes(settings), _prefills(settings), _heads(settings))]
    largest = max((case for cases in kinds for case in cases), key=lambda case: case.taken)
    most = available_memory(device) // 4
    if largest.taken > most:
        labels = ", ".join(f"{name} {value}" for name, value in largest.labels.items())
        raise ConfigError(
            f"{labels}: one {largest.kind} reads {largest.taken / 2**30:.1f} GiB, and may read {most / 2**30:.1f} GiB, "
            "a quarter of the memory; give smaller shapes, contexts or batches"
        )
    with contextlib.ExitStack() as stack:
        kernels: AnyKernels
        if settings.isa == GPU:
            from chairlift.workbench.bench.device_programs import DeviceKernels  # Triton may not be installed

            kernels = DeviceKernels(device, settings.dtype, largest.taken)
            now = now or (lambda: roof)
        else:
            pool = Pool(settings.threads)
            stack.callback(pool.close)
            region = max(beyond_cache(machine), largest.taken)
            kernels = Kernels(pool, settings.isa, settings.dtype, region, settings.kind)
            now = now or LimitsNow(pool, machine, settings.isa, products_of)
        for cases in filter(None, kinds):
            yield _measure(cases, kernels, roof, settings, now)


def _products(settings: KernelSettings) -> Iterator[_Case]:
    itemsize = settings.dtype.itemsize
    for shape, rows in itertools.product(settings.shapes.products, settings.rows):
        k, n = shape.k, shape.n

        def variants(kernels: AnyKernels, count: int, k: int = k, n: int = n, rows: int = rows) -> dict[str, Prepare]:
            return kernels.products(k, n, rows, count)

        labels: dict[str, int | str] = {"shape": shape.name, "k": k, "n": n, "rows": rows}
        nbytes = k * n * itemsize if settings.kind is None else weight_bytes(n, k, settings.dtype, settings.kind)
        taken = nbytes if settings.isa == GPU else weight_bytes(n, k, settings.dtype, settings.kind)
        yield _Case("product", labels, nbytes, 2 * rows * k * n, taken, variants)


def _experts(settings: KernelSettings) -> Iterator[_Case]:
    dtype, kind = settings.dtype, settings.kind
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
        taken = sum(expert_bytes(layer, dtype, kind))
        numbers = 3 * layer.k * layer.inner
        each = numbers * dtype.itemsize if kind is None else taken // layer.num_experts
        yield _Case("experts", labels, tokens.touched * each, 2 * rows * layer.chosen * numbers, taken, variants)


def _decodes(settings: KernelSettings) -> Iterator[_Case]:
    for model, batch, context in itertools.product(settings.shapes.models, settings.batches, settings.contexts):
        yield _attention("decode", model, 1, context, batch, settings.dtype)


def _prefills(settings: KernelSettings) -> Iterator[_Case]:
    for model, context in itertools.product(settings.shapes.models, settings.contexts):
        yield _attention("prefill", model, context, context, max(1, _LEAST_PREFILL // context), settings.dtype)


def _attention(kind: Kind, model: ModelShape, queries: int, context: int, batch: int, dtype: torch.dtype) -> _Case:
    def variants(kernels: AnyKernels, count: int) -> dict[str, Prepare]:
        case = {"queries": queries, "context": context, "batch": batch, "count": count}
        orders = {"paged": True, "in order": False}
        return {name: kernels.attention(model, shuffled=shuffled, **case) for name, shuffled in orders.items()}

    seen = batch * (queries * context - queries * (queries - 1) // 2)  # query-key pairs under the causal mask
    labels: dict[str, int | str] = {"shape": model.name, "heads": model.heads, "kv_heads": model.kv_heads}
    labels |= {"head_dim": model.head_dim, "batch": batch, "context": context}
    nbytes = 2 * batch * context * model.kv_heads * model.head_dim * dtype.itemsize
    taken = kv_bytes(model, batch, context, dtype)
    return _Case(kind, labels, nbytes, 4 * model.heads * model.head_dim * seen, taken, variants)


def _heads(settings: KernelSettings) -> Iterator[_Case]:
    for model, rows in itertools.product(settings.shapes.models, settings.rows):
        if rows > _MOST_HEAD_ROWS:
            continue
        k, vocab = model.hidden, model.vocab_size

        def variants(
            kernels: AnyKernels, count: int, k: int = k, vocab: int = vocab, rows: int = rows
        ) -> dict[str, Prepare]:
            temperatures = {"greedy": 0.0, "drawn": 1.0}
            return {
                name: kernels.head(k, vocab, rows, temperature=value, count=count)
                for name, value in temperatures.items()
            }

        labels: dict[str, int | str] = {"shape": model.name, "k": k, "n": vocab, "rows": rows}
        taken = weight_bytes(vocab, k, settings.dtype, settings.kind)
        nbytes = k * vocab * settings.dtype.itemsize if settings.kind is None else taken
        yield _Case("head", labels, nbytes, 2 * rows * k * vocab, taken, variants)


def _measure(
    cases: Sequence[_Case], kernels: AnyKernels, roof: Roof, settings: KernelSettings, now: Callable[[], Roof]
) -> list[Measurement]:
    """Every variant of every case once per round; the first round only warms up."""
    bounds = [(case.nbytes, case.operations) for case in cases]
    counts = [int(min(max(settings.seconds / roof.seconds(*bound), 1), _MOST_COUNT)) for bound in bounds]
    prepares = [case.variants(kernels, count) for case, count in zip(cases, counts, strict=True)]
    times = [{name: list[float]() for name in variants} for variants in prepares]
    shares = [{name: list[float]() for name in variants} for variants in prepares]
    before = now()
    for round_number in range(1 + settings.repeats):
        for bound, variants, count, taken, of in zip(bounds, prepares, counts, times, shares, strict=True):
            for name, prepare in variants.items():
                run = prepare()
                begin = time.perf_counter()
                run()
                seconds = (time.perf_counter() - begin) / count
                after = now()
                if round_number > 0:
                    taken[name].append(seconds)
                    of[name].append((before.seconds(*bound) + after.seconds(*bound)) / 2 / seconds)
                before = after
    return [
        Measurement(
            case.kind,
            case.labels,
            case.nbytes,
            case.operations,
            count,
            {name: _timing(each, of[name]) for name, each in taken.items()},
            _extra_cost(taken),
        )
        for case, count, taken, of in zip(cases, counts, times, shares, strict=True)
    ]


def _timing(times: Sequence[float], shares: Sequence[float]) -> Timing:
    return Timing(statistics.median(times), min(times), max(times), statistics.median(shares))


def _extra_cost(taken: Mapping[str, Sequence[float]]) -> float | None:
    """Round by round, because what disturbs one variant is likely to disturb its neighbour as well."""
    for costly, plain in (("paged", "in order"), ("drawn", "greedy"), ("streamed", "library")):
        if costly in taken:
            return statistics.median(one / other for one, other in zip(taken[costly], taken[plain], strict=True)) - 1
    return None
