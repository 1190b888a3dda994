"""A reader who meets a class's name knows which class is meant."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.architecture.source import modules, tree


def test_no_public_class_has_the_name_of_another() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    assert len(found) > 500
    shared = {name: places for name, places in found.items() if len(places) > 1}
    assert not shared, "give one of them a more exact name, in the field's words"
