"""What a caller may ask of one request. Names and defaults are vLLM's."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from chairlift.errors import RequestError
from chairlift.structured_outputs import CANNOT_BE_FOLLOWED, StructuredOutputsParams
from chairlift.thinking import ThinkingBudget

__all__ = ["SHAPED_REASONS", "SamplingLimits", "SamplingParams", "is_of_the_caller"]

SHAPED_REASONS: Final = (
    "no token is left to choose from: allowed_token_ids, bad_words, logit_bias, min_tokens or the grammar exclude every"
    " one; relax one of them",
    "the logits overflow after penalties and temperature; use a higher repetition_penalty or temperature",
)
"""Errors of answers for which these parameters are at fault together, and not the model."""
_INT32_MAX = 2**31 - 1


def is_of_the_caller(reason: str | None) -> bool:
    """Whether the error with which an answer ended is the fault of its parameters, and not of the model or engine."""
    return reason is not None and (reason in SHAPED_REASONS or reason.startswith(CANNOT_BE_FOLLOWED))


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Upper bounds on what one request may ask; every front end uses the same table."""

    max_n: int = 16
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_length: int = 256
    max_logit_bias: int = 300
    max_token_id_list: int = 4096
    max_bad_words: int = 128
    max_bad_word_chars: int = 8192
    """Largest number of characters of all bad words together."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop.

    Raises :class:`~chairlift.errors.RequestError` on construction when a value is of the wrong type or out of range.
    Checks that need the model (token ids below the vocabulary size, room in the context) happen at the door.
    """

    n: int = 1
    """How many answers to sample for the prompt (1..16). Each gets its own noise, also under one seed."""
    temperature: float = 1.0
    """0 means greedy (highest logit, lowest id on a tie); above 0 divides the logits (up to 100)."""
    top_k: int = 0
    """Keep only the k highest logits; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this (0..1); 0 keeps the most likely token."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the best token's probability (0..1)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated (-2..2)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per time it was generated (-2..2)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (0 < r <= 10; CTRL, 2019)."""
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    """Added to the logits of these token ids, before everything else."""
    seed: int | None = None
    """Same seed, same prompt, same text, whatever else is in the batch. None (or vLLM's -1) draws one at the door."""
    max_tokens: int | None = 16
    """Generate at most this many tokens; None means as many as fit. 0 scores the prompt, which may then be as long as
    the model takes, and goes with :attr:`prompt_logprobs`."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are masked until this many were generated; stop strings wait as well."""
    stop: str | Sequence[str] | None = None
    """Stop when the text contains one of these strings. One that spells a special token matches that token, also where
    :attr:`skip_special_tokens` leaves it out of the text."""
    stop_token_ids: Sequence[int] | None = None
    """Stop when one of these tokens is generated."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""
    bad_words: Sequence[str] | None = None
    """Strings that must not be generated (their last token is masked when the ones before it stand)."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these token ids may be generated."""
    include_stop_str_in_output: bool = False
    """Leave the stop string in the text instead of cutting before it."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Report this many most likely tokens per generated token, and the chosen one (of the raw logits)."""
    prompt_logprobs: int | None = None
    """The same for every prompt token."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the answer is held to: a JSON schema, a pattern, a choice, a grammar or structural tags. It ends where
    nothing may follow. Not with :attr:`min_tokens` and :attr:`ignore_eos`."""
    prediction: str | Sequence[int] | None = None
    """A text, or its token ids, that the answer is expected to repeat in large part: the file that is being edited. The
    answer is the same without, and where the text is right it comes sooner (docs/speculation.md)."""
    thinking: ThinkingBudget | None = None
    """How many tokens the model may reason, and by which tokens its reasoning is known."""
    priority: int | None = None
    """Lower goes first, where the scheduling policy looks at it. None: that of its class of service."""
    service_tier: str | None = None
    """Class of service: auto, default, flex, priority, or another that the engine was given."""
    ttft_ms: float | None = None
    """The first token is due this long after arrival."""
    tpot_ms: float | None = None
    """Longest time per token after the first."""
    deadline_ms: float | None = None
    """The whole answer is due this long after arrival."""

    def __post_init__(self) -> None:
        limits = SamplingLimits()
        _integer("n", self.n, 1, limits.max_n)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, _INT32_MAX)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, above=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
            _set(self, "seed", None if self.seed == -1 else self.seed)
        if self.max_tokens is not None:
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise RequestError("max_tokens is 0, which only scores a prompt; give prompt_logprobs, or at least 1")
            _integer("max_tokens", self.max_tokens, 0, _INT32_MAX)
        _integer("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}; lower min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, limits.max_logprobs)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{name} must be true or false, got {value!r}")
        if self.priority is not None:
            _integer("priority", self.priority, -(2**31), _INT32_MAX)
        if self.service_tier is not None and not isinstance(self.service_tier, str):
            raise RequestError(f"service_tier must be text, got {self.service_tier!r}")
        for name in ("ttft_ms", "tpot_ms", "deadline_ms"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), 0.0, 1e9, above=True)
        self._normalise(limits)
        if self.thinking is not None:
            _set(self, "thinking", ThinkingBudget.of(self.thinking))
        if self.structured_outputs is not None:
            _set(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
            for name in ("min_tokens", "ignore_eos"):
                if getattr(self, name):
                    raise RequestError(
                        f"{name} is {getattr(self, name)!r}, but with structured_outputs an answer ends where its"
                        " grammar says; leave one of them out"
                    )

    def _normalise(self, limits: SamplingLimits) -> None:
        """Turn the list-like fields into tuples, so that a shared SamplingParams can never change under a request. The
        door copies ``logit_bias``, which has no immutable form that can be pickled."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _set(self, "stop", _strings("stop", stop, limits.max_stop_strings, limits.max_stop_length))
        _set(self, "bad_words", _strings("bad_words", self.bad_words, limits.max_bad_words, limits.max_stop_length))
        if (total := sum(map(len, self.bad_words or ()))) > limits.max_bad_word_chars:
            most = limits.max_bad_word_chars
            raise RequestError(
                f"bad_words has {total:,} characters, and {most:,} are allowed; give fewer or shorter ones"
            )
        _set(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, limits.max_token_id_list))
        allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, _INT32_MAX)
        if allowed == () and self.allowed_token_ids is not None:
            raise RequestError("allowed_token_ids is empty, so no token could be generated; leave it out or add ids")
        _set(self, "allowed_token_ids", allowed or None)
        _set(self, "prediction", _prediction(self.prediction))
        if self.logit_bias is not None:
            _set(self, "logit_bias", _logit_bias(self.logit_bias, limits.max_logit_bias))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Build from keywords, naming any that is unknown together with the nearest known one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise RequestError(f"unknown sampling parameter {name!r}{hint}")
        return cls(**fields)

    @property
    def greedy(self) -> bool:
        """Whether no noise is added: top_p 0 keeps one token, and temperatures below 1e-5 are numerically the arg
        max."""
        return self.temperature < 1e-5 or self.top_p == 0


def _set(params: SamplingParams, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {value}")


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, got {value!r}")
    if not low <= value <= high or (above and value == low):
        bound = f"above {low}" if above else f"at least {low}"
        raise RequestError(f"{name} must be {bound} and at most {high}, got {value}")


def _strings(name: str, value: Any, most: int, length: int) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of strings, got {value!r}")
    if len(value) > most:
        raise RequestError(f"{name} takes at most {most} strings, got {len(value)}")
    for item in value:
        if not isinstance(item, str) or not 1 <= len(item) <= length:
            raise RequestError(f"each string in {name} must have 1 to {length} characters, got {str(item)[:40]!r}")
        if any("\ud800" <= char <= "\udfff" for char in item):
            raise RequestError(f"{name} has half a surrogate pair in {item[:40]!r}, which no text holds; repair it")
    return tuple(value)


def _token_ids(name: str, value: Any, most: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of token ids, got {value!r}")
    if len(value) > most:
        raise RequestError(f"{name} takes at most {most} ids, got {len(value)}")
    if not (value and set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= _INT32_MAX):
        for item in value:
            _integer(f"each id in {name}", item, 0, _INT32_MAX)
    return tuple(value)


def _prediction(value: Any) -> str | tuple[int, ...] | None:
    """A text may be as long as the model takes, which the door knows."""
    if not isinstance(value, str):
        return _token_ids("prediction", value, _INT32_MAX) or None
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise RequestError("prediction has half a surrogate pair, which no text holds; repair it")
    return value or None


def _logit_bias(value: Any, most: int) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {value!r}")
    if len(value) > most:
        raise RequestError(f"logit_bias takes at most {most} entries, got {len(value)}")
    out: dict[int, float] = {}
    for key, bias in value.items():
        if isinstance(key, str) and not re.fullmatch("0|[1-9][0-9]{0,9}", key):
            raise RequestError(
                f"logit_bias has the key {key[:40]!r}, but keys are token ids written as plain decimal numbers, such as"
                " '50'; write it so"
            )
        token_id = int(key) if isinstance(key, str) else key
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= _INT32_MAX:
            raise RequestError(f"logit_bias must have token ids from 0 to {_INT32_MAX} as keys, got {key!r:.40}")
        if token_id in out:
            raise RequestError(f"logit_bias has token id {token_id} twice, as text and as a number; leave one out")
        _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        out[token_id] = float(bias)
    return out
