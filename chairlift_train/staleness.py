"""Limits how many versions of the weights a training sample may lag behind: a gate between a generator and a trainer.

The rule for the capacity is that of AReaL (Fu et al., 2025). The reduced learning rate is that of Zhang et al. (2016).
Uses the standard library only. The results depend only on the order of the calls.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from chairlift.errors import ConfigError

__all__ = ["Finished", "GateStats", "Selection", "StalenessGate", "StalenessPolicy"]

StalenessPolicy = Literal["drop", "wait", "reweight", "lr_scale"]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Finished:
    """A rollout that has ended. Rollouts are ordered by ``version``, then by ``ticket``."""

    version: int
    """Version of the oldest weights that generated any of the rollout's tokens."""
    ticket: int
    length: int = dataclasses.field(default=0, compare=False)
    """Length of the rollout in tokens."""
    sample: Any = dataclasses.field(default=None, compare=False)
    """The caller's object for this rollout, such as its tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Samples for one optimiser step. An empty selection is false: there are not enough samples yet."""

    rollouts: tuple[Finished, ...] = ()
    staleness: tuple[int, ...] = ()
    """[N] number of versions that each sample lags behind; at most the bound of the gate."""
    weights: tuple[float, ...] = ()
    """[N] factor for the ``loss_weight`` of each sample. It is 1 unless the policy is ``reweight``."""
    lr_scale: float = 1.0
    """Factor for the learning rate. It is 1 unless the policy is ``lr_scale``."""

    def __bool__(self) -> bool:
        return bool(self.rollouts)

    @property
    def samples(self) -> list[Any]:
        """[N] ``sample`` of each selected rollout: the object that the caller has stored with the rollout."""
        return [rollout.sample for rollout in self.rollouts]


@dataclasses.dataclass(frozen=True, slots=True)
class GateStats:
    """Counts of rollouts since the gate was created."""

    version: int
    running: int
    """Number of rollouts that were admitted and have not ended."""
    waiting: int
    """Number of rollouts that have ended and were not selected yet."""
    produced: int
    consumed: int
    dropped: int
    """Number of ended rollouts that became too old to be selected."""
    cancelled: int
    refused: int
    """Number of refused calls of :meth:`StalenessGate.admit`."""
    staleness: dict[int, int]
    """Staleness -> number of consumed samples."""
    staleness_p50: int
    staleness_max: int
    lengths_produced: dict[int, int]
    """Histogram of lengths: power of two -> number of samples with a length up to this power and above the next smaller
    power."""
    lengths_consumed: dict[int, int]
    length_bias: float
    """Mean length of consumed samples divided by the mean length of produced samples, minus 1. It is negative if long
    samples are dropped (arXiv 2605.02043)."""


class StalenessGate:
    """Decides how many rollouts may start, and which ended rollouts a step trains on.

    In total, at most ``(bound + version + 1) * batch`` rollouts are admitted; dropped and cancelled rollouts are not
    counted. Samples from :meth:`select` never lag behind by more than ``bound`` versions. Short rollouts end before
    long rollouts that started earlier, so a long rollout may become too old. ``policy`` determines what happens:

    - ``drop``: a sample that is too old is dropped, and another rollout may start. Long samples are dropped more often.
    - ``wait``: no sample is dropped. :meth:`select` returns nothing while its result would make a rollout that still
      runs, or a rollout after it, too old.
    - ``reweight``: as ``drop``; in addition, the loss of a sample is multiplied by ``reweight(staleness)`` (default: 1
    /
      (1 + staleness)).
    - ``lr_scale``: as ``drop``; in addition, the learning rate is divided by the mean staleness of the step if that is
      above 1.

    With a bound above 0, use a loss that corrects for the older weights (decoupled PPO, importance weights). It needs
    the generator's log-probabilities, which can be stored in ``sample``.
    """

    def __init__(
        self,
        bound: int,
        batch: int,
        policy: StalenessPolicy = "drop",
        *,
        reweight: Callable[[int], float] | None = None,
    ) -> None:
        """``batch`` is the number of samples per optimiser step and version. Raises ConfigError for invalid values."""
        if bound < 0 or batch < 1:
            raise ConfigError(f"a gate needs a bound of at least 0 and a batch of at least 1, got {bound} and {batch}")
        if policy not in get_args(StalenessPolicy):
            raise ConfigError(f"policy must be one of {', '.join(get_args(StalenessPolicy))}, got {policy!r}")
        if reweight is not None and policy != "reweight":
            raise ConfigError(f"a reweight function needs policy='reweight', got policy={policy!r}")
        self.bound = bound
        self.batch = batch
        self.policy = policy
        self.version = 0
        """Version of the weights that the generator uses now."""
        self._weight = reweight or _inverse
        self._running: dict[int, int] = {}  # ticket -> version when it was admitted, so no token can be older
        self._waiting: list[Finished] = []  # sorted
        self._num_tickets = self._num_consumed = self._num_dropped = self._num_cancelled = self._num_refused = 0
        self._taken = 0  # number of samples selected at this version
        self._staleness: Counter[int] = Counter()
        self._lengths: dict[str, Counter[int]] = {"produced": Counter(), "consumed": Counter()}
        self._tokens = {"produced": 0, "consumed": 0}

    # -- the generator's side --------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of rollouts that may start now."""
        unconsumed = len(self._waiting) + len(self._running)
        room = (self.bound + self.version + 1) * self.batch - self._num_consumed
        if self.policy == "wait":  # an earlier version that was trained on fewer samples leaves no room
            room = min(room, max(0, self.batch - self._taken) + self.bound * self.batch)
        return max(0, room - unconsumed)

    @property
    def running(self) -> Mapping[int, int]:
        """Ticket -> version at admission, for the rollouts that have not ended."""
        return self._running

    def admit(self, n: int = 1) -> range:
        """Admit ``n`` rollouts. Returns their tickets, or an empty (false) range if fewer than ``n`` may start now."""
        if n < 1:
            raise ConfigError(f"admit takes a number of at least 1, got {n}")
        if n > self.capacity:
            self._num_refused += 1
            return range(0)
        tickets = range(self._num_tickets, self._num_tickets + n)
        self._num_tickets += n
        self._running.update(dict.fromkeys(tickets, self.version))
        return tickets

    def tag(self, ticket: int, version: int, sample: Any = None, *, length: int = 0) -> bool:
        """Report that a rollout has ended. ``version`` is the version of the oldest weights that it used.

        Returns False if the rollout is too old and was dropped. Raises ConfigError for an unknown ticket, and for an
        impossible version.
        """
        started = self._started(ticket)
        oldest = started if self.policy == "wait" else 0
        if not oldest <= version <= self.version:
            raise ConfigError(
                f"rollout {ticket} is tagged with version {version}, but it was admitted at version {started} and the "
                f"weights are at {self.version}; publish a version when the generator has it, not before"
            )
        del self._running[ticket]
        self._count("produced", length)
        is_fresh = self.version - version <= self.bound
        if is_fresh:
            bisect.insort(self._waiting, Finished(version, ticket, length, sample))
        else:
            self._num_dropped += 1
        return is_fresh

    def cancel(self, ticket: int) -> None:
        """Cancel a running rollout, so that another rollout may start. Raises ConfigError for an unknown ticket."""
        self._started(ticket)
        del self._running[ticket]
        self._num_cancelled += 1

    # -- the trainer's side ----------------------------------------------------------------------------------------

    def select(self, k: int | None = None) -> Selection:
        """Remove and return the ``k`` samples with the oldest weights (default: ``batch``).

        The selection is empty if fewer than ``k`` samples wait, or if the policy ``wait`` requires waiting.
        """
        k = self.batch if k is None else k
        if k < 1:
            raise ConfigError(f"select takes a number of at least 1, got {k}")
        if len(self._waiting) < k or (self.policy == "wait" and not self._can_keep_up(self._waiting[k:], k)):
            return Selection()
        rollouts = tuple(self._waiting[:k])
        self._waiting = self._waiting[k:]
        staleness = tuple(self.version - rollout.version for rollout in rollouts)
        self._consume(rollouts, staleness, 1)
        weights = tuple(map(self._weight, staleness)) if self.policy == "reweight" else (1.0,) * k
        scale = 1.0 / max(1.0, sum(staleness) / k) if self.policy == "lr_scale" else 1.0
        return Selection(rollouts, staleness, weights, scale)

    def put_back(self, selection: Selection) -> None:
        """Return samples that :meth:`select` gave at this version, if they were not trained on. They wait again."""
        self._consume(selection.rollouts, selection.staleness, -1)
        self._staleness = +self._staleness
        self._lengths["consumed"] = +self._lengths["consumed"]
        self._waiting = sorted([*self._waiting, *selection.rollouts])

    def publish(self, version: int | None = None) -> None:
        """Report that the generator has the next version of the weights. ``version``, if given, must be that number.

        With the policy ``wait``, raises ConfigError if a sample would become too old: each version must be trained on
        ``batch`` samples.
        """
        if version not in (None, self.version + 1):
            raise ConfigError(f"the version after {self.version} is {self.version + 1}, got {version}")
        if self.policy == "wait" and not self._can_keep_up(self._waiting, 0, at=self.version + 1):
            raise ConfigError(
                f"version {self.version + 1} would let samples become older than {self.bound} versions, and policy "
                f"'wait' drops none; select {self.batch} samples per version first ({self._taken} were)"
            )
        self.version += 1
        self._taken = 0
        too_old = bisect.bisect_left(self._waiting, self.version - self.bound, key=lambda each: each.version)
        self._num_dropped += too_old
        del self._waiting[:too_old]

    def stats(self) -> GateStats:
        """Counts of rollouts since the gate was created."""
        produced, consumed = (sum(self._lengths[kind].values()) for kind in ("produced", "consumed"))
        means = [self._tokens[k] / n if n else 0.0 for k, n in (("produced", produced), ("consumed", consumed))]
        return GateStats(
            version=self.version,
            running=len(self._running),
            waiting=len(self._waiting),
            produced=produced,
            consumed=consumed,
            dropped=self._num_dropped,
            cancelled=self._num_cancelled,
            refused=self._num_refused,
            staleness=dict(sorted(self._staleness.items())),
            staleness_p50=_median(self._staleness),
            staleness_max=max(self._staleness, default=0),
            lengths_produced=dict(sorted(self._lengths["produced"].items())),
            lengths_consumed=dict(sorted(self._lengths["consumed"].items())),
            length_bias=means[1] / means[0] - 1.0 if all(means) else 0.0,
        )

    # -- resume ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State as plain data. It includes the settings, to check them later. The callers' samples are stored
        unchanged."""
        return {
            "settings": [self.bound, self.batch, self.policy],
            "version": self.version,
            "taken": self._taken,
            "running": [[ticket, version] for ticket, version in self._running.items()],
            "waiting": [[each.version, each.ticket, each.length, each.sample] for each in self._waiting],
            "counts": [
                self._num_tickets,
                self._num_consumed,
                self._num_dropped,
                self._num_cancelled,
                self._num_refused,
            ],
            "staleness": [[key, count] for key, count in self._staleness.items()],
            "lengths": {kind: [[key, n] for key, n in counts.items()] for kind, counts in self._lengths.items()},
            "tokens": dict(self._tokens),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`.

        Rollouts that were running must be started again with their tickets, or cancelled. Raises ConfigError if the
        settings differ.
        """
        settings = [self.bound, self.batch, self.policy]
        if list(state["settings"]) != settings:
            raise ConfigError(f"the state is of a gate with {state['settings']}, but this one has {settings}")
        self.version = state["version"]
        self._taken = state["taken"]
        self._running = dict(state["running"])
        self._waiting = [Finished(*each) for each in state["waiting"]]
        self._num_tickets, self._num_consumed, self._num_dropped, self._num_cancelled, self._num_refused = state[
            "counts"
        ]
        self._staleness = Counter(dict(state["staleness"]))
        self._lengths = {kind: Counter(dict(pairs)) for kind, pairs in state["lengths"].items()}
        self._tokens = dict(state["tokens"])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _can_keep_up(self, remaining: Sequence[Finished], selected: int, *, at: int | None = None) -> bool:
        """Whether all ``remaining`` and all running rollouts can be trained on in time, with ``batch`` per version.

        A rollout of version v must be selected at version v + bound at the latest. If any order meets all these limits,
        then selecting the oldest first does (Jackson's rule). So it is enough to count the rollouts that are due by
        each version. ``selected`` rollouts are selected now, in addition. ``at`` is the first version to check
        (default: the present version).
        """
        now = self.version if at is None else at
        room = self.batch if at is not None else max(0, self.batch - self._taken - selected)
        due = Counter(each.version + self.bound for each in remaining)
        due.update(version + self.bound for version in self._running.values())
        total = 0
        for version in sorted(due):
            total += due[version]
            if total > room + (version - now) * self.batch or version < now:
                return False
        return True

    def _started(self, ticket: int) -> int:
        if ticket not in self._running:
            raise ConfigError(
                f"no rollout with ticket {ticket} is running; it ended, was cancelled or was never admitted"
            )
        return self._running[ticket]

    def _consume(self, rollouts: Sequence[Finished], staleness: Sequence[int], sign: int) -> None:
        self._num_consumed += sign * len(rollouts)
        self._taken += sign * len(rollouts)
        for rollout, lag in zip(rollouts, staleness, strict=True):
            self._staleness[lag] += sign
            self._count("consumed", rollout.length, sign)

    def _count(self, kind: str, length: int, sign: int = 1) -> None:
        self._lengths[kind][1 << max(0, length - 1).bit_length()] += sign
        self._tokens[kind] += sign * length


def _inverse(staleness: int) -> float:
    return 1.0 / (1 + staleness)


def _median(counts: Counter[int]) -> int:
    """Lower median of a collection of values. ``counts`` maps each value to its number of occurrences."""
    half = (counts.total() + 1) // 2
    for value in sorted(counts):
        half -= counts[value]
        if half <= 0:
            return value
    return 0
