"""Structured outputs: reads the fields of OpenAI, vLLM and older vLLM that constrain the form of the output, and makes
one value from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.errors import RequestError
from chairlift.server.http.errors import ApiError

if TYPE_CHECKING:
    from chairlift.server.openai.protocol import GenerationRequest

__all__ = ["FIELDS", "naming", "structured_outputs"]

FIELDS: Final = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    "structural_tag",
)
"""Fields that constrain the form of the output; a request may have one of them."""
_CALLS: Final = "tool_choice asks for a call, whose grammar is made of the parameters of tools:"
_INSIDE: Final = {
    "response_format": "response_format.json_schema.schema",
    "guided_json": "guided_json",
    "guided_regex": "guided_regex",
    "guided_choice": "guided_choice",
    "guided_grammar": "guided_grammar",
}


def structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """Constraint on the form of the output that the request asks for; None for free text. Raises ApiError with the name
    of a field."""
    given = _form_fields(request)
    if len(given) > 1:
        message = f"{' and '.join(given)} each ask for a form of the answer; leave all but one out"
        raise ApiError(400, message, code="invalid_value", param=given[1])
    if not given:
        return None
    name = given[0]
    value: Any = getattr(request, name)
    with naming(request):
        if name == "response_format":
            return _of_response_format(value)
        if name == "structured_outputs":
            return StructuredOutputsParams.of(value)
        return StructuredOutputsParams.of({name.removeprefix("guided_"): value})


@contextlib.contextmanager
def naming(request: GenerationRequest) -> Iterator[None]:
    """Context manager: add the name of the field to errors about a grammar, both as ``param`` and in the message."""
    try:
        yield
    except RequestError as error:
        message = str(error)
        given = _form_fields(request)
        forces = _forces_call(request)
        if message.startswith("tool_choice "):
            param = "tool_choice" if forces else given[0]
            raise ApiError(400, message, code="unsupported_parameter", param=param) from None
        if not message.startswith("structured_outputs") or not (given or forces):
            raise
        name = "tool_choice" if forces else given[0]
        inside = _CALLS if forces else _INSIDE.get(name, name)
        if not forces and name == "response_format" and (request.response_format or {}).get("type") == "json_object":
            inside = "response_format.schema"
        if name != "structured_outputs":
            kind, _, rest = message.removeprefix("structured_outputs").partition(" ")
            message = f"{inside if kind or forces else name} {rest}"
        raise ApiError(400, message, code="invalid_value", param=name) from None


def _forces_call(request: GenerationRequest) -> bool:
    """Whether the request's output has a grammar because ``tool_choice`` forces a tool call."""
    choice = getattr(request, "tool_choice", None)
    if isinstance(choice, dict) and isinstance(choice.get("allowed_tools"), dict):
        choice = choice["allowed_tools"].get("mode")
    return choice not in (None, "auto", "none")


def _form_fields(request: GenerationRequest) -> list[str]:
    """Names of the fields in the request that ask for a form other than text."""
    named = [name for name in FIELDS if getattr(request, name) is not None]
    return [name for name in named if getattr(request, name) != {"type": "text"} or name != "response_format"]


def _of_response_format(given: dict[str, Any]) -> StructuredOutputsParams:
    kind = given.get("type")
    if kind == "json_object":
        schema = given.get("schema")
        return StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag={name: each for name, each in given.items() if name != "type"})
    if kind == "json_schema":
        schema = given.get("json_schema")
        if not isinstance(schema, dict) or "schema" not in schema:
            message = "response_format.json_schema must be an object with a schema: {'name': ..., 'schema': {...}}"
            raise ApiError(400, message, code="invalid_value", param="response_format")
        return StructuredOutputsParams(json=schema["schema"])
    message = f"response_format.type must be text, json_object, json_schema or structural_tag; got {kind!r:.80}"
    raise ApiError(400, message, code="invalid_value", param="response_format")
