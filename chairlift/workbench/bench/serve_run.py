"""Data of a run of ``bench serve`` or ``bench offline``: the requests, the target that answers, the outcomes."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from chairlift.errors import ConfigError
from chairlift.replay.traced_request import TracedRequest, prompt_token_ids
from chairlift.workbench.workload.texts import Said

__all__ = ["Dialect", "Load", "Outcome", "Progress", "ServeRun", "Status", "Target", "Watch", "fit", "quiet_collector"]

Status = str
"""``completed``, ``failed``, ``cancelled`` (the client left, as the trace says) or ``unfinished`` (Ctrl-C)."""

_MOST_MESSAGE: Final = 300
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e]+")
_SYLLABLES: Final = [a + b + c for c in ("", "n", "r", "s", "l") for b in "aeiou" for a in "bcdfghjklmnprstvwz"]
"""Words of prompts that are sent as text: short ones, which tokenizers know or cut alike."""
_PERIOD: Final = 8
"""Words after which a block of a prompt repeats; they are the digits of the block's number."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Optional request fields that improve the measurement, if a server accepts them."""

    chat: bool
    vocab_size: int = 0
    """Prompts are token ids below this; with 0 they are text."""
    words: tuple[float, float] = (0.0, 1.0)
    """Token counts of text prompts: tokens that every prompt has besides its words, and tokens per word."""
    ignore_eos: bool = False
    usage: bool = True
    continuous_usage: bool = True
    timing: bool = False

    def common(self, other: Dialect) -> Dialect:
        """Dialect that both servers accept, so that both are asked the same."""
        return Dialect(
            chat=self.chat,
            vocab_size=min(self.vocab_size, other.vocab_size),
            words=self.words if not self.vocab_size or other.vocab_size else other.words,
            ignore_eos=self.ignore_eos and other.ignore_eos,
            usage=self.usage and other.usage,
            continuous_usage=self.continuous_usage and other.continuous_usage,
            timing=self.timing and other.timing,
        )

    def prompt(self, request: TracedRequest, index: int) -> list[int] | str:
        """A prompt of the request's length. Prompts whose prefix ids begin alike begin alike."""
        ids = prompt_token_ids(request, index, self.vocab_size or len(_SYLLABLES))
        if self.vocab_size:
            return ids
        fixed, per_word = self.words
        size, last = request.prefix_block, len(ids) - 1
        words: list[str] = []
        block, first = 0, 0
        for number in range(max(1, round((request.prompt_tokens - fixed) / per_word))):
            # A block repeats a few ids, and a word has several tokens, so the block's words use its ids in turn.
            at = min(int(number * per_word) // size, len(request.prefix_ids)) * size
            if at != block:
                block, first = at, number
            words.append(_SYLLABLES[ids[min(block + (number - first) % _PERIOD, last)] % len(_SYLLABLES)])
        return " ".join(words)


@dataclasses.dataclass(eq=False, kw_only=True)
class Target:
    """Target that answers the requests: a server, or an engine in this process."""

    url: str = "in process"
    model: str = ""
    owner: str = ""
    """Owner of the model, as the server reports it."""
    max_model_len: int | None = None
    backend: str = "chairlift"
    """Kind of server, as in vLLM's records."""
    dialect: Dialect = Dialect(chat=False)
    notes: list[str] = dataclasses.field(default_factory=list)
    """Features that the target refuses, in words."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests to send, and how to send them."""

    requests: Sequence[TracedRequest]
    max_concurrency: int | None = None
    """Most requests in flight; further ones wait."""
    temperature: float = 0.0
    promises: bool = False
    """Whether class, tenant and limits of the requests are sent."""
    salt: int = 0
    """Changes the contents of prompts, so that the same requests with another salt find no cached prefix. Below
    2**60."""
    said: Sequence[Said] | None = None
    """Content of each request, from a data set of texts. None: prompts are made up, with the requests' lengths."""
    shortened: int = 0
    """Requests that were cut to what the server has room for."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """Result of one request. Times are seconds of the client's monotonic clock; 0: the request did not get so far."""

    index: int
    """Place in the workload."""
    scheduled: float
    """When it was due; for one that had to wait for a free place or for the turn before it, the end of that wait."""
    wanted_tokens: int
    """Requested number of output tokens."""
    prompt_tokens: int
    """Number of prompt tokens by the server's count, or the requested number if it reports none."""
    held: bool = False
    """Whether it was held back, by the limit of concurrency or by an earlier turn."""
    start: float = 0.0
    headers: float = 0.0
    end: float = 0.0
    """Time of the last chunk with a choice; of a request that did not complete, the time when it was given up."""
    times: list[float] = dataclasses.field(default_factory=list)
    """When chunks with new tokens came."""
    counts: list[int] = dataclasses.field(default_factory=list)
    """New tokens of each."""
    completion_tokens: int | None = None
    """Number of output tokens by the server's count."""
    cached_tokens: int | None = None
    """Prompt tokens in the server's cache, if it reports them."""
    server_queue_ms: float | None = None
    """Milliseconds in the server before it began with the prompt, if it reports them."""
    preempted: bool | None = None
    """Whether it was preempted, if the server reports it."""
    finish_reason: str | None = None
    status: Status = "unfinished"
    kind: str = ""
    """Kind of error; empty unless the request failed. So is ``message``."""
    message: str = ""

    @property
    def output_tokens(self) -> int:
        return sum(self.counts) if self.completion_tokens is None else self.completion_tokens

    @property
    def counted(self) -> bool:
        """Whether each event is known to have one token. An end-of-sequence token has no event of its own."""
        told = self.completion_tokens is not None and 0 <= self.completion_tokens - sum(self.counts) <= 1
        return told and (self.came_whole or max(self.counts, default=1) == 1)

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.times[0] - self.start

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.end - self.start

    @property
    def came_whole(self) -> bool:
        """Whether all tokens came in one event, as those of a static batch do: none has a time of its own."""
        return self.output_tokens > 1 and len(self.times) == 1

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token, and for one that came whole."""
        if self.output_tokens < 2 or self.came_whole:
            return None
        return (self.end - self.times[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between events with tokens, one gap per event after the first, however many tokens an event has.

        That is the convention of ``vllm bench serve``. An answer that came whole has none.
        """
        return [] if self.came_whole else [now - before for before, now in itertools.pairwise(self.times)]

    def fail(self, kind: str, message: str) -> None:
        """Record an error in place of an answer."""
        self.status, self.kind, self.message = "failed", kind, _CONTROL.sub(" ", message)[:_MOST_MESSAGE].strip()


Progress = Callable[[int, Outcome], None]
"""Called with the number of requests in flight and each ended request."""

Watch = Callable[[str, int], contextlib.AbstractContextManager[Progress]]
"""Called with a name and the number of requests at the beginning of each run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeRun:
    """Result of sending a :class:`Load`."""

    server: Target
    load: Load
    outcomes: Sequence[Outcome]
    """In the order of the requests; with an interruption, those that had been due by then."""
    date: datetime.datetime
    begin: float
    """On the clock of the outcomes."""
    seconds: float
    """Seconds until the last request ended."""
    cpu_share: float | None
    """Share of one processor that the client took; None where the client is no process of its own."""
    interrupted: bool


def fit(requests: Sequence[TracedRequest], most_tokens: int | None) -> tuple[list[TracedRequest], int]:
    """Requests shortened to ``most_tokens``, prompt and answer together, and the number of shortened ones.

    An answer gets at most half of the room, and a prompt the room beside its answer. Raises ConfigError when there is
    no room for two tokens.
    """
    if most_tokens is not None and most_tokens < 2:
        raise ConfigError(
            f"requests need room for 2 tokens, and there is room for {most_tokens}; raise kv_cache_memory_bytes"
        )
    fitting = []
    for request in requests:
        if most_tokens is not None and request.prompt_tokens + request.output_tokens > most_tokens:
            output = min(request.output_tokens, most_tokens // 2)
            prompt = min(request.prompt_tokens, most_tokens - output)
            blocks = -(-prompt // request.prefix_block)
            request = dataclasses.replace(
                request, prompt_tokens=prompt, output_tokens=output, prefix_ids=request.prefix_ids[:blocks]
            )
        fitting.append(request)
    return fitting, sum(one is not other for one, other in zip(requests, fitting, strict=True))


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Context in which the garbage collector skips objects that exist already: scans would disturb the times."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
