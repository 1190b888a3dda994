"""Compiles the CPU kernels of ``csrc/cpu``: ``python3 csrc/compile_kernels.py`` compiles the objects that are missing.

``setup.py`` does the same and links them into the package. ``tools/start.py`` runs this program while pip installs
PyTorch. It imports only the standard library.

The environment variable CHAIRLIFT_KERNELS selects the instruction sets: ``native`` (the default) compiles only the
fastest one that this processor can run, ``all`` compiles all of them, and names separated by commas compile these.
Objects are stored in ``build/kernels``. The name of an object contains a digest of everything that determines its
content: the compiler, its flags, the source file and all headers that it includes. So no object is ever stale.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = Path("csrc", "cpu")
OBJECTS = Path("build", "kernels")
KERNELS, WITHOUT_KERNELS = "CHAIRLIFT_KERNELS", "CHAIRLIFT_WITHOUT_KERNELS"

# Without -ffp-contract=off, a compiler may fuse a multiplication and an addition in one inlined copy of a function, but
# not in another copy, and the two would round differently.
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off", "-pthread"]
# -Wno-uninitialized: GCC 12's own AVX-512 headers use undefined values on purpose, which GCC reports many times.
# -Wno-unused-function: a source file of a path uses only some of the functions of the headers.
COMMON += ["-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-unused-function"]
# The address of an inner loop changes its speed by up to a tenth. Without alignment, a change in other code moves it.
MODES = {
    "release": ["-O3", "-falign-functions=64", "-falign-loops=64"],
    "debug": ["-O1", "-g", "-DCL_CHECK_BOUNDS"],
    "sanitize": ["-O1", "-g", "-DCL_CHECK_BOUNDS", "-fsanitize=address,undefined", "-fno-sanitize-recover"],
}

AVX2 = ["avx2", "fma", "f16c"]
AVX512 = [*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq"]
AVX512_VNNI = [*AVX512, "avx512vnni"]
AVX512_BF16 = [*AVX512_VNNI, "avx512bf16"]
AMX = [*AVX512_BF16, "amx-tile", "amx-bf16", "amx-int8"]
X86_SETS = {"avx2": AVX2, "avx512": AVX512, "avx512_vnni": AVX512_VNNI, "avx512_bf16": AVX512_BF16, "amx": AMX}
"""Name of an instruction set of x86-64 -> compiler's names of its extensions. The oldest set is the first. Code outside
``paths/`` runs on every processor of an architecture."""

ARM_SETS = {"neon": "armv8.2-a+dotprod", "neon_i8mm": "armv8.2-a+dotprod+i8mm"}
"""Name of an instruction set of ARM64 -> compiler's name of the architecture with its extensions."""

ARM_SYSCTLS = {"neon": ["hw.optional.arm.FEAT_DotProd"]}
ARM_SYSCTLS["neon_i8mm"] = [*ARM_SYSCTLS["neon"], "hw.optional.arm.FEAT_I8MM"]
"""Name of an instruction set of ARM64 -> names in macOS's sysctl of what it needs."""

NUMBERS = {name: number for number, name in enumerate([*X86_SETS, *ARM_SETS])}
"""Name of an instruction set -> number of the path in ``cl_isa``."""

FLAGS = {name: [f"-m{each}" for each in needed] for name, needed in X86_SETS.items()}
FLAGS |= {name: [f"-march={architecture}"] for name, architecture in ARM_SETS.items()}

PLATFORMS = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "aarch64"))
"""(:data:`sys.platform`, machine) for which there are kernels."""

OLDEST_MACOS = "12.0"
"""The oldest macOS on which the kernels run, unless MACOSX_DEPLOYMENT_TARGET names another. It is the first whose
sysctl has the names of instructions."""

SETS = {"x86_64": [*X86_SETS], "aarch64": [*ARM_SETS]}
"""Name of a machine (see :func:`machine_name`) -> its instruction sets, the oldest first."""

ARM_FEATURES = {"neon": {"asimddp"}, "neon_i8mm": {"asimddp", "i8mm"}}
"""Name of an instruction set of ARM64 -> names in /proc/cpuinfo of what it needs."""

LINUX_NAMES = {"avx512bf16": "avx512_bf16", "avx512vnni": "avx512_vnni", "amx-tile": "amx_tile"}
LINUX_NAMES |= {"amx-bf16": "amx_bf16", "amx-int8": "amx_int8"}
"""Names of extensions that /proc/cpuinfo spells differently."""

PATH_SOURCES = ("run_bf16", "run_f32", "head", "products_of_codes")
"""Files of ``paths/``, the one that takes the longest first. The longest are compiled first, so that all processors
finish at about the same time."""

NO_COMPILER = f"""\
Chairlift's CPU kernels need a C++17 compiler, and none was found ($CXX, g++, c++, clang++).
Install one and try again: `apt install g++` (Debian, Ubuntu), `dnf install gcc-c++` (Fedora, RHEL) or \
`xcode-select --install` (macOS).
Or install without kernels, several times slower: `{WITHOUT_KERNELS}=1 pip install .`"""

COMPILER_FAILED = f"""\
The C++ compiler failed on Chairlift's CPU kernels, with the messages above. They need GCC 11 or Clang 12, or newer.
Install one and try again: `apt install g++` (Debian, Ubuntu) or `dnf install gcc-c++` (Fedora, RHEL); $CXX picks it.
An older compiler may suffice for an older instruction set of x86-64: `{KERNELS}=avx2 pip install .`
Or install without kernels, several times slower: `{WITHOUT_KERNELS}=1 pip install .`"""

QUIET_SECONDS = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One object to compile: its name for people, its source file, its compiler command and the object file."""

    name: str
    source: Path
    command: tuple[str, ...]
    target: Path


def wanted() -> bool:
    """Whether the kernels can be compiled for this system, and the environment does not leave them out."""
    native = (sys.platform, machine_name(platform.machine())) in PLATFORMS and sys.maxsize > 2**32
    return native and os.environ.get(WITHOUT_KERNELS, "0") in ("", "0")


def machine_name(name: str) -> str:
    """The name that Linux has for a machine: macOS and its compilers call ``aarch64`` ``arm64``."""
    return "aarch64" if name == "arm64" else name


def sets_to_build(choice: str, processor: Sequence[str], machine: str = "x86_64") -> list[str]:
    """Instruction sets to compile for ``machine``, the oldest first. ``choice`` is the value of CHAIRLIFT_KERNELS, and
    ``processor`` the sets that the processor can run, the oldest first. Raises SystemExit for a name that this machine
    does not have."""
    if choice in ("", "native"):
        return list(processor[-1:])
    if choice == "all":
        return list(SETS[machine])
    names = {name.strip() for name in choice.split(",")}
    if not names <= set(SETS[machine]):
        allowed = ", ".join(SETS[machine])
        raise SystemExit(
            f"{KERNELS} is {choice!r}; for {machine} it must be native, all, or names separated by commas: {allowed}"
        )
    return [name for name in SETS[machine] if name in names]


def sets_of_processor(
    cpuinfo: Path = Path("/proc/cpuinfo"), machine: str = machine_name(platform.machine()), system: str = sys.platform
) -> list[str]:
    """Instruction sets that this processor and this system can run, the oldest first. If the system does not describe
    its processor, all of them."""
    if system == "darwin":
        return [name for name, needed in ARM_SYSCTLS.items() if all(map(sysctl_says, needed))]
    try:
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        flags = None
    if flags is None:
        return list(SETS.get(machine, ()))
    present = set(flags[1].split())
    if machine == "aarch64":
        return [name for name, needed in ARM_FEATURES.items() if needed <= present]
    found = [name for name, needed in X86_SETS.items() if {LINUX_NAMES.get(each, each) for each in needed} <= present]
    return found if tiles_granted() else [name for name in found if name != "amx"]


def sysctl_says(name: str) -> bool:
    """Whether macOS's sysctl has a number other than 0 under ``name``."""
    done = subprocess.run(["sysctl", "-n", name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.returncode == 0 and done.stdout.strip() not in ("", "0")


def tiles_granted() -> bool:
    """Whether the system permits AMX tiles: asks for the permission, as the kernels do."""
    prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(prctl, request_permission, tile_data) == 0


def find_compiler() -> list[str]:
    """Command of the C++ compiler. Raises SystemExit if there is none; the message says what to install."""
    for candidate in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        command = shlex.split(candidate or "")
        if command and shutil.which(command[0]):
            return command
    raise SystemExit(NO_COMPILER)


def machine_of(compiler: list[str]) -> str:
    """The machine for which ``compiler`` compiles: this one, or another with a cross-compiler. Raises SystemExit for a
    machine without kernels."""
    done = subprocess.run([*compiler, "-dumpmachine"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    machine = machine_name(done.stdout.partition("-")[0] if done.returncode == 0 else platform.machine())
    if machine not in SETS:
        raise SystemExit(
            f"{shlex.join(compiler)} compiles for {machine}, and Chairlift's CPU kernels are for {' and '.join(SETS)}. "
            f"Choose another compiler ($CXX), or install without kernels: `{WITHOUT_KERNELS}=1 pip install .`"
        )
    return machine


def jobs(mode: str, compiler: list[str], sets: Sequence[str]) -> list[Job]:
    """All objects of a build, in the order in which they must be linked.

    If several objects contain the same inline function, the linker uses the one of the first object. So the first
    objects are those that run on every processor, then come the instruction sets, the oldest first.
    """
    command = [*compiler, *COMMON, *MODES[mode], *system_flags(compiler)]
    paths = sum(1 << NUMBERS[name] for name in sets)
    folder = folder_of(mode, compiler)
    version = subprocess.run([*compiler, "--version"], stdout=subprocess.PIPE, text=True).stdout
    made = []
    for source in sorted((ROOT / SOURCES).glob("*.cpp")):
        flags = [f"-DCL_PATHS={paths}"] if source.stem == "paths" else []
        made.append(job_of(source.stem, source, [*command, *flags], folder, version))
    for name in sets:
        flags = [
            *FLAGS[name],
            f"-DCL_NS=cl_{name}",
            *(["-DCL_USE_AMX"] if name == "amx" else []),
        ]
        for source in sorted((ROOT / SOURCES / "paths").glob("*.cpp"), key=longest_first):
            made.append(job_of(f"{name}/{source.stem}", source, [*command, *flags], folder, version))
    return made


def system_flags(compiler: list[str]) -> list[str]:
    """Flags that depend on the system for which ``compiler`` compiles: on macOS the oldest that can run the result, and
    no warnings about what only GCC knows. The linker of macOS signs the library ad hoc, without a flag."""
    done = subprocess.run([*compiler, "-dumpmachine"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if not re.search("-(darwin|macos)", done.stdout):
        return []
    oldest = os.environ.get("MACOSX_DEPLOYMENT_TARGET") or OLDEST_MACOS
    return [f"-mmacosx-version-min={oldest}", "-Wno-unknown-warning-option", "-Wno-unknown-attributes"]


def folder_of(mode: str, compiler: list[str]) -> Path:
    """Folder of a mode's objects. Another machine's have a folder of their own."""
    machine = machine_of(compiler)
    return OBJECTS / (mode if machine == machine_name(platform.machine()) else f"{mode}-{machine}")


def longest_first(source: Path) -> int:
    return PATH_SOURCES.index(source.stem) if source.stem in PATH_SOURCES else len(PATH_SOURCES)


def job_of(name: str, source: Path, command: list[str], folder: Path, version: str) -> Job:
    digest = hashlib.sha256(f"{version}\n{shlex.join(command)}\n".encode())
    for each in sorted(included(source)):
        content = each.read_bytes()
        digest.update(f"{each.relative_to(ROOT)} {len(content)}\n".encode() + content)
    target = folder / f"{name.replace('/', '-')}-{digest.hexdigest()[:32]}.o"
    return Job(name, source.relative_to(ROOT), tuple(command), target)


def included(source: Path) -> set[Path]:
    """The file and all files of this repository that it includes, also indirectly."""
    found, left = set(), [source.resolve()]
    while left:
        file = left.pop()
        if file in found:
            continue
        found.add(file)
        names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(), re.MULTILINE)
        left += [(file.parent / name).resolve() for name in names if (file.parent / name).exists()]
    return found


def compile_objects(mode: str, compiler: list[str], sets: Sequence[str]) -> list[Path]:
    """Compile all objects that do not exist yet, with a line for each, and return all in the order of linking.

    Raises SystemExit if the compiler fails; its messages are printed before.
    """
    everything = jobs(mode, compiler, sets)
    missing = [job for job in everything if not (ROOT / job.target).exists()]
    missing.sort(key=lambda job: ("/" not in job.name, longest_first(job.source)))
    if missing:
        folder = ROOT / folder_of(mode, compiler)
        folder.mkdir(parents=True, exist_ok=True)
        names = ", ".join(sets) or "no instruction set"
        print(f"kernels: {names} ({mode}), {len(missing)} of {len(everything)} files to compile", flush=True)
        compile_missing(missing)
        kept = {job.target.name for job in everything}
        stems = {job.target.name.rpartition("-")[0] for job in everything}
        for old in folder.glob("*.o"):
            if old.name not in kept and old.name.rpartition("-")[0] in stems:
                old.unlink(missing_ok=True)
    return [job.target for job in everything]


def note_origin(library: Path, objects: Sequence[Path]) -> Path:
    """Write beside a library what it was made from, and return the file's path. Equal sources, compilers and flags give
    equal origins, although two builds may differ in a byte."""
    names = "\n".join(sorted(each.name for each in objects))
    origin = hashlib.sha256(names.encode()).hexdigest()
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    target = library.with_suffix(".json")
    target.write_text(json.dumps({"library": digest, "origin": origin}) + "\n")
    return target


def compile_missing(missing: list[Job]) -> None:
    begin, done, count = time.monotonic(), 0, len(missing)
    with ThreadPoolExecutor(max(2, min(16, num_processors()))) as pool:
        left: set[Future[str]] = set()
        try:
            left = {pool.submit(compile_one, job) for job in missing}
            while left:
                finished, left = wait(left, timeout=QUIET_SECONDS, return_when=FIRST_COMPLETED)
                seconds = time.monotonic() - begin
                for each in finished:
                    done += 1
                    print(f"kernels: {done} of {count} compiled, {seconds:.0f} s: {each.result()}", flush=True)
                if not finished:
                    print(f"kernels: {done} of {count} compiled, {seconds:.0f} s", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def num_processors() -> int:
    """Number of processors that this process may use. macOS lets no process choose them, so all count there."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_one(job: Job) -> str:
    """Compile one object and return its name, with the compiler's warnings."""
    part = ROOT / job.target.with_suffix(f".{os.getpid()}.part")
    warnings = run_compiler([*job.command, "-c", str(job.source), "-o", str(part)])
    part.replace(ROOT / job.target)
    return "\n".join([job.name, *warnings.splitlines()])


def run_compiler(command: list[str]) -> str:
    """Run the compiler and return what it printed. Raises SystemExit if it fails."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        # A single write, because several compilers run at the same time and their lines must not mix.
        print(f"{shlex.join(command)}\n{done.stdout}", end="", flush=True)
        raise SystemExit(COMPILER_FAILED)
    return done.stdout


def chosen_sets(compiler: list[str]) -> list[str]:
    """The instruction sets that the environment and the processor ask for. A cross-compiler's processor is not known;
    it is taken to have all of them."""
    machine = machine_of(compiler)
    processor = sets_of_processor() if machine == machine_name(platform.machine()) else SETS[machine]
    return sets_to_build(os.environ.get(KERNELS, "").strip().lower(), processor, machine)


def main() -> None:
    if wanted():
        compiler = find_compiler()
        compile_objects("release", compiler, chosen_sets(compiler))


if __name__ == "__main__":
    main()
