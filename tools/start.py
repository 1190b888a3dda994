"""Runs Chairlift from a source tree. Only Python 3.11 or newer is needed.

    python3 tools/start.py generate "What is continuous batching?"
    python3 tools/start.py test

The first call creates a virtual environment in ``.venv`` and installs Chairlift into it, and compiles the CPU kernels
meanwhile, for this processor. Later calls install again only when the sources or the requirements have changed, and
compile only kernels whose sources have changed. While something is installed, no five seconds pass without a line.
``test`` also installs the tests' requirements and runs pytest; every
other word is a command of ``chairlift``. All further words are passed on. The environment variable CHAIRLIFT_VENV names
another directory.

Without a C++ compiler the CPU kernels are not built, and PyTorch computes instead. The Python of Debian and Ubuntu
creates environments without pip. On these systems pip is taken from the package ``python3-pip-whl``, which is unpacked,
not installed. The script imports only the standard library, and the code before the version check runs on every Python
3.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 11)
COMPILERS = ("g++", "c++", "clang++")
KERNELS, WITHOUT_KERNELS = "CHAIRLIFT_KERNELS", "CHAIRLIFT_WITHOUT_KERNELS"
QUIET_SECONDS = 5
SOURCES = ("pyproject.toml", "setup.py", "csrc", "chairlift", "chairlift_lab", "chairlift_train")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
NO_PIP = """\
This Python cannot make a complete virtual environment: the module ensurepip is missing.
Install it and try again: `apt install python3-venv` (Debian, Ubuntu)."""


def main(words: list[str]) -> int:
    """Run one command in the environment, which is created first if needed, and return its exit code."""
    if sys.version_info < OLDEST:
        needed, given = ".".join(map(str, OLDEST)), sys.version.split()[0]
        print(f"Chairlift needs Python {needed} or newer; this one is {given}", file=sys.stderr)
        return 2
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if words else 2
    venv = Path(os.environ.get("CHAIRLIFT_VENV") or ROOT / ".venv")
    python = venv / "bin" / "python"
    testing = words[0] == "test"
    try:
        if not works(python):
            make(venv)
        install(python, venv, testing)
    except subprocess.CalledProcessError as failed:
        say(f"installing failed (exit code {failed.returncode}); the messages above say why")
        return 2
    except SystemExit as refused:
        print(refused, file=sys.stderr)
        return 2
    command = [str(python), "-m", *(["pytest", *words[1:]] if testing else ["chairlift", *words])]
    os.chdir(ROOT if testing else Path.cwd())
    sys.stdout.flush()
    os.execv(command[0], command)


def works(python: Path) -> bool:
    """Whether there is an environment with pip. A call that was interrupted may have left an incomplete one."""
    try:
        return subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def make(venv: Path) -> None:
    """Create the virtual environment, with pip. Raises SystemExit that says what to install if this is not possible."""
    say(f"making a virtual environment in {venv}")
    whole = importlib.util.find_spec("ensurepip") is not None
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", *([] if whole else ["--without-pip"]), str(venv)])
    if done.returncode:
        raise SystemExit(NO_PIP)
    if whole:
        return
    with tempfile.TemporaryDirectory() as folder:
        pip = pip_of_debian(Path(folder))
        if pip is None:
            raise SystemExit(NO_PIP)
        subprocess.run([sys.executable, pip, "--python", venv / "bin" / "python", "install", "-q", "pip"], check=True)


def pip_of_debian(folder: Path) -> Path | None:
    """Path of a program with which Python runs pip, unpacked from Debian's package into ``folder``. None if the system
    has no apt.

    pip uses the system's certificates. If they are not installed, the environment variable PIP_CERT is set to unpacked
    certificates.
    """
    packages = ["python3-pip-whl", *([] if CERTIFICATES.exists() else ["ca-certificates"])]
    commands = [["apt-get", "download", "-q", *packages]]
    commands += [["sh", "-c", 'for each in *.deb; do dpkg-deb -x "$each" .; done']]
    try:
        for command in commands:
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    wheels = list(folder.glob("usr/share/python-wheels/pip-*.whl"))
    if not wheels:
        return None
    roots = sorted(folder.glob("usr/share/ca-certificates/mozilla/*.crt"))
    if roots:
        bundle = folder / "certificates.pem"
        bundle.write_bytes(b"".join(each.read_bytes() for each in roots))
        os.environ.setdefault("PIP_CERT", str(bundle))
    return wheels[0] / "pip"


def install(python: Path, venv: Path, testing: bool) -> None:
    """Install Chairlift, unless exactly these sources are already installed. Raises CalledProcessError if pip or the
    compiler fails."""
    kernels = bool(os.environ.get("CXX")) or any(map(shutil.which, COMPILERS))
    stamp, state = venv / "chairlift-installed", fingerprint(kernels)
    recorded = stamp.read_text().split() if stamp.exists() else []
    if recorded[:1] == [state] and (not testing or "test" in recorded):
        return
    if not kernels:
        say("found no C++ compiler; Chairlift runs several times slower without the CPU kernels (apt install g++)")
        os.environ[WITHOUT_KERNELS] = "1"
    say("installing PyTorch and the other requirements, and compiling the CPU kernels")
    if not list(venv.glob("lib/python3*/site-packages/torch")) and not Path("/dev/nvidiactl").exists():
        say("for a smaller PyTorch without GPU code, set PIP_EXTRA_INDEX_URL to its index of CPU wheels")
    stamp.unlink(missing_ok=True)
    testing = testing or "test" in recorded
    pip = [str(python), "-m", "pip", "install", "--progress-bar", "off"]
    commands = {"kernels": [str(python), str(ROOT / "csrc" / "compile_kernels.py")]}
    needed = requirements(testing)
    if needed:
        commands["pip"] = [*pip, *needed]
    begin = time.monotonic()
    run_together(commands, begin)
    # The requirements are installed and the objects of the kernels exist, so this takes a few seconds.
    run_together({"pip": [*pip, "--no-deps", str(ROOT)]}, begin)
    stamp.write_text(f"{state} {'test' if testing else 'run'}\n")


def requirements(testing: bool) -> list[str]:
    """Requirements of Chairlift in pyproject.toml, and with ``testing`` also those of its tests."""
    import tomllib  # not at the top, because Python 3.10 and older have no such module

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project.get("optional-dependencies", {}).get("test", []) if testing else []
    return [*project.get("dependencies", []), *extra]


def run_together(commands: dict[str, list[str]], begin: float) -> None:
    """Run commands at the same time and print their lines on stderr. If all are silent for five seconds, a line says
    what they did last and how many seconds passed since ``begin``. Raises CalledProcessError when all have ended, if
    one failed."""
    lines: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
    running = {}
    for name, command in commands.items():
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=forward, args=(name, running[name], lines), daemon=True).start()
    last: dict[str, str] = {}
    failed = None
    while running:
        try:
            name, line = lines.get(timeout=QUIET_SECONDS)
        except queue.Empty:
            for name in running:
                say(f"{time.monotonic() - begin:.0f} s, still at: {last.get(name, name)}")
            continue
        if line is None:
            code = running.pop(name).wait()
            last.pop(name, None)
            if code:
                failed = failed or subprocess.CalledProcessError(code, commands[name])
        elif worth_showing(name, line):
            last[name] = textwrap.shorten(line, 70, placeholder=" ...")
            print(line, end="", file=sys.stderr, flush=True)
    if failed:
        raise failed


def forward(name: str, process: subprocess.Popen[str], lines: queue.SimpleQueue[tuple[str, str | None]]) -> None:
    """Put each line of a process into ``lines``, with the process's name, and None after the last line."""
    assert process.stdout is not None  # a pipe
    with process.stdout:
        for line in process.stdout:
            lines.put((name, line))
    lines.put((name, None))


def worth_showing(name: str, line: str) -> bool:
    """Whether a line of pip says what it does now. The others say where a file lies, or that nothing is to do."""
    boring = ("Requirement already satisfied", "Using cached", "Looking in", "Processing", "Obtaining")
    return name != "pip" or not line.lstrip().startswith(boring)


def fingerprint(kernels: bool) -> str:
    """Digest of everything that determines the installation: names, sizes and times of the sources, whether there is a
    compiler, and which kernels the environment asks for."""
    settings = kernels, os.environ.get(WITHOUT_KERNELS), os.environ.get(KERNELS)
    digest = hashlib.sha256(repr(settings).encode())
    for source in SOURCES:
        path = ROOT / source
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for each in files:
            if each.is_file() and each.suffix not in (".pyc", ".so"):
                facts = each.stat()
                digest.update(f"{each.relative_to(ROOT)} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def say(line: str) -> None:
    print(f"start.py: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
