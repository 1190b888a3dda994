"""Form of an answer: a JSON schema, a pattern, a choice, a grammar or structural tags, as plain data.

Names are vLLM's (``StructuredOutputsParams``). This module compiles nothing and needs no llguidance;
:mod:`chairlift.text.grammar` does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from chairlift.errors import RequestError

__all__ = ["CANNOT_BE_FOLLOWED", "MAX_GRAMMAR_CHARS", "Grammar", "StructuredOutputsParams"]

MAX_GRAMMAR_CHARS: Final = 262_144
"""Maximum number of characters in the text of one grammar."""
CANNOT_BE_FOLLOWED: Final = "structured_outputs cannot be followed: "
"""Beginning of each error message whose cause is the caller's grammar."""
_MAX_CHOICES: Final = 4096
_KINDS: Final = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_OPTIONS: Final = "x-guidance"
"""Key of llguidance's own options in a schema. Requests may not set these options."""
_TEMPERATURE: Final = re.compile(r"\btemperature\s*=")


@dataclasses.dataclass(frozen=True, slots=True)
class Grammar:
    """One grammar as plain data: its kind and its text. It can be sent to another process."""

    kind: str
    """``json_schema``, ``regex``, ``choice`` (a JSON list), ``lark``, ``gbnf`` or ``structural_tag`` (JSON)."""
    text: str
    compact: bool = False
    """Whether JSON has no whitespace between its parts."""

    @property
    def key(self) -> bytes:
        """SHA-256 of kind, text and whitespace option. Equal grammars have equal keys."""
        return hashlib.sha256(f"{self.kind}\0{self.compact}\0{self.text}".encode("utf-8", "surrogatepass")).digest()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Form of the answer: exactly one of the fields up to ``structural_tag``.

    ::

        params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))

    Raises :class:`~chairlift.errors.RequestError` on construction if no field or several fields are set, if a value has
    the wrong type, and if a value is too long. Errors inside a schema or grammar are found when it is compiled.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """JSON schema of the answer; stored as JSON text."""
    json_object: bool | None = None
    """Whether the answer is a JSON object of any form."""
    regex: str | None = None
    """Regular expression that the whole answer matches, in the syntax of Rust's ``regex`` crate."""
    choice: Sequence[str] | None = None
    """Allowed answers; the answer is exactly one of these strings."""
    grammar: str | None = None
    """Context-free grammar in Lark form, as llguidance reads it, or in GBNF (a text with ``::=`` is GBNF)."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text with tags whose contents follow a schema; stored as JSON text. See
    :mod:`chairlift.text.grammar.structural_tag`."""
    disable_any_whitespace: bool = False
    """Whether JSON has no whitespace between its parts."""

    def __post_init__(self) -> None:
        names = [name for name in _KINDS if getattr(self, name) not in (None, False) or self._says_false(name)]
        if len(names) != 1:
            raise RequestError(
                f"structured_outputs must have exactly one of {', '.join(_KINDS)}; got {', '.join(names) or 'none'}"
            )
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise RequestError(f"structured_outputs.{name} must be true or false, got {getattr(self, name)!r:.80}")
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None and (
                not isinstance(getattr(self, name), str) or not getattr(self, name)
            ):
                raise RequestError(f"structured_outputs.{name} must be a text that is not empty")
        if self.json is not None:
            _set(self, "json", _schema_text(self.json))
        if self.structural_tag is not None:
            _set(self, "structural_tag", _object_text("structural_tag", self.structural_tag))
        if self.choice is not None:
            _set(self, "choice", _choices(self.choice))
        if self.grammar is not None:
            _check_grammar(self.grammar)
        if len(self.value.text) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"structured_outputs.{names[0]} has {len(self.value.text):,} characters, and at most"
                f" {MAX_GRAMMAR_CHARS:,} are allowed; make it smaller"
            )

    def _says_false(self, name: str) -> bool:
        return name == "json" and self.json is False

    @classmethod
    def of(cls, params: Any) -> StructuredOutputsParams:
        """Convert a mapping with the names of the fields. An object of this class is returned as it is."""
        if isinstance(params, cls):
            return params
        if not isinstance(params, Mapping):
            raise RequestError(f"structured_outputs must be a StructuredOutputsParams or an object, got {params!r:.80}")
        known = [field.name for field in dataclasses.fields(cls)]
        fields = {name: value for name, value in params.items() if value is not None}
        for name in [name for name, harmless in _HARMLESS.items() if fields.get(name) is harmless]:
            del fields[name]
        if unknown := [str(name) for name in fields if name not in known]:
            raise RequestError(
                f"structured_outputs has {unknown[0]!r:.80}, which is not supported; known are {', '.join(known)}"
            )
        return cls(**fields)

    @property
    def value(self) -> Grammar:
        """The requested grammar."""
        if self.json is not None:
            return Grammar("json_schema", str(self.json), self.disable_any_whitespace)
        if self.json_object:
            return Grammar("json_schema", '{"type": "object"}', self.disable_any_whitespace)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return Grammar("choice", json.dumps(list(self.choice)))
        if self.grammar is not None:
            return Grammar("gbnf" if "::=" in self.grammar else "lark", self.grammar)
        return Grammar("structural_tag", str(self.structural_tag), self.disable_any_whitespace)


_HARMLESS: Final = {"disable_fallback": True, "disable_additional_properties": False}
"""vLLM's field that does not exist here -> the value that is accepted, because it changes nothing."""


def _set(params: StructuredOutputsParams, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)


def _not_a_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _object_text(name: str, given: Any) -> str:
    """JSON text of an object. ``given`` is the object or its text."""
    try:
        value = json.loads(given, parse_constant=_not_a_number) if isinstance(given, str) else given
        if not isinstance(value, Mapping):
            raise RequestError(f"structured_outputs.{name} must be a JSON object, got {given!r:.80}")
        return json.dumps(_plain(value), allow_nan=False)
    except RequestError:
        raise
    except RecursionError:
        raise RequestError(f"structured_outputs.{name} is nested too deeply; make it flatter") from None
    except (ValueError, TypeError) as error:
        raise RequestError(f"structured_outputs.{name} is not JSON ({error!s:.200}); correct it") from None


def _plain(value: Any) -> Any:
    """Copy mappings of any kind as dictionaries with string keys, in the same order."""
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError("names must be text")
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _schema_text(value: Any) -> str:
    if value is True or (isinstance(value, str) and value.strip() == "true"):
        return "{}"
    if value is False or (isinstance(value, str) and value.strip() == "false"):
        raise RequestError("structured_outputs.json is the schema false, which no answer satisfies; give another")
    text = _object_text("json", value)
    if _OPTIONS in json.loads(text):
        raise RequestError(f"structured_outputs.json has {_OPTIONS!r}, whose options requests cannot set; remove it")
    return text


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
        raise RequestError(f"structured_outputs.choice must be a list of at least one string, got {value!r:.80}")
    if len(value) > _MAX_CHOICES:
        raise RequestError(f"structured_outputs.choice takes at most {_MAX_CHOICES:,} strings, got {len(value):,}")
    for each in value:
        if not isinstance(each, str) or not each:
            raise RequestError(f"structured_outputs.choice must hold strings that are not empty, got {each!r:.80}")
    return tuple(value)


def _check_grammar(text: str) -> None:
    if text.lstrip().startswith("{"):
        raise RequestError("structured_outputs.grammar must be a Lark or GBNF grammar, got JSON; use json for a schema")
    if _OPTIONS in text:
        raise RequestError(f"structured_outputs.grammar has {_OPTIONS!r}, whose options requests cannot set; remove it")
    if _TEMPERATURE.search(text):
        raise RequestError("structured_outputs.grammar sets a temperature, which only the request can; remove it")
