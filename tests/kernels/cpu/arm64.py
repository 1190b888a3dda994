"""Kernels of ARM64 from a cross-compiler, and recorded calls (see recorded_calls.py) that an emulator makes again."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from chairlift.kernels.cpu.library import ARM64_ISAS, ISA_NAMES

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "csrc"))
try:
    import compile_kernels
finally:
    sys.path.pop(0)

__all__ = ["CXX", "PROCESSORS", "QEMU", "Arm64", "compiled_apart", "cross_compiled", "stem_of"]

CXX, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"

PROCESSORS = {"neon": "neoverse-n1", "neon_i8mm": "max"}
"""Path -> a processor of qemu for which it is the best."""


class Arm64:
    """The program that replays calls, with these ``objects`` of the kernels."""

    def __init__(self, folder: Path, objects: Iterable[Path]) -> None:
        self.objects = {stem_of(each): each for each in objects}
        self._program = folder / "replay"
        source = Path(__file__).with_name("replay.cpp")
        flags = ["-std=c++17", "-O1", "-static", "-pthread", f"-I{ROOT / 'csrc' / 'cpu'}"]
        subprocess.run([CXX, *flags, source, *self.objects.values(), "-o", self._program], check=True)

    def replay(self, folder: Path, processor: str) -> subprocess.CompletedProcess[str]:
        """Make all recorded calls of a folder again."""
        files = sorted(folder.glob("*.bin"))
        command = [QEMU, "-cpu", processor, self._program, *files]
        return subprocess.run(command, capture_output=True, text=True)

    def check(self, folder: Path) -> None:
        """Assert that all recorded calls of a folder have equal bits, with each path."""
        count = len(list(folder.glob("*.bin")))
        assert count > 0
        for path, processor in PROCESSORS.items():
            done = self.replay(folder, processor)
            expected = f"0 of {count} calls differ, path {ISA_NAMES.index(path)}\n"
            assert (done.returncode, done.stdout) == (0, expected), (path, done.stdout, done.stderr)


def stem_of(target: Path) -> str:
    """Name of an object without its digest, for example ``neon-head``."""
    return re.sub(r"-\w{32}$", "", target.stem)


def cross_compiled(folder: Path, mode: str) -> Arm64:
    """The kernels as :mod:`compile_kernels` compiles them in a ``mode``, with objects of earlier runs."""
    objects = compile_kernels.compile_objects(mode, [CXX], ARM64_ISAS)
    return Arm64(folder, [ROOT / each for each in objects])


def compiled_apart(
    folder: Path, mode: str, compiler: list[str], more: Mapping[str, Sequence[str]] | None = None
) -> list[Path]:
    """Objects in ``folder``, made with another compiler; ``more`` has further flags of some objects. Without this, they
    would replace those of :func:`cross_compiled`."""
    objects = []
    for job in compile_kernels.jobs(mode, compiler, ARM64_ISAS):
        target = folder / f"{stem_of(job.target)}.o"
        flags = (more or {}).get(stem_of(job.target), ())
        subprocess.run([*job.command, *flags, "-c", str(job.source), "-o", str(target)], cwd=ROOT, check=True)
        objects.append(target)
    return objects
