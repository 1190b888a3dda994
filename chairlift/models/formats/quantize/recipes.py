"""Recipes of ``chairlift quantize``: which matrix gets how many bits. A recipe is data, and all recipes are here.

llama.cpp's Q4_K_M and the mixed schemes of GPTQ users give more bits to the matrices that lose most: the second matrix
of the MLP, the values of attention, the embedding and the output head. The kernels store q, k and v as one matrix, and
gate and up, so a rule names such a matrix as a whole.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from chairlift.kernels.grouped import GroupKind

__all__ = ["DEFAULT_RECIPE", "RECIPES", "Recipe"]

_WIDE: Final = GroupKind(8, 32)


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """Numbers of bits of all matrices of a model."""

    words: str
    """What the recipe is, for ``--help``."""
    layers: GroupKind
    """Kind of the decoder layers' matrices, and of experts."""
    ends: GroupKind | None = None
    """Kind of the embedding and of the output head; None: they keep 16 bits."""
    wide: str = ""
    """Regular expression for the last part of the names of layers whose matrices have the kind ``wide_kind``."""
    wide_kind: GroupKind = _WIDE

    def kind(self, parameter: str) -> GroupKind | None:
        """Kind of a matrix by its name in our model. None: 16 bits."""
        found = re.fullmatch(r"model\.layers\.\d+\.(.*)\.weight", parameter)
        if found is None:
            return self.ends
        return self.wide_kind if re.fullmatch(self.wide, found[1].rpartition(".")[2]) else self.layers


DEFAULT_RECIPE: Final = "int4"
RECIPES: Final[dict[str, Recipe]] = {
    "int4": Recipe(
        "4 bits with zero points in groups of 32; 8 bits for what loses most, embedding and head (default)",
        layers=GroupKind(4, 32, minimum=True),
        ends=_WIDE,
        wide="down_proj",
    ),
    "int4-small": Recipe("4 bits in groups of 32; 8 bits for embedding and head", layers=GroupKind(4, 32), ends=_WIDE),
    "int4-g32": Recipe("4 bits in groups of 32; 16 bits for embedding and head", layers=GroupKind(4, 32)),
    "int4-g128": Recipe("4 bits in groups of 128; 16 bits for embedding and head", layers=GroupKind(4, 128)),
    "int5": Recipe(
        "5 bits with zero points in groups of 32; 6 bits for what loses most, embedding and head; 8 bits in memory",
        layers=GroupKind(5, 32, minimum=True),
        ends=GroupKind(6, 32),
        wide="down_proj",
        wide_kind=GroupKind(6, 32),
    ),
    "int8": Recipe("8 bits in groups of 32; 16 bits for embedding and head", layers=_WIDE),
}
"""Name in the command line -> recipe."""
