"""A network whose forward values are the engine's, bit for bit, and whose gradients are PyTorch's.

Where rollouts and training are computed by different programs, the log-probabilities of the same tokens differ, and a
policy gradient sees importance ratios other than 1 before its first update. Here the forward pass of training is a step
of the engine's native kernels. Their rows do not depend on the batch, so a packed sequence gets the numbers that the
rollout got token by token. The step keeps the input of each layer. The backward pass computes each layer again in
PyTorch, in float32 and from this input, so errors stay within a layer; this is activation checkpointing (Chen et al.,
2016) with other values.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from chairlift.config import LoRAConfig
from chairlift.errors import ConfigError
from chairlift.kernels.experts import forcing
from chairlift.lora.trainable import TrainableAdapter
from chairlift.lora.trainable_set import TrainableAdapters
from chairlift.models.causal_lm import CausalLM
from chairlift.models.layers.experts import MixtureOfExperts
from chairlift.models.layers.linear import Linear
from chairlift_train.engine_pass import EnginePass
from chairlift_train.layout import Pack
from chairlift_train.networks import NativeNetwork
from chairlift_train.varlen import VarlenContext

__all__ = ["ExactNetwork", "experts_of", "run_layer"]


class ExactNetwork(NativeNetwork):
    """A :class:`~chairlift_train.networks.NativeNetwork` whose logits and log-probabilities are those of the engine.

    ``model`` has float32 weights on the CPU, which training changes in place. The engine's copy of them has ``dtype``,
    the dtype with which the rollouts are generated, and is written again when they have changed. ``kernels`` is the
    engine's setting of this name (``auto`` or an instruction set), and ``threads`` its number of threads.

    Equality needs the same version, build and instruction set of Chairlift in both, the same dtype, and rollouts whose
    tokens all come from one version of the weights. With bfloat16, gradients are those of the float32 weights at the
    rounded activations: rounding passes gradients on unchanged. In the backward pass, each token passes through the
    experts that the engine's step chose for it, and the experts' weights are computed again. Raises ConfigError for a
    model that the native kernels do not run, and for dropout.
    """

    def __init__(
        self,
        model: CausalLM,
        adapter: TrainableAdapter | TrainableAdapters | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        kernels: str = "auto",
        threads: int | None = None,
    ) -> None:
        super().__init__(model, adapter)
        if self.drops:
            raise ConfigError(
                "an exact forward pass has no dropout, and the adapter's is above 0; set lora.dropout to 0"
            )
        self._engine = EnginePass(model, dtype=dtype, kernels=kernels, threads=threads)
        self._written: tuple[int, ...] = ()
        """Versions of the parameters when the engine's copy was written; empty before the first time."""
        self._steps = [0]
        _count_steps(self, self._steps)
        self._put: tuple[int, ...] = ()
        """The same for the matrices of the adapters."""
        self._is_reference = False
        self._room = (0, 0)
        """Largest number of tokens and of sequences that the engine has room for."""

    def logits(self, batch: Mapping[str, Tensor], pack: Pack, rows: Tensor) -> Tensor:
        """Logits float32 [R, V] at the positions ``rows``: the engine's, before bias, penalties and temperature."""
        hidden = self._hidden(batch, pack)[rows]
        value = self._engine.runner.logits(hidden.detach().to(self._engine.dtype), self._adapters_at(pack, rows))
        head = self.model.lm_head
        if self.model.config.logit_cap is None and head.adapted is None:
            found: Tensor = _Product.apply(value, hidden, head.weight, head.bias)  # type: ignore[no-untyped-call]
            return found
        return _given(value, self._head(rows), hidden, [*head.parameters(), *_matrices(head)])

    def logprobs(self, batch: Mapping[str, Tensor], pack: Pack, rows: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities float32 [R] of the tokens ``targets`` (int64 [R]) after the positions ``rows``: the numbers
        that a request with ``logprobs`` gets for these tokens."""
        hidden = self._hidden(batch, pack)[rows]
        adapters = self._adapters_at(pack, rows)
        value = self._engine.runner.logprobs(
            hidden.detach().to(self._engine.dtype), targets.numpy().astype(np.int32), adapters
        )
        head = self.model.lm_head
        logits_of = self._head(rows)

        def computed(hidden: Tensor) -> Tensor:
            logits = logits_of(hidden)
            return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

        return _given(value, computed, hidden, [*head.parameters(), *_matrices(head)])

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Context in which the adapter is switched off, in both forward passes; see :class:`NativeNetwork`."""
        with super().reference():
            self._is_reference = True
            try:
                yield
            finally:
                self._is_reference = False

    def divided(self) -> None:
        """Raises ConfigError, because the engine's copy needs all weights."""
        raise ConfigError("an exact forward pass needs whole weights; leave training.sharding out, or training.forward")

    def __str__(self) -> str:
        name = str(self._engine.dtype).removeprefix("torch.")
        return f"{super().__str__()}, forward passes as the engine computes them ({self._engine.isa}, {name})"

    def _hidden(self, batch: Mapping[str, Tensor], pack: Pack) -> Tensor:
        """Result of the decoder [T, D] in float32 for a collated pack, with a graph."""
        ids, positions = batch["input_ids"][0], batch["position_ids"][0]
        context = VarlenContext(pack.layout.cu_seqlens)
        values, chosen = self._computed(ids, positions, context)
        decoder = self.model.model
        rotations = decoder.rotations(positions, torch.float32)
        outside = [p for name, p in decoder.named_parameters() if not name.startswith("layers.")]
        hidden = _given(values[0], lambda _: decoder.embed(ids, positions), None, outside)
        last = len(decoder.layers) - 1
        routed = iter(chosen)
        for i, (layer, rotary) in enumerate(zip(decoder.layers, rotations, strict=True)):
            found = experts_of(layer)
            how: dict[str, Any] = {"closes": i == last, "experts": found, "chosen": [next(routed) for _ in found]}
            run = functools.partial(run_layer, decoder, layer, rotary, positions, context, **how)
            trained = [*layer.parameters(), *_matrices(layer), *(outside if i == last else ())]
            hidden = _given(values[i + 1], run, hidden, trained)
        return hidden

    # -- the engine's step ---------------------------------------------------------------------------------------------

    def _computed(self, ids: Tensor, positions: Tensor, context: VarlenContext) -> tuple[list[Tensor], list[Tensor]]:
        """(inputs of all layers and the decoder's result, each [T, D] in float32; int64 [T, k] experts that each layer
        of experts chose) for whole sequences."""
        starts = context.layout.cu_seqlens
        if not np.array_equal(context.layout.positions, positions.numpy()):
            raise ConfigError("an exact forward pass needs whole sequences, whose positions begin at 0")
        self._refresh(len(ids), len(starts) - 1)
        values: list[list[Tensor]] = []
        chosen: list[list[Tensor]] = []
        for part in self._engine.stretches(ids.numpy().astype(np.int32), starts, self._adapters_of(len(ids))):
            # Copies, because the next step overwrites the buffers while the graph still needs their contents.
            values.append([each.to(torch.float32, copy=True) for each in part.values])
            chosen.append(part.experts)
        return _joined(values), _joined(chosen)

    def _adapters_at(self, pack: Pack, rows: Tensor) -> Any:
        """Number of the adapter of each of the pack's ``rows``; None without adapters."""
        found = self._adapters_of(pack.num_tokens)
        return None if found is None else np.ascontiguousarray(found[rows.numpy()])

    def _adapters_of(self, count: int) -> Any:
        """Number of the adapter of each of the pack's ``count`` tokens; None without adapters."""
        if self._is_reference or self.adapter is None:
            return None
        if isinstance(self.adapter, TrainableAdapters):
            numbers = np.arange(1, len(self.adapter.names) + 1, dtype=np.int32)
            return np.repeat(numbers, self.adapter.rows)
        return np.ones(count, dtype=np.int32)

    def _refresh(self, num_tokens: int, num_sequences: int) -> None:
        """Give the engine room for a step of this size, and the newest weights."""
        versions = self._versions(self.model.parameters())
        if versions != self._written:
            self._engine.write(self.model)
            self._written = versions
        if num_tokens > self._room[0] or num_sequences > self._room[1]:
            self._room = (max(num_tokens, self._room[0]), max(num_sequences, self._room[1]))
            self._engine.grow(*self._room, self._lora())
            self._put = ()
        versions = self._versions(self._adapter_parameters())
        if versions != self._put:
            self._put_adapters()
            self._put = versions

    def _versions(self, parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
        """Numbers that change when one of the parameters does. Fused optimisers do not count in ``_version``, so their
        steps are counted apart; a frozen parameter is in no optimiser."""
        given = list(parameters)
        steps = self._steps[0] if any(parameter.requires_grad for parameter in given) else 0
        return (steps, *(parameter._version for parameter in given))

    def _lora(self) -> LoRAConfig | None:
        adapters = self._adapters()
        if not adapters:
            return None
        rank = max(adapter.r for adapter in adapters)
        return LoRAConfig(enable_lora=True, max_lora_rank=rank, max_cpu_loras=len(adapters))

    def _adapters(self) -> list[TrainableAdapter]:
        if self.adapter is None:
            return []
        return [self.adapter] if isinstance(self.adapter, TrainableAdapter) else list(self.adapter.adapters.values())

    def _adapter_parameters(self) -> Iterator[nn.Parameter]:
        for adapter in self._adapters():
            yield from adapter.parameters.values()

    def _put_adapters(self) -> None:
        """Give the engine's step the newest matrices of the adapters."""
        table = self._engine.runner.adapters
        if table is None:
            return
        for number, adapter in enumerate(self._adapters(), 1):
            if self._put:
                table.drop(number)
            table.put(number, table.hold(adapter.as_served()))


def _count_steps(owner: object, steps: list[int]) -> None:
    """Add 1 to ``steps[0]`` after each step of any optimiser, as long as ``owner`` exists."""

    def stepped(*_: Any) -> None:
        steps[0] += 1

    handle = register_optimizer_step_post_hook(stepped)
    weakref.finalize(owner, handle.remove)


def run_layer(
    decoder: Any,
    layer: nn.Module,
    rotary: Any,
    positions: Tensor,
    context: VarlenContext,
    hidden: Tensor,
    *,
    closes: bool,
    experts: Sequence[MixtureOfExperts],
    chosen: Sequence[Tensor],
) -> Tensor:
    """The result [T, D] of a decoder layer in PyTorch for its input ``hidden`` [T, D], where each of its layers of
    ``experts`` sends tokens to those that the engine has ``chosen``, int64 [T, k]. With ``closes``, it is the result of
    the decoder, whose last layer this is."""
    for each, ids in zip(experts, chosen, strict=True):
        each.forced = forcing(ids, each.routing.num_experts)
    try:
        out: Tensor = layer(hidden, rotary, positions, context)
    finally:
        for each in experts:
            each.forced = None
    return decoder.close(out) if closes else out


def experts_of(layer: nn.Module) -> list[MixtureOfExperts]:
    """The layers of experts in a decoder layer."""
    return [each for each in layer.modules() if isinstance(each, MixtureOfExperts)]


def _joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The tensors of all parts, each joined along the tokens."""
    return [each[0] if len(each) == 1 else torch.cat(each) for each in zip(*parts, strict=True)]


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    """Matrices of the adapters that the linear layers below ``module`` add."""
    layers = [each for each in module.modules() if isinstance(each, Linear) and each.adapted is not None]
    return [matrix for layer in layers for matrix in getattr(layer.adapted, "matrices", ())]


# -- values with another program's gradient ----------------------------------------------------------------------------


def _given(
    value: Tensor, run: Callable[[Any], Tensor], hidden: Tensor | None, trained: Sequence[nn.Parameter]
) -> Tensor:
    """``value`` as the result of ``run(hidden)``: its gradient is that of ``run``, which the backward pass computes."""
    wanted = list(dict.fromkeys(parameter for parameter in trained if parameter.requires_grad))
    found: Tensor = _Given.apply(value, run, wanted, hidden, *wanted)  # type: ignore[no-untyped-call]
    return found


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, run: Any, wanted: Any, hidden: Tensor | None, *_trained: Tensor) -> Tensor:
        ctx.run, ctx.wanted = run, wanted
        ctx.save_for_backward(hidden)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        with torch.enable_grad():
            given = None if hidden is None else hidden.detach().requires_grad_()
            out = ctx.run(given)
            inputs = ctx.wanted if given is None else [given, *ctx.wanted]
            found = torch.autograd.grad(out, inputs, grads[0], allow_unused=True) if inputs else ()
        return (None, None, None, *((None, *found) if given is None else found))


class _Product(torch.autograd.Function):
    """``value`` as the product of ``hidden`` [R, D] and ``weight`` [V, D], whose gradient needs no second product."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.has_bias = bias is not None
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        (grad,) = grads
        needs = ctx.needs_input_grad
        return (
            None,
            grad @ weight if needs[1] else None,
            grad.t() @ hidden if needs[2] else None,
            grad.sum(0) if ctx.has_bias and needs[3] else None,
        )
