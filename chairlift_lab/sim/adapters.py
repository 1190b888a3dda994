"""Scripted LoRA adapters for simulations. An adapter has no weights: its file holds a number, which HashLM mixes into
the hash that gives the next token."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.base.lora_request import LoRARequest
from chairlift.config import LoRAConfig
from chairlift.engine.adapters import Adapters
from chairlift.errors import ModelLoadError

__all__ = ["AdapterFiles", "ScriptedAdapters", "content_tag", "request_for"]

_TAG = 0x9E3779B97F4A7C15
BROKEN = -1
"""Number that marks a simulated file as damaged. Loading a damaged file fails."""


def content_tag(content: int) -> int:
    """Number of 64 bits that stands in for the weights of an adapter: HashLM adds it to its hash. 0: no adapter."""
    return content * _TAG % 2**64


class _Read(NamedTuple):
    content: int

    @property
    def digest(self) -> str:
        return str(self.content)

    @property
    def nbytes(self) -> int:
        """Size of the adapter's simulated weights in bytes. It differs from adapter to adapter."""
        return (1 + self.content % 8) << 20


class AdapterFiles:
    """Simulates the adapter files on disk, and the memory that holds loaded adapters."""

    def __init__(self) -> None:
        self.contents: dict[str, int] = {}
        """Path -> content of the file: a unique number above 0, or :data:`BROKEN`."""
        self.tags: dict[int, int] = {}
        """Id of an adapter in memory -> its :func:`content_tag`."""
        self._writes = 0

    def write(self, path: str, *, broken: bool = False) -> int:
        """Replace the file at ``path`` by a new adapter. Returns the content of the file."""
        self._writes += 1
        self.contents[path] = BROKEN if broken else self._writes
        return self.contents[path]

    def read(self, path: Path, root: Path | None) -> _Read:
        """Read a file, as :class:`~chairlift.executor.executor.AdapterMemory` does. Raises ModelLoadError if it is
        damaged."""
        content = self.contents[str(path)]
        if content == BROKEN:
            raise ModelLoadError("injected: the adapter cannot be read")
        return _Read(content)

    def put(self, adapter_id: int, adapter: _Read) -> None:
        """Put an adapter into memory."""
        self.tags[adapter_id] = content_tag(adapter.content)

    def drop(self, adapter_id: int) -> None:
        """Remove an adapter from memory."""
        del self.tags[adapter_id]


class ScriptedAdapters(Adapters):
    """Loads adapters in simulated time: a load ends after ``delay`` steps. The simulator calls :meth:`tick` once per
    step."""

    def __init__(self, files: AdapterFiles, max_loras: int, max_cpu_loras: int, delay: int) -> None:
        config = LoRAConfig(enable_lora=True, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
        super().__init__(files, config, self._later)
        self._due: list[tuple[int, Callable[[], Any], Future[Any]]] = []
        self._delay = delay
        self._tick = 0

    def tick(self) -> None:
        """Advance the simulated time by one step, and load the adapters whose delay has passed."""
        self._tick += 1
        for due in [each for each in self._due if each[0] <= self._tick]:
            self._due.remove(due)
            _, work, future = due
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def _later(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._due.append((self._tick + self._delay, work, future))
        return future


def request_for(number: int, path: str) -> LoRARequest:
    """Reference to adapter ``number`` at ``path``, as a request carries it."""
    return LoRARequest(f"a{number}", number, path)
