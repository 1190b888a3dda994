"""Catalog of the published batching ideas that can be tried by name: their class, source and claim.

A program that compares ideas reads :data:`IDEAS`. The engine does not: a setting names a class by its
``module:Class`` path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

__all__ = ["IDEAS", "Idea", "Kind"]

Kind = Literal["policy", "prefill mode", "membership"]
"""Which rule of the scheduler an idea replaces: its policy, its prefill mode, or its batch membership."""
_SETTINGS: Final[Mapping[str, str]] = {
    "policy": "scheduling_policy",
    "prefill mode": "prefill_mode",
    "membership": "batching",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Idea:
    """A published idea."""

    path: str
    """Value of the setting: ``module:Class``, or the name of a rule of the core."""
    kind: Kind
    source: str
    """Paper or system with its number, so that a reader finds it."""
    claim: str
    """Result that the source claims, in one line."""
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further settings that the idea needs."""
    simulated_only: bool = False
    """Whether only a simulated machine can run it."""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the idea: name -> value."""
        return {_SETTINGS[self.kind]: self.path, **self.others}


_HERE: Final = "chairlift.core.plugins"
_IN_ORDER: Final = {"policy_share": 1.0}
"""Setting of the ideas whose definition leaves no part of a step to the smallest requests."""

IDEAS: Final[Mapping[str, Idea]] = {
    "kairos": Idea(
        f"{_HERE}.kairos:Kairos",
        "policy",
        "Kairos, arXiv 2605.02329 (abstract)",
        "targets met more often by 23.9 % (TTFT), 27.1 % (TPOT), 33.8 % (both), disaggregated",
    ),
    "gamma_boost": Idea(
        f"{_HERE}.boost:GammaBoost",
        "policy",
        "gamma-Boost, arXiv 2404.08826 (abstract)",
        "a tail of latency below that of first come, first served, with known sizes",
    ),
    "uniboost": Idea(
        f"{_HERE}.boost:UniBoost",
        "policy",
        "UniBoost, arXiv 2606.18431 (abstract)",
        "p99 of answers 35 to 50 % below shortest remaining time first with known lengths",
    ),
    "flow_prefill": Idea(
        f"{_HERE}.flow_prefill:FlowPrefill",
        "policy",
        "FlowPrefill, arXiv 2602.16603 (abstract)",
        "up to 5.6 times the goodput of DistServe",
        {"prefill_mode": "prefill_first"},
        simulated_only=True,
    ),
    "lprs": Idea(
        f"{_HERE}.lprs:LprsApc",
        "policy",
        "LPRS and APC, arXiv 2606.09061",
        "mean latency 10 % below first come, first served",
    ),
    "vtc": Idea(
        f"{_HERE}.fair_tenants:LowestCounter",
        "policy",
        "virtual token counters, Sheng et al., OSDI 2024",
        "a bounded difference in service between tenants that always wait",
    ),
    "equinox": Idea(
        f"{_HERE}.fair_tenants:Equinox",
        "policy",
        "Equinox, arXiv 2508.16646 (abstract)",
        "against VTC: throughput 1.3 times, TTFT 60 % lower, fairness 13 % higher",
    ),
    "residual_sjf": Idea(
        f"{_HERE}.residual_shortest:ResidualShortestFirst",
        "policy",
        "vLLM pull request 51375; TensorRT-LLM 12423 for the raw length",
        "median latency 7.5 % lower (raw length)",
    ),
    "learned_rank": Idea(
        f"{_HERE}.learned_rank:LearnedRank",
        "policy",
        "learning to rank, Fu et al., arXiv 2408.15792",
        "latency 2.8 times lower (chat), throughput 6.5 times higher (synthetic)",
    ),
    "past_future": Idea(
        f"{_HERE}.past_future:PastFuture",
        "policy",
        "Past-Future, arXiv 2507.10150",
        "goodput 2 to 3 times as high",
    ),
    "sarathi": Idea(
        "mixed",
        "prefill mode",
        "Sarathi-Serve, Agrawal et al., OSDI 2024: this is the mode mixed",
        "capacity 2.6 times (Mistral-7B) and 3.7 times (Yi-34B) that of early vLLM, A100",
        _IN_ORDER,
    ),
    "guaranteed_no_evict": Idea(
        f"{_HERE}.tensorrt:GuaranteedNoEvict",
        "policy",
        "TensorRT-LLM, GUARANTEED_NO_EVICT",
        "no request is paused after it has started",
        {**_IN_ORDER, "admission_watermark": 0.0},
    ),
    "max_utilization": Idea(
        f"{_HERE}.tensorrt:MaxUtilization",
        "policy",
        "TensorRT-LLM, MAX_UTILIZATION",
        "more requests per step than with reserved memory, at the cost of pauses",
        {**_IN_ORDER, "admission_watermark": 0.0, "preemption_mode": "recompute"},
    ),
    "longest_prefix": Idea(
        f"{_HERE}.longest_prefix:LongestPrefixFirst",
        "policy",
        "SGLang (Zheng et al., NeurIPS 2024), with a bound by age",
        "more hits in the prefix cache, so fewer prompt tokens are computed",
    ),
    "lpm": Idea(
        f"{_HERE}.sglang:LongestPrefixMatch",
        "policy",
        "SGLang, longest prefix match",
        "more hits in the prefix cache than in order of arrival",
        _IN_ORDER,
    ),
    "dfs_weight": Idea(
        f"{_HERE}.sglang:DepthFirstByWeight",
        "policy",
        "SGLang, depth first by weight",
        "the best order for one prefix tree that is known in advance",
        _IN_ORDER,
    ),
    "hrrn": Idea(
        f"{_HERE}.sglang:HighestResponseRatio",
        "policy",
        "SGLang, highest response ratio next",
        "short prompts first, without starvation",
    ),
    "queue_delay": Idea(
        f"{_HERE}.queue_delay:QueueDelay",
        "membership",
        "Triton's dynamic batcher, with continuous batching",
        "larger batches for a bounded delay",
        {"batch_wait_ms": 5.0},
    ),
    "waiting_ratio": Idea(
        f"{_HERE}.waiting_ratio:WaitingRatio",
        "prefill mode",
        "Text Generation Inference, waiting_served_ratio",
        "answers pause only for enough prompts",
    ),
    "fastserve": Idea(
        f"{_HERE}.fastserve:FastServe",
        "policy",
        "FastServe, Wu et al., arXiv 2305.05920",
        "latency up to 5.1 times lower than run-to-completion, without predictions",
    ),
}
"""Name -> idea. ``docs/laboratory.md`` has a table of them."""
