"""Conditions on strings: the formats that are enforced, and patterns with look-around that have an equal without it."""

from __future__ import annotations

import re
from typing import Any, Final

__all__ = ["ENFORCED_FORMATS", "is_whole", "with_string_conditions"]

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
_LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE: Final = (
    f"(?:{_LEAP_YEAR}-02-29|[0-9]{{4}}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])))"
)
_HEX: Final = "[0-9a-fA-F]"
_GROUP: Final = f"{_HEX}{{1,4}}"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LAST: Final = f"(?:{_GROUP}:{_GROUP}|{_BYTE}(?:\\.{_BYTE}){{3}})"


def _ipv6() -> str:
    """Regular expression for an IPv6 address, with the alternatives of RFC 3986 in its order."""
    forms = [f"(?:{_GROUP}:){{6}}{_LAST}", f"::(?:{_GROUP}:){{5}}{_LAST}"]
    ends = [*(f"(?:{_GROUP}:){{{count}}}{_LAST}" for count in (4, 3, 2, 1, 0)), _GROUP, ""]
    forms += [f"(?:(?:{_GROUP}:){{0,{most}}}{_GROUP})?::{end}" for most, end in enumerate(ends)]
    return "|".join(forms)


def _uuid(version: str) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"


_POINTER: Final = "(?:/(?:[^/~]|~[01])*)*"
_WHOLE: Final = {
    "date": _DATE,
    "ipv6": _ipv6(),
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
    "base64": "(?:[0-9a-zA-Z+/]{4})*(?:[0-9a-zA-Z+/]{2}==|[0-9a-zA-Z+/]{3}=)?",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
"""Format -> regular expression that describes it completely. It replaces the format."""
_MORE: Final[dict[str, dict[str, Any]]] = {
    "date-time": {"pattern": f"^(?:{_DATE}.{{7}}[0-5].*|{_DATE}.{_LEAP_SECOND})$"},
    "time": {"pattern": f"^(?:.{{6}}[0-5].*|{_LEAP_SECOND})$"},
    "hostname": {"pattern": f"^{_HOST}$", "maxLength": 253},
    "email": {"pattern": f"^[^@]{{1,64}}@(?:{_HOST}|\\[.*\\])$", "maxLength": 254},
    "duration": {},
    "ipv4": {},
    "uri": {},
}
"""Format that llguidance knows -> schema with conditions that validators check and llguidance does not."""
ENFORCED_FORMATS: Final = (*_WHOLE, *_MORE)
"""Values of ``format`` that are enforced. Any other value is an annotation, as the standard says."""

_DAYS: Final = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_SECONDS: Final = r"\d+(?:[.,]\d+)?S"
_CLOCK: Final = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_EQUALS: Final = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|{_DAYS}(?:{_CLOCK})?|{_CLOCK})$"
    ),
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
}
"""Pattern with look-around that zod (e-mail, duration) and pydantic (Decimal) write -> equal pattern without it."""
_AHEAD: Final = "^(?="


def with_string_conditions(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its ``format`` and ``pattern`` in forms that llguidance enforces completely. The conditions are
    not changed, except that a few formats are narrower than the standard."""
    result = dict(schema)
    demands: list[dict[str, Any]] = []
    if isinstance(pattern := schema.get("pattern"), str):
        first, *others = _without_look_ahead(_EQUALS.get(pattern, pattern))
        result["pattern"] = first
        demands += [{"pattern": each} for each in others]
    form = schema.get("format")
    if isinstance(form, str):
        # A time in zod's form has no offset, and one in the form of the standard has. The pattern decides.
        is_known = form in _MORE and not (form == "time" and "pattern" in schema)
        if not is_known:
            del result["format"]
        if form in _WHOLE:
            demands.append({"pattern": f"^(?:{_WHOLE[form]})$"})
        elif is_known and _MORE[form]:
            demands.append(_MORE[form])
    others = schema.get("allOf", [])
    if demands and isinstance(others, list):
        result["allOf"] = [*others, *demands]
    return result


def is_whole(pattern: str) -> bool:
    """Whether the pattern is ``^(?:...)$`` with one group, so that it describes the whole text."""
    return pattern.startswith("^(?:") and _closing(pattern, 4) == len(pattern) - 2 and pattern.endswith("$")


def _without_look_ahead(pattern: str) -> list[str]:
    """Patterns that together are equal to ``pattern``. A positive look-ahead at its beginning becomes a pattern of its
    own. Look-around in any other place stays, and is refused later."""
    ahead: list[str] = []
    while pattern.startswith(_AHEAD):
        end = _closing(pattern, len(_AHEAD))
        if end is None:
            break
        ahead.append(f"^(?:{pattern[len(_AHEAD) : end]})")
        pattern = "^" + pattern[end + 1 :]
    # "^a|b" is an alternative in which only the first part has the look-ahead.
    return [pattern, *ahead] if not ahead or _is_one_branch(pattern) else ["^(?=" + ahead[0]]


_PART: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""An escaped character, a class of characters, or any other character of a regular expression."""


def _closing(pattern: str, at: int) -> int | None:
    """Offset of the parenthesis that closes the group whose content begins at ``at``; None if there is none."""
    depth = 1
    for part in _PART.finditer(pattern, at):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if depth == 0:
            return part.start()
    return None


def _is_one_branch(pattern: str) -> bool:
    """Whether the pattern has no ``|`` outside of groups."""
    depth = 0
    for part in _PART.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if part[0] == "|" and depth == 0:
            return False
    return True
