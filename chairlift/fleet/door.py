"""The router of a fleet (called the door): the queue in which requests wait until a replica has room for them.

Requests are assigned to replicas late, so the scheduling policy (fairness, priorities, reserved capacity, deadlines)
orders all requests of the fleet, and no request has to wait for a slow request of one replica. Only prompts for less
than two steps wait inside a replica. The door has no thread: its caller reports events and gives the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from chairlift.core.request import Request
from chairlift.core.scheduler.admission import WaitingQueue
from chairlift.core.scheduler.policy import Policy
from chairlift.fleet.routing import Replica, Router

__all__ = ["Door"]

_LOOK_AHEAD: Final = 32
"""Maximum number of requests that may wait for their preferred replica while later requests are sent first."""
_MAX_TIMES_PASSED: Final = 32
"""Maximum number of times that later requests may overtake a request. After that, the request is sent to any
replica."""


class Door:
    """Queue of the requests that wait for a replica, and record of the replica to which every other request was sent.

    ``policy`` orders the queue. With a router that is not ``late``, requests leave the queue at once. Not thread-safe.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router, policy: Policy) -> None:
        self.replicas = list(replicas)
        self._router = router
        self._policy = policy
        self._waiting = WaitingQueue(policy, _LOOK_AHEAD, _MAX_TIMES_PASSED)
        self._keys: dict[str, Sequence[int]] = {}
        self._requests: dict[str, Request] = {}
        self._at: dict[str, Replica] = {}
        self._pinned: dict[str, int] = {}
        """Id of a request -> version of the weights with which the request must continue."""
        self._newest: dict[int, int] = {}
        """Last prefix key of a prompt -> newest version of the weights that computed this prompt. Used while the
        replicas have different versions."""
        self._num_seen = 0

    def __len__(self) -> int:
        """Number of requests that wait for a replica."""
        return len(self._waiting)

    def add_replica(self, replica: Replica) -> None:
        """Let requests be sent to one more replica, once it accepts requests."""
        if replica not in self.replicas:
            self.replicas.append(replica)

    def remove_replica(self, replica: Replica) -> None:
        """Forget a replica without requests. Prompts whose beginnings it had cached go to other replicas."""
        if replica.num_requests:
            raise ValueError(f"replica {replica.index} has {replica.num_requests} requests")
        replica.accepting = False
        replica.prefixes.clear()
        self.replicas.remove(replica)

    def add(self, request: Request, keys: Sequence[int], now: float, version: int | None = None) -> None:
        """Add a request that has arrived, or whose replica has died.

        ``keys`` are the prefix keys of its prompt. With ``version``, the request is sent only to replicas with weights
        of this version.
        """
        if version is not None:
            self._pinned[request.request_id] = version
        request.sequence = self._num_seen
        self._num_seen += 1
        self._requests[request.request_id], self._keys[request.request_id] = request, keys
        if request.service.session:
            for each in self.replicas:
                each.prefixes.recall(_session(request), keys)
        self._policy.queued(request, now)
        num_tokens = request.num_prompt_tokens
        request.size = min((each.expect(keys, num_tokens)[0] for each in self.replicas), default=num_tokens)
        self._waiting.add(request)

    def send(self, now: float) -> list[tuple[Request, Replica]]:
        """Send as many requests as replicas have room for, in the order of the policy. Returns (request, replica)
        pairs.

        If the router prefers a replica without room, the request waits for it, and later requests may be sent first, a
        limited number of times. But a replica without prompts to compute always gets a request while requests wait.
        """
        sent: list[tuple[Request, Replica]] = []
        if not self._waiting:  # called after every step of every replica, mostly while nobody waits
            return sent
        self._follow_policy(now)
        passed: list[Request] = []
        for request in self._waiting.line(now):
            if not any(each.accepting and (each.has_room or not self._router.late) for each in self.replicas):
                break
            suited = self._suited(request)
            open_replicas = [each for each in suited if each.has_room or not self._router.late]
            if not open_replicas:
                if suited and not self._waiting.may_pass([*passed, request]):
                    break
                passed.append(request)
                continue
            chosen = self._choose(request, suited)
            if chosen not in open_replicas:
                if self._waiting.may_pass([*passed, request]):
                    passed.append(request)
                    continue
                chosen = self._choose(request, open_replicas)
            sent.append(self._send_to(request, chosen, now))
            for other in passed:
                other.times_passed += 1
        for request in passed:
            idle = [each for each in self._suited(request) if each.has_room and not each.unstarted]
            if not idle:
                continue
            sent.append(self._send_to(request, self._choose(request, idle), now))
        if self._router.late:
            sent += self._send_smallest(now)
        return sent

    def _send_smallest(self, now: float) -> list[tuple[Request, Replica]]:
        """Send the smallest requests, out of turn, to replicas that have room for small requests.

        The part of each step that a replica gives to its smallest requests so goes to those of the whole fleet.
        """
        sent: list[tuple[Request, Replica]] = []
        while self._waiting and any(each.accepting and each.has_small_room for each in self.replicas):
            for request in self._waiting.smallest(now):
                suited = [each for each in self._suited(request) if each.has_small_room]
                if suited:
                    sent.append(self._send_to(request, self._choose(request, suited), now, small=True))
                    break
            else:
                break
        return sent

    def _suited(self, request: Request) -> list[Replica]:
        """Replicas that may serve a request.

        While the weights of one replica after another are replaced, a chat that used new weights does not go back to
        old weights, if possible.
        """
        accepting = [each for each in self.replicas if each.accepting]
        if (pinned := self._pinned.get(request.request_id)) is not None:
            return [each for each in accepting if each.version == pinned]
        if self._newest:
            seen = max((self._newest.get(key, 0) for key in self._keys[request.request_id]), default=0)
            return [each for each in accepting if each.version >= seen] or accepting
        return accepting

    def versions_changed(self) -> list[str]:
        """Record that the weights of a replica have changed.

        Returns the ids of waiting requests that no replica can continue, because no replica has their version.
        """
        versions = {each.version for each in self.replicas}
        if len(versions) == 1:
            self._newest.clear()
        return [name for name, pinned in self._pinned.items() if pinned not in versions and name not in self._at]

    def _choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        if len(replicas) == 1:
            return replicas[0]
        return self._router.choose(self._keys[request.request_id], request.num_prompt_tokens, replicas)

    def _send_to(self, request: Request, replica: Replica, now: float, small: bool = False) -> tuple[Request, Replica]:
        keys = self._keys[request.request_id]
        self._waiting.remove(request, now)
        self._policy.joined(request)
        uncached, _ = replica.expect(keys, request.num_prompt_tokens)
        replica.sent(request.request_id, max(1, uncached), keys, small)
        if request.service.session:
            replica.prefixes.remember(_session(request), keys)
        self._at[request.request_id] = replica
        if keys and any(each.version != replica.version for each in self.replicas):
            self._newest[keys[-1]] = max(replica.version, self._newest.get(keys[-1], 0))
        return request, replica

    def _follow_policy(self, now: float) -> None:
        """Report the running requests to the policy, and re-sort waiting requests that the policy has moved."""
        self._policy.observe([self._requests[name] for name in self._at], now)
        for _ in self._policy.late(now):
            pass  # the scheduler of the replica drops or downgrades late requests
        for request in self._policy.moved():
            if request in self._waiting:
                self._waiting.remove(request)
                self._waiting.add(request)

    def place_for(self, request_id: str, version: int, fits: Callable[[Replica], bool]) -> Replica | None:
        """Replica with room to which a request that runs elsewhere may move; None if there is none. Its weights have
        this version."""
        accepting = [each for each in self.replicas if each.accepting and each.has_room and each.version == version]
        suited = [each for each in accepting if fits(each)]
        return self._choose(self._requests[request_id], suited) if suited else None

    def moved(self, request_id: str, replica: Replica) -> None:
        """Record that a running request is now at another replica."""
        self._at[request_id].ended(request_id)
        self._at[request_id] = replica
        replica.started.add(request_id)

    def line(self, now: float) -> Iterator[Request]:
        """Requests that wait for a replica, in the order of the policy."""
        return self._waiting.line(now)

    def replica_of(self, request_id: str) -> Replica | None:
        """Replica to which a request was sent. None for a request that waits, and for an unknown request."""
        return self._at.get(request_id)

    def progressed(self, request_id: str, num_computed: int) -> None:
        """Record that the first ``num_computed`` tokens of a request are computed. Ignores unknown requests.

        So the replica gets its next prompt before it has finished a long one, and its steps stay full.
        """
        if (replica := self._at.get(request_id)) is not None:
            replica.progressed(request_id, len(self._requests[request_id].token_ids) - num_computed)

    def begun(self, request_id: str) -> None:
        """Record the first token of a request."""
        if (replica := self._at.get(request_id)) is not None:
            replica.begun(request_id)
            request = self._requests[request_id]
            request.num_computed_tokens = request.num_prompt_tokens  # from now on, its tokens count for its tenant

    def ended(self, request_id: str, num_tokens: int) -> None:
        """Record that a request has ended for any reason, with ``num_tokens`` output tokens. Ignores unknown
        requests."""
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
        """Forget the requests of a dead replica. Returns (requests without a token, requests with tokens), which the
        caller may :meth:`add` again.
        """
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


def _session(request: Request) -> tuple[str, str]:
    """The session of a request. Callers with different salts never share one, whatever names they send."""
    return request.cache_salt, request.service.session
