"""JSON bodies of the ``tinker`` client's calls. Fields that a server like this one never reads are left out."""

from __future__ import annotations

import math
from typing import Any, Final, Literal, TypeVar

import msgspec

from chairlift_train.service.compute.calls import AdamParameters, AdapterConfig, TrainingError

__all__ = [
    "Addressed",
    "CreateModel",
    "CreateSamplingSession",
    "CreateSession",
    "DrawSamples",
    "LoadWeights",
    "OptimStep",
    "RetrieveFuture",
    "SampleParameters",
    "SaveWeights",
    "SaveWeightsForSampler",
    "adam_of",
    "adapter_of",
    "check_optimizer",
    "read_body",
]

_T = TypeVar("_T")
_ADAM: Final = "adamw"


class CreateSession(msgspec.Struct):
    """Begin a session."""

    sdk_version: str = ""
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    project_id: str | None = None


class Addressed(msgspec.Struct):
    """The address of a call of a model."""

    model_id: str
    seq_id: int


class LoraShape(msgspec.Struct):
    """What of the model learns."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(msgspec.Struct, frozen=True):
    """The kind of optimiser."""

    type: str = _ADAM


class CreateModel(msgspec.Struct):
    """Make a training run."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraShape | None = None
    optimizer_config: Optimizer = Optimizer()
    user_metadata: dict[str, Any] | None = None


class AdamBody(msgspec.Struct):
    """Parameters of a step of AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(msgspec.Struct):
    """Take an optimiser step. Another optimiser's parameters come as ``optimizer_params``."""

    adam_params: AdamBody | None = None
    optimizer_params: Optimizer | None = None


class SaveWeights(msgspec.Struct):
    """Save a checkpoint from which training can go on."""

    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(msgspec.Struct):
    """Save weights to sample from: with a name, or for one sampling session."""

    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(msgspec.Struct):
    """Load a checkpoint into a model, or make a model from it."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    optimizer_config: Optimizer | None = None
    user_metadata: dict[str, Any] | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(msgspec.Struct):
    """Choose what to sample from."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(msgspec.Struct):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] | None = None


class SamplePrompt(msgspec.Struct):
    """A prompt."""

    chunks: list[PromptChunk]


class SampleParameters(msgspec.Struct):
    """How to draw tokens."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class DrawSamples(msgspec.Struct):
    """Draw samples."""

    sampling_session_id: str
    seq_id: int
    prompt: SamplePrompt
    sampling_params: SampleParameters
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class RetrieveFuture(msgspec.Struct):
    """Ask for the result of a call."""

    request_id: str


def read_body(body: bytes, kind: type[_T]) -> _T:
    """A logged JSON body. Raises TrainingError that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise TrainingError(f"the call is not valid: {error}") from None


def adam_of(step: OptimStep) -> AdamParameters:
    """The parameters of an optimiser step. Raises TrainingError for other optimisers, and for values out of range."""
    if step.optimizer_params is not None:
        raise TrainingError(f"the optimiser {step.optimizer_params.type!r:.80} is not supported; use AdamParams")
    given = step.adam_params or AdamBody()
    values = msgspec.structs.asdict(given)
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise TrainingError(f"{name} must be a number of at least 0, got {value}")
    for name in ("beta1", "beta2"):
        if values[name] >= 1:
            raise TrainingError(f"{name} must be below 1, got {values[name]}")
    if not given.eps:
        raise TrainingError("eps must be above 0, because gradients may be 0")
    return AdamParameters(**values)


def adapter_of(shape: LoraShape | None, drawn_seed: int) -> AdapterConfig:
    """The adapter that a client asks for. Without a seed of its own it gets ``drawn_seed``."""
    if shape is None:
        raise TrainingError("full fine-tuning is not supported; give a lora_config with a rank")
    seed = drawn_seed if shape.seed is None else shape.seed
    return AdapterConfig(shape.rank, seed, shape.train_mlp, shape.train_attn, shape.train_unembed)


def check_optimizer(optimizer: Optimizer | None) -> None:
    """Raise TrainingError for an optimiser other than AdamW."""
    if optimizer is not None and optimizer.type != _ADAM:
        raise TrainingError(f"the optimiser {optimizer.type!r:.80} is not supported; use {_ADAM}")
