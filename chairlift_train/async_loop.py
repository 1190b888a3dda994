"""Trains on rollouts while the next rollouts are generated, and publishes the new weights after each step.

The loop uses no clock, no threads and no random numbers. Its behaviour depends only on the rollouts of the generator.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from chairlift.errors import ConfigError
from chairlift_train.staleness import GateStats, Selection, StalenessGate

__all__ = ["AsyncLoop", "Generator", "LoopStats", "Rollout"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
    """A generated answer to a prompt, with the log-probabilities and weight versions that a policy gradient needs."""

    ticket: int
    prompt: Sequence[int]
    """Prompt as token ids, [P]."""
    tokens: Sequence[int] = ()
    """Generated token ids, [L]."""
    logprobs: Sequence[float] = ()
    """[L] log-probability of each generated token under the weights that sampled it."""
    versions: Sequence[int] = ()
    """[L] version of the weights that sampled each token."""
    error: str = ""
    """Reason why the rollout failed. Empty if it succeeded."""
    kept: Sequence[Sequence[int]] = ()
    """[L] ids from which each token was drawn, if top-k, top-p or min-p left out others. Empty: all ids."""

    def sequence(self, weight: float = 1.0) -> dict[str, Any]:
        """Prompt and answer as an item for :class:`~chairlift_train.stream.PackStream`, which has the tokens of both.

        ``loss_weight`` is 0 for the prompt and ``weight`` (such as an advantage or an importance weight) for the
        answer. ``logprobs`` and ``versions`` are aligned with the tokens; they are 0 for the prompt. So is ``kept``, if
        the rollout has it; it is empty for the prompt.
        """
        prompt = len(self.prompt)
        kept: dict[str, Any] = {"kept": [[]] * prompt + [list(ids) for ids in self.kept]} if self.kept else {}
        return {
            **kept,
            "input_ids": [*self.prompt, *self.tokens],
            "loss_weight": [0.0] * prompt + [weight] * len(self.tokens),
            "logprobs": [0.0] * prompt + list(self.logprobs),
            "versions": [0] * prompt + list(self.versions),
        }


class Generator(Protocol):
    """Protocol of an engine, or of a simulation, that generates answers to prompts."""

    def submit(self, ticket: int, prompt: Sequence[int]) -> None:
        """Start a rollout. ``ticket`` identifies it in :meth:`poll`."""
        ...

    def poll(self, *, wait: bool) -> Sequence[Rollout]:
        """Rollouts that have ended since the last call.

        With ``wait``, block until a rollout has ended, if any is running. Without ``wait``, return at once.
        """
        ...

    def update_weights(self, source: Any, version: int) -> None:
        """Use new weights, also for running rollouts. Returns when the old weights are no longer used."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class LoopStats:
    """Counts since the loop was created."""

    gate: GateStats
    num_steps: int
    num_failed: int
    """Number of rollouts that ended with an error."""
    num_waits: int
    """Number of times that the trainer had to wait for a rollout. It is near 0 if the generator is fast enough."""


class AsyncLoop:
    """Asynchronous training loop: generates rollouts, trains on the rollouts that a
    :class:`~chairlift_train.staleness.StalenessGate` selects, and publishes the new weights to the generator.

    ``train_step`` computes rewards and loss for a :class:`~chairlift_train.staleness.Selection` of :class:`Rollout`
    samples, and takes one optimiser step. ``weights()`` returns the new weights for ``generator.update_weights``: a
    mapping of tensors or a directory. At most ``(bound + 1) * batch`` rollouts run or wait, and at most ``concurrency``
    of them run. With a bound of 0, training is synchronous.
    """

    def __init__(
        self,
        generator: Generator,
        train_step: Callable[[Selection], Any],
        gate: StalenessGate,
        prompts: Iterable[Sequence[int]],
        *,
        weights: Callable[[], Any],
        concurrency: int | None = None,
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1 rollout, got {concurrency}")
        self.gate = gate
        self._generator = generator
        self._train_step = train_step
        self._weights = weights
        self._prompts: Iterator[Sequence[int]] = iter(prompts)
        self._concurrency = concurrency
        self._running: dict[int, Sequence[int]] = {}  # ticket -> prompt
        self._num_prompts = self._num_steps = self._num_failed = self._num_waits = 0
        self._exhausted = False
        self._unpublished = False
        """Whether publishing the newest weights failed, so that the generator does not have them yet."""

    def step(self) -> Any:
        """Generate until there is a batch, train on it, and publish the weights. Returns the result of ``train_step``.

        Raises StopIteration when the prompts have ended and too few rollouts for a batch remain. If ``train_step``
        raises, no weights are published, and the samples wait for the next call. If publishing raises, the next call
        publishes first.
        """
        if self._unpublished:
            self._publish()
        self._collect(wait=False)
        self._refill()
        while not (selection := self.gate.select()):
            if not self._running:
                if self._exhausted:
                    raise StopIteration
                raise ConfigError(
                    f"no rollout is running and none may start, but there is no batch of {self.gate.batch}: the "
                    "gate is used elsewhere, too; give the loop a gate that nothing else uses"
                )
            self._num_waits += 1
            self._collect(wait=True)
            self._refill()
        try:
            result = self._train_step(selection)
        except BaseException:
            self.gate.put_back(selection)
            raise
        self._num_steps += 1
        self._publish()
        return result

    def run(self, num_steps: int) -> list[Any]:
        """Run ``num_steps`` steps, or fewer if the prompts end. Returns the results of ``train_step``."""
        results: list[Any] = []
        try:
            while len(results) < num_steps:
                results.append(self.step())
        except StopIteration:
            _log.info("the prompts ended after %d steps", len(results))
        return results

    def drain(self) -> None:
        """Wait until all running rollouts have ended, and start no others. Ended rollouts wait in the staleness gate
        until a step trains on them. A state that is saved after this call contains only complete rollouts.

        A run that is resumed from this state has the same results as an uninterrupted run that calls ``drain`` at the
        same steps, if the generator's results depend only on the weights, the prompts and the tickets (a ticket is the
        number that identifies a rollout).
        """
        while self._running:
            self._collect(wait=True)

    def stats(self) -> LoopStats:
        """Counts since the loop was created."""
        return LoopStats(self.gate.stats(), self._num_steps, self._num_failed, self._num_waits)

    def state_dict(self) -> dict[str, Any]:
        """State of the loop: the gate with its waiting rollouts, the prompts of running rollouts, and all counts."""
        gate = self.gate.state_dict()
        gate["waiting"] = [[*each[:3], dataclasses.asdict(each[3])] for each in gate["waiting"]]
        return {
            "gate": gate,
            "running": [[ticket, list(prompt)] for ticket, prompt in self._running.items()],
            "unpublished": self._unpublished,
            "num_prompts": self._num_prompts,
            "num_steps": self._num_steps,
            "num_failed": self._num_failed,
            "num_waits": self._num_waits,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict` in a new loop. The generator must have the weights of the saved
        version.

        Rollouts that were running start again, with the weights of that version; see :meth:`drain`. The prompts that
        were read before are skipped, so the source must give the same prompts from its beginning. Raises ConfigError if
        this loop has already started, if the settings of the gate differ, and if the prompts end too early.
        """
        if self._num_prompts or self._num_steps:
            raise ConfigError("a state can only be loaded into a new loop; this loop has already started")
        gate = dict(state["gate"])
        gate["waiting"] = [[*each[:3], Rollout(**each[3])] for each in gate["waiting"]]
        self.gate.load_state_dict(gate)
        self._unpublished = state.get("unpublished", False)
        self._num_steps = state["num_steps"]
        self._num_failed = state.get("num_failed", 0)  # states of earlier releases have no count
        self._num_waits = state.get("num_waits", 0)
        self._num_prompts = state["num_prompts"]
        for position in range(self._num_prompts):
            if next(self._prompts, None) is None:
                raise ConfigError(
                    f"the prompts ended after {position}, but {self._num_prompts} had been read when the state was "
                    "taken; give the same prompts, from their beginning"
                )
        for ticket, prompt in state["running"]:
            self._begin(ticket, prompt)

    def _publish(self) -> None:
        self._unpublished = True
        # The generator gets the weights before the gate counts the new version, so that no request is admitted under a
        # version that the generator does not have yet.
        self._generator.update_weights(self._weights(), self.gate.version + 1)
        self.gate.publish()
        self._unpublished = False

    def _begin(self, ticket: int, prompt: Sequence[int]) -> None:
        self._generator.submit(ticket, prompt)
        self._running[ticket] = prompt

    def _refill(self) -> None:
        """Start rollouts until the gate or ``concurrency`` allows no more, or the prompts end."""
        while not self._exhausted and self.gate.capacity:
            if self._concurrency is not None and len(self._running) >= self._concurrency:
                return
            try:
                prompt = next(self._prompts)
            except StopIteration:
                self._exhausted = True
                return
            self._num_prompts += 1
            self._begin(self.gate.admit()[0], prompt)

    def _collect(self, *, wait: bool) -> None:
        """Pass ended rollouts to the gate. Failed rollouts are cancelled."""
        for rollout in self._generator.poll(wait=wait):
            if rollout.ticket not in self._running:
                raise ConfigError(f"the generator reports rollout {rollout.ticket}, which is not running")
            del self._running[rollout.ticket]
            if rollout.error or not rollout.tokens:
                _log.warning("rollout %d: %s; its prompt is skipped", rollout.ticket, rollout.error or "no token")
                self._num_failed += 1
                self.gate.cancel(rollout.ticket)
            else:
                self.gate.tag(rollout.ticket, min(rollout.versions), rollout, length=len(rollout.tokens))
