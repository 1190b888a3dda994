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
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from chairlift.base.step_batch import StepBatch
from chairlift.config import LoRAConfig
from chairlift.errors import ConfigError, InvariantError
from chairlift.executor.backends.native.backend import NativeBackend
from chairlift.executor.backends.native.native_runner import NativeModelRunner
from chairlift.executor.kv_tensors import plan_kv_cache
from chairlift.kernels.cpu.library import ThreadPool
from chairlift.kernels.weights import NATIVE
from chairlift.lora.trainable import TrainableAdapter
from chairlift.lora.trainable_set import TrainableAdapters
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.layers.linear import Linear
from chairlift.models.loader import replace_weights
from chairlift_train.layout import Pack
from chairlift_train.networks import NativeNetwork
from chairlift_train.varlen import VarlenContext

__all__ = ["ExactNetwork"]

_BLOCK = 16
_NO_LIMIT = 1 << 50


class ExactNetwork(NativeNetwork):
    """A :class:`~chairlift_train.networks.NativeNetwork` whose logits and log-probabilities are those of the engine.

    ``model`` has float32 weights on the CPU, which training changes in place. The engine's copy of them has ``dtype``,
    the dtype with which the rollouts are generated, and is written again when they have changed. ``kernels`` is the
    engine's setting of this name (``auto`` or an instruction set), and ``threads`` its number of threads.

    Equality needs the same version, build and instruction set of Chairlift in both, the same dtype, and rollouts whose
    tokens all come from one version of the weights. With bfloat16, gradients are those of the float32 weights at the
    rounded activations: rounding passes gradients on unchanged. A layer of experts chooses the experts again in the
    backward pass, in float32. Raises ConfigError for a model that the native kernels do not run, and for dropout.
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
        device = next(model.parameters()).device
        backend = NativeBackend.choose(kernels)
        if reason := backend.why_not(model.config, dtype, device, _BLOCK):
            raise ConfigError(f"an exact forward pass uses the native kernels: {reason}")
        self._dtype = dtype
        self._isa = backend.kernels
        self._pool = ThreadPool(threads)
        with torch.device("meta"):
            self._copy = CausalLM(model.config)
        self._copy.lay_out(NATIVE, dtype, torch.device("cpu"))
        self._copy.eval().requires_grad_(False)
        self._written: tuple[int, ...] = ()
        """Versions of the parameters when the engine's copy was written; empty before the first time."""
        self._steps = [0]
        _count_steps(self, self._steps)
        self._put: tuple[int, ...] = ()
        """The same for the matrices of the adapters."""
        self._is_reference = False
        self._runner: NativeModelRunner | None = None
        self._room = (0, 0)
        """Largest number of tokens and of sequences that the runner has room for."""

    def logits(self, batch: Mapping[str, Tensor], pack: Pack, rows: Tensor) -> Tensor:
        """Logits float32 [R, V] at the positions ``rows``: the engine's, before bias, penalties and temperature."""
        hidden = self._hidden(batch, pack)[rows]
        value = self._current.logits(hidden.detach().to(self._dtype))
        head = self.model.lm_head
        if self.model.config.logit_cap is None and head.adapted is None:
            found: Tensor = _Product.apply(value, hidden, head.weight, head.bias)  # type: ignore[no-untyped-call]
            return found
        return _given(value, self.model.compute_logits, hidden, [*head.parameters(), *_matrices(head)])

    def logprobs(self, batch: Mapping[str, Tensor], pack: Pack, rows: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities float32 [R] of the tokens ``targets`` (int64 [R]) after the positions ``rows``: the numbers
        that a request with ``logprobs`` gets for these tokens."""
        hidden = self._hidden(batch, pack)[rows]
        value = self._current.logprobs(hidden.detach().to(self._dtype), targets.numpy().astype(np.int32))
        head = self.model.lm_head

        def computed(hidden: Tensor) -> Tensor:
            logits = self.model.compute_logits(hidden)
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
        name = str(self._dtype).removeprefix("torch.")
        return f"{super().__str__()}, forward passes as the engine computes them ({self._isa}, {name})"

    def _hidden(self, batch: Mapping[str, Tensor], pack: Pack) -> Tensor:
        """Result of the decoder [T, D] in float32 for a collated pack, with a graph."""
        ids, positions = batch["input_ids"][0], batch["position_ids"][0]
        context = VarlenContext(pack.layout.cu_seqlens)
        values = [value.float() for value in self._computed(ids, positions, context)]
        decoder = self.model.model
        rotations = decoder.rotations(positions, torch.float32)
        outside = [p for name, p in decoder.named_parameters() if not name.startswith("layers.")]
        hidden = _given(values[0], lambda _: decoder.embed(ids, positions), None, outside)
        last = len(decoder.layers) - 1
        for i, (layer, rotary) in enumerate(zip(decoder.layers, rotations, strict=True)):
            run = functools.partial(_run_layer, decoder, layer, rotary, positions, context, closes=i == last)
            trained = [*layer.parameters(), *_matrices(layer), *(outside if i == last else ())]
            hidden = _given(values[i + 1], run, hidden, trained)
        return hidden

    # -- the engine's step ---------------------------------------------------------------------------------------------

    def _computed(self, ids: Tensor, positions: Tensor, context: VarlenContext) -> list[Tensor]:
        """Inputs of all layers and the decoder's result, each [T, D] in the engine's dtype, for whole sequences."""
        starts = context.layout.cu_seqlens
        step, counts = _step(ids.numpy(), starts)
        if not np.array_equal(step.positions, positions.numpy()):
            raise ConfigError("an exact forward pass needs whole sequences, whose positions begin at 0")
        runner = self._refreshed(len(ids), len(starts) - 1)
        if self._is_reference:
            step.adapters = None
        elif isinstance(self.adapter, TrainableAdapters):
            numbers = np.arange(1, len(self.adapter.names) + 1, dtype=np.int32)
            step.adapters = np.repeat(numbers, self.adapter.rows)
        elif self.adapter is not None:
            step.adapters = np.ones(len(ids), dtype=np.int32)
        step.block_tables, step.slot_mapping = _places(runner, step, counts)
        out = runner.forward(step)
        # Copies, because the next step overwrites the buffers while the graph still needs their contents.
        return [value.clone() for value in (*runner.layer_inputs(len(ids)), out)]

    @property
    def _current(self) -> NativeModelRunner:
        if self._runner is None:
            raise InvariantError("the engine's step is used before a pack was computed")
        return self._runner

    def _refreshed(self, num_tokens: int, num_sequences: int) -> NativeModelRunner:
        """The runner, with room for a step of this size, and with the newest weights."""
        versions = self._versions(self.model.parameters())
        if versions != self._written:
            replace_weights(self._copy, hf_state_dict(self.model))
            if self._runner is not None:
                self._runner.weights_written()
            self._written = versions
        if num_tokens > self._room[0] or num_sequences > self._room[1]:
            self._room = (max(num_tokens, self._room[0]), max(num_sequences, self._room[1]))
            self._runner = self._make_runner(*self._room)
            self._put = ()
        versions = self._versions(self._adapter_parameters())
        if versions != self._put:
            self._put_adapters()
            self._put = versions
        return self._current

    def _versions(self, parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
        """Numbers that change when one of the parameters does. Fused optimisers do not count in ``_version``, so their
        steps are counted apart; a frozen parameter is in no optimiser."""
        given = list(parameters)
        steps = self._steps[0] if any(parameter.requires_grad for parameter in given) else 0
        return (steps, *(parameter._version for parameter in given))

    def _make_runner(self, num_tokens: int, num_sequences: int) -> NativeModelRunner:
        num_blocks = num_sequences + num_tokens // _BLOCK + 1
        plan = plan_kv_cache(
            self._copy.kv_cache_spec(),
            dtype=self._dtype,
            block_size=_BLOCK,
            memory_bytes=_NO_LIMIT,
            num_blocks=num_blocks,
            most_tokens=num_blocks * _BLOCK,
            rows=num_sequences,
            caching=False,
        )
        adapters = self._adapters()
        lora = None
        if adapters:
            rank = max(adapter.r for adapter in adapters)
            lora = LoRAConfig(enable_lora=True, max_lora_rank=rank, max_cpu_loras=len(adapters))
        sizes: dict[str, Any] = {"isa": self._isa, "max_tokens": num_tokens, "lora": lora, "keeps_layers": True}
        return NativeModelRunner(self._copy, plan, self._dtype, self._pool, **sizes)

    def _adapters(self) -> list[TrainableAdapter]:
        if self.adapter is None:
            return []
        return [self.adapter] if isinstance(self.adapter, TrainableAdapter) else list(self.adapter.adapters.values())

    def _adapter_parameters(self) -> Iterator[nn.Parameter]:
        for adapter in self._adapters():
            yield from adapter.parameters.values()

    def _put_adapters(self) -> None:
        """Give the engine's step the newest matrices of the adapters."""
        table = self._current.adapters
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


def _run_layer(
    decoder: Any, layer: nn.Module, rotary: Any, positions: Tensor, context: VarlenContext, hidden: Tensor, closes: bool
) -> Tensor:
    out: Tensor = layer(hidden, rotary, positions, context)
    return decoder.close(out) if closes else out


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    """Matrices of the adapters that the linear layers below ``module`` add."""
    layers = [each for each in module.modules() if isinstance(each, Linear) and each.adapted is not None]
    return [matrix for layer in layers for matrix in getattr(layer.adapted, "matrices", ())]


def _step(ids: Any, starts: Sequence[int]) -> tuple[StepBatch, list[int]]:
    """A step that computes whole sequences, without places in the cache; and the number of blocks of each sequence."""
    lengths = np.diff(starts).astype(np.int32)
    num_tokens = int(starts[-1])
    step = StepBatch(
        token_ids=ids.astype(np.int32),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        cu_seqlens=np.array(starts, dtype=np.int32),
        seq_lens=lengths,
        block_tables=np.zeros((0, 0, 0), dtype=np.int32),
        slot_mapping=np.zeros((0, 0), dtype=np.int64),
        slots=np.arange(len(lengths), dtype=np.int32),
        sample_rows=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        sample_tokens=np.arange(num_tokens, dtype=np.int32),  # so the step computes the results of all tokens
    )
    return step, [math.ceil(length / _BLOCK) for length in lengths.tolist()]


def _places(runner: NativeModelRunner, step: StepBatch, counts: Sequence[int]) -> tuple[Any, Any]:
    """Block tables [G, N, M] and slot mapping [G, T]. Block 0 is never used; states take a block per sequence."""
    table = np.zeros((len(counts), max(counts)), dtype=np.int32)
    first = 1
    for row, count in enumerate(counts):
        table[row, :count] = np.arange(first, first + count)
        first += count
    rows = step.sample_rows
    places = table[rows, step.positions // _BLOCK].astype(np.int64) * _BLOCK + step.positions % _BLOCK
    states = np.zeros_like(table)
    states[:, 0] = np.arange(1, len(counts) + 1)
    groups = [
        (table, places) if group.state_span is None else (states, states[rows, 0]) for group in runner.cache_groups
    ]
    return np.stack([group[0] for group in groups]), np.stack([group[1].astype(np.int64) for group in groups])


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
