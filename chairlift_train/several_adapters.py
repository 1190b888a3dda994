"""Trains several adapters together, with packs that contain sequences of all of them.

A sequence names its adapter in its field ``adapter``. The loss of an adapter is the mean over its own targets in the
optimiser step. Its gradient is clipped separately, and its moments do not change in a step without a target for it. So
each adapter learns the same as if it were trained alone on the same sequences.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from chairlift.errors import ConfigError
from chairlift.lora.trainable_set import TrainableAdapters
from chairlift_train.encoder import Encode, Encoded
from chairlift_train.layout import Pack
from chairlift_train.loss import Reduce, StepLoss, own_normaliser
from chairlift_train.parallel import sum_over_ranks

__all__ = ["ADAPTER_FIELD", "AdapterLosses", "AdapterStep", "adapter_field", "adapter_named", "mean_loss", "naming"]

ADAPTER_FIELD: Final = "adapter"
"""Name of the field of a record, or of an item of a source, that names the adapter to train on it."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterStep:
    """Result of one optimiser step for one adapter, over all ranks."""

    loss: float
    """Mean loss over the adapter's own targets, as defined by ``TrainerConfig.reduce``. 0 without a target."""
    num_tokens: int
    num_targets: int
    """Number of targets for the adapter. If it is 0, the step did not change the adapter and its moments."""
    grad_norm: float
    """Norm of the adapter's gradients before clipping."""


class AdapterLosses:
    """Computes the losses of several adapters over the packs of an optimiser step. It is called like a
    :class:`StepLoss`."""

    def __init__(self, adapters: TrainableAdapters, reduce: Reduce, label_smoothing: float) -> None:
        self._adapters = adapters
        self._losses = {
            name: StepLoss(reduce, gradients="sum", label_smoothing=label_smoothing) for name in adapters.names
        }
        self._sequences = [0] * len(adapters.names)
        self._counts: dict[str, tuple[int, int]] = {}
        self._totals: dict[str, Tensor | float] = {}
        self.losses = torch.empty(0)
        """[R] loss of each token in the last call, without weights and without a graph. 0 if a token has no target."""

    def route(self, pack: Pack) -> Pack:
        """Sort the sequences of a pack by adapter, and prepare the next forward pass for them. Returns the sorted pack.

        Raises ConfigError for a sequence without an adapter or with an unknown adapter.
        """
        pack, places = self._sorted(pack)
        lengths = np.bincount(places, pack.lengths, len(self._adapters.names))
        self._adapters.route([int(rows) for rows in lengths])
        self._sequences = np.bincount(places, minlength=len(self._adapters.names)).tolist()
        return pack

    def _sorted(self, pack: Pack) -> tuple[Pack, list[int]]:
        """Sort the sequences of a pack by adapter. Returns (sorted pack, index of each sequence's adapter)."""
        metas: Sequence[Mapping[str, Any]] = pack.meta or [{}] * len(pack.lengths)
        places = [self._place(number, meta) for number, meta in zip(pack.ids, metas, strict=True)]
        order = sorted(range(len(places)), key=places.__getitem__)
        bounds = list(itertools.pairwise(pack.layout.cu_seqlens))
        rows = np.concatenate([np.arange(*bounds[i]) for i in order])
        moved = dataclasses.replace(
            pack,
            tokens=pack.tokens[rows],
            weights=pack.weights[rows],
            lengths=tuple(pack.lengths[i] for i in order),
            ids=tuple(pack.ids[i] for i in order),
            meta=tuple(metas[i] for i in order),
        )
        return moved, sorted(places)

    def _place(self, number: int, meta: Mapping[str, Any]) -> int:
        name = adapter_named(meta.get(ADAPTER_FIELD), self._adapters.names, f"sequence {number} of the source")
        return self._adapters.names.index(name)

    def _own(self, pack: Pack) -> Iterator[tuple[str, Pack]]:
        """Yield (name of an adapter, pack of its sequences) for each adapter that has sequences in ``pack``."""
        pack, places = self._sorted(pack)
        for place, name in enumerate(self._adapters.names):
            if count := places.count(place):
                first = places.index(place)
                start = sum(pack.lengths[:first])
                own = slice(first, first + count)
                rows = slice(start, start + sum(pack.lengths[own]))
                yield name, Pack(pack.tokens[rows], pack.lengths[own], pack.ids[own], pack.weights[rows])

    @contextlib.contextmanager
    def step(self, packs: Sequence[Pack]) -> Iterator[None]:
        """Context of one optimiser step. ``packs`` are this rank's packs of the step. Every rank must enter it.

        Raises ConfigError when no adapter has a target, and the errors of :meth:`route`.
        """
        own: dict[str, list[Pack]] = {name: [] for name in self._adapters.names}
        for pack in packs:
            for name, part in () if pack.filler else self._own(pack):
                own[name].append(part)
        counts = [
            (
                own_normaliser(parts, self._losses[name].reduce),
                sum(part.num_tokens for part in parts),
                sum(int((part.weights != 0).sum()) for part in parts),
            )
            for name, parts in own.items()
        ]
        flat = sum_over_ranks([value for row in counts for value in row])
        self._totals = {}
        self._counts = {}
        with contextlib.ExitStack() as stack:
            for index, name in enumerate(own):
                normaliser, tokens, targets = flat[3 * index : 3 * index + 3]
                self._counts[name] = int(tokens), int(targets)
                if targets:
                    stack.enter_context(self._losses[name].step(normaliser))
                    self._totals[name] = 0.0
            if not self._totals:
                raise ConfigError("no adapter has a target in this step; give sequences with tokens to learn")
            yield

    def __call__(self, logits: Tensor, chosen: Mapping[str, Tensor]) -> Tensor:
        """Sum of the parts that the last routed pack contributes to the losses of all adapters, as a scalar.

        ``logits`` [R, V] and ``chosen`` belong to the rows of :func:`~chairlift_train.trainer.predictions`.
        """
        ends = torch.tensor(self._sequences).cumsum(0).to(chosen["segment_ids"].device)
        bounds = [0, *torch.searchsorted(chosen["segment_ids"][0].contiguous(), ends.int()).tolist()]
        total = logits[:1].sum() * 0.0
        losses = []
        for name, (start, end) in zip(self._adapters.names, itertools.pairwise(bounds), strict=True):
            if name not in self._totals:
                losses.append(logits.new_zeros(end - start, dtype=torch.float32))
                continue
            if start == end:
                continue
            part = self._losses[name](logits[start:end], {key: value[:, start:end] for key, value in chosen.items()})
            losses.append(self._losses[name].losses)
            self._totals[name] = self._totals[name] + part.detach()
            total = total + part
        self.losses = torch.cat(losses)
        return total

    def finish(self, max_grad_norm: float) -> dict[str, AdapterStep]:
        """Clip the gradients of each adapter separately. Returns the name of each adapter -> its results.

        Call it after the gradients were summed over the ranks. Every rank must call it. The gradients of an adapter
        without a target are removed, so that the optimiser does not change the adapter.
        """
        totals = sum_over_ranks([float(self._totals.get(name, 0.0)) for name in self._adapters.names])
        results = {}
        for (name, counts), loss in zip(self._counts.items(), totals, strict=True):
            norm = 0.0
            parameters = self._adapters.parameters_of(name)
            if name in self._totals:
                norm = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm))
            else:
                for parameter in parameters:
                    parameter.grad = None
            results[name] = AdapterStep(loss, *counts, norm)
        return results


def mean_loss(results: Mapping[str, AdapterStep]) -> float:
    """Mean of the adapters' losses. Each loss is weighted by the adapter's number of targets."""
    targets = sum(each.num_targets for each in results.values())
    return math.fsum(each.loss * each.num_targets for each in results.values()) / max(1, targets)


def adapter_named(given: Any, names: Sequence[str], where: str) -> str:
    """Check that ``given`` is one of ``names``, and return it. Raises ConfigError, which mentions ``where``, if not."""
    if isinstance(given, str) and given in names:
        return given
    what = "names no adapter" if given is None else f"names the adapter {str(given)[:60]!r}"
    raise ConfigError(f"{where} {what}; its field {ADAPTER_FIELD!r} must be one of {', '.join(names)[:300]}")


def naming(encode: Encode, names: Sequence[str], columns: Mapping[str, str], default: str | None) -> Encode:
    """Wrap ``encode`` so that every item gets a field ``adapter``: that of its record, or ``default``.

    ``columns`` maps field names of records to the names used here. The returned function raises ConfigError for a
    record without a known adapter.
    """

    def read(record: Mapping[str, Any]) -> Encoded:
        name = adapter_named(adapter_field(record, columns, default), names, "the record")
        rest = {key: value for key, value in record.items() if columns.get(key, key) != ADAPTER_FIELD}
        found = encode(rest)
        encoded = found if isinstance(found, Encoded) else Encoded((found,))
        items = tuple({**item, ADAPTER_FIELD: name} for item in encoded.items)
        return dataclasses.replace(encoded, items=items)

    return read


def adapter_field(record: Mapping[str, Any], columns: Mapping[str, str], default: str | None) -> Any:
    """Name of the adapter in a record, or ``default`` if the record has none."""
    found = [value for key, value in record.items() if columns.get(key, key) == ADAPTER_FIELD]
    return found[0] if found else default
