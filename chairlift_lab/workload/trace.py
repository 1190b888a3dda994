"""Entry point for traces: lists of requests with arrival times, which can be drawn, read from a file and written.

A trace has the lengths of prompts and answers, but no texts. ``prefix_ids`` mark prompt blocks that are equal; the
generated prompts have equal tokens in these blocks, so that prefix caching works as with the original prompts.
"""

from __future__ import annotations

from chairlift_lab.replay.traced_request import PREFIX_BLOCK, TracedRequest, prompt_token_ids
from chairlift_lab.workload.formats import LoadedTrace, load_trace, read_trace, write_trace
from chairlift_lab.workload.traffic import WORKLOADS, Traffic, draw_trace

__all__ = [
    "PREFIX_BLOCK",
    "WORKLOADS",
    "LoadedTrace",
    "TracedRequest",
    "Traffic",
    "draw_trace",
    "load_trace",
    "prompt_token_ids",
    "read_trace",
    "write_trace",
]
