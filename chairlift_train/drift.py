"""Mixes training data from several sources, detects when a source changes (drift), and replays old data.

Replaying a small fraction of old data prevents a model from forgetting it (Rolnick et al., 2019; Ibrahim et al., 2024).
A change detector on losses or lengths determines which data is old. Needs NumPy.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from chairlift.errors import ConfigError
from chairlift_train.detectors import Adwin, Detector, PageHinkley
from chairlift_train.sequences import SourceCursor

__all__ = ["DriftEvent", "DriftSampler", "Reservoir"]

_DETECTORS: dict[str, Callable[[], Detector]] = {"adwin": Adwin, "page_hinkley": PageHinkley}
_REMEMBERED = 65_536
"""Number of most recently returned items that :meth:`DriftSampler.observe` accepts by their item number."""


@dataclasses.dataclass(frozen=True, slots=True)
class DriftEvent:
    """A detected or declared change of a source."""

    source: str
    old: str
    """Name under which the source's items from before the change are replayed: ``"<source>@<n>"``, n counting from
    0."""
    drawn: int
    """Number of items that the sampler had returned when the change was detected."""
    before: float
    """Mean of the signal (loss, or logarithm of the length) before the change. nan if :meth:`DriftSampler.shift`
    declared the change."""
    after: float
    """Mean of the signal after the change, or nan."""


class Reservoir:
    """A uniform sample of the items offered to it: algorithm R (Vitter, 1985)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.seen = 0
        self.items: list[tuple[int, Mapping[str, Any]]] = []
        """Items of the sample: (number of the item in its source, item)."""

    def offer(self, number: int, item: Mapping[str, Any], rng: np.random.Generator) -> None:
        self.seen += 1
        if len(self.items) < self.capacity:
            self.items.append((number, item))
        elif (index := int(rng.random() * self.seen)) < self.capacity:
            self.items[index] = (number, item)

    def shrink(self, capacity: int, rng: np.random.Generator) -> None:
        """Reduce the sample to ``capacity`` items, chosen at random. It remains a uniform sample of all offered
        items."""
        self.capacity = capacity
        while len(self.items) > capacity:
            index = int(rng.random() * len(self.items))
            self.items[index] = self.items[-1]
            self.items.pop()

    def forget_since(self, number: int) -> None:
        """Drop the items with this number or a larger number."""
        self.items = [entry for entry in self.items if entry[0] < number]

    def state_dict(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "seen": self.seen, "items": [(at, dict(item)) for at, item in self.items]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Reservoir:
        reservoir = cls(state["capacity"])
        reservoir.seen = state["seen"]
        reservoir.items = [(at, item) for at, item in state["items"]]
        return reservoir


@dataclasses.dataclass(slots=True)
class _Source:
    cursor: SourceCursor
    share: float
    """Fraction of all items that come from this source in the declared mix."""
    detector: Detector
    current: Reservoir
    live: bool = True
    drawn: int = 0
    """Number of items drawn from the source, without replays."""
    start: int = 0
    """Value of ``drawn`` at the last change of the source."""
    seen_until: int = 0
    """Value of ``drawn`` just after the newest item with a known loss."""
    observations: int = 0
    """Number of observed losses since the last change of the source."""
    changes: int = 0
    reward: float = 0.0
    """Reward of this source for ``mixing="bandit"``: running mean of the loss divided by the probability of the source.
    """


_NUMBERS = ("live", "drawn", "start", "seen_until", "observations", "changes", "reward")


class DriftSampler:
    """Iterator over items of several named sources in a declared mix. After a change of a source, it also replays items
    from before the change.

    An item is a mapping for a packer: its own fields, ``source`` and ``weight`` (1, or the importance weight).
    ``source`` is the name of the source, or for example ``"name@0"`` for a replayed item from before the first change
    of ``name``. A source that has ended is left out of the mix. The sampler ends when all sources have ended. The
    sources are read once: a second loop continues where the first stopped.

    Report the losses with :meth:`observe`. The items depend only on the sources, the settings, the seed and the
    reported losses.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        *,
        detector: Literal["adwin", "page_hinkley"] | Callable[[], Detector] = "adwin",
        signal: Literal["loss", "length"] = "loss",
        replay: float = 0.1,
        reservoir: int = 10_000,
        importance: bool = False,
        mixing: Literal["declared", "bandit"] = "declared",
        smoothing: float = 0.05,
        seed: int = 0,
    ) -> None:
        """Raises ConfigError for settings out of range.

        - ``weights``: the declared mix: relative number of items of each source (default: equal).
        - ``detector``: name of a detector, or a function that returns a new detector; each source has its own.
        - ``signal``: values that the detector gets: losses, or logarithms of lengths. Only a rising loss is a change.
        - ``replay``: fraction of replayed items after the first change.
        - ``reservoir``: total number of items that are stored for replays.
        - ``importance``: whether to weight items so that the expected sum of weights of each source is in proportion to
          the declared mix; use it with ``StepLoss("weights")``.
        - ``mixing``: ``declared``, or ``bandit``, which prefers sources with a high loss (ODM: Albalak et al., 2023).
        - ``smoothing``: weight of the newest loss in the running mean of losses.
        """
        weights = dict.fromkeys(sources, 1.0) if weights is None else weights
        if not sources or set(weights) != set(sources) or not all(weight > 0 for weight in weights.values()):
            raise ConfigError(
                f"weights must give every source a number above 0: sources {sorted(sources)}, weights {dict(weights)}"
            )
        if any("@" in name for name in sources):
            raise ConfigError(f"names of sources must not contain '@', which marks replayed items: {sorted(sources)}")
        make = _DETECTORS.get(detector) if isinstance(detector, str) else detector
        if make is None or signal not in ("loss", "length") or mixing not in ("declared", "bandit"):
            raise ConfigError(
                'detector must be "adwin", "page_hinkley" or a callable, signal "loss" or "length", mixing "declared" '
                f'or "bandit"; got {detector!r}, {signal!r}, {mixing!r}'
            )
        if not 0 <= replay < 1 or reservoir < len(sources) or not 0 < smoothing <= 1:
            raise ConfigError(
                f"DriftSampler needs 0 <= replay < 1, a reservoir of at least one item for each of {len(sources)} "
                f"sources and 0 < smoothing <= 1, got {replay}, {reservoir}, {smoothing}"
            )
        total = sum(weights.values())
        self._settings = {
            **{"detector": type(make()).__name__, "signal": signal, "replay": replay, "reservoir": reservoir},
            **{"importance": importance, "mixing": mixing, "smoothing": smoothing, "seed": seed},
            "weights": {name: weights[name] / total for name in sources},
        }
        self._signal = signal
        self._replay = replay
        self._capacity = reservoir
        self._importance = importance
        self._mixing = mixing
        self._smoothing = smoothing
        self._make_detector = make
        self._sources = {
            name: _Source(SourceCursor(source), weights[name] / total, make(), Reservoir(reservoir // len(sources)))
            for name, source in sources.items()
        }
        self._old: dict[str, Reservoir] = {}
        self._names = list(sources)
        self._losses: dict[str, float] = {}
        self._bits = np.random.PCG64(seed)
        self._rng = np.random.Generator(self._bits)
        self._drawn = self._replayed = self._observed = 0
        self._recent = np.zeros((_REMEMBERED, 2), np.int64)
        """Ring buffer of the last items: row ``item % _REMEMBERED`` has (index of the source in ``_names``, number of
        the item in its source)."""
        self.events: list[DriftEvent] = []
        """All changes of sources so far, detected or declared."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next item. Raises ConfigError for an invalid item; the next call continues after it."""
        while mix := self._mix():
            if self._old and self._rng.random() < self._replay:
                self._replayed += 1
                name = list(self._old)[int(self._rng.random() * len(self._old))]
                items = self._old[name].items
                return self._give(name, *items[int(self._rng.random() * len(items))], mix)
            name = self._pick(mix)
            source = self._sources[name]
            try:
                sample = source.cursor.read()
            except StopIteration:
                source.live = False
                continue
            except BaseException:  # an invalid item or an interruption: undo the draw, so that the next call repeats it
                self._bits.advance(2**128 - (2 if self._old else 1))
                raise
            fields: dict[str, Any] = {**(sample.meta or {}), "input_ids": sample.tokens}
            if sample.weights is not None:
                fields["loss_weight"] = sample.weights
            number = source.drawn
            source.drawn += 1
            source.current.offer(number, fields, self._rng)
            item = self._give(name, number, fields, mix)
            if self._signal == "length":
                self._detect(name, math.log(len(sample.tokens)), source.drawn)
            return item
        raise StopIteration

    def _mix(self) -> dict[str, float]:
        """Name of a source that has not ended -> probability with which the next item is drawn from it."""
        live = {name: source for name, source in self._sources.items() if source.live}
        shares = {name: source.share for name, source in live.items()}
        explore = 0.0
        if self._mixing == "bandit" and len(live) > 1:
            arms = len(live)
            explore = min(1 / arms, math.sqrt(math.log(arms) / (arms * max(1, self._observed))))
            best = max(source.reward for source in live.values())
            shares = {name: shares[name] * math.exp(explore * (live[name].reward - best)) for name in live}
        total = sum(shares.values())
        return {name: (1 - len(live) * explore) * share / total + explore for name, share in shares.items()}

    def _pick(self, mix: Mapping[str, float]) -> str:
        edges = list(itertools.accumulate(mix.values()))
        index = bisect.bisect_right(edges, self._rng.random() * edges[-1])
        return list(mix)[min(index, len(mix) - 1)]

    def _give(self, name: str, number: int, fields: Mapping[str, Any], mix: Mapping[str, float]) -> dict[str, Any]:
        self._recent[self._drawn % _REMEMBERED] = self._names.index(name), number
        self._drawn += 1
        weight = self._importance_weight(name.partition("@")[0], mix) if self._importance else 1.0
        return {**fields, "source": name, "weight": weight}

    def _importance_weight(self, source: str, mix: Mapping[str, float]) -> float:
        """Importance weight of an item: the declared fraction of its source divided by the probability of the source. A
        replayed item counts for its original source."""
        owners = [old.partition("@")[0] for old in self._old]
        present = set(mix) | set(owners)
        declared = self._sources[source].share / sum(self._sources[name].share for name in present)
        replay = self._replay if owners else 0.0
        replayed = owners.count(source) / len(owners) if owners else 0.0
        return declared / ((1 - replay) * mix.get(source, 0.0) + replay * replayed)

    def observe(
        self,
        of: str | int | Sequence[str | int],
        loss: float | Sequence[float],
        targets: int | Sequence[int] | None = None,
    ) -> None:
        """Report losses of training: the mean loss per token of sources or of single items.

        ``of`` has one or more names (the ``source`` of items) or numbers of items (0 for the first returned item, as in
        the ``ids`` of packs), and ``loss`` has one loss for each. The losses of one call are averaged per source, and
        each average is one value for the detector, so call this method once per optimiser step. ``targets`` are the
        numbers of target tokens of each loss, which make the average a mean over tokens. Without them, all losses have
        equal weight, so that the tokens of short items count more.

        Raises ConfigError for unknown names, for items that were not returned or too long ago, for losses that are not
        finite, and for numbers of targets below 1.
        """
        keys = [of] if isinstance(of, (str, int)) else _listed(of)
        values = [float(value) for value in _listed(loss)]
        if len(keys) != len(values) or not all(map(math.isfinite, values)):
            raise ConfigError(f"observe needs one finite loss for each name or item: {len(keys)} for {values[:8]}")
        counts = [1] * len(keys) if targets is None else [int(count) for count in _listed(targets)]
        if len(counts) != len(keys) or min(counts, default=1) < 1:
            raise ConfigError(f"observe needs a number of targets, at least 1, for each loss, got {counts[:8]}")
        groups: dict[str, list[tuple[float, int]]] = {}
        until: dict[str, int] = {}
        for key, value, count in zip(keys, values, counts, strict=True):
            name, number = self._look_up(key)
            groups.setdefault(name, []).append((value, count))
            until[name] = max(until.get(name, 0), number + 1)
        for name, members in groups.items():
            mean = sum(value * count for value, count in members) / sum(count for _, count in members)
            self._losses[name] = self._losses.get(name, mean) + self._smoothing * (mean - self._losses.get(name, mean))
            if name in self._sources:
                self._observed += 1
                source = self._sources[name]
                if self._mixing == "bandit" and source.live:
                    source.reward += self._smoothing * (mean / self._mix()[name] - source.reward)
                if self._signal == "loss":
                    self._detect(name, mean, until[name])

    @property
    def oldest(self) -> int:
        """Number of the oldest item that :meth:`observe` accepts."""
        return max(0, self._drawn - _REMEMBERED)

    def _look_up(self, key: str | int) -> tuple[str, int]:
        """Find the source of ``key``. Returns (name of a source or of its replayed items, number of the item in that
        source)."""
        if isinstance(key, str):
            if key not in self._names:
                raise ConfigError(f"there is no source {key!r}; there are {self._names}")
            return key, self._sources[key].drawn - 1 if key in self._sources else 0
        if not self.oldest <= key < self._drawn:
            raise ConfigError(
                f"item {key} is not among the last {_REMEMBERED} of {self._drawn} items; report the loss by source"
            )
        index, number = self._recent[key % _REMEMBERED].tolist()
        return self._names[index], number

    def _detect(self, name: str, value: float, seen_until: int) -> None:
        source = self._sources[name]
        source.seen_until = max(source.seen_until, seen_until)
        source.observations += 1
        detector = source.detector
        if detector.update(value) and (self._signal == "length" or detector.after > detector.before):
            items = math.ceil(detector.recent * max(1.0, (source.seen_until - source.start) / source.observations))
            self._change(name, max(source.start, source.seen_until - items), detector.before, detector.after)
            source.observations = detector.recent

    def shift(self, name: str) -> None:
        """Declare that source ``name`` has changed now. Raises ConfigError for an unknown name."""
        if name not in self._sources:
            raise ConfigError(f"there is no source {name!r}; there are {list(self._sources)}")
        source = self._sources[name]
        self._change(name, source.drawn, math.nan, math.nan)
        source.detector = self._make_detector()
        source.observations = 0
        source.seen_until = source.drawn

    def _change(self, name: str, since: int, before: float, after: float) -> None:
        """Treat the items of source ``name`` before item ``since`` as old data, which is replayed from now on."""
        source = self._sources[name]
        old = f"{name}@{source.changes}"
        source.current.forget_since(since)
        if source.current.items:
            self._old[old] = source.current
            self._names.append(old)
        source.changes += 1
        source.start = since
        capacity = max(1, self._capacity // (len(self._old) + len(self._sources)))
        source.current = Reservoir(capacity)
        for reservoir in (*self._old.values(), *(other.current for other in self._sources.values())):
            reservoir.shrink(capacity, self._rng)
        self.events.append(DriftEvent(name, old, self._drawn, before, after))

    def stats(self) -> dict[str, Any]:
        """Counts ``drawn`` and ``replayed``, and values per source and per set of old items.

        ``sources``: probability (``share``), number of items drawn, number of changes, and running mean loss (None if
        unknown). ``old``: number of stored items (``held``) and running mean loss.
        """
        mix = self._mix()
        return {
            "drawn": self._drawn,
            "replayed": self._replayed,
            "sources": {
                name: {
                    "share": mix.get(name, 0.0),
                    "drawn": source.drawn,
                    "changes": source.changes,
                    "loss": self._losses.get(name),
                }
                for name, source in self._sources.items()
            },
            "old": {
                name: {"held": len(reservoir.items), "loss": self._losses.get(name)}
                for name, reservoir in self._old.items()
            },
        }

    def state_dict(self) -> dict[str, Any]:
        """State after the last returned item: plain data, NumPy arrays, and the items that are stored for replays.

        A resumed sampler returns identical items.
        """
        return {
            "settings": self._settings,
            "rng": self._bits.state,
            "sources": {
                name: {
                    "cursor": source.cursor.state_dict(),
                    "detector": source.detector.state_dict(),
                    "current": source.current.state_dict(),
                    **{field: getattr(source, field) for field in _NUMBERS},
                }
                for name, source in self._sources.items()
            },
            "old": {name: reservoir.state_dict() for name, reservoir in self._old.items()},
            "names": list(self._names),
            "losses": dict(self._losses),
            "counts": [self._drawn, self._replayed, self._observed],
            "recent": self._recent[: self._drawn].copy(),
            "events": [dataclasses.asdict(event) for event in self.events],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`, with the same sources. Raises ConfigError if settings differ."""
        changed = [key for key, value in self._settings.items() if state["settings"].get(key) != value]
        if changed:
            raise ConfigError(
                f"the state was taken with other settings: { ({key: state['settings'].get(key) for key in changed}) }, "
                f"this sampler has { ({key: self._settings[key] for key in changed}) }; make it with the same"
            )
        self._bits.state = state["rng"]
        for name, source in self._sources.items():
            saved = state["sources"][name]
            source.cursor.load_state_dict(saved["cursor"])
            source.detector.load_state_dict(saved["detector"])
            source.current = Reservoir.from_state(saved["current"])
            for field in _NUMBERS:
                setattr(source, field, saved[field])
        self._old = {name: Reservoir.from_state(saved) for name, saved in state["old"].items()}
        self._names = list(state["names"])
        self._losses = dict(state["losses"])
        self._drawn, self._replayed, self._observed = state["counts"]
        self._recent[: len(state["recent"])] = state["recent"]
        self.events = [DriftEvent(**event) for event in state["events"]]


def _listed(values: Any) -> list[Any]:
    listed = values.tolist() if hasattr(values, "tolist") else values
    return list(listed) if isinstance(listed, Sequence) else [listed]
