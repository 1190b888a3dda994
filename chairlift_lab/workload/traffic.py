"""Describes kinds of traffic (lengths, shared prefixes, chats, tenants), and draws requests from them with a seed."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from chairlift.errors import ConfigError
from chairlift_lab.replay.traced_request import PREFIX_BLOCK, TracedRequest
from chairlift_lab.workload.arrivals import AllAtOnce, Arrivals
from chairlift_lab.workload.lengths import Fixed, Lengths, LogNormal, Uniform, Zipf

__all__ = ["WORKLOADS", "Cancels", "Chats", "RequestClass", "SharedPrefixes", "ToolPauses", "Traffic", "draw_trace"]

_CHAT_BLOCK: Final = 16
"""Number of tokens per prefix id in chats. The block is small because only whole blocks of earlier turns count as
shared."""
_CLASS_FIELDS: Final = ("tenant", "priority", "service_tier", "ttft_ms", "tpot_ms", "deadline_ms")


def _share(what: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of {what} must be from 0 to 1, got {share}")


def _stream(seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, number])  # number 1 is used in arrivals.py


@dataclasses.dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Prefixes that several prompts have in common, such as system prompts. They are added to the length of a
    prompt."""

    tokens: int
    """Length of a prefix in tokens: a multiple of 512, or of 16 in chats."""
    share: float = 1.0
    """Fraction of the requests (or of the chats) that have a shared prefix."""
    distinct: int = 1
    """Number of different prefixes."""
    alpha: float = 1.0
    """Skew of the frequencies: the k-th prefix is used in proportion to ``k ** -alpha``."""

    def __post_init__(self) -> None:
        _share("shared prefixes", self.share)
        if not 1 <= self.tokens <= 1 << 24 or self.distinct < 1 or not 0 <= self.alpha <= 50:
            raise ConfigError(
                "shared prefixes need tokens from 1 to 2**24, distinct of at least 1 and alpha from 0 to 50, got"
                f" {self.tokens}, {self.distinct} and {self.alpha}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class ToolPauses:
    """A tool that agents call, and how long it runs: log-normal times."""

    name: str
    median_seconds: float
    sigma: float
    """Standard deviation of the natural logarithm of a time."""
    weight: float = 1.0
    """Relative frequency of its calls."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a tool needs a name")
        if not (0 < self.median_seconds <= 1e6 and 0 <= self.sigma <= 10 and 0 < self.weight < 1e9):
            raise ConfigError(
                f"tool {self.name} needs a median above 0 and up to 1,000,000 seconds, sigma from 0 to 10 and a weight"
                f" above 0, got {self.median_seconds:g}, {self.sigma:g} and {self.weight:g}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Chats:
    """Requests that are turns of chats: each prompt repeats all earlier text of the chat and adds a new message.

    ``Traffic.prompt`` gives the lengths of the new messages. A turn is sent only after the previous turn is answered.
    In a replay, a turn shares with the previous turn only the prompt, not the answer, because a trace does not contain
    the tokens of answers.

    On average the requests have the rate of the arrivals. The rate is lower at the start, when all chats are in their
    first turns, and at the end, when no new chats begin.
    """

    turns: Lengths
    think_seconds: float = 0.0
    """Mean time in seconds from one turn to the next; the times have an exponential distribution."""
    most_tokens: int = 8192
    """Maximum length of a chat in tokens. A chat ends before the turn that would exceed the maximum with its answer."""
    first: Lengths | None = None
    """Lengths of the first message of a chat. None: like those of the others."""
    tools: tuple[ToolPauses, ...] = ()
    """Tools of agents: each turn but the last calls one of them, and the next turn is sent when it has run. The times
    count from the end of the answer, so that a slow server is asked later. Empty: users think, without tools."""

    def __post_init__(self) -> None:
        if not 0 <= self.think_seconds <= 1e9:
            raise ConfigError(f"think_seconds of chats must be from 0 to 1,000,000,000, got {self.think_seconds}")
        if self.tools and self.think_seconds:
            raise ConfigError(f"chats have tools or think_seconds ({self.think_seconds:g}), not both; leave one out")
        if self.most_tokens < 1:
            raise ConfigError(f"most_tokens of chats must be at least 1, got {self.most_tokens}")


@dataclasses.dataclass(frozen=True, slots=True)
class Cancels:
    """Clients that disconnect before the answer is complete."""

    share: float
    """Fraction of the requests whose clients disconnect."""
    after_ms: Lengths
    """Time in ms from sending a request to the disconnect."""

    def __post_init__(self) -> None:
        _share("cancels", self.share)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """A kind of client. All requests of a chat belong to the same class. The fields are those of a TracedRequest."""

    weight: float = 1.0
    """Relative frequency: the fraction of requests (or chats) of this class is its weight divided by the sum of
    weights."""
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
    """Description of a kind of traffic. Equal descriptions, arrivals and seeds give equal requests on any machine."""

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
        """Number of prompt tokens that one prefix id of a drawn request covers."""
        return PREFIX_BLOCK if self.chats is None else _CHAT_BLOCK

    def draw(self, count: int, arrivals: Arrivals | None = None, seed: int = 0) -> list[TracedRequest]:
        """Draw ``count`` requests in order of arrival. Without ``arrivals`` all of them arrive at 0.

        Lengths, arrivals, chats, prefixes, classes and cancels each have their own random stream, so that a change of
        one of them leaves the others unchanged.
        """
        rng = np.random.default_rng(seed)
        prompts = self.prompt.draw(rng, count)
        outputs = self.output.draw(rng, count)
        times = (arrivals or AllAtOnce()).times(count, seed)
        firsts = (
            [] if self.chats is None or self.chats.first is None else self.chats.first.draw(_stream(seed, 8), count)
        )
        chats = self._chats(prompts, outputs, firsts, seed)
        for (first, _), length in zip(chats, firsts, strict=False):
            prompts[first] = length
        calls = self._calls(count, seed)
        own = self._own_fields(len(chats), seed)
        prefixes = self._prefixes(len(chats), seed)
        prefix_tokens = 0 if self.prefixes is None else self.prefixes.tokens
        think = _stream(seed, 3)
        requests: list[TracedRequest] = []
        next_id = 0 if self.prefixes is None else self.prefixes.distinct * (prefix_tokens // self.prefix_block)
        for number, (first, turns) in enumerate(chats):
            shared = prefixes[number]
            # A chat with n turns uses n arrival times, so that the rate of ``arrivals`` counts requests, not chats.
            time = times[first]
            chat_tokens = len(shared) * self.prefix_block
            for turn in range(turns):
                index = first + turn
                chat_tokens += prompts[index]
                fields = own[number]
                if self.chats is not None:
                    ids = range(next_id, next_id - (-chat_tokens // self.prefix_block) - len(shared))
                    fields = fields | {"session": str(number), "turn": turn, "prefix_ids": shared + tuple(ids)}
                    if calls and turn:
                        fields["gap_ms"] = calls[index - 1][1]
                    if calls and turn + 1 < turns:
                        fields["tool"] = calls[index][0]
                elif shared:
                    fields = fields | {"prefix_ids": shared}
                requests.append(
                    TracedRequest(
                        arrival=time,
                        prompt_tokens=chat_tokens,
                        output_tokens=outputs[index],
                        prefix_block=self.prefix_block,
                        **fields,
                    )
                )
                chat_tokens += outputs[index]
                if calls:
                    time += calls[index][1] / 1000
                elif self.chats is not None:
                    time += float(think.exponential(self.chats.think_seconds))
            next_id -= -chat_tokens // self.prefix_block
        return sorted(self._with_cancels(requests, seed), key=lambda request: request.arrival)

    def _calls(self, count: int, seed: int) -> list[tuple[str, float]]:
        """(tool, ms for which it runs) that each request calls, unless it is the last of its chat. Empty without
        tools."""
        tools = () if self.chats is None else self.chats.tools
        if not tools:
            return []
        rng = _stream(seed, 7)
        weights = np.array([tool.weight for tool in tools])
        chosen = [tools[int(number)] for number in rng.choice(len(tools), count, p=weights / weights.sum())]
        factors = np.exp(rng.standard_normal(count) * np.array([tool.sigma for tool in chosen]))
        return [
            (tool.name, round(1000 * tool.median_seconds * float(factor), 3))
            for tool, factor in zip(chosen, factors, strict=True)
        ]

    def _chats(self, prompts: list[int], outputs: list[int], firsts: list[int], seed: int) -> list[tuple[int, int]]:
        """One entry per chat: (index of its first request, number of turns). Without chats, each request is a chat of 1
        turn. ``firsts`` are the lengths of first messages; empty: like the others."""
        count = len(prompts)
        if self.chats is None:
            return [(index, 1) for index in range(count)]
        lengths = self.chats.turns.draw(_stream(seed, 2), count)
        before = 0 if self.prefixes is None else self.prefixes.tokens
        chats: list[tuple[int, int]] = []
        first = 0
        while first < count:
            turns = 0
            tokens = before
            while turns < lengths[len(chats)] and first + turns < count:
                is_special = firsts and not turns
                tokens += (firsts[len(chats)] if is_special else prompts[first + turns]) + outputs[first + turns]
                if tokens > self.chats.most_tokens and turns:
                    break
                turns += 1
            chats.append((first, turns))
            first += turns
        return chats

    def _prefixes(self, chats: int, seed: int) -> list[tuple[int, ...]]:
        """Prefix ids of the shared prefix of each chat; empty for a chat without a shared prefix."""
        if self.prefixes is None:
            return [()] * chats
        rng = _stream(seed, 4)
        blocks = self.prefixes.tokens // self.prefix_block
        has = rng.random(chats) < self.prefixes.share
        which = Zipf(self.prefixes.alpha, 1, self.prefixes.distinct).draw(rng, chats)
        return [
            tuple(range((one - 1) * blocks, one * blocks)) if there else ()
            for one, there in zip(which, has, strict=True)
        ]

    def _own_fields(self, chats: int, seed: int) -> list[dict[str, Any]]:
        """One entry per chat: name -> value of the request fields that the chat gets from its class."""
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
        cancelled = rng.random(len(requests)) < self.cancels.share
        delays = self.cancels.after_ms.draw(rng, len(requests))
        return [
            dataclasses.replace(request, cancel_ms=ms) if leaves else request
            for request, leaves, ms in zip(requests, cancelled, delays, strict=True)
        ]


WORKLOADS: Final = {
    "chat": Traffic(
        description="short questions, answers of a few sentences",
        prompt=LogNormal(4.6, 0.8, 8, 1024),
        output=LogNormal(4.2, 0.9, 4, 512),
    ),
    "assistant": Traffic(
        description="chat with a system prompt of 1,024 tokens that all requests share",
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
        description="all requests alike, answers of 24 tokens, as for classification: batching gains little",
        prompt=Fixed(64),
        output=Fixed(24),
    ),
    "conversation": Traffic(
        description="chats of 1 to 16 turns with 20 s between turns; each prompt repeats the whole chat",
        prompt=LogNormal(3.9, 0.8, 8, 512),
        output=LogNormal(4.8, 0.7, 8, 1024),
        chats=Chats(Zipf(1.0, 1, 16), think_seconds=20.0),
    ),
    "agents": Traffic(
        description="loops of 3 to 12 tool calls, 1 s each, with one of 4 long system prompts; short answers",
        prompt=LogNormal(5.3, 0.9, 32, 4096),
        output=LogNormal(4.0, 0.7, 8, 512),
        prefixes=SharedPrefixes(2048, distinct=4),
        chats=Chats(Uniform(3, 12), think_seconds=1.0, most_tokens=16384),
    ),
    "coding-agents": Traffic(
        description="agents with 4 to 24 turns; searches of 2 s, edits of 0.5 s, tests of 15 s between them",
        prompt=LogNormal(5.3, 0.9, 32, 4096),
        output=LogNormal(4.4, 0.7, 8, 512),
        prefixes=SharedPrefixes(2048),
        chats=Chats(
            Uniform(4, 24),
            most_tokens=16384,
            first=LogNormal(7.0, 0.5, 256, 8192),
            tools=(
                ToolPauses("search", 2.0, 0.8, 4.0),
                ToolPauses("edit", 0.5, 0.5, 3.0),
                ToolPauses("run_tests", 15.0, 0.7, 2.0),
            ),
        ),
    ),
}
"""Name of a workload -> description of its traffic."""


def draw_trace(
    workload: str = "chat", arrivals: Arrivals | None = None, count: int = 64, seed: int = 0
) -> list[TracedRequest]:
    """Draw ``count`` requests of the kind of traffic ``workload``, a key of :data:`WORKLOADS`.

    Raises ConfigError for an unknown name.
    """
    if workload not in WORKLOADS:
        raise ConfigError(f"workload must be one of {', '.join(WORKLOADS)}; got {workload!r}")
    return WORKLOADS[workload].draw(count, arrivals, seed)
