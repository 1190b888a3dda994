"""Data classes of a run of ``bench serve`` or ``bench offline``: requests, target and outcomes."""

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
from chairlift_lab.replay.traced_request import TracedRequest, prompt_token_ids
from chairlift_lab.workload.texts import Said

__all__ = [
    "Load",
    "LoadOutcome",
    "Progress",
    "PromptDialect",
    "ServeRun",
    "Status",
    "Target",
    "Watch",
    "fit",
    "quiet_collector",
]

Status = str
"""Status of a request: ``completed``, ``failed``, ``cancelled`` (the trace has a time at which the client disconnects)
or ``unfinished`` (interrupted by Ctrl-C)."""

_MAX_MESSAGE: Final = 300
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e]+")
_SYLLABLES: Final = [a + b + c for c in ("", "n", "r", "s", "l") for b in "aeiou" for a in "bcdfghjklmnprstvwz"]
"""Words of prompts that are sent as text. They are short, so that most tokenizers need few tokens for each."""
_PERIOD: Final = 8
"""Number of words after which the text of a prompt's block repeats. These words encode the number of the block."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptDialect:
    """Form of the requests that a server accepts: the endpoint, and optional fields that improve the measurement."""

    chat: bool
    vocab_size: int = 0
    """Prompts are lists of token ids below this number. 0: prompts are text."""
    words: tuple[float, float] = (0.0, 1.0)
    """(number of tokens of an empty prompt, number of tokens per word), used for prompts that are text."""
    ignore_eos: bool = False
    usage: bool = True
    continuous_usage: bool = True
    timing: bool = False

    def common(self, other: PromptDialect) -> PromptDialect:
        """Form of requests that both servers of a comparison accept, so that both get the same requests."""
        return PromptDialect(
            chat=self.chat,
            vocab_size=min(self.vocab_size, other.vocab_size),
            words=self.words if not self.vocab_size or other.vocab_size else other.words,
            ignore_eos=self.ignore_eos and other.ignore_eos,
            usage=self.usage and other.usage,
            continuous_usage=self.continuous_usage and other.continuous_usage,
            timing=self.timing and other.timing,
        )

    def prompt(self, request: TracedRequest, index: int) -> list[int] | str:
        """A generated prompt of the request's length. Requests that share prefix ids get prompts with equal
        prefixes."""
        ids = prompt_token_ids(request, index, self.vocab_size or len(_SYLLABLES))
        if self.vocab_size:
            return ids
        fixed, per_word = self.words
        size = request.prefix_block
        last = len(ids) - 1
        words: list[str] = []
        block = 0
        first = 0
        for number in range(max(1, round((request.prompt_tokens - fixed) / per_word))):
            # Within a block, the words repeat the block's first few token ids, because a word may have several tokens.
            at = min(int(number * per_word) // size, len(request.prefix_ids)) * size
            if at != block:
                block = at
                first = number
            words.append(_SYLLABLES[ids[min(block + (number - first) % _PERIOD, last)] % len(_SYLLABLES)])
        return " ".join(words)


@dataclasses.dataclass(eq=False, kw_only=True)
class Target:
    """The measured system: a server, or an engine in this process."""

    url: str = "in process"
    model: str = ""
    owner: str = ""
    """Owner of the model, as the server reports it."""
    max_model_len: int | None = None
    backend: str = "chairlift"
    """Kind of server, with vLLM's names, for the record."""
    dialect: PromptDialect = PromptDialect(chat=False)
    notes: list[str] = dataclasses.field(default_factory=list)
    """Messages for the user about request fields that the target refuses."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests to send, and how to send them."""

    requests: Sequence[TracedRequest]
    max_concurrency: int | None = None
    """Maximum number of requests in flight; further requests wait. None: no limit."""
    temperature: float = 0.0
    promises: bool = False
    """Whether to send the service class, the tenant and the latency targets of the requests."""
    salt: int = 0
    """Number below 2**60 that changes the tokens of the prompts, so that a run finds no cached prompts of another
    run."""
    said: Sequence[Said] | None = None
    """Content of each request, from a data set of texts. None: prompts are generated with the requests' lengths."""
    shortened: int = 0
    """Number of requests that were shortened to the server's maximum length."""


@dataclasses.dataclass(slots=True, kw_only=True)
class LoadOutcome:
    """Result of one request. Times are seconds on the client's monotonic clock; 0 if the request ended earlier."""

    index: int
    """Index of the request in the load."""
    scheduled: float
    """Planned time of sending. If the request had to wait for a free slot or for an earlier turn: the end of the
    wait."""
    wanted_tokens: int
    """Requested number of output tokens."""
    prompt_tokens: int
    """Number of prompt tokens that the server reports, or the planned number if the server does not report it."""
    held: bool = False
    """Whether sending had to wait for a free slot (limit of concurrency) or for an earlier turn of the chat."""
    start: float = 0.0
    headers: float = 0.0
    end: float = 0.0
    """Time of the last chunk with a choice. For a request that did not complete: the time when it failed or ended."""
    times: list[float] = dataclasses.field(default_factory=list)
    """Arrival times of the chunks with new tokens."""
    counts: list[int] = dataclasses.field(default_factory=list)
    """Number of new tokens in each chunk of ``times``."""
    completion_tokens: int | None = None
    """Number of output tokens that the server reports. None if the server does not report it."""
    cached_tokens: int | None = None
    """Number of prompt tokens that the server found in its prefix cache. None if the server does not report it."""
    server_queue_ms: float | None = None
    """Time in ms that the request waited in the server before its prefill. None if the server does not report it."""
    preempted: bool | None = None
    """Whether the server preempted the request. None if the server does not report it."""
    finish_reason: str | None = None
    status: Status = "unfinished"
    kind: str = ""
    """Kind of error. ``kind`` and ``message`` are empty unless the request failed."""
    message: str = ""

    @property
    def output_tokens(self) -> int:
        return sum(self.counts) if self.completion_tokens is None else self.completion_tokens

    @property
    def counted(self) -> bool:
        """Whether the client knows the number of tokens in each event, because every event has one token.

        The end-of-sequence token has no event, so the server may report one token more than there are events.
        """
        consistent = self.completion_tokens is not None and 0 <= self.completion_tokens - sum(self.counts) <= 1
        return consistent and (self.came_whole or max(self.counts, default=1) == 1)

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
        """Whether all tokens of the answer came in one event, as from a static batch, so that the times of single
        tokens are unknown."""
        return self.output_tokens > 1 and len(self.times) == 1

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first token. None if the answer has one token or came in one event."""
        if self.output_tokens < 2 or self.came_whole:
            return None
        return (self.end - self.times[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between consecutive events with tokens: one gap per event, even if an event has several tokens.

        This is the convention of ``vllm bench serve``. Empty if all tokens came in one event.
        """
        return [] if self.came_whole else [now - before for before, now in itertools.pairwise(self.times)]

    def fail(self, kind: str, message: str) -> None:
        """Record that the request failed, with the kind of error and its message."""
        self.status, self.kind, self.message = "failed", kind, _CONTROL.sub(" ", message)[:_MAX_MESSAGE].strip()


Progress = Callable[[int, LoadOutcome], None]
"""Function that is called after each request, with the number of requests in flight and the outcome of the request."""

Watch = Callable[[str, int], contextlib.AbstractContextManager[Progress]]
"""Function that is called at the start of each run, with a name and the number of requests."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeRun:
    """Result of sending a :class:`Load`."""

    server: Target
    load: Load
    outcomes: Sequence[LoadOutcome]
    """Outcomes in the order of the requests. If the run was interrupted, requests that were not due are missing."""
    date: datetime.datetime
    begin: float
    """Start of the run in seconds, on the same clock as the outcomes."""
    seconds: float
    """Time in seconds from the start until the last request ended."""
    cpu_share: float | None
    """Fraction of one processor that the client used. None if client and engine run in the same process."""
    interrupted: bool
    busy: float = 0.0
    """Share of this machine that other programs used: during the run if the engine is in this process, otherwise just
    before it, and only in a comparison of servers."""
    collective_share: float | None = None
    """Share of the time of the server's last steps in which the processes of its model waited for each other, of the
    replica in which they waited longest. None for a model on one process, and if the server does not report it."""


def fit(requests: Sequence[TracedRequest], max_tokens: int | None) -> tuple[list[TracedRequest], int]:
    """Shorten requests to at most ``max_tokens`` for prompt and answer together.

    The answer gets at most half of ``max_tokens``, and the prompt gets the rest. Returns (requests, number of shortened
    requests). Raises ConfigError if ``max_tokens`` is below 2.
    """
    if max_tokens is not None and max_tokens < 2:
        raise ConfigError(
            f"requests need room for 2 tokens, but there is room for {max_tokens}; raise kv_cache_memory_bytes"
        )
    fitting = []
    for request in requests:
        if max_tokens is not None and request.prompt_tokens + request.output_tokens > max_tokens:
            output = min(request.output_tokens, max_tokens // 2)
            prompt = min(request.prompt_tokens, max_tokens - output)
            blocks = -(-prompt // request.prefix_block)
            request = dataclasses.replace(
                request, prompt_tokens=prompt, output_tokens=output, prefix_ids=request.prefix_ids[:blocks]
            )
        fitting.append(request)
    return fitting, sum(one is not other for one, other in zip(requests, fitting, strict=True))


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Context in which the garbage collector ignores all existing objects, so that its scans do not disturb timings."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
