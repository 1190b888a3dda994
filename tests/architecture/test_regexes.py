"""Patterns that check what somebody gave: none lets a final newline through."""

from __future__ import annotations

import ast

from tests.architecture.source import modules, tree


def _texts(node: ast.expr) -> list[str]:
    return [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def test_no_pattern_ends_before_a_final_newline() -> None:
    """``$`` matches before a newline at the end: use fullmatch, ``\\Z``, or where others read it ``$(?!\\n)``."""
    found = []
    for module in modules():
        for node in ast.walk(tree(module)):
            if not isinstance(node, ast.Call):
                continue
            of_re = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "re"
            given = [node.args[0]] if of_re and node.args else []
            given += [keyword.value for keyword in node.keywords if keyword.arg == "pattern"]
            for pattern in (text for each in given for text in _texts(each)):
                if pattern.endswith("$") and not pattern.endswith(r"\$"):
                    found.append(f"{module}:{node.lineno}: {pattern}")
            if of_re and isinstance(node.func, ast.Attribute) and node.func.attr == "match":
                found.append(f"{module}:{node.lineno}: re.match")
    assert not found
