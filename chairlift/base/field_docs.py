"""Reads the docstrings under the fields of a dataclass."""

from __future__ import annotations

import ast
import inspect
import textwrap

__all__ = ["field_docs", "first_sentence"]


def field_docs(owner: type) -> dict[str, str]:
    """Field of a dataclass -> text of the docstring under it, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    docs: dict[str, str] = {}
    name = None
    for node in getattr(body, "body", []):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs[name] = " ".join(str(node.value.value).split())
            name = None
    return docs


def first_sentence(text: str) -> str:
    """The first sentence, without its full stop."""
    return text.split(". ", 1)[0].rstrip(".")
