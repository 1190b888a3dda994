"""One packed pass over data of many clients: forward by the engine, backward a layer and a group of data at a time.

The forward pass is one flat batch, whose rows do not depend on each other (:mod:`chairlift_train.engine_pass`). The
backward pass computes each layer again in PyTorch, from the input that the engine's step kept, separately for each
group of data (:mod:`chairlift_train.service.groups`). A group is a part of one call, and packed: its attention stays
inside each datum. So no product of PyTorch has rows of two calls, and a call's gradient has the same bits in any
company. All groups pass through a layer before the next layer's turn, while its weights are in the processor's cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.lora.sites import HEAD
from chairlift.models.causal_lm import CausalLM
from chairlift.models.layers.linear import Adapted
from chairlift_train.engine_pass import EnginePass
from chairlift_train.exact import experts_of, run_layer
from chairlift_train.service.compute.calls import PassCall, PassOutcome
from chairlift_train.service.compute.checks import CheckedDatum
from chairlift_train.service.compute.client import Client
from chairlift_train.service.compute.losses import Loss
from chairlift_train.varlen import VarlenContext

__all__ = ["AdapterSwitch", "Group", "PackPass", "RunningCall", "Segment"]

_LOGIT_BYTES: Final = 64 << 20
"""Memory for the logits of a chunk of rows."""
_MOST_ROWS: Final = 64
"""Maximum number of rows of a chunk of logits, which are one slice of work."""
_KEPT_BYTES: Final = 256 << 20
"""Maximum memory for logits that are kept for the backward pass. Without it, they are computed again."""


@dataclasses.dataclass(slots=True, eq=False)
class RunningCall:
    """A call whose data are computed in one or several packs."""

    call: PassCall
    error: str = ""
    """Why the call failed. A call that fails its checks has no client, loss and options."""
    data: list[CheckedDatum] = dataclasses.field(default_factory=list)
    client: Client = dataclasses.field(init=False)
    number: int = dataclasses.field(init=False)
    """Number of the client's adapter in the engine."""
    loss: Loss = dataclasses.field(init=False)
    options: Mapping[str, float] = dataclasses.field(init=False)
    groups: list[range] = dataclasses.field(default_factory=list)
    """Indices of the data of each group."""
    given: int = 0
    """Number of groups that were given to packs."""
    total: float = 0.0
    """Sum of the losses so far."""
    gradient: Tensor | None = None
    """Gradient of this call alone, so that a call that fails leaves nothing."""
    logprobs: list[npt.NDArray[np.float32]] = dataclasses.field(default_factory=list)

    def fail(self, datum: int, problem: str) -> None:
        """End the call with an error. The gradient of its data is dropped."""
        self.error = self.error or f"datum {datum}: {problem}"
        self.gradient = None

    def outcome(self) -> PassOutcome:
        """The result. The gradient becomes the client's."""
        if not self.error and self.gradient is not None and not bool(self.gradient.isfinite().all()):
            self.error = "the gradient is not finite, and is dropped; look at the weights and advantages of the data"
        if self.error:
            return PassOutcome(error=self.error)
        if self.gradient is not None:
            self.client.add(self.gradient)
            self.gradient = None
        return PassOutcome(self.logprobs, {"loss:sum": self.total})


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """A datum of a call in a pack."""

    running: RunningCall
    index: int
    """Index of the datum in its call."""
    start: int
    """Index of its first token in the pack."""
    grad: Tensor | None = None
    """float32 [N, K], derivative of the loss by the targets' log-probabilities. None if all are 0, or not needed."""

    @property
    def datum(self) -> CheckedDatum:
        return self.running.data[self.index]

    @property
    def rows(self) -> slice:
        """Its tokens in the pack."""
        return slice(self.start, self.start + len(self.datum.token_ids))


@dataclasses.dataclass(slots=True, eq=False)
class Group:
    """Data of one call whose backward pass is computed together. They follow each other in the pack."""

    segments: list[Segment]
    rotations: Any = None
    """Rotations of the positions, for all layers; None before the first layer."""

    @property
    def running(self) -> RunningCall:
        return self.segments[0].running

    @property
    def learns(self) -> bool:
        """Whether the group has a derivative, and its call no error."""
        return not self.running.error and any(each.grad is not None for each in self.segments)

    @property
    def rows(self) -> slice:
        """Its tokens in the pack."""
        return slice(self.segments[0].start, self.segments[-1].rows.stop)

    @property
    def starts(self) -> list[int]:
        """Index of the first token of each datum in the group, and the number of tokens."""
        first = self.segments[0].start
        return [*(each.start - first for each in self.segments), self.rows.stop - first]

    @property
    def positions(self) -> Tensor:
        """Position of each token in its datum, int64 [T]."""
        return torch.cat([torch.arange(len(each.datum.token_ids)) for each in self.segments])

    def targets(self) -> tuple[Tensor, Tensor]:
        """(targets, int64; derivatives of the loss by their log-probabilities, float32), both [T, most targets of a
        position]. Cells without a target have the derivative 0."""
        width = max(each.datum.targets.shape[1] for each in self.segments)
        count = self.rows.stop - self.rows.start
        targets, grads = torch.zeros(count, width, dtype=torch.int64), torch.zeros(count, width)
        for each, start in zip(self.segments, self.starts, strict=False):
            rows = slice(start, start + len(each.datum.token_ids))
            targets[rows, : each.datum.targets.shape[1]] = torch.from_numpy(each.datum.targets)
            if each.grad is not None:
                grads[rows, : each.grad.shape[1]] = each.grad
        return targets, grads


class AdapterSwitch:
    """Switches a model's layers between the adapters of clients."""

    def __init__(self) -> None:
        self._products: Mapping[str, Adapted] = {}

    def of_layer(self, name: str) -> Adapted:
        """The function for the linear layer ``name``, which adds the terms of the adapter that is on."""

        def adapted(x: Tensor, out: Tensor) -> Tensor:
            product = self._products.get(name)
            return out if product is None else product(x, out)

        return adapted

    @contextlib.contextmanager
    def on(self, client: Client) -> Iterator[None]:
        """Context in which the client's adapter is on."""
        self._products = client.products
        try:
            yield
        finally:
            self._products = {}


class PackPass:
    """A pass over ``groups``, which follow each other in the pack. ``model`` has float32 weights. ``engine`` has its
    weights and the clients' adapters."""

    def __init__(self, model: CausalLM, engine: EnginePass, adapters: AdapterSwitch, groups: Sequence[Group]) -> None:
        self._model = model
        self._engine = engine
        self._adapters = adapters
        self._groups = list(groups)
        self._segments = segments = [each for group in groups for each in group.segments]
        self._token_ids = np.concatenate([each.datum.token_ids for each in segments])
        self._starts = [*(each.start for each in segments), len(self._token_ids)]
        lengths = [len(each.datum.token_ids) for each in segments]
        self._numbers = np.repeat(np.array([each.running.number for each in segments], dtype=np.int32), lengths)
        self._values: list[Tensor] = []
        """Input of each layer, and the decoder's result, float32 [T, D]."""
        self._experts: list[Tensor] = []
        """int64 [T, k] for each layer of experts."""
        chunk = _LOGIT_BYTES // (4 * model.config.vocab_size)
        self._chunk = max(1, min(chunk, _MOST_ROWS))
        """Number of rows of logits at a time."""
        self._logits: dict[int, Tensor] = {}
        """First row -> logits of a chunk of the pack, if all are kept."""
        trained = [name for each in segments for name in each.running.client.products if name != HEAD]
        self._lowest = min((_layer_number(name) for name in trained), default=len(model.model.layers))
        """Number of the first layer that learns. The backward pass ends there."""

    def slices(self) -> Iterator[None]:
        """Compute the pass. Other work may run between two slices."""
        yield from self._forward()
        logprobs = yield from self._score()
        for segment in self._segments:
            self._lose(segment, logprobs[segment.rows])
        yield
        learning = [each for each in self._groups if each.learns]
        grads = torch.zeros_like(self._values[-1])
        for group in learning:
            yield from self._backward_head(group, grads)
        self._logits.clear()
        for number in range(len(self._model.model.layers) - 1, self._lowest - 1, -1):
            for group in learning:
                self._backward_layer(group, number, grads)
                yield

    # -- forward -------------------------------------------------------------------------------------------------------

    def _forward(self) -> Iterator[None]:
        total = len(self._token_ids)
        for part in self._engine.stretches(self._token_ids, self._starts, self._numbers):
            if not self._values:
                self._values = [torch.empty(total, each.shape[1]) for each in part.values]
                self._experts = [each.new_empty(total, each.shape[1]) for each in part.experts]
            for whole, some in zip((*self._values, *self._experts), (*part.values, *part.experts), strict=True):
                whole[part.first : part.first + len(some)] = some
            yield

    def _score(self) -> Generator[None, None, Tensor]:
        """Log-probabilities of the targets, float32 [T, most targets of a position]."""
        total = len(self._token_ids)
        targets = [each.datum.targets for each in self._segments]
        counts = np.repeat([each.shape[1] for each in targets], [len(each) for each in targets])
        wide = np.zeros((total, int(counts.max())), dtype=np.int32)
        for segment, each in zip(self._segments, targets, strict=True):
            wide[segment.rows, : each.shape[1]] = each
        found = torch.zeros(wide.shape)
        keeps = 4 * total * self._model.config.vocab_size <= _KEPT_BYTES
        runner = self._engine.runner
        for first in range(0, total, self._chunk):
            rows = np.arange(first, min(first + self._chunk, total))
            logits, found[rows, 0] = runner.scored(
                self._hidden(rows), np.ascontiguousarray(wide[rows, 0]), self._numbers[rows]
            )
            for k in range(1, wide.shape[1]):
                if len(some := np.flatnonzero(counts[rows] > k)):
                    ids = np.ascontiguousarray(wide[rows[some], k])
                    found[rows[some], k] = runner.logprobs_of(logits[torch.from_numpy(some)], ids)
            if keeps:
                self._logits[first] = logits
            yield
        return found

    def _hidden(self, rows: npt.NDArray[np.intp]) -> Tensor:
        return self._values[-1][torch.from_numpy(rows)].to(self._engine.dtype)

    # -- losses --------------------------------------------------------------------------------------------------------

    def _lose(self, segment: Segment, found: Tensor) -> None:
        """Add the loss of a datum, and set its derivative."""
        running, datum = segment.running, segment.datum
        if running.error:
            return
        logprobs = found[:, : datum.targets.shape[1]].reshape(datum.shape)
        running.logprobs.append(logprobs.numpy().copy())
        p = logprobs.double().requires_grad_(not running.call.forward_only)
        inputs = {name: each.reshape(datum.shape) for name, each in datum.inputs.items()}
        loss = running.loss.compute(p, inputs, running.options)
        if not bool(logprobs.isfinite().all()) or not bool(loss.isfinite()):
            running.fail(segment.index, "a log-probability or the loss is not finite; look at its logprobs and weights")
            return
        running.total += float(loss.detach())
        if running.call.forward_only:
            return
        (grad,) = torch.autograd.grad(loss, p)
        grad = grad.float().reshape(datum.targets.shape)
        if not bool(grad.isfinite().all()):
            running.fail(segment.index, "the derivative of the loss is not finite; look at its logprobs and advantages")
            return
        if running.gradient is None:
            running.gradient = torch.zeros_like(running.client.weights)
        segment.grad = grad if bool(grad.any()) else None

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward_head(self, group: Group, grads: Tensor) -> Iterator[None]:
        """Write the derivative by the decoder's result into the rows of a group in ``grads`` [T, D], and add that of
        the head's matrices."""
        head = self._model.lm_head
        product = group.running.client.products.get(HEAD)
        cap = self._model.config.logit_cap
        targets, by_target = group.targets()
        wanted = by_target.any(1).nonzero()[:, 0]
        for some in torch.split(wanted, self._chunk):
            rows = some + group.rows.start
            logits = self._logits_of(rows, group.running.number)
            found = by_target[some]
            by_logit = logits.softmax(1).mul_(-found.sum(1, keepdim=True))
            by_logit.scatter_add_(1, targets[some], found)
            if cap is not None:
                by_logit.mul_(1 - (logits / cap).square_())
            grad = by_logit @ head.weight.detach()
            if product is not None:
                hidden = self._values[-1][rows].requires_grad_()
                with torch.enable_grad():
                    added = product(hidden, torch.zeros_like(by_logit))
                found_here = self._add(group, HEAD, added, hidden, by_logit)
                grad = grad if found_here is None else grad + found_here
            grads[rows] = grad
            yield

    def _logits_of(self, rows: Tensor, number: int) -> Tensor:
        """Logits [R, V] of rows of the pack, kept or computed again."""
        if self._logits:
            parts = [self._logits[first][some] for first, some in _by_chunk(rows, self._chunk)]
            return torch.cat(parts)
        numbers = np.full(len(rows), number, dtype=np.int32)
        return self._engine.runner.logits(self._hidden(rows.numpy()), numbers)

    def _backward_layer(self, group: Group, number: int, grads: Tensor) -> None:
        """Replace the derivative by a layer's result in the rows of a group by that by the layer's input, and add that
        of the layer's matrices."""
        decoder = self._model.model
        layer = decoder.layers[number]
        rows = group.rows
        positions = group.positions
        if group.rotations is None:
            group.rotations = decoder.rotations(positions, torch.float32)
        # Copies, so that operands begin at the same alignment in any pack: kernels may add in another order otherwise.
        hidden = self._values[number][rows].clone().requires_grad_()
        grad = grads[rows].clone()
        how: dict[str, Any] = {"closes": number == len(decoder.layers) - 1, "experts": experts_of(layer)}
        how["chosen"] = self._chosen(number, rows)
        with self._adapters.on(group.running.client), torch.enable_grad():
            rotary = group.rotations[number]
            out = run_layer(decoder, layer, rotary, positions, VarlenContext(group.starts), hidden, **how)
        found = self._add(group, f"model.layers.{number}.", out, hidden, grad)
        if found is not None:
            grads[rows] = found

    def _chosen(self, number: int, rows: slice) -> list[Tensor]:
        layers = self._model.model.layers
        before = sum(len(experts_of(layer)) for layer in layers[:number])
        return [each[rows] for each in self._experts[before : before + len(experts_of(layers[number]))]]

    def _add(self, group: Group, prefix: str, out: Tensor, hidden: Tensor, grad: Tensor) -> Tensor | None:
        """Add the gradient of the matrices of layers whose names begin with ``prefix`` to that of the call. Returns the
        derivative by ``hidden``; None if ``out`` does not depend on it."""
        running = group.running
        client = running.client
        names = [name for name in client.matrices if name == prefix or name.startswith(prefix)]
        matrices = [each for name in names for each in client.matrices[name]]
        places = [each for name in names for each in client.places[name]]
        by_hidden, *found = torch.autograd.grad(out, [hidden, *matrices], grad, allow_unused=True)
        if running.gradient is None:
            raise InvariantError("a call without a gradient has a backward pass")
        for place, each in zip(places, found, strict=True):
            if each is not None:
                running.gradient[place] += each.reshape(-1)
        return by_hidden


def _by_chunk(rows: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
    """(first row of a chunk of the pack, places of some ``rows`` in this chunk) for all ``rows`` (ascending)."""
    for number in torch.unique_consecutive(rows // chunk).tolist():
        yield number * chunk, rows[rows // chunk == number] - number * chunk


def _layer_number(name: str) -> int:
    """Number of the decoder's layer with the module ``name``."""
    return int(name.removeprefix("model.layers.").partition(".")[0])
