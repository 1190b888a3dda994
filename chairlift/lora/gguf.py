"""Reads an adapter from a GGUF file, as llama.cpp's ``convert_lora_to_gguf.py`` writes it.

The file has the matrices ``NAME.lora_a`` [r, in] and ``NAME.lora_b`` [out, r] of each weight NAME, in the row order of
a GGUF file of the model. The rank is that of the matrices. The scale is alpha / r, or 1 if alpha is zero or missing, as
in llama.cpp. The file has no place for rsLoRA and for an alpha of a single module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import torch
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.lora.adapter import Adapter
from chairlift.lora.settings import AdapterSettings
from chairlift.lora.sites import Sites, blank_model, sites_in
from chairlift.lora.tensors import read_tensors
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_families import GGUF_FAMILIES
from chairlift.models.formats.gguf_names import adapter_naming
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.linear import Matrix, Stack
from chairlift.models.mixers import DeltaNetConfig

__all__ = ["read_gguf_adapter"]

_KINDS: Final = {".weight.lora_a": "A", ".weight.lora_b": "B"}
_EMBEDDING: Final = "token_embd"


def read_gguf_adapter(path: Path, sites: Sites, *, max_rank: int) -> Adapter:
    """Read the adapter in the GGUF file ``path`` for a model with these ``sites``.

    Every tensor must be used. Otherwise a ModelLoadError names the tensor or the key.
    """
    model = GGUFModel(path)
    architecture = _architecture(model, sites)
    alpha = model.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not abs(alpha) <= 1e9:
        _fail(model, f"adapter.lora.alpha must be a number, got {alpha!r:.80}")
    file = _AdapterFile(model)
    own = sites_in(sites.network, adapter_naming(file.shapes, sites.network, _rows(sites.network), architecture))
    _refuse_tiled(model, sites.network, file.shapes)
    settings = AdapterSettings(
        rank=1,
        alpha=alpha or None,
        rslora=False,
        rank_pattern={},
        alpha_pattern={},
        transposed=False,
        dora=False,
        added_bias=False,
        parameters=(),
        saved=(),
        tokens={},
        ranks=file.ranks,
    )
    return read_tensors(file, settings, own, max_rank, path)


def _architecture(model: GGUFModel, sites: Sites) -> str:
    """Value of ``general.architecture``, after a check that the file is an adapter for the model."""
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if model.metadata.get(key) != wanted:
            _fail(model, f"{key} is {model.metadata.get(key)!r:.80}; an adapter has {wanted!r}")
    if model.metadata.get("adapter.alora.invocation_tokens") is not None:
        _fail(
            model,
            "adapter.alora.invocation_tokens: an activated adapter begins in the middle of a prompt, which is not"
            " supported; train the adapter without it",
        )
    architecture = model.metadata.get("general.architecture")
    family = GGUF_FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None or sites.network.model_type not in (family.model_type, *family.also):
        _fail(
            model,
            f"general.architecture is {architecture!r:.80}, and the model is {sites.family}; the adapter belongs to"
            " another model",
        )
    if not family.plain_weights:
        _fail(
            model,
            f"the converter changes the weights of {architecture!r}, so the adapter fits llama.cpp's weights only; use"
            " the adapter in PEFT's form, a directory",
        )
    return str(architecture)


def _refuse_tiled(model: GGUFModel, config: NetworkConfig, names: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelLoadError for weights whose heads the converter has put into another order."""
    if not GGUF_FAMILIES[model.metadata["general.architecture"]].tiled_heads:
        return
    for name in names:
        layer = name.split(".")[1] if name.startswith("blk.") else ""
        net = config.mixer(int(layer)) if layer.isdecimal() and int(layer) < config.num_hidden_layers else None
        if isinstance(net, DeltaNetConfig) and net.key_heads != net.value_heads and "ffn_" not in name:
            _fail(
                model,
                f"tensor {name}.weight.lora_b belongs to a delta net, whose heads a GGUF file has in another order; use"
                " the adapter in PEFT's form, a directory",
            )


def _rows(config: NetworkConfig) -> dict[str, int]:
    """Name of each linear layer -> number of rows of its weight, or of one expert's."""
    found = {}
    for name, module in blank_model(config).named_modules():
        if isinstance(module, Matrix):
            stack = module.shape.stack if isinstance(module, Stack) else 1
            found[name] = module.shape.out_features // stack
    return found


def _fail(model: GGUFModel, problem: str) -> NoReturn:
    raise ModelLoadError(f"{model.path}: {problem}")


class _Place(NamedTuple):
    """Where a matrix is in the file."""

    tensor: str
    first: int
    """First row in the tensor."""
    shape: tuple[int, int]
    transposed: bool
    """Whether the file has the matrix transposed."""


class _Slice(NamedTuple):
    """Shape and dtype of a matrix, as an open safetensors file gives them."""

    shape: tuple[int, int]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"


class _AdapterFile:
    """The matrices of a GGUF adapter, with the methods of an open safetensors file and PEFT's endings of names.

    The matrices of one expert in the stack ``x_exps`` belong to the weight ``x_exps.3``.
    """

    def __init__(self, model: GGUFModel) -> None:
        self._model = model
        self._places: dict[str, _Place] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name of a weight, without its ending -> shape of its matrix B."""
        self.ranks: dict[str, int] = {}
        """Name of a weight, or of one expert's -> its rank."""
        for tensor in model:
            ending = next((each for each in _KINDS if tensor.endswith(each)), None)
            if ending is None:
                _fail(model, f"tensor {tensor!r:.200} is no matrix of an adapter (.weight.lora_a, .weight.lora_b)")
            self._add(tensor, tensor.removesuffix(ending), _KINDS[ending])

    def _add(self, tensor: str, weight: str, kind: str) -> None:
        shape = self._model.info(tensor).shape
        experts = shape[0] if len(shape) == 3 else 0
        if len(shape) not in (2, 3) or bool(experts) != weight.endswith("_exps"):
            _fail(self._model, f"tensor {tensor!r:.200} has the shape {list(shape)}, which no matrix of an adapter has")
        if kind == "B":
            self.shapes[weight] = shape
        of_embedding = weight == _EMBEDDING
        for member in range(experts or 1):
            own = f"{weight}.{member}" if experts else weight
            name = f"{own}.lora_embedding_{kind}" if of_embedding else f"{own}.lora_{kind}.weight"
            transposed = of_embedding and kind == "A"
            self._places[name] = _Place(tensor, member * shape[-2], (shape[-2], shape[-1]), transposed)
            if kind == "B":
                self.ranks[own] = shape[-1]

    def keys(self) -> Iterator[str]:
        return iter(self._places)

    def get_slice(self, name: str) -> _Slice:
        rows, columns = self._places[name].shape
        return _Slice((columns, rows) if self._places[name].transposed else (rows, columns))

    def get_tensor(self, name: str) -> Tensor:
        place = self._places[name]
        found = torch.from_numpy(self._model.read(place.tensor, place.first, place.first + place.shape[0]))
        return found.t() if place.transposed else found
