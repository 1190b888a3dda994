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

__all__ = ["PROCESS_BYTES", "machine_bytes", "needed_bytes", "sizes_of"]

PROCESS_BYTES: Final = 256 << 20
"""Memory of an engine's process besides weights and KV cache: mostly libraries."""
_WEIGHTS: Final = (".safetensors", ".gguf", ".bin", ".pt")
_COMMAND: Final = """import sys
sys.path.insert(0, sys.argv[1])
import chairlift
del sys.path[0]
from chairlift.loading.sizes import main
main()"""
"""The package comes from this process's folder; no other file in the folder can replace a library."""
_ROOT: Final = str(Path(__file__).parents[2])


def needed_bytes(config: EngineConfig) -> int:
    """Bytes of weights, KV cache, swap space and process of a model, as the engine would plan them. Raises ConfigError
    and ModelLoadError for a model that cannot be loaded."""
    from chairlift.models.hashlm import HASHLM_POSITION_BYTES
    from chairlift.models.hashlm_served import NUM_BLOCKS, parse_hashlm

    if parse_hashlm(config.model.model) is not None:
        blocks = config.cache.num_kv_blocks or NUM_BLOCKS
        return PROCESS_BYTES + blocks * config.cache.block_size * HASHLM_POSITION_BYTES
    from chairlift.loading.model import kv_plan, model_directory
    from chairlift.models.model_files import read_network

    model_dir = model_directory(config)
    network = read_network(model_dir, config.model.model_impl, config.model.mmproj)
    parameters, plan_bytes = kv_plan(config, network)
    stored = _stored_bytes(model_dir)
    if not stored:
        raise ModelLoadError(f"{model_dir}: there are no weights")
    is_plain = config.model.quantization is None and _is_plain(model_dir)
    return PROCESS_BYTES + (parameters if is_plain and parameters else stored) + plan_bytes


def _stored_bytes(path: Path) -> int:
    """Bytes of the files with weights in a directory, or of one file."""
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
            reply: dict[str, Any] = {"bytes": needed_bytes(EngineConfig.from_flat(json.loads(line)))}
        except (ChairliftError, OSError, ValueError) as error:
            reply = {"error": str(error) or type(error).__name__}
        print(json.dumps(reply), flush=True)


def machine_bytes() -> int:
    """Memory of this machine, or of its control group if that is less."""
    return total_memory()


async def sizes_of(settings: Sequence[Mapping[str, Any]]) -> list[int | str]:
    """The needed bytes of each model, or the reason why it cannot be loaded. Computed in another process."""
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
