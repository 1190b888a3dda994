"""Requests with their times of arrival: read from a file, drawn, or written.

Files are JSON lines in Mooncake's format (``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``) with
fields of our own beside them, or BurstGPT's CSV. A trace has lengths, not texts; where it says which blocks of prompts
are equal (``hash_ids``), the prompts made from it are equal there, so that prefix caching does what it would have done.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from chairlift.errors import ConfigError
from chairlift.workload.arrivals import AllAtOnce, Arrivals
from chairlift.workload.lengths import LogNormal

__all__ = [
    "PREFIX_BLOCK",
    "WORKLOADS",
    "LengthMix",
    "TracedRequest",
    "draw_trace",
    "prompt_token_ids",
    "read_trace",
    "write_trace",
]

PREFIX_BLOCK: Final = 512
"""Tokens that one hash id stands for, as in Mooncake's traces."""

_MOST_TOKENS: Final = 1 << 24
_FIRST_ID: Final = 10
"""Smallest token id of a prompt: those below are special tokens in most vocabularies."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request of a trace. Raises ConfigError when a value is out of range."""

    arrival: float
    """Seconds from the start of the trace."""
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    """Content of the prompt's first blocks of 512 tokens: prompts with the same ids begin with the same tokens."""
    tenant: str = ""
    priority: int = 0
    """Lower goes first."""
    service_tier: str = ""
    ttft_ms: float | None = None
    """Time to the first token that was promised, in ms. None: nothing was. The same for the next two."""
    tpot_ms: float | None = None
    """Time per output token after the first."""
    deadline_ms: float | None = None
    """Time from arrival to the end."""

    def __post_init__(self) -> None:
        _check("timestamp", self.arrival, (int, float), 0, 1e12)
        _check("input_length", self.prompt_tokens, (int,), 1, _MOST_TOKENS)
        _check("output_length", self.output_tokens, (int,), 1, _MOST_TOKENS)
        _check("priority", self.priority, (int,), -(2**31), 2**31)
        for number in self.prefix_ids:
            _check("a hash id", number, (int,), 0, 2**62)
        for name in ("ttft_ms", "tpot_ms", "deadline_ms"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), (int, float), 0, 1e12)
        for name in ("tenant", "service_tier"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be text, got {getattr(self, name)!r:.40}")
        blocks = -(-self.prompt_tokens // PREFIX_BLOCK)
        if len(self.prefix_ids) > blocks:
            raise ConfigError(
                f"input_length is {self.prompt_tokens}, which is {blocks} blocks of {PREFIX_BLOCK}, but there are"
                f" {len(self.prefix_ids)} hash_ids"
            )


def prompt_token_ids(request: TracedRequest, index: int, vocab_size: int) -> list[int]:
    """A prompt of the request's length: equal to another's as far as their prefix ids are equal, then its own.

    ``index`` is the request's place in the trace. A block repeats two ids that spell its number in base ``vocab_size``.
    """
    prompt: list[int] = []
    for number in request.prefix_ids:
        prompt += _block(number, vocab_size) * (PREFIX_BLOCK // 2)
    own = _block(-1 - index, vocab_size)  # negative: no prefix id spells it
    return (prompt + own * ((max(0, request.prompt_tokens - len(prompt)) + 1) // 2))[: request.prompt_tokens]


def _block(number: int, vocab_size: int) -> list[int]:
    base = vocab_size - _FIRST_ID
    if base < 2:
        raise ConfigError(f"prompts are made of ids from {_FIRST_ID} on, but vocab_size is {vocab_size}")
    return [_FIRST_ID + number % base, _FIRST_ID + number // base % base]


# --- drawn -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class LengthMix:
    """What a kind of traffic looks like."""

    description: str
    prompt: LogNormal
    output: LogNormal
    shared_blocks: int = 0
    """Blocks of 512 tokens that all prompts begin with, in addition to their own length."""


WORKLOADS: Final = {
    "chat": LengthMix(
        "short questions, answers of a few sentences", LogNormal(4.6, 0.8, 8, 1024), LogNormal(4.2, 0.9, 4, 512)
    ),
    "assistant": LengthMix(
        "chat behind a system prompt of 1,024 tokens that all share",
        LogNormal(4.6, 0.8, 8, 1024),
        LogNormal(4.2, 0.9, 4, 512),
        shared_blocks=2,
    ),
    "summarize": LengthMix(
        "long documents, short answers", LogNormal(7.3, 0.6, 128, 8192), LogNormal(4.8, 0.5, 16, 512)
    ),
    "write": LengthMix("short prompts, long answers", LogNormal(4.0, 0.7, 8, 512), LogNormal(6.2, 0.6, 32, 2048)),
}
"""Kinds of traffic by name: lengths in tokens, log-normal and clipped."""


def draw_trace(
    workload: str = "chat", arrivals: Arrivals | None = None, count: int = 64, seed: int = 0
) -> list[TracedRequest]:
    """``count`` requests of a kind of traffic (:data:`WORKLOADS`). Raises ConfigError for an unknown one."""
    if workload not in WORKLOADS:
        raise ConfigError(f"workload must be one of {', '.join(WORKLOADS)}; got {workload!r}")
    mix = WORKLOADS[workload]
    rng = np.random.default_rng(seed)
    prompts, outputs = mix.prompt.draw(rng, count), mix.output.draw(rng, count)
    shared = tuple(range(mix.shared_blocks))
    return [
        TracedRequest(
            arrival=time,
            prompt_tokens=len(shared) * PREFIX_BLOCK + prompt,
            output_tokens=output,
            prefix_ids=shared,
        )
        for time, prompt, output in zip((arrivals or AllAtOnce()).times(count, seed), prompts, outputs, strict=True)
    ]


# --- files -----------------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests of a ``.jsonl`` or ``.csv`` file, in order of arrival. Raises ConfigError that names the line.

    BurstGPT's requests without response tokens, which failed, are left out.
    """
    read = {".jsonl": _read_jsonl, ".json": _read_jsonl, ".csv": _read_csv}.get(path.suffix)
    if read is None:
        raise ConfigError(
            f"a trace is a .jsonl file in Mooncake's format or a .csv file in BurstGPT's, got {path.name}"
        )
    try:
        with path.open(encoding="utf-8", newline="") as file:
            requests = list(read(path, file))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    if not requests:
        raise ConfigError(f"the trace {path} has no requests")
    return sorted(requests, key=lambda request: request.arrival)


def write_trace(path: Path, requests: Sequence[TracedRequest]) -> None:
    """Write JSON lines that :func:`read_trace` reads; fields that say nothing are left out."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            fields: dict[str, Any] = {
                "timestamp": request.arrival * 1000,
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
            }
            more = {name: getattr(request, name) for name in _OWN_FIELDS} | {"hash_ids": list(request.prefix_ids)}
            file.write(json.dumps(fields | {name: value for name, value in more.items() if value}) + "\n")


_OWN_FIELDS: Final = ("tenant", "priority", "service_tier", "ttft_ms", "tpot_ms", "deadline_ms")


def _read_jsonl(path: Path, lines: Iterable[str]) -> Iterator[TracedRequest]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where} is not valid JSON") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{where} must be a JSON object, got {line.strip():.40}")
        hash_ids = fields.get("hash_ids", [])
        if not isinstance(hash_ids, list):
            raise ConfigError(f"{where}: hash_ids must be a list, got {hash_ids!r:.40}")
        own = {name: fields[name] for name in _OWN_FIELDS if fields.get(name) is not None}
        yield _request(where, fields, ("timestamp", "input_length", "output_length"), 0.001, tuple(hash_ids), own)


def _read_csv(path: Path, lines: Iterable[str]) -> Iterator[TracedRequest]:
    names = ("Timestamp", "Request tokens", "Response tokens")
    for row in (reader := csv.DictReader(lines)):
        where = f"line {reader.line_num} of {path}"
        fields: dict[str, Any] = {}
        for name in names:
            text = row.get(name)
            if text is None:
                raise ConfigError(f"{where} has no {name!r}; BurstGPT's columns are {', '.join(names)}")
            try:
                fields[name] = float(text) if name == "Timestamp" else int(text)
            except ValueError:
                raise ConfigError(f"{where}: {name} must be a number, got {text!r:.40}") from None
        if fields["Response tokens"]:
            yield _request(where, fields, names, 1.0, (), {})


def _request(
    where: str,
    fields: Mapping[str, Any],
    names: tuple[str, str, str],
    unit: float,
    prefix_ids: tuple[int, ...],
    own: dict[str, Any],
) -> TracedRequest:
    missing = [name for name in names if name not in fields]
    if missing:
        raise ConfigError(f"{where} has no {missing[0]!r}")
    time, prompt, output = (fields[name] for name in names)
    try:
        _check(names[0], time, (int, float), 0, 1e15)
        return TracedRequest(
            arrival=time * unit, prompt_tokens=prompt, output_tokens=output, prefix_ids=prefix_ids, **own
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check(name: str, value: Any, kinds: tuple[type, ...], low: float, high: float) -> None:
    if type(value) not in kinds or not low <= value <= high:  # also what is not a number: NaN compares as false
        kind = "a whole number" if kinds == (int,) else "a number"
        raise ConfigError(f"{name} must be {kind} from {low:,.0f} to {high:,.0f}, got {value!r:.40}")
