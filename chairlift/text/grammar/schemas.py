"""Prepares JSON schemas for llguidance: finds errors that llguidance reports late, makes formats as strict as JSON
validators, and rewrites keywords that llguidance refuses although they have an equal form.

No rewritten schema accepts a value that the original schema refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from chairlift.base.structured_outputs import CANNOT_BE_FOLLOWED
from chairlift.errors import RequestError
from chairlift.text.grammar.strings import with_string_conditions

__all__ = ["MAX_OPTIONAL_PROPERTIES", "checked_schema", "checked_tags"]

MAX_OPTIONAL_PROPERTIES: Final = 1_000
"""Maximum number of optional properties of one object. Each is an alternative at the same position of the output, so
many properties make a step slow: 5 ms with 1,000, 27 ms with 2,400."""
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object that maps names to schemas."""
_LITERALS: Final = ("const", "enum", "default", "examples", "contentSchema", "discriminator", "dependentRequired")
"""Keywords whose value is not a schema, or is one that nothing has to satisfy."""
_BESIDE: Final = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "contains")
"""Keywords whose properties or items count as evaluated for ``unevaluatedProperties`` and ``unevaluatedItems``."""
_OF_NAMES: Final = ("type", "title", "description", "$comment", "deprecated", "examples", "default")
"""Keywords that restrict no name of a property."""
_MOST: Final = {"integer": 9 * 10**18, "number": 10**18}
"""Type -> largest bound that llguidance follows. A bound beyond it becomes this value, which is narrower."""
_MAX_STEPS: Final = 16
"""Maximum number of references that are followed to find a schema."""


def checked_tags(value: Any) -> Any:
    """A structural tag, with each of its schemas as :func:`checked_schema` returns it."""
    if isinstance(value, list):
        return [checked_tags(each) for each in value]
    if not isinstance(value, dict):
        return value
    schemas = ("json_schema", "schema")
    return {name: checked_schema(each) if name in schemas else checked_tags(each) for name, each in value.items()}


def checked_schema(schema: Any) -> Any:
    """A whole schema in a form that llguidance enforces completely. Raises RequestError for a schema that cannot be
    enforced."""
    checked = _checked(schema, schema if isinstance(schema, dict) else {})
    if checked is False and schema is not False:
        raise RequestError(
            f'{CANNOT_BE_FOLLOWED}the schema has the keyword "not" with a schema that every value satisfies, so no'
            " answer satisfies it; remove it"
        )
    return checked


def _checked(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of a schema. ``root`` is the whole schema, in which ``$ref`` is resolved."""
    if isinstance(schema, list):
        return [_checked(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema is not root and isinstance(schema.get("$id"), str) and "$ref" in schema:
        raise RequestError(
            f'{CANNOT_BE_FOLLOWED}a schema has "$id" beside "$ref", which drafts of the standard read in different'
            ' ways; remove "$id"'
        )
    _check_properties(schema)
    if _is_anything(schema.get("not")):
        return False
    result = {name: _inside(name, each, root) for name, each in schema.items()}
    _drop_without_effect(result)
    _limit_bounds(result)
    _name_properties(result, root)
    _tell_apart(result, root)
    return with_string_conditions(result)


def _inside(name: str, value: Any, root: Mapping[str, Any]) -> Any:
    if name in _BY_NAME and isinstance(value, dict):
        return {key: _checked(each, root) for key, each in value.items()}
    return value if name in _LITERALS else _checked(value, root)


def _is_anything(schema: Any) -> bool:
    """Whether every value satisfies the schema, because it has no keyword."""
    return schema is True or schema == {}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema to which a schema that is only a ``$ref`` points."""
    for _ in range(_MAX_STEPS):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for step in reference.removeprefix("#").split("/")[1:]:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema


def _check_properties(schema: dict[str, Any]) -> None:
    given = schema.get("properties")
    required = schema.get("required")
    names = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
    num_optional = len(given.keys() - names) if isinstance(given, dict) else 0
    if num_optional > MAX_OPTIONAL_PROPERTIES:
        raise RequestError(
            f'{CANNOT_BE_FOLLOWED}an object in the schema has {num_optional:,} "properties" that are not required, and'
            f" at most {MAX_OPTIONAL_PROPERTIES:,} are allowed; require them, or split the object"
        )
    min_properties = schema.get("minProperties")
    if isinstance(min_properties, (int, float)) and min_properties > max(1, len(names)):
        raise RequestError(
            f'{CANNOT_BE_FOLLOWED}the schema has the keyword "minProperties" with {min_properties},'
            ' and an answer may repeat a key, which counts once; name that many keys in "required",'
            " or use minProperties 1"
        )


# --- keywords without an effect ---------------------------------------------------------------------------------------


def _drop_without_effect(schema: dict[str, Any]) -> None:
    """Remove keywords that restrict nothing here. llguidance refuses them by name, whatever their value is."""
    if "if" not in schema or ("then" not in schema and "else" not in schema):
        _drop(schema, "if", "then", "else")
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        _drop(schema, "contains", "minContains", "maxContains")
    if schema.get("not") is False:
        _drop(schema, "not")
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is False or (isinstance(most, (int, float)) and most <= 1):
        _drop(schema, "uniqueItems")
    required = set(map(str, schema.get("required") or ()))
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        given = schema.get(name)
        if isinstance(given, dict):
            kept = {
                key: each
                for key, each in given.items()
                if not (_is_anything(each) or (isinstance(each, list) and required.issuperset(map(str, each))))
            }
            schema[name] = kept
            if not kept:
                _drop(schema, name)
    for name, other in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if _is_anything(schema.get(name)):
            _drop(schema, name)
        elif name in schema and not any(each in schema for each in _BESIDE):
            schema.setdefault(other, schema.pop(name))


def _drop(schema: dict[str, Any], *names: str) -> None:
    for name in names:
        schema.pop(name, None)


def _limit_bounds(schema: dict[str, Any]) -> None:
    """Replace bounds that are too large for llguidance by narrower ones, if another value is left between the
    bounds. Bounds in the form of draft 4 (``"exclusiveMinimum": true``) get the form of later drafts."""
    for name in ("minimum", "maximum"):
        exclusive = "exclusive" + name.capitalize()
        if schema.get(exclusive) is True and name in schema:
            schema[exclusive] = schema.pop(name)
        elif schema.get(exclusive) is False:
            del schema[exclusive]
    most = _MOST["integer" if schema.get("type") == "integer" else "number"]
    for name, other, sign in (("minimum", "maximum", -1), ("maximum", "minimum", 1)):
        exclusive = "exclusive" + name.capitalize()
        opposite = [schema.get(other), schema.get("exclusive" + other.capitalize())]
        if any(isinstance(each, (int, float)) and each * sign >= most for each in opposite):
            continue
        for key in (name, exclusive):
            if _is_number(schema.get(key)) and schema[key] * sign > most:
                del schema[key]
                schema.setdefault(name, sign * most)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# --- names of properties ----------------------------------------------------------------------------------------------


def _name_properties(schema: dict[str, Any], root: Mapping[str, Any]) -> None:
    """Express ``propertyNames`` by other keywords, if that is possible. Otherwise it stays, and is refused later."""
    if "propertyNames" not in schema:
        return
    names = _resolved(schema["propertyNames"], root)
    names = _checked(names, root) if isinstance(names, dict) else names
    rest = schema.get("additionalProperties", {})
    known = schema.get("properties") or {}
    patterns = schema.get("patternProperties") or {}
    if names is False or (isinstance(names, dict) and "string" not in _types(names)):
        listed: list[str] | None = []
    else:
        listed = _listed(names)
    if listed is not None and not patterns:
        order = [*(name for name in known if name in listed), *(name for name in listed if name not in known)]
        forbidden = {name: False for name in known if name not in listed}
        schema["properties"] = {name: known.get(name, rest) for name in order} | forbidden
        schema["additionalProperties"] = False
        del schema["propertyNames"]
        return
    conditions = _conditions(names)
    if conditions == []:
        del schema["propertyNames"]
    elif conditions is not None and len(conditions) == 1 and not known and not patterns:
        schema["patternProperties"] = {conditions[0]: rest}
        schema["additionalProperties"] = False
        del schema["propertyNames"]


def _types(schema: Mapping[str, Any]) -> Iterable[str]:
    kind = schema.get("type", "string")
    return [kind] if isinstance(kind, str) else kind


def _listed(names: Any) -> list[str] | None:
    """The names that a schema of names lists; None if it has no list, or other conditions beside it."""
    if not isinstance(names, dict) or not set(names) <= {"enum", "const", *_OF_NAMES}:
        return None
    if len({"enum", "const"} & set(names)) != 1:
        return None
    words = names["enum"] if "enum" in names else [names["const"]]
    return [word for word in words if isinstance(word, str)] if isinstance(words, list) else None


def _conditions(names: Any) -> list[str] | None:
    """Patterns that a schema of names is equal to; empty if it allows any name, None if there are no such patterns."""
    if names is True:
        return []
    if not isinstance(names, dict) or not set(names) <= {"pattern", "minLength", "maxLength", "allOf", *_OF_NAMES}:
        return None
    found = [names["pattern"]] if isinstance(names.get("pattern"), str) else []
    least = names.get("minLength", 0)
    most = names.get("maxLength", "")
    if least or most != "":
        found.append(f"^[\\s\\S]{{{least},{most}}}$")
    for each in names.get("allOf", ()):
        inner = _conditions(each)
        if inner is None:
            return None
        found += inner
    return found


# --- alternatives -----------------------------------------------------------------------------------------------------


def _tell_apart(schema: dict[str, Any], root: Mapping[str, Any]) -> None:
    """Require the property that tells the alternatives of ``oneOf`` apart. Without it, an object without this property
    could satisfy several of them. pydantic writes such schemas, because the property has a default there."""
    ways = schema.get("oneOf")
    if not isinstance(ways, list) or len(ways) < 2:
        return
    given = schema.get("discriminator")
    named = given.get("propertyName") if isinstance(given, Mapping) else None
    first = _resolved(ways[0], root)
    properties = first.get("properties") if isinstance(first, Mapping) else None
    candidates = [named] if isinstance(named, str) else [*properties] if isinstance(properties, Mapping) else []
    for name in candidates:
        values = [_values(way, name, root, 0) for way in ways]
        every = [value for each in values for value in each or ()]
        if all(values) and len(set(every)) == len(every):
            demand = {"type": "object", "required": [name]}
            schema["oneOf"] = [way if _requires(way, name, root) else {"allOf": [way, demand]} for way in ways]
            return


def _requires(schema: Any, name: str, root: Mapping[str, Any]) -> bool:
    schema = _resolved(schema, root)
    return name in (schema.get("required") or ()) and schema.get("type") == "object"


def _values(schema: Any, name: str, root: Mapping[str, Any], depth: int) -> list[str] | None:
    """The values of a property that an alternative allows, each as JSON text; None if it allows more than a list."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_STEPS:
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        one = _resolved(properties[name], root)
        words = one.get("enum", [one["const"]] if "const" in one else None) if isinstance(one, Mapping) else None
        return sorted({json.dumps(word, sort_keys=True) for word in words}) if isinstance(words, list) else None
    ways: list[Any] = next((schema[key] for key in ("oneOf", "anyOf") if isinstance(schema.get(key), list)), [])
    found = [_values(way, name, root, depth + 1) for way in ways]
    return [value for each in found for value in each or ()] if found and all(found) else None
