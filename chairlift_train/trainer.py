"""Takes optimiser steps over packs, for any model and any number of ranks.

The trainer combines parts that can also be used in a custom loop: packs come from
:class:`~chairlift_train.stream.PackStream`, a :class:`~chairlift_train.networks.Network` computes them, and
:class:`~chairlift_train.loss.StepLoss` computes the loss. The loss of a step is a sum over all its packs and ranks,
divided by one constant. So gradients are summed over the ranks. The division of sequences among packs and ranks changes
them only by rounding.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from chairlift.errors import ConfigError, DivergedError
from chairlift.lora.trainable import TrainableAdapter
from chairlift.lora.trainable_set import TrainableAdapters
from chairlift.models.causal_lm import CausalLM
from chairlift_train.collate import IGNORED, PackCollator
from chairlift_train.config import TrainerConfig
from chairlift_train.expert_balance import ExpertBalance
from chairlift_train.forward import native_network
from chairlift_train.layout import Pack
from chairlift_train.loss import StepLoss
from chairlift_train.networks import NativeNetwork, Network
from chairlift_train.optimizers import make_optimizer
from chairlift_train.parallel import join_over_ranks, num_ranks, sum_gradients, sum_over_ranks
from chairlift_train.several_adapters import AdapterLosses, AdapterStep, mean_loss
from chairlift_train.sharding import evened, like, whole

if TYPE_CHECKING:
    from chairlift_train.drift import DriftSampler
    from chairlift_train.stream import PackStream

__all__ = ["Trainer", "TrainerConfig", "TrainingStepResult", "predictions"]

_log = logging.getLogger(__name__)

_collate = PackCollator(keys=("input_ids", "position_ids", "labels", "loss_weight", "segment_ids", "cu_seqlens"))


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingStepResult:
    """Result of one optimiser step, over all ranks."""

    step: int
    """Number of steps so far, including this step."""
    loss: float
    """Mean loss as defined by ``TrainerConfig.reduce``, with label smoothing. With several adapters: the mean of their
    losses, weighted by their numbers of targets."""
    num_tokens: int
    num_targets: int
    num_packs: int
    """Number of packs without fillers."""
    grad_norm: float
    """Norm of all gradients before clipping."""
    learning_rate: float
    balance_loss: float = 0.0
    """Load-balancing loss of the step, without its factor and not included in ``loss``. It is 1 for an even load, and 0
    if it is not computed."""
    stop: bool = False
    """Whether a stop was requested on any rank, so that the run ends after this step."""
    adapters: Mapping[str, AdapterStep] = dataclasses.field(default_factory=dict)
    """Name of an adapter -> its results, if several adapters are trained."""


class Trainer:
    """Trains a model with AdamW, a learning-rate schedule with warm-up, and clipped gradients.

    ``model`` must be in float32 and on one device. Its weights are changed in place. With ``torch.distributed``, every
    rank creates a trainer with the same arguments, except that each rank has its own ``stream``.
    """

    def __init__(
        self,
        model: CausalLM | Network,
        config: TrainerConfig,
        stream: PackStream | None = None,
        *,
        seed: int = 0,
        drift: DriftSampler | None = None,
        adapter: TrainableAdapter | TrainableAdapters | None = None,
    ) -> None:
        """Create a trainer. Raises ConfigError for a model whose weights are not float32.

        Args:
            model: The model to train. config: Settings of the steps. stream: Packs for :meth:`run`. :meth:`step` does
            not need a stream. seed: Seed of dropout. drift: The source of ``stream``, if it is a DriftSampler. The
            losses of all sequences are reported to it after
                each step.
            adapter: An adapter of the model, or several. Only adapters are then trained and saved. With several, each
                sequence names its adapter in its field ``adapter``.
        """
        self.network: Network = native_network(model, adapter, config) if isinstance(model, CausalLM) else model
        self.model = self.network.module.train().requires_grad_(False)
        self.config = config
        self.stream = stream
        self.drift = drift
        self.num_steps = 0
        self.stop_requested = False
        """Set this to True on any rank to stop all ranks. The other ranks learn of it at the end of the next step."""
        if config.dropout:
            self.network.branches()  # for its check alone
        self._seed = seed
        self._several: AdapterLosses | None = None
        adapters = self.network.adapter if isinstance(self.network, NativeNetwork) else None
        if isinstance(adapters, TrainableAdapters):
            self._several = AdapterLosses(adapters, config.reduce, config.label_smoothing)
        self._loss = self._several or StepLoss(config.reduce, gradients="sum", label_smoothing=config.label_smoothing)
        if self._several is not None and config.balance_loss:
            raise ConfigError(
                "balance_loss is a product over all tokens, so several adapters cannot share it; set it to 0"
            )
        self._balance = ExpertBalance(self.model) if config.balance_loss else None
        self.is_sharded = config.sharding == "fsdp" and num_ranks() > 1
        """Whether the weights are sharded over the ranks. Every rank then runs the same number of passes."""
        if self.is_sharded:
            self.model.requires_grad_(True)
            self.network.divided()
        self._parameters = dict(self.network.trained)
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        dtypes = {parameter.dtype for parameter in (*self.model.parameters(), *self._parameters.values())}
        if dtypes != {torch.float32}:
            raise ConfigError(
                f"the trainer's weights must be float32, these are {', '.join(map(str, dtypes)) or 'none'}; load the "
                "model with dtype float32 and weight_format=PLAIN"
            )
        self.optimizer = make_optimizer(config, self._parameters.values())

    def run(self) -> Iterator[TrainingStepResult]:
        """Take the remaining steps, until the schedule or the stream ends. The state can be saved between two steps.

        Steps without a target are skipped. Raises ConfigError after 100 such steps in a row, or if all steps are such.
        """
        if self.stream is None:
            raise ConfigError("run() needs a stream; give Trainer a PackStream, or call step() with packs")
        empty = 0
        if self.num_steps < self.config.steps:
            for packs in self.stream.steps():
                if not packs[0].step_weight and not packs[0].step_sequences:  # over all ranks
                    if empty == 100:
                        raise ConfigError(
                            "the last 100 steps have no target; give sequences of two tokens and more, with tokens to"
                            " learn"
                        )
                    _log.warning("a step of %d packs has no target and is left out", len(packs))
                    empty += 1
                    continue
                empty = 0
                yield self.step(packs)
                if self.num_steps >= self.config.steps:
                    return
            if empty and not self.num_steps:
                raise ConfigError("no step has a target; give sequences of two tokens and more, with tokens to learn")

    def step(self, packs: Sequence[Pack]) -> TrainingStepResult:
        """Take one optimiser step on ``packs``, this rank's packs of the step.

        Raises ConfigError when the step has no target or an unknown token id, and :class:`DivergedError` when the loss
        or the gradient is not finite. The weights have not changed then.
        """
        real = [pack for pack in packs if not pack.filler]
        run = evened(packs) if self.is_sharded else real
        self._check_tokens(real)
        rate = self.config.rate(self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        self._observed: list[float] = []
        counted = contextlib.nullcontext() if self._balance is None else self._counted(self._balance, real)
        with self._loss.step(packs), counted:
            for pack in run:
                losses.append(self._learn(pack))
        if not self.is_sharded:
            sum_gradients(list(self._parameters.values()))
        parts = [float(loss) for loss in losses]
        tokens = sum(pack.num_tokens for pack in real)
        targets = sum(int((pack.weights != 0).sum()) for pack in real)
        balance = 0.0 if self._balance is None else self._balance.total
        own = [math.fsum(parts), balance, tokens, targets, len(real), self.stop_requested]
        loss, balance, *counts, stops = sum_over_ranks(own)
        norm, adapters = self._clip()
        loss = mean_loss(adapters) if adapters else loss
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise self._diverged(loss, norm, run, parts)
        self.optimizer.step()
        self.num_steps += 1
        if self.drift is not None:
            self._tell(self.drift)
        tokens, targets, num_packs = map(int, counts)
        return TrainingStepResult(
            self.num_steps, loss, tokens, targets, num_packs, norm, rate, balance, stops > 0, adapters
        )

    def _clip(self) -> tuple[float, dict[str, AdapterStep]]:
        """Clip the gradients; those of several adapters separately.

        Returns (norm of all gradients before clipping, name of an adapter -> its results).
        """
        limit = math.inf if self.config.max_grad_norm is None else self.config.max_grad_norm
        if self._several is None:
            return float(whole(nn.utils.clip_grad_norm_(self._parameters.values(), limit))), {}
        adapters = self._several.finish(limit)
        return math.hypot(*(each.grad_norm for each in adapters.values())), adapters

    def _tell(self, drift: DriftSampler) -> None:
        """Report the losses of all sequences of the step, over all ranks, to the drift sampler."""
        flat = join_over_ranks(self._observed)
        rows = sorted(zip(flat[::3], flat[1::3], flat[2::3], strict=True))  # the same order for any number of ranks
        rows = rows[bisect.bisect_left(rows, (drift.oldest,)) :]  # the sampler knows only recent items
        drift.observe([int(number) for number, _, _ in rows], [loss for _, loss, _ in rows], [int(n) for *_, n in rows])

    def _learn(self, pack: Pack) -> Tensor:
        """Add the gradient of a pack. Returns the pack's part of the step's loss."""
        with (  # these contexts include the backward pass, which may compute layers again
            self._dropout(pack),
            self.network.recomputed() if self.config.gradient_checkpointing else contextlib.nullcontext(),
            contextlib.ExitStack() as stack,
        ):
            router_logits = [] if self._balance is None else stack.enter_context(self._balance.watched())
            part = whole = self.pack_loss(pack, self._loss)
            if self._balance is not None:
                whole = part + self.config.balance_loss * self._balance.part(router_logits)
            whole.backward()  # type: ignore[no-untyped-call]
        return part.detach()

    def _counted(self, balance: ExpertBalance, packs: Sequence[Pack]) -> contextlib.AbstractContextManager[None]:
        """Count the tokens per expert of the step, with an additional forward pass over each pack.

        This pass must give the same router logits as the training pass, so it has the same dropout. If an adapter is
        trained, gradients are enabled in it, because without gradients the model would use other kernels.
        """

        def router_logits(pack: Pack) -> list[Tensor]:
            whole = all(parameter.requires_grad for parameter in self.model.parameters())
            with torch.set_grad_enabled(not whole), self._dropout(pack), balance.watched() as logits:
                batch = self._batch(pack)
                self._logits(batch, pack, predictions(batch)[0][:1])
            return logits

        return balance.step(packs, router_logits)

    def _dropout(self, pack: Pack) -> contextlib.AbstractContextManager[None]:
        return _dropout(self.network, self.config.dropout, self._seed, self.num_steps, pack)

    def _batch(self, pack: Pack) -> dict[str, Tensor]:
        device = next(iter(self._parameters.values())).device
        return {name: value.to(device) for name, value in _collate(pack).items()}

    def _logits(self, batch: Mapping[str, Tensor], pack: Pack, rows: Tensor) -> Tensor:
        """Logits [R, V] at the positions ``rows`` of a pack. Matrix products are computed in
        ``TrainerConfig.dtype``."""
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            return self.network.logits(batch, pack, rows)

    def pack_loss(self, pack: Pack, loss: StepLoss | AdapterLosses) -> Tensor:
        """Loss of one pack as a scalar tensor. Call it inside ``loss.step``. It does not add the trainer's dropout."""
        if self._several is not None:
            pack = self._several.route(pack)
        batch = self._batch(pack)
        rows, chosen = predictions(batch)
        part = loss(self._logits(batch, pack, rows), chosen)
        if self.drift is not None and loss is self._loss:
            self._observed += _sequence_losses(loss.losses, chosen, pack.ids)
        return part

    def _check_tokens(self, packs: Sequence[Pack]) -> None:
        known = self.network.vocab_size
        for pack in packs:
            if int(pack.tokens.max()) >= known:
                raise ConfigError(
                    f"a sequence of {_names(pack)} has the token id {int(pack.tokens.max())}, but the model knows "
                    f"{known} tokens; use the tokenizer that belongs to the model"
                )

    def _diverged(self, loss: float, norm: float, packs: Sequence[Pack], losses: Sequence[float]) -> DivergedError:
        bad = [_names(pack) for pack, part in zip(packs, losses, strict=True) if not math.isfinite(part)]
        where = f"in {'; '.join(bad[:4])}" if bad else "in no pack of this rank alone"
        return DivergedError(
            f"step {self.num_steps + 1}: the loss is {loss} and the gradient's length {norm}, {where}; the weights "
            "are those from before this step. Look at these sequences, lower learning_rate or lengthen warmup_steps, "
            "and go on from the last checkpoint"
        )

    def state_dict(self) -> dict[str, Any]:
        """State from which a run can be resumed: weights, moments, number of steps, and the state of the stream.

        It is a mapping of plain Python values, NumPy arrays and tensors. The tensors are not copied. The state is equal
        on every rank. If weights are sharded, every rank must call this method.
        """
        states = {name: self.optimizer.state.get(parameter) for name, parameter in self._parameters.items()}
        return {
            "steps": self.num_steps,
            "model": {name: whole(parameter.detach()) for name, parameter in self._parameters.items()},
            "optimizer": {
                name: {key: whole(value) for key, value in moments.items()}
                for name, moments in states.items()
                if moments
            },
            "optimizer_kind": self.config.optimizer,
            "stream": None if self.stream is None else self.stream.state_dict(),
            "adapter": self.network.settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`, with identical results.

        Raises ConfigError for the state of another model or stream.
        """
        self._check_adapter(state.get("adapter"))
        weights = state["model"]
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        mine = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if shapes != mine:
            wrong = sorted(name for name in {*shapes, *mine} if shapes.get(name) != mine.get(name))
            raise ConfigError(
                f"the checkpoint is of another model: {wrong[0]} is {shapes.get(wrong[0])} there and "
                f"{mine.get(wrong[0])} here; give the same model settings"
            )
        if (kind := state.get("optimizer_kind", "adamw")) != self.config.optimizer:
            raise ConfigError(
                f"the checkpoint's moments are those of {kind}, and training.optimizer is {self.config.optimizer}; give"
                " the same optimizer"
            )
        if self.stream is not None:
            if state["stream"] is None:
                raise ConfigError("the checkpoint is of a run without a stream, so the data's place in it is unknown")
            self.stream.load_state_dict(state["stream"])
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(like(parameter, weights[name]))
        self.optimizer.state.clear()
        for name, moments in state["optimizer"].items():
            parameter = self._parameters[name]
            self.optimizer.state[parameter] = {key: like(parameter, value) for key, value in moments.items()}
        self.num_steps = int(state["steps"])

    def _check_adapter(self, saved: Mapping[str, Any] | None) -> None:
        here = self.network.settings()
        section = self.network.section
        if (saved is None) != (here is None):
            kinds = {True: "a model", False: "an adapter or heads"}
            raise ConfigError(
                f"the checkpoint is of {kinds[saved is None]}, and {kinds[here is None]} is to be trained; give the"
                " same lora or heads settings"
            )
        for name, value in (here or {}).items():
            there = (saved or {}).get(name)
            if there != value:
                what = "another base model" if name == "base" else f"{section}.{name} {there}, and here it is {value}"
                raise ConfigError(f"the checkpoint has {what}; give the same settings and model")


def predictions(batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Select the rows of a collated pack that predict a target, so that no other logits are computed.

    Returns (rows int64 [R], batch of R selected tokens). The selected tokens are the targets and the first token of
    each sequence, so that the loss sees the same boundaries and numbers of targets. Row i of the logits predicts the
    selected token i + 1.
    """
    is_selected = batch["labels"][0] != IGNORED
    is_selected[batch["cu_seqlens"][:-1].long()] = True
    selected = is_selected.nonzero()[:, 0]
    # The last entry of ``rows`` predicts nothing. It is added so that there are as many rows as selected tokens.
    rows = torch.cat([selected[1:] - 1, selected[-1:]])
    return rows, {name: batch[name][:, selected] for name in ("labels", "loss_weight", "segment_ids")}


def _sequence_losses(losses: Tensor, chosen: Mapping[str, Tensor], ids: Sequence[int]) -> list[float]:
    """Loss of each packed sequence that has at least one target, as a flat list [id, mean loss, number of targets, id,
    ...]. ``chosen`` is the batch of selected tokens that :func:`predictions` returns; ``losses`` has one loss per row
    of their logits; ``ids`` are the ids of the pack's sequences."""
    is_target = chosen["labels"][0, 1:] != IGNORED
    segments = chosen["segment_ids"][0, 1:][is_target].cpu().numpy()
    counts = np.bincount(segments, minlength=len(ids))
    totals = np.bincount(segments, losses[:-1][is_target].double().cpu().numpy(), len(ids))
    found = counts.nonzero()[0].tolist()
    return [value for i in found for value in (ids[i], totals[i] / counts[i], int(counts[i]))]


def _names(pack: Pack) -> str:
    some = ", ".join(map(str, pack.ids[:8]))
    return f"the pack of sequences {some}{', ...' if len(pack.ids) > 8 else ''}"


@contextlib.contextmanager
def _dropout(network: Network, rate: float, seed: int, step: int, pack: Pack) -> Iterator[None]:
    """Context in which dropout is applied, by hooks, to the output of each branch of the model's layers.

    The dropped values depend only on the seed, the step and the pack. The same is true for dropout inside the network,
    such as that of an adapter.
    """
    if not rate and not network.drops:
        yield
        return
    key = hashlib.blake2b(f"{seed} {step} {pack.ids} {pack.lengths}".encode(), digest_size=8)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(int.from_bytes(key.digest()))
        for module in network.branches() if rate else ():
            hook = module.register_forward_hook(lambda _module, _args, out: functional.dropout(out, rate))
            stack.callback(hook.remove)
        yield
