"""Structural tags as a Lark grammar: free text, and in it tags whose contents follow a schema.

The JSON is xgrammar's, which vLLM takes: ``{"structures": [...], "triggers": [...]}``, or ``{"format": ...}`` with

=====================  =============================================================================================
``const_string``       ``value``
``json_schema``        ``json_schema``
``regex``              ``pattern``; with ``end``, a text that ends the match and is nowhere else in it
``any_text``           any text; inside a sequence only before a part that begins with a marker, or at the end
``sequence``, ``or``   ``elements``
``tag``                ``begin``, ``content`` (a format), ``end``
``triggered_tags``     ``triggers``, ``tags``, ``at_least_one``, ``stop_after_first``: free text in which each trigger
                       begins a tag
``tags_with_separator``  ``tags``, ``separator``, ``at_least_one``, ``stop_after_first``: tags and no free text
=====================  =============================================================================================

Literal text that spells an added token of the model (``<tool_call>`` of Qwen3) becomes that token, as the model writes
it. Free text holds any token but special ones and those that begin or end a tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from chairlift.errors import RequestError

__all__ = ["TagMarkers", "structural_tag_grammar"]

_MAX_TAGS: Final = 512
_MAX_DEPTH: Final = 16
_JSON_OPTIONS: Final = "x-guidance"


class TagMarkers:
    """Added tokens of a tokenizer: text -> id. ``special`` tokens never occur in free text; the ``others`` may."""

    def __init__(self, special: Mapping[str, int], others: Mapping[str, int]) -> None:
        self.special = dict(special)
        self.others = dict(others)
        self._ids = {**self.others, **self.special}
        self.texts = sorted((text for text in self._ids if text.strip()), key=len, reverse=True)
        """Texts of the tokens, the longest first."""
        self._pattern = re.compile("|".join(map(re.escape, self.texts))) if self.texts else None

    def split(self, text: str) -> list[str | int]:
        """A literal text, split into ordinary texts and ids of added tokens, in order."""
        if self._pattern is None:
            return [text] if text else []
        parts: list[str | int] = []
        at = 0
        for match in self._pattern.finditer(text):
            parts += [text[at : match.start()]] if match.start() > at else []
            parts.append(self._ids[match[0]])
            at = match.end()
        return parts + ([text[at:]] if at < len(text) else [])


def structural_tag_grammar(spec: Mapping[str, Any], markers: TagMarkers, json_options: Mapping[str, Any]) -> str:
    """Lark grammar for ``spec``. ``json_options`` are llguidance's options for schemas in it. Raises RequestError."""
    return _Writer(markers, json_options).grammar(spec)


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"structured_outputs.structural_tag: {where} {what}")


def _quoted(parts: Sequence[str | int]) -> str:
    return " ".join(json.dumps(part) if isinstance(part, str) else f"<[{part}]>" for part in parts)


class _Writer:
    def __init__(self, markers: TagMarkers, json_options: Mapping[str, Any]) -> None:
        self._markers = markers
        self._options = dict(json_options)
        self._rules: list[str] = []
        self._bounds: set[int] = set()
        """Ids of tokens that begin or end a tag. Free text must not contain them."""
        self._tags = 0
        self._without: dict[str, str] = {}
        """Name of a terminal -> name of the rule for free text that repeats this terminal."""

    def grammar(self, spec: Mapping[str, Any]) -> str:
        if "structures" in spec or "triggers" in spec:
            root: Any = {
                "type": "triggered_tags",
                "triggers": spec.get("triggers"),
                "tags": [self._structure(each) for each in _items(spec, "structures", "structural_tag")],
            }
        elif isinstance(spec.get("format"), Mapping):
            root = spec["format"]
        else:
            raise _wrong("the object", "must have structures and triggers, or format")
        start = self._format(root, "format", None, 0)
        free = [token for token in self._markers.others.values() if token not in self._bounds]
        marker = " | ".join(f"<[{token}]>" for token in free)
        # The lexer reads a trigger and the text before it as one lexeme. So before such a lexeme, only text that ends
        # with a marker is possible.
        rules = [f"marked: (TEXT? ({marker}))*", "text: marked TEXT?"] if free else ['marked: ""', "text: TEXT?"]
        for name, terminal in self._without.items():
            rules.append(f"{name}: ({terminal}? ({marker}))* {terminal}?" if free else f"{name}: {terminal}?")
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, *rules, "TEXT: /(.|\\n)+/", ""])

    @staticmethod
    def _structure(given: Any) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            raise _wrong("each of structures", f"must be an object with begin, schema and end, got {given!r:.80}")
        content = {"type": "json_schema", "json_schema": given.get("schema", {})}
        return {"type": "tag", "begin": given.get("begin"), "content": content, "end": given.get("end")}

    def _rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _format(self, given: Any, where: str, end: str | None, depth: int) -> str:
        """Lark expression for a format. ``end`` is the literal that follows it, or None if unknown."""
        if not isinstance(given, Mapping):
            raise _wrong(where, f"must be an object with a type, got {given!r:.80}")
        if depth > _MAX_DEPTH:
            raise _wrong(where, f"is nested more than {_MAX_DEPTH} deep; make it flatter")
        writers: dict[Any, Callable[..., str]] = {
            "const_string": self._const,
            "json_schema": self._json,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in writers:
            raise _wrong(f"{where}.type", f"must be one of {', '.join(writers)}; got {kind!r:.80}")
        return writers[kind](given, where, end, depth)

    def _const(self, given: Mapping[str, Any], where: str, end: str | None, depth: int) -> str:
        return _quoted(self._literal(_text(given, "value", where)))

    def _json(self, given: Mapping[str, Any], where: str, end: str | None, depth: int) -> str:
        schema = given.get("json_schema", given.get("schema"))
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise _wrong(f"{where}.json_schema", f"must be a JSON schema, got {schema!r:.80}")
        if _JSON_OPTIONS in schema:
            raise _wrong(f"{where}.json_schema", f"has {_JSON_OPTIONS!r}, whose options requests cannot set; remove it")
        return self._rule(f"%json {json.dumps({_JSON_OPTIONS: self._options, **schema})}")

    def _regex(self, given: Mapping[str, Any], where: str, end: str | None, depth: int) -> str:
        from llguidance import regex_to_lark

        number = len(self._rules)
        self._rules.append(f"P{number}: /{regex_to_lark(_text(given, 'pattern', where), '')}/")
        if "end" not in given:
            return f"P{number}"
        close = _text(given, "end", where)
        literal = self._literal(close)
        plain = [part for part in literal if isinstance(part, str)]
        if literal[: len(plain)] != plain:
            raise _wrong(f"{where}.end", f"has a marker before plain text, got {close!r:.80}; end it with the marker")
        # As one lexeme: a match that is longer than the text would take in the beginning of the end.
        without = re.escape(close.strip()).replace("/", "\\/")
        self._rules.append(f"B{number}: P{number} & ~/(.|\\n)*{without}(.|\\n)*/")
        self._rules.append(f"E{number}: B{number} {_quoted(plain)}")
        return self._rule(f"E{number} {_quoted(literal[len(plain) :])}")

    def _any_text(self, given: Mapping[str, Any], where: str, end: str | None, depth: int) -> str:
        if end is not None and end and not isinstance(self._markers.split(end)[0], int):
            raise _wrong(where, "is any_text before plain text; put it in a tag of its own, or before a marker")
        return "text"

    def _sequence(self, given: Mapping[str, Any], where: str, end: str | None, depth: int) -> str:
        elements = _items(given, "elements", where)
        parts: list[str] = []
        for index, each in enumerate(elements):
            follows = end if index + 1 == len(elements) else _begins_with(elements[index + 1])
            parts.append(self._format(each, f"{where}.elements[{index}]", follows, depth + 1))
        return self._rule(" ".join(parts))

    def _or(self, given: Mapping[str, Any], where: str, end: str | None, depth: int) -> str:
        elements = _items(given, "elements", where)
        parts = [self._format(each, f"{where}.elements[{i}]", end, depth + 1) for i, each in enumerate(elements)]
        return self._rule(" | ".join(parts))

    def _tag(self, given: Mapping[str, Any], where: str, end: str | None, depth: int, skip: int = 0) -> str:
        """Lark expression for a tag. The first ``skip`` characters of the tag's beginning are left out, because the
        expression before the tag already matches them."""
        self._tags += 1
        if self._tags > _MAX_TAGS:
            raise _wrong(where, f"is one tag too many; {_MAX_TAGS} are allowed")
        begin = _text(given, "begin", where, empty=True)
        close = _text(given, "end", where, empty=True)
        content = given.get("content")
        opening = _quoted(self._literal(begin[skip:]))
        ending = self._literal(close)
        is_text = isinstance(content, Mapping) and content.get("type") == "any_text"
        if is_text and ending and isinstance(ending[0], int):
            return self._rule(f"{opening} {self._text_without(close)} {_quoted(ending)}")
        if is_text and ending and isinstance(ending[0], str):
            self._rules.append(f"l{len(self._rules)}[lazy]: /(.|\\n)*/ {json.dumps(ending[0])}")
            return self._rule(f"{opening} l{len(self._rules) - 1} {_quoted(ending[1:])}")
        inner = self._format(content, f"{where}.content", close, depth + 1)
        return self._rule(f"{opening} {inner} {_quoted(ending)}")

    def _text_without(self, close: str) -> str:
        """Rule for free text that cannot spell, with other tokens, the marker at the beginning of ``close``. A reader
        that sees only the text would take the spelled marker for the end of the tag."""
        spelled = next(text for text in self._markers.texts if close.startswith(text))
        pattern = re.escape(spelled).replace("/", "\\/").replace("\n", "n")
        number = len(self._rules)
        self._rules.append(f"T{number}: /(.|\\n)+/ & ~/(.|\\n)*{pattern}(.|\\n)*/")
        self._without[f"t{number}"] = f"T{number}"
        return f"t{number}"

    def _triggered(self, given: Mapping[str, Any], where: str, end: str | None, depth: int) -> str:
        tags = _items(given, "tags", where)
        used = [0]
        branches = []
        for index, trigger in enumerate(_items(given, "triggers", where)):
            if not isinstance(trigger, str) or not trigger:
                raise _wrong(f"{where}.triggers[{index}]", f"must be a text that is not empty, got {trigger!r:.80}")
            bodies = []
            for number, tag in enumerate(tags):
                place = f"{where}.tags[{number}]"
                if isinstance(tag, Mapping) and str(tag.get("begin") or "").startswith(trigger):
                    bodies.append(self._tag(tag, place, None, depth + 1, len(trigger)))
                    used.append(number + 1)
            if bodies:
                branches.append(f"{self._trigger(trigger, f'{where}.triggers[{index}]')} ({' | '.join(bodies)})")
        if missing := sorted(set(range(1, len(tags) + 1)) - set(used)):
            raise _wrong(f"{where}.tags[{missing[0] - 1}].begin", "must be a text that begins with one of the triggers")
        tag = self._rule(" | ".join(branches))
        if given.get("stop_after_first"):
            return tag if given.get("at_least_one") else self._rule(f"{tag} | text")
        return self._rule(f"{tag}{'+' if given.get('at_least_one') else '*'} text")

    def _trigger(self, trigger: str, where: str) -> str:
        """Lark expression for free text that ends with the trigger."""
        parts = self._literal(trigger)
        if isinstance(parts[0], int):
            return f"text {_quoted(parts)}"
        if len(parts) > 1:
            raise _wrong(where, f"has the marker in {trigger!r:.80} behind plain text; begin it with the marker")
        name = f"l{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: /(.|\\n)*/ {json.dumps(trigger)}")
        return f"marked {name}"

    def _separated(self, given: Mapping[str, Any], where: str, end: str | None, depth: int) -> str:
        tags = [
            self._tag(each, f"{where}.tags[{index}]", None, depth + 1)
            for index, each in enumerate(_items(given, "tags", where))
        ]
        tag = self._rule(" | ".join(tags))
        separator = _quoted(self._literal(_text(given, "separator", where, empty=True)))
        many = tag if given.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return self._rule(many) if given.get("at_least_one") else self._rule(f"({many})?")

    def _literal(self, text: str) -> list[str | int]:
        parts = self._markers.split(text)
        self._bounds |= {part for part in parts if isinstance(part, int)}
        return parts


def _begins_with(given: Any) -> str:
    """The literal that a format begins with. If it is unknown: a text that is not a marker."""
    if isinstance(given, Mapping):
        kind = given.get("type")
        if kind in ("const_string", "tag"):
            return str(given.get("value" if kind == "const_string" else "begin") or "?")
        if kind == "sequence" and given.get("elements"):
            return _begins_with(given["elements"][0]) if isinstance(given["elements"], list) else "?"
    return "?"


def _items(given: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        raise _wrong(f"{where}.{name}", f"must be a list that is not empty, got {value!r:.80}")
    return value


def _text(given: Mapping[str, Any], name: str, where: str, *, empty: bool = False) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise _wrong(f"{where}.{name}", f"must be a text{'' if empty else ' that is not empty'}, got {value!r:.80}")
    return value
