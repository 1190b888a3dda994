"""How far samples may lag behind the weights they train: a gate between a generator and a trainer.

The capacity rule is AReaL's (Fu et al., 2025), the dampened rate that of Zhang et al. (2016). Standard library only;
results depend on the order of the calls alone.
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
    """A rollout that has ended. Sorts by its oldest weights, then by admission."""

    version: int
    """Version of the oldest weights that computed one of its tokens."""
    ticket: int
    length: int = dataclasses.field(default=0, compare=False)
    """Tokens."""
    sample: Any = dataclasses.field(default=None, compare=False)
    """Whatever the caller keeps of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Samples of one optimiser step. False if there are not enough yet."""

    rollouts: tuple[Finished, ...] = ()
    staleness: tuple[int, ...] = ()
    """[N] staleness of each sample in versions, at most the gate's bound."""
    weights: tuple[float, ...] = ()
    """[N] factor of each sample's ``loss_weight``. It is 1 except with the policy ``reweight``."""
    lr_scale: float = 1.0
    """Factor of the learning rate. It is 1 except with the policy ``lr_scale``."""

    def __bool__(self) -> bool:
        return bool(self.rollouts)

    @property
    def samples(self) -> list[Any]:
        """[N]."""
        return [rollout.sample for rollout in self.rollouts]


@dataclasses.dataclass(frozen=True, slots=True)
class GateStats:
    """Counts since the beginning."""

    version: int
    running: int
    """Rollouts admitted that have not ended."""
    waiting: int
    """Rollouts that have ended and were not selected yet."""
    produced: int
    consumed: int
    dropped: int
    """Produced rollouts that became too old to be selected."""
    cancelled: int
    refused: int
    """Number of refused calls of :meth:`StalenessGate.admit`."""
    staleness: dict[int, int]
    """Staleness -> number of consumed samples."""
    staleness_p50: int
    staleness_max: int
    lengths_produced: dict[int, int]
    """Power of two -> number of samples whose length does not exceed it."""
    lengths_consumed: dict[int, int]
    length_bias: float
    """Mean length consumed over mean length produced, less 1: below 0 where long samples are dropped (arXiv
    2605.02043)."""


class StalenessGate:
    """Decides how many rollouts may start, and which ended ones a step trains on.

    At most ``(bound + version + 1) * batch`` rollouts are admitted in all, less those dropped or cancelled. What
    :meth:`select` returns never lags more than ``bound`` versions behind. Short rollouts overtake long ones, so some
    may become too old; ``policy`` says what follows:

    - ``drop``: a sample that is too old is dropped, and another may start. Biased against long samples.
    - ``wait``: nothing is dropped. :meth:`select` holds back where a late rollout, or one behind it, would become too
      old.
    - ``reweight``: as ``drop``, and a sample's loss is weighted by ``reweight(staleness)`` (default 1 / (1 +
      staleness)).
    - ``lr_scale``: as ``drop``, and the learning rate is divided by the step's mean staleness, where that exceeds 1.

    With a bound above 0 each of them wants a loss that corrects for the older policy (decoupled PPO, importance
    weights): keep the generator's log-probabilities in ``sample``.
    """

    def __init__(
        self,
        bound: int,
        batch: int,
        policy: StalenessPolicy = "drop",
        *,
        reweight: Callable[[int], float] | None = None,
    ) -> None:
        """``batch`` is the samples one version is trained on. Raises ConfigError for values out of range."""
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
        """Version of the weights that the generator has now."""
        self._weight = reweight or _inverse
        self._running: dict[int, int] = {}  # ticket -> version at its admission: none of its tokens can be older
        self._waiting: list[Finished] = []  # sorted
        self._num_tickets = self._num_consumed = self._num_dropped = self._num_cancelled = self._num_refused = 0
        self._taken = 0  # of this version
        self._staleness: Counter[int] = Counter()
        self._lengths: dict[str, Counter[int]] = {"produced": Counter(), "consumed": Counter()}
        self._tokens = {"produced": 0, "consumed": 0}

    # -- the generator's side --------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of rollouts that may start now."""
        held = len(self._waiting) + len(self._running)
        room = (self.bound + self.version + 1) * self.batch - self._num_consumed
        if self.policy == "wait":  # what earlier versions were not trained on cannot be made up for
            room = min(room, max(0, self.batch - self._taken) + self.bound * self.batch)
        return max(0, room - held)

    @property
    def running(self) -> Mapping[int, int]:
        """Ticket -> version at its admission, of rollouts that have not ended."""
        return self._running

    def admit(self, n: int = 1) -> range:
        """Tickets of ``n`` rollouts that start now; empty, and so false, when not so many may."""
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
        """A rollout has ended; ``version`` is that of its oldest weights. False where it is too old, and dropped.

        Raises ConfigError for an unknown ticket, and for a version that cannot be.
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
        kept = self.version - version <= self.bound
        if kept:
            bisect.insort(self._waiting, Finished(version, ticket, length, sample))
        else:
            self._num_dropped += 1
        return kept

    def cancel(self, ticket: int) -> None:
        """Cancel a rollout, so that another may start. Raises ConfigError for an unknown ticket."""
        self._started(ticket)
        del self._running[ticket]
        self._num_cancelled += 1

    # -- the trainer's side ----------------------------------------------------------------------------------------

    def select(self, k: int | None = None) -> Selection:
        """Take the ``k`` (``batch``) samples with the oldest weights, or none while there are not so many to take."""
        k = self.batch if k is None else k
        if k < 1:
            raise ConfigError(f"select takes a number of at least 1, got {k}")
        if len(self._waiting) < k or (self.policy == "wait" and not self._can_keep_up(self._waiting[k:], k)):
            return Selection()
        rollouts, self._waiting = tuple(self._waiting[:k]), self._waiting[k:]
        staleness = tuple(self.version - rollout.version for rollout in rollouts)
        self._consume(rollouts, staleness, 1)
        weights = tuple(map(self._weight, staleness)) if self.policy == "reweight" else (1.0,) * k
        scale = 1.0 / max(1.0, sum(staleness) / k) if self.policy == "lr_scale" else 1.0
        return Selection(rollouts, staleness, weights, scale)

    def put_back(self, selection: Selection) -> None:
        """Return the samples of this version's :meth:`select`, which were not trained on. They wait again."""
        self._consume(selection.rollouts, selection.staleness, -1)
        self._staleness, self._lengths["consumed"] = +self._staleness, +self._lengths["consumed"]
        self._waiting = sorted([*self._waiting, *selection.rollouts])

    def publish(self, version: int | None = None) -> None:
        """The generator has the next version of the weights; ``version`` must be this one plus 1.

        With ``wait``, raises ConfigError where a sample would become too old: train on ``batch`` samples per version.
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
        alive = bisect.bisect_left(self._waiting, self.version - self.bound, key=lambda each: each.version)
        self._num_dropped += alive
        del self._waiting[:alive]

    def stats(self) -> GateStats:
        """Counts so far."""
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
        """Everything but the settings, as plain data; the callers' samples are in it as they are."""
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
        """Go on from there. Rollouts that were running are still expected: start them again under their tickets, or
        cancel them. Raises ConfigError for the state of a gate with other settings."""
        settings = [self.bound, self.batch, self.policy]
        if list(state["settings"]) != settings:
            raise ConfigError(f"the state is of a gate with {state['settings']}, but this one has {settings}")
        self.version, self._taken = state["version"], state["taken"]
        self._running = dict(state["running"])
        self._waiting = [Finished(*each) for each in state["waiting"]]
        self._num_tickets, self._num_consumed, self._num_dropped, self._num_cancelled, self._num_refused = state[
            "counts"
        ]
        self._staleness = Counter(dict(state["staleness"]))
        self._lengths = {kind: Counter(dict(pairs)) for kind, pairs in state["lengths"].items()}
        self._tokens = dict(state["tokens"])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _can_keep_up(self, left: Sequence[Finished], taken: int, *, at: int | None = None) -> bool:
        """Whether all rollouts that are ``left`` or still run can be trained on in time, ``batch`` at each version.

        A rollout of version v must be taken at version v + bound at the latest. Taking the oldest first meets all these
        times if any order does (Jackson's rule), so it is enough to count how many are due by each version. ``taken``
        more are taken now; ``at`` is the first version.
        """
        now = self.version if at is None else at
        room = self.batch if at is not None else max(0, self.batch - self._taken - taken)
        due = Counter(each.version + self.bound for each in left)
        due.update(version + self.bound for version in self._running.values())
        total = 0
        for version in sorted(due):
            total += due[version]
            if total > room + (version - now) * self.batch or version < now:
                return False
        return True

    def _started(self, ticket: int) -> int:
        if ticket not in self._running:
            raise ConfigError(f"no rollout with ticket {ticket} is running; it ended, was cancelled or never admitted")
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
    """Lower median."""
    half = (counts.total() + 1) // 2
    for value in sorted(counts):
        half -= counts[value]
        if half <= 0:
            return value
    return 0
