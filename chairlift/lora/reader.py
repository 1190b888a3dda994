"""Reads the matrices of an adapter from a directory that PEFT wrote, or from a GGUF file.

The files are untrusted data. Only JSON, safetensors and GGUF are read. Links are resolved before paths are compared
with the allowed root.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from chairlift.base.mistaken_models import check_content
from chairlift.errors import ModelLoadError
from chairlift.lora.adapter import Adapter
from chairlift.lora.gguf import read_gguf_adapter
from chairlift.lora.settings import CONFIG_NAME, read_settings
from chairlift.lora.sites import Sites
from chairlift.lora.tensors import read_tensors
from chairlift.models.formats.gguf.files import is_gguf

__all__ = ["WEIGHTS_NAME", "adapter_files", "read_adapter"]

WEIGHTS_NAME: Final = "adapter_model.safetensors"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOTS: Final[dict[str, Path]] = {}
"""Id of an adapter on the Hub -> directory of its snapshot."""


def adapter_directory(path: Path) -> Path:
    """Directory of an adapter. A local directory or GGUF file is returned unchanged; otherwise ``path`` is an id on the
    Hugging Face Hub, whose snapshot is returned. Raises ModelLoadError.

    The Hub is asked once per process. An adapter that left memory is read again while requests wait for it and for
    others, and they must not wait for another host.
    """
    if path.is_dir() or is_gguf(path) or not _HUB_ID.fullmatch(str(path)):
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
        raise ModelLoadError(
            f"{str(path)!r:.300} is not a directory; give one with {CONFIG_NAME} and {WEIGHTS_NAME}, or a GGUF file"
        )
    found = []
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        file = _resolved(path / name, root)
        if file is None:
            pickled = name == WEIGHTS_NAME and (path / "adapter_model.bin").exists()
            hint = "; it has adapter_model.bin, and unpickling runs any code inside" if pickled else ""
            raise ModelLoadError(f"{path} has no file {name}{hint}; save the adapter with PEFT's save_pretrained")
        found.append(file)
    return found[0], found[1]


def gguf_adapter(path: Path, root: Path | None = None) -> Path | None:
    """GGUF file of an adapter, with all links resolved: ``path`` itself, or the only GGUF file of a directory without
    PEFT's files. None if ``path`` is something else. Raises ModelLoadError for a file outside of ``root``."""
    if path.is_dir() and not (path / CONFIG_NAME).exists():
        files = [each for each in path.glob("*.gguf") if each.is_file()]
        path = files[0] if len(files) == 1 else path
    if not is_gguf(path):
        return None
    file = _resolved(path, root)
    if file is None:
        raise ModelLoadError(f"{str(path)!r:.300} is not a file; check the spelling")
    return file


def _resolved(path: Path, root: Path | None) -> Path | None:
    """``path`` with all links resolved; None if it is not a regular file. Raises ModelLoadError if it lies outside of
    ``root``."""
    try:
        file = path.resolve(strict=True)
        regular = file.is_file()
    except (OSError, RuntimeError):
        regular = False
    if not regular:
        return None
    if root is not None and not file.is_relative_to(root.resolve()):
        raise ModelLoadError(f"{path} lies outside of {root} (links are followed); copy it there")
    return file


def read_adapter(path: Path, sites: Sites, *, max_rank: int, root: Path | None = None) -> Adapter:
    """Read an adapter for a model with these ``sites``, from a directory, a GGUF file or, if ``root`` is None, a Hub
    id.

    Every tensor must be used. Otherwise a ModelLoadError names the tensor or the setting.
    """
    file = gguf_adapter(path, root)
    if file is not None:
        return read_gguf_adapter(file, sites, max_rank=max_rank)
    config, weights = adapter_files(adapter_directory(path) if root is None else path, root)
    settings = read_settings(config)
    if settings.transposed and not sites.transposed:
        raise ModelLoadError(
            f"{config}: fan_in_fan_out is true, but {sites.family} models have no weights that are stored transposed;"
            " the adapter belongs to another model"
        )
    try:
        with safe_open(weights, framework="pt") as opened:
            return read_tensors(opened, settings, sites, max_rank, weights)
    except (SafetensorError, OSError, RuntimeError, ValueError, MemoryError) as error:
        if isinstance(error, ModelLoadError):
            raise
        check_content(weights)
        raise ModelLoadError(f"{weights} is damaged or incomplete ({error}); save the adapter again") from None
