"""The adapters that a server's requests may name: which are loaded, and who waits for a load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from chairlift.base.lora_request import LoRARequest
from chairlift.engine.adapter_names import AdapterEntry, AdapterNames
from chairlift.engine.adapters import AdapterLoad, AdapterState
from chairlift.errors import ChairliftError, ConfigError, ModelLoadError, RequestError

__all__ = ["AdapterCore", "ServedAdapters"]

_log = logging.getLogger(__name__)


class AdapterCore(Protocol):
    """A core that loads adapters. It reports the result of each load later."""

    def load_adapter(self, load: AdapterLoad) -> None: ...

    def unload_adapter(self, adapter_id: int) -> None: ...


class ServedAdapters:
    """Loads and unloads adapters by name. ``core`` returns the newest core, which loads them; None before the first
    one. ``check_ready`` raises EngineDeadError while the engine does not run. ``enabled`` says whether adapters are
    served at all. Use it in one event loop only."""

    def __init__(
        self, core: Callable[[], AdapterCore | None], check_ready: Callable[[], object], *, enabled: bool
    ) -> None:
        self.names = AdapterNames()
        """Adapters that requests may name."""
        self._core = core
        self._check_ready = check_ready
        self._enabled = enabled
        self._loads: dict[int, tuple[str, asyncio.Future[AdapterState]]] = {}
        """``adapter_id`` of an adapter that is being loaded -> (its name, future of the load's result)."""

    async def load(
        self,
        name: str,
        path: str | Path,
        *,
        root: str | None = None,
        in_place: bool = False,
        int_id: int = 0,
        private: bool = False,
    ) -> None:
        """Load the adapter in the directory ``path``, so that requests may name it. If ``root`` is given, all files
        must be inside ``root`` after links are followed.

        ``in_place`` replaces the loaded adapter of the same name; running requests keep the old adapter. ``private``:
        only the caller may use the adapter, so requests cannot name it. A private adapter replaces no public one, and
        the other way round. Raises
        RequestError for a name that is in use, ModelLoadError for an adapter that cannot be read, ConfigError if no
        adapters are served, and EngineDeadError.
        """
        self._check_ready()
        core = self._core()
        if not self._enabled or core is None:
            raise ConfigError("adapters are not served; start with enable_lora")
        request = LoRARequest(name, int_id or 1, path)
        if any(name == loading for loading, _ in self._loads.values()) or self._is_taken(name, in_place, private):
            raise RequestError(
                f"the adapter {request.lora_name!r} is loaded already, or about to be; give load_inplace to replace it,"
                " or another name"
            )
        load = self.names.next_load(name, str(path), root)
        loaded: asyncio.Future[AdapterState] = asyncio.get_running_loop().create_future()
        self._loads[load.adapter_id] = name, loaded
        core.load_adapter(load)
        try:
            state = await loaded
        except BaseException:  # the caller has left, so no request will use the adapter
            self._drop(load.adapter_id)
            raise
        finally:
            del self._loads[load.adapter_id]
        if state.error:
            raise ModelLoadError(state.error)
        before = self.names.add(AdapterEntry(load, int_id, private))
        if before is not None:
            self._drop(before.load.adapter_id)

    def _is_taken(self, name: str, in_place: bool, private: bool) -> bool:
        """Whether a load may not use this name, because it belongs to another adapter."""
        entry = self.names.get(name)
        return entry is not None and (not in_place or entry.is_private != private)

    def unload(self, name: str) -> bool:
        """Refuse new requests for an adapter at once. Running requests keep the adapter; it leaves memory after the
        last of them. Returns False if no adapter has this name."""
        entry = self.names.remove(name)
        if entry is not None:
            self._drop(entry.load.adapter_id)
        return entry is not None

    def unload_number(self, int_id: int) -> bool:
        """Call :meth:`unload` for the adapter to which a caller gave this number."""
        entry = self.names.with_int_id(int_id)
        return entry is not None and self.unload(entry.name)

    async def name_of(self, lora_request: LoRARequest | None) -> str:
        """Name of the adapter of a request, which is loaded first if necessary; empty if ``lora_request`` is None.

        Raises the errors of :meth:`load`.
        """
        if lora_request is None:
            return ""
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, got {type(lora_request).__name__}")
        while self.names.find(lora_request) is None:
            others = [future for name, future in self._loads.values() if name == lora_request.lora_name]
            if others:
                await asyncio.wait(others)
                await asyncio.sleep(0)  # let the task that loaded it register the name
                continue
            await self.load(lora_request.lora_name, lora_request.lora_path, int_id=lora_request.lora_int_id)
        return lora_request.lora_name

    def load_again(self, core: AdapterCore) -> None:
        """Load all adapters into a new core."""
        for entry in self.names:
            core.load_adapter(entry.load)

    def _drop(self, adapter_id: int) -> None:
        core = self._core()
        if core is not None:
            core.unload_adapter(adapter_id)

    def reported(self, state: AdapterState) -> None:
        """Handle the result of a load."""
        waiting = self._loads.get(state.adapter_id)
        if waiting is not None:
            if not waiting[1].done():
                waiting[1].set_result(state)
            return
        for entry in self.names:  # no caller waits: a restarted process loads its adapters again
            if state.error and entry.load.adapter_id == state.adapter_id:
                _log.error("the adapter %r could not be loaded again: %s", entry.name, state.error)
                self.names.remove(entry.name)

    def fail_all(self, error: Callable[[], ChairliftError]) -> None:
        """End all loads, because their core has died. ``error`` makes the error of a load."""
        for _, loaded in self._loads.values():
            if not loaded.done():
                loaded.set_exception(error())
