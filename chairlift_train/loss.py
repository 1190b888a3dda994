"""The loss of an optimiser step, which does not depend on how the step is divided into micro-batches and ranks.

The loss is ``sum_t w_t * nll_t / Z``. Z is a constant of the whole optimiser step, over all micro-batches and ranks,
and is computed before the first backward pass. A mean of micro-batch means would give other gradients if micro-batches
have different numbers of targets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, distributed
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from chairlift.errors import ConfigError
from chairlift_train.collate import IGNORED, PackCollator
from chairlift_train.layout import Pack
from chairlift_train.parallel import max_over_group, num_ranks, sum_over_group

__all__ = ["Batch", "ExpertCounts", "Gradients", "Reduce", "StepLoss", "own_normaliser", "token_losses"]

Batch = Pack | Mapping[str, Any]
"""A pack, or a collated batch: ``labels`` [B, S], and optionally ``loss_weight``, ``segment_ids``, ``position_ids``."""

Reduce = Literal["token", "sequence", "sqrt", "weights"]
"""How the losses of targets are combined: sum(factor * ``loss_weight`` * loss) / Z. n is the number of targets
in a sequence.

- ``token``: factor 1; Z is the sum of the weights. A mean over tokens.
- ``sequence``: factor 1 / n; Z is the number of sequences with a target. For DPO and reward models.
- ``sqrt``: factor 1 / sqrt(n); Z is the sum of sqrt(n).
- ``weights``: factor 1; Z is the number of targets, so that the scale of the weights matters. For importance ratios and
  advantages.
"""

Gradients = Literal["mean", "sum"]
"""How the gradients of the ranks are combined. ``mean``, as in DDP and FSDP: each rank's loss is therefore multiplied
by the number of ranks. ``sum``: the loss is not changed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Targets:
    """Targets of a row of tokens, aligned with the logits: entry t belongs to the token at position t + 1."""

    labels: Tensor
    """int64 [T] token id of each target, or -100."""
    weights: Tensor
    """[T] weight by which the loss of each target is multiplied, in the dtype of the sum of losses."""
    normaliser: Tensor
    """This row's part of the constant Z that the loss is divided by, a scalar."""


class StepLoss:
    """Computes the loss of an optimiser step in parts, one part per row.

    ::

        loss = StepLoss("token")
        for packs in stream.steps():
            with loss.step(packs):
                for pack in packs:
                    batch = collate(pack)
                    logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
                    loss(logits, batch).backward()
            optimizer.step()

    ``group`` has the ranks that compute the step (default: all ranks). With ``chunk``, only this number of rows of
    logits is converted to float32 at a time, which limits memory; the backward pass converts them again.
    """

    def __init__(
        self,
        reduce: Reduce = "token",
        *,
        group: distributed.ProcessGroup | None = None,
        gradients: Gradients = "mean",
        label_smoothing: float = 0.0,
        chunk: int | None = None,
    ) -> None:
        """Create a loss. Raises ConfigError for an unknown ``reduce`` or ``gradients``, and for values out of range."""
        if reduce not in ("token", "sequence", "sqrt", "weights"):
            raise ConfigError(f"reduce must be token, sequence, sqrt or weights, got {reduce!r}")
        if gradients not in ("mean", "sum"):
            raise ConfigError(f"gradients must be mean (DDP, FSDP) or sum, got {gradients!r}")
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
        if chunk is not None and chunk < 1:
            raise ConfigError(f"chunk must be at least 1 row, or None for all at once, got {chunk}")
        self.reduce: Reduce = reduce
        self.group = group
        self.gradients: Gradients = gradients
        self.label_smoothing = label_smoothing
        self.chunk = chunk
        self._normaliser: float | None = None
        self._total: Tensor | float = 0.0
        self.losses = torch.empty(0)
        """[T] loss of each token in the last call, without weights and without a graph. 0 if a token has no target."""

    @contextlib.contextmanager
    def step(self, packs: float | Sequence[Batch]) -> Iterator[StepLoss]:
        """Context of one optimiser step. ``packs`` has this rank's packs or batches of the step, or is Z itself.

        The packs of a stream contain Z for a mean over tokens or sequences; a rank without packs learns it from the
        others. Otherwise Z is computed and summed over the group. Every rank must enter the context, even without
        packs, unless Z itself is given. Raises ConfigError when the step has no target.
        """
        self._normaliser = self._agree(packs)
        self._total = 0.0
        try:
            yield self
        finally:
            self._normaliser = None

    def __call__(self, logits: Tensor, batch: Batch, probabilities: Tensor | None = None) -> Tensor:
        """This row's part of the step's loss, as a scalar tensor with a graph for ``backward``.

        ``logits`` [T, V] or [B, S, V]: row t predicts the token at t + 1. A row without targets gives 0, also with a
        graph, so that every rank can run a backward pass. With ``probabilities`` [T, V], row t learns these instead of
        its label; labels and weights still say which rows have a target. Raises ConfigError outside :meth:`step`.
        """
        if self._normaliser is None:
            raise ConfigError("call a StepLoss inside `with loss.step(packs):`; Z must be known before any backward")
        flat = logits.flatten(0, -2)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        targets = _targets(batch, self.reduce, logits.device, dtype)
        if len(flat) != len(targets.labels):
            raise ConfigError(f"logits of {len(flat)} rows for a batch of {len(targets.labels)} tokens; give all rows")
        learned = targets.labels if probabilities is None else probabilities
        losses = token_losses(flat, learned, label_smoothing=self.label_smoothing, chunk=self.chunk)
        self.losses = losses.detach()
        part = (losses * targets.weights).sum() / self._normaliser
        self._total = self._total + part.detach()
        return part * num_ranks(self.group) if self.gradients == "mean" else part

    @property
    def total(self) -> float:
        """This rank's part of the last step's loss, for logs. The sum over all ranks is the loss of the step."""
        return float(self._total)

    def normaliser(self, batches: Sequence[Batch]) -> float:
        """Compute Z of a step, the constant that its losses are divided by, summed over the group. Every rank must call
        this method with its own ``batches`` of the step."""
        own = own_normaliser(batches, self.reduce)
        return float(sum_over_group(torch.tensor([own], dtype=torch.float64), self.group))

    def _agree(self, packs: float | Sequence[Batch]) -> float:
        if isinstance(packs, (int, float)):
            total = float(packs)
        else:
            steps = {pack.step for pack in packs if isinstance(pack, Pack)}
            if len(steps) > 1:
                raise ConfigError(f"packs of optimiser steps {sorted(steps)} in one step; iterate PackStream.steps()")
            # A rank without packs does not know Z, and it must not wait for the sum below alone.
            known = max_over_group(max((_known(pack, self.reduce) for pack in packs), default=0.0), self.group)
            total = known or self.normaliser(packs)
        if not total > 0 or not math.isfinite(total):
            raise ConfigError(
                f"Z of this step is {total} ({self.reduce}); it must be finite and positive: give targets,"
                " and reduce='weights' if weights may be negative"
            )
        return total


def own_normaliser(batches: Sequence[Batch], reduce: Reduce) -> float:
    """This rank's part of Z, the constant that the losses of a step are divided by: the sum over ``batches``."""
    cpu = torch.device("cpu")
    return sum(float(_targets(batch, reduce, cpu, torch.float64).normaliser) for batch in batches)


def token_losses(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, chunk: int | None = None) -> Tensor:
    """Cross-entropy [T] of labels [T] for logits [T, V], in float32 or wider. It is 0 where the label is -100. Labels
    can also be probabilities [T, V].

    With ``chunk``, only this number of rows exists in float32 at a time. The backward pass computes them again.
    """

    def some(rows: Tensor, targets: Tensor) -> Tensor:
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return functional.cross_entropy(rows, targets, reduction="none", label_smoothing=label_smoothing)

    if chunk is None or len(logits) <= chunk:
        return some(logits, labels)
    # torch.split joins the gradients of all pieces once. Slices would add up one full-size gradient per piece.
    pieces = zip(torch.split(logits, chunk), torch.split(labels, chunk), strict=True)
    return torch.cat([checkpoint(some, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces])


class ExpertCounts:
    """Load-balancing loss for mixtures of experts, which does not depend on how the step is divided.

    The loss is E * sum_e f_e * P_e (Switch Transformer, eq. 4-6). f_e is the fraction of routings to expert e, and P_e
    is its mean probability. f has no gradient. If ``forward`` is given to :meth:`step`, f is computed over the whole
    step first, by a forward pass without gradients for each micro-batch, and the parts add up exactly. Without
    ``forward``, f covers only the rows of this rank so far, which is cheaper but not exact.

    ::

        with loss.step(packs), experts.step(batches, forward):
            for batch in batches:
                out = forward(batch)
                (loss(out.logits, batch) + 0.01 * experts(out.router_logits, batch)).backward()

    The routers must choose the ``top_k`` largest logits. ``per_layer`` averages the losses of single layers, as in
    Switch and Megatron. Otherwise all layers are counted together, as in transformers.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        *,
        per_layer: bool = False,
        group: distributed.ProcessGroup | None = None,
        gradients: Gradients = "mean",
    ) -> None:
        """Create counts for routers with ``num_experts`` experts. Raises ConfigError unless 1 <= top_k <=
        num_experts."""
        if not 1 <= top_k <= num_experts:
            raise ConfigError(f"top_k must be from 1 to num_experts ({num_experts}), got {top_k}")
        self.num_experts = num_experts
        self.top_k = top_k
        self.per_layer = per_layer
        self.group = group
        self.gradients: Gradients = gradients
        self.exact = True
        self._counts: Tensor | None = None
        self._counted = 0.0
        self._num_tokens = 0.0

    @classmethod
    def of(cls, config: Any, **settings: Any) -> ExpertCounts:
        """Create an instance from the ``config`` of a transformers model. Raises ConfigError for a model without
        experts."""
        for name in ("num_local_experts", "num_experts", "n_routed_experts"):
            if getattr(config, name, None):
                return cls(getattr(config, name), config.num_experts_per_tok, **settings)
        raise ConfigError(f"{type(config).__name__} has no number of experts; ExpertCounts is for mixtures of experts")

    @contextlib.contextmanager
    def step(self, batches: Sequence[Batch], forward: Callable[[Batch], Any] | None = None) -> Iterator[ExpertCounts]:
        """Context of one optimiser step. Every rank of the group must enter it, with its batches.

        ``forward`` returns the router logits of a batch, or an output with ``router_logits``. It is called once per
        batch, without gradients, and must route tokens as in training: without dropout and router noise.
        """
        self.exact = forward is not None
        self._counts = None
        self._counted = 0.0
        own = torch.tensor([float(sum(_num_tokens(batch) for batch in batches))], dtype=torch.float64)
        self._num_tokens = float(sum_over_group(own, self.group))
        if forward is not None:
            if not batches:
                raise ConfigError("every rank needs at least one batch of the step, a filler if it has nothing else")
            with torch.no_grad():
                counts = [self._routings(forward(batch), batch) for batch in batches]
            self._counts = sum_over_group(torch.stack(counts).sum(0), self.group)
            self._counted = self._num_tokens
        try:
            yield self
        finally:
            self._num_tokens = 0.0

    def __call__(self, router_logits: Sequence[Tensor], batch: Batch) -> Tensor:
        """This row's part of the step's loss, as a scalar. ``router_logits`` has a tensor [tokens, experts] for each
        layer; padding is ignored."""
        if not self._num_tokens:
            raise ConfigError("an ExpertCounts is called inside `with experts.step(batches, forward):`")
        if not self.exact:
            counts = self._routings(router_logits, batch)
            self._counts = counts if self._counts is None else self._counts + counts
            self._counted += _num_tokens(batch)
        if self._counts is None:
            raise ConfigError("no routing was counted; give `forward` the batches that are trained on")
        num_tokens = _num_tokens(batch)
        wide = torch.promote_types(router_logits[0].dtype, torch.float32)
        shares = [logits[:num_tokens].to(wide).softmax(-1).sum(0) for logits in router_logits]
        probabilities = torch.stack([share.to(shares[0].device) for share in shares]) / self._num_tokens
        fractions = (self._counts / max(1.0, self._counted)).to(probabilities)
        if not self.per_layer:
            probabilities = probabilities.mean(0)
            fractions = fractions.mean(0)
        part = self.num_experts * (fractions * probabilities).sum() / (len(router_logits) if self.per_layer else 1)
        return part * num_ranks(self.group) if self.gradients == "mean" else part

    @property
    def fractions(self) -> Tensor:
        """float64 [layers, experts] fraction of the tokens that each layer routes to each expert. Each row adds up to
        ``top_k``."""
        if self._counts is None:
            raise ConfigError("no routing was counted yet")
        return self._counts / max(1.0, self._counted)

    def _routings(self, router_logits: Any, batch: Batch) -> Tensor:
        """float64 [layers, experts] on the CPU: number of tokens routed to each expert."""
        layers = getattr(router_logits, "router_logits", router_logits)
        chosen = [logits[: _num_tokens(batch)].detach().topk(self.top_k, -1).indices for logits in layers]
        return torch.stack([layer.flatten().bincount(minlength=self.num_experts).cpu() for layer in chosen]).double()


_collate = PackCollator(keys=("labels", "loss_weight", "segment_ids"))


def _targets(batch: Batch, reduce: Reduce, device: torch.device, dtype: torch.dtype) -> _Targets:
    """Targets of ``batch``. The first token of a sequence is never a target, even if it has a label."""
    row = _collate(batch) if isinstance(batch, Pack) else batch
    labels = row["labels"].to(device)
    labels = labels if labels.ndim > 1 else labels[None]
    starts = torch.zeros_like(labels, dtype=torch.bool)
    starts[:, 0] = True
    if row.get("segment_ids") is not None:
        ids = row["segment_ids"].to(device).view(labels.shape)
        starts[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    elif row.get("position_ids") is not None and len(labels) == 1:
        starts |= row["position_ids"].to(device).view(labels.shape) == 0
    ignored = (starts | (labels == IGNORED)).flatten()
    weights = row.get("loss_weight")
    weights = torch.ones_like(ignored, dtype=dtype) if weights is None else weights.to(device, dtype).flatten()
    weights = weights.masked_fill(ignored, 0.0)
    counted = (weights != 0).to(dtype)
    segments = starts.flatten().cumsum(0) - 1
    # The vector has one entry per token, which is always enough. Reading the number of sequences from the device would
    # make the host wait for it.
    lengths = torch.zeros_like(weights).index_add_(0, segments, counted)
    power = {"sequence": 1.0, "sqrt": 0.5}.get(reduce, 0.0)
    if power:
        weights = weights / lengths[segments].clamp(min=1.0) ** power
    normaliser = {"token": weights, "weights": counted, "sequence": (lengths > 0).to(dtype), "sqrt": lengths.sqrt()}
    # Align labels and weights with the logits: row t predicts the label of token t + 1, and the last row has no label.
    labels = functional.pad(labels.flatten().masked_fill(ignored, IGNORED)[1:], (0, 1), value=IGNORED)
    return _Targets(labels, functional.pad(weights[1:], (0, 1)), normaliser[reduce].sum())


def _known(batch: Batch, reduce: Reduce) -> float:
    """Z, the constant that the losses of a step are divided by, as a stream has stored it in a pack. 0 if it is
    unknown."""
    name = {"token": "step_weight", "sequence": "step_sequences"}.get(reduce, "")
    return float((getattr(batch, name, 0.0) if isinstance(batch, Pack) else batch.get(name)) or 0.0)


def _num_tokens(batch: Batch) -> int:
    """Number of tokens of a batch, without padding."""
    if isinstance(batch, Pack):
        return 0 if batch.filler else batch.num_tokens
    return int(batch["num_tokens"] if "num_tokens" in batch else batch["input_ids"].numel())
