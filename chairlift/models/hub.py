"""Downloads a model from the Hugging Face Hub, but only the files that this package reads.

Repositories often hold the same weights several times (pickled, as ``consolidated.safetensors``, for other engines).
Small files are downloaded first. One of them, the index of the weights, says which large files are needed. Of a
repository with GGUF files, one model is downloaded: the one whose quantisation the name has after a colon, or a usual
one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.base import mistaken_models
from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.choice import choose_encoder, choose_gguf, gguf_models

__all__ = ["INDEX_NAME", "SINGLE_NAME", "WEIGHT_FILE", "download_model", "parse_hub_id"]

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
WEIGHT_FILE: Final = re.compile(r"[\w-][\w.-]*\.safetensors")
"""Allowed names of weight files. They contain no path separators, so they cannot point outside the model's
directory."""
_SMALL: Final = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", INDEX_NAME),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "hf_quant_config.json"),
    "README.md",  # which names the licence
)
_HUB_ID: Final = re.compile(
    r"(?:(?:hf\.co|huggingface\.co)/)?([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::([\w.-]+))?"
)
_REASONS: Final = {
    "LocalEntryNotFoundError": "it is not in the cache, and the Hub cannot be reached or HF_HUB_OFFLINE is set",
    "RepositoryNotFoundError": "there is none of that name, or it is private",
    "GatedRepoError": "its owner grants access on the Hub's page of the model, and hf auth login tells who you are",
}
"""Name of an exception class of huggingface_hub -> reason in one line, for our error message. The library's own
messages have several lines."""
_FOLDER: Final = re.compile(r"\w[\w-]*")


def parse_hub_id(name: str) -> tuple[str, str | None] | None:
    """(id, quantisation or None) of a name such as ``owner/name:Q4_K_M``, also with ``hf.co/`` before it. None for
    any other name. A name without an owner has no quantisation."""
    found = _HUB_ID.fullmatch(name)
    if found is None or (found[2] is not None and "/" not in found[1]) or found[1].endswith(".gguf"):
        return None
    return found[1], found[2]


def download_model(name: str, revision: str | None = None, quantization: str | None = None) -> Path:
    """Return the local directory of the Hub's snapshot of ``name``, or its first GGUF file. Files that the local cache
    lacks are downloaded.

    ``quantization`` selects a GGUF file, such as ``Q4_K_M``. None: the directory's safetensors, or without these a
    usual GGUF file. Without a network the cached files are returned. Raises
    :class:`~chairlift.errors.ModelLoadError` when the Hub and its cache have no model of that name.
    """
    from huggingface_hub import snapshot_download  # takes a while to import, and local directories don't need it
    from huggingface_hub.utils.tqdm import tqdm

    class Progress(tqdm):
        """The library's progress bar, on a terminal only."""

        def __init__(self, *args: Any, **options: Any) -> None:
            options["disable"] = options.get("disable") or not sys.stderr.isatty()
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]

    def fetch(files: list[str], of: str | None) -> Path:
        try:
            return Path(snapshot_download(name, revision=of, allow_patterns=files, tqdm_class=Progress))
        except Exception as error:  # unreachable, unknown, gated, disk full: for the caller all are "no such model"
            reason = _REASONS.get(type(error).__name__) or (str(error).strip().splitlines() or [""])[0][:200]
            raise ModelLoadError(
                f"{name!r} is not a directory here, and the Hugging Face Hub did not give a model of that name "
                f"({type(error).__name__}: {reason}); {mistaken_models.of_unknown_id(name)}check the spelling, the "
                "network, and access to gated models, or download it elsewhere and give its directory"
            ) from None

    snapshot = fetch(list(_SMALL), revision)
    commit = snapshot.name  # so that all files are of one commit, whatever is pushed meanwhile

    def gguf_file() -> Path:
        files = _repository_files(name, snapshot)
        chosen = choose_gguf(files, quantization, f"the Hub's model {name!r}")
        return fetch([*chosen, *choose_encoder(files)], commit) / chosen[0]

    if quantization is not None:
        return gguf_file()
    pieces = _pieces(snapshot)
    if "gguf" in name.lower() and not pieces and _has_only_gguf(_repository_files(name, snapshot)):
        return gguf_file()  # without the library's warning that there are no safetensors
    fetch([*(pieces or [SINGLE_NAME]), *_pooling_files(snapshot)], commit)
    if any(not (snapshot / file).is_file() for file in pieces):  # an index that was left behind
        fetch([SINGLE_NAME], commit)
    weights = any((snapshot / file).is_file() for file in (SINGLE_NAME, *pieces))
    return snapshot if weights or not _has_only_gguf(_repository_files(name, snapshot)) else gguf_file()


def _has_only_gguf(files: Sequence[str]) -> bool:
    """Whether the weights in a repository are in GGUF files, and in no safetensors that are read."""
    return bool(gguf_models(files)) and SINGLE_NAME not in files


def _repository_files(name: str, snapshot: Path) -> list[str]:
    """Paths of all files of the snapshot's commit on the Hub; without a network those that are here."""
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(name, revision=snapshot.name)
    except Exception:  # the small files came from the Hub or from its cache, which is enough to go on
        return [str(file.relative_to(snapshot)) for file in snapshot.rglob("*.gguf")]


def _pieces(snapshot: Path) -> list[str]:
    """Names of the weight files in the index. Empty if the index is missing or damaged; loading reports damage
    later."""
    index = _read(snapshot / INDEX_NAME)
    names = index.get("weight_map") if isinstance(index, dict) else None
    found = set(names.values()) if isinstance(names, dict) and all(type(x) is str for x in names.values()) else set()
    return sorted(file for file in found if WEIGHT_FILE.fullmatch(file))


def _pooling_files(snapshot: Path) -> Iterator[str]:
    """Paths of the settings files that belong to the steps in sentence-transformers' ``modules.json``. The files are in
    subdirectories."""
    modules = _read(snapshot / "modules.json")
    for module in modules if isinstance(modules, list) else []:
        folder = module.get("path") if isinstance(module, dict) else None
        if isinstance(folder, str) and _FOLDER.fullmatch(folder):
            yield f"{folder}/config.json"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
