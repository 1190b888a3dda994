"""The adapters of a fleet: every replica loads each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from chairlift.engine.adapters import AdapterLoad, AdapterState
from chairlift.engine.process.process_client import RemoteCore
from chairlift.fleet.member import FleetEvents, Member, live_cores

__all__ = ["FleetAdapters"]


class FleetAdapters:
    """Loads adapters in all of ``members``, and reports one result for each to ``events``."""

    def __init__(self, members: Sequence[Member], events: FleetEvents) -> None:
        self._members = members
        self._events = events
        self._loads: dict[int, AdapterLoad] = {}
        self._loading: dict[int, tuple[set[int], str]] = {}
        """Id of an adapter that is being loaded -> (replicas that have not reported a result, first error)."""
        self.digests: dict[int, str] = {}
        """Id of an adapter that was loaded -> digest of its content."""

    def load(self, load: AdapterLoad) -> None:
        """Load an adapter in every replica. ``on_adapter`` is called once, when all replicas have reported a result."""
        self._loads[load.adapter_id] = load
        self._loading[load.adapter_id] = {member.view.index for member in self._members if member.alive}, ""
        for core in live_cores(self._members):
            core.load_adapter(load)

    def unload(self, adapter_id: int) -> None:
        self._loads.pop(adapter_id, None)
        self.digests.pop(adapter_id, None)
        for core in live_cores(self._members):
            core.unload_adapter(adapter_id)

    def load_again(self, core: RemoteCore) -> None:
        """Load all adapters in a new process of a replica."""
        for load in self._loads.values():
            core.load_adapter(load)

    def reported(self, member: Member, state: AdapterState) -> None:
        """Handle the result of loading an adapter in a replica: success, an error, or the death of the replica."""
        if state.digest and state.adapter_id in self._loads:
            self.digests[state.adapter_id] = state.digest
        waiting = self._loading.get(state.adapter_id)
        if waiting is None:
            if member.alive:
                self._events.on_adapter(state)  # a restarted replica has loaded the adapter again
            return
        waiting[0].discard(member.view.index)
        error = waiting[1] or (state.error or "")
        self._loading[state.adapter_id] = waiting[0], error
        if waiting[0]:
            return
        del self._loading[state.adapter_id]
        if error:
            self.unload(state.adapter_id)
        self._events.on_adapter(dataclasses.replace(state, error=error))

    def lost(self, member: Member) -> None:
        """Stop waiting for the results of a replica that has died."""
        for adapter_id in list(self._loading):
            self.reported(member, AdapterState(adapter_id))
