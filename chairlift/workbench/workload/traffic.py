"""Kinds of traffic as values: lengths, shared beginnings, tenants; drawn with a seed."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from chairlift.errors import ConfigError
from chairlift.replay.traced_request import PREFIX_BLOCK, TracedRequest
from chairlift.workbench.workload.arrivals import AllAtOnce, Arrivals
from chairlift.workbench.workload.lengths import Fixed, Lengths, LogNormal, Uniform, Zipf

__all__ = ["WORKLOADS", "Cancels", "Chats", "RequestClass", "SharedPrefixes", "Traffic", "draw_trace"]

_CHAT_BLOCK: Final = 16
"""Tokens per prefix id where turns share earlier text. It is small, so that little of the sharing is lost."""
_CLASS_FIELDS: Final = ("tenant", "priority", "service_tier", "ttft_ms", "tpot_ms", "deadline_ms")


def _share(what: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of {what} must be from 0 to 1, got {share}")


def _stream(seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, number])  # 1 is the stream of the arrivals


@dataclasses.dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Prompts with equal beginnings, such as system prompts. The shared tokens are added to a prompt's own length."""

    tokens: int
    """Length of a prefix, in whole blocks: of 512, or of 16 in chats."""
    share: float = 1.0
    """Share of the requests, or chats, that have one."""
    distinct: int = 1
    """Number of different prefixes."""
    alpha: float = 1.0
    """The k-th of them is as frequent as ``k ** -alpha``."""

    def __post_init__(self) -> None:
        _share("shared prefixes", self.share)
        if not 1 <= self.tokens <= 1 << 24 or self.distinct < 1 or not 0 <= self.alpha <= 50:
            raise ConfigError(
                "shared prefixes need tokens from 1 to 2**24, distinct of at least 1 and alpha from 0 to 50, got"
                f" {self.tokens}, {self.distinct} and {self.alpha}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Chats:
    """Requests are turns of chats: a prompt is all earlier text and a new message.

    Prompt lengths of the traffic are those of the new messages. A turn is not sent before the previous one is answered.
    In a replay, the match in the prefix cache ends where the previous prompt ended, because the trace does not know the
    answer's tokens.

    Requests have the rate of the arrivals where chats overlap. The rate is lower at first, before there are later
    turns, and at the end, when no chat begins any more.
    """

    turns: Lengths
    think_seconds: float = 0.0
    """Mean of the exponential time from one turn to the next."""
    most_tokens: int = 8192
    """A chat ends before a turn that would need more, with its answer."""

    def __post_init__(self) -> None:
        if not 0 <= self.think_seconds <= 1e9:
            raise ConfigError(f"think_seconds of chats must be from 0 to 1,000,000,000, got {self.think_seconds}")
        if self.most_tokens < 1:
            raise ConfigError(f"most_tokens of chats must be at least 1, got {self.most_tokens}")


@dataclasses.dataclass(frozen=True, slots=True)
class Cancels:
    """Clients that leave before the answer is complete."""

    share: float
    """Share of the requests whose clients leave."""
    after_ms: Lengths
    """Pauses of the users between turns, in ms."""

    def __post_init__(self) -> None:
        _share("cancels", self.share)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """One of the kinds of clients; a chat belongs to one as a whole. Fields as in a TracedRequest."""

    weight: float = 1.0
    """Its share of the requests, or chats, is its weight over the sum of all weights."""
    tenant: str = ""
    priority: int = 0
    service_tier: str = ""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < 1e9:
            raise ConfigError(f"weight of a class must be above 0, got {self.weight}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Description of a kind of traffic. Equal values, arrivals and seed give equal requests, on any machine."""

    prompt: Lengths
    output: Lengths
    description: str = ""
    prefixes: SharedPrefixes | None = None
    chats: Chats | None = None
    cancels: Cancels | None = None
    classes: tuple[RequestClass, ...] = ()

    def __post_init__(self) -> None:
        if self.prefixes is not None and self.prefixes.tokens % self.prefix_block:
            raise ConfigError(
                f"shared prefixes are blocks of {self.prefix_block} tokens here, so that their length cannot be"
                f" {self.prefixes.tokens}; make it a multiple"
            )

    @property
    def prefix_block(self) -> int:
        """Tokens per prefix id of what is drawn."""
        return PREFIX_BLOCK if self.chats is None else _CHAT_BLOCK

    def draw(self, count: int, arrivals: Arrivals | None = None, seed: int = 0) -> list[TracedRequest]:
        """``count`` requests in order of arrival, all at once unless ``arrivals`` is given.

        Each aspect has its own random stream, so that changing one does not change the others.
        """
        rng = np.random.default_rng(seed)
        prompts, outputs = self.prompt.draw(rng, count), self.output.draw(rng, count)
        times = (arrivals or AllAtOnce()).times(count, seed)
        chats = self._chats(prompts, outputs, seed)
        own = self._own_fields(len(chats), seed)
        prefixes = self._prefixes(len(chats), seed)
        prefix_tokens = 0 if self.prefixes is None else self.prefixes.tokens
        think = _stream(seed, 3)
        requests: list[TracedRequest] = []
        next_id = 0 if self.prefixes is None else self.prefixes.distinct * (prefix_tokens // self.prefix_block)
        for number, (first, turns) in enumerate(chats):
            shared = prefixes[number]
            # Chats start so far apart that the requests, not the chats, come at the rate of the arrivals.
            time, said = times[first], len(shared) * self.prefix_block
            for turn in range(turns):
                place = first + turn
                said += prompts[place]
                fields = own[number]
                if self.chats is not None:
                    ids = range(next_id, next_id - (-said // self.prefix_block) - len(shared))
                    fields = fields | {"session": str(number), "turn": turn, "prefix_ids": shared + tuple(ids)}
                elif shared:
                    fields = fields | {"prefix_ids": shared}
                requests.append(
                    TracedRequest(
                        arrival=time,
                        prompt_tokens=said,
                        output_tokens=outputs[place],
                        prefix_block=self.prefix_block,
                        **fields,
                    )
                )
                said += outputs[place]
                if self.chats is not None:
                    time += float(think.exponential(self.chats.think_seconds))
            next_id -= -said // self.prefix_block
        return sorted(self._with_cancels(requests, seed), key=lambda request: request.arrival)

    def _chats(self, prompts: list[int], outputs: list[int], seed: int) -> list[tuple[int, int]]:
        """(first request, number of turns) of each chat; requests on their own are chats of one."""
        count = len(prompts)
        if self.chats is None:
            return [(place, 1) for place in range(count)]
        wanted = self.chats.turns.draw(_stream(seed, 2), count)
        before = 0 if self.prefixes is None else self.prefixes.tokens
        chats: list[tuple[int, int]] = []
        first = 0
        while first < count:
            turns, tokens = 0, before
            while turns < wanted[len(chats)] and first + turns < count:
                tokens += prompts[first + turns] + outputs[first + turns]
                if tokens > self.chats.most_tokens and turns:
                    break
                turns += 1
            chats.append((first, turns))
            first += turns
        return chats

    def _prefixes(self, chats: int, seed: int) -> list[tuple[int, ...]]:
        """The ids of each chat's shared prefix."""
        if self.prefixes is None:
            return [()] * chats
        rng, blocks = _stream(seed, 4), self.prefixes.tokens // self.prefix_block
        has = rng.random(chats) < self.prefixes.share
        which = Zipf(self.prefixes.alpha, 1, self.prefixes.distinct).draw(rng, chats)
        return [
            tuple(range((one - 1) * blocks, one * blocks)) if there else ()
            for one, there in zip(which, has, strict=True)
        ]

    def _own_fields(self, chats: int, seed: int) -> list[dict[str, Any]]:
        """The fields that each chat has from its class."""
        if not self.classes:
            return [{}] * chats
        weights = np.array([each.weight for each in self.classes])
        drawn = _stream(seed, 5).choice(len(weights), chats, p=weights / weights.sum())
        fields = [{name: getattr(each, name) for name in _CLASS_FIELDS} for each in self.classes]
        return [fields[int(number)] for number in drawn]

    def _with_cancels(self, requests: list[TracedRequest], seed: int) -> list[TracedRequest]:
        if self.cancels is None:
            return requests
        rng = _stream(seed, 6)
        leaves = rng.random(len(requests)) < self.cancels.share
        after = self.cancels.after_ms.draw(rng, len(requests))
        return [
            dataclasses.replace(request, cancel_ms=ms) if gone else request
            for request, gone, ms in zip(requests, leaves, after, strict=True)
        ]


WORKLOADS: Final = {
    "chat": Traffic(
        description="short questions, answers of a few sentences",
        prompt=LogNormal(4.6, 0.8, 8, 1024),
        output=LogNormal(4.2, 0.9, 4, 512),
    ),
    "assistant": Traffic(
        description="chat behind a system prompt of 1,024 tokens that all share",
        prompt=LogNormal(4.6, 0.8, 8, 1024),
        output=LogNormal(4.2, 0.9, 4, 512),
        prefixes=SharedPrefixes(1024),
    ),
    "summarize": Traffic(
        description="long documents, short answers",
        prompt=LogNormal(7.3, 0.6, 128, 8192),
        output=LogNormal(4.8, 0.5, 16, 512),
    ),
    "write": Traffic(
        description="short prompts, long answers",
        prompt=LogNormal(4.0, 0.7, 8, 512),
        output=LogNormal(6.2, 0.6, 32, 2048),
    ),
    "uniform": Traffic(
        description="all requests alike, answers of 24 tokens, as when classifying: batching has little to gain",
        prompt=Fixed(64),
        output=Fixed(24),
    ),
    "conversation": Traffic(
        description="chats of 1 to 16 turns with 20 s between them; each turn repeats all that was said",
        prompt=LogNormal(3.9, 0.8, 8, 512),
        output=LogNormal(4.8, 0.7, 8, 1024),
        chats=Chats(Zipf(1.0, 1, 16), think_seconds=20.0),
    ),
    "agents": Traffic(
        description="loops of 3 to 12 tool calls, 1 s each, behind one of 4 long system prompts; short answers",
        prompt=LogNormal(5.3, 0.9, 32, 4096),
        output=LogNormal(4.0, 0.7, 8, 512),
        prefixes=SharedPrefixes(2048, distinct=4),
        chats=Chats(Uniform(3, 12), think_seconds=1.0, most_tokens=16384),
    ),
}
"""Kinds of traffic by name."""


def draw_trace(
    workload: str = "chat", arrivals: Arrivals | None = None, count: int = 64, seed: int = 0
) -> list[TracedRequest]:
    """``count`` requests of a kind of traffic (:data:`WORKLOADS`). Raises ConfigError for an unknown one."""
    if workload not in WORKLOADS:
        raise ConfigError(f"workload must be one of {', '.join(WORKLOADS)}; got {workload!r}")
    return WORKLOADS[workload].draw(count, arrivals, seed)
