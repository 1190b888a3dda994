"""Names of the adapters that callers may use, and the numbers that the engine gives to the loaded adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from chairlift.base.lora_request import LoRARequest
from chairlift.engine.adapters import AdapterLoad
from chairlift.errors import RequestError

__all__ = ["AdapterEntry", "AdapterNames"]


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterEntry:
    """A loaded adapter, and the number that its caller gave it."""

    load: AdapterLoad
    """The load that read the adapter. Each load has a larger ``adapter_id`` than earlier loads."""
    int_id: int = 0
    """Number that the caller gave to the adapter; 0 if the caller gave none."""
    is_private: bool = False
    """Whether only the part of the server that loaded the adapter may use it. Requests cannot name it, and no list
    shows it."""

    @property
    def name(self) -> str:
        return self.load.name


class AdapterNames:
    """The loaded adapters by name and by the caller's number."""

    def __init__(self) -> None:
        self._by_name: dict[str, AdapterEntry] = {}
        self._by_int_id: dict[int, AdapterEntry] = {}
        self._loads = 0

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[AdapterEntry]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def public(self) -> list[str]:
        """Names that requests may give."""
        return [entry.name for entry in self._by_name.values() if not entry.is_private]

    def is_public(self, name: str) -> bool:
        """Whether requests may give this name."""
        entry = self._by_name.get(name)
        return entry is not None and not entry.is_private

    def next_load(self, name: str, path: str, root: str | None = None) -> AdapterLoad:
        """A new load, with an ``adapter_id`` that no earlier load had."""
        self._loads += 1
        return AdapterLoad(self._loads, name, path, root)

    def get(self, name: str) -> AdapterEntry | None:
        """The loaded adapter with this name; None if there is none."""
        return self._by_name.get(name)

    def id_of(self, name: str) -> int:
        """The ``adapter_id`` for requests that name this adapter: 0 for an empty name. Raises RequestError if it is not
        loaded."""
        if not name:
            return 0
        entry = self._by_name.get(name)
        if entry is None:
            raise RequestError(f"the adapter {name!r:.160} is not loaded; load it, or ask for another model")
        return entry.load.adapter_id

    def find(self, request: LoRARequest) -> AdapterEntry | None:
        """The loaded adapter that a request asks for; None if it is not loaded. Raises RequestError if its number or
        name belongs to another adapter."""
        known = self._by_int_id.get(request.lora_int_id)
        if known is not None:
            if (known.name, known.load.path) != (request.lora_name, str(request.lora_path)):
                raise RequestError(
                    f"lora_int_id {request.lora_int_id} is the adapter {known.name!r} of {known.load.path!r} until"
                    f" it is removed, and the request says {request.lora_name!r} of {str(request.lora_path)!r:.300};"
                    " give it another number"
                )
            return known
        if request.lora_name in self._by_name:
            other = self._by_name[request.lora_name].int_id
            has = f"has lora_int_id {other}" if other else "was loaded without a number"
            raise RequestError(f"the adapter {request.lora_name!r} {has}; give that, or another name")
        return None

    def add(self, entry: AdapterEntry) -> AdapterEntry | None:
        """Let requests use an adapter from now on. Returns the adapter that had the same name before, or None."""
        before = self._by_name.get(entry.name)
        if before is not None and before.int_id:
            self._by_int_id.pop(before.int_id, None)
        self._by_name[entry.name] = entry
        if entry.int_id:
            self._by_int_id[entry.int_id] = entry
        return before

    def remove(self, name: str) -> AdapterEntry | None:
        """Refuse new requests for this name from now on. Returns the adapter that had the name, or None."""
        entry = self._by_name.pop(name, None)
        if entry is not None and entry.int_id:
            self._by_int_id.pop(entry.int_id, None)
        return entry

    def with_int_id(self, int_id: int) -> AdapterEntry | None:
        """The loaded adapter to which a caller gave this number; None if there is none."""
        return self._by_int_id.get(int_id)
