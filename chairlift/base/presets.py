"""Presets: settings that make this engine schedule like another system. Only settings that exist are used.

:data:`PRESETS` is the data. ``EngineConfig.from_flat`` applies it: an explicit setting wins over the preset, and the
preset over the defaults. docs/presets.md has the same table for readers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from chairlift.errors import ConfigError

__all__ = ["BASELINE", "PRESETS", "RECORDED", "Preset", "with_preset"]

BASELINE: Final = "static"
"""Preset with which the others are compared."""
RECORDED: Final = "recorded"
"""Name of the recorded engine's own settings, where a recording is compared with presets."""


@dataclasses.dataclass(frozen=True, slots=True)
class Preset:
    """A name for several settings, and the system from which they come."""

    system: str
    """System and its version, or the paper."""
    does: str
    """Rule of the system's scheduler, as its documentation or paper states it."""
    differs: str
    """Differences between the system and this engine with the preset."""
    settings: Mapping[str, Any]
    """Setting of the engine -> value."""


_NEVER_PREEMPTS: Final = {"preemption_mode": "none", "admission_watermark": 0.0}
_RECOMPUTES: Final = {"preemption_mode": "recompute", "admission_watermark": 0.0}
_BY_ARRIVAL: Final = {"scheduling_policy": "fcfs", "policy_share": 1.0}
_NO_SHARING: Final = {"enable_prefix_caching": False}
_SHARING: Final = {"enable_prefix_caching": True}
_CLOSED: Final = {"scheduling_policy": "fcfs", "prefill_mode": "mixed"} | _NEVER_PREEMPTS | _NO_SHARING

PRESETS: Final[Mapping[str, Preset]] = {
    BASELINE: Preset(
        system="Request-level batches, as in FasterTransformer or generate() of transformers",
        does="A batch starts with the requests that wait, and ends when its longest answer ends. Rows that have "
        "ended are computed as padding until then, and no request joins.",
        differs="Prompts of different lengths are concatenated here, without padding. So this baseline wastes less "
        "than the systems it stands for. Keys and values are paged.",
        settings={"batching": "static"} | _CLOSED,
    ),
    "triton-dynamic": Preset(
        system="Triton Inference Server, dynamic batcher",
        does="A batch starts when it is full or its oldest request has waited for the queue delay. The batch is one "
        "call of the model. Triton's default delay is 0.",
        differs="A request that ends is delivered at once, and its row is not computed any more. In Triton, a model "
        "that is not decoupled answers all requests of a batch at its end: that is the preset static with "
        "batch_wait_ms. The delay of 50 ms is ours.",
        settings={"batching": "dynamic", "batch_wait_ms": 50.0} | _CLOSED,
    ),
    "cellular": Preset(
        system="Cellular batching (BatchMaker, EuroSys 2018)",
        does="The unit of scheduling is a cell of a recurrent network. Cells of the same type form a batch, whatever "
        "their requests and positions. A request joins at any cell and leaves at its last one.",
        differs="Prompt steps and decode steps are the two cell types, and they alternate. BatchMaker prefers the type "
        "that is later in the network. A step computes many positions of a prompt, which a recurrent cell cannot.",
        settings={"batching": "continuous", "prefill_mode": "separate"} | _BY_ARRIVAL | _NEVER_PREEMPTS | _NO_SHARING,
    ),
    "orca": Preset(
        system="Orca (OSDI 2022)",
        does="The batch is formed anew in every iteration, in order of arrival. Prompts and decodes share an iteration "
        "(selective batching). A request is admitted only if the memory for its longest answer can be reserved.",
        differs="Orca reserves one contiguous piece of memory per request and computes a prompt in one iteration. Here "
        "the reserved memory is paged, and a prompt that exceeds the token budget is computed in chunks.",
        settings={"batching": "continuous", "prefill_mode": "mixed"} | _BY_ARRIVAL | _NEVER_PREEMPTS | _NO_SHARING,
    ),
    "vllm": Preset(
        system="vLLM, V1 scheduler (0.33)",
        does="Decodes come first, and prompts get the rest of the token budget in chunks. A request is admitted when "
        "its prompt fits. When blocks run out, the newest request is preempted and computed again. Prefixes "
        "are cached.",
        differs="Preemption drops only the end of the KV if that is enough. vLLM's default numbers of rows and tokens "
        "depend on the GPU; they are not part of the preset.",
        settings={"batching": "continuous", "prefill_mode": "mixed"} | _BY_ARRIVAL | _RECOMPUTES | _SHARING,
    ),
    "sglang": Preset(
        system="SGLang (0.5)",
        does="While prompts wait and fit, steps compute only prompts; then they decode. Prefixes are shared in a radix "
        "tree. When memory runs out, requests are retracted and computed again.",
        differs="SGLang admits by an estimate of answer lengths that it adapts to retractions, and can order the queue "
        "by the longest cached prefix. Here a request is admitted when its prompt fits, in order of arrival.",
        settings={"batching": "continuous", "prefill_mode": "prefill_first"} | _BY_ARRIVAL | _RECOMPUTES | _SHARING,
    ),
    "tensorrt-llm": Preset(
        system="TensorRT-LLM, GUARANTEED_NO_EVICT (the default)",
        does="In-flight batching: prompts and decodes share a step. A request is admitted only if there are blocks for "
        "its prompt and its longest answer, so no request is ever paused. Blocks are reused.",
        differs="TensorRT-LLM computes a prompt whole unless chunked context is on. It also delays a prompt whose "
        "beginning another request is just computing.",
        settings={"batching": "continuous", "prefill_mode": "mixed"} | _BY_ARRIVAL | _NEVER_PREEMPTS | _SHARING,
    ),
    "tensorrt-llm-max-utilization": Preset(
        system="TensorRT-LLM, MAX_UTILIZATION",
        does="As many requests as possible are admitted in each step. When blocks run out, the request that started "
        "last is paused, and computed again later.",
        differs="As for tensorrt-llm. The rules are those of the preset vllm: the two systems differ in their kernels "
        "and defaults, not in what these settings express.",
        settings={"batching": "continuous", "prefill_mode": "mixed"} | _BY_ARRIVAL | _RECOMPUTES | _SHARING,
    ),
    "tgi": Preset(
        system="Text Generation Inference 2",
        does="Decoding pauses while the prompts of new requests are computed; then they join the batch. A request is "
        "admitted if prompt and longest answer fit into the token budget of the batch. Nothing is preempted.",
        differs="TGI begins new prompts after a number of decode steps or when enough requests wait. Here prompt steps "
        "and decode steps alternate. Version 3 of TGI also has chunks and a prefix cache.",
        settings={"batching": "continuous", "prefill_mode": "separate"} | _BY_ARRIVAL | _NEVER_PREEMPTS | _NO_SHARING,
    ),
    "lightllm": Preset(
        system="LightLLM",
        does="KV is managed per token. The router predicts the peak of the memory that the running requests will "
        "need, and admits what stays below it. Prompts are computed in steps of their own. Prefixes are cached.",
        differs="Blocks have 16 tokens. There is no prediction of the peak: a request is admitted when its prompt "
        "fits, and is computed again after a preemption. LightLLM's documentation names no hybrid mode; prefill_mode "
        "auto, which mixes or separates by predicted time, stands for the choice between separate and split-fuse "
        "steps.",
        settings={"batching": "continuous", "prefill_mode": "auto"} | _BY_ARRIVAL | _RECOMPUTES | _SHARING,
    ),
}
"""Name of a preset -> the preset. The baseline comes first."""


def with_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the settings of the preset that ``settings["preset"]`` names. Explicit settings keep their values.

    Raises ConfigError for an unknown preset.
    """
    name = settings.get("preset")
    if name is None:
        return dict(settings)
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"preset must be one of {', '.join(PRESETS)}; got {name!r:.100}")
    return {**PRESETS[name].settings, **settings}
