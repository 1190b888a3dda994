"""GET /v1/models: the served model and its names."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.engine.info import EngineInfo
from chairlift.errors import EngineDeadError
from chairlift.server.http.errors import ApiError
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response

__all__ = [
    "ModelCard",
    "ModelList",
    "adapter_named",
    "anthropic_page",
    "check_model",
    "engine_info",
    "generating_info",
    "is_anthropic",
    "model_card",
    "pooling_info",
    "routes",
]

_MAX_PAGE: Final = 1000
_MAX_NAMED: Final = 20
"""Maximum number of names that an error message lists."""
_BITS: Final = (
    "the same prompt, settings and seed give the same tokens and log-probabilities, whatever else is in the batch"
)
_NOISE: Final = (
    "the same prompt, settings and seed draw the same noise, but sums may round differently in another batch: long"
    " answers can differ"
)


class ModelCard(msgspec.Struct, kw_only=True):
    """One name of the model, or one adapter."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "chairlift"
    root: str
    """First one of the model's names."""
    parent: str | None = None
    """Name of the model that an adapter adapts; null for a model."""
    max_model_len: int | None = None
    """Maximum length of prompt and output together, in tokens; null while the model loads."""
    quantization: str | None = None
    """Format of quantised weights, such as fp8 (8 bits). null: the weights are not quantised."""
    kv_cache_dtype: str | None = None
    """``int8``: keys and values are stored in 8 bits. null: they have the model's dtype."""
    approximations: list[str] | None = None
    """Roundings and approximations beyond arithmetic in the model's dtype, in words; null while the model loads."""
    speculative_method: str | None = None
    """Method of speculative decoding (docs/speculation.md). null: draft tokens are used only for requests with a
    ``prediction``."""
    takes_images: bool | None = None
    """Whether messages may contain images; null while the model loads."""
    deterministic: bool | None = None
    determinism: str | None = None
    """When equal requests give equal outputs, as a sentence."""


class ModelList(msgspec.Struct, kw_only=True):
    """List of all names of the model and of the adapters."""

    object: str = "list"
    data: list[ModelCard]


class AnthropicModel(msgspec.Struct, kw_only=True, tag_field="type", tag="model"):
    """One name of the model in the form of Anthropic's API."""

    id: str
    display_name: str
    created_at: str
    """Time at which the server started, as in RFC 3339."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | UnsetType = UNSET
    """Maximum length of prompt and output together, in tokens; missing while the model loads."""
    max_tokens: int | UnsetType = UNSET
    """Maximum of the field ``max_tokens``; missing while the model loads."""


class AnthropicModels(msgspec.Struct, kw_only=True):
    """A page of the list of all names, in the form of Anthropic's API."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def check_model(state: ServerState, name: str | None) -> str:
    """The model name for the response. A missing ``name`` means the first name. Raises ApiError 404 for a name that is
    not served."""
    if name is not None and name not in state.model_names:
        if state.engine.adapters.names.is_public(name):
            return name
        served = ", ".join([*state.model_names, *state.engine.adapters.names.public][:_MAX_NAMED])
        message = f"the model {name!r:.100} is not served here; ask for {served}"
        raise ApiError(404, message, code="model_not_found", param="model")
    return state.model_names[0]


def adapter_named(state: ServerState, model: str) -> str:
    """Name of the adapter that the request field ``model`` selects; empty for the base model. Call
    :func:`check_model` first."""
    return "" if model in state.model_names else model


def engine_info(state: ServerState) -> EngineInfo:
    """Information about the loaded engine. Raises EngineDeadError before the engine is loaded."""
    if state.engine.info is None:
        raise EngineDeadError(f"the engine is {state.engine.state}; try again when GET /ready says so")
    return state.engine.info


def generating_info(state: ServerState) -> EngineInfo:
    """:func:`engine_info` for endpoints that generate text. Raises ApiError 400 for a model of embeddings, scores or
    classes."""
    info = engine_info(state)
    if info.pooling is not None:
        does, path = ("embeddings", "/v1/embeddings") if info.pooling.task == "embed" else ("classes", "/v1/classify")
        message = f"the model {state.model_names[0]!r:.100} gives {does} and generates no text; use POST {path}"
        raise ApiError(400, message, code="unsupported_model", param="model")
    return info


def pooling_info(state: ServerState) -> EngineInfo:
    """:func:`engine_info` for endpoints of embeddings, scores and classes. Raises ApiError 400 for a model that
    generates text."""
    info = engine_info(state)
    if info.pooling is None:
        message = (
            f"the model {state.model_names[0]!r:.100} generates text and gives no embeddings, scores or classes; use"
            " POST /v1/chat/completions or /v1/completions, or start a server with an embedding model"
        )
        raise ApiError(400, message, code="unsupported_model", param="model")
    return info


def model_card(state: ServerState, name: str) -> ModelCard:
    """The entry of one name in ``/v1/models``."""
    card = ModelCard(id=name, created=state.started_at, root=state.model_names[0])
    card.parent = card.root if adapter_named(state, name) else None
    info = state.engine.info
    if info is not None:
        card.max_model_len = info.max_model_len
        card.deterministic = info.deterministic
        card.quantization = info.quantization
        card.kv_cache_dtype = info.kv_cache_dtype
        card.approximations = list(info.approximations)
        card.speculative_method = info.speculative_method
        card.takes_images = info.takes_images
        card.determinism = _BITS if info.deterministic else _NOISE
    return card


def _anthropic_card(state: ServerState, name: str) -> AnthropicModel:
    info = state.engine.info
    started = datetime.datetime.fromtimestamp(state.started_at, datetime.UTC)
    return AnthropicModel(
        id=name,
        created_at=started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        display_name=name,
        max_input_tokens=UNSET if info is None else info.max_model_len,
        max_tokens=UNSET if info is None else info.max_model_len,
    )


def is_anthropic(request: Request) -> bool:
    """Whether the client uses Anthropic's API, whose requests have a header with its version."""
    return "anthropic-version" in request.headers


def anthropic_page(request: Request, names: Sequence[str]) -> AnthropicModels:
    """A page of the models. Raises ApiError for a bound that is no model or a limit out of range."""
    state: ServerState = request.app.state.server
    query = request.query_params
    given = query.get("limit", "20")
    if not given.isdecimal() or not 1 <= int(given) <= _MAX_PAGE:
        raise ApiError(
            400, f"limit must be from 1 to {_MAX_PAGE}; got {given!r:.40}", code="invalid_value", param="limit"
        )
    for bound in ("after_id", "before_id"):
        if bound in query and query[bound] not in names:
            message = f"{bound} must be the id of a model; got {query[bound]!r:.100}"
            raise ApiError(400, message, code="invalid_value", param=bound)
    first = names.index(query["after_id"]) + 1 if "after_id" in query else 0
    rest = names[first : names.index(query["before_id"]) if "before_id" in query else None]
    shown = rest[-int(given) :] if "before_id" in query else rest[: int(given)]
    return AnthropicModels(
        data=[_anthropic_card(state, name) for name in shown],
        has_more=len(rest) > len(shown),
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
    )


async def _list_models(request: Request) -> Response:
    state: ServerState = request.app.state.server
    names = [*state.model_names, *state.engine.adapters.names.public]
    if is_anthropic(request):
        return json_response(anthropic_page(request, names))
    return json_response(ModelList(data=[model_card(state, name) for name in names]))


async def _get_model(request: Request) -> Response:
    state: ServerState = request.app.state.server
    name = request.path_params["name"]
    check_model(state, name)
    return json_response(_anthropic_card(state, name) if is_anthropic(request) else model_card(state, name))


routes: Final = [
    Route("/v1/models", _list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", _get_model, methods=["GET"]),
]
