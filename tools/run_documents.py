"""Runs the commands in the documents: ``python tools/run_documents.py README.md ARCHITECTURE.md docs/*.md``.

The script runs every line of a ``sh`` block, and every ``python`` block that contains an import, from the repository's
root. Other Python blocks, which only show signatures, are compiled but not run. Lines that install or test are skipped,
because the continuous-integration script has run them before. The script exits with 1 at the first command that fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
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


def main(paths: list[str]) -> int:
    count = 0
    for path in paths:
        for command in commands(Path(path).read_text(encoding="utf-8")):
            print(f"{path}: {command[-1].strip()}", flush=True)
            done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=300)
            if done.returncode:
                print(f"{path}: the command above ended with {done.returncode}")
                return 1
            count += 1
    print(f"{count} commands of {len(paths)} documents ran")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
