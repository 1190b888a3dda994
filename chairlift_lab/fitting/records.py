"""Reads the requests of a benchmark from the JSON of ``vllm bench serve --save-result --save-detailed``, of ``chairlift
bench serve --save-result``, and of SGLang's ``bench_serving --output-details`` with sending times.

All three have one list per field, with an entry per request: ``input_lens``, ``output_lens``, ``ttfts``, ``itls`` and
``start_times``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift_lab.fitting.run import MeasuredRequest, Run, number

__all__ = ["is_record", "read_record"]

_LISTS: Final = ("input_lens", "output_lens", "ttfts", "itls", "start_times")
_MOST_MERGED: Final = 0.02
"""Largest fraction of tokens that may share an event with an earlier token. A server merges events when its client
reads slowly."""
_MOST_FAILED: Final = 0.05
_MOST_TOKENS: Final = 1 << 24


def is_record(fields: object) -> bool:
    """Whether JSON data looks like a benchmark's record of requests, complete or not."""
    return isinstance(fields, dict) and ("input_lens" in fields or "ttfts" in fields or "total_input_tokens" in fields)


def read_record(name: str, fields: Mapping[str, Any], *, cache_is_off: bool) -> Run:
    """The run of a record. ``cache_is_off``: whether the engine found no prompt tokens in a prefix cache.

    Raises ConfigError for a record that lacks times, and for one whose steps cannot be recovered.
    """
    missing = [key for key in _LISTS if not isinstance(fields.get(key), list) or not fields[key]]
    if missing:
        raise ConfigError(
            f"{name} lacks {', '.join(missing)}; vllm bench serve writes them with --save-result --save-detailed,"
            " chairlift bench serve with --json"
        )
    sizes = {key: len(fields[key]) for key in _LISTS}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"{name}: lists of different lengths: {', '.join(f'{k} {v}' for k, v in sizes.items())}")
    own = fields.get("chairlift")
    _check_cache(name, own if isinstance(own, dict) else None, cache_is_off)
    requests = [each for each in _requests(name, fields) if each is not None]
    failed = sizes["ttfts"] - len(requests)
    if failed > _MOST_FAILED * sizes["ttfts"] or len(requests) < 2:
        raise ConfigError(
            f"{name}: {failed:,} of {sizes['ttfts']:,} requests have no answer, and the steps also served them; a fit"
            f" needs a run in which at most {_MOST_FAILED:.0%} fail"
        )
    requests = _from_zero(requests)
    notes = [f"{failed:,} of {sizes['ttfts']:,} requests have no answer, and are left out"] if failed else []
    notes += _check_events(name, requests)
    users = fields.get("max_concurrency")
    if users is not None and (type(users) is not int or users < 1):
        raise ConfigError(f"{name}: max_concurrency must be a whole number above 0 or null, got {users!r:.40}")
    rate = fields.get("request_rate")
    at_once = users is not None and rate in (None, "inf", float("inf"))
    return Run(
        name=name,
        source="request records",
        requests=requests,
        max_concurrency=users,
        all_at_once=at_once,
        notes=notes,
    )


def _check_cache(name: str, own: Mapping[str, Any] | None, cache_is_off: bool) -> None:
    cached = None if own is None else own.get("cached_tokens")
    if cached:
        raise ConfigError(
            f"{name}: {cached:,} prompt tokens came from the prefix cache, and the record does not say of which"
            " requests; run the benchmark with prefix caching off, or with prompts that share nothing"
        )
    if cached is None and not cache_is_off:
        raise ConfigError(
            f"{name} does not say how many prompt tokens came from the prefix cache. If there were none, because the"
            " engine had no such cache or all prompts were different, say so with --no-enable-prefix-caching"
        )


def _requests(name: str, fields: Mapping[str, Any]) -> Iterator[MeasuredRequest | None]:
    """The requests in the order of the record. None for a request without an answer."""
    for at, (prompt, output, ttft, gaps, start) in enumerate(zip(*(fields[key] for key in _LISTS), strict=True)):
        where = f"{name}: request {at + 1}"
        if not isinstance(gaps, list):
            raise ConfigError(f"{where}: itls must be a list of numbers, got {gaps!r:.40}")
        first = number(ttft, f"{where}: ttft")
        sent = number(start, f"{where}: start time")
        prompt_tokens = int(number(prompt, f"{where}: input length", _MOST_TOKENS))
        output_tokens = int(number(output, f"{where}: output length", _MOST_TOKENS))
        if not output_tokens or not prompt_tokens or not first:
            yield None
            continue
        steps = [number(gap, f"{where}: inter-token latency") for gap in gaps]
        times = tuple(itertools.accumulate(steps, initial=sent + first))
        yield MeasuredRequest(sent, prompt_tokens, output_tokens, times)


def _from_zero(requests: list[MeasuredRequest]) -> list[MeasuredRequest]:
    """The requests in the order of sending, with the first one sent at 0."""
    first = min(request.start for request in requests)
    moved = [
        MeasuredRequest(
            request.start - first,
            request.prompt_tokens,
            request.output_tokens,
            tuple(time - first for time in request.times),
        )
        for request in requests
    ]
    return sorted(moved, key=lambda request: request.start)


def _check_events(name: str, requests: list[MeasuredRequest]) -> list[str]:
    """Notes about tokens without an event of their own. Raises ConfigError if there are many."""
    tokens = sum(request.output_tokens for request in requests)
    # The last token may be an end-of-sequence token, which has no event.
    merged = sum(max(0, request.output_tokens - 1 - len(request.times)) for request in requests)
    more = sum(len(request.times) > request.output_tokens for request in requests)
    if more > _MOST_MERGED * len(requests):
        raise ConfigError(f"{name}: {more:,} answers have more events than tokens, so events are not tokens")
    if merged > _MOST_MERGED * tokens:
        raise ConfigError(
            f"{name}: {merged:,} of {tokens:,} tokens have no event of their own, so several tokens come in one event"
            " (speculation, a stream interval, or a slow client) and the times of steps are unknown; a fit needs one"
            " token per event"
        )
    return [f"{merged:,} of {tokens:,} tokens share an event with an earlier token"] if merged else []


def parse_json(text: str) -> object:
    """JSON data of a text, or None. Of several lines, as SGLang's benchmark appends them, the last one counts."""
    for candidate in (text, text.strip().rpartition("\n")[2]):
        try:
            found: object = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return found
    return None
