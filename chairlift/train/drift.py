"""Mixing of sources, detection of drift, and replay of old data.

Replaying a small share of old data keeps a model from forgetting it (Rolnick et al., 2019; Ibrahim et al., 2024). A
change detector on losses or lengths says when data has become old. Python and NumPy.
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
from chairlift.train.detectors import Adwin, Detector, PageHinkley
from chairlift.train.sequences import SourceCursor

__all__ = ["DriftEvent", "DriftSampler", "Reservoir"]

_DETECTORS: dict[str, Callable[[], Detector]] = {"adwin": Adwin, "page_hinkley": PageHinkley}
_REMEMBERED = 65_536
"""Number of newest items that can be observed by their number."""


@dataclasses.dataclass(frozen=True, slots=True)
class DriftEvent:
    """A source has changed."""

    source: str
    old: str
    """Name under which old items of the source are replayed: ``"<source>@<n>"`` after its n-th change."""
    drawn: int
    """Number of items that the sampler had given when the change was noticed."""
    before: float
    """Mean of the signal (loss, or logarithm of the length) before the change; nan when declared by hand."""
    after: float
    """Mean of the signal since."""


class Reservoir:
    """A uniform sample of the items offered to it: algorithm R (Vitter, 1985)."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.seen = capacity, 0
        self.items: list[tuple[int, Mapping[str, Any]]] = []
        """(number of the offer, item)."""

    def offer(self, number: int, item: Mapping[str, Any], rng: np.random.Generator) -> None:
        self.seen += 1
        if len(self.items) < self.capacity:
            self.items.append((number, item))
        elif (place := int(rng.random() * self.seen)) < self.capacity:
            self.items[place] = (number, item)

    def shrink(self, capacity: int, rng: np.random.Generator) -> None:
        """Keep a uniform sample of the items here. It is a uniform sample of all offered items, too."""
        self.capacity = capacity
        while len(self.items) > capacity:
            place = int(rng.random() * len(self.items))
            self.items[place] = self.items[-1]
            self.items.pop()

    def forget_since(self, number: int) -> None:
        """Drop items that were offered from ``number`` on."""
        self.items = [entry for entry in self.items if entry[0] < number]

    def state_dict(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "seen": self.seen, "items": [(at, dict(item)) for at, item in self.items]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Reservoir:
        made = cls(state["capacity"])
        made.seen, made.items = state["seen"], [(at, item) for at, item in state["items"]]
        return made


@dataclasses.dataclass(slots=True)
class _Source:
    cursor: SourceCursor
    share: float
    """Share in the declared mix."""
    detector: Detector
    current: Reservoir
    live: bool = True
    drawn: int = 0
    """Items drawn, replays not included."""
    start: int = 0
    """Value of ``drawn`` when the source last changed."""
    seen_until: int = 0
    """Value of ``drawn`` just after the newest item with a known loss."""
    observations: int = 0
    """Number of observed losses since the source last changed."""
    changes: int = 0
    reward: float = 0.0
    """Reward for the bandit: running mean of loss divided by probability."""


_NUMBERS = ("live", "drawn", "start", "seen_until", "observations", "changes", "reward")


class DriftSampler:
    """Items of several named sources in a declared mix; once a source has drifted, also items from before.

    Items are mappings ready for a packer: their fields, ``source`` (the name, or ``"name@0"`` for a replay of what
    ``name`` was before its first change) and ``weight`` (1, or the importance weight). A source that ends leaves the
    mix; the sampler ends with its last source. It is one pass: iterating again goes on.

    Tell it the losses with :meth:`observe`. What comes next depends on sources, settings, seed and the losses told
    alone.
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

        - ``weights``: the declared mix, shares of items (default: equal).
        - ``detector``: its name, or a function that makes one for each source.
        - ``signal``: what it looks at. A loss counts as drift only when it rises.
        - ``replay``: share of replays, once something has drifted; ``reservoir``: items kept for that, in all.
        - ``importance``: weight items so that each source's expected share of the summed weights is its declared one;
          use ``StepLoss("weights")``.
        - ``mixing``: ``bandit`` favours sources with a high loss (ODM: Albalak et al., 2023).
        - ``smoothing``: share of the newest loss in its running mean.
        """
        weights = dict.fromkeys(sources, 1.0) if weights is None else weights
        if not sources or set(weights) != set(sources) or not all(weight > 0 for weight in weights.values()):
            raise ConfigError(
                f"weights must give every source a number above 0: sources {sorted(sources)}, weights {dict(weights)}"
            )
        if any("@" in name for name in sources):
            raise ConfigError(f"names of sources must not contain '@', which marks old items: {sorted(sources)}")
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
        self._signal, self._replay, self._capacity = signal, replay, reservoir
        self._importance, self._mixing, self._smoothing = importance, mixing, smoothing
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
        """Ring of the last items: row ``item % _REMEMBERED`` has the source's index in ``_names`` and the item's
        number in that source."""
        self.events: list[DriftEvent] = []
        """Changes noticed so far."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next item. Raises ConfigError for one that cannot be used, once; the next call goes on after it."""
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
            except BaseException:  # a bad item, or an interruption: the choice is made again, and is the same
                self._bits.advance(2**128 - (2 if self._old else 1))
                raise
            fields: dict[str, Any] = {**(sample.meta or {}), "input_ids": sample.tokens}
            if sample.weights is not None:
                fields["loss_weight"] = sample.weights
            number = source.drawn
            source.drawn += 1
            source.current.offer(number, fields, self._rng)
            given = self._give(name, number, fields, mix)
            if self._signal == "length":
                self._detect(name, math.log(len(sample.tokens)), source.drawn)
            return given
        raise StopIteration

    def _mix(self) -> dict[str, float]:
        """Probability of each source that has not ended."""
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
        place = bisect.bisect_right(edges, self._rng.random() * edges[-1])
        return list(mix)[min(place, len(mix) - 1)]

    def _give(self, name: str, number: int, fields: Mapping[str, Any], mix: Mapping[str, float]) -> dict[str, Any]:
        self._recent[self._drawn % _REMEMBERED] = self._names.index(name), number
        self._drawn += 1
        weight = self._importance_weight(name.partition("@")[0], mix) if self._importance else 1.0
        return {**fields, "source": name, "weight": weight}

    def _importance_weight(self, source: str, mix: Mapping[str, float]) -> float:
        """Declared share divided by probability. Replays count for the source that they come from."""
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
        """Tell the mean loss per token of what was learnt from: per source, or per item.

        ``of``: ``source`` fields, or numbers of items (0 for the first given; a packer's ``ids``); one or many, with as
        many losses. Losses of one call are averaged per source, and each average is one value for the detector: call it
        once per optimiser step. ``targets`` are the numbers of tokens behind each loss: the average is then the mean
        over tokens. Without it every loss counts the same, so tokens of short items count more. Raises ConfigError for
        unknown names, items not given or given too long ago, losses that are not finite, and numbers below 1.
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
        """The first item that can be observed by number."""
        return max(0, self._drawn - _REMEMBERED)

    def _look_up(self, key: str | int) -> tuple[str, int]:
        """Name of a source or of its old items, and which item of that source."""
        if isinstance(key, str):
            if key not in self._names:
                raise ConfigError(f"there is no source {key!r}; there are {self._names}")
            return key, self._sources[key].drawn - 1 if key in self._sources else 0
        if not self.oldest <= key < self._drawn:
            raise ConfigError(
                f"item {key} is not among the last {_REMEMBERED} of {self._drawn} given; observe by source instead"
            )
        place, number = self._recent[key % _REMEMBERED].tolist()
        return self._names[place], number

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
        """Declare by hand that ``name`` has changed after the items given so far. Raises ConfigError if unknown."""
        if name not in self._sources:
            raise ConfigError(f"there is no source {name!r}; there are {list(self._sources)}")
        source = self._sources[name]
        self._change(name, source.drawn, math.nan, math.nan)
        source.detector, source.observations, source.seen_until = self._make_detector(), 0, source.drawn

    def _change(self, name: str, since: int, before: float, after: float) -> None:
        """Make the items of ``name`` before item ``since`` old data from now on."""
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
        """``drawn``, ``replayed``; per source its share, items drawn, changes and running mean loss (None if unknown);
        per old stretch the items held and the running mean loss."""
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
        """The state after the item given last, bit for bit: plain data, NumPy arrays, and the items held for replay."""
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
        """Go on where ``state`` was taken, over the same sources. Raises ConfigError when the settings differ."""
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
        self._names, self._losses = list(state["names"]), dict(state["losses"])
        self._drawn, self._replayed, self._observed = state["counts"]
        self._recent[: len(state["recent"])] = state["recent"]
        self.events = [DriftEvent(**event) for event in state["events"]]


def _listed(values: Any) -> list[Any]:
    listed = values.tolist() if hasattr(values, "tolist") else values
    return list(listed) if isinstance(listed, Sequence) else [listed]
