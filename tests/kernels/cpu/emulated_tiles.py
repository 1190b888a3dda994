"""The AMX path compiled for any processor: a signal handler (tile_trap.cpp) computes the tile instructions."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from chairlift.kernels.cpu import library

__all__ = ["emulated_tiles"]

SOURCES = Path(__file__).parents[3] / "csrc" / "cpu"
COMMON = ("api", "comm", "memory", "pack", "paths", "pool", "system")
TRAP = Path(__file__).with_name("tile_trap.cpp")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-shared", "-pthread"]
FLAGS += ["-DCL_NS=cl_amx", "-DCL_USE_AMX", "-DCL_PATHS=16", "-DCL_AMX_ANYWHERE", "-DCL_CHECK_BOUNDS"]
AVX2 = ("avx2", "fma", "f16c")
AVX512_BF16 = (*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16")
AMX = ("amx-tile", "amx-bf16", "amx-int8")


@contextlib.contextmanager
def emulated_tiles(folder: Path) -> Iterator[None]:
    """Compile the AMX path with g++ into ``folder``, and use only this path until the context ends. Raises RuntimeError
    with the compiler's messages if they are errors."""
    has_bf16 = "avx512_bf16" in library.supported_isas()
    sources = [*(SOURCES / f"{name}.cpp" for name in COMMON), *sorted((SOURCES / "paths").glob("*.cpp")), TRAP]
    instructions = [f"-m{name}" for name in (*(AVX512_BF16 if has_bf16 else AVX2), *AMX)]
    command = ["g++", *FLAGS, *instructions, f"-I{SOURCES}", *map(str, sources)]
    done = subprocess.run([*command, "-o", str(folder / "amx.so")], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ could not compile the AMX path: {done.stderr}")
    compiled = library.Library(folder / "amx.so")
    with mock.patch.object(library, "_load", return_value=(compiled, "")):
        if "amx" not in library.supported_isas():
            raise RuntimeError("the AMX path was compiled, but is not among the supported ones")
        yield
