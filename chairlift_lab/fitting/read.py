"""Reads a file as a run, whatever its format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift_lab.fitting.records import is_record, parse_json, read_record
from chairlift_lab.fitting.run import Run
from chairlift_lab.fitting.sglang_log import is_sglang_log, read_sglang_log
from chairlift_lab.fitting.vllm_log import is_vllm_log, read_vllm_log
from chairlift_lab.replay.calibrate import read_steps

__all__ = ["read_runs"]

_MAX_BYTES: Final = 1 << 30
_KNOWN: Final = (
    "a benchmark's record of requests (vllm bench serve --save-result --save-detailed, chairlift bench serve"
    " --json), a log of vLLM with --enable-logging-iteration-details, a log of SGLang, or a step log"
    " (chairlift sim --save-steps, or /live/export of a server)"
)


def read_runs(path: Path, *, settings: Mapping[str, Any], cache_is_off: bool, steps_per_line: int = 40) -> list[Run]:
    """The runs of a file: one, or several for a record of ``chairlift bench serve`` with several rates.

    ``settings``: settings of the engine in this file that differ from those of other files. ``cache_is_off``: whether
    the engine found no prompt tokens in a prefix cache. ``steps_per_line``: SGLang's ``--decode-log-interval``. Raises
    ConfigError, which names the file, if it cannot be read or cannot be fitted.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_BYTES >> 30} GiB; cut out a part")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    name = path.name
    data = parse_json(text) if text.lstrip()[:1] == "{" else None
    records = _records(data)
    if not records and isinstance(data, dict) and "runs" in data:
        raise ConfigError(f"{path} has no runs of one server; fit the record of one server, without --compare")
    if records:
        runs = [
            read_record(name if len(records) == 1 else f"{name} {number}", record, cache_is_off=cache_is_off)
            for number, record in enumerate(records, 1)
        ]
    elif is_vllm_log(text):
        runs = [read_vllm_log(name, text)]
    elif is_sglang_log(text):
        runs = [read_sglang_log(name, text, steps_per_line)]
    elif text.lstrip()[:1] == "{":
        runs = [Run(name=name, source="step log", steps=read_steps(path))]
    else:
        raise ConfigError(f"{path} is none of these: {_KNOWN}")
    return [_with_settings(run, settings) for run in runs]


def _records(data: object) -> list[dict[str, Any]]:
    """Records of requests in JSON data: the data itself, or a list under a key."""
    if isinstance(data, dict) and is_record(data):
        return [data]
    found: list[dict[str, Any]] = []
    for value in data.values() if isinstance(data, dict) else ():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and is_record(item):
                found.append(item)
    return found


def _with_settings(run: Run, settings: Mapping[str, Any]) -> Run:
    return dataclasses.replace(run, settings=dict(settings)) if settings else run
