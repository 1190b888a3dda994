"""Chooses GGUF files by the quantisation in their names, as ``owner/name:Q4_K_M`` does in llama.cpp and Ollama."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from chairlift.errors import ModelLoadError

__all__ = ["choose_encoder", "choose_gguf", "gguf_models", "quantization_of"]

_PART: Final = re.compile(r"-(\d{5})-of-\d{5}\Z")
_QUANT: Final = re.compile(
    r"(?:.*[-._/])?((?:ud-)?(?:i?q\d\w*|tq\d\w*|mxfp4\w*|nvfp4\w*|bf16|f16|fp16|f32|fp32))", re.I
)
_USUAL: Final = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_K_XL", "UD-Q4_K_XL", "MXFP4", "Q5_K_M", "Q6_K", "Q8_0")
"""Quantisations that are taken when none is named, the best choice first."""
_DEFAULT: Final = "latest"
"""Ollama's name for the usual quantisation."""
_MOST_LISTED: Final = 24


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Path without ending and part number -> files of this model, in the order of the parts. Files of image encoders
    are left out. ``names`` are paths with / between folders."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and "mmproj" not in name.lower():
            found.setdefault(_PART.sub("", name[: -len(".gguf")]), []).append(name)
    return found


def quantization_of(stem: str) -> str:
    """Quantisation in a file's name without ending, in capitals; the name itself if it has none."""
    found = _QUANT.fullmatch(stem)
    return found[1].upper() if found else stem.rpartition("/")[2]


def choose_gguf(names: Iterable[str], wanted: str | None, where: str) -> list[str]:
    """Files of the model with the quantisation ``wanted``, which may also be a file's name. None: a usual one.

    Raises ModelLoadError that lists the quantisations in ``where`` if none or several fit.
    """
    models = gguf_models(names)
    tags = {stem: quantization_of(stem) for stem in models}
    if wanted is None or wanted.lower() == _DEFAULT:
        fits = next(
            ([stem for stem in models if tags[stem] == usual] for usual in _USUAL if usual in tags.values()), []
        )
        fits = (fits or list(models))[:1]
    else:
        word = wanted.upper().removesuffix(".GGUF")
        named = [stem for stem in models if _PART.sub("", word) in (stem.upper(), stem.rpartition("/")[2].upper())]
        fits = named or [stem for stem in models if word in (tags[stem], tags[stem].removeprefix("UD-"))]
        plain = [stem for stem in fits if tags[stem] == word]
        fits = plain or fits
    if len(fits) == 1:
        return models[fits[0]]
    listed = ", ".join(sorted(fits or set(tags.values()))[:_MOST_LISTED])
    if not models:
        raise ModelLoadError(f"{where} has no GGUF files, so there is no {wanted!r} of it; leave out :{wanted}")
    if fits:
        raise ModelLoadError(f"{where} has {len(fits)} GGUF models of the kind {wanted!r}; name one of them: {listed}")
    raise ModelLoadError(f"{where} has no GGUF file of the kind {wanted!r}; it has {listed}")


def choose_encoder(names: Iterable[str]) -> list[str]:
    """The image encoder among the files of a repository, in 16 bits if there are several. Empty if there is none."""
    found = sorted(name for name in names if name.lower().endswith(".gguf") and "mmproj" in name.lower())
    half = [name for name in found if re.search(r"(?<!b)f(p)?16", name, re.I)]
    return (half or found)[:1]
