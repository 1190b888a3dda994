"""Builds the CPU kernels (``csrc/cpu``) into the package; everything else about it is in pyproject.toml.

The kernels are a plain shared object that ctypes loads: no Python header is used, and one wheel serves every Python 3.
``python setup.py build_ext --inplace`` builds into the source tree; ``--debug`` asserts all bounds, ``--sanitize`` adds
the address and undefined-behaviour sanitizers (the process that loads it needs LD_PRELOAD of libasan).
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

WITHOUT_KERNELS = "CHAIRLIFT_WITHOUT_KERNELS"
SOURCES = Path("csrc/cpu")
LIBRARY = "chairlift.kernels.cpu.libchairlift_cpu"

# Without -ffp-contract=off, a compiler may fuse a product and a sum in one inlined copy of a function, not in another.
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off", "-pthread"]
# GCC 12 takes a deliberate "undefined" in its own AVX-512 headers for an uninitialized variable, hundreds of times.
COMMON += ["-Wall", "-Wextra", "-Wno-maybe-uninitialized"]
# Where an inner loop happens to lie decides up to a tenth of its speed: without alignment, a change elsewhere moves it.
MODES = {
    "release": ["-O3", "-falign-functions=64", "-falign-loops=64"],
    "debug": ["-O1", "-g", "-DCL_CHECK_BOUNDS"],
    "sanitize": [
        *("-O1", "-g", "-DCL_CHECK_BOUNDS", "-fsanitize=address,undefined", "-fno-sanitize-recover"),
        "-Wno-uninitialized",  # those headers again
    ],
}

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
AMX = [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
ISA_FLAGS = {
    "kernels_avx2": AVX2,
    "kernels_avx512": AVX512,
    "kernels_avx512_bf16": AVX512_BF16,
    "kernels_amx": AMX,
}
"""Sources that are compiled for one instruction set, weakest first; all others run on any x86-64 processor."""

NO_COMPILER = f"""\
Chairlift's CPU kernels need a C++17 compiler, and none was found ($CXX, g++, c++, clang++).
Install one and try again: `apt install g++` (Debian, Ubuntu) or `dnf install gcc-c++` (Fedora, RHEL).
Or install without kernels, several times slower: `{WITHOUT_KERNELS}=1 pip install .`"""

COMPILER_FAILED = f"""\
The C++ compiler failed on Chairlift's CPU kernels, with the messages above. They need GCC 11 or Clang 12, or newer.
Install one and try again: `apt install g++` (Debian, Ubuntu) or `dnf install gcc-c++` (Fedora, RHEL); $CXX picks it.
Or install without kernels, several times slower: `{WITHOUT_KERNELS}=1 pip install .`"""


def find_compiler() -> list[str]:
    """The command of the C++ compiler. Raises SystemExit with what to install when there is none."""
    for candidate in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        command = shlex.split(candidate or "")
        if command and shutil.which(command[0]):
            return command
    raise SystemExit(NO_COMPILER)


def run_compiler(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # One write each: several compilers run at once.
    print(f"{shlex.join(command)}\n{done.stdout}", end="", flush=True)
    if done.returncode:
        raise SystemExit(COMPILER_FAILED)


def compile_object(command: list[str], source: Path, folder: Path) -> Path:
    """Compile one source, unless its object is newer than all it was made from and was made by the same command."""
    target, dependencies, record = (folder / f"{source.stem}{suffix}" for suffix in (".o", ".d", ".command"))
    command = [*command, *ISA_FLAGS.get(source.stem, []), "-MMD", "-c", str(source), "-o", str(target)]
    text = shlex.join(command)
    if not (record.exists() and record.read_text() == text and is_newer(target, listed_in(dependencies))):
        record.unlink(missing_ok=True)
        run_compiler(command)
        record.write_text(text)
    return target


def listed_in(dependencies: Path) -> list[Path]:
    """The files in a compiler's ``target: file file ...`` list."""
    return [Path(name) for name in dependencies.read_text().partition(":")[2].replace("\\\n", " ").split()]


def is_newer(target: Path, sources: Iterable[Path]) -> bool:
    made = target.stat().st_mtime_ns
    return all(source.exists() and source.stat().st_mtime_ns < made for source in sources)


def weakest_first(source: Path) -> tuple[int, str]:
    return list(ISA_FLAGS).index(source.stem) + 1 if source.stem in ISA_FLAGS else 0, source.stem


class BuildKernels(build_ext):
    """Compiles and links the kernels; the extension is a shared object of its own, not a Python module."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = [
        *build_ext.user_options,
        ("sanitize", None, "with the address and undefined-behaviour sanitizers, and all bounds asserted"),
    ]
    boolean_options: ClassVar[list[str]] = [*build_ext.boolean_options, "sanitize"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.sanitize = False

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        mode = "sanitize" if self.sanitize else "debug" if self.debug else "release"
        folder = Path(self.build_temp) / "kernels" / mode
        folder.mkdir(parents=True, exist_ok=True)
        command = [*find_compiler(), *COMMON, *MODES[mode]]
        # Inline functions that several objects hold are taken from the first: it must be one that every processor runs.
        sources = sorted(map(Path, ext.sources), key=weakest_first)
        with ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 1))) as pool:
            objects = list(pool.map(lambda source: str(compile_object(command, source, folder)), sources))
        library = self.get_ext_fullpath(ext.name)
        Path(library).parent.mkdir(parents=True, exist_ok=True)
        run_compiler([*command, "-shared", *objects, "-o", library])
        if mode == "release" and not self.editable_mode:
            # Tests run in the source tree, also after a plain `pip install .`, and find the kernels there.
            self.copy_file(library, self.get_ext_filename(ext.name))


class KernelWheel(bdist_wheel):
    """A wheel of one platform but of every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def main() -> None:
    native = sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 2**32
    if not native or os.environ.get(WITHOUT_KERNELS, "0") not in ("", "0"):
        setup()
        return
    sources = sorted(str(source) for source in SOURCES.glob("*.cpp"))
    setup(
        ext_modules=[Extension(LIBRARY, sources)],
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelWheel},
    )


if __name__ == "__main__":
    main()
