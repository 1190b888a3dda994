"""Reads the matrices of an adapter from a directory that PEFT wrote.

The directory is untrusted data. Only JSON and safetensors are read. Links are resolved before paths are compared with
the allowed root. Names, shapes and sizes are checked against the model before memory is allocated for a tensor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chairlift.base.mistaken_models import check_content
from chairlift.errors import ModelLoadError
from chairlift.lora.settings import CONFIG_NAME, AdapterSettings, read_settings
from chairlift.lora.sites import Sites, layer_of
from chairlift.models.formats.checkpoint import CheckpointPart

__all__ = ["WEIGHTS_NAME", "Adapter", "LowRank", "adapter_files", "read_adapter"]

WEIGHTS_NAME: Final = "adapter_model.safetensors"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOTS: Final[dict[str, Path]] = {}
"""Id of an adapter on the Hub -> directory of its snapshot."""
_NAME: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
_DTYPES: Final = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
_SAID: Final = (
    (r"lora_magnitude_vector", "DoRA scales the whole weight; train the adapter with use_dora=False"),
    (
        r"token_adapter|trainable_tokens",
        "rows of the embedding are not replaced; train without trainable_token_indices",
    ),
    (r"lora_embedding|embed|wte|wpe", "embeddings are not adapted; leave them out of target_modules"),
    (r"lm_head|embed_out", "the output head is not adapted; leave it out of target_modules"),
    (
        r"expert|router|block_sparse_moe|mlp\.gate\.",
        "experts and their routers are not adapted; leave them out of target_modules",
    ),
    (r"bias$", "biases are not adapted; train the adapter with bias='none' and lora_bias=False"),
)
"""(regular expression of tensor names, reason why such tensors are refused)."""


@dataclasses.dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank matrices that an adapter adds to one layer: ``x @ a.T @ b.T`` is added to the outputs from ``start``
    on."""

    start: int
    a: Tensor
    """Matrix A, float32 [r, in]."""
    b: Tensor
    """Matrix B, float32 [rows, r], already multiplied by the adapter's scale. Its rows have the order of the rows of
    this package's layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """The low-rank matrices of one adapter, in memory."""

    layers: dict[str, list[LowRank]]
    """Layer name in this package -> the layer's low-rank parts, ordered by their first row."""
    digest: str
    """Digest of all data that was read. Different adapters have different digests."""
    rank: int
    """Largest rank of any low-rank part of the adapter."""

    @property
    def numbers(self) -> int:
        """Number of values in all matrices of the adapter."""
        return sum(part.a.numel() + part.b.numel() for parts in self.layers.values() for part in parts)


def adapter_directory(path: Path) -> Path:
    """Directory of an adapter. A local directory is returned unchanged; otherwise ``path`` is an id on the Hugging Face
    Hub, whose snapshot is returned. Raises ModelLoadError.

    The Hub is asked once per process. An adapter that left memory is read again while requests wait for it and for
    others, and they must not wait for another host.
    """
    if path.is_dir() or not _HUB_ID.fullmatch(str(path)):
        return path
    known = _SNAPSHOTS.get(str(path))
    if known is not None and known.is_dir():
        return known
    from huggingface_hub import snapshot_download  # takes a while to import, and local directories don't need it

    try:
        found = Path(snapshot_download(str(path), allow_patterns=[CONFIG_NAME, WEIGHTS_NAME]))
    except Exception as error:  # unreachable, unknown, gated, disk full
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise ModelLoadError(
            f"{str(path)!r:.200} is not a directory here, and the Hugging Face Hub did not give an adapter of that name"
            f" ({type(error).__name__}: {reason}); check the spelling and the network, or give a directory"
        ) from None
    _SNAPSHOTS[str(path)] = found
    return found


def adapter_files(path: Path, root: Path | None = None) -> tuple[Path, Path]:
    """Paths of the configuration and the weights in an adapter's directory, with all links resolved.

    If ``root`` is given, both must be inside it. Raises ModelLoadError.
    """
    if not path.is_dir():
        raise ModelLoadError(f"{str(path)!r:.300} is not a directory; give one with {CONFIG_NAME} and {WEIGHTS_NAME}")
    found = []
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        try:
            file = (path / name).resolve(strict=True)
            regular = file.is_file()
        except (OSError, RuntimeError):
            regular = False
        if not regular:
            pickled = name == WEIGHTS_NAME and (path / "adapter_model.bin").exists()
            hint = "; it has adapter_model.bin, and unpickling runs any code inside" if pickled else ""
            raise ModelLoadError(f"{path} has no file {name}{hint}; save the adapter with PEFT's save_pretrained")
        if root is not None and not file.is_relative_to(root.resolve()):
            raise ModelLoadError(f"{path / name} lies outside of {root} (links are followed); copy it there")
        found.append(file)
    return found[0], found[1]


def read_adapter(path: Path, sites: Sites, *, max_rank: int, root: Path | None = None) -> Adapter:
    """Read an adapter for a model with these ``sites``, from a directory or, if ``root`` is None, from a Hub id.

    Every tensor must be used. Otherwise a ModelLoadError names the tensor or the setting.
    """
    config, weights = adapter_files(adapter_directory(path) if root is None else path, root)
    settings = read_settings(config)
    if settings.transposed and not sites.transposed:
        raise ModelLoadError(
            f"{config}: fan_in_fan_out is true, but {sites.family} models have no weights that are stored transposed;"
            " the adapter belongs to another model"
        )
    try:
        with safe_open(weights, framework="pt") as file:
            pairs = _checked(file, settings, sites, max_rank, weights)
            return _read(file, pairs, settings, weights)
    except (SafetensorError, OSError, RuntimeError, ValueError, MemoryError) as error:
        if isinstance(error, ModelLoadError):
            raise
        check_content(weights)
        raise ModelLoadError(f"{weights} is damaged or incomplete ({error}); save the adapter again") from None


@dataclasses.dataclass(frozen=True, slots=True)
class _Pair:
    module: str
    part: CheckpointPart
    a: str
    b: str


def _checked(file: Any, settings: AdapterSettings, sites: Sites, max_rank: int, where: Path) -> list[_Pair]:
    """Pairs of tensors A and B whose names and shapes were checked. Their data has not been read."""
    names: dict[str, dict[str, str]] = {}
    modules = {part.name.removesuffix(".weight"): part for part in sites.parts.values()}  # as the checkpoint has them
    modules |= sites.parts
    if sites.prefix:
        modules |= {name.removeprefix(sites.prefix): part for name, part in sites.parts.items()}
    for name in file.keys():  # noqa: SIM118 - not a mapping
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in modules:
            _refuse(name, where, sites.family)
        names.setdefault(match["module"], {})[match["which"]] = name
    if not names:
        raise ModelLoadError(f"{where} has no tensors, so the adapter changes nothing; save it again")
    pairs = []
    for module, both in names.items():
        if len(both) < 2:
            has, lacks = ("A", "B") if "A" in both else ("B", "A")
            raise ModelLoadError(f"{where}: {module} has lora_{has} but no lora_{lacks}; save the adapter again")
        pair = _Pair(module, modules[module], both["A"], both["B"])
        _check_pair(file, pair, settings, max_rank, where)
        pairs.append(pair)
    parts = [pair.part.name for pair in pairs]
    if len(set(parts)) < len(parts):
        raise ModelLoadError(f"{where} has tensors for one layer under two names; save the adapter again")
    return sorted(pairs, key=lambda pair: (layer_of(pair.part), pair.part.start))


def _check_pair(file: Any, pair: _Pair, settings: AdapterSettings, max_rank: int, where: Path) -> None:
    rank = settings.rank_of(pair.module)
    if rank > max_rank:
        raise ModelLoadError(
            f"{where}: {pair.module} has rank {rank}, and max_lora_rank is {max_rank}; raise that, or train with less"
        )
    for name, expected in ((pair.a, (rank, pair.part.shape[1])), (pair.b, (pair.part.shape[0], rank))):
        view = file.get_slice(name)
        shape = tuple(view.get_shape())
        dtype = view.get_dtype()
        if shape != expected:
            raise ModelLoadError(
                f"{where}: tensor {name} has shape {list(shape)}, but the model and {CONFIG_NAME} ask for"
                f" {list(expected)}; the adapter belongs to another model, or its rank is another"
            )
        if dtype not in _DTYPES:
            raise ModelLoadError(f"{where}: tensor {name} is stored as {dtype}; use {', '.join(_DTYPES)}")


def _read(file: Any, pairs: list[_Pair], settings: AdapterSettings, where: Path) -> Adapter:
    layers: dict[str, list[LowRank]] = {}
    digest = hashlib.sha256()
    rank = 0
    for pair in pairs:
        a, b = (file.get_tensor(name).to(torch.float32).contiguous() for name in (pair.a, pair.b))
        for name, tensor in ((pair.a, a), (pair.b, b)):
            if not bool(tensor.isfinite().all()):
                raise ModelLoadError(f"{where}: tensor {name} has NaN or infinity; train the adapter again")
            digest.update(name.encode() + b"\0")
            digest.update(memoryview(tensor.numpy()).cast("B"))
        scale = settings.scale_of(pair.module)
        digest.update(str(scale).encode())
        if pair.part.order:
            b = b[pair.part.sources(0, len(b))]
        layers.setdefault(layer_of(pair.part), []).append(LowRank(pair.part.start, a, b * scale))
        rank = max(rank, len(a))
    return Adapter(layers, digest.hexdigest(), rank)


def _refuse(name: str, where: Path, family: str) -> NoReturn:
    for pattern, why in _SAID:
        if re.search(pattern, name):
            raise ModelLoadError(f"{where}: tensor {name!r:.200}: {why}")
    raise ModelLoadError(
        f"{where}: tensor {name!r:.200} is no low-rank matrix of a linear layer of a {family} model; the adapter"
        " belongs to another model"
    )
