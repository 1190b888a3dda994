"""vLLM's settings that Chairlift does not have. Each is accepted (it has no effect), translated to Chairlift's setting,
or refused with an error.

So a script for vLLM runs after a change of its import, a command line after a change of its first word. Unsupported
settings are reported at once. :mod:`chairlift.config` has the settings that both projects have. Standard library only.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

from chairlift.errors import ConfigError

__all__ = ["NAMES", "SERVER_NAMES", "Name", "explain_value", "notes", "translate", "translate_speculative"]

ONE_DEVICE: Final = "one model runs on one device; start a server per device and put a proxy before them"
_CHECKPOINT_FORMATS: Final = (
    *("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "bitsandbytes", "modelopt"),
    *("modelopt_fp4", "modelopt_mixed", "fbgemm_fp8", "mxfp4", "auto-round", "inc", "moe_wna16", "petit_nvfp4"),
    *("auto_gptq", "auto_awq", "gptq_bitblas", "bitblas", "fp_quant", "quark", "torchao", "hqq"),
)
_GGUF_TYPE: Final = re.compile(r"(?:ud-)?(?:i?q\d(?:_\w+)?|tq\d_\d)|gguf", re.I)
"""Names of types of GGUF files, such as Q4_K_M and IQ4_XS, and of the format itself. llama.cpp's tools take them."""
_FP8_CACHES: Final = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4")
_FLOAT_CACHES: Final = ("bfloat16", "float16", "float32", "half")
_SPECULATIVE: Final = {
    "draft_tensor_parallel_size": ONE_DEVICE,
    "disable_by_batch_size": "how many drafts are checked follows from the load of each step",
    "speculative_disable_by_batch_size": "how many drafts are checked follows from the load of each step",
    "max_model_len": "drafts may be as long as max_model_len of the engine allows",
    "quantization": "the engine's quantization holds for the draft model too",
    "revision": "give the directory of the draft model's revision as model",
    "enforce_eager": "cuda_graphs of the engine holds for drafts too",
}
"""Key of vLLM's ``speculative_config`` that Chairlift does not have -> why."""


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
    for name, value in translated.items():
        if (problem := explain_value(name, value)) is not None:
            raise ConfigError(problem)
    return translated


def explain_value(name: str, value: Any) -> str | None:
    """What to write instead of a value of vLLM's, or of a type of GGUF files, for a setting that Chairlift has. None if
    ``value`` is not such a value."""
    if not isinstance(value, str):
        return None
    if name == "quantization" and _GGUF_TYPE.fullmatch(value):
        return _gguf_type(value)
    if name == "quantization" and value.lower() in _CHECKPOINT_FORMATS:
        return (
            f"quantization is {value!r}, but the format of a quantised checkpoint is found in its files; leave"
            " quantization out, or round a model as it is loaded: int8, int4 or fp8"
        )
    if name == "kv_cache_dtype" and value in _FP8_CACHES:
        return (
            f"kv_cache_dtype is {value!r}, but K and V of 8 bits are integers here, with a scale for each token and"
            " head; write int8, or auto for the model's dtype"
        )
    if name == "kv_cache_dtype" and value in _FLOAT_CACHES:
        return f"kv_cache_dtype is {value!r}, but K and V have the model's dtype; write auto, and {value} as dtype"
    return None


def _gguf_type(value: str) -> str:
    """Message about ``quantization`` with the name of a type of GGUF files."""
    name = value.upper()
    first, tag = ("GGUF", "Q4_K_M") if name == "GGUF" else (f"{name} is a type of GGUF files, and GGUF", name)
    return (
        f"{first} files carry their own format: give FILE.gguf or OWNER/NAME:{tag} as model, and leave quantization out"
        f" (it is {value!r}), or round a model as it is loaded: int8, int4 or fp8"
    )


_MTP: Final = ("deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_5_mtp", "qwen3_next_mtp")
"""vLLM's names of the method ``mtp``, which name the family."""


def translate_speculative(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``speculative_config`` with vLLM's keys replaced by Chairlift's.

    vLLM looks for matches of ``prompt_lookup_max`` tokens first, and of fewer down to ``prompt_lookup_min``, which is
    the maximum where it is not given. Chairlift looks for matches of ``prompt_lookup_min`` tokens. Raises ConfigError
    for a key that is not supported, with the reason.
    """
    found = dict(settings)
    if found.get("method") in _MTP:
        found["method"] = "mtp"
    for name in found:
        if name in _SPECULATIVE:
            raise ConfigError(f"speculative_config: {name} is a key of vLLM: {_SPECULATIVE[name]}; leave it out")
    longest = found.pop("prompt_lookup_max", None)
    if longest is None:
        return found
    shortest = found.setdefault("prompt_lookup_min", longest)
    numbers = (longest, shortest)
    if any(type(each) is not int for each in numbers) or longest < shortest:
        raise ConfigError(
            "speculative_config: prompt_lookup_max must be a whole number, and at least prompt_lookup_min; got"
            f" {longest!r:.80} and {shortest!r:.80}"
        )
    return found


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
