"""The tensors of a GGUF file as weights of a network for embeddings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.grouped import dequantized
from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.formats.checkpoint import CheckpointPart
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_encoders import GGUF_ENCODERS, HEAD_ROWS
from chairlift.models.formats.gguf_tensors import GGUFTensor, GGUFTensors
from chairlift.models.pooled_network import PooledNetwork

__all__ = ["gguf_pooled_parts"]


def gguf_pooled_parts(model: PooledNetwork, file: GGUFModel) -> tuple[Mapping[str, Any], list[CheckpointPart], str]:
    """(name of a tensor -> tensor, tensors that fill the parameters of ``model``, regular expression of the names of
    tensors that are not needed)."""
    network = model.config.network
    if not isinstance(network, EncoderConfig):
        tensors = GGUFTensors(file, network)
        head = tensors.layout(model)
        if model.head is None:
            return tensors, head, r"^(output|cls)\."
        rows = _Answers(file, tensors, model.config.answers)
        unread = rf"^(output|{re.escape(HEAD_ROWS.rpartition('.')[0])})\."
        return {**tensors, "head.out.weight": rows}, head, unread
    known = GGUF_ENCODERS[file.metadata["general.architecture"]]
    parts: list[CheckpointPart] = []
    for parameter, values in model.named_parameters():
        layer, _, attribute = parameter.removeprefix("model.").rpartition(".")
        number = re.search(r"\d+", layer)
        names = [
            name.replace("*", number.group() if number else "") for name in known[re.sub(r"\.\d+\.", ".*.", layer)]
        ]
        count = values.shape[0] // len(names)
        for index, name in enumerate(names):
            parts.append(CheckpointPart(f"{name}.{attribute}", parameter, index * count, (count, *values.shape[1:])))
    unread = r"^cls\." if model.head is None else r"^$"
    return {name: GGUFTensor(file, name, None) for name in file}, parts, unread


class _Answers:
    """Rows of the output head for the answers of a reranker, [2, D]: those that llama.cpp's converter has put beside
    the model, or those of the head itself. Has the methods of an open safetensors file."""

    def __init__(self, file: GGUFModel, tensors: Mapping[str, GGUFTensor], answers: Sequence[int]) -> None:
        labels = file.metadata.get(f"{file.metadata['general.architecture']}.classifier.output_labels")
        if HEAD_ROWS in tensors:
            if not isinstance(labels, list) or sorted(labels) != ["no", "yes"]:
                raise ModelLoadError(f"{file.path}: the classes of {HEAD_ROWS} are {labels!r:.80}, not yes and no")
            rows, order = tensors[HEAD_ROWS], [labels.index(answer) for answer in ("no", "yes")]
        else:
            rows, order = tensors.get("output.weight", tensors["token_embd.weight"]), list(answers)
        self._rows = torch.cat([dequantized(rows[row : row + 1]) for row in order])

    def get_tensor(self, name: str) -> Tensor:
        return self._rows

    def get_slice(self, name: str) -> _Answers:
        return self

    def get_shape(self) -> list[int]:
        return list(self._rows.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, rows: slice) -> Tensor:
        return self._rows[rows]
