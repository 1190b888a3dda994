"""A request of a trace: its lengths, times and tenant, but not its text."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from chairlift.errors import ConfigError

__all__ = ["PREFIX_BLOCK", "TracedRequest", "check_number", "prompt_token_ids"]

PREFIX_BLOCK: Final = 512
"""Default number of prompt tokens that one prefix id covers, as in Mooncake's traces."""

_MAX_TOKENS: Final = 1 << 24
_MAX_ID: Final = 1 << 62
_FIRST_ID: Final = 10
"""Smallest token id of a generated prompt. Lower ids are special tokens in most vocabularies."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """A request of a trace. Raises ConfigError when a value is out of range."""

    arrival: float
    """Time in seconds from the start of the trace. A later turn of a chat without ``gap_ms`` is sent at this time or
    when the previous turn has been answered, whichever is later."""
    prompt_tokens: int
    """Number of tokens of the whole prompt, including earlier turns."""
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    """Ids of the first blocks of the prompt; a block has ``prefix_block`` tokens. Prompts whose first ids are equal
    begin with equal tokens. The last block may reach beyond the prompt. Ids are numbers below 2**62, such as hashes."""
    prefix_block: int = PREFIX_BLOCK
    """Number of prompt tokens that one prefix id covers."""
    session: str = ""
    """Name of the chat that this turn belongs to. Empty for a single request."""
    turn: int = 0
    """Number of the turn in its chat, from 0. The turns of a chat are sent one after another in this order. Numbers can
    be missing, because a trace can begin in the middle of a chat."""
    gap_ms: float | None = None
    """Time in ms from the end of the previous turn of its chat until this turn is sent, while a tool runs or a user
    thinks. ``arrival`` then is when it was sent in the recorded system. None: it is sent at its arrival."""
    cancel_ms: float | None = None
    """Time in ms after which the client disconnects if the answer is not complete. None: it never disconnects."""
    tool: str = ""
    """Name of the tool that the client calls after this turn; several names are joined by `` + ``. Empty if it calls
    none."""
    predicted_tokens: int | None = None
    """Predicted number of tokens of the answer, for policies that use predictions. None: no prediction."""
    tenant: str = ""
    priority: int = 0
    """Priority of the request. A lower number is served first."""
    service_tier: str = ""
    ttft_ms: float | None = None
    """Target for the time to the first token, in ms. None: no target."""
    tpot_ms: float | None = None
    """Target for the time per output token after the first, in ms. None: no target."""
    deadline_ms: float | None = None
    """Target for the time from arrival to the end of the answer, in ms. None: no target."""

    def __post_init__(self) -> None:
        check_number("timestamp", self.arrival, (int, float), 0, 1e12)
        check_number("input_length", self.prompt_tokens, (int,), 1, _MAX_TOKENS)
        check_number("output_length", self.output_tokens, (int,), 1, _MAX_TOKENS)
        check_number("priority", self.priority, (int,), -(2**31), 2**31)
        check_number("block_size", self.prefix_block, (int,), 16, 1 << 16)
        check_number("turn", self.turn, (int,), 0, 2**31)
        for number in self.prefix_ids:
            # This test is inline, because a function call per id would double the time for reading a trace.
            if type(number) is not int or not 0 <= number <= _MAX_ID:
                check_number("a hash id", number, (int,), 0, _MAX_ID)
        for name, limit in (
            ("ttft_ms", self.ttft_ms),
            ("tpot_ms", self.tpot_ms),
            ("deadline_ms", self.deadline_ms),
            ("cancel_ms", self.cancel_ms),
            ("gap_ms", self.gap_ms),
        ):
            if limit is not None:
                check_number(name, limit, (int, float), 0, 1e12)
        if self.predicted_tokens is not None:
            check_number("predicted_tokens", self.predicted_tokens, (int,), 1, _MAX_TOKENS)
        for name in ("tenant", "service_tier", "session", "tool"):
            text = getattr(self, name)
            if not isinstance(text, str):
                raise ConfigError(f"{name} must be text, got {text!r:.40}")
        if self.turn and not self.session:
            raise ConfigError(f"turn is {self.turn}, but there is no session; name the chat that it is a turn of")
        if self.gap_ms is not None and not self.session:
            raise ConfigError(f"gap_ms is {self.gap_ms}, but there is no session; name the chat that it is a turn of")
        blocks = -(-self.prompt_tokens // self.prefix_block)
        if len(self.prefix_ids) > blocks:
            raise ConfigError(
                f"input_length is {self.prompt_tokens}, which is {blocks} blocks of {self.prefix_block}, but there are"
                f" {len(self.prefix_ids)} hash_ids"
            )


def prompt_token_ids(request: TracedRequest, index: int, vocab_size: int) -> list[int]:
    """Generate a prompt of the request's length. Two prompts are equal in the blocks in which their prefix ids are
    equal, and differ after these blocks.

    ``index`` is the index of the request in the trace. A block repeats a few token ids, which are the digits of its
    prefix id in base ``vocab_size - 10``, so different blocks have different first tokens. Raises ConfigError when the
    vocabulary has fewer than two ids for prompts.
    """
    base = vocab_size - _FIRST_ID
    size = request.prefix_block
    if base < 2:
        raise ConfigError(f"prompts are made of ids from {_FIRST_ID} on, but vocab_size is {vocab_size}")
    digits = 1
    while base**digits <= 2 * _MAX_ID:
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
    own = block(-1 - index, max(0, request.prompt_tokens - len(prompt)))  # a negative number is never a prefix id
    return (prompt + own)[: request.prompt_tokens]


def check_number(name: str, value: Any, kinds: tuple[type, ...], low: float, high: float) -> None:
    if type(value) not in kinds or not low <= value <= high:  # also excludes NaN, which compares as false
        kind = "a whole number" if kinds == (int,) else "a number"
        raise ConfigError(f"{name} must be {kind} from {low:,.0f} to {high:,.0f}, got {value!r:.40}")
