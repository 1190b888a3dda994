"""Writes the quantised directory: safetensors files piece by piece, and all other files.

Names, shapes and dtypes of the tensors follow the format ``pack-quantized`` of compressed-tensors, which Chairlift,
vLLM and transformers read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

import torch
from torch import Tensor

from chairlift.kernels.grouped import GroupKind
from chairlift.models.family import Family
from chairlift.models.formats.gguf.files import is_gguf
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_config import gguf_config_json
from chairlift.models.hf_config import read_json
from chairlift.models.model_files import TOKENIZER_FILES
from chairlift.text.tokenizer.gguf_tokenizer import gguf_tokenizer

__all__ = [
    "Planned",
    "ShardWriter",
    "packed_by_output",
    "packed_words",
    "quantization_config",
    "source_config",
    "write_files",
]

_DTYPES: Final = {torch.int64: "I64", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16"}
_SHARD_BYTES: Final = 4_000_000_000
_GENERATION: Final = "generation_config.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    """Dtype of the tensor: int64, int32, bfloat16 or float16."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """Writes tensors whose names, dtypes and shapes are known in advance. Rows may be written in any order.

    A file has at most ``shard_bytes`` of tensors, or a single tensor. The files are complete at the end of the ``with``
    block, and rows that were not written are zeros. After an error the files remain incomplete.
    """

    def __init__(self, folder: Path, tensors: Iterable[Planned], shard_bytes: int = _SHARD_BYTES) -> None:
        self._folder = folder
        shards: list[list[Planned]] = []
        room = 0
        for tensor in tensors:
            if not shards or tensor.nbytes > room:
                shards.append([])
                room = shard_bytes
            shards[-1].append(tensor)
            room -= tensor.nbytes
        self._shards = shards
        self.nbytes = sum(tensor.nbytes for shard in shards for tensor in shard)
        """Size in bytes of all tensors."""
        self._files: list[IO[bytes]] = []
        self._places: dict[str, tuple[IO[bytes], int, Planned]] = {}

    @property
    def names(self) -> list[str]:
        """Names of the files, in order."""
        count = len(self._shards)
        if count == 1:
            return ["model.safetensors"]
        return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]

    def __enter__(self) -> Self:
        for name, shard in zip(self.names, self._shards, strict=True):
            self._begin(self._folder / name, shard)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for file in self._files:
            file.close()
        if kind is None and len(self._shards) > 1:
            named = zip(self.names, self._shards, strict=True)
            places = {tensor.name: name for name, shard in named for tensor in shard}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": places}
            _write_json(self._folder / "model.safetensors.index.json", index)

    def write(self, name: str, first: int, rows: Tensor) -> None:
        """Write ``rows`` of a tensor, from row ``first`` on. Rows of a stack are those of all its matrices, one matrix
        after the other. Raises OSError when the disk is full."""
        file, offset, tensor = self._places[name]
        file.seek(offset + first * math.prod(rows.shape[1:]) * tensor.dtype.itemsize)
        file.write(rows.to(tensor.dtype).reshape(-1).contiguous().view(torch.uint8).numpy().data)

    def _begin(self, path: Path, shard: list[Planned]) -> None:
        """Write the header of a safetensors file. Tensors with wide dtypes come first, so that every tensor is
        aligned."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        offsets = {}
        for tensor in sorted(shard, key=lambda each: -each.dtype.itemsize):
            offsets[tensor.name] = at
            header[tensor.name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.nbytes],
            }
            at += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = path.open("wb")
        self._files.append(file)
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
        for tensor in shard:
            self._places[tensor.name] = (file, 8 + len(text) + offsets[tensor.name], tensor)


def packed_words(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [R, K] of at most 8 bits into words along the columns, lowest bits first and without gaps: int32
    [R, K * bits / 32]. K is a multiple of 32."""
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    elif bits != 8:
        places = torch.arange(8, dtype=torch.uint8)
        single = (codes.unsqueeze(-1) >> places[:bits] & 1).view(len(codes), -1, 8)
        codes = (single << places).sum(-1, dtype=torch.uint8)
    return codes.contiguous().view(torch.int32)  # torch runs on little-endian machines, and the format is little-endian


def packed_by_output(zeros: Tensor, bits: int) -> Tensor:
    """Pack uint8 zero points [R, G] into words along the rows, lowest bits first: int32 [ceil(R * bits / 32), G]."""
    whole = torch.nn.functional.pad(zeros, (0, 0, 0, -len(zeros) % 32))
    return packed_words(whole.t().contiguous(), bits).t()[: -(-len(zeros) * bits // 32)].contiguous()


def quantization_config(groups: Mapping[GroupKind, Sequence[str]], kept: Sequence[str]) -> dict[str, Any]:
    """Value of ``quantization_config`` in ``config.json``, in the form of compressed-tensors.

    ``groups`` maps kind -> names of the layers that have it. ``kept`` are layers whose matrices are not quantised. The
    kind of most layers is that of all layers which the config does not name.
    """
    kinds = sorted(groups, key=lambda kind: -len(groups[kind]))
    targets = [["Linear"], *(list(groups[kind]) for kind in kinds[1:])]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            f"group_{number}": {
                "targets": names,
                "weights": _weights(kind),
                "input_activations": None,
                "output_activations": None,
            }
            for number, (kind, names) in enumerate(zip(kinds, targets, strict=True))
        },
        "ignore": sorted({*kept, *(() if any("lm_head" in names for names in groups.values()) else ("lm_head",))}),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _weights(kind: GroupKind) -> dict[str, Any]:
    return {
        "num_bits": kind.bits,
        "type": "int",
        "symmetric": not kind.minimum,
        "strategy": "group",
        "group_size": kind.group,
        "dynamic": False,
        "actorder": None,
        "observer": "mse",
    }


def source_config(model_dir: Path) -> dict[str, Any]:
    """``config.json`` of a directory, or a ``config.json`` made from a GGUF file. Raises ModelLoadError."""
    return gguf_config_json(GGUFModel(model_dir)) if is_gguf(model_dir) else read_json(model_dir / "config.json")


def write_files(
    folder: Path,
    model_dir: Path,
    raw: Mapping[str, Any],
    family: Family,
    dtype: torch.dtype,
    groups: tuple[Mapping[GroupKind, Sequence[str]], Sequence[str]],
) -> None:
    """Write all files other than weights: tokenizer, ``generation_config.json`` and, last, ``config.json``.

    ``raw`` is the model's own ``config.json``; ``dtype`` is the dtype of the tensors that are not quantised;
    ``groups`` are the arguments of :func:`quantization_config`.
    """
    if is_gguf(model_dir):
        content, beside = gguf_tokenizer(GGUFModel(model_dir))
        (folder / "tokenizer.json").write_bytes(content)
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **beside})
    for name in () if is_gguf(model_dir) else (*TOKENIZER_FILES, _GENERATION):
        if (model_dir / name).is_file():
            shutil.copyfile(model_dir / name, folder / name)
    config = {"architectures": [family.architecture], **raw}
    config.pop("compression_config", None)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    config["quantization_config"] = quantization_config(*groups)
    _write_json(folder / "config.json", config)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
