"""Tries a model's tokenizer in a separate process with limits on time and memory, before the program itself uses it. So
a tokenizer that hangs cannot stop the program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from chairlift.base.workers.blocking import run_twice
from chairlift.base.workers.process import Ending, ending_of
from chairlift.errors import ModelLoadError

__all__ = ["TRIAL_BYTES", "TRIAL_BYTES_PER_BYTE", "TRIAL_SECONDS", "try_out"]

_PROGRAM: Final = "chairlift.text.tokenizer.text_worker"
TRIAL_SECONDS: Final = 20
TRIAL_BYTES: Final = 1 << 30
TRIAL_BYTES_PER_BYTE: Final = 32
"""Limit on memory and time for reading a tokenizer, per byte of its file. The largest known files (30 MB) need a tenth
of the limit."""


def try_out(folder: Path, file_bytes: int, doubt: str) -> None:
    """Raise ModelLoadError if a limited process cannot read the tokenizer, or cannot use it for short texts."""
    command = [sys.executable, "-P", "-m", _PROGRAM, "try", str(folder), str(file_bytes)]
    code, output = run_twice(command, 10 * TRIAL_SECONDS)
    if code == 0:
        return
    if ending_of(code) is Ending.OUTSIDE:
        raise ModelLoadError(
            f"the process that tries {folder / 'tokenizer.json'} was ended from outside twice (out of memory, "
            "perhaps); free some memory and start again"
        )
    printed = output.decode(errors="replace").strip()[:400] if code == 1 else ""
    raise ModelLoadError(
        printed
        or f"{folder / 'tokenizer.json'} takes too much time or memory for a few characters, because {doubt}; use the "
        "tokenizer of another release of this model, or send token ids with skip_tokenizer_init"
    )
