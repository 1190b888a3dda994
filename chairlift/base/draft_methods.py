"""The methods of ``speculative_config`` that draft with a small model, a layer or heads, and the module of each.

A new drafter is a module and a line here. The method ``ngram``, which only reads the tokens, is part of the core
(:mod:`chairlift.core.spec_decode`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["DRAFT_METHODS", "DraftMethod"]

_FOLDER: Final = "chairlift.executor.drafters"


class DraftMethod(NamedTuple):
    """One method."""

    module: str
    """Module with a function ``load_drafts(folder, served)``, which has a
    :class:`~chairlift.executor.drafters.source.Served` and returns a
    :class:`~chairlift.executor.drafters.source.DraftSource`. It is imported when a model is loaded with the method."""
    what: str
    """What the key ``model`` names, in words for users."""
    is_bundled: bool = False
    """Whether the bundled model comes with it, in the folder with the method's name, so that the key may be left
    out."""
    is_own: bool = False
    """Whether the served model's own files have it, so that the key is not given."""


DRAFT_METHODS: Final[dict[str, DraftMethod]] = {
    "draft_model": DraftMethod(f"{_FOLDER}.draft_model", "small model"),
    "medusa": DraftMethod(f"{_FOLDER}.medusa", "heads", is_bundled=True),
    "eagle3": DraftMethod(f"{_FOLDER}.eagle3", "layer", is_bundled=True),
    "mtp": DraftMethod(f"{_FOLDER}.mtp", "layer", is_own=True),
}
"""Value of the key ``method`` -> the method."""
