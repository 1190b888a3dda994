"""Lets one allocation after another fail in an engine that serves three requests. Run by test_allocations.py.

``python -m tests.e2e.allocation_sweep KERNELS LEAST PART FIRST SITES`` needs the library of failing_allocator.cpp in
LD_PRELOAD. While a request of the kind PART is served, at most SITES of the allocations of at least LEAST bytes fail,
from number FIRST on, each in a round of its own. The first line of the output is a JSON object with the number of
allocations (``seen``) and the distance between those that fail (``step``). Two objects follow per round:
``{"begins": N}`` before the allocation N fails, and ``{"ended": N, ...}`` with the fate of each request.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import json
import logging
import sys
from typing import Any

from chairlift import LLM, RequestError, SamplingParams
from chairlift.engine.engine import Engine

PROMPT = [5 + number % 200 for number in range(300)]
NEIGHBOURS = ("before", "beside")
CALM = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
_WILD = SamplingParams(max_tokens=8, temperature=0.7, seed=1, ignore_eos=True)
PARTS = {
    "plain": _WILD,
    "penalties": dataclasses.replace(_WILD, n=2, repetition_penalty=1.2, bad_words=["the", "a"]),
    "logprobs": dataclasses.replace(_WILD, n=2, logprobs=5, prompt_logprobs=5),
}


class Allocator:
    """The library in LD_PRELOAD."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.fail_arm.argtypes = [ctypes.c_size_t, ctypes.c_long]
        for name in ("fail_seen", "fail_failed"):
            getattr(self._library, name).restype = ctypes.c_long

    def arm(self, least: int, skip: int) -> None:
        self._library.fail_arm(least, skip)

    def disarm(self) -> tuple[int, bool]:
        """Returns (number of allocations since :meth:`arm`, whether one failed)."""
        found = self._library.fail_seen(), bool(self._library.fail_failed())
        self._library.fail_disarm()
        return found


def serve(engine: Engine, allocator: Allocator, params: SamplingParams, least: int, skip: int) -> tuple[Any, int, bool]:
    """Serve two neighbours and the request under test. Returns (id -> tokens of its answers or an error, number of
    allocations, whether one failed). ``skip`` is negative if none is to fail."""
    found: dict[str, Any] = {}
    for name in NEIGHBOURS:
        engine.add_request([7, 9, 11, 13], CALM, request_id=name)
    allocator.arm(least, skip)
    try:
        try:
            engine.add_request(PROMPT, params, request_id="victim")
        except (MemoryError, RequestError) as error:
            found["victim"] = f"{type(error).__name__}: {error}"
        while engine.has_unfinished:
            for output in engine.step():
                if output.finished:
                    tokens = [list(answer.token_ids) for answer in output.outputs]
                    found[output.request_id] = output.error if output.error else tokens
    finally:
        seen, failed = allocator.disarm()
    return found, seen, failed


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    kernels, least, part, first, sites = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    engine, allocator, params = LLM(kernels=kernels, threads=1).engine, Allocator(), PARTS[part]
    wanted, seen, _ = serve(engine, allocator, params, least, -1)
    step = max(1, seen // sites)
    say(seen=seen, step=step)
    for skip in range(first, seen, step):
        say(begins=skip)
        found, _, failed = serve(engine, allocator, params, least, skip)
        fates = {
            name: "answered" if found.get(name) == answer else found.get(name, "lost")
            for name, answer in wanted.items()
        }
        say(ended=skip, failed=failed, fates=fates)


if __name__ == "__main__":
    main()
