"""Tests on a given model, before training, that packed sequences do not affect each other.

If packed sequences leak into each other, training still runs without an error and with a plausible loss. The test packs
a few short sequences as in training. If one sequence changes, the logits of the other sequences must not change. Each
sequence must also have the same logits as when it is the only one in its row; this finds positions that do not restart.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from chairlift.errors import ConfigError
from chairlift_train.layout import Layout

__all__ = ["IsolationReport", "Leak", "check_isolation"]

LENGTHS = (9, 13, 7)
"""Length of each packed sequence in tokens. The sum should differ from the widths of models, so that the token axis of
a tensor can be recognised by its size."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_FOR_KERNELS = {"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
"""Arguments that transformers passes to kernels although the ``forward`` methods of models do not name them."""

Batch = dict[str, Any]
Forward = Callable[[Batch], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Leak:
    """A pair of packed sequences: changing the tokens of ``source`` changed the logits of ``victim``."""

    source: int
    victim: int
    difference: float
    """Largest change of any logit of ``victim``, divided by the largest absolute logit."""


@dataclasses.dataclass(frozen=True, slots=True)
class IsolationReport:
    """Result of :func:`check_isolation`. It is true if the sequences are isolated. ``str()`` explains the result."""

    model: str
    tolerance: float
    leaks: tuple[Leak, ...]
    """Pairs of sequences in which one sequence affects the other."""
    alone: tuple[float, ...]
    """For each sequence, the largest difference between its logits in the pack and in a row of its own, divided by the
    largest absolute logit."""
    blind: bool
    """Whether the logits do not depend on the tokens at all, so that the test has no result."""
    first_layer: str | None
    """Name of the first module that mixes sequences: its outputs for the victim changed although its inputs for the
    victim did not."""
    advice: tuple[str, ...]

    @property
    def isolated(self) -> bool:
        return not self.leaks and not self.blind and max(self.alone) <= self.tolerance

    def __bool__(self) -> bool:
        return self.isolated

    def __str__(self) -> str:
        if self.isolated:
            worst = max(self.alone)
            return (
                f"{self.model}: packed sequences are isolated (packed against alone: {worst:.1e} of the largest logit)"
            )
        lines = [f"{self.model}: packed sequences are NOT isolated (tolerance {self.tolerance:.1e})"]
        if self.blind:
            lines = [f"{self.model}: no conclusion, its logits do not depend on its tokens (are its weights loaded?)"]
        for leak in self.leaks:
            lines.append(f"  sequence {leak.source} leaks into sequence {leak.victim}: {leak.difference:.1e}")
        for index, difference in enumerate(self.alone):
            if difference > self.tolerance:
                lines.append(f"  sequence {index} differs from itself alone: {difference:.1e} of the largest logit")
        if self.first_layer is not None:
            lines.append(f"  first module that mixes sequences: {self.first_layer}")
        return "\n".join([*lines, *(f"  what to do: {line}" for line in self.advice)])


def check_isolation(
    model: nn.Module,
    tol: float | None = None,
    *,
    strict: bool = False,
    forward: Forward | None = None,
    attention_mask: bool = False,
    collate: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]] | None = None,
) -> IsolationReport:
    """Pack three short random sequences, and test whether they affect each other.

    Args:
        model: The model to test.
        tol: Largest accepted change of a logit, relative to the largest absolute logit (default by dtype: 2e-5 in
            float32).
        strict: Whether to raise ConfigError if the sequences are not isolated.
        forward: Function from a batch to logits [1, T, V] or [T, V], or to an output with ``logits``. The default is
            ``model(**batch)``.
        attention_mask: Whether to add a mask of ones to the batch, as many collators do.
        collate: Collator of the training. It joins features with ``input_ids`` and ``labels`` into one row. Without it,
            the model gets ``input_ids`` and ``position_ids`` [1, T] that restart at 0.

    The test needs seven forward passes of at most 29 tokens, without gradients and in ``eval`` mode, and two more to
    locate a leak. The mode of the model is restored. Raises ConfigError if the batch is not a packed row. A model
    without ``position_ids`` gives a report that is not true, not an error.
    """
    probe = _Probe(model, forward, attention_mask, collate)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    tolerance = TOLERANCE.get(dtype, 5e-2) if tol is None else tol
    with _evaluating(model):
        report = probe.report(tolerance)
    if strict and not report:
        raise ConfigError(str(report))
    return report


class _Probe:
    """Runs the test of :func:`check_isolation` on one model."""

    def __init__(
        self, model: nn.Module, forward: Forward | None, attention_mask: bool, collate: Callable[..., Any] | None
    ) -> None:
        self.model = model
        self.attention_mask = attention_mask
        self.collate = collate
        self.forward = forward
        parameters = _parameters(model)
        self.accepted = set(parameters)
        self.takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self.extra: Batch = {}
        self.layout = Layout.of(LENGTHS)
        generator = torch.Generator().manual_seed(0)
        vocabulary = _vocabulary(model)
        self.tokens = [torch.randint(1, vocabulary, (length,), generator=generator) for length in LENGTHS]
        shift = 1 + (vocabulary - 2) // 2
        self.changed = [(ids - 1 + shift) % (vocabulary - 1) + 1 for ids in self.tokens]

    def report(self, tolerance: float) -> IsolationReport:
        base = self._logits(self.tokens)
        scale = max(float(x.abs().max()) for x in base) or 1.0
        leaks: list[Leak] = []
        blind = False
        for source in range(len(base)):
            after = self._logits(self._with_change(source))
            changes = [_distance(x, y) / scale for x, y in zip(base, after, strict=True)]
            blind |= changes[source] == 0
            leaks += [Leak(source, i, x) for i, x in enumerate(changes) if i != source and not x <= tolerance]
        alone = [_distance(logits, *self._logits([ids])) / scale for logits, ids in zip(base, self.tokens, strict=True)]
        first = self._first_layer(leaks[0], tolerance) if leaks else None
        advice = () if not leaks and max(alone) <= tolerance else self._advice(leaks, tolerance * scale)
        return IsolationReport(
            type(self.model).__name__, tolerance, tuple(leaks), tuple(alone), blind, first, tuple(advice)
        )

    def _with_change(self, source: int) -> list[Tensor]:
        return [self.changed[i] if i == source else ids for i, ids in enumerate(self.tokens)]

    def _batch(self, sequences: Sequence[Tensor]) -> Batch:
        """Collate the sequences into one row on the model's device."""
        if self.collate is not None:
            features = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in sequences]
            batch = dict(self.collate(features))
        else:
            positions = Layout.of([len(ids) for ids in sequences]).positions
            batch = {"input_ids": torch.cat(list(sequences))[None], "position_ids": torch.from_numpy(positions)[None]}
            if self.attention_mask:
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        rows = tuple(batch["input_ids"].shape) if "input_ids" in batch else None
        if rows is None or len(rows) != 2 or rows[0] != 1 or rows[1] < sum(len(ids) for ids in sequences):
            raise ConfigError(f"the collator must join the sequences into one row input_ids [1, T], got {rows}")
        device = next(self.model.parameters()).device
        return {key: x.to(device) if isinstance(x, Tensor) else x for key, x in batch.items()}

    def _logits(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Logits [L_i, V] of each sequence, computed in one packed row."""
        batch = self._batch(sequences)
        if self.forward is not None:
            out = self.forward(batch)
        else:
            takes = self.accepted | (_FOR_KERNELS if self.takes_more else set())
            out = self.model(**{key: x for key, x in batch.items() if key in takes - {"labels"}}, **self.extra)
        logits: Any = getattr(out, "logits", out)
        logits = logits[0] if isinstance(logits, tuple) or logits.ndim == 3 else logits
        logits = logits[0] if logits.ndim == 3 else logits
        starts = Layout.of([len(ids) for ids in sequences])
        return starts.unpack(logits[: starts.num_tokens].detach().double().cpu())

    def _first_layer(self, leak: Leak, tolerance: float) -> str | None:
        """Name of the first module whose output for the victim changes although its input does not. None if unknown."""
        start, end = self.layout.cu_seqlens[leak.victim : leak.victim + 2]
        runs: list[list[tuple[str, Tensor | None, Tensor | None]]] = []
        for sequences in (self.tokens, self._with_change(leak.source)):
            with _recorded(self.model, self.layout.num_tokens, slice(start, end)) as seen:
                self._logits(sequences)
            runs.append(seen)
        for (name, given, out), (_, given_after, out_after) in zip(*runs, strict=False):
            if out is None or out_after is None or _relative(out, out_after) <= tolerance:
                continue
            if given is None or given_after is None or _relative(given, given_after) <= tolerance:
                return name or type(self.model).__name__
        return None

    def _advice(self, leaks: Sequence[Leak], threshold: float) -> Iterator[str]:
        batch = self._batch(self.tokens)
        found = False
        if "attention_mask" in batch:
            found = True
            yield "do not pass an attention_mask: transformers then ignores the boundaries, even for a mask of ones"
        if "position_ids" not in batch:
            found = True
            yield "pass position_ids that restart at 0 in every sequence"
        elif self.forward is None and "position_ids" not in self.accepted:
            found = True
            yield "the model takes no position_ids, so it cannot know where sequences begin: train it unpacked"
        if not found and self.forward is None and "use_cache" in self.accepted and self._helps(leaks, threshold):
            found = True
            yield "pass use_cache=False (or set config.use_cache): with a cache transformers ignores the boundaries"
        if not found and leaks:
            yield (
                "the model ignores the boundaries in position_ids: try chairlift_train.varlen.patch_hf(model) if its "
                "attention leaks; recurrent and convolutional layers cannot be packed: train it unpacked"
            )
        elif not found:
            yield "no sequence affects another, but positions may not restart: check that position_ids reach the model"

    def _helps(self, leaks: Sequence[Leak], threshold: float) -> bool:
        """Whether the first of ``leaks`` disappears if the model is called with ``use_cache=False``."""
        if not leaks:
            return False
        self.extra = {"use_cache": False}
        base = self._logits(self.tokens)
        after = self._logits(self._with_change(leaks[0].source))
        self.extra = {}
        return _distance(base[leaks[0].victim], after[leaks[0].victim]) <= threshold


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Parameters of the model's ``forward``, by name. For a wrapper (PEFT, DDP, torch.compile): of the wrapped
    model."""
    parameters = inspect.signature(model.forward).parameters
    own: Any = model
    inside = own.get_base_model() if hasattr(own, "get_base_model") else None
    inside = inside or getattr(own, "module", None) or getattr(own, "_orig_mod", None)
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "position_ids" in parameters or not passes_on or inside is model or not isinstance(inside, nn.Module):
        return parameters
    return _parameters(inside)


def _vocabulary(model: nn.Module) -> int:
    """Number of token ids of the model, from its config or its embedding. Raises ConfigError if there is neither."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(config, "vocab_size", None)
    if size is None:
        size = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 0)
    if size < 3:
        raise ConfigError(f"{type(model).__name__} has no config.vocab_size and no embedding of 3 tokens or more")
    return int(size)


def _distance(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference between two tensors. Infinity if any number is not finite."""
    difference = float((one - other).abs().max())
    return difference if difference == difference else float("inf")


def _relative(one: Tensor, other: Tensor) -> float:
    return _distance(one, other) / (float(one.abs().max()) or 1.0)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context without dropout and gradients. The mode of every module is restored at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _recorded(model: nn.Module, tokens: int, rows: slice) -> Iterator[list[tuple[str, Tensor | None, Tensor | None]]]:
    """Context that records (name, input, output) of every module that runs, in the order in which modules finish.

    ``rows`` selects tokens: only these parts of inputs and outputs are recorded.
    """
    seen: list[tuple[str, Tensor | None, Tensor | None]] = []

    def hook(name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen.append((name, _rows([*args, *kwargs.values()], tokens, rows), _rows(output, tokens, rows)))

        return record

    handles = [m.register_forward_hook(hook(name), with_kwargs=True) for name, m in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _rows(value: Any, tokens: int, rows: slice) -> Tensor | None:
    """The ``rows`` of the first floating-point tensor in ``value`` that has an axis with ``tokens`` entries. Otherwise
    None."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() or tokens not in value.shape:
            return None
        axis = value.shape.index(tokens)
        return value.narrow(axis, rows.start, rows.stop - rows.start).detach().double().cpu()
    items: Iterable[Any]
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    else:
        items = ()
    return next((found for item in items if (found := _rows(item, tokens, rows)) is not None), None)
