"""Entry point for traces: requests with arrival times, drawn from a kind of traffic, read or written.

A trace has lengths, not texts. Where it marks equal blocks of prompts (``prefix_ids``), the generated prompts are
equal, so that prefix caching works as with the original.
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
