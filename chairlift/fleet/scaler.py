"""Adds and removes replicas of a fleet as the autoscaler decides."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.config import EngineConfig
from chairlift.fleet.autoscale import SCALE_SECONDS, replica_to_remove
from chairlift.fleet.door import Door
from chairlift.fleet.door_forecast import DoorForecast
from chairlift.fleet.fleet_scaling import FleetScaling
from chairlift.fleet.member import Member
from chairlift.fleet.members import Members, Sleep

__all__ = ["Scaler"]


class Scaler:
    """Adds replicas to ``members`` and removes them. ``scaling`` decides how many there should be."""

    def __init__(
        self,
        config: EngineConfig,
        members: Members,
        scaling: FleetScaling,
        *,
        door: Door,
        forecast: DoorForecast,
        now: Callable[[], float],
        sleep: Sleep,
    ) -> None:
        self._rows = config.scheduler.max_running
        self._members = members
        self._scaling = scaling
        self._door = door
        self._forecast = forecast
        self._now = now
        self._sleep = sleep

    async def run(self) -> None:
        """Ask at regular times how many replicas there should be. Runs until it is cancelled."""
        members = self._members
        while True:
            await self._sleep(SCALE_SECONDS)
            wanted = [each for each in members.everyone if each.wanted]
            serving = [each.view for each in wanted if each.view.accepting]
            count = self._scaling.decide(
                self._door,
                self._forecast,
                serving=serving,
                starting=len(wanted) - len(serving),
                rows=self._rows,
                targets=members.events.latency_targets(),
                steady=not members.rolling.locked(),
            )
            for _ in range(count - len(wanted)):
                self._grow()
            if count < len(wanted) and serving:
                self._shrink(members.everyone[replica_to_remove(serving).index])

    def _grow(self) -> None:
        """Let a replica that is being drained accept requests again. If there is none, start a replica."""
        members = self._members
        for member in members.everyone:
            if not member.wanted and member.alive and member.generation == members.generation:
                if member.removal is not None:
                    member.removal.cancel()
                self._keep(member)
                return
        off = next((each for each in members.everyone if each.state == "off"), None)
        if off is not None:
            off.wanted = True
            members.run(self._start(off), "start of a replica")

    async def _start(self, member: Member) -> None:
        """Start a replica that was off. If it cannot start, it is off again."""
        began = self._now()
        try:
            await self._members.load(member)
        except Exception as error:
            member.wanted = False
            self._scaling.failed(member.view.index, str(error) or type(error).__name__)
            return
        self._scaling.started(self._now() - began)
        self._members.open(member)
        self._members.resized()

    def _shrink(self, member: Member) -> None:
        """Send no more requests to a replica, and remove it after its last request."""
        member.wanted = False
        member.draining = True
        member.view.accepting = False
        member.removal = self._members.run(self._remove(member), f"removal of replica {member.view.index}")
        self._members.jobs.send()  # requests that waited for this replica may go to others

    async def _remove(self, member: Member) -> None:
        await self._members.drain(member, None, move=True)
        if not any(each.wanted and each.alive for each in self._members.everyone):  # the others have died meanwhile
            self._keep(member)
        elif member.core is not None:
            member.core.kill()

    def _keep(self, member: Member) -> None:
        """Keep a replica that was being removed."""
        member.wanted = True
        member.removal = None
        self._members.undrain(member)
