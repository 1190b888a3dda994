"""Prepares JSON schemas for llguidance: finds errors that llguidance reports late, and makes formats as strict as JSON
validators."""

from __future__ import annotations

from typing import Any, Final

from chairlift.base.structured_outputs import CANNOT_BE_FOLLOWED
from chairlift.errors import RequestError

__all__ = ["MAX_OPTIONAL_PROPERTIES", "checked_schemas"]

MAX_OPTIONAL_PROPERTIES: Final = 1_000
"""Maximum number of optional properties of one object. Each is an alternative at the same position of the output, so
many properties make a step slow: 5 ms with 1,000, 27 ms with 2,400."""
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value is an object that maps names to schemas."""
_LITERALS: Final = ("const", "enum", "default", "examples")
"""Keywords whose value is not a schema."""

_LETTER: Final = "[a-zA-Z0-9]"
_INNER: Final = "[a-zA-Z0-9-]"
_LABEL: Final = (
    f"(?:{_LETTER}{{1,2}}|{_LETTER}{_INNER}{_LETTER}|{_LETTER}{_INNER}(?:{_LETTER}|-){_LETTER}"
    f"|{_LETTER}{_INNER}(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,58}}{_LETTER})"
)
"""Regular expression for a label of a host name: 1 to 63 letters, digits and inner hyphens. The third and fourth
character are not both hyphens: such labels (``xn--``) encode names in other scripts, and a regular expression cannot
check them."""
_HOST: Final = f"{_LABEL}(?:\\.{_LABEL})*"
_LEAP_SECOND: Final = r"23:59:60(?:\.[0-9]+)?(?:[Zz]|[+-]00:00)"
_FORMATS: Final[dict[str, dict[str, Any]]] = {
    "date-time": {"pattern": f"^(?:.{{17}}[0-5].*|.{{11}}{_LEAP_SECOND})$"},
    "time": {"pattern": f"^(?:.{{6}}[0-5].*|{_LEAP_SECOND})$"},
    "hostname": {"pattern": f"^{_HOST}$", "maxLength": 253},
    "email": {"pattern": f"^[^@]{{1,64}}@(?:{_HOST}|\\[.*\\])$", "maxLength": 254},
}
"""Value of ``format`` -> schema with conditions that validators check and llguidance does not."""


def checked_schemas(value: Any) -> Any:
    """A schema, or a JSON value that contains schemas, with the additional conditions of ``_FORMATS``. Raises
    RequestError for a schema that cannot be enforced."""
    if isinstance(value, list):
        return [checked_schemas(each) for each in value]
    if not isinstance(value, dict):
        return value
    _check_properties(value)
    result = {name: _inside(name, each) for name, each in value.items()}
    demands = _FORMATS.get(value["format"]) if isinstance(value.get("format"), str) else None
    others = result.get("allOf", [])
    if demands is not None and isinstance(others, list):
        result["allOf"] = [*others, demands]
    return result


def _inside(name: str, value: Any) -> Any:
    if name in _BY_NAME and isinstance(value, dict):
        return {key: checked_schemas(each) for key, each in value.items()}
    return value if name in _LITERALS else checked_schemas(value)


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
