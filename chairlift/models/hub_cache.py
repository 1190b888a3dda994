"""The models in the Hugging Face Hub's cache of this machine: what is there, and its removal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.choice import choose_gguf, gguf_models, quantization_of
from chairlift.models.hub import parse_hub_id

__all__ = ["CachedModel", "cached_models", "find_cached", "not_cached", "remove_cached"]

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth")
_UNFINISHED: Final = ".incomplete"


@dataclasses.dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache. Each GGUF model of a repository is a model of its own."""

    name: str
    """Name that other commands take: ``owner/name``, or ``owner/name:Q4_K_M``."""
    repository: str
    path: Path
    """Directory, or first GGUF file, as the engine loads it."""
    files: tuple[Path, ...]
    """The model's own files. Files of other GGUF models in the same repository are left out."""
    num_bytes: int
    format: str
    """``safetensors``, ``GGUF Q4_K_M``, or ``no weights``."""
    is_partial: bool
    """Whether a download of the repository was interrupted."""


def cached_models() -> list[CachedModel]:
    """All models in the cache, sorted by name. Data sets are left out."""
    return sorted(
        (model for repository in _repositories() for model in _models(repository)), key=lambda each: each.name
    )


def find_cached(name: str) -> CachedModel | None:
    """The cached model that a command's name means; None if it is not in the cache. Raises ModelLoadError if the
    repository has several GGUF models of this kind."""
    found = parse_hub_id(name)
    if found is None:
        return None
    repository, quantization = found
    models = [each for each in cached_models() if each.repository == repository]
    whole = next((each for each in models if each.name == repository), None)
    if quantization is None and (whole is not None or not models):
        return whole
    by_file = {file.name: each for each in models if each is not whole for file in each.files}
    if not by_file:
        return None
    return by_file[choose_gguf(by_file, quantization, f"the cached {repository!r}")[0]]


def remove_cached(model: CachedModel) -> int:
    """Delete a model from the cache. Returns the number of bytes that were freed. Raises OSError.

    With the last model of a repository, the whole repository is deleted.
    """
    info = _scan()
    others = [each for each in cached_models() if each.repository == model.repository and each.name != model.name]
    if not others:
        # Copies of a repository have the same commits, so only this one is offered for deletion.
        own = frozenset(each for each in info.repos if (each.repo_type, each.repo_id) == ("model", model.repository))
        hashes = [revision.commit_hash for each in own for revision in each.revisions]
        plan = dataclasses.replace(info, repos=own).delete_revisions(*hashes)
        plan.execute()
        return int(plan.expected_freed_size)
    kept = {file.resolve() for each in others for file in each.files}
    freed = 0
    for file in model.files:
        content = file.resolve()
        file.unlink()
        if content not in kept and content.is_file():
            freed += content.stat().st_size
            content.unlink()
    return freed


def _repositories() -> Iterator[Any]:
    """Repositories of models in the cache."""
    from huggingface_hub.errors import CacheNotFound

    try:
        found = _scan().repos
    except CacheNotFound:
        return
    yield from (each for each in found if each.repo_type == "model")


def _scan() -> Any:
    """The library's report on the cache. Raises CacheNotFound."""
    from huggingface_hub import constants, scan_cache_dir

    return scan_cache_dir(constants.HF_HUB_CACHE)


def _models(repository: Any) -> Iterator[CachedModel]:
    if not repository.revisions:
        return
    newest = max(repository.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
    folder = Path(newest.snapshot_path)
    blobs = Path(repository.repo_path) / "blobs"
    partial = blobs.is_dir() and any(file.suffix == _UNFINISHED for file in blobs.iterdir())
    sizes = {str(Path(file.file_path).relative_to(folder)): file.size_on_disk for file in newest.files}
    groups = gguf_models(sizes)
    rest = [file for file in sizes if not file.lower().endswith(".gguf")]
    has_weights = any(file.endswith(_WEIGHTS) for file in rest)
    for stem, files in groups.items():
        quant = quantization_of(stem)
        name = f"{repository.repo_id}:{quant}"
        if sum(quantization_of(other) == quant for other in groups) > 1:
            name = f"{repository.repo_id}:{Path(files[0]).name}"
        yield CachedModel(
            name,
            repository.repo_id,
            folder / files[0],
            tuple(folder / file for file in files),
            sum(sizes[file] for file in files),
            f"GGUF {quant}",
            partial,
        )
    if has_weights or not groups:
        kinds = sorted({Path(file).suffix[1:] for file in rest if file.endswith(_WEIGHTS)}, reverse=True)
        yield CachedModel(
            repository.repo_id,
            repository.repo_id,
            folder,
            tuple(folder / file for file in rest),
            sum(sizes[file] for file in rest),
            kinds[0] if kinds else "no weights",
            partial,
        )


def not_cached(name: str) -> ModelLoadError:
    """The error for a name that is not in the cache."""
    names = ", ".join(each.name for each in cached_models()[:8])
    there = f"it has {names}" if names else "it has no models"
    return ModelLoadError(f"{name!r} is not in the cache of the Hugging Face Hub; {there} (chairlift list)")
