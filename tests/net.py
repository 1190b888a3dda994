"""The short net: the default tests that ``pytest`` alone runs. ``tests/short_net.py`` reads this page.

A test function has as many cases in the net as the line of its folder says, evenly spaced. Tests that plant bugs
have all their default cases in it. Two marks decide for a test or a file: ``full`` leaves it out of the net, and
``nightly`` out of the default tests, too. The lines and the marks follow from measured processor time: cheap tests are
in, and a long test is in only if no cheaper one finds the same planted bugs.
"""

from __future__ import annotations

from chairlift.kernels.cpu.library import supported_isas

LEAST_FOUND = 0.95
"""Part of the planted bugs, also of those in nightly tests, that the net must find."""
FULL_MINUTES = 20
"""Duration of all default tests on two cores without other work."""
ONE_OF: dict[str, object] = {"isa": supported_isas()[-1] if supported_isas() else "none"}
"""Parameter of tests -> its only value in the net. Here: one instruction set of the CPU kernels."""
ALL = 1_000_000
CASES: dict[str, int] = {
    "tests": 4,
    "tests/architecture": ALL,
    "tests/base": 4,
    "tests/base/workers": ALL,
    "tests/cli": 2,
    "tests/core": 10,
    "tests/core/kv_cache": ALL,
    "tests/core/plugins": 2,
    "tests/core/scheduler": 10,
    "tests/core/spec_decode": 2,
    "tests/deploy": ALL,
    "tests/e2e": 1,
    "tests/engine": 4,
    "tests/equivalence": 2,
    "tests/examples": 2,
    "tests/executor": 3,
    "tests/executor/sampling": 4,
    "tests/fleet": 2,
    "tests/kernels": 3,
    "tests/lab": 2,
    "tests/lora": 2,
    "tests/metrics": ALL,
    "tests/models": 2,
    "tests/models/gguf": 2,
    "tests/models/quantize": 2,
    "tests/models/vision": 2,
    "tests/server": 4,
    "tests/server/batches": ALL,
    "tests/simulation": 10,
    "tests/text": 4,
    "tests/text/grammar": 20,
    "tests/text/tokenizer": 4,
    "tests/text/tool_calls": 20,
    "tests/train": 2,
}
"""Folder -> number of cases of each test function; folders within it have the same, unless they have a line."""
