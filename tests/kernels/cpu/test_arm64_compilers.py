"""Kernels of ARM64 with other compilers: Clang, Clang for macOS, and one that fuses multiplications with additions."""

from __future__ import annotations

import importlib.util
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from chairlift.kernels.cpu.library import ABI_VERSION, ARM64_ISAS, ISA_NAMES, supported_isas
from tests.kernels.cpu.arm64 import CXX, QEMU, ROOT, Arm64, compile_kernels, compiled_apart, cross_compiled
from tests.kernels.cpu.bit_cases import CASES
from tests.kernels.cpu.recorded_calls import recorded
from tests.kernels.cpu.test_arm64 import QUICK

pytestmark = [pytest.mark.usefixtures("native_library"), pytest.mark.nightly]

CLANG = ["clang++", "--target=aarch64-linux-gnu"]


def needs(*programs: str) -> pytest.MarkDecorator:
    lacking = [name for name in programs if shutil.which(name) is None]
    reason = f"needs {', '.join(lacking)} (Debian: clang, g++-aarch64-linux-gnu, qemu-user)"
    return pytest.mark.skipif(bool(lacking), reason=reason)


needs_avx2 = pytest.mark.skipif("avx2" not in supported_isas(), reason="the calls are recorded with the AVX2 path")


def record_quick(folder: Path) -> None:
    folder.mkdir()
    with recorded(folder):
        for case in QUICK:
            CASES[case]("avx2")


@needs("clang++", CXX, QEMU)
@needs_avx2
def test_clang_compiles_the_same_bits(tmp_path: Path) -> None:
    record_quick(tmp_path / "calls")
    Arm64(tmp_path, compiled_apart(tmp_path, "debug", CLANG)).check(tmp_path / "calls")


@needs(CXX, QEMU)
@needs_avx2
def test_a_compiler_that_contracts_is_found(tmp_path: Path) -> None:
    """Without -ffp-contract=off, GCC fuses multiplications of the intrinsics with additions."""
    record_quick(tmp_path / "calls")
    objects = dict(cross_compiled(tmp_path, "debug").objects)
    (job,) = (each for each in compile_kernels.jobs("debug", [CXX], ARM64_ISAS) if each.name == "neon/run_f32")
    planted = tmp_path / "planted.o"
    flags = ["-O2", "-ffp-contract=fast", "-c", str(job.source), "-o", str(planted)]
    subprocess.run([*job.command, *flags], cwd=ROOT, check=True)
    done = Arm64(tmp_path, [planted if name == "neon-run_f32" else each for name, each in objects.items()]).replay(
        tmp_path / "calls", "neoverse-n1"
    )
    assert done.returncode == 1 and "differs from element" in done.stdout, done.stdout + done.stderr


def macos_compiler(folder: Path) -> list[str]:
    """A compiler for macOS that takes the flags of Apple's: zig names the instructions of a processor otherwise."""
    program = folder / "clang-for-macos"
    program.write_text(f"""#!{sys.executable}
import os, sys
if "-dumpmachine" in sys.argv:
    print("arm64-apple-darwin23.6.0")
    raise SystemExit
flags = [a.replace("-march=armv8.2-a", "-mcpu=generic+v8_2a") for a in sys.argv[1:]]
oldest = [a.partition("=")[2] for a in flags if a.startswith("-mmacosx-version-min")]
flags = [a for a in flags if not a.startswith("-mmacosx-version-min")]
target = ["-target", ".".join(["aarch64-macos", *oldest])]
os.execv(sys.executable, [sys.executable, "-m", "ziglang", "c++", *target, *flags])
""")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return [str(program)]


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs ziglang (pip install ziglang)")
def test_every_source_compiles_for_macos(tmp_path: Path) -> None:
    objects = compiled_apart(tmp_path, "debug", macos_compiler(tmp_path))
    assert len(objects) == 8 + 4 * len(ARM64_ISAS)
    for each in objects:
        content = each.read_bytes()
        magic, processor = (int.from_bytes(content[at : at + 4], "little") for at in (0, 4))
        assert (magic, processor) == (0xFEEDFACF, 0x0100000C), each.name  # Mach-O of 64 bits, ARM64
    (system,) = (each for each in objects if each.stem == "system")
    assert b"futex" not in system.read_bytes()


LOADS = r"""
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
int main(int count, char** arguments) {
  void* library = count > 1 ? dlopen(arguments[1], RTLD_NOW) : 0;
  if (!library) return puts(dlerror()), 1;
  int32_t (*version)(void) = (int32_t (*)(void))dlsym(library, "cl_abi_version");
  int32_t (*isas)(void) = (int32_t (*)(void))dlsym(library, "cl_supported_isas");
  return printf("%d %d\n", version(), isas()) < 0;
}
"""


@needs(CXX, QEMU)
def test_the_wheel_of_arm64_has_a_library_that_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path / "got"), "auditwheel"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("auditwheel cannot be downloaded")
    here = ROOT / "chairlift" / "kernels" / "cpu" / "libchairlift_cpu.so"
    before = here.read_bytes()
    done = subprocess.run(
        [sys.executable, "tools/wheel.py", "--compiler", CXX, "--output", tmp_path / "dist"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    wheel = Path(done.stdout.splitlines()[-1])
    name = r"chairlift-[\w.]+-py3-none-manylinux_2_\d\d_aarch64.whl"
    assert re.fullmatch(name, wheel.name), wheel.name
    assert here.read_bytes() == before  # the library of this machine stays
    with zipfile.ZipFile(wheel) as content:
        (name,) = (each for each in content.namelist() if ".so" in each)
        assert name == "chairlift/kernels/cpu/libchairlift_cpu.so"
        library = Path(content.extract(name, tmp_path))
    header = library.read_bytes()[:20]
    assert (header[:4], header[4], int.from_bytes(header[18:20], "little")) == (b"\x7fELF", 2, 183)  # 64 bits, AArch64
    (tmp_path / "loads.c").write_text(LOADS)
    program = tmp_path / "loads"
    subprocess.run([CXX.replace("g++", "gcc"), tmp_path / "loads.c", "-o", program, "-ldl"], check=True)
    for processor, paths in (("cortex-a53", ()), ("neoverse-n1", ("neon",)), ("max", ARM64_ISAS)):
        run = [QEMU, "-cpu", processor, "-L", "/usr/aarch64-linux-gnu", program, library]
        said = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        assert said == [str(ABI_VERSION), str(sum(1 << ISA_NAMES.index(path) for path in paths))], processor
