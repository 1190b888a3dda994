"""A trainable adapter (LoRA; Hu et al., 2021): the base weights are frozen, and each linear layer learns two matrices.

The adapter is written as a PEFT directory, which the server, PEFT and transformers can read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from chairlift.errors import ConfigError
from chairlift.lora.adapter import Adapter, LowRank
from chairlift.lora.reader import WEIGHTS_NAME
from chairlift.lora.settings import CONFIG_NAME
from chairlift.lora.sites import Sites, layer_of, sites_in
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.checkpoint import CheckpointPart
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.linear import Adapted, Linear

__all__ = ["ALL_LINEAR", "TrainableAdapter", "attach", "target_parts", "weights_digest"]

ALL_LINEAR: Final = "all-linear"
"""Target that means every linear layer except the output head and the experts, as in PEFT."""


def _trainable(sites: Sites) -> dict[str, CheckpointPart]:
    """Name of each module that may be trained -> its rows in a layer of this package. The output head is the last."""
    return {**sites.parts, sites.head: sites.more[sites.head]}


def target_parts(sites: Sites, targets: Sequence[str]) -> dict[str, CheckpointPart]:
    """Name of each module that the targets select -> its rows in a layer of this package. A target is a whole module
    name, the last part of names (``q_proj``, ``lm_head``), or ``all-linear``. Raises ConfigError for a target that
    selects no module."""
    known_parts = _trainable(sites)
    chosen: dict[str, CheckpointPart] = {}
    for target in targets:
        found = {
            name: part
            for name, part in known_parts.items()
            if name == target or name.endswith(f".{target}") or (target == ALL_LINEAR and name != sites.head)
        }
        if not found:
            known = ", ".join(sorted({_last(name) for name in known_parts}))
            raise ConfigError(
                f"lora.targets has {target!r:.100}, and no layer of a {sites.family} model that an adapter may change"
                f" is called so; take {ALL_LINEAR}, or some of {known}"
            )
        chosen |= found
    return {name: part for name, part in known_parts.items() if name in chosen}


def weights_digest(model: CausalLM) -> str:
    """Digest of a model's weights, made of sums of their bits. It does not depend on the order of the additions."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        bits = parameter.detach().contiguous().view(torch.uint8).view(-1)
        whole = bits[: bits.numel() // 4 * 4].view(torch.int32).sum(dtype=torch.int64)
        digest.update(f"{name} {tuple(parameter.shape)} {int(whole)}\n".encode())
    return digest.hexdigest()


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def attach(model: CausalLM, name: str, adapted: Adapted) -> None:
    """Make the layer ``name`` call ``adapted`` for its results. Raises ConfigError if it already has an adapter."""
    layer = model.get_submodule(name)
    if not isinstance(layer, Linear) or layer.adapted is not None:
        raise ConfigError(f"{name} has an adapter already; load the model again")
    layer.adapted = adapted


class TrainableAdapter:
    """An adapter of rank ``r`` for the ``targets`` of a model. From now on the model's layers add its terms.

    ``model`` must have plain float weights, which are not changed. As in PEFT, A starts with Kaiming-uniform values
    from ``generator`` (None: PyTorch's own), and B with zeros, so that the adapter changes nothing at first. The scale
    is ``alpha / r``, or ``alpha / sqrt(r)`` with ``rslora`` (Kalajdzievski, 2023). ``dropout`` is the fraction of each
    layer's input that is zeroed in training mode. ``base`` is the name of the base model that is written into the
    adapter's config. With ``attached`` False the model's layers do not add the terms; the caller uses :attr:`products`.
    Raises ConfigError for targets that the model does not have, and for a model that already has an adapter.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        r: int,
        alpha: float,
        targets: Sequence[str] = (ALL_LINEAR,),
        rslora: bool = False,
        dropout: float = 0.0,
        base: str = "",
        attached: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        self._sites = sites_in(model.config)
        self._model = model
        self._config = model.config
        self._base = base
        self.r = r
        self.alpha = alpha
        self.rslora = rslora
        self.dropout = dropout
        self._parts = target_parts(self._sites, targets)
        self.parameters: dict[str, nn.Parameter] = {}
        """PEFT's name of each matrix -> float32 parameter: A [r, in], and B [out, r] with the rows in the order of
        this package's layer."""
        device = next(model.parameters()).device
        for name, part in self._parts.items():
            a = torch.empty(r, part.shape[1], device=device)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            self.parameters[_tensor(name, "A")] = nn.Parameter(a)
            self.parameters[_tensor(name, "B")] = nn.Parameter(torch.zeros(part.shape[0], r, device=device))
        if attached:
            self._attach()

    @property
    def model(self) -> CausalLM:
        """The model whose layers the adapter changes."""
        return self._model

    @property
    def scale(self) -> float:
        """Factor by which the low-rank terms are multiplied."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def products(self) -> dict[str, Adapted]:
        """Name of each adapted layer -> function that adds the low-rank terms to the layer's result."""
        layers: dict[str, list[tuple[int, nn.Parameter, nn.Parameter]]] = {}
        for name, part in sorted(self._parts.items(), key=lambda item: item[1].start):
            pair = self.parameters[_tensor(name, "A")], self.parameters[_tensor(name, "B")]
            layers.setdefault(layer_of(part), []).append((part.start, *pair))
        return {
            name: _AdaptedLayer(self._model.get_submodule(name), parts, self.scale, self.dropout)
            for name, parts in layers.items()
        }

    def _attach(self) -> None:
        for name, product in self.products.items():
            attach(self._model, name, product)

    def settings(self) -> dict[str, Any]:
        """Settings of this adapter as plain data: rank, scale and base model. Training with saved matrices may continue
        only if the settings are the same."""
        return {"r": self.r, "alpha": float(self.alpha), "rslora": self.rslora, "base": self._base_digest}

    @functools.cached_property
    def _base_digest(self) -> str:
        return weights_digest(self._model)

    def tensors(self) -> dict[str, Tensor]:
        """All matrices by PEFT's names, with rows in PEFT's order: float32 on the CPU, detached."""
        out: dict[str, Tensor] = {}
        for name, part in self._parts.items():
            a, b = (self.parameters[_tensor(name, which)].detach().cpu() for which in "AB")
            if part.order:
                b = b[part.sources(0, len(b)).argsort()]
            out |= {_tensor(name, "A"): a.contiguous(), _tensor(name, "B"): b.contiguous()}
        return out

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all matrices by those of :meth:`tensors`, also of an earlier process. Raises ConfigError for other
        names or shapes; then no matrix has changed."""
        expected = {name: tuple(each.shape) for name, each in self.parameters.items()}
        given = {name: tuple(each.shape) for name, each in tensors.items()}
        if given != expected:
            wrong = sorted(set(given.items()) ^ set(expected.items()))[0]
            raise ConfigError(f"{wrong[0]} of shape {list(wrong[1])} is only in one of adapter and file")
        with torch.no_grad():
            for name, part in self._parts.items():
                a, b = (tensors[_tensor(name, which)] for which in "AB")
                self.parameters[_tensor(name, "A")].copy_(a)
                self.parameters[_tensor(name, "B")].copy_(b[part.sources(0, len(b))] if part.order else b)

    def as_served(self) -> Adapter:
        """The adapter as the engine holds it in memory. The matrices are not copied."""
        layers: dict[str, list[LowRank]] = {}
        for name, part in sorted(self._parts.items(), key=lambda item: item[1].start):
            a, b = (self.parameters[_tensor(name, which)].detach() for which in "AB")
            layers.setdefault(layer_of(part), []).append(LowRank(part.start, a, b * self.scale))
        return Adapter(layers, digest="", rank=self.r)

    def write(self, directory: Path) -> None:
        """Write the adapter into ``directory``, as PEFT's ``save_pretrained`` does. The directory is created if needed.
        Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors(), directory / WEIGHTS_NAME, metadata={"format": "pt"})
        (directory / WEIGHTS_NAME).chmod(0o644)  # the library writes it for the owner only
        text = json.dumps(self._peft_config(), indent=2, ensure_ascii=False)
        (directory / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")

    def _peft_config(self) -> Mapping[str, Any]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._base or None,
            "r": self.r,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.rslora,
            "target_modules": _target_modules(list(self._parts), self._sites, self._config),
            "fan_in_fan_out": any(part.transposed for part in self._parts.values()),
            "bias": "none",
            "init_lora_weights": True,
            "inference_mode": True,
        }


def _tensor(module: str, which: str) -> str:
    return f"base_model.model.{module}.lora_{which}.weight"


def _target_modules(names: list[str], sites: Sites, config: NetworkConfig) -> list[str]:
    """Value of ``target_modules``, sorted: the last parts of ``names`` if they select exactly these modules, otherwise
    the whole names."""
    ends = {_last(name) for name in names}
    others = sum(_last(name) in ends for name in _trainable(sites)) - len(names)
    return sorted(names) if others or config.experts is not None else sorted(ends)


class _AdaptedLayer:
    """Computes one layer's result plus the low-rank terms of one trainable adapter."""

    def __init__(
        self, layer: nn.Module, parts: list[tuple[int, nn.Parameter, nn.Parameter]], scale: float, dropout: float
    ) -> None:
        self._layer = layer
        self._parts = parts
        self._scale = scale
        self._dropout = dropout
        self.matrices = [matrix for _, *pair in parts for matrix in pair]
        """The trained matrices A and B of all parts."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        pieces = []
        at = 0
        for start, a, b in self._parts:
            end = start + len(b)
            dropped = functional.dropout(x, self._dropout, self._layer.training)
            added = functional.linear(functional.linear(dropped, a), b) * self._scale
            pieces += [out[:, at:start], out[:, start:end] + added]
            at = end
        found = [piece for piece in (*pieces, out[:, at:]) if piece.shape[1]]
        return torch.cat(found, dim=1) if len(found) > 1 else found[0]
