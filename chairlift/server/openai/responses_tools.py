"""Translates the tools of a response to the tools of a chat: functions, custom tools, and namespaces of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from chairlift.server.http.errors import ApiError
from chairlift.server.openai.translation import Names, wrong

__all__ = ["ResponseTools"]

_FUNCTION: Final = ("name", "description", "parameters", "strict", "output_schema")
"""Fields of a function that reach the prompt."""
_SEPARATOR: Final = "__"
_SERVED: Final = ("function", "custom", "namespace")


class ResponseTools:
    """The tools of one request. Tools of other kinds, such as ``web_search``, are left out of the prompt.

    ``client_names`` gets the place of each tool, and the namespace of each tool in one. ``ignored`` gets the paths of
    the tools that are left out.
    """

    def __init__(self, client_names: Names, ignored: list[str]) -> None:
        self.chat_tools: list[dict[str, Any]] = []
        self._names = client_names
        self._ignored = ignored
        self._left_out: set[str] = set()
        """Types of the tools that are left out."""

    def add(self, where: str, tools: Iterable[Any]) -> None:
        """Add the tools of the list at the path ``where``. Raises ApiError with the path of a wrong value."""
        for index, tool in enumerate(tools):
            place = f"{where}[{index}]"
            if not isinstance(tool, Mapping):
                wrong(place, "must be an object with a type", tool)
            kind = tool.get("type", "function")
            if kind == "namespace":
                self._add_namespace(place, tool)
            elif kind in _SERVED:
                self._add(place, tool, str(tool.get("name")))
            else:
                self._left_out.add(str(kind))
                self._ignored.append(place)

    def full_name(self, name: Any, namespace: Any = None) -> Any:
        """Name in the chat of the tool that the client calls ``name``. Without ``namespace``, a tool in a namespace is
        found if no other tool has this name."""
        if isinstance(namespace, str):
            return _full_name(namespace, name)
        if any(tool[tool["type"]]["name"] == name for tool in self.chat_tools):
            return name
        found = [full for full, (_, own) in self._names.namespaces.items() if own == name]
        return found[0] if len(found) == 1 else name

    def choice(self, given: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
        """``tool_choice`` as a chat request writes it: the tool's name is one level deeper. Raises ApiError if the
        choice needs a tool that is left out."""
        if given is None or isinstance(given, str):
            if given == "required" and self._left_out and not self.chat_tools:
                raise self._not_served("tool_choice is 'required'", sorted(self._left_out)[0])
            return given
        kind = given.get("type")
        if kind in ("function", "custom"):
            return {"type": kind, kind: {"name": self.full_name(given.get("name"), given.get("namespace"))}}
        tools = given.get("tools")
        if kind == "allowed_tools" and isinstance(tools, list):
            return self._allowed(given.get("mode"), tools)
        if isinstance(kind, str) and kind in self._left_out:
            raise self._not_served(f"tool_choice.type is {kind[:60]!r}", kind)
        allowed = '"auto", "none", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", ...}'
        return wrong("tool_choice", f"must be {allowed}", given)

    def _allowed(self, mode: Any, tools: Sequence[Any]) -> dict[str, Any]:
        kept = [tool for tool in tools if not (isinstance(tool, Mapping) and str(tool.get("type")) in self._left_out)]
        if tools and not kept:
            raise self._not_served("tool_choice.tools has no other tools", str(tools[0].get("type")))
        chosen = [self.choice(tool) if isinstance(tool, Mapping) else tool for tool in kept]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}

    def _not_served(self, why: str, kind: str) -> ApiError:
        message = (
            f"{why}, but tools of the type {kind[:60]!r} are not served; leave it out, or send a function and do"
            " yourself what it is to do"
        )
        return ApiError(400, message, code="unsupported_parameter", param="tool_choice")

    def _add(self, where: str, tool: Mapping[str, Any], name: str) -> None:
        kind = tool.get("type", "function")
        self._names.places[f"tools[{len(self.chat_tools)}]"] = where
        fields = _FUNCTION if kind == "function" else ("name", "description", "format")
        inner = {field: tool[field] for field in fields if tool.get(field) is not None}
        self.chat_tools.append({"type": kind, kind: {**inner, "name": name} if "name" in tool else inner})

    def _add_namespace(self, where: str, namespace: Mapping[str, Any]) -> None:
        """Add the tools of a namespace. The description of the namespace precedes the description of its first tool."""
        name, tools = namespace.get("name"), namespace.get("tools")
        if not isinstance(name, str) or not name:
            wrong(f"{where}.name", "must be a text", name)
        if not isinstance(tools, list):
            wrong(f"{where}.tools", "must be a list of functions and custom tools", tools)
        about = namespace.get("description")
        for index, tool in enumerate(tools):
            place = f"{where}.tools[{index}]"
            if not isinstance(tool, Mapping) or tool.get("type", "function") not in ("function", "custom"):
                wrong(place, "must be a function or a custom tool", tool)
            if not isinstance(tool.get("name"), str):
                wrong(f"{place}.name", "must be a text", tool.get("name"))
            full = _full_name(name, tool["name"])
            self._names.namespaces[full] = (name, tool["name"])
            if index == 0 and isinstance(about, str) and about:
                tool = {**tool, "description": f"{about}\n\n{tool.get('description') or ''}".strip()}
            self._add(place, tool, full)


def _full_name(namespace: str, name: Any) -> Any:
    if not isinstance(name, str):
        return name
    return namespace + name if namespace.endswith(_SEPARATOR) else namespace + _SEPARATOR + name
