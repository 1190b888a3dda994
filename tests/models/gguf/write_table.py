"""Writes the table of docs/quantization.md: llama.cpp converts a model of each GGUF architecture, which is compared.

python -m tests.models.gguf.write_table
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_families import GGUF_FAMILIES
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.gguf.make import converted
from tests.models.gguf.test_converter import LING, MODELS, REARRANGED, convert
from tests.models.gguf.test_model import parameters
from tests.models.paged import packed_logits
from tests.models.test_families import prompt
from tests.models.test_renamed_families import write as write_renamed
from tests.models.tiny import hf_logits, hf_model
from tests.models.vision.tiny import tiny_qwen
from tools.markdown import replaced, table

__all__ = ["BEGIN", "PAGE", "main", "rows"]

PAGE: Final = Path(__file__).parents[3] / "docs" / "quantization.md"
BEGIN: Final = "<!-- architectures, made by tests/models/gguf/write_table.py -->"
_HEAD: Final = ("`general.architecture`", "`model_type`", "variants", "weights", "logits", "")
_MMPROJ: Final = "images with [mmproj](images.md#gguf-models)"
_NOTES: Final = {
    "bailingmoe2": "Ling 2, Ring 2",
    "falcon-h1": "the factors are in the weights",
    "gemma3": _MMPROJ,
    "llama": (
        "Llama, Mistral (also with windows), Mixtral, InternLM 3; Llama 3.1's frequencies; `idefics3` and `mistral3`"
        f" with images, with {_MMPROJ.removeprefix('images with ')}"
    ),
    "mistral3": _MMPROJ,
    "nemotron_h": "rows of q and k in another order",
    "nemotron_h_moe": "rows of q and k in another order",
    "phi3": "with LongRoPE",
    "qwen2": _MMPROJ,
    "qwen2vl": f"weights and texts as `qwen2`; {_MMPROJ}",
    "qwen3": _MMPROJ,
    "qwen35": "texts only",
    "qwen35moe": "texts only",
    "qwen3vl": f"weights and texts as `qwen3`; {_MMPROJ}",
    "qwen3vlmoe": "as `qwen3moe`; texts only",
}
"""Architecture -> remarks."""
_WITH_IMAGES: Final = ("qwen2_5_vl", "qwen3_vl")
"""Models that read images, whose text model is compared with Chairlift's of the directory."""
_Closeness = tuple[str, float | None, float]
"""Architecture, largest difference of weights (None if they are rearranged), and of logits relative to the largest."""


def compare(folder: Path, name: str) -> _Closeness:
    """Convert the model ``name`` and compare the file with transformers in float32."""
    if name in _WITH_IMAGES:
        return _compare_texts(folder, name)
    if name == "ling":
        model_dir, theirs = write_renamed(folder, LING)
        path, family = converted(model_dir, folder / "model.gguf"), "bailing_moe"
    else:
        model_dir, path = convert(folder, name)
        theirs, family = hf_model(model_dir), MODELS[name][0]
    architecture = str(GGUFModel(path).metadata["general.architecture"])
    weights = None
    if family not in REARRANGED:
        found, wanted = parameters(path), parameters(model_dir)
        weights = max(float((found[each] - wanted[each]).abs().max()) for each in wanted)
    tokens = prompt(40)
    ours = packed_logits(load_model(path, read_config(path).for_length(40), "float32"), [tokens])[0].float()
    expected = hf_logits(theirs, tokens).float()
    return architecture, weights, float((ours - expected).abs().max() / expected.abs().max())


def _compare_texts(folder: Path, family: str) -> _Closeness:
    """As :func:`compare`, for the text model of a model that reads images."""
    model_dir = tiny_qwen(folder / "model", family)
    path = converted(model_dir, folder / "model.gguf")
    found, wanted = parameters(path), parameters(model_dir)
    weights = max(float((found[each] - wanted[each]).abs().max()) for each in found)
    ours, expected = (
        packed_logits(load_model(each, read_config(each), "float32"), [prompt(40)])[0].float()
        for each in (path, model_dir)
    )
    architecture = str(GGUFModel(path).metadata["general.architecture"])
    return architecture, weights, float((ours - expected).abs().max() / expected.abs().max())


def rows(found: Mapping[str, list[_Closeness]]) -> list[tuple[str, ...]]:
    """Rows of the table, for architecture -> comparisons of its variants, of which the largest differences count."""
    lines = []
    for architecture, family in sorted(GGUF_FAMILIES.items()):
        compared = found.get(architecture, [])
        weights = [each[1] for each in compared if each[1] is not None]
        types = ", ".join(f"`{each}`" for each in dict.fromkeys((family.model_type, *family.also)))
        count = str(len(compared)) if compared else ""
        furthest = (_shown(max(weights)) if weights else "", _shown(max(each[2] for each in compared)) if count else "")
        lines.append((f"`{architecture}`", types, count, *furthest, _NOTES.get(architecture, "")))
    return lines


def _shown(difference: float) -> str:
    return f"{difference:.0e}" if difference else "equal"


def main() -> None:
    found: dict[str, list[_Closeness]] = {}
    for name in (*MODELS, "ling", *_WITH_IMAGES):
        with tempfile.TemporaryDirectory() as folder:
            closeness = compare(Path(folder), name)
        found.setdefault(closeness[0], []).append(closeness)
        sys.stderr.write(f"{name}: {closeness}\n")
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, table(_HEAD, rows(found))))


if __name__ == "__main__":
    main()
