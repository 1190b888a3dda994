"""Reads the steps of vLLM (V1) from the lines that ``--enable-logging-iteration-details`` prints.

A line has the numbers of requests and tokens in prefill and decode, the milliseconds of the step, and in newer versions
the used fraction of the KV cache. Multiplied by the size of the cache, which a line at the start has, this fraction is
the number of positions that the rows hold.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Final

from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.errors import ConfigError
from chairlift_lab.fitting.run import Run, TimedStep

__all__ = ["is_vllm_log", "read_vllm_log"]

_STEP: Final = re.compile(
    r"Iteration\((?P<index>\d{1,12})\): (?P<prompts>\d{1,9}) context requests, (?P<prompt_tokens>\d{1,9}) context"
    r" tokens, (?P<rows>\d{1,9}) generation requests, (?P<row_tokens>\d{1,9}) generation tokens,"
    r" iteration elapsed time: (?P<ms>\d{1,9}(?:\.\d{1,9})?) ms(?P<dummy> \(dummy\))?"
    r"(?:, \w{1,9} KV cache usage: (?P<usage>\d{1,3}(?:\.\d{1,3})?)%)?"
)
_CACHE: Final = re.compile(r"KV cache size: (?P<tokens>[\d,]{1,20}) tokens")
_SECOND: Final = re.compile(r"\b(\d\d):(\d\d):(\d\d)\b")
_LEAST_COVERED: Final = 0.5
"""Smallest fraction of the time of a busy log that its steps must cover."""
_LEAST_SECONDS: Final = 5.0
_NO_POSITIONS: Final = "the log has neither the size of the KV cache nor its usage; the price of a row contains it"


def is_vllm_log(text: str) -> bool:
    """Whether a text has lines of vLLM about its iterations."""
    return _STEP.search(text) is not None


def read_vllm_log(name: str, text: str) -> Run:
    """The steps of a log. Raises ConfigError for a log whose times or tokens do not describe steps."""
    lines = text.splitlines()
    found = [(line, match) for line in lines if (match := _STEP.search(line)) and not match["dummy"]]
    drafts = sum(int(match["row_tokens"]) > int(match["rows"]) for _, match in found)
    if drafts:
        raise ConfigError(
            f"{name}: {drafts:,} of {len(found):,} steps have more generation tokens than requests, so the engine"
            " speculates; a fit needs a run without speculative decoding"
        )
    caches = [int(match["tokens"].replace(",", "")) for line in lines if (match := _CACHE.search(line))]
    positions = bool(caches) and all(match["usage"] is not None for _, match in found)
    steps = [_step(match, caches[-1] if positions else 0) for _, match in found]
    _check_times(name, [line for line, _ in found], steps)
    unknown = {"pair": "the log does not say where a chunk of a prompt begins"}
    if not positions:
        unknown["context"] = _NO_POSITIONS
    return Run(name=name, source="iteration log of vLLM", steps=steps, unknown=unknown)


def _step(match: re.Match[str], cache_tokens: int) -> TimedStep:
    rows, prompts = int(match["rows"]), int(match["prompts"])
    tokens = int(match["prompt_tokens"])
    held = float(match["usage"] or 0) / 100 * cache_tokens
    # The cache also holds the prompts that the step computes.
    context = max(0, round(held) - tokens) if rows else 0
    pairs = tokens * (tokens / prompts + 1) / 2 if prompts else 0.0
    return StepFeatures(rows, context, tokens, pairs), float(match["ms"]) / 1000


def _check_times(name: str, lines: Sequence[str], steps: Sequence[TimedStep]) -> None:
    """Raise ConfigError if the steps cover only a small part of the time between the first and the last line.

    With asynchronous scheduling, and with an executor in the engine's own process, vLLM's time of an iteration is only
    the wait for a result that is there already.
    """
    clock = [_seconds(line) for line in lines]
    known = [second for second in clock if second is not None]
    if len(known) != len(steps):
        return
    # Only pairs of lines that are at most a second apart: the engine was busy between them.
    busy = sum(
        step[1] for step, before, now in zip(steps[1:], known, known[1:], strict=False) if 0 <= now - before <= 1
    )
    passed = sum(now - before for before, now in itertools.pairwise(known) if 0 <= now - before <= 1)
    if passed >= _LEAST_SECONDS and busy < _LEAST_COVERED * passed:
        raise ConfigError(
            f"{name}: the iterations took {busy:.1f} s of {passed:.0f} s in which there was one each second, so their"
            " times are not those of whole steps. Start vLLM with --no-async-scheduling and, on a CPU,"
            " --distributed-executor-backend mp; or fit the request records of vllm bench serve --save-detailed"
        )


def _seconds(line: str) -> int | None:
    match = _SECOND.search(line)
    return None if match is None else 3600 * int(match[1]) + 60 * int(match[2]) + int(match[3])
