"""Builds the CPU kernels (``csrc/cpu``) into the package. All other settings of the build are in pyproject.toml.

The kernels are a shared object that ctypes loads. It uses no Python header, so one wheel works with every Python 3.
``python setup.py build_ext --inplace`` builds into the source tree. ``--debug`` checks all array bounds. ``--sanitize``
adds the address and undefined-behaviour sanitizers; then Python must be started with libasan in LD_PRELOAD.
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

# Without -ffp-contract=off, a compiler may fuse a multiplication and an addition in one inlined copy of a function, but
# not in another copy, and the two would round differently.
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off", "-pthread"]
# -Wno-maybe-uninitialized: GCC 12's own AVX-512 headers use undefined values on purpose, which GCC reports many times.
COMMON += ["-Wall", "-Wextra", "-Wno-maybe-uninitialized"]
# The address of an inner loop changes its speed by up to a tenth. Without alignment, a change in other code moves it.
MODES = {
    "release": ["-O3", "-falign-functions=64", "-falign-loops=64"],
    "debug": ["-O1", "-g", "-DCL_CHECK_BOUNDS"],
    "sanitize": [
        *("-O1", "-g", "-DCL_CHECK_BOUNDS", "-fsanitize=address,undefined", "-fno-sanitize-recover"),
        "-Wno-uninitialized",  # for GCC's AVX-512 headers, too
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
"""Name of a source file -> compiler flags of its instruction set, the oldest set first. Code of all other source files
runs on every x86-64 processor."""

NO_COMPILER = f"""\
Chairlift's CPU kernels need a C++17 compiler, and none was found ($CXX, g++, c++, clang++).
Install one and try again: `apt install g++` (Debian, Ubuntu) or `dnf install gcc-c++` (Fedora, RHEL).
Or install without kernels, several times slower: `{WITHOUT_KERNELS}=1 pip install .`"""

COMPILER_FAILED = f"""\
The C++ compiler failed on Chairlift's CPU kernels, with the messages above. They need GCC 11 or Clang 12, or newer.
Install one and try again: `apt install g++` (Debian, Ubuntu) or `dnf install gcc-c++` (Fedora, RHEL); $CXX picks it.
Or install without kernels, several times slower: `{WITHOUT_KERNELS}=1 pip install .`"""


def find_compiler() -> list[str]:
    """Command of the C++ compiler. Raises SystemExit if there is none; the message says what to install."""
    for candidate in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        command = shlex.split(candidate or "")
        if command and shutil.which(command[0]):
            return command
    raise SystemExit(NO_COMPILER)


def run_compiler(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # A single write, because several compilers run at the same time and their lines must not mix.
    print(f"{shlex.join(command)}\n{done.stdout}", end="", flush=True)
    if done.returncode:
        raise SystemExit(COMPILER_FAILED)


def compile_object(command: list[str], source: Path, folder: Path) -> Path:
    """Compile one source file and return the object file. Nothing is compiled if the object is newer than all files
    that it depends on, and was made by the same command."""
    target, dependencies, record = (folder / f"{source.stem}{suffix}" for suffix in (".o", ".d", ".command"))
    command = [*command, *ISA_FLAGS.get(source.stem, []), "-MMD", "-c", str(source), "-o", str(target)]
    text = shlex.join(command)
    if not (record.exists() and record.read_text() == text and is_newer(target, listed_in(dependencies))):
        record.unlink(missing_ok=True)
        run_compiler(command)
        record.write_text(text)
    return target


def listed_in(dependencies: Path) -> list[Path]:
    """Files that a compiler's dependency file ``target: file file ...`` lists."""
    return [Path(name) for name in dependencies.read_text().partition(":")[2].replace("\\\n", " ").split()]


def is_newer(target: Path, sources: Iterable[Path]) -> bool:
    made = target.stat().st_mtime_ns
    return all(source.exists() and source.stat().st_mtime_ns < made for source in sources)


def oldest_set_first(source: Path) -> tuple[int, str]:
    return list(ISA_FLAGS).index(source.stem) + 1 if source.stem in ISA_FLAGS else 0, source.stem


class BuildKernels(build_ext):
    """Compiles and links the kernels. The result is a plain shared object, not a Python module."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = [
        *build_ext.user_options,
        ("sanitize", None, "build with the address and undefined-behaviour sanitizers, and check all array bounds"),
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
        # If several objects contain the same inline function, the linker uses the one of the first object. So the first
        # objects must be those that run on every processor.
        sources = sorted(map(Path, ext.sources), key=oldest_set_first)
        with ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 1))) as pool:
            objects = list(pool.map(lambda source: str(compile_object(command, source, folder)), sources))
        library = self.get_ext_fullpath(ext.name)
        Path(library).parent.mkdir(parents=True, exist_ok=True)
        run_compiler([*command, "-shared", *objects, "-o", library])
        if mode == "release" and not self.editable_mode:
            # Tests run in the source tree, also after `pip install .`, so the library is copied into that tree, too.
            self.copy_file(library, self.get_ext_filename(ext.name))


class KernelWheel(bdist_wheel):
    """A wheel for one platform and for every Python 3."""

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
