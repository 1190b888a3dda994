"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: change the served adapters while the server runs.

Names and bodies are vLLM's. A caller of these two endpoints changes the generated text of all clients, and chooses
directories that the server reads. So the endpoints need the API key named ``admin``, and adapters must be below
``--lora-dir``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.errors import ConfigError, ModelLoadError, RequestError
from chairlift.server.http.auth import check_admin
from chairlift.server.http.errors import ApiError
from chairlift.server.http.limits import read_json
from chairlift.server.http.state import ServerState
from chairlift.server.http.streaming import json_response
from chairlift.server.openai.protocol import AdapterName, parse, warning_headers

__all__ = ["AdapterReply", "LoadRequest", "UnloadRequest", "load_modules", "routes"]


class LoadRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/load_lora_adapter."""

    lora_name: AdapterName
    """Value of ``model`` for requests that use the adapter."""
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Directory or GGUF file below ``--lora-dir`` on the server's machine: relative to it, or absolute."""
    load_inplace: bool = False
    """Replace the loaded adapter of the same name. Running requests continue with the old adapter."""


class UnloadRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: AdapterName


class _Module(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An item of ``--lora-modules`` in vLLM's JSON form."""

    name: str
    path: str
    base_model_name: str | None = None
    """Base model of the adapter: must be one of the served model's names."""


class AdapterReply(msgspec.Struct, kw_only=True):
    """The response of both endpoints: the adapter's name, and whether it is loaded now."""

    lora_name: str
    loaded: bool


def _adapter_directory(state: ServerState, given: str) -> tuple[Path, str]:
    """(adapter directory, ``--lora-dir``). Raises ApiError 400 if the adapter directory is not inside
    ``--lora-dir``."""
    if state.config.lora_dir is None:
        message = "adapters are loaded from below --lora-dir, and the server was started without"
        raise ApiError(400, message, code="not_enabled", param="lora_path")
    try:
        root = Path(state.config.lora_dir).resolve()
        path = (root / given).resolve()
        inside = path.is_relative_to(root)
    except (OSError, RuntimeError, ValueError):
        inside = False
    if not inside:
        message = "lora_path must lie below the server's --lora-dir, also when links are followed"
        raise ApiError(400, message, code="invalid_value", param="lora_path")
    return path, str(root)


async def _load(request: Request) -> Response:
    """Load an adapter. The response is sent when the adapter is ready for use."""
    state: ServerState = request.app.state.server
    check_admin(request)
    payload, ignored = parse(LoadRequest, await read_json(request))
    if payload.lora_name in state.model_names:
        message = f"{payload.lora_name!r} is a name of the model itself; choose another"
        raise ApiError(400, message, code="invalid_value", param="lora_name")
    path, root = _adapter_directory(state, payload.lora_path)
    try:
        await state.engine.adapters.load(payload.lora_name, path, root=root, in_place=payload.load_inplace)
    except (ConfigError, ModelLoadError, RequestError) as error:
        raise ApiError(400, f"{error}; nothing was changed", code="invalid_value") from None
    return json_response(AdapterReply(lora_name=payload.lora_name, loaded=True), warning_headers(ignored))


async def _unload(request: Request) -> Response:
    """Unload an adapter. The response is sent at once; running requests keep the adapter until they end."""
    state: ServerState = request.app.state.server
    check_admin(request)
    payload, ignored = parse(UnloadRequest, await read_json(request))
    adapters = state.engine.adapters
    if not adapters.names.is_public(payload.lora_name) or not adapters.unload(payload.lora_name):
        message = f"the adapter {payload.lora_name!r} is not loaded; GET /v1/models lists those that are"
        raise ApiError(404, message, code="model_not_found", param="lora_name")
    return json_response(AdapterReply(lora_name=payload.lora_name, loaded=False), warning_headers(ignored))


def _named(state: ServerState, module: str) -> tuple[str, str]:
    """(name, path) of an item of ``--lora-modules``. The item is ``name=path``, or a JSON object as in vLLM. Raises
    ConfigError."""
    name, _, path = module.partition("=")
    if module.lstrip().startswith("{"):
        try:
            given = msgspec.json.decode(module, type=_Module)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"lora_modules: {module!r:.200} is not name and path in JSON ({error})") from None
        name = given.name
        path = given.path
        if given.base_model_name not in (None, *state.model_names):
            served = ", ".join(state.model_names)
            raise ConfigError(f"lora_modules: base_model_name is {given.base_model_name!r:.100}, but here is {served}")
    if not name or not path:
        raise ConfigError(f'lora_modules must be name=path, or {{"name": ..., "path": ...}}, got {module!r:.200}')
    return name, path


async def load_modules(state: ServerState) -> None:
    """Load the adapters of ``--lora-modules``. Raises ConfigError if an adapter cannot be loaded."""
    for module in state.config.lora_modules:
        name, path = _named(state, module)
        if name in state.model_names:
            raise ConfigError(f"lora_modules: {name!r:.200} is a name of the model itself; choose another")
        local = Path(path).expanduser()
        try:
            await state.engine.adapters.load(name, local.absolute() if local.exists() else path)
        except (ModelLoadError, RequestError) as error:
            raise ConfigError(f"lora_modules: {name!r:.200}: {error}") from None


routes: Final = [
    Route("/v1/load_lora_adapter", _load, methods=["POST"]),
    Route("/v1/unload_lora_adapter", _unload, methods=["POST"]),
]
