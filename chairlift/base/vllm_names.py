"""vLLM's settings that Chairlift does not have. Each is accepted (it has no effect), translated to Chairlift's setting,
or refused with an error.

So a script for vLLM runs after a change of its import, a command line after a change of its first word. Unsupported
settings are reported at once. :mod:`chairlift.config` has the settings that both projects have. Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from chairlift.errors import ConfigError

__all__ = ["NAMES", "SERVER_NAMES", "Name", "notes", "translate"]

ONE_DEVICE: Final = "one model runs on one device; start a server per device and put a proxy before them"
_CHECKPOINT_FORMATS: Final = (
    *("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "bitsandbytes", "modelopt"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """One setting of vLLM that Chairlift does not have."""

    kind: type
    """Type of the setting: bool, int, float, str or dict. The value of a dict's flag is JSON."""
    accepted: tuple[Any, ...] | None
    """Values that have no effect here and are accepted; None: all values."""
    why: str
    """Reason why accepted values have no effect, for the log line."""
    instead: str = ""
    """Part of the error message for a value that is not accepted: what to do instead."""


NAMES: Final[dict[str, Name]] = {
    "tensor_parallel_size": Name(int, (1,), "a model runs on one device", ONE_DEVICE),
    "pipeline_parallel_size": Name(int, (1,), "a model runs on one device", ONE_DEVICE),
    "data_parallel_size": Name(int, (1,), "a model runs on one device", ONE_DEVICE),
    "distributed_executor_backend": Name(str, None, "a model runs on one device"),
    "disable_custom_all_reduce": Name(bool, None, "a model runs on one device"),
    "trust_remote_code": Name(bool, None, "code in a model's directory is never run, so there is nothing to trust"),
    "enable_chunked_prefill": Name(
        bool,
        (True,),
        "prompts are always computed in chunks",
        "prompts are always computed in chunks; raise max_num_batched_tokens to max_model_len to make one of each",
    ),
    "disable_log_stats": Name(bool, None, "status lines are a matter of status_interval (0: none)"),
    "disable_log_requests": Name(bool, None, "requests are logged with log_requests only"),
    "tokenizer_mode": Name(
        str, ("auto", "hf", "fast"), "tokenizer.json is read", "tokenizer.json is read; leave it out"
    ),
    "load_format": Name(
        str,
        ("auto", "safetensors", "gguf"),
        "the files say what they are",
        "only safetensors and GGUF files are read; leave it out",
    ),
    "cpu_offload_gb": Name(
        float, (0,), "weights stay on the device that computes", "set device to cpu, or quantization"
    ),
    "max_seq_len_to_capture": Name(int, None, "cuda_graphs decides which steps are recorded"),
    "async_scheduling": Name(bool, None, "num_lookahead_steps says how far steps are scheduled ahead"),
    "guided_decoding_backend": Name(str, None, "every grammar is compiled by llguidance"),
    "max_logprobs": Name(int, tuple(range(21)), "a request may ask for up to 20", "20 is the maximum; leave it out"),
    "download_dir": Name(str, (), "", "set HF_HOME to the directory of the Hub's cache"),
    "enforce_eager": Name(bool, None, "cuda_graphs off is its name here"),
    "swap_space": Name(float, None, "in GiB; swap_space_bytes is its name here"),
    "num_gpu_blocks_override": Name(int, None, "num_kv_blocks is its name here"),
    "task": Name(str, None, "runner is its name here"),
    "limit_mm_per_prompt": Name(dict, None, "a prompt may have up to 64 images, whatever the limit says"),
    "mm_processor_kwargs": Name(
        dict,
        ({},),
        "there are none",
        "images are prepared as preprocessor_config.json says; set max_pixels or size there",
    ),
}
"""Name of a setting of vLLM's engine -> how Chairlift treats the setting."""
SERVER_NAMES: Final[dict[str, Name]] = {
    "enable_auto_tool_choice": Name(bool, (True,), "calls are always read", "set tool_call_parser to none"),
    "uvicorn_log_level": Name(str, None, "connections are not logged; log_requests logs requests"),
    "disable_frontend_multiprocessing": Name(bool, None, "the engine always has a process of its own"),
    "root_path": Name(str, ("",), "there is none", "let the proxy take the prefix away"),
}
"""Name of a setting that only ``vllm serve`` has -> how Chairlift treats the setting."""
_RUNNERS: Final = {
    "auto": "auto",
    "generate": "generate",
    **dict.fromkeys(("embed", "embedding", "classify", "score", "reward"), "pooling"),
}


def translate(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with vLLM's names replaced by Chairlift's. Raises ConfigError, which says what to use, for a setting
    that is not supported."""
    found = {name: settings[name] for name in settings if name in NAMES or name in SERVER_NAMES}
    translated = {name: value for name, value in settings.items() if name not in found}
    for name, value in found.items():
        if value is None:  # the setting was not given
            continue
        known = NAMES.get(name) or SERVER_NAMES[name]
        _check(name, known, value)
        for ours, ours_value in _ours(name, value).items():
            if translated.get(ours, ours_value) != ours_value:
                raise ConfigError(f"{name} is vLLM's name for {ours}, and both are given; leave one out")
            translated[ours] = ours_value
    if translated.get("quantization") in _CHECKPOINT_FORMATS:
        raise ConfigError(
            f"quantization is {translated['quantization']!r}, but the format of a quantised checkpoint is found in its"
            " files; leave quantization out, or round a model as it is loaded: int8, int4 or fp8"
        )
    return translated


def notes(settings: Mapping[str, Any]) -> list[str]:
    """One line for each given setting of vLLM that was accepted without effect."""
    known = NAMES | SERVER_NAMES
    accepted = {name: value for name, value in settings.items() if name in known and value is not None}
    return [f"{name} {value} is accepted: {known[name].why}" for name, value in accepted.items()]


def _check(name: str, known: Name, value: Any) -> None:
    fits = isinstance(value, (int, float) if known.kind is float else known.kind)
    if not fits or (isinstance(value, bool) and known.kind is not bool):
        raise ConfigError(f"{name} must be of type {known.kind.__name__}, got {value!r}")
    if known.accepted is not None and value not in known.accepted:
        raise ConfigError(f"{name} is {value!r}, which is not offered: {known.instead}")


def _ours(name: str, value: Any) -> dict[str, Any]:
    """Chairlift's settings (name -> value) for one of vLLM's settings."""
    if name == "enforce_eager":
        return {"cuda_graphs": "off"} if value else {}
    if name == "swap_space":
        return {"swap_space_bytes": int(value * 2**30)}
    if name == "num_gpu_blocks_override":
        return {"num_kv_blocks": value}
    if name == "task":
        if value not in _RUNNERS:
            raise ConfigError(f"task is {value!r}, which is not offered; known: {', '.join(_RUNNERS)}")
        return {"runner": _RUNNERS[value]}
    return {}
