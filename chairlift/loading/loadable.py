"""Says whether the engine can load a model, by its files alone: no weight is read, and nothing is computed."""

from __future__ import annotations

from pathlib import Path

from chairlift.errors import ChairliftError

__all__ = ["problem_of"]


def problem_of(path: Path) -> str | None:
    """Why the model in a directory or GGUF file cannot be loaded, in one sentence; None if it can.

    The same rules hold as at load: family, settings, quantisation, and the names and shapes of all tensors. Whether
    the weights fit into memory is not checked.
    """
    try:
        _check(path)
    except ChairliftError as error:
        return " ".join(str(error).split())
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"
    return None


def _check(path: Path) -> None:
    from chairlift.models.hf_config import NetworkConfig
    from chairlift.models.loader import open_checkpoint, resolve_model_dir
    from chairlift.models.model_files import read_network
    from chairlift.models.pooling import pools, read_pooled_config

    path = resolve_model_dir(path)
    if pools(path):
        read_pooled_config(path)
        return
    network = read_network(path, "auto", "auto")
    if isinstance(network, NetworkConfig):
        with open_checkpoint(path, network):
            return
