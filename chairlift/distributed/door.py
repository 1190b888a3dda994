"""The door of a fleet: requests wait here, and are sent to a replica when one has room.

Late binding keeps the promises of one queue: the policy (fairness, priorities, reserved capacity, deadlines) orders all
requests of the fleet, and a request behind a slow one is not stuck with its replica. What waits in a replica is less
than two steps' prompts. The door runs on events and on the clock of its caller; it has no thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from chairlift.distributed.routing import PREFIX_BLOCK, Replica, Router
from chairlift.request import Request
from chairlift.scheduler.admission import WaitingQueue
from chairlift.scheduler.policy import Policy

__all__ = ["Door"]

_LOOK_AHEAD: Final = 32
"""Most requests in line that wait for a replica of their choice while those behind them are sent."""
_MAX_TIMES_PASSED: Final = 32
"""A request that was passed this often takes any replica."""


class Door:
    """Requests that wait for a replica, and the replica of each request that does not.

    Not thread-safe. ``policy`` orders the queue; with a router that is not late, requests leave it at once.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router, policy: Policy) -> None:
        self.replicas = list(replicas)
        self._router, self._policy = router, policy
        self._waiting = WaitingQueue(policy, _LOOK_AHEAD, _MAX_TIMES_PASSED)
        self._keys: dict[str, Sequence[int]] = {}
        self._requests: dict[str, Request] = {}
        self._at: dict[str, Replica] = {}
        self._pinned: dict[str, int] = {}
        """Requests that only weights of this version may continue."""
        self._newest: dict[int, int] = {}
        """Last keys of prompts, and the version of the weights that compute them, while replicas have several."""
        self._num_seen = 0

    def __len__(self) -> int:
        """Requests that wait at the door."""
        return len(self._waiting)

    def add(self, request: Request, keys: Sequence[int], now: float, version: int | None = None) -> None:
        """Add a request that has arrived, or whose replica has died. ``keys`` are those of its prompt. With ``version``
        it only goes to replicas with these weights."""
        if version is not None:
            self._pinned[request.request_id] = version
        request.sequence = self._num_seen
        self._num_seen += 1
        self._requests[request.request_id], self._keys[request.request_id] = request, keys
        self._policy.queued(request, now)
        self._waiting.add(request)

    def send(self, now: float) -> list[tuple[Request, Replica]]:
        """Choose replicas for as many requests as may be sent, in the order of the policy.

        A request waits for a replica without room if the router prefers that one; then requests behind it may be sent
        first, a bounded number of times. No replica runs out of prompts while requests wait.
        """
        sent: list[tuple[Request, Replica]] = []
        self._follow_policy(now)
        passed: list[Request] = []
        for request in self._waiting.line(now):
            if not any(each.accepting and (each.has_room or not self._router.late) for each in self.replicas):
                break
            suited = self._suited(request)
            able = [each for each in suited if each.has_room or not self._router.late]
            if not able:
                if suited and not self._waiting.may_pass([*passed, request]):
                    break
                passed.append(request)
                continue
            chosen = self._choose(request, suited)
            if chosen not in able:
                if self._waiting.may_pass([*passed, request]):
                    passed.append(request)
                    continue
                chosen = self._choose(request, able)
            sent.append(self._send_to(request, chosen, now))
            for other in passed:
                other.times_passed += 1
        for request in passed:
            idle = [each for each in self._suited(request) if each.has_room and not each.unstarted]
            if not idle:
                continue
            sent.append(self._send_to(request, self._choose(request, idle), now))
        return sent

    def _suited(self, request: Request) -> list[Replica]:
        """Replicas that may serve a request. While weights are replaced one replica after another, a chat does not go
        back to the old ones."""
        accepting = [each for each in self.replicas if each.accepting]
        if (pinned := self._pinned.get(request.request_id)) is not None:
            return [each for each in accepting if each.version == pinned]
        if self._newest:
            seen = max((self._newest.get(key, 0) for key in self._keys[request.request_id]), default=0)
            return [each for each in accepting if each.version >= seen] or accepting
        return accepting

    def versions_changed(self) -> list[str]:
        """Note that the weights of a replica have changed. Returns requests that no replica can continue any more."""
        versions = {each.version for each in self.replicas}
        if len(versions) == 1:
            self._newest.clear()
        return [name for name, pinned in self._pinned.items() if pinned not in versions and name not in self._at]

    def _choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        return self._router.choose(self._keys[request.request_id], request.num_prompt_tokens, replicas)

    def _send_to(self, request: Request, replica: Replica, now: float) -> tuple[Request, Replica]:
        keys = self._keys[request.request_id]
        self._waiting.remove(request, now)
        self._policy.joined(request)
        uncached = request.num_prompt_tokens - PREFIX_BLOCK * replica.prefixes.matched(keys)
        replica.sent(request.request_id, max(1, uncached), keys)
        self._at[request.request_id] = replica
        if keys and any(each.version != replica.version for each in self.replicas):
            self._newest[keys[-1]] = max(replica.version, self._newest.get(keys[-1], 0))
        return request, replica

    def _follow_policy(self, now: float) -> None:
        """Tell the policy which requests run, and move requests whose place in the queue has changed."""
        self._policy.observe([self._requests[name] for name in self._at], now)
        for _ in self._policy.late(now):
            pass  # the replica drops or downgrades it
        for request in self._policy.moved():
            if request in self._waiting:
                self._waiting.remove(request)
                self._waiting.add(request)

    def line(self, now: float) -> Iterator[Request]:
        """Requests that wait at the door, in the order of the policy."""
        return self._waiting.line(now)

    def replica_of(self, request_id: str) -> Replica | None:
        """Where a request was sent; None while it waits, and for an unknown one."""
        return self._at.get(request_id)

    def begun(self, request_id: str) -> None:
        """A request has its first token."""
        if (replica := self._at.get(request_id)) is not None:
            replica.begun(request_id)
            request = self._requests[request_id]
            request.num_computed_tokens = request.num_prompt_tokens  # its tenant is charged from now on

    def ended(self, request_id: str, num_tokens: int) -> None:
        """A request has ended, however, with ``num_tokens`` tokens in its answer. Unknown ones are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        del self._keys[request_id]
        self._pinned.pop(request_id, None)
        if (replica := self._at.pop(request_id, None)) is not None:
            replica.ended(request_id)
            request.num_computed_tokens = request.num_prompt_tokens + num_tokens
            self._policy.left(request)
        else:
            self._waiting.remove(request)
        self._policy.forgotten(request)

    def lose(self, replica: Replica) -> tuple[list[Request], list[Request]]:
        """Remove a dead replica. Returns its requests without a token, and with tokens. The door forgets them; the
        caller may :meth:`add` them again."""
        replica.accepting = False
        lost: tuple[list[Request], list[Request]] = [], []
        for kind, names in zip(lost, replica.lost(), strict=True):
            for name in names:
                request = self._requests.pop(name)
                del self._keys[name], self._at[name]
                self._pinned.pop(name, None)
                self._policy.left(request)
                self._policy.forgotten(request)
                kind.append(request)
        return lost
