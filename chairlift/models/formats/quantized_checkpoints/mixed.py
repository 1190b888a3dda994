"""Several ways of storing weights in one checkpoint. The tensors of a layer say which of them it uses.

The patterns in a config file that name the layers of each way are not run, because they are untrusted. Names, dtypes
and shapes of a layer's tensors fit one way only. If they fit several ways that would give different weights, the
checkpoint is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from chairlift.errors import ModelLoadError
from chairlift.models.formats.quantized_checkpoints.layer import Method, StoredLayer
from chairlift.models.formats.stored_rows import StoredRows

__all__ = ["one_method"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mixed(Method):
    methods: tuple[Method, ...]

    def rows(self, layer: StoredLayer) -> StoredRows:
        found: list[StoredRows] = []
        problems: list[ModelLoadError] = []
        for method in self.methods:
            if layer.files.keys() <= method.marks | method.companions:
                try:
                    found.append(method.rows(layer))
                except ModelLoadError as error:
                    problems.append(error)
        if not found and problems:
            raise problems[0]
        if not found:
            layer.fail(min(layer.files), f"and {', '.join(sorted(layer.files))} fit no format that the config names")
        if len(set(map(_meaning, found))) > 1:
            layer.fail(min(layer.files), "fits several formats that the config names, with different values")
        return found[0]


def _meaning(rows: StoredRows) -> tuple[object, ...]:
    """What distinguishes two ways of reading the same tensors."""
    shape = rows.get_shape()
    kind = rows.kind
    if kind is not None and kind.group >= shape[-1]:  # larger groups are the same: a whole row
        kind = kind._replace(group=0)
    return (tuple(shape), kind)


def one_method(methods: Sequence[Method]) -> Method:
    """A method that reads every layer which one of ``methods`` reads. ``methods`` has at least one element."""
    different = tuple(dict.fromkeys(methods))
    if len(different) == 1:
        return different[0]
    return _Mixed(
        methods=different,
        marks=frozenset[str]().union(*(each.marks for each in different)),
        companions=frozenset[str]().union(*(each.companions for each in different)),
        dropped=frozenset[str]().union(*(each.dropped for each in different)),
        notes=tuple(dict.fromkeys(note for each in different for note in each.notes)),
    )
