"""Builds the CPU kernels (``csrc/cpu``) into the package. All other settings of the build are in pyproject.toml.

The kernels are a shared object that ctypes loads. It uses no Python header, so one wheel works with every Python 3.
``csrc/compile_kernels.py`` compiles it; there the environment variable CHAIRLIFT_KERNELS is described, which selects
the instruction sets. ``python setup.py build_ext --inplace`` builds into the source tree. ``--debug`` checks all array
bounds. ``--sanitize`` adds the address and undefined-behaviour sanitizers; then Python must be started with libasan in
LD_PRELOAD.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc"))

import compile_kernels as kernels

LIBRARY = "chairlift.kernels.cpu.libchairlift_cpu"


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
        compiler = kernels.find_compiler()
        objects = kernels.compile_objects(mode, compiler, kernels.chosen_sets(compiler))
        library = Path(self.get_ext_fullpath(ext.name)).resolve()
        library.parent.mkdir(parents=True, exist_ok=True)
        flags = [*kernels.COMMON, *kernels.MODES[mode], *kernels.system_flags(compiler)]
        kernels.run_compiler([*compiler, *flags, "-shared", *map(str, objects), "-o", str(library)])
        origin = kernels.note_origin(library, objects)
        in_tree = Path(self.get_ext_filename(ext.name)).resolve()
        here = kernels.folder_of(mode, compiler) == kernels.OBJECTS / mode
        if mode == "release" and here and not self.editable_mode and in_tree != library:
            # Tests run in the source tree, also after `pip install .`, so the library is copied into that tree, too.
            self.copy_file(str(library), str(in_tree))
            self.copy_file(str(origin), str(in_tree.with_suffix(".json")))


class KernelWheel(bdist_wheel):
    """A wheel for every Python 3 and for the platform of the compiler, which may be a cross-compiler for Linux."""

    def get_tag(self) -> tuple[str, str, str]:
        platform_tag = super().get_tag()[2]
        machine = kernels.machine_of(kernels.find_compiler())
        crossed = machine != kernels.machine_name(platform.machine())
        return "py3", "none", f"linux_{machine}" if crossed else platform_tag


def main() -> None:
    if not kernels.wanted():
        setup()
        return
    setup(
        ext_modules=[Extension(LIBRARY, [str(kernels.SOURCES / "api.cpp")])],
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelWheel},
    )


if __name__ == "__main__":
    main()
