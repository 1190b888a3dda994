"""Tries a model's tokenizer in a separate process with limits on time and memory, before the program itself uses it. So
a tokenizer that hangs cannot stop the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from chairlift.errors import ModelLoadError
from chairlift.parent import child_environment

__all__ = ["TRIAL_BYTES", "TRIAL_BYTES_PER_BYTE", "TRIAL_SECONDS", "try_out"]

_PROGRAM: Final = "chairlift.tokenizer.text_worker"
TRIAL_SECONDS: Final = 20
TRIAL_BYTES: Final = 1 << 30
TRIAL_BYTES_PER_BYTE: Final = 32
"""Limit on memory and time for reading a tokenizer, per byte of its file. The largest known files (30 MB) need a tenth
of the limit."""


def try_out(folder: Path, file_bytes: int, doubt: str) -> None:
    """Raise ModelLoadError if a limited process cannot read the tokenizer, or cannot use it for short texts."""
    command = [sys.executable, "-P", "-m", _PROGRAM, "try", str(folder), str(file_bytes)]
    try:
        trial = subprocess.run(
            command, env=child_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=10 * TRIAL_SECONDS
        )
        code = trial.returncode
    except subprocess.TimeoutExpired:
        code = -1
    if code == 0:
        return
    printed = trial.stdout.decode(errors="replace").strip()[:400] if code == 1 else ""
    raise ModelLoadError(
        printed
        or f"{folder / 'tokenizer.json'} takes too much time or memory for a few characters, because {doubt}; use the "
        "tokenizer of another release of this model, or send token ids with skip_tokenizer_init"
    )
