"""Facts about a model from its files, for ``chairlift show`` and ``chairlift list``. No weight is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from chairlift.models.formats.gguf.files import is_gguf
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.hf_config import read_json

__all__ = ["describe_weights", "licence_of", "raw_config"]

_CARD_BYTES: Final = 64 * 1024
_LICENCE: Final = re.compile(r"^license(?:_name)?:\s*['\"]?([\w.+-]+)", re.M)
_BITS: Final = ("bits", "w_bit", "num_bits", "weight_bits")


def raw_config(path: Path) -> dict[str, Any]:
    """The model's ``config.json``, or the metadata of its GGUF file; empty if there is neither. Raises
    ModelLoadError."""
    if is_gguf(path):
        return dict(GGUFModel(path).metadata)
    file = path / "config.json"
    return dict(read_json(file)) if file.is_file() else {}


def describe_weights(path: Path, dtype: str | None) -> str:
    """How the files store the weights, such as ``Q4_K and Q6_K``, ``gptq, 4 bits`` or ``bfloat16``. ``dtype`` is that
    of the config. Raises ModelLoadError."""
    if is_gguf(path):
        model = GGUFModel(path)
        sizes: Counter[str] = Counter()
        for name in model:
            info = model.info(name)
            sizes[info.type.name] += info.nbytes
        large = [name for name, nbytes in sizes.most_common() if nbytes * 20 >= sizes.total()]
        return f"GGUF, {' and '.join(large)}"
    settings = raw_config(path).get("quantization_config")
    if not isinstance(settings, Mapping):
        return dtype or "float32"
    method = str(settings.get("quant_method") or "quantised")
    bits = next((settings[key] for key in _BITS if isinstance(settings.get(key), int)), None)
    return method if bits is None else f"{method}, {bits} bits"


def licence_of(path: Path) -> str | None:
    """Name of the licence: the metadata of a GGUF file, or the head of the model card. None if neither says it."""
    if is_gguf(path):
        licence = GGUFModel(path).metadata.get("general.license")
        if isinstance(licence, str) and licence:
            return licence
        path = path.parent
    try:
        with (path / "README.md").open(encoding="utf-8", errors="replace") as file:
            text = file.read(_CARD_BYTES)
    except OSError:
        return None
    head = text.removeprefix("---").partition("\n---")[0] if text.startswith("---") else ""
    found = _LICENCE.findall(head)
    return found[-1] if found else None
