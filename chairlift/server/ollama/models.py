"""Ollama's endpoints about models: what is served, and answers to requests to change it."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.engine.info import EngineInfo
from chairlift.errors import ModelLoadError
from chairlift.models.hf_config import read_hf_files
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_json
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response
from chairlift.server.ollama.bodies import (
    OllamaDetails,
    OllamaModel,
    OllamaModels,
    OllamaProgress,
    OllamaShow,
    OllamaShowReply,
    OllamaVersion,
)
from chairlift.server.ollama.generate import NDJSON
from chairlift.server.ollama.input import served_name
from chairlift.server.openai.models import adapter_named, engine_info
from chairlift.server.openai.protocol import parse
from chairlift.server.openai.translation import thinking_switch
from chairlift.text.tokenizer.infilling import infill_format_of
from chairlift.text.tool_calls import reasoning_format_of, tool_format_of
from chairlift.version import __version__

__all__ = ["loaded_models", "routes"]

_OLLAMA_VERSION: Final = "0.12.6"
"""Version of Ollama whose API is served."""
_NEVER: Final = "2318-01-01T00:00:00Z"
"""When the model is unloaded, in /api/ps. Ollama says about the same for a model that stays loaded."""
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_LEVELS: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_SIZES: Final = ((1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K"))
_LENGTHS: Final = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
}
"""Name in a model's ``config.json`` -> name in ``model_info``."""
_FILLS_IN: Final = "{#- .Suffix -#}"
"""A comment at the end of a shown template. Editors look for Ollama's variable to learn that a model fills in the
middle."""
_NOT_HERE: Final = {
    "create": "models are not made here; write one with chairlift quantize or chairlift train, and serve it",
    "push": "models are not published here; use the tools of the Hub where its files are",
    "copy": "models are not copied here; start the server with --served-model-name to give the model more names",
    "delete": "models are not deleted here; stop the server, and remove the model's files",
}


async def _tags(request: Request) -> Response:
    return json_response(OllamaModels(models=await loaded_models(request.app.state.server)))


async def _ps(request: Request) -> Response:
    """The models that are loaded: all of them."""
    state: ServerState = request.app.state.server
    info = state.engine.info
    models = [] if info is None else await loaded_models(state)
    for model in models:
        model.expires_at = _NEVER
        model.size_vram = 0 if info is None or info.device == "cpu" else model.size
        model.context_length = None if info is None else info.max_model_len
    return json_response(OllamaModels(models=models))


async def _show(request: Request) -> Response:
    """Facts about a model."""
    state: ServerState = request.app.state.server
    payload, _ = parse(OllamaShow, await read_json(request), {})
    name = served_name(state, payload.model or payload.name)
    info = engine_info(state)
    raw = await asyncio.to_thread(_config, info)
    family = str(raw.get("model_type") or "")
    facts: dict[str, Any] = {"general.architecture": family, "general.basename": name}
    count = _num_parameters(info)
    if count:
        facts["general.parameter_count"] = count
    facts[f"{family}.context_length"] = info.max_model_len
    facts |= {f"{family}.{ours}": raw[theirs] for theirs, ours in _LENGTHS.items() if theirs in raw}
    capabilities = _capabilities(state, info)
    reply = OllamaShowReply(
        modelfile=f"# served by Chairlift {__version__}\nFROM {name}\n",
        parameters="\n".join(f"{key:<30} {value}" for key, value in info.sampling_defaults.items()),
        template=(state.engine.prompts.chat_template or "") + _FILLS_IN * ("insert" in capabilities),
        details=_details(state, info, name, raw),
        model_info=facts,
        capabilities=capabilities,
        modified_at=_modified(state),
    )
    return json_response(reply)


async def _version(request: Request) -> Response:
    return json_response(OllamaVersion(version=_OLLAMA_VERSION, chairlift=__version__))


async def _pull(request: Request) -> Response:
    """The states of a pull that has nothing to do. Raises ApiError for a model that is not served."""
    payload, _ = parse(OllamaShow, await read_json(request), {})
    served_name(request.app.state.server, payload.model or payload.name)
    states = [OllamaProgress(status=status) for status in ("pulling manifest", "success")]
    if payload.stream is False:
        return json_response(states[-1])
    return Response(b"".join(msgspec.json.encode(each) + b"\n" for each in states), media_type=NDJSON)


async def _refuse(request: Request) -> Response:
    """Raise ApiError for a request to change models."""
    await read_json(request)
    message = _NOT_HERE[request.url.path.rpartition("/")[2]]
    raise ApiError(400, message, code="unsupported_parameter")


async def loaded_models(state: ServerState) -> list[OllamaModel]:
    """All names of the model, and all adapters. Names without a tag get ``:latest``, as Ollama's clients expect."""
    info = engine_info(state)
    raw = await asyncio.to_thread(_config, info)
    names = [*state.model_names, *state.engine.adapters.names.public]
    return [_model(state, info, name, raw) for name in names]


def _model(state: ServerState, info: EngineInfo, name: str, raw: Mapping[str, Any]) -> OllamaModel:
    return OllamaModel(
        name=_tagged(name),
        model=_tagged(name),
        modified_at=_modified(state),
        size=info.weight_bytes,
        digest=hashlib.sha256(f"{info.fingerprint}\0{name}".encode()).hexdigest(),
        details=_details(state, info, name, raw),
    )


def _tagged(name: str) -> str:
    return name if ":" in name else f"{name}:latest"


def _details(state: ServerState, info: EngineInfo, name: str, raw: Mapping[str, Any]) -> OllamaDetails:
    family = str(raw.get("model_type") or "")
    count = _num_parameters(info)
    size = next((f"{count / unit:.1f}{letter}" for unit, letter in _SIZES if count >= unit), str(count or ""))
    return OllamaDetails(
        parent_model=state.model_names[0] if adapter_named(state, name) else "",
        format="safetensors" if raw else "",
        family=family,
        families=[family] if family else [],
        parameter_size=size,
        quantization_level=(info.quantization or _LEVELS.get(info.dtype, info.dtype)).upper(),
    )


def _num_parameters(info: EngineInfo) -> int:
    """Number of weights; 0 if it does not follow from their bytes."""
    return 0 if info.quantization else info.weight_bytes // _BYTES.get(info.dtype, 1 << 62)


def _capabilities(state: ServerState, info: EngineInfo) -> list[str]:
    if info.pooling is not None:
        return ["embedding"] if info.pooling.task == "embed" else []
    template = state.engine.prompts.chat_template or ""
    tokenizer = state.engine.prompts.tokenizer
    has = {
        "completion": True,
        "tools": "tools" in template and tool_format_of(template) is not None,
        "insert": tokenizer is not None and infill_format_of(tokenizer) is not None,
        "vision": info.takes_images,
        "thinking": reasoning_format_of(template) is not None or thinking_switch(template) is not None,
    }
    return [name for name, is_there in has.items() if is_there]


def _config(info: EngineInfo) -> dict[str, Any]:
    """The model's ``config.json``; empty for a model without one."""
    try:
        return read_hf_files(Path(info.model_dir))[0] if info.model_dir else {}
    except ModelLoadError:
        return {}


def _modified(state: ServerState) -> str:
    started = datetime.datetime.fromtimestamp(state.started_at, datetime.UTC)
    return started.strftime("%Y-%m-%dT%H:%M:%SZ")


routes: Final = [
    Route("/api/tags", _tags, methods=["GET"]),
    Route("/api/ps", _ps, methods=["GET"]),
    Route("/api/version", _version, methods=["GET"]),
    Route("/api/show", _show, methods=["POST"]),
    Route("/api/pull", _pull, methods=["POST"]),
    *(Route(f"/api/{name}", _refuse, methods=["POST"]) for name in ("create", "push", "copy")),
    Route("/api/delete", _refuse, methods=["DELETE"]),
]
