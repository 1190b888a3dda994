"""Memory that models need while they are loaded, computed from their files without reading weights.

The program reads the settings of several models from standard input and writes one line for each. It runs in its own
process, because it imports torch, which the server's process does without.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, ModelLoadError
from chairlift.kernels.control_group import total_memory

__all__ = ["ADAPTERS", "PROCESS_BYTES", "machine_bytes", "needed_bytes", "sizes_of"]

PROCESS_BYTES: Final = 256 << 20
"""Memory of an engine's process besides weights and KV cache: mostly libraries."""
ADAPTERS: Final = "adapters"
"""Key of the paths of a model's adapters, which are no setting of an engine."""
_WEIGHTS: Final = (".safetensors", ".gguf", ".bin", ".pt")
_COMMAND: Final = """import sys
sys.path.insert(0, sys.argv[1])
import chairlift
del sys.path[0]
from chairlift.loading.sizes import main
main()"""
"""The package comes from this process's folder; no other file in the folder can replace a library."""
_ROOT: Final = str(Path(__file__).parents[2])


def needed_bytes(config: EngineConfig, adapters: Sequence[str] = ()) -> int:
    """Bytes of weights, KV cache, swap space and process of a model, as the engine would plan them, with those of its
    image encoder, of what makes its drafts, and of the adapters with these paths. Raises ConfigError and ModelLoadError
    for a model that cannot be loaded."""
    from chairlift.models.hashlm import HASHLM_POSITION_BYTES
    from chairlift.models.hashlm_served import NUM_BLOCKS, parse_hashlm

    if parse_hashlm(config.model.model) is not None:
        blocks = config.cache.num_kv_blocks or NUM_BLOCKS
        return PROCESS_BYTES + blocks * config.cache.block_size * HASHLM_POSITION_BYTES
    from chairlift.loading.model import kv_plan, model_directory
    from chairlift.models.hf_config import NetworkConfig
    from chairlift.models.model_files import read_network

    model_dir = model_directory(config)
    network = read_network(model_dir, config.model.model_impl, config.model.mmproj)
    parameters, plan_bytes = kv_plan(config, network)
    stored = _stored_bytes(model_dir)
    if not stored:
        raise ModelLoadError(f"{model_dir}: there are no weights")
    is_plain = config.model.quantization is None and _is_plain(model_dir)
    weights = parameters if is_plain and parameters else stored
    if isinstance(network, NetworkConfig) and network.vision is not None:
        weights = max(weights, stored)  # the parameters are those of the language model
    beside = sum(map(_stored_bytes, [*_files_beside(config, model_dir), *map(Path, adapters)]))
    return PROCESS_BYTES + weights + beside + plan_bytes


def _files_beside(config: EngineConfig, model_dir: Path) -> list[Path]:
    """Files and directories whose weights are loaded besides the model's own: an image encoder, and what makes
    drafts."""
    from chairlift.models.formats.gguf.reader import GGUFModel
    from chairlift.models.formats.gguf_projector import open_projector
    from chairlift.models.loader import resolve_model_dir

    found = []
    if model_dir.is_file():
        projector, _ = open_projector(GGUFModel(model_dir), config.model.mmproj)
        if projector is not None:
            found.append(projector.path)
    speculation = config.scheduler.speculation
    if speculation is not None and speculation.model:
        found.append(resolve_model_dir(speculation.model))
    return found


def _stored_bytes(path: Path) -> int:
    """Bytes of the files with weights in a directory, or of one file. 0: there are none."""
    if not path.exists():
        return 0
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.suffix in _WEIGHTS]
    return sum(each.stat().st_size for each in files)


def _is_plain(path: Path) -> bool:
    """Whether a directory stores weights that are not quantised."""
    if path.is_file():
        return False
    return "quantization_config" not in json.loads((path / "config.json").read_text())


def main() -> None:
    """Print ``{"bytes": N}`` or ``{"error": reason}`` for each line of settings on standard input."""
    for line in sys.stdin:
        try:
            settings = json.loads(line)
            adapters = settings.pop(ADAPTERS, ())
            reply: dict[str, Any] = {"bytes": needed_bytes(EngineConfig.from_flat(settings), adapters)}
        except (ChairliftError, OSError, ValueError) as error:
            reply = {"error": str(error) or type(error).__name__}
        print(json.dumps(reply), flush=True)


def machine_bytes() -> int:
    """Memory of this machine, or of its control group if that is less."""
    return total_memory()


async def sizes_of(settings: Sequence[Mapping[str, Any]]) -> list[int | str]:
    """The needed bytes of each model, or the reason why it cannot be loaded. Computed in another process.

    Each mapping has the settings of a model's engine, and under :data:`ADAPTERS` the paths of its adapters.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _COMMAND, _ROOT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    lines = "".join(json.dumps(dict(each), default=str) + "\n" for each in settings)
    try:
        out, _ = await process.communicate(lines.encode())
    finally:
        if process.returncode is None:
            process.kill()
    replies = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
    if len(replies) != len(settings):
        raise ModelLoadError(f"the sizes of the models could not be computed: exit code {process.returncode}")
    return [each["bytes"] if "bytes" in each else str(each["error"]) for each in replies]
