"""MLX (Apple): affine integers in groups of columns, ``scales * code + biases``.

``config.json`` has an object ``quantization`` without a method's name. Tensor names are those of the original model,
except in families whose weights MLX converts when it writes them; these are not read.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from chairlift.errors import ModelLoadError
from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.models.formats.quantized_checkpoints.layer import FLOATS, Method, StoredLayer, StoredTensor, unpacked
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings
from chairlift.models.formats.stored_rows import StoredRows

__all__ = ["method"]

_FAMILIES: Final = frozenset(
    {
        *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
        *("phi3", "smollm3", "olmo2", "starcoder2", "seed_oss", "ernie4_5", "exaone4", "granite", "cohere2"),
    }
)
"""Values of ``model_type`` whose weights MLX writes with their names and numbers unchanged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mlx(Method):
    settings: QuantizationSettings
    marks: frozenset[str] = frozenset({"scales", "biases"})
    companions: frozenset[str] = frozenset({"weight"})

    def rows(self, layer: StoredLayer) -> StoredRows:
        own = self.settings.part(layer.name) if self.settings.get(layer.name) else None
        bits, group = _numbers(self.settings if own is None else own)
        weight = layer.take("weight", ("U32",))
        n, words = weight.shape
        k = words * 32 // bits
        shape = (n, -(-k // group))
        return _Rows(weight, layer.take("scales", FLOATS, shape), layer.take("biases", FLOATS, shape), bits, group)


class _Rows(StoredRows):
    kind: GroupKind

    def __init__(self, words: StoredTensor, scales: StoredTensor, biases: StoredTensor, bits: int, group: int) -> None:
        self._words = words
        self._scales = scales
        self._biases = biases
        self._bits = bits
        self.kind = GroupKind(4 if bits <= 4 else 8, group, minimum=True)

    def get_shape(self) -> list[int]:
        n, words = self._words.shape
        return [n, words * 32 // self._bits]

    def __getitem__(self, rows: slice) -> GroupedRows:
        first, last, _ = rows.indices(len(self))
        codes = unpacked(self._words.rows(first, last), self._bits)
        return GroupedRows(
            self.kind, codes, self._scales.rows(first, last).float(), self._biases.rows(first, last).float()
        )


def _numbers(settings: QuantizationSettings) -> tuple[int, int]:
    """(bits of a code, columns of a group)."""
    settings.one_of("mode", ("affine",), "affine")
    return settings.one_of("bits", (2, 3, 4, 5, 6, 8), 4), settings.one_of("group_size", (32, 64, 128), 64)


def method(settings: QuantizationSettings, model_type: Any) -> Method:
    """Read the settings of MLX. Raises ModelLoadError for a family that MLX converts."""
    _numbers(settings)
    if model_type not in _FAMILIES:
        raise ModelLoadError(
            f"MLX: {settings.where}: weights of MLX are read for {', '.join(sorted(_FAMILIES))}, and model_type is"
            f" {model_type!r:.60}, whose tensors MLX may have renamed or changed; use the original weights, with"
            " --quantization int8 or int4, or a GGUF file"
        )
    return _Mlx(settings=settings)
