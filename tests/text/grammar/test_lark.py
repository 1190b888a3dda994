"""Lark grammars as regular expressions: the same texts as Lark's own rules, and errors that name what is not served."""

from __future__ import annotations

import re

import pytest

from chairlift.errors import RequestError
from chairlift.text.grammar.lark import lark_regex

PATCH_GRAMMAR = r"""start: opening change+ closing
opening: "*** Begin Patch" LF
closing: "*** End Patch" LF?
?change: added | removed | edited
added: "*** Add File: " path LF new+
removed: "*** Delete File: " path LF
edited: "*** Update File: " path LF moved? part?
moved: "*** Move to: " path LF
part: (place | edit)+ at_end?
place: ("@@" | "@@ " /(.+)/) LF
edit: ("+" | "-" | " ") /(.*)/ LF
new: "+" /(.*)/ LF -> line
at_end: "*** End of File" LF
path: /(.+)/
%import common.LF
"""
"""A grammar of the patches that Codex's tool ``apply_patch`` takes."""
PATCH = "*** Begin Patch\n*** Update File: a b.py\n*** Move to: c.py\n@@ def f\n-old\n+new\n same\n*** End Patch"


def fits(grammar: str, text: str) -> bool:
    return re.fullmatch(lark_regex(grammar), text) is not None


CASES = [
    ('start: "a" "b"?', ["a", "ab"], ["b", "abb"]),
    ('start: ("a" | "b" "c")+', ["a", "bca"], ["", "b"]),
    ('start: ["a"] B~2..3\nB: "x"i', ["axx", "XxX"], ["ax", "xxxx"]),
    ('start: B~2\nB: "0".."3"', ["03"], ["0", "04"]),
    ("start: A\nA: /a\\/b?/s", ["a/b", "a/"], ["a\\/b"]),
    ("start: A\nA: /ab./is", ["AB\n"], ["ab"]),
    ('start: x // words\nx: "a" -> first\n  | "b" # other\n  | (\n    "c"\n  )', ["a", "b", "c"], ["ab"]),
    ("?start: w\n!w.2: CNAME\n%import common.CNAME", ["_a1"], ["1a"]),
    ("start: N LF\n%import common (NUMBER, LF)\nN: NUMBER", ["1\n", "1.5e3\n"], ["1", ".\n"]),
    ("start: W W\n%import common.WORD -> W\n%import common.WS\n%ignore WS", [" a b\n", "ab c "], ["a1", "a  "]),
    ('start: "." "\\n" "\\"" "é" "\\t"', ['.\n"é\t'], ['x\n"é\t']),
    ("start: S\n%import common.ESCAPED_STRING\nS: ESCAPED_STRING", ['"a\\"b"'], ['"a"b"']),
    ('start: a a\na: _b\n_b: "x" |', ["", "x", "xx"], ["xxx"]),
    (PATCH_GRAMMAR, [PATCH, PATCH + "\n"], [PATCH[1:], PATCH.replace("@@", "@"), "*** Begin Patch\n*** End Patch"]),
]


@pytest.mark.parametrize(("grammar", "right", "wrong"), CASES)
def test_a_grammar_has_the_texts_of_its_rules(grammar: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not fits(grammar, text)] == []
    assert [text for text in wrong if fits(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start: e\ne: "(" e ")" | "x"', "line 2 .*'e' refers to itself"),
        ("start: A\nA: /a(?=b)/", "line 2 .*look-around"),
        ('start: t{"a"}\nt{x}: x', "templates"),
        ('start: "a"{2}', "~2..3"),
        ("start: A\n%declare A", "%declare A is not read"),
        ("start: A\n%import python.NAME", "%import python . NAME is not read"),
        ("start: A\n%import common.NOTHING", "common.NOTHING is not known; there are DIGIT"),
        ("start: a", "'a' is not defined"),
        ('a: "x"', "no rule 'start'"),
        ('start: "a\nb: "c"', "line 1 .* is not understood"),
        ('start: ("a"', "'\\(' is not closed"),
        ('start: "a" )', "'\\)' is not understood"),
        ('start "a"', "must be followed by ':'"),
        ('start: "a"\nstart: "b"', "line 2 .*defined again"),
        ("start: <think>", "special tokens are not read"),
        ('start: "\\q"', "escape that is not known"),
        ('start: "a"~x', "a number must follow"),
        ('start: "ab".."c"', "one character on each side"),
        ("start: a~60 a~60\na: b~60 b~60\n" + 'b: "' + "x" * 3000 + '"', None),
        ("start: c c c c c c c c\nc: b b b b b b b b b b\nb: /" + "x" * 3000 + "/", "longer than 65,536"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_refused_by_its_construct(grammar: str, message: str | None) -> None:
    if message is None:
        assert lark_regex(grammar)
        return
    with pytest.raises(RequestError, match=message):
        lark_regex(grammar)
