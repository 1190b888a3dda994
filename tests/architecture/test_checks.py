"""Every test checks something: a test that ends well whatever the code does would only look like one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_CALLS = ("raises", "warns", "fail")
Key = tuple[str, str]
"""A definition: the dotted name of its module, and its own name."""


def definitions(tree: ast.Module) -> dict[str, ast.AST]:
    """Each function, class and variable on the first level of a module."""
    known: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            known[node.name] = node
        for target in [*getattr(node, "targets", []), getattr(node, "target", None)]:
            if isinstance(target, ast.Name):
                known[target.id] = node
    return known


def names_of(module: str, trees: dict[str, ast.Module]) -> dict[str, Key]:
    """What the imports from other modules of the tests mean: name -> definition, or (module, "") for a module."""
    names = {}
    for node in ast.walk(trees[module]):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = (whole, "") if whole in trees else (node.module, alias.name)
    return names


def used(module: str, node: ast.AST, names: dict[str, Key]) -> set[Key]:
    """The definitions that are named in a part of a module, as functions, as attributes of modules, or as fixtures."""
    found = set()
    parents = module.split(".")
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(names.get(each.id, (module, each.id)))
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in names:
            found.add((names[each.value.id][0], each.attr))
        elif isinstance(each, ast.arg):
            found.add((module, each.arg))
            found |= {(".".join([*parents[:depth], "conftest"]), each.arg) for depth in range(1, len(parents))}
    return found


def checks(node: ast.AST) -> bool:
    """Whether a part of a module may raise by itself: an assertion, an error, or a call that asserts."""
    for each in ast.walk(node):
        if isinstance(each, (ast.Assert, ast.Raise)):
            return True
        if isinstance(each, ast.Call):
            name = each.func.attr if isinstance(each.func, ast.Attribute) else getattr(each.func, "id", "")
            if name in _CALLS or name.startswith(("assert_", "check_invariants")):
                return True
            if any(keyword.arg == "check" and ast.unparse(keyword.value) == "True" for keyword in each.keywords):
                return True  # a process that must end well
    return False


def without_a_check(trees: dict[str, ast.Module]) -> list[str]:
    """The tests that check nothing, neither themselves nor through the helpers and fixtures that they name."""
    known = {(module, name): node for module, tree in trees.items() for name, node in definitions(tree).items()}
    names: dict[str, dict[str, Key]] = {}

    def reaches_a_check(key: Key) -> bool:
        seen, open_keys = {key}, [key]
        while open_keys:
            module, name = open_keys.pop()
            if checks(known[module, name]):
                return True
            if module not in names:
                names[module] = names_of(module, trees)
            new = (used(module, known[module, name], names[module]) & known.keys()) - seen
            seen |= new
            open_keys += new
        return False

    return sorted(".".join(key) for key in known if key[1].startswith("test_") and not reaches_a_check(key))


def test_every_test_checks_something() -> None:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    assert without_a_check(dict(zip(names, trees, strict=True))) == []


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("    work()", True),
        ("    helper()", False),
        ("    other.helper()", False),
        ("    assert work()", False),
        ("    with pytest.raises(ValueError):\n        work()", False),
        ("    np.testing.assert_equal(1, 1)", False),
        ("    subprocess.run(['x'], check=True)", False),
    ],
)
def test_a_test_without_a_check_is_found(body: str, found: bool) -> None:
    source = f"from tests import other\nfrom tests.other import helper\n\n\ndef test_it() -> None:\n{body}\n"
    trees = {"tests.test_a": source, "tests.other": "def helper() -> None:\n    assert True\n"}
    parsed = {module: ast.parse(text) for module, text in trees.items()}
    assert without_a_check(parsed) == (["tests.test_a.test_it"] if found else [])
