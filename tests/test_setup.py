"""The build of the kernels: what it does without a compiler, with a broken one, and when nothing has changed."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = Path("chairlift", "kernels", "cpu", "libchairlift_cpu.so")

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="kernels are built on x86-64 Linux only"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with three small sources, one of them for one instruction set."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / LIBRARY.parent
    package.mkdir(parents=True)
    (tmp_path / "chairlift" / "version.py").write_text('__version__ = "0"\n')
    sources = tmp_path / "csrc" / "cpu"
    sources.mkdir(parents=True)
    (sources / "shared.h").write_text('extern "C" __attribute__((visibility("default"))) int answer();\n')
    (sources / "api.cpp").write_text('#include "shared.h"\nint answer() { return 42; }\n')
    (sources / "memory.cpp").write_text("int hidden() { return 1; }\n")
    (sources / "kernels_avx2.cpp").write_text('#include "shared.h"\n#ifndef __AVX2__\n#error\n#endif\n')
    return tmp_path


def build(tree: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "build_ext", "--inplace", *flags]
    environment = {**os.environ, "CXX": "", **environment}
    return subprocess.run(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def compiled(output: str) -> set[str]:
    return {word for line in output.splitlines() if " -c " in line for word in line.split() if word.endswith(".cpp")}


def test_without_a_compiler_the_last_lines_say_what_to_do(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = build(tree, PATH=str(tmp_path / "empty"))
    assert done.returncode != 0
    missing, package, without = done.stdout.splitlines()[-3:]
    assert "C++17 compiler" in missing and "apt install g++" in package and "dnf install gcc-c++" in package
    assert "CHAIRLIFT_WITHOUT_KERNELS=1 pip install ." in without
    assert "Traceback" not in done.stdout


def test_a_compiler_that_fails_is_quoted_and_explained(tree: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "old compiler"
    compiler.write_text("#!/bin/sh\necho unknown option -mamx-tile >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    done = build(tree, CXX=f"'{compiler}' -v")
    assert done.returncode != 0
    assert "unknown option -mamx-tile" in done.stdout
    assert "GCC 11 or Clang 12" in done.stdout.splitlines()[-3]
    assert not (tree / LIBRARY).exists()


@pytest.mark.parametrize("value", ["1", "0"])
def test_kernels_can_be_left_out(tree: Path, tmp_path: Path, value: str) -> None:
    (tmp_path / "empty").mkdir()
    done = build(tree, PATH=str(tmp_path / "empty"), CHAIRLIFT_WITHOUT_KERNELS=value)
    assert (done.returncode == 0) == (value == "1"), done.stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_only_what_changed_is_built_again(tree: Path) -> None:
    everything = {"csrc/cpu/api.cpp", "csrc/cpu/memory.cpp", "csrc/cpu/kernels_avx2.cpp"}
    first = build(tree)
    assert first.returncode == 0, first.stdout
    assert compiled(first.stdout) == everything
    exported = subprocess.run(["nm", "-D", "--defined-only", tree / LIBRARY], capture_output=True, text=True).stdout
    assert "answer" in exported and "hidden" not in exported
    assert compiled(build(tree).stdout) == set()
    (tree / "csrc" / "cpu" / "shared.h").touch()
    assert compiled(build(tree).stdout) == {"csrc/cpu/api.cpp", "csrc/cpu/kernels_avx2.cpp"}
    assert compiled(build(tree, "--debug").stdout) == everything
    assert compiled(build(tree).stdout) == set()
    assert compiled(build(tree, CXX="g++ -DOTHER").stdout) == everything
