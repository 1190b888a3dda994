"""Runs the commands in the documents: ``python tools/run_documents.py README.md ARCHITECTURE.md docs/*.md``.

The script runs every line of a ``sh`` block, and every ``python`` block that contains an import, from the repository's
root. Other Python blocks, which only show signatures, are compiled but not run. Lines that install or test are skipped,
because the continuous-integration script has run them before. A file that a document keeps under ``/tmp`` goes to a
new folder of the run, so that nothing left by an earlier run is met. The script runs every command, lists the ten
that took longest and those that failed, and exits with 1 if any did.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = (
    *("pip install", "pytest", "git clone", "python3 tools/start.py", "python tools/wheel.py"),
    *("python tools/train_bundled_model.py", "python benchmarks/"),
)


def commands(text: str) -> list[list[str]]:
    """Argument list of each command in the text, in order."""
    found = []
    for kind, body in BLOCK.findall(text):
        if kind == "python":
            if re.search(r"^(from|import) ", body, re.MULTILINE):
                found.append([sys.executable, "-c", body])
            else:
                compile(body, "<document>", "exec")
        else:
            lines = body.replace("\\\n", " ").splitlines()
            found += [["bash", "-ec", line] for line in lines if line.strip() and not line.startswith(LEFT_OUT)]
    return found


def run(command: list[str], scratch: str) -> int:
    """The command's exit status; 124 if it took more than 300 seconds.

    Paths under ``/tmp`` in its text are read as paths under ``scratch``; the path of its interpreter stays.
    """
    *program, body = command
    moved = body.replace("/tmp/", f"{scratch}/")
    try:
        return subprocess.run([*program, moved], stdin=subprocess.DEVNULL, timeout=300).returncode
    except subprocess.TimeoutExpired:
        return 124


def main(paths: list[str]) -> int:
    times = []
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for path in paths:
            for command in commands(Path(path).read_text(encoding="utf-8")):
                shown = f"{path}: {command[-1].strip()}"
                print(shown, flush=True)
                begin = time.monotonic()
                status = run(command, scratch)
                times.append((time.monotonic() - begin, shown))
                if status:
                    failed.append(f"{shown}\n  ended with {status}")
    slowest = sorted(times, reverse=True)[:10]
    print("the slowest:", *(f"{seconds:.0f} s: {shown}" for seconds, shown in slowest), sep="\n")
    print(f"{len(times)} commands of {len(paths)} documents ran, {len(failed)} failed", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
