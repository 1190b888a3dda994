"""Training on rollouts while the next ones are generated: generate, select, train, publish.

The loop has no clock, no threads and no random numbers. Its behaviour depends on the generator's reports only.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from chairlift.errors import ConfigError
from chairlift.train.staleness import GateStats, Selection, StalenessGate

__all__ = ["AsyncLoop", "Generator", "LoopStats", "Rollout"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
    """One answer to one prompt, with the log-probabilities and weight versions that a policy gradient needs."""

    ticket: int
    prompt: Sequence[int]
    """[P] token ids."""
    tokens: Sequence[int] = ()
    """[L] generated token ids."""
    logprobs: Sequence[float] = ()
    """[L] log-probability of each under the weights it was sampled from."""
    versions: Sequence[int] = ()
    """[L] version of those weights."""
    error: str = ""
    """Reason why the rollout failed; empty if it did not."""

    def sequence(self, weight: float = 1.0) -> dict[str, Any]:
        """The whole sequence [P + L] as :class:`~chairlift.train.stream.PackStream` takes it.

        ``loss_weight`` is 0 for the prompt and ``weight`` (an advantage, an importance weight) for the answer;
        ``logprobs`` and ``versions`` are aligned with the tokens, and 0 for the prompt.
        """
        prompt = len(self.prompt)
        return {
            "input_ids": [*self.prompt, *self.tokens],
            "loss_weight": [0.0] * prompt + [weight] * len(self.tokens),
            "logprobs": [0.0] * prompt + list(self.logprobs),
            "versions": [0] * prompt + list(self.versions),
        }


class Generator(Protocol):
    """An engine or a simulation that answers prompts."""

    def submit(self, ticket: int, prompt: Sequence[int]) -> None:
        """Begin a rollout; ``ticket`` names it."""
        ...

    def poll(self, *, wait: bool) -> Sequence[Rollout]:
        """Rollouts that have ended since the last call. With ``wait``, block or compute until there is one, if any is
        running; without it, return at once."""
        ...

    def update_weights(self, source: Any, version: int) -> None:
        """Sample from new weights, in running rollouts too. Returns when the old weights are no longer used."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class LoopStats:
    """Counts since the beginning."""

    gate: GateStats
    num_steps: int
    num_failed: int
    """Rollouts that ended with an error."""
    num_waits: int
    """Number of times that the trainer waited for a rollout. It is near 0 with a fast generator."""


class AsyncLoop:
    """Keeps a generator busy, trains on rollouts from a :class:`~chairlift.train.staleness.StalenessGate`, publishes.

    ``train_step`` takes one optimiser step on a :class:`~chairlift.train.staleness.Selection` of :class:`Rollout`
    samples; rewards, loss and packing belong there. ``weights()`` is what ``generator.update_weights`` is given: a
    mapping of tensors or a directory. At most ``(bound + 1) * batch`` rollouts run or wait, and at most ``concurrency``
    run. A bound of 0 is synchronous training.
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
        """Whether publishing failed. The generator then lacks the newest trained weights."""

    def step(self) -> Any:
        """Generate until there is a batch, train on it, and publish. Returns what ``train_step`` returned.

        Raises StopIteration when the prompts have ended and less than a batch is left. Where ``train_step`` raises,
        nothing is published, and its samples wait for the next call; where publishing raises, the next call publishes
        first.
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
                    "gate is used by somebody else, too; give the loop a gate of its own"
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
        """Take ``num_steps`` steps, or fewer if the prompts end. Returns the results of ``train_step``."""
        results: list[Any] = []
        try:
            while len(results) < num_steps:
                results.append(self.step())
        except StopIteration:
            _log.info("the prompts ended after %d steps", len(results))
        return results

    def stats(self) -> LoopStats:
        """Counts so far."""
        return LoopStats(self.gate.stats(), self._num_steps, self._num_failed, self._num_waits)

    def state_dict(self) -> dict[str, Any]:
        """The gate, with the rollouts that wait in it, the prompts under way, how many were read, and the counts."""
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
        """Go on from there, in a new loop whose generator has the weights of that version.

        Rollouts that were running begin again. Prompts that were read are passed, so the source must yield the same.
        Raises ConfigError for a loop under way, a gate with other settings, and prompts that end too early.
        """
        if self._num_prompts or self._num_steps:
            raise ConfigError("a state is loaded into a new loop; this one is under way")
        gate = dict(state["gate"])
        gate["waiting"] = [[*each[:3], Rollout(**each[3])] for each in gate["waiting"]]
        self.gate.load_state_dict(gate)
        self._unpublished = state.get("unpublished", False)
        self._num_steps = state["num_steps"]
        self._num_failed = state.get("num_failed", 0)  # earlier releases do not say
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
        # Weights are sent before the gate opens, so that no request is admitted under a version that the generator
        # does not have yet.
        self._generator.update_weights(self._weights(), self.gate.version + 1)
        self.gate.publish()
        self._unpublished = False

    def _begin(self, ticket: int, prompt: Sequence[int]) -> None:
        self._generator.submit(ticket, prompt)
        self._running[ticket] = prompt

    def _refill(self) -> None:
        """Start as many rollouts as may start."""
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
        """Give ended rollouts to the gate."""
        for rollout in self._generator.poll(wait=wait):
            if rollout.ticket not in self._running:
                raise ConfigError(f"the generator reports rollout {rollout.ticket}, which is not running")
            del self._running[rollout.ticket]
            if rollout.error or not rollout.tokens:
                _log.warning("rollout %d: %s; its prompt is passed", rollout.ticket, rollout.error or "no token")
                self._num_failed += 1
                self.gate.cancel(rollout.ticket)
            else:
                self.gate.tag(rollout.ticket, min(rollout.versions), rollout, length=len(rollout.tokens))
