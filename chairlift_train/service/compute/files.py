"""Saved adapters of clients: a PEFT directory, and beside it the state with which training goes on bit for bit.

::

    DIRECTORY/
        adapter_config.json, adapter_model.safetensors     the adapter, as PEFT writes it, in float32
        training/state.json, state.safetensors, SHA256SUMS configuration; with the optimiser also moments and gradient
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from chairlift.errors import ConfigError, ModelLoadError
from chairlift.lora.names import parse_name
from chairlift.lora.reader import adapter_files
from chairlift.lora.settings import AdapterSettings, read_settings
from chairlift.lora.sites import Sites
from chairlift_train.checkpoint import flush, load_state, save_state
from chairlift_train.service.compute.calls import AdapterConfig, TrainingError
from chairlift_train.service.compute.client import Client, Moments

__all__ = ["Saved", "read", "restore", "save"]

_VERSION: Final = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """A saved adapter that was read."""

    config: AdapterConfig
    modules: list[str]
    """Names of the modules that learn, in the order of the model."""
    alpha: float
    tensors: Mapping[str, Tensor]
    """PEFT's name of each matrix -> float32 values, in PEFT's order of rows."""
    state: Mapping[str, Any] | None
    """What :func:`save` has stored of the optimiser; None if nothing."""


def save(client: Client, directory: Path, *, optimizer: bool) -> None:
    """Write a client's adapter into ``directory``, with the optimiser's state if ``optimizer``.

    All files are written into a temporary directory and flushed to the disk, and then the directory is renamed. So it
    is whole, or it is missing. Raises TrainingError if ``directory`` exists, and OSError.
    """
    if directory.exists():
        raise TrainingError(f"there is a checkpoint {directory.name!r:.200} already; take another name")
    partial = directory.parent / f".{directory.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # from a process that was killed
    try:
        client.adapter.write(partial)
        save_state(partial, _state_of(client, optimizer))
        flush(partial)
        partial.rename(directory)
    except SafetensorError as error:
        raise OSError(f"{directory} cannot be written ({error}); make room there") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    descriptor = os.open(directory.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _state_of(client: Client, optimizer: bool) -> dict[str, Any]:
    moments = client.moments
    found: dict[str, Any] = {"version": _VERSION, "config": dataclasses.asdict(client.config)}
    if optimizer:
        found["optimizer"] = {
            "layout": [[name, list(shape)] for name, shape in client.layout],
            "gradient": client.gradient,
            "moments": None if moments is None else [moments.first, moments.second],
            "steps": 0 if moments is None else moments.steps,
        }
    return found


def read(directory: Path, sites: Sites, *, max_rank: int) -> Saved:
    """Read what :func:`save`, or PEFT, wrote. Raises TrainingError for files that are damaged or do not fit."""
    try:
        config_file, weights = adapter_files(directory)
        settings = read_settings(config_file)
        with safe_open(weights, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
        state = load_state(directory) if (directory / "training").is_dir() else None
    except (ModelLoadError, ConfigError, SafetensorError, OSError) as error:
        raise TrainingError(f"{directory.name} cannot be loaded: {error}") from None
    modules = _modules_in(tensors, settings, sites, directory.name)
    if settings.rank > max_rank:
        raise TrainingError(f"{directory.name} has rank {settings.rank}, and this server trains up to {max_rank}")
    alpha = 8.0 if settings.alpha is None else settings.alpha
    if state is None:
        config = AdapterConfig(settings.rank)
        return Saved(config, modules, alpha, tensors, None)
    try:
        config = AdapterConfig(**state["config"])
        if state["version"] != _VERSION or config.rank != settings.rank:
            raise ValueError("another version of the format, or another rank than its adapter")
    except (KeyError, TypeError, ValueError) as error:
        raise TrainingError(f"{directory.name} cannot be continued ({error}); save it again") from None
    return Saved(config, modules, alpha, tensors, state.get("optimizer"))


def _modules_in(tensors: Mapping[str, Tensor], settings: AdapterSettings, sites: Sites, name: str) -> list[str]:
    """Names of the modules that the matrices belong to, in the order of the model."""
    kinds = [settings.dora, settings.added_bias, settings.rslora, bool(settings.saved), bool(settings.tokens)]
    if any(kinds) or settings.rank_pattern or settings.alpha_pattern or settings.parameters:
        raise TrainingError(
            f"{name} is an adapter that is not trained here; load one with matrices A and B of one rank and one scale"
        )
    found = set()
    known = [*sites.parts, sites.head]
    for tensor in tensors:
        module, kind = parse_name(tensor)
        if kind not in ("a", "b") or module not in known:
            raise TrainingError(f"{name} has the tensor {tensor!r:.200}, which this model does not train")
        found.add(module)
    return [module for module in known if module in found]


def restore(client: Client, saved: Saved, *, optimizer: bool) -> None:
    """Give a new client the saved matrices, and with ``optimizer`` the gradient and the moments. Raises
    TrainingError."""
    try:
        client.adapter.take(saved.tensors)
    except ConfigError as error:
        raise TrainingError(f"the adapter does not fit to this model: {error}") from None
    if not bool(client.weights.isfinite().all()):
        raise TrainingError("the adapter has weights that are not finite; load another checkpoint")
    if not optimizer:
        return
    state = saved.state
    if state is None:
        raise TrainingError(
            "the checkpoint has no optimiser state; load it without, or save it with save_state instead of a sampler's"
        )
    if state["layout"] != [[name, list(shape)] for name, shape in client.layout]:
        raise TrainingError("the optimiser's state belongs to other layers; load the checkpoint without it")
    client.gradient = state["gradient"]
    if state["moments"] is not None:
        first, second = state["moments"]
        client.moments = Moments(first, second, state["steps"])
