"""Routers choose the replica of a fleet that serves a request.

A router gets the known state of each replica (:class:`Replica`), and returns one of these replicas:

- ``rr`` (round robin) and ``p2c`` (the better of two random choices; Mitzenmacher, 2001) are baselines.
- ``least`` prefers the replica with the least work.
- ``prefix`` prefers the replica that has the longest prefix of the prompt in its cache, as SGLang's router and Preble
  (Srivatsa et al., 2024) do.
- ``forecast`` prefers the replica with the smallest predicted time to the first token. The prediction uses the cached
  prefix, the prompts that the replica has to compute first, and the duration of steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from chairlift.base.prefix_keys import SHORT_KEY_BYTES, TOKEN_BYTES, block_content, block_tokens, chain, root_content
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
"""Number of prompt tokens in a block. A prompt has one prefix key per block."""
_OVER_MEAN: Final = 1.25
_MORE_REQUESTS: Final = 2
"""A replica counts as overloaded if its number of requests is above ``_OVER_MEAN`` times the mean plus
``_MORE_REQUESTS``. The router then does not prefer it for its cached prefixes."""
_MOST_SESSIONS: Final = 4096
_FADING: Final = 0.99
_LONGEST_STEP: Final = 60.0
"""Maximum duration of a step in seconds. A longer time is ignored: the process was stopped for a while."""


def prefix_keys(
    token_ids: Sequence[int],
    salt: str = "",
    adapter: bytes = b"",
    *,
    secret: bytes = b"",
    block_size: int = PREFIX_BLOCK,
    marks: Callable[[int, int], bytes] | None = None,
) -> list[int]:
    """One key for each :data:`PREFIX_BLOCK` tokens: the short key that a replica's prefix cache and its store have for
    the block that ends there.

    ``secret`` and ``block_size``, a power of two, are those of the cache. If its blocks are larger, some keys are
    repeated. ``adapter`` is the key of the prompt's adapter, and ``marks`` gives those of its images between two
    positions. Short keys of different prompts can collide. A router then expects a cache hit that does not happen;
    answers stay correct.
    """
    unit = max(PREFIX_BLOCK, block_size)
    starts = range(0, len(token_ids) // unit * unit, block_size)
    packed = block_tokens(token_ids[: len(starts) * block_size])
    width = TOKEN_BYTES * block_size

    def content(start: int) -> bytes:
        found = b"" if marks is None else marks(start, start + block_size)
        tokens = packed[start * TOKEN_BYTES : start * TOKEN_BYTES + width]
        return block_content(tokens, [("image", found)]) if found else tokens

    root = root_content(salt, [("adapter", adapter)] if adapter else [], secret)
    per_unit = unit // block_size
    ends = itertools.islice(chain(root, map(content, starts)), per_unit - 1, None, per_unit)
    return [int.from_bytes(key[:SHORT_KEY_BYTES], "little") for key in ends for _ in range(unit // PREFIX_BLOCK)]


def _short_keys(packed: bytes) -> Iterator[int]:
    return (key for (key,) in struct.iter_unpack("<Q", packed))


class PrefixIndex:
    """Estimated content of a replica's prefix cache: the keys of the prompts that were sent to it.

    ``capacity`` is the maximum number of keys. The oldest keys are dropped first; of one prompt, the last keys first.
    The keys of each session's newest prompt are remembered in addition, up to the same number in all: a replica may
    keep the blocks of a session longer than others.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()
        self._sessions: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()
        self._num_remembered = 0

    def matched(self, keys: Sequence[int]) -> int:
        """Number of ``keys``, counted from the first, that are in the index without a gap."""
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

    def remember(self, session: tuple[str, str], keys: Sequence[int]) -> None:
        """Remember the keys of the newest prompt of a session, which is (salt, name)."""
        self._num_remembered += len(keys) - len(self._sessions.pop(session, ()))
        self._sessions[session] = tuple(keys)
        while self._num_remembered > self._capacity or len(self._sessions) > _MOST_SESSIONS:
            _, oldest = self._sessions.popitem(last=False)
            self._num_remembered -= len(oldest)

    def recall(self, session: tuple[str, str], keys: Sequence[int]) -> None:
        """Add the leading ``keys`` that the newest prompt of a session has, because its next request has come."""
        known = self._sessions.get(session, ())
        common = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(keys, known, strict=False)))
        if common:
            self.add(keys[: len(common)])

    def clear(self) -> None:
        self._keys.clear()
        self._sessions.clear()
        self._num_remembered = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """Speed at which a replica computes. All replicas of a fleet are assumed to be equally fast."""

    prefill_seconds: Callable[[int], float]
    """Function from a number of prompt tokens to the time in seconds in which an idle replica computes them."""
    decode_seconds: Callable[[int], float]
    """Function from the number of decoding requests to the duration of their step, in seconds."""
    step_tokens: int
    """Maximum number of tokens in a step."""


class MeasuredPace:
    """Speed of the replicas, estimated from their steps: least squares for ``seconds = fixed + per_token * tokens``.

    The weight of a step is 1 % smaller than the weight of the next step.
    """

    def __init__(self) -> None:
        # initial guess, enough to compare replicas
        self._fixed = 0.01
        self._per_token = 1e-4
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """Add a step with its number of tokens and its duration."""
        if num_tokens <= 0 or not 0 < seconds < _LONGEST_STEP:
            return
        self._weight = _FADING * self._weight + 1.0
        self._x = _FADING * self._x + num_tokens
        self._y = _FADING * self._y + seconds
        self._xx = _FADING * self._xx + num_tokens * num_tokens
        self._xy = _FADING * self._xy + num_tokens * seconds
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        if spread > 1e-3 * max(1.0, x * x):
            self._per_token = min(y / x, max(0.0, (self._xy / self._weight - x * y) / spread))
        else:  # all steps have similar sizes, so the two parts cannot be separated
            self._per_token = min(self._per_token, y / x)
        self._fixed = max(0.0, y - self._per_token * x)

    def pace(self, step_tokens: int) -> Pace:
        """A :class:`Pace` for steps of at most ``step_tokens`` tokens, which always uses the newest estimate."""
        return Pace(
            lambda tokens: -(-tokens // step_tokens) * self._fixed + tokens * self._per_token,
            lambda rows: rows * self._per_token,  # prefill_seconds has the fixed part
            step_tokens,
        )


class Replica:
    """State of one replica as the router (the door) knows it from the messages that have arrived.

    ``policy_share`` is the fraction of a step's prompt tokens that the replica assigns in the order of the policy. It
    assigns the rest to its smallest requests.
    """

    def __init__(
        self, index: int, pace: Pace, *, max_num_seqs: int, cache_tokens: int, policy_share: float = 1.0
    ) -> None:
        self.index = index
        self.pace = pace
        self.accepting = False
        """Whether the replica accepts requests: it has started, is alive, and is not being drained."""
        self.unstarted: dict[str, int] = {}
        """Id of a request that has no output token yet -> number of prompt tokens that remain to compute, without the
        tokens that the cache is expected to have."""
        self.started: set[str] = set()
        """Ids of the replica's requests that have an output token and have not ended."""
        self.prefixes = PrefixIndex(max(1, cache_tokens // PREFIX_BLOCK))
        self.stored: set[int] = set()
        """Keys of the blocks that the replica can load from its store. The next field: seconds per loaded token."""
        self.load_token_seconds = math.inf
        self.version = 0
        """Version of the replica's weights."""
        self.small: dict[str, int] = {}
        """Requests of ``unstarted`` that were sent early because they are small."""
        self._unstarted_tokens = self._small_tokens = 0
        # Late binding: a replica gets prompts for at most two steps ahead. All other requests wait in the router's
        # queue (the door), in the order of the policy for the whole fleet. A few requests more than the replica has
        # rows are sent, because other requests end in the meantime.
        # Small requests have room of their own. Otherwise they would wait at the door behind long prompts, although
        # the replica would give them a part of its next step.
        self._max_unstarted = 2 * pace.step_tokens
        self._max_small = (1.0 - policy_share) * self._max_unstarted
        self._max_requests = max_num_seqs + max(1, max_num_seqs // 32)

    @property
    def num_requests(self) -> int:
        return len(self.unstarted) + len(self.started)

    @property
    def unstarted_tokens(self) -> int:
        """Number of prompt tokens that the replica has to compute before it can start a new request."""
        return self._unstarted_tokens

    @property
    def has_room(self) -> bool:
        """Whether a waiting request may be sent to this replica now."""
        tokens = self._unstarted_tokens - self._small_tokens
        return tokens < self._max_unstarted and self.num_requests < self._max_requests

    @property
    def has_small_room(self) -> bool:
        """Whether the smallest waiting request may be sent to this replica now, out of turn."""
        return self._small_tokens < self._max_small and self.num_requests < self._max_requests

    def opened(self, cache_tokens: int) -> None:
        """Record that the replica's process has started and accepts requests. Its prefix cache is empty and has room
        for ``cache_tokens`` tokens. Its process reports what its store has, perhaps before this call."""
        self.accepting = True
        self.prefixes = PrefixIndex(max(1, cache_tokens // PREFIX_BLOCK))

    def store_changed(self, added: bytes, removed: bytes, token_seconds: float) -> None:
        """Record what the replica can load from its store, or no longer: short keys one after another. A load takes
        ``token_seconds`` per token."""
        self.stored.update(_short_keys(added))
        self.stored.difference_update(_short_keys(removed))
        self.load_token_seconds = token_seconds

    def expect(self, keys: Sequence[int], num_tokens: int) -> tuple[int, float]:
        """(number of tokens that the replica computes for a prompt of ``num_tokens``, seconds for which it loads others
        from its store). It loads them only if that is faster."""
        known = self.prefixes.matched(keys)
        uncached = num_tokens - PREFIX_BLOCK * known
        end = len(keys)
        while end > known and keys[end - 1] not in self.stored:
            end -= 1
        tokens = PREFIX_BLOCK * (end - known)
        if not tokens or (seconds := tokens * self.load_token_seconds) >= self.pace.prefill_seconds(tokens):
            return uncached, 0.0
        return uncached - tokens, seconds

    def first_token_seconds(self, uncached: int, loading: float = 0.0) -> float:
        """Predicted time in seconds to the first token of a new prompt with ``uncached`` tokens to compute. Other
        prompts are computed while the rest of its tokens is loaded, which takes ``loading`` seconds."""
        tokens = self._unstarted_tokens + uncached
        steps = -(-tokens // self.pace.step_tokens)
        busy = self.pace.prefill_seconds(max(1, tokens)) + steps * self.pace.decode_seconds(len(self.started))
        return max(busy, loading + self.pace.prefill_seconds(max(1, uncached))) if loading else busy

    def sent(self, request_id: str, uncached: int, keys: Sequence[int], small: bool = False) -> None:
        """Record a request with ``uncached`` tokens to compute. ``small``: it was sent out of turn, as the smallest."""
        self.unstarted[request_id] = uncached
        self._unstarted_tokens += uncached
        if small:
            self.small[request_id] = uncached
            self._small_tokens += uncached
        self.prefixes.add(keys)

    def progressed(self, request_id: str, remaining: int) -> None:
        """Record that ``remaining`` prompt tokens of a request remain to compute. Ignores started requests."""
        saved = self.unstarted.get(request_id, 0) - max(1, remaining)
        if saved <= 0:
            return
        self.unstarted[request_id] -= saved
        self._unstarted_tokens -= saved
        if request_id in self.small:
            self.small[request_id] -= saved
            self._small_tokens -= saved

    def begun(self, request_id: str) -> None:
        """Record the first token of a request."""
        if request_id in self.unstarted:
            self._forget_unstarted(request_id)
            self.started.add(request_id)

    def ended(self, request_id: str) -> None:
        self._forget_unstarted(request_id)
        self.started.discard(request_id)

    def _forget_unstarted(self, request_id: str) -> None:
        self._unstarted_tokens -= self.unstarted.pop(request_id, 0)
        self._small_tokens -= self.small.pop(request_id, 0)

    def lost(self) -> tuple[list[str], list[str]]:
        """Remove all requests of a dead replica. Returns (ids of requests without a token in the order of sending, ids
        of requests with a token)."""
        lost = list(self.unstarted), sorted(self.started)
        self.unstarted.clear()
        self.small.clear()
        self.started.clear()
        self._unstarted_tokens = self._small_tokens = 0
        self.prefixes.clear()
        self.stored.clear()
        return lost


class Router(Protocol):
    """Protocol of a router: it chooses the replica for a request."""

    late: bool
    """Whether requests wait in the router's queue until a replica has room. If False, requests are sent when they
    arrive."""

    def choose(self, keys: Sequence[int], num_tokens: int, replicas: Sequence[Replica]) -> Replica:
        """Choose one of ``replicas``, which is never empty. ``keys`` are the prefix keys of the prompt, and
        ``num_tokens`` is its length."""
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
            return *each.expect(keys, num_tokens), each.unstarted_tokens, each.num_requests, each.index

        return min(_not_overloaded(replicas), key=order)


class _Forecast:
    late = True

    def choose(self, keys: Sequence[int], num_tokens: int, replicas: Sequence[Replica]) -> Replica:
        def order(each: Replica) -> tuple[float, ...]:
            uncached, loading = each.expect(keys, num_tokens)
            return each.first_token_seconds(uncached, loading), loading, each.num_requests, each.index

        return min(_not_overloaded(replicas), key=order)


def _not_overloaded(replicas: Sequence[Replica]) -> list[Replica]:
    """Replicas whose number of requests is not much above the mean. Routing by cached prefix is limited to these
    replicas, so that a popular prefix does not overload one replica."""
    limit = _OVER_MEAN * sum(each.num_requests for each in replicas) / len(replicas) + _MORE_REQUESTS
    return [each for each in replicas if each.num_requests <= limit]


ROUTINGS: Final[dict[str, Callable[[], Router]]] = {
    "rr": _RoundRobin,
    "p2c": _TwoChoices,
    "least": _Least,
    "prefix": _Prefix,
    "forecast": _Forecast,
}
"""Name of a router, as in the setting ``routing`` -> its class."""


def router_from_name(name: str) -> Router:
    """Create a router. Raises ConfigError for an unknown name."""
    if name not in ROUTINGS:
        raise ConfigError(f"routing must be one of {', '.join(ROUTINGS)}; got {name!r:.80}")
    return ROUTINGS[name]()
