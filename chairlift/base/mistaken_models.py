"""Explains why a path or name is not a model, and suggests what to give instead. Standard library only.

Each function returns one sentence for an error message. The files are untrusted data: at most a few kilobytes of each
are read.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Final

from chairlift.errors import ModelLoadError

__all__ = ["check_content", "of_directory", "of_name", "of_unknown_id", "of_weights"]

_POINTER: Final = b"version https://git-lfs.github.com/spec/v1"
_MAX_BYTES: Final = 64 * 1024
_MAX_ENTRIES: Final = 200
_WANTED: Final = (
    "give the directory that holds config.json and *.safetensors, a GGUF file, or a Hugging Face model id such as"
    " Qwen/Qwen2.5-0.5B-Instruct"
)
_HUB_ADDRESS: Final = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:[/:?#].*)?")
_OLLAMA: Final = re.compile(r"(?:ollama://)?[\w.-]+:[\w.-]+")
_SHORT_OLLAMA: Final = re.compile(
    r"(?:llama|qwen|mistral|mixtral|gemma|phi|deepseek|codellama|smollm|tinyllama|gpt-oss)[\w.-]*"
)


def check_content(path: Path) -> None:
    """Raise :class:`~chairlift.errors.ModelLoadError` if a file is a Git-LFS pointer instead of the real content."""
    if _head(path, len(_POINTER)) == _POINTER:
        raise ModelLoadError(
            f"{path} is a Git-LFS pointer, a few lines that stand for the real file; run git lfs install && git lfs"
            f" pull in {path.parent}, or download the model with the hf command"
        )


def of_name(name: str) -> str:
    """Error sentence for a model name that is neither a local directory nor a Hub id."""
    path = Path(name).expanduser()
    if path.is_file():
        return _of_file(path)
    if path.suffix == ".gguf":
        return f"there is no file {name!r}{_neighbours(path)}; give the path of a GGUF file that is there"
    if match := _HUB_ADDRESS.fullmatch(name):
        return f"{name!r} is an address of the Hugging Face Hub; give the model's id, {match[1]}"
    if _OLLAMA.fullmatch(name) or name.startswith("ollama://"):
        return _of_ollama(name)
    return f"{name!r} is not a directory{_neighbours(path)}; {_WANTED}"


def of_unknown_id(name: str) -> str:
    """A hint for an id that the Hub does not know; empty if there is no hint."""
    if "/" not in name and _SHORT_OLLAMA.fullmatch(name):
        return f"if {name!r} is a name of Ollama's, note that its store is not read; "
    return ""


def of_directory(folder: Path) -> str:
    """Error sentence for a directory without ``config.json``."""
    if (adapter := _of_adapter(folder)) is not None:
        return adapter
    if (folder / "model_index.json").is_file():
        return f"{folder} is a pipeline of diffusers, which makes images; {_WANTED}"
    if (folder / "params.json").is_file() or any(folder.glob("consolidated.*")):
        return (
            f"{folder} has weights in the original format of Llama or Mistral (params.json, consolidated.*), which is"
            " not read; get the version with config.json and *.safetensors"
        )
    if (folder / "blobs").is_dir() and (folder / "manifests").is_dir():
        return _of_ollama(str(folder))
    if (inner := _inner_model(folder)) is not None:
        return f"{folder} has no config.json, but {inner} has one; give that directory"
    return (
        f"{folder} has no config.json, so it is not a Hugging Face model directory; "
        "give the directory that holds config.json, *.safetensors and tokenizer.json"
    )


def of_weights(folder: Path) -> str:
    """Error sentence for a directory with ``config.json`` but without the ``*.safetensors`` files of a whole model."""
    if (adapter := _of_adapter(folder)) is not None:
        return adapter
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf:
        return (
            f"{folder} has no *.safetensors, but GGUF files; give the path of one of them, such as {folder / gguf[0]}"
        )
    names = "neither model.safetensors nor model.safetensors.index.json"
    return f"{folder} has {names}; download the model again"


def _of_adapter(folder: Path) -> str | None:
    path = folder / "adapter_config.json"
    if not path.is_file():
        return None
    try:
        base = json.loads(_head(path, _MAX_BYTES)).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError):
        base = None
    of = f" of {base!r:.100}" if isinstance(base, str) and base else ""
    return (
        f"{folder} is a LoRA adapter{of}, not a whole model; serve its base model with --enable-lora --lora-modules"
        f" NAME={folder}, or merge it (peft: merge_and_unload(), then save_pretrained()) and give the merged directory"
    )


def _of_file(path: Path) -> str:
    head = _head(path, len(_POINTER))
    if head == _POINTER:
        check_content(path)
    if head[:4] == b"GGUF":
        link = f"ln -s {path} {path.name.partition(':')[0]}.gguf"
        return f"{path} is a GGUF file without the ending that says so; give it by a name that ends in .gguf: {link}"
    if path.suffix == ".safetensors":
        return f"{path} is one file of a model; give the directory that holds it and config.json"
    return f"{path} is a file, and no model; {_WANTED}"


def _of_ollama(name: str) -> str:
    shown = name.removeprefix("ollama://")
    return (
        f"{name!r} looks like a name of Ollama's, whose store is not read; give a Hugging Face model id, or the model's"
        f" GGUF file under a name that ends in .gguf (ollama show --modelfile {shown} prints its path behind FROM)"
    )


def _neighbours(path: Path) -> str:
    """Names of files near a missing path: the most similar name, or the GGUF files."""
    try:
        names = [each.name for each, _ in zip(path.parent.iterdir(), range(_MAX_ENTRIES), strict=False)]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    if near:
        return f", but there is {str(path.with_name(near[0]))!r}"
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    return f" (beside it: {', '.join(gguf[:4])})" if path.suffix == ".gguf" and gguf else ""


def _inner_model(folder: Path) -> Path | None:
    """A directory with a model, below ``folder`` (as in the Hub's cache, or in an unpacked archive). None if there is
    none."""
    for pattern in ("*/config.json", "snapshots/*/config.json"):
        for found, _ in zip(sorted(folder.glob(pattern)), range(_MAX_ENTRIES), strict=False):
            return found.parent
    return None


def _head(path: Path, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError:
        return b""
