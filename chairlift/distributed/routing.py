"""Routers choose the replica of a fleet that serves a request.

A router sees what the door knows of each replica (:class:`Replica`), and returns one of those that are open. Round
robin and the better of two random choices (Mitzenmacher, 2001) are the baselines. ``least`` looks at work in flight.
``prefix`` prefers the replica that has computed the longest beginning of the prompt, as in SGLang's router and Preble
(Srivatsa et al., 2024). ``forecast`` takes the least predicted time to the first token, which counts the cached
beginning, the prompts in front, and how long steps are.
"""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from chairlift.errors import ConfigError

__all__ = [
    "PREFIX_BLOCK",
    "ROUTINGS",
    "MeasuredPace",
    "Pace",
    "PrefixIndex",
    "Replica",
    "Router",
    "prefix_keys",
    "router_from_name",
]

PREFIX_BLOCK: Final = 128
"""Tokens per key of a prompt."""
_OVER_MEAN: Final = 1.25
_MORE_REQUESTS: Final = 2
"""A replica gets no request for its cache if it has more requests than the mean times the first, plus the second."""
_FADING: Final = 0.99
_LONGEST_STEP: Final = 60.0
"""Seconds. A longer silence is no step: the replica was stopped."""


def prefix_keys(token_ids: Sequence[int], salt: object = "") -> list[int]:
    """One key for each whole block of :data:`PREFIX_BLOCK` tokens. Equal keys mean equal tokens up to there.

    Keys of different prompts may collide; then a router expects a hit that does not come, and no answer changes.
    """
    keys, key = [], hash(salt)
    for begin in range(0, len(token_ids) - PREFIX_BLOCK + 1, PREFIX_BLOCK):
        key = hash((key, tuple(token_ids[begin : begin + PREFIX_BLOCK])))
        keys.append(key)
    return keys


class PrefixIndex:
    """Estimated content of a replica's prefix cache: the keys of prompts sent there, newest last.

    ``capacity`` is the number of keys that fit; the oldest is dropped first, and ends of prompts before beginnings.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()

    def matched(self, keys: Sequence[int]) -> int:
        """Number of leading ``keys`` that are there."""
        count = 0
        for key in keys:
            if key not in self._keys:
                break
            count += 1
        return count

    def add(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """Speed of a replica. All replicas of a fleet are alike."""

    prefill_seconds: Callable[[int], float]
    """Seconds to compute a prompt of this many tokens alone."""
    decode_seconds: Callable[[int], float]
    """Seconds of a step with this many decoding requests."""
    step_tokens: int
    """Most tokens in a step."""


class MeasuredPace:
    """Speed of replicas from the durations of their steps: ``seconds = fixed + per_token * tokens``, by least squares.

    Each step counts 1 % less than the step after it.
    """

    def __init__(self) -> None:
        self._fixed, self._per_token = 0.01, 1e-4  # before the first step; only comparisons of replicas matter then
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """Take a step with this many tokens."""
        if num_tokens <= 0 or not 0 < seconds < _LONGEST_STEP:
            return
        sums = (1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        old = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (
            _FADING * before + new for before, new in zip(old, sums, strict=True)
        )
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        if spread > 1e-3 * max(1.0, x * x):
            self._per_token = min(y / x, max(0.0, (self._xy / self._weight - x * y) / spread))
        else:  # steps alike do not tell the two parts from each other
            self._per_token = min(self._per_token, y / x)
        self._fixed = max(0.0, y - self._per_token * x)

    def pace(self, step_tokens: int) -> Pace:
        """The newest estimate as a pace, which follows later steps."""
        return Pace(
            lambda tokens: -(-tokens // step_tokens) * self._fixed + tokens * self._per_token,
            lambda rows: rows * self._per_token,  # the fixed part is in the prompt's steps
            step_tokens,
        )


class Replica:
    """State of one replica as the door knows it, from the events that have arrived."""

    def __init__(self, index: int, pace: Pace, *, max_num_seqs: int, cache_tokens: int) -> None:
        self.index, self.pace = index, pace
        self.accepting = False
        """Whether it serves: it has started, is alive, and is not being drained."""
        self.unstarted: dict[str, int] = {}
        """Requests sent there that have no token yet -> prompt tokens to compute, without those expected in its
        cache."""
        self.started: set[str] = set()
        """Requests sent there that have a token and have not ended."""
        self.prefixes = PrefixIndex(max(1, cache_tokens // PREFIX_BLOCK))
        self.version = 0
        """Version of its weights."""
        self._unstarted_tokens = 0
        # Late binding: a replica holds no more than two steps of prompts ahead, so that all others wait at the door,
        # in the order of the whole fleet. A few requests above its rows take the place of those that end meanwhile.
        self._most_unstarted = 2 * pace.step_tokens
        self._most_requests = max_num_seqs + max(1, max_num_seqs // 32)

    @property
    def num_requests(self) -> int:
        return len(self.unstarted) + len(self.started)

    @property
    def unstarted_tokens(self) -> int:
        """Prompt tokens in front of a new request."""
        return self._unstarted_tokens

    @property
    def has_room(self) -> bool:
        """Whether a request that waits at the door may be sent now."""
        return self._unstarted_tokens < self._most_unstarted and self.num_requests < self._most_requests

    def opened(self, cache_tokens: int) -> None:
        """Accept requests: a process has started, with an empty prefix cache of this size."""
        self.accepting = True
        self.prefixes = PrefixIndex(max(1, cache_tokens // PREFIX_BLOCK))

    def first_token_seconds(self, uncached: int) -> float:
        """Predicted seconds to the first token of a prompt with ``uncached`` tokens to compute."""
        tokens = self._unstarted_tokens + uncached
        steps = -(-tokens // self.pace.step_tokens)
        return self.pace.prefill_seconds(max(1, tokens)) + steps * self.pace.decode_seconds(len(self.started))

    def sent(self, request_id: str, uncached: int, keys: Sequence[int]) -> None:
        self.unstarted[request_id] = uncached
        self._unstarted_tokens += uncached
        self.prefixes.add(keys)

    def begun(self, request_id: str) -> None:
        """Note the first token of a request."""
        tokens = self.unstarted.pop(request_id, None)
        if tokens is not None:
            self._unstarted_tokens -= tokens
            self.started.add(request_id)

    def ended(self, request_id: str) -> None:
        self._unstarted_tokens -= self.unstarted.pop(request_id, 0)
        self.started.discard(request_id)

    def lost(self) -> tuple[list[str], list[str]]:
        """Forget all requests of a dead replica. Returns those without and with a token, in the order of sending."""
        lost = list(self.unstarted), sorted(self.started)
        self.unstarted.clear()
        self.started.clear()
        self._unstarted_tokens = 0
        self.prefixes.clear()
        return lost


class Router(Protocol):
    """Chooses a replica for the first request in line."""

    late: bool
    """Whether requests wait at the door until a replica has room. Otherwise they are sent on arrival."""

    def choose(self, keys: Sequence[int], num_tokens: int, replicas: Sequence[Replica]) -> Replica:
        """One of ``replicas``, which has at least one. ``keys`` are those of the prompt, ``num_tokens`` its length."""
        ...


class _RoundRobin:
    late = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, keys: Sequence[int], num_tokens: int, replicas: Sequence[Replica]) -> Replica:
        chosen = min(replicas, key=lambda each: (each.index < self._next, each.index))
        self._next = chosen.index + 1
        return chosen


class _TwoChoices:
    late = False

    def __init__(self) -> None:
        self._random = random.Random(0)

    def choose(self, keys: Sequence[int], num_tokens: int, replicas: Sequence[Replica]) -> Replica:
        two = self._random.sample(replicas, 2) if len(replicas) > 1 else replicas
        return min(two, key=lambda each: (each.num_requests, each.index))


class _Least:
    late = True

    def choose(self, keys: Sequence[int], num_tokens: int, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda each: (each.unstarted_tokens, each.num_requests, each.index))


class _Prefix:
    late = True

    def choose(self, keys: Sequence[int], num_tokens: int, replicas: Sequence[Replica]) -> Replica:
        def order(each: Replica) -> tuple[float, ...]:
            return -each.prefixes.matched(keys), each.unstarted_tokens, each.num_requests, each.index

        return min(_not_overloaded(replicas), key=order)


class _Forecast:
    late = True

    def choose(self, keys: Sequence[int], num_tokens: int, replicas: Sequence[Replica]) -> Replica:
        def order(each: Replica) -> tuple[float, ...]:
            uncached = num_tokens - PREFIX_BLOCK * each.prefixes.matched(keys)
            return each.first_token_seconds(uncached), each.num_requests, each.index

        return min(_not_overloaded(replicas), key=order)


def _not_overloaded(replicas: Sequence[Replica]) -> list[Replica]:
    """Replicas without many more requests than the mean. Otherwise a replica with a popular prefix would get all."""
    most = _OVER_MEAN * sum(each.num_requests for each in replicas) / len(replicas) + _MORE_REQUESTS
    return [each for each in replicas if each.num_requests <= most]


ROUTINGS: Final[dict[str, Callable[[], Router]]] = {
    "rr": _RoundRobin,
    "p2c": _TwoChoices,
    "least": _Least,
    "prefix": _Prefix,
    "forecast": _Forecast,
}
"""Name -> router."""


def router_from_name(name: str) -> Router:
    """A new router. Raises ConfigError for an unknown name."""
    if name not in ROUTINGS:
        raise ConfigError(f"routing must be one of {', '.join(ROUTINGS)}; got {name!r:.80}")
    return ROUTINGS[name]()
