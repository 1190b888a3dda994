"""Syntax trees of the modules of our packages. The modules are parsed but never imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__all__ = ["PACKAGES", "ROOT", "imports", "modules", "tree"]

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / name for name in ("chairlift", "chairlift_lab", "chairlift_train")]


@cache
def modules() -> dict[str, Path]:
    """Dotted module name -> file, for every module of our packages."""
    found = {}
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def imports(module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, including imports inside functions and for type checking.

    ``from package import name`` is listed as ``package.name`` if that is a module.
    """
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield node.lineno, name if name in modules() else base
