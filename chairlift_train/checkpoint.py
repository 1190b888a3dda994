"""Checkpoints of training runs. A checkpoint can be served as a model, and a run resumes from it with identical
results.

::

    OUTPUT/step-00000100/
        model.safetensors, config.json, generation_config.json, tokenizer.json, ...   a Hugging Face model
        training/state.safetensors, training/state.json                               state of the trainer
        training/SHA256SUMS                                                           their checksums, for sha256sum -c

An adapter is ``adapter_config.json`` and ``adapter_model.safetensors`` instead of a model, as PEFT writes it. If
several adapters are trained, each has a subdirectory with its name. Draft heads are ``config.json`` and
``medusa_lm_head.safetensors``, or for EAGLE-3 ``config.json`` and ``model.safetensors``.
All files are first written into a temporary directory and flushed to the disk. Then the directory is renamed. So if the
process is killed at any moment, the previous checkpoint remains the newest complete one. A checkpoint is only JSON and
safetensors, so reading it never executes code from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from chairlift.errors import ConfigError
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.model_files import TOKENIZER_FILES
from chairlift.models.registry import FAMILIES

__all__ = [
    "CheckpointStore",
    "ModelFiles",
    "copy_files",
    "flush",
    "from_tensors",
    "load_state",
    "random_state",
    "save_state",
    "set_random_state",
    "with_tensors",
    "write_model",
]

_NAME = re.compile(r"step-(\d{8,})")
_STATE = Path("training")
_SUMS = "SHA256SUMS"
_KIND = "__kind__"
"""Key that marks a JSON object as a value of a type that JSON does not have, such as a tuple or a tensor."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Files to write next to the weights of a model, so that the directory can be served, and can be loaded by
    transformers."""

    config: Mapping[str, Any]
    """Content of ``config.json``. Its dtype is replaced, and its fields about quantised weights are left out."""
    generation_config: Mapping[str, Any] | None = None
    tokenizer_dir: Path | None = None
    """Directory from which the tokenizer is copied."""
    dtype: torch.dtype = torch.bfloat16
    """Dtype of the weights in ``model.safetensors``."""


def write_model(model: CausalLM, files: ModelFiles, directory: Path) -> None:
    """Write the model into ``directory`` with Hugging Face's tensor names. The directory is created if needed."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(files.dtype).cpu().contiguous() for name, tensor in hf_state_dict(model).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors makes it readable by the owner only
    config = {"architectures": [FAMILIES[model.config.model_type].architecture], **files.config}
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(files.dtype).removeprefix("torch.")
    for key in ("quantization_config", "compression_config"):
        config.pop(key, None)  # the written weights are not quantised
    _write_json(directory / "config.json", config)
    copy_files(files, directory)


def copy_files(files: ModelFiles, directory: Path) -> None:
    """Write the other files of a model, next to its weights and config: generation settings and the tokenizer."""
    if files.generation_config:
        _write_json(directory / "generation_config.json", files.generation_config)
    for name in TOKENIZER_FILES if files.tokenizer_dir is not None else ():
        if files.tokenizer_dir is not None and (files.tokenizer_dir / name).is_file():
            shutil.copyfile(files.tokenizer_dir / name, directory / name)


class _WritesItself(Protocol):
    """Protocol of a :class:`~chairlift_train.networks.Network` that can write itself into a checkpoint."""

    def write(self, directory: Path, files: ModelFiles) -> None: ...


class CheckpointStore:
    """The checkpoints of one run. The newest ``keep`` checkpoints and the best checkpoint are kept."""

    def __init__(self, root: Path, *, keep: int = 3, at: Callable[[str], None] = lambda _point: None) -> None:
        """Open the checkpoints in ``root``. ``at`` is a function for tests. It is called after each stage of a save,
        with ``written``, ``flushed`` or ``renamed``."""
        self.root = root
        self._keep = keep
        self._at = at
        self.best: int | None = None
        """Step of the best checkpoint. It is never removed, and the link ``best`` points to it. None: no best yet."""

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = self.root.iterdir() if self.root.is_dir() else ()
        return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_step_of)

    def latest(self) -> Path | None:
        """The newest complete checkpoint. None if there is none."""
        return next(reversed(self.all()), None)

    def save(self, step: int, state: Mapping[str, Any], model: CausalLM | _WritesItself, files: ModelFiles) -> Path:
        """Write a checkpoint. Returns its directory.

        ``state`` may contain plain Python values, NumPy arrays and tensors. ``files`` are the further files of a model;
        an adapter and heads ignore them. Raises ConfigError for a state with other values, and OSError if the disk is
        full.
        """
        final = self.root / f"step-{step:08d}"
        partial = self.root / f".{final.name}.partial"
        for pattern in (".step-*.partial", ".step-*.removed"):
            for leftover in self.root.glob(pattern):  # from a process that was killed
                shutil.rmtree(leftover)
        try:
            if isinstance(model, CausalLM):
                write_model(model, files, partial)
            else:
                model.write(partial, files)
            save_state(partial, state)
        except SafetensorError as error:
            raise OSError(f"{partial} cannot be written ({error}); make room there, then run the same again") from None
        self._at("written")
        flush(partial)
        self._at("flushed")
        if final.exists():
            self._remove(final)
        partial.rename(final)
        _flush(self.root)
        self._at("renamed")
        self.point_to_best()
        for old in self.all()[: -self._keep]:
            if old != final and _step_of(old) != self.best:
                self._remove(old)
        return final

    def point_to_best(self) -> None:
        """Make the link ``best`` point to the best checkpoint, if there is one. The link changes atomically."""
        best = self.root / f"step-{self.best or 0:08d}"
        link = self.root / "best"
        if self.best is None or not best.is_dir() or (link.is_symlink() and link.readlink() == Path(best.name)):
            return
        if link.exists() and not link.is_symlink():
            raise ConfigError(f"{link} is in the way of a link to the best checkpoint; move it")
        new_link = self.root / ".best.partial"
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(best.name)
        new_link.replace(link)

    def _remove(self, directory: Path) -> None:
        """Remove a checkpoint. It is renamed first, so that a partly removed checkpoint never looks complete."""
        doomed = self.root / f".{directory.name}.removed"
        directory.rename(doomed)
        shutil.rmtree(doomed)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def load_state(directory: Path) -> dict[str, Any]:
    """Read the ``state`` that :func:`save_state` wrote. Raises ConfigError if it is damaged or missing."""
    folder = directory / _STATE
    if not (folder / "state.json").is_file():
        raise ConfigError(f"{directory} is no checkpoint of a training run: it has no {_STATE}/state.json")
    try:
        if (folder / _SUMS).is_file() and (folder / _SUMS).read_text(encoding="utf-8") != _sums(folder):
            raise ValueError(f"its {_STATE}/ is not what was written: see {_SUMS} there")
        tensors = load_file(folder / "state.safetensors")
        state = _restore(json.loads((folder / "state.json").read_text(encoding="utf-8")), tensors)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{directory} is damaged ({error}); remove it, and go on from an earlier one") from None
    if not isinstance(state, dict):
        raise ConfigError(f"{directory} is damaged: its state is no mapping; remove it, and go on from an earlier one")
    return state


def random_state() -> dict[str, Any]:
    """State of the global random generators of Python, NumPy and PyTorch."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the global random generators to a state from :func:`random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def save_state(directory: Path, state: Mapping[str, Any]) -> None:
    """Write a state of plain values, arrays and tensors into a checkpoint's ``directory``, for :func:`load_state`."""
    folder = directory / _STATE
    tensors: dict[str, Tensor] = {}
    plain = _store(state, "state", tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "state.safetensors")
    _write_json(folder / "state.json", plain, indent=None)
    (folder / _SUMS).write_text(_sums(folder), encoding="utf-8")


def _sums(folder: Path) -> str:
    lines = []
    for name in ("state.json", "state.safetensors"):
        with (folder / name).open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines)


def with_tensors(state: Any) -> dict[str, Any]:
    """Convert a state to text and tensors, which ``torch.load(weights_only=True)`` can read. :func:`from_tensors` is
    the inverse."""
    tensors: dict[str, Tensor] = {}
    return {"text": json.dumps(_store(state, "state", tensors)), "tensors": tensors}


def from_tensors(stored: Mapping[str, Any]) -> Any:
    """Restore the state that :func:`with_tensors` has converted to text and tensors."""
    return _restore(json.loads(stored["text"]), stored["tensors"])


def _store(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert ``value`` to data for JSON. Its arrays and tensors are added to ``tensors`` by name."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (Tensor, np.ndarray)):
        is_tensor = isinstance(value, Tensor)
        tensors[name] = value.detach().cpu().contiguous() if isinstance(value, Tensor) else torch.tensor(value)
        return {_KIND: "tensor" if is_tensor else "array", "name": name}
    if isinstance(value, (list, tuple)):
        items = [_store(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != _KIND for key in value):
            return {key: _store(item, f"{name}.{key}", tensors) for key, item in value.items()}
        items = [
            [_store(part, f"{name}.{index}.{side}", tensors) for side, part in enumerate(pair)]
            for index, pair in enumerate(value.items())
        ]
        return {_KIND: "pairs", "items": items}
    raise ConfigError(
        f"{name} of the state to save is a {type(value).__name__}; a source's state_dict() may hold numbers, text, "
        "lists, tuples, mappings and arrays"
    )


def _restore(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_restore(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_KIND):
        case "tensor":
            return tensors[value["name"]]
        case "array":
            return tensors[value["name"]].numpy()
        case "tuple":
            return tuple(_restore(item, tensors) for item in value["items"])
        case "pairs":
            return {_restore(key, tensors): _restore(item, tensors) for key, item in value["items"]}
        case None:
            return {key: _restore(item, tensors) for key, item in value.items()}
    raise ValueError(f"{str(value)[:60]} is not a known kind of value")


def _write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def flush(directory: Path) -> None:
    """Flush a directory with everything in it to the disk."""
    for path in sorted(directory.rglob("*"), reverse=True):
        _flush(path)
    _flush(directory)


def _flush(path: Path) -> None:
    """Flush the content of a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
