"""The front door of traces: requests with their times of arrival, drawn from a kind of traffic, read or written.

A trace has lengths, not texts. Where it says which blocks of prompts are equal (``prefix_ids``), the prompts made from
it are equal there, so that prefix caching does what it would have done.
"""

from __future__ import annotations

from chairlift.replay.traced_request import PREFIX_BLOCK, TracedRequest, prompt_token_ids
from chairlift.workbench.workload.formats import LoadedTrace, load_trace, read_trace, write_trace
from chairlift.workbench.workload.traffic import WORKLOADS, Traffic, draw_trace

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
