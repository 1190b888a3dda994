"""Prints the number of lines of Python in each folder of the packages, the largest files, and circular imports.

A circular import gives exit code 1. Imports inside functions are included; imports for type checking are not.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = [ROOT / name for name in ("chairlift", "chairlift_lab", "chairlift_train")]


def circle() -> list[str]:
    """Modules that import each other in a circle, with the first module repeated at the end. Empty if there is no
    circle."""
    modules = {}
    for path in _files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for name, path in modules.items():
        found = _imports(ast.parse(path.read_text(encoding="utf-8")), modules)
        graph[name] = {other for other in found if other in modules and other != name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in package.rglob("*.py"))


def _imports(node: ast.AST, modules: Container[str]) -> Iterator[str]:
    """Names of modules that the code below ``node`` imports, except imports for type checking."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            for alias in child.names:
                name = f"{child.module}.{alias.name}"
                yield name if name in modules else child.module
        yield from _imports(child, modules)


def main() -> int:
    """Print one line per folder, largest first, then the ten largest files, the total, and a circle of imports if there
    is one."""
    files = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in _files()}
    folders: Counter[str] = Counter()
    packages: Counter[str] = Counter()
    for path, lines in files.items():
        parts = path.relative_to(ROOT).parts
        folders["/".join(parts[:2]) if len(parts) > 2 else f"{parts[0]}/*.py"] += lines
        packages[parts[0]] += lines
    for folder, lines in folders.most_common():
        print(f"{lines:7,}  {folder}")
    print("largest files:")
    for path, lines in Counter(files).most_common(10):
        print(f"{lines:7,}  {path.relative_to(ROOT)}")
    for package, lines in packages.most_common():
        print(f"{lines:7,}  lines of Python in {package}")
    print(f"{sum(files.values()):7,}  lines of Python in all packages")
    found = circle()
    print("imports in a circle: " + " -> ".join(found) if found else "no circle of imports")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
