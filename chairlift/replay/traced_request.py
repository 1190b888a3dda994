"""One request of a trace: its lengths, times and tenant, never its text."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from chairlift.errors import ConfigError

__all__ = ["PREFIX_BLOCK", "TracedRequest", "check_number", "prompt_token_ids"]

PREFIX_BLOCK: Final = 512
"""Default number of tokens that one prefix id stands for, as in Mooncake's traces."""

_MOST_TOKENS: Final = 1 << 24
_MOST_ID: Final = 1 << 62
_FIRST_ID: Final = 10
"""Smallest token id of a prompt, because lower ones are special tokens in most vocabularies."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request of a trace. Raises ConfigError when a value is out of range."""

    arrival: float
    """Seconds from the start of the trace. A later turn of a chat is sent at this time, or when the turn before has
    been answered, whichever is later."""
    prompt_tokens: int
    """Tokens of the whole prompt, including earlier turns."""
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    """Ids of the prompt's first blocks of ``prefix_block`` tokens: prompts with the same ids and block size begin with
    the same tokens. The last block may reach beyond the prompt. Ids are small numbers, or hashes of up to 62 bits."""
    prefix_block: int = PREFIX_BLOCK
    """Number of tokens that one prefix id stands for."""
    session: str = ""
    """Chat to which this turn belongs; empty for a single request."""
    turn: int = 0
    """Number in the session, from 0. Turns of a session are sent one after another in this order. Numbers may be
    missing, since a trace may begin in the middle of a chat."""
    cancel_ms: float | None = None
    """Milliseconds after which the client leaves if the answer is not complete. None: it does not leave."""
    tenant: str = ""
    priority: int = 0
    """Lower goes first."""
    service_tier: str = ""
    ttft_ms: float | None = None
    """Promised time to the first token, in ms; None without a promise. The next two fields are also in ms or None."""
    tpot_ms: float | None = None
    """Promised time per output token after the first."""
    deadline_ms: float | None = None
    """Promised time from arrival to the end."""

    def __post_init__(self) -> None:
        check_number("timestamp", self.arrival, (int, float), 0, 1e12)
        check_number("input_length", self.prompt_tokens, (int,), 1, _MOST_TOKENS)
        check_number("output_length", self.output_tokens, (int,), 1, _MOST_TOKENS)
        check_number("priority", self.priority, (int,), -(2**31), 2**31)
        check_number("block_size", self.prefix_block, (int,), 16, 1 << 16)
        check_number("turn", self.turn, (int,), 0, 2**31)
        for number in self.prefix_ids:
            # a function call per number would double the time to read
            if type(number) is not int or not 0 <= number <= _MOST_ID:
                check_number("a hash id", number, (int,), 0, _MOST_ID)
        for name, limit in (
            ("ttft_ms", self.ttft_ms),
            ("tpot_ms", self.tpot_ms),
            ("deadline_ms", self.deadline_ms),
            ("cancel_ms", self.cancel_ms),
        ):
            if limit is not None:
                check_number(name, limit, (int, float), 0, 1e12)
        for name, text in (("tenant", self.tenant), ("service_tier", self.service_tier), ("session", self.session)):
            if not isinstance(text, str):
                raise ConfigError(f"{name} must be text, got {text!r:.40}")
        if self.turn and not self.session:
            raise ConfigError(f"turn is {self.turn}, but there is no session; name the chat that it is a turn of")
        blocks = -(-self.prompt_tokens // self.prefix_block)
        if len(self.prefix_ids) > blocks:
            raise ConfigError(
                f"input_length is {self.prompt_tokens}, which is {blocks} blocks of {self.prefix_block}, but there are"
                f" {len(self.prefix_ids)} hash_ids"
            )


def prompt_token_ids(request: TracedRequest, index: int, vocab_size: int) -> list[int]:
    """A prompt of the request's length. It equals another's as far as their prefix ids are equal, and then differs.

    ``index`` is the request's index in the trace. A block repeats the few ids that spell its number in base
    ``vocab_size - 10``, so the first tokens of two different blocks differ. Raises ConfigError when the vocabulary has
    fewer than two ids for prompts.
    """
    base, size = vocab_size - _FIRST_ID, request.prefix_block
    if base < 2:
        raise ConfigError(f"prompts are made of ids from {_FIRST_ID} on, but vocab_size is {vocab_size}")
    digits = 1
    while base**digits <= 2 * _MOST_ID:
        digits += 1

    def block(number: int, tokens: int) -> list[int]:
        spelled = []
        for _ in range(digits):
            spelled.append(_FIRST_ID + number % base)
            number //= base
        return (spelled * (tokens // digits + 1))[:tokens]

    prompt: list[int] = []
    for number in request.prefix_ids:
        prompt += block(number, size)
    own = block(-1 - index, max(0, request.prompt_tokens - len(prompt)))  # negative, so that it equals no prefix id
    return (prompt + own)[: request.prompt_tokens]


def check_number(name: str, value: Any, kinds: tuple[type, ...], low: float, high: float) -> None:
    if type(value) not in kinds or not low <= value <= high:  # also excludes NaN, which compares as false
        kind = "a whole number" if kinds == (int,) else "a number"
        raise ConfigError(f"{name} must be {kind} from {low:,.0f} to {high:,.0f}, got {value!r:.40}")
