"""Parameters of one request. Names and defaults are vLLM's.

A parameter is declared once, as a field of :class:`SamplingParams` with a :class:`Parameter`. The checks, the fields of
all HTTP endpoints, the command-line flags, the defaults from a model's files, the rows of the CPU kernels, the noise of
HashLM and the table in ``docs/server.md`` follow from the declaration. A new one that changes logits needs, in
addition, its arithmetic: ``executor/sampling`` defines it, and ``csrc/cpu`` and ``kernels/triton`` compute the same.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from chairlift.base.structured_outputs import CANNOT_BE_FOLLOWED, StructuredOutputsParams
from chairlift.base.thinking import ThinkingBudget
from chairlift.errors import RequestError

__all__ = [
    "PARAMETERS",
    "SHAPED_REASONS",
    "Parameter",
    "SamplingLimits",
    "SamplingParams",
    "is_of_the_caller",
    "is_parameter",
]

SHAPED_REASONS: Final = (
    "no token is left to choose from: allowed_token_ids, bad_words, logit_bias, min_tokens or the grammar exclude every"
    " one; relax one of them",
    "the logits overflow after penalties and temperature; use a higher repetition_penalty or temperature",
)
"""Error messages of requests that failed because of their sampling parameters, not because of the model."""
_OTHERWISE: Final = {
    "best_of": "ask for n answers with logprobs, and keep those with the highest cumulative_logprob",
    "early_stopping": "there is no beam search; leave it out",
    "guided_decoding": "its successor is structured_outputs",
    "length_penalty": "there is no beam search; leave it out",
    "truncate_prompt_tokens": "cut the prompt's token ids before they are sent",
    "use_beam_search": "there is no beam search; ask for n answers, and keep the one of the highest cumulative_logprob",
}
"""vLLM's parameter that is not offered -> what to do instead."""
_INT32_MAX = 2**31 - 1


def is_of_the_caller(reason: str | None) -> bool:
    """Whether a request failed because of its own parameters, not because of the model or engine."""
    return reason is not None and (reason in SHAPED_REASONS or reason.startswith(CANNOT_BE_FOLLOWED))


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Upper bounds on the parameters of one request, the same for every front end."""

    max_n: int = 16
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_length: int = 256
    max_logit_bias: int = 300
    max_token_id_list: int = 4096
    max_bad_words: int = 128
    max_bad_word_chars: int = 8192
    """Maximum number of characters of all bad words together."""


_LIMITS: Final = SamplingLimits()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Declaration of a sampling parameter: what every front end and every sampler needs to know of it."""

    kind: type[int] | type[float] | type[bool] | type[list[str]]
    low: float = 0
    """Lowest value of a number."""
    high: float = 0
    """Highest value of a number."""
    above: bool = False
    """Whether the value must be above ``low``."""
    optional: bool = False
    """Whether the value may be None."""
    shared: bool = False
    """Whether every endpoint that generates text takes the parameter, under this name."""
    flag: bool = False
    """Whether ``chairlift generate`` and ``chat`` have a flag for it."""
    in_files: bool = False
    """Whether a model's ``generation_config.json`` may set the default."""
    draws: bool = False
    """Whether it changes only how a token is drawn, so that greedy requests ignore it."""
    column: str = ""
    """Field of ``cl_sampling_row`` that holds the value for the CPU kernels; empty: none, or computed otherwise."""
    column_low: float = -math.inf
    """Lower values are stored in ``column`` as this value."""

    def check(self, name: str, value: Any) -> None:
        """Raise RequestError if the value has the wrong type or is out of range. The items of lists are not checked."""
        if (value is None and self.optional) or self.kind is list:
            return
        if self.kind is bool:
            if not isinstance(value, bool):
                raise RequestError(f"{name} must be true or false, got {value!r}")
        elif self.kind is int:
            _integer(name, value, self.low, self.high)
        else:
            _number(name, value, self.low, self.high, above=self.above)


def _declared(default: Any, kind: type[Any], low: float = 0, high: float = 0, **more: Any) -> Any:
    """Field of :class:`SamplingParams` with a :class:`Parameter`, of which ``more`` are fields."""
    parameter = Parameter(kind=kind, low=low, high=high, **{"optional": default is None, **more})
    return dataclasses.field(default=default, metadata={"parameter": parameter})


_DRAWS: Final = {"shared": True, "flag": True, "in_files": True, "draws": True}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    r"""How to turn logits into tokens, and when to stop.

    ::

        greedy = SamplingParams(temperature=0, max_tokens=32)
        varied = SamplingParams(n=4, temperature=0.8, top_p=0.95, seed=7, stop=["\n"])

    Raises :class:`~chairlift.errors.RequestError` on construction when a value has the wrong type or is out of range.
    Checks that need the model (token ids below the vocabulary size, room in the context) happen when the request is
    queued.
    """

    n: int = _declared(1, int, 1, _LIMITS.max_n, flag=True)
    """Number of answers to the prompt. Each has its own random noise, even with one seed."""
    temperature: float = _declared(1.0, float, 0.0, 100.0, column="temperature", **_DRAWS)
    """0 is greedy: the highest logit, and on a tie the lowest id. Otherwise the logits are divided by the
    temperature."""
    # The kernels read subnormal numbers as 0, so a row has no subnormal top_p.
    top_p: float = _declared(1.0, float, 0.0, 1.0, column="top_p", column_low=1e-300, **_DRAWS)
    """Keep the smallest set of most likely tokens whose total probability reaches this value; 0 keeps the most likely
    token."""
    seed: int | None = _declared(None, int, -(2**63), 2**63 - 1, shared=True, flag=True)
    """Seed of the random noise. The same seed and prompt give the same text, whatever else is in the batch. None (or
    vLLM's -1) draws a random seed."""
    presence_penalty: float = _declared(0.0, float, -2.0, 2.0, shared=True, flag=True, column="presence")
    """Amount subtracted once from the logit of every token already generated."""
    frequency_penalty: float = _declared(0.0, float, -2.0, 2.0, shared=True, flag=True, column="frequency")
    """Amount subtracted from a token's logit for each time that the token was generated."""
    top_k: int = _declared(0, int, -1, _INT32_MAX, column="top_k", column_low=0, **_DRAWS)
    """Keep only the k highest logits; 0 or -1 keeps all."""
    min_p: float = _declared(0.0, float, 0.0, 1.0, column="min_p", **_DRAWS)
    """Keep tokens with at least this fraction of the most likely token's probability."""
    repetition_penalty: float = _declared(
        1.0, float, 0.0, 10.0, above=True, shared=True, flag=True, in_files=True, column="repetition"
    )
    """Divides positive logits, and multiplies negative logits, of tokens in the prompt or output (CTRL, 2019)."""
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    """Token id -> number added to its logit before all other changes."""
    max_tokens: int | None = _declared(16, int, 0, _INT32_MAX, optional=True, flag=True)
    """Maximum number of tokens to generate; None: as many as fit. 0 only scores the prompt: it needs
    :attr:`prompt_logprobs`, and the prompt may then be as long as the model allows."""
    min_tokens: int = _declared(0, int, 0, _INT32_MAX, flag=True)
    """Minimum number of tokens to generate. Before that, end-of-sequence and stop tokens are masked, and stop strings
    are ignored."""
    stop: str | Sequence[str] | None = _declared(None, list, flag=True)
    """Stop when the text contains one of these strings. A string that spells a special token matches that token, even
    when :attr:`skip_special_tokens` removes it from the text."""
    stop_token_ids: Sequence[int] | None = None
    """Stop when one of these tokens is generated."""
    ignore_eos: bool = _declared(False, bool, flag=True)
    """Continue after the model's end-of-sequence token."""
    bad_words: Sequence[str] | None = _declared(None, list, flag=True)
    """Strings that must not be generated: the last token of a string is masked when its other tokens were just
    generated."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these token ids may be generated."""
    include_stop_str_in_output: bool = _declared(False, bool, flag=True)
    """Keep the stop string in the text instead of cutting before it."""
    skip_special_tokens: bool = _declared(True, bool)
    """Leave special tokens out of the text."""
    logprobs: int | None = _declared(None, int, 0, _LIMITS.max_logprobs, flag=True)
    """Number of most likely tokens to report for each generated token, in addition to the generated token. Values come
    from the raw logits."""
    prompt_logprobs: int | None = _declared(None, int, 0, _LIMITS.max_logprobs)
    """Number of most likely tokens to report for each prompt token, in addition to that token. Values come from the raw
    logits."""
    structured_outputs: StructuredOutputsParams | None = None
    """Form of the answer: a JSON schema, a pattern, a choice, a grammar or structural tags. The answer ends when the
    form is complete. :attr:`min_tokens` and :attr:`ignore_eos` cannot be set together with it."""
    prediction: str | Sequence[int] | None = None
    """Text, or its token ids, that the answer is expected to repeat in large part, such as the file to edit. It does
    not change the answer; the answer is generated faster where the text is right (docs/speculation.md)."""
    thinking: ThinkingBudget | None = None
    """Limit of reasoning tokens, and the tokens that mark reasoning."""
    priority: int | None = _declared(None, int, -(2**31), _INT32_MAX)
    """Lower values are served first, if the scheduling policy uses priorities. None: the priority of the class of
    service."""
    service_tier: str | None = None
    """Class of service: auto, default, flex, priority, or another class of the engine."""
    ttft_ms: float | None = _declared(None, float, 0.0, 1e9, above=True)
    """Milliseconds from arrival until the first token is due."""
    tpot_ms: float | None = _declared(None, float, 0.0, 1e9, above=True)
    """Maximum milliseconds per token after the first token."""
    deadline_ms: float | None = _declared(None, float, 0.0, 1e9, above=True)
    """Milliseconds from arrival until the whole answer is due."""

    detokenize: dataclasses.InitVar[bool] = True
    """vLLM's parameter; accepted and ignored, because text is made when the caller reads it."""
    logits_processors: dataclasses.InitVar[Sequence[Any] | None] = None
    """vLLM's parameter; only None or an empty list is accepted."""

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        """Raise RequestError for unknown keywords. Python's own TypeError would come later, without a hint."""
        if not args:
            _check_names(cls, fields)
        return object.__new__(cls)  # super() would mean the class before it got its slots

    def __post_init__(self, detokenize: Any, logits_processors: Any) -> None:
        if not isinstance(detokenize, bool):
            raise RequestError(f"detokenize must be true or false, got {detokenize!r}")
        if logits_processors:
            raise RequestError(
                "logits_processors are functions, and none are called here; use logit_bias, bad_words,"
                " allowed_token_ids or structured_outputs"
            )
        for name, parameter in PARAMETERS.items():
            parameter.check(name, getattr(self, name))
        if self.seed == -1:
            _set(self, "seed", None)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError("max_tokens is 0, which only scores a prompt; give prompt_logprobs, or at least 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}; lower min_tokens")
        if self.service_tier is not None and not isinstance(self.service_tier, str):
            raise RequestError(f"service_tier must be text, got {self.service_tier!r}")
        self._normalise(_LIMITS)
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
        """Turn the list-like fields into tuples, so that a caller who shares one SamplingParams cannot change a queued
        request. The engine copies ``logit_bias``, because an immutable mapping cannot be pickled."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _set(self, "stop", _strings("stop", stop, limits.max_stop_strings, limits.max_stop_length))
        _set(self, "bad_words", _strings("bad_words", self.bad_words, limits.max_bad_words, limits.max_stop_length))
        if (total := sum(map(len, self.bad_words or ()))) > limits.max_bad_word_chars:
            maximum = limits.max_bad_word_chars
            raise RequestError(
                f"bad_words has {total:,} characters, and {maximum:,} are allowed; give fewer or shorter ones"
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
        """Build from a mapping of names to values. An unknown name raises RequestError with the most similar known
        name."""
        _check_names(cls, fields)
        return cls(**fields)

    @property
    def greedy(self) -> bool:
        """Whether no noise is added. With top_p 0 only one token is left; temperatures below 1e-5 are numerically
        argmax."""
        return self.temperature < 1e-5 or self.top_p == 0


PARAMETERS: Final[Mapping[str, Parameter]] = {
    field.name: field.metadata["parameter"]
    for field in dataclasses.fields(SamplingParams)
    if "parameter" in field.metadata
}
"""Name -> declaration of each parameter that is a number, a switch or a list of texts."""


def is_parameter(name: str) -> bool:
    """Whether a name is a sampling parameter, here or in vLLM."""
    return name in SamplingParams.__dataclass_fields__ or name in _OTHERWISE


def _check_names(cls: type[SamplingParams], fields: Mapping[str, Any]) -> None:
    known = cls.__dataclass_fields__  # the InitVar fields are included
    for name in fields:
        if name in _OTHERWISE:
            raise RequestError(f"sampling parameter {name!r} is not offered; {_OTHERWISE[name]}")
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise RequestError(f"unknown sampling parameter {name!r}{hint}")


def _set(params: SamplingParams, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)


def _integer(name: str, value: Any, low: float, high: float) -> None:
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


def _strings(name: str, value: Any, limit: int, length: int) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of strings, got {value!r}")
    if len(value) > limit:
        raise RequestError(f"{name} takes at most {limit} strings, got {len(value)}")
    for item in value:
        if not isinstance(item, str) or not 1 <= len(item) <= length:
            raise RequestError(f"each string in {name} must have 1 to {length} characters, got {str(item)[:40]!r}")
        if any("\ud800" <= char <= "\udfff" for char in item):
            raise RequestError(f"{name} has half a surrogate pair in {item[:40]!r}, which no text holds; repair it")
    return tuple(value)


def _token_ids(name: str, value: Any, limit: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of token ids, got {value!r}")
    if len(value) > limit:
        raise RequestError(f"{name} takes at most {limit} ids, got {len(value)}")
    if not (value and set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= _INT32_MAX):
        for item in value:
            _integer(f"each id in {name}", item, 0, _INT32_MAX)
    return tuple(value)


def _prediction(value: Any) -> str | tuple[int, ...] | None:
    """Check a prediction. Its length is checked later, because the limit depends on the model."""
    if not isinstance(value, str):
        return _token_ids("prediction", value, _INT32_MAX) or None
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise RequestError("prediction has half a surrogate pair, which no text holds; repair it")
    return value or None


def _logit_bias(value: Any, limit: int) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {value!r}")
    if len(value) > limit:
        raise RequestError(f"logit_bias takes at most {limit} entries, got {len(value)}")
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
