"""Writes the table of features and interfaces into docs/features.md.

::

    python tools/interface_table.py

An interface offers a feature if it has a name for it: a parameter in Python, a flag or a key of a JSON line on the
command line, a field in the body of a request. Images have no field of their own, so the functions that read messages
get one. A test compares the table with the page.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec.inspect

from chairlift import LLM, AsyncLLM, SamplingParams
from chairlift.cli.commands import COMMANDS
from chairlift.cli.conversation import LocalModel
from chairlift.cli.main import make_parser
from chairlift.engine.input_processor import images_of
from chairlift.models.vision.chats import take_images
from chairlift.server.anthropic import messages_input
from chairlift.server.anthropic.messages_types import MessagesRequest
from chairlift.server.openai import responses_input
from chairlift.server.openai.batches import ENDPOINTS
from chairlift.server.openai.pooling import EmbeddingRequest
from chairlift.server.openai.promises import NOT_IN_BATCHES
from chairlift.server.openai.protocol import ChatRequest, CompletionRequest, SampledRequest
from chairlift.server.openai.responses_types import ResponsesRequest
from tools.markdown import replaced, table

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "features.md"
BEGIN: Final = "<!-- interfaces, made by tools/interface_table.py -->"
_ADAPTER, _IMAGE, _EMBEDDINGS = "an adapter", "an image", "embeddings"
"""Names of features for which a request's type has no field."""
_PIXEL: Final = "data:image/png;base64,AAAA"

FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "streaming": ("stream", "kind"),
    "several answers (`n`)": ("n",),
    "log-probabilities": ("logprobs", "top_logprobs"),
    "JSON and other fixed forms": ("structured_outputs", "response_format", "text.format", "output_config.format"),
    "tools": ("tools",),
    "reasoning: effort or budget": ("thinking", "reasoning_effort", "reasoning.effort"),
    "images": (_IMAGE,),
    "an adapter (LoRA) per request": (_ADAPTER, "lora_request"),
    "priorities": ("priority",),
    "deadlines": ("deadline_ms",),
    "`cache_salt`": ("cache_salt",),
    "[prompts to keep](sessions.md#what-clients-send)": ("cache_control", "prompt_cache_options"),
    "[`session_id`](sessions.md#the-session)": ("session_id",),
    "stop strings": ("stop", "stop_sequences"),
    "`seed`": ("seed",),
    "penalties": ("presence_penalty",),
    "predicted text": ("prediction",),
    "embeddings": (_EMBEDDINGS, "embed"),
}
"""Feature -> names, one of which an interface with the feature has."""
REQUESTS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/messages": MessagesRequest,
}
"""Path of an endpoint -> type of its request bodies."""


def _methods(owner: type) -> Iterator[str]:
    """Public methods of a class, the parameters of those that generate, and the sampling parameters."""
    yield from (name for name in dir(owner) if not name.startswith("_"))
    for name in ("generate", "chat"):
        if hasattr(owner, name):
            yield from inspect.signature(getattr(owner, name)).parameters
    yield from SamplingParams.__dataclass_fields__
    if images_of({"prompt_token_ids": [1], "multi_modal_data": {"image": _PIXEL}})[0]:
        yield _IMAGE  # both classes pass prompts to the function that was just called


def _command_line() -> Iterator[str]:
    """Commands, flags of ``generate``, and keys of its JSON lines. The answers of ``chat`` are a stream."""
    yield from COMMANDS
    (commands,) = (action.choices for action in make_parser()._actions if isinstance(action.choices, dict))
    for flag in commands["generate"]._option_string_actions:
        yield flag.lstrip("-").replace("-", "_")
    yield from SamplingParams.__dataclass_fields__
    if inspect.isgeneratorfunction(LocalModel.stream):
        yield "stream"


def _fields(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Fields of a request, and of objects in it as ``text.format``."""
    for field in msgspec.inspect.type_info(kind).fields:
        yield field.encode_name
        for option in getattr(field.type, "types", ()):
            if isinstance(option, msgspec.inspect.StructType):
                yield from (f"{field.encode_name}.{inner.encode_name}" for inner in option.fields)


def _endpoint(path: str) -> Iterator[str]:
    """Names for what the endpoint takes: its fields, and what has no field of its own."""
    kind = REQUESTS[path]
    yield from _fields(kind)
    if issubclass(kind, SampledRequest):
        yield _ADAPTER  # `model` names it
    if kind is EmbeddingRequest:
        yield _EMBEDDINGS
    if path in _CHATS and take_images(_CHATS[path]())[1]:
        yield _IMAGE


def _chat() -> Any:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": _PIXEL}}]}]


def _chat_of_responses() -> Any:
    parts = [{"type": "input_image", "image_url": _PIXEL}]
    request = ResponsesRequest(input=[{"role": "user", "content": parts}])
    return responses_input.to_chat(request, [], responses_input.names()).messages


def _chat_of_messages() -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    request = MessagesRequest(
        messages=[{"role": "user", "content": [{"type": "image", "source": source}]}], max_tokens=1
    )
    return messages_input.to_chat(request, messages_input.names(), "", []).messages


_CHATS: Final[Mapping[str, Callable[[], Any]]] = {
    "/v1/chat/completions": _chat,
    "/v1/responses": _chat_of_responses,
    "/v1/messages": _chat_of_messages,
}
"""Path of an endpoint for conversations -> messages of a chat, from a request with an image."""


def interfaces() -> dict[str, set[str]]:
    """Interface -> names of all that it takes."""
    endpoints = {path: set(_endpoint(path)) for path in REQUESTS}
    batches = set().union(*(endpoints[path] for path in ENDPOINTS)) - set(NOT_IN_BATCHES)
    python = {"`LLM`": set(_methods(LLM)), "`AsyncLLM`": set(_methods(AsyncLLM))}
    paths = {f"`{path.removeprefix('/v1')}`": names for path, names in endpoints.items()}
    return {**python, "commands": set(_command_line()), **paths, "batches": batches}


def interface_table() -> str:
    """Table with a row for each feature and a column for each interface."""
    columns = interfaces()
    rows = [
        (feature, *("yes" if columns[each].intersection(names) else "no" for each in columns))
        for feature, names in FEATURES.items()
    ]
    return table(("", *columns), rows)


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, interface_table()))
