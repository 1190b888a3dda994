"""The adapter of a request, as plain data."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from chairlift.errors import RequestError

__all__ = ["LoRARequest"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")


@dataclasses.dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by name, number and directory, in vLLM's form. It is read at its first use.

    A number keeps its adapter until the adapter is removed. Raises RequestError for an invalid name or number.
    """

    lora_name: str
    """Name of the adapter: letters, digits and ``._/:-``, at most 128 characters."""
    lora_int_id: int
    """Number of the adapter, above 0."""
    lora_path: str | Path
    """Directory that PEFT's ``save_pretrained`` wrote, or a GGUF file."""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not _NAME.fullmatch(self.lora_name):
            raise RequestError(
                f"the name of an adapter must be of letters, digits and ._/:-, at most 128; got {self.lora_name!r:.160}"
            )
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**31:
            raise RequestError(f"lora_int_id must be a whole number above 0, got {number!r:.40}")
        if not isinstance(self.lora_path, (str, Path)) or not str(self.lora_path):
            raise RequestError(f"lora_path must be a directory or a GGUF file, got {self.lora_path!r:.80}")
