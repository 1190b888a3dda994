"""Reads the tensors of an adapter's file. Every tensor is used, or the adapter is refused with the tensor's name.

Names, shapes and dtypes are checked against the model before memory is allocated for a tensor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.grouped import dequantized
from chairlift.lora.adapter import Adapter, EmbeddingChange, LowRank, Replaced
from chairlift.lora.names import module_names, parse_name
from chairlift.lora.settings import CONFIG_NAME, AdapterSettings
from chairlift.lora.sites import HEAD, ExpertSites, Sites, layer_of, member_of
from chairlift.models.formats.checkpoint import CheckpointPart

__all__ = ["read_tensors"]

_DTYPES: Final = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
_FUSED: Final = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:[\w.]*\.)?experts(?:\.base_layer)?")
"""Name of a module that holds the weights of all experts of a layer as parameters. ``.base_layer`` is PEFT's inner
wrapper, if both parameters are adapted."""
_SAID: Final = (
    (r"norm", "norms are not adapted; train the adapter with modules_to_save=None, or merge it into the model"),
    (
        r"(^|\.)(score|classifier|classification_head|v_head|qa_outputs)\.",
        "heads for classes are not served with adapters; merge the adapter into its model (PEFT's merge_and_unload) and"
        " serve the result",
    ),
    (r"wpe|embed_positions", "embeddings of positions are not adapted; leave them out of target_modules"),
    (r"expert|router|block_sparse_moe|mlp\.gate\.", "no such layer of experts, or no low-rank matrix of one"),
)
"""(regular expression of tensor names, reason why such tensors are refused)."""


def read_tensors(file: Any, settings: AdapterSettings, sites: Sites, max_rank: int, where: Path) -> Adapter:
    """The adapter in an open safetensors file. Raises ModelLoadError for tensors that do not fit."""
    reader = _Reader(file, settings, sites, max_rank, where)
    for module, names in reader.modules().items():
        reader.read(module, names)
    return reader.adapter()


class _Reader:
    def __init__(self, file: Any, settings: AdapterSettings, sites: Sites, max_rank: int, where: Path) -> None:
        self._file = file
        self._settings = settings
        self._sites = sites
        self._max_rank = max_rank
        self._where = where
        self._digest = hashlib.sha256(repr(settings).encode())
        self._layers: dict[str, list[LowRank]] = {}
        self._replaced: dict[str, list[Replaced]] = {}
        self._embedding: EmbeddingChange | None = None
        self._rank = 0
        self._whole: set[str] = set()
        """Modules whose weight or bias is replaced."""
        self._taken: dict[tuple[str, int], str] = {}
        """(layer, first row) -> module whose matrices change these rows."""
        self._parts: dict[str, CheckpointPart] = {}
        """Name of a module, with and without the prefixes that adapters may lack -> its rows."""
        for name, part in {**sites.parts, **sites.more}.items():
            whole = part.name.removesuffix(".weight")  # as the checkpoint has it
            self._parts |= dict.fromkeys((whole, name, name.removeprefix(sites.prefix)), part)
        self._embeddings = {sites.embedding, sites.embedding.removeprefix(sites.prefix)}

    # -- names -----------------------------------------------------------------------------------------------------

    def modules(self) -> dict[str, dict[str, str]]:
        """Module name -> kind of tensor -> name of the tensor, in the order of the module names."""
        found: dict[str, dict[str, str]] = {}
        for name in self._file.keys():  # noqa: SIM118 - not a mapping
            module, kind = parse_name(name)
            if not kind or not self._is_known(module):
                self._refuse(name)
            if kind == "unused":
                continue
            if kind in found.setdefault(module, {}):
                self._fail(f"has two tensors for one purpose, {found[module][kind]} and {name}; save the adapter again")
            found[module][kind] = name
        if not found:
            self._fail("has no tensors, so the adapter changes nothing; save it again")
        return dict(sorted(found.items()))

    def _is_known(self, module: str) -> bool:
        known = module in self._parts or module in self._embeddings
        return known or any(name in self._parts for name in module_names(module)) or self._fused(module) is not None

    def _fused(self, module: str) -> ExpertSites | None:
        """The layer of experts whose weights are parameters of the module ``module``."""
        found = _FUSED.fullmatch(module)
        return None if found is None else self._sites.experts.get(int(found[1]))

    # -- modules ---------------------------------------------------------------------------------------------------

    def read(self, module: str, names: Mapping[str, str]) -> None:
        """Read all tensors of one module."""
        if {"weight", "bias"} & set(names):
            self._whole.add(module)
        fused = self._fused(module)
        if fused is not None:
            self._read_fused(module, names, fused)
        elif module in self._embeddings:
            self._read_embedding(module, names)
        else:
            self._read_part(module, names, self._parts[module])

    def _read_part(self, module: str, names: Mapping[str, str], part: CheckpointPart) -> None:
        """Read the tensors of a linear layer, the output head, one expert, or a router."""
        self._allow(module, names, "a", "b", "added_bias", "magnitude", "weight", "base_weight", "bias")
        layer, start = self._place(part)
        if part.stack > 1:
            self._read_stack(module, names, part)
            return
        if "a" in names or "b" in names:
            self._read_low_rank(module, names, part, layer, start)
        elif {"magnitude", "added_bias"} & set(names):
            self._fail(f"{module} has vectors of an adapter, but no lora_A and lora_B; save the adapter again")
        weight = names.get("weight", names.get("base_weight"))
        if weight is not None and layer_of(part) in self._sites.stacks:
            self._fail(f"tensor {weight!r:.200} replaces an expert, which is not supported; merge it into the model")
        new = None if weight is None else self._rows_of(part, weight, part.stored_shape)
        bias = self._ordered(part, self._values(names["bias"], part.shape[:1])) if "bias" in names else None
        if new is not None or bias is not None:
            self._replaced.setdefault(layer, []).append(Replaced(start, new, bias))

    def _read_low_rank(
        self, module: str, names: Mapping[str, str], part: CheckpointPart, layer: str, start: int
    ) -> None:
        if len({"a", "b"} & set(names)) < 2:
            has, lacks = ("A", "B") if "a" in names else ("B", "A")
            self._fail(f"{module} has lora_{has} but no lora_{lacks}; save the adapter again")
        rank = self._rank_of(module, self._settings.rank_of(module), self._max_rank)
        rows, inputs = part.shape
        scale = self._settings.scale_of(module)
        a = self._values(names["a"], (rank, inputs))
        b = self._ordered(part, self._values(names["b"], (rows, rank))) * scale
        magnitude = added = None
        if self._settings.dora != ("magnitude" in names):
            self._fail(
                f"{module} has {'no ' if self._settings.dora else ''}lora_magnitude_vector, but {CONFIG_NAME} has"
                f" use_dora={self._settings.dora}; save the adapter again"
            )
        if self._settings.dora:
            if layer_of(part) in self._sites.stacks:
                self._fail(f"{module} has a lora_magnitude_vector, and DoRA of experts is not supported")
            magnitude = self._ordered(part, self._values(names["magnitude"], (rows,)))
        if self._settings.added_bias != ("added_bias" in names):
            self._fail(
                f"{module} has {'no ' if self._settings.added_bias else ''}bias of lora_B, but {CONFIG_NAME} has"
                f" lora_bias={self._settings.added_bias}; save the adapter again"
            )
        if "added_bias" in names:
            added = self._ordered(part, self._values(names["added_bias"], (rows,))) * scale
        self._add(module, layer, LowRank(start, a, b, magnitude, added), scale)

    def _read_stack(self, module: str, names: Mapping[str, str], part: CheckpointPart) -> None:
        """Read the matrices of a stack of experts that the checkpoint stores as the weight of one module."""
        layer = self._sites.stacks[layer_of(part)]
        which = 0 if layer_of(part) == layer.first else 1
        self._read_members(module, module, names, layer, which)

    def _read_fused(self, module: str, names: Mapping[str, str], layer: ExpertSites) -> None:
        """Read PEFT's matrices for a parameter with the weights of all experts (``target_parameters``)."""
        self._allow(module, names, "a", "b")
        shapes = [tuple(self._file.get_slice(names[kind]).get_shape()) for kind in ("a", "b") if kind in names]
        ends = [(shape[-1] if kind == "a" else shape[0]) for kind, shape in zip(("a", "b"), shapes, strict=False)]
        fits = [which for which, (outputs, inputs) in enumerate(layer.sizes) if ends == [inputs, outputs]]
        if len(fits) != 1:
            self._fail(
                f"the matrices of {module} have the shapes {list(map(list, shapes))}, but the model's experts have"
                f" weights of (outputs, inputs) {layer.sizes[0]} and {layer.sizes[1]}; the adapter belongs to another"
                " model"
            )
        own = (layer.first, layer.down)[fits[0]].rpartition(".")[2]
        self._read_members(module, f"{module.removesuffix('.base_layer')}.{own}", names, layer, fits[0])

    def _read_members(
        self, module: str, parameter: str, names: Mapping[str, str], layer: ExpertSites, which: int
    ) -> None:
        """Split the matrices of all experts, A [E r, in] and B [out, r E], into those of single experts. In B, the
        columns of an expert are E apart."""
        self._allow(module, names, "a", "b")
        if len(names) < 2:
            self._fail(f"{module} has only one of lora_A and lora_B; save the adapter again")
        rank = self._rank_of(parameter, self._settings.rank_of(parameter), self._max_rank * (2 if which == 0 else 1))
        scale = self._settings.scale_of(parameter)
        outputs, inputs = layer.sizes[which]
        count = layer.count
        a = self._values(names["a"], (count * rank, inputs)).reshape(count, rank, inputs)
        b = self._values(names["b"], (outputs, rank * count)).reshape(outputs, rank, count) * scale
        if which == 0 and layer.first_order:
            b = b[torch.tensor(layer.first_order)]
        stack = (layer.first, layer.down)[which]
        for expert in range(count):
            part = LowRank(0, a[expert].contiguous(), b[:, :, expert].contiguous())
            self._add(f"{parameter}[{expert}]", member_of(stack, expert), part, scale)

    def _read_embedding(self, module: str, names: Mapping[str, str]) -> None:
        self._allow(module, names, "embedding_a", "embedding_b", "weight", "base_weight", "token_rows", "magnitude")
        vocab, width = self._sites.vocab
        if "magnitude" in names:
            self._fail(f"tensor {names['magnitude']} is DoRA's (use_dora) for an embedding, which is not supported")
        change: dict[str, Tensor] = {}
        whole = names.get("weight", names.get("base_weight"))
        if whole is not None:
            change["table"] = self._values(whole, (vocab, width), keep=True)
            if self._sites.tied and not self._settings.saves(module):  # saved because the vocabulary was resized
                self._replaced.setdefault(HEAD, []).append(Replaced(0, change["table"]))
        if "embedding_a" in names or "embedding_b" in names:
            if len({"embedding_a", "embedding_b"} & set(names)) < 2:
                self._fail(f"{module} has only one of lora_embedding_A and lora_embedding_B; save the adapter again")
            rank = self._rank_of(module, self._settings.rank_of(module), self._max_rank)
            scale = self._settings.scale_of(module)
            self._digest.update(str(scale).encode())
            self._rank = max(self._rank, rank)
            change["a"] = self._values(names["embedding_a"], (rank, vocab)).t().contiguous()
            change["b"] = (self._values(names["embedding_b"], (width, rank)) * scale).t().contiguous()
        if "token_rows" in names:
            ids = self._settings.token_ids(module)
            if not ids or max(ids) >= vocab:
                self._fail(
                    f"tensor {names['token_rows']} needs trainable_token_indices in {CONFIG_NAME}, all below the"
                    f" vocabulary of {vocab:,}; got {ids!s:.80}"
                )
            change["token_ids"] = torch.tensor(ids)
            change["rows"] = self._values(names["token_rows"], (len(ids), width))
            self._digest.update(str(ids).encode())
        self._embedding = EmbeddingChange(**change)

    # -- tensors ---------------------------------------------------------------------------------------------------

    def _place(self, part: CheckpointPart) -> tuple[str, int]:
        """(name of the layer, first row in it) of the rows of ``part``. Experts of a stack are layers of their own."""
        layer = layer_of(part)
        experts = self._sites.stacks.get(layer)
        if experts is None:
            return layer, part.start
        rows = experts.sizes[0 if layer == experts.first else 1][0]
        return member_of(layer, part.start // rows), part.start % rows

    def _add(self, module: str, layer: str, part: LowRank, scale: float) -> None:
        if (layer, part.start) in self._taken:
            other = self._taken[layer, part.start]
            self._fail(f"has tensors for one layer under two names, {other} and {module}; save the adapter again")
        self._taken[layer, part.start] = module
        self._layers.setdefault(layer, []).append(part)
        self._digest.update(str(scale).encode())
        self._rank = max(self._rank, len(part.a))

    def _ordered(self, part: CheckpointPart, rows: Tensor) -> Tensor:
        """Rows or values in the row order of this package's layer."""
        return rows[part.sources(0, len(rows))] if part.order else rows

    def _rows_of(self, part: CheckpointPart, name: str, shape: tuple[int, ...]) -> Tensor:
        rows = part.rows_of(self._values(name, shape, keep=True))
        return self._ordered(part, dequantized(rows[:])).contiguous()

    def _rank_of(self, module: str, rank: int, most: int) -> int:
        if rank > most:
            self._fail(
                f"{module} has rank {rank}, and max_lora_rank is {self._max_rank}; raise that, or train with less"
            )
        return rank

    def _values(self, name: str, expected: tuple[int, ...], *, keep: bool = False) -> Tensor:
        """A tensor of the file as float32, or with ``keep`` in its own dtype, after a check of shape, dtype and
        numbers."""
        view = self._file.get_slice(name)
        shape = tuple(view.get_shape())
        dtype = view.get_dtype()
        if shape != expected:
            self._fail(
                f"tensor {name} has shape {list(shape)}, but the model and the adapter's rank ask for {list(expected)};"
                " the adapter belongs to another model, or its rank is another"
            )
        if dtype not in _DTYPES:
            self._fail(f"tensor {name} is stored as {dtype}; use {', '.join(_DTYPES)}")
        stored: Tensor = self._file.get_tensor(name)
        tensor = stored.contiguous() if keep else stored.to(torch.float32).contiguous()
        if not bool(tensor.isfinite().all()):
            self._fail(f"tensor {name} has NaN or infinity; train the adapter again")
        self._digest.update(f"{name}\0{tensor.dtype}{shape}".encode())
        self._digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return tensor

    def _allow(self, module: str, names: Mapping[str, str], *kinds: str) -> None:
        """Refuse tensors of a module that have another kind than ``kinds``."""
        for kind, name in names.items():
            if kind not in kinds:
                self._fail(f"tensor {name!r:.200} does not fit to {module}, which takes {', '.join(kinds)} only")

    def adapter(self) -> Adapter:
        """All that was read."""
        settings = self._settings
        if settings.token_ids("") and (self._embedding is None or self._embedding.rows is None):
            self._fail(f"{CONFIG_NAME} has trainable_token_indices, but no trainable_tokens_delta; save it again")
        for name in settings.saved:
            if not any(module == name or module.endswith(f".{name}") for module in self._whole):
                self._fail(f"{CONFIG_NAME} has {name!r:.80} in modules_to_save, but no tensors; save the adapter again")
        changeable = {name for layer in self._sites.experts.values() for name in layer.names}
        if settings.parameters and not changeable & set(self._layers):
            self._fail(
                f"{CONFIG_NAME} has target_parameters {list(settings.parameters)!r:.80}, but no matrices of experts or"
                " routers; save the adapter again"
            )
        layers = {name: sorted(parts, key=lambda part: part.start) for name, parts in self._layers.items()}
        return Adapter(layers, self._digest.hexdigest(), self._rank, self._replaced, self._embedding)

    def _refuse(self, name: str) -> NoReturn:
        for pattern, why in _SAID:
            if re.search(pattern, name):
                self._fail(f"tensor {name!r:.200}: {why}")
        self._fail(
            f"tensor {name!r:.200} belongs to no layer of a {self._sites.family} model that an adapter may change; the"
            " adapter belongs to another model"
        )

    def _fail(self, problem: str) -> NoReturn:
        raise ModelLoadError(f"{self._where}: {problem}")
