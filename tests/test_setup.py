"""The build of the kernels: what it does without a compiler, with a broken one, and when nothing has changed."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.kernels.cpu.library import ISA_NAMES, NATIVE_PLATFORMS, built_isas, supported_isas

ROOT = Path(__file__).parents[1]
LIBRARY = Path("chairlift", "kernels", "cpu", "libchairlift_cpu.so")

_spec = importlib.util.spec_from_file_location("compile_kernels", ROOT / "csrc" / "compile_kernels.py")
assert _spec is not None and _spec.loader is not None
compile_kernels = importlib.util.module_from_spec(_spec)
sys.modules["compile_kernels"] = compile_kernels
_spec.loader.exec_module(compile_kernels)

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="kernels are built on x86-64 Linux only"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with two small sources for every processor, and one for each instruction set."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / LIBRARY.parent
    package.mkdir(parents=True)
    (tmp_path / "chairlift" / "version.py").write_text('__version__ = "0"\n')
    sources = tmp_path / "csrc" / "cpu"
    (sources / "paths").mkdir(parents=True)
    shutil.copy(ROOT / "csrc" / "compile_kernels.py", tmp_path / "csrc")
    (sources / "shared.h").write_text('extern "C" __attribute__((visibility("default"))) int answer();\n')
    (sources / "api.cpp").write_text('#include "shared.h"\nint answer() { return 42; }\n')
    (sources / "memory.cpp").write_text("int hidden() { return 1; }\n")
    (sources / "paths" / "head.cpp").write_text('#include "../shared.h"\nint CL_NS() { return __AVX2__; }\n')
    return tmp_path


def build(tree: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "build_ext", "--inplace", *flags]
    environment = {**os.environ, "CXX": "", "CHAIRLIFT_KERNELS": "avx2", **environment}
    return subprocess.run(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def compiled(output: str) -> set[str]:
    """Names of the objects whose compilation is reported, and counted from first to last."""
    found = re.findall(r"^kernels: (\d+) of (\d+) compiled, \d+ s: (\S+)$", output, re.MULTILINE)
    assert [(int(done), int(count)) for done, count, _ in found] == [(i + 1, len(found)) for i in range(len(found))]
    return {name for *_, name in found}


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
    assert "GCC 11 or Clang 12" in done.stdout.splitlines()[-4]
    assert "CHAIRLIFT_KERNELS=avx2 pip install ." in done.stdout.splitlines()[-2]
    assert not list(tree.rglob("*.o"))
    assert not (tree / LIBRARY).exists()


@pytest.mark.parametrize("value", ["1", "0"])
def test_kernels_can_be_left_out(tree: Path, tmp_path: Path, value: str) -> None:
    (tmp_path / "empty").mkdir()
    done = build(tree, PATH=str(tmp_path / "empty"), CHAIRLIFT_WITHOUT_KERNELS=value)
    assert (done.returncode == 0) == (value == "1"), done.stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_only_what_changed_is_built_again(tree: Path) -> None:
    everything = {"api", "memory", "avx2/head"}
    first = build(tree)
    assert first.returncode == 0, first.stdout
    assert compiled(first.stdout) == everything
    exported = subprocess.run(["nm", "-D", "--defined-only", tree / LIBRARY], capture_output=True, text=True).stdout
    assert "answer" in exported and "hidden" not in exported
    shared = tree / "csrc" / "cpu" / "shared.h"
    shared.touch()
    assert compiled(build(tree).stdout) == set()  # the content decides, not the time
    shared.write_text(shared.read_text() + "\n")
    assert compiled(build(tree).stdout) == {"api", "avx2/head"}
    assert compiled(build(tree, "--debug").stdout) == everything
    assert compiled(build(tree).stdout) == set()
    assert compiled(build(tree, CXX="g++ -DOTHER").stdout) == everything
    assert len(list((tree / "build" / "kernels" / "release").glob("*.o"))) == 3  # older objects are deleted


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_objects_compiled_before_the_installation_are_used_by_it(tree: Path) -> None:
    environment = {**os.environ, "CXX": "", "CHAIRLIFT_KERNELS": "avx2,avx512"}
    command = [sys.executable, tree / "csrc" / "compile_kernels.py"]
    early = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert compiled(early) == {"api", "memory", "avx2/head", "avx512/head"}
    assert not (tree / LIBRARY).exists()
    assert compiled(build(tree, CHAIRLIFT_KERNELS="avx512, avx2").stdout) == set()
    assert compiled(build(tree, CHAIRLIFT_KERNELS="avx512").stdout) == set()
    assert (tree / LIBRARY).exists()


def test_an_unknown_instruction_set_is_refused(tree: Path) -> None:
    done = build(tree, CHAIRLIFT_KERNELS="avx2,sse9")
    assert done.returncode != 0
    last = done.stdout.splitlines()[-1]
    assert "CHAIRLIFT_KERNELS is 'avx2,sse9'" in last and "avx2, avx512, avx512_vnni, avx512_bf16, amx" in last


@pytest.mark.parametrize(
    ("choice", "processor", "sets"),
    [
        ("", ["avx2", "avx512"], ["avx512"]),
        ("native", ["avx2"], ["avx2"]),
        ("native", [], []),
        ("all", ["avx2"], ["avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"]),
        ("amx,avx2", ["avx2"], ["avx2", "amx"]),
    ],
)
def test_the_choice_decides_which_instruction_sets_are_compiled(
    choice: str, processor: list[str], sets: list[str]
) -> None:
    assert compile_kernels.sets_to_build(choice, processor) == sets


ZEN_3 = "fpu fma avx f16c avx2"
SKYLAKE = f"{ZEN_3} avx512f avx512dq avx512cd avx512bw avx512vl"
ICE_LAKE = f"{SKYLAKE} avx512_vnni"
ZEN_4 = f"{ICE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_bf16 amx_tile amx_int8"


@pytest.mark.parametrize(
    ("flags", "granted", "best"),
    [
        (ZEN_3, False, "avx2"),
        (SKYLAKE, False, "avx512"),
        (ICE_LAKE, False, "avx512_vnni"),
        (ZEN_4, True, "avx512_bf16"),
        (SAPPHIRE_RAPIDS, True, "amx"),
        (SAPPHIRE_RAPIDS, False, "avx512_bf16"),
    ],
)
def test_the_best_instruction_set_follows_from_the_flags_of_the_processor(
    flags: str, granted: bool, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: One\nflags\t\t: {flags}\nbugs\t\t: none\n")
    monkeypatch.setattr(compile_kernels, "tiles_granted", lambda: granted)
    sets = compile_kernels.sets_of_processor(tmp_path / "cpuinfo")
    assert sets == compile_kernels.SETS["x86_64"][: len(sets)] and sets[-1] == best


def test_a_processor_that_nothing_describes_gets_every_instruction_set_it_may_have(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu sse2\n")
    assert compile_kernels.sets_of_processor(tmp_path / "cpuinfo") == []
    assert compile_kernels.sets_of_processor(tmp_path / "nowhere") == compile_kernels.SETS["x86_64"]


@pytest.mark.parametrize(
    ("features", "sets"),
    [
        ("fp asimd asimdhp asimddp i8mm bf16", ["neon", "neon_i8mm"]),
        ("fp asimd asimdhp asimddp", ["neon"]),
        ("fp asimd", []),
    ],
)
def test_arm64_needs_the_dot_product_instructions(features: str, sets: list[str], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"BogoMIPS\t: 50.00\nFeatures\t: {features}\nCPU part\t: 0xd0c\n")
    assert compile_kernels.sets_of_processor(tmp_path / "cpuinfo", "aarch64") == sets


@pytest.mark.parametrize(
    ("numbers", "sets"),
    [
        ({"hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_I8MM": 1}, ["neon", "neon_i8mm"]),
        ({"hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_I8MM": 0}, ["neon"]),
        ({"hw.optional.arm.FEAT_I8MM": 1}, []),
    ],
)
def test_macos_says_by_sysctl_what_its_processor_has(
    numbers: dict[str, int], sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sysctl = tmp_path / "sysctl"
    cases = "".join(f"{name}) echo {value};;\n" for name, value in numbers.items())
    sysctl.write_text(f'#!/bin/sh\n[ "$1" = -n ] || exit 2\ncase "$2" in\n{cases}*) exit 1;;\nesac\n')
    sysctl.chmod(sysctl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert compile_kernels.sets_of_processor(tmp_path / "nowhere", "aarch64", "darwin") == sets


@pytest.mark.parametrize(
    ("system", "machine", "wanted"),
    [
        ("linux", "x86_64", True),
        ("linux", "aarch64", True),
        ("darwin", "arm64", True),
        ("darwin", "x86_64", False),
        ("linux", "riscv64", False),
        ("win32", "AMD64", False),
    ],
)
def test_kernels_are_compiled_where_they_can_run(
    system: str, machine: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHAIRLIFT_WITHOUT_KERNELS", raising=False)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert compile_kernels.wanted() == wanted
    assert ((system, compile_kernels.machine_name(machine)) in NATIVE_PLATFORMS) == wanted


def apple_compiler(folder: Path) -> Path:
    """A program that answers as Apple's clang, and writes its arguments to every object."""
    compiler = folder / "apple-clang"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-dumpmachine) echo arm64-apple-darwin23.6.0; exit;; *--version) echo Apple clang; exit;; esac\n'
        'arguments="$*"; while [ "$1" != -o ]; do shift; done; echo "$arguments" > "$2"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return compiler


@pytest.mark.parametrize(("target", "version"), [(None, "12.0"), ("13.3", "13.3")])
def test_apples_compiler_gets_the_oldest_macos(
    target: str | None, version: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MACOSX_DEPLOYMENT_TARGET", raising=False)
    if target:
        monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", target)
    done = build(tree, CXX=f"'{apple_compiler(tmp_path)}'", CHAIRLIFT_KERNELS="neon_i8mm")
    assert done.returncode == 0, done.stdout
    assert compiled(done.stdout) == {"api", "memory", "neon_i8mm/head"}
    for file in (*tree.glob("build/kernels/release-aarch64/*.o"), tree / LIBRARY):
        words = file.read_text().split()
        assert f"-mmacosx-version-min={version}" in words and "-fopenmp" not in words
    (path,) = tree.glob("build/kernels/release-aarch64/neon_i8mm-head-*.o")
    assert "-march=armv8.2-a+dotprod+i8mm" in path.read_text().split()


def test_each_instruction_set_has_the_number_of_its_path() -> None:
    assert tuple(compile_kernels.NUMBERS) == ISA_NAMES == tuple(compile_kernels.FLAGS)


def test_a_compiler_for_a_machine_without_kernels_is_refused(tree: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "riscv64-g++"
    compiler.write_text("#!/bin/sh\necho riscv64-linux-gnu\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    done = build(tree, CXX=f"'{compiler}'")
    assert done.returncode != 0
    last = done.stdout.splitlines()[-1]
    assert "riscv64" in last and "x86_64 and aarch64" in last and "CHAIRLIFT_WITHOUT_KERNELS=1" in last
    assert "Traceback" not in done.stdout


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="needs aarch64-linux-gnu-g++")
def test_a_cross_compiler_compiles_the_paths_of_its_machine(tree: Path) -> None:
    head = tree / "csrc" / "cpu" / "paths" / "head.cpp"
    head.write_text("int CL_NS() { return __ARM_FEATURE_DOTPROD; }\n")
    native = build(tree, CHAIRLIFT_WITHOUT_KERNELS="1")
    assert native.returncode == 0, native.stdout
    crossed = build(tree, CXX="aarch64-linux-gnu-g++", CHAIRLIFT_KERNELS="all")
    assert crossed.returncode == 0, crossed.stdout
    assert compiled(crossed.stdout) == {"api", "memory", "neon/head", "neon_i8mm/head"}
    assert len(list((tree / "build" / "kernels" / "release-aarch64").glob("*.o"))) == 4
    refused = build(tree, CXX="aarch64-linux-gnu-g++", CHAIRLIFT_KERNELS="avx2")
    assert "for aarch64 it must be native, all, or names separated by commas: neon, neon_i8mm" in refused.stdout


def test_the_kernels_pick_the_path_for_which_they_were_compiled() -> None:
    """The build reads /proc/cpuinfo, the kernels ask the processor: both must find the same sets."""
    processor = compile_kernels.sets_of_processor()
    assert set(supported_isas()) == set(built_isas()) & set(processor)
