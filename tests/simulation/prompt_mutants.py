"""Bugs in the waiting for prompts in flight, injected one at a time. The simulator's worlds in which prompts with
common beginnings arrive together must detect every one of them."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.core.request import Request
from chairlift.core.scheduler.prompts_in_flight import PromptsInFlight
from tests.simulation.mutants import Patch

PROMPT_MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    PROMPT_MUTANTS[plant.__name__] = plant
    return plant


@mutant
def followers_wait_for_a_leader_that_is_gone(patch: Patch) -> None:
    gone = PromptsInFlight.gone

    def wrong(self: PromptsInFlight, leader: Request) -> None:
        if leader.finish_reason is None:
            gone(self, leader)

    patch(PromptsInFlight, "gone", wrong)


@mutant
def followers_of_a_preempted_leader_wait(patch: Patch) -> None:
    gone = PromptsInFlight.gone

    def wrong(self: PromptsInFlight, leader: Request) -> None:
        if not leader.was_preempted:
            gone(self, leader)

    patch(PromptsInFlight, "gone", wrong)


@mutant
def followers_wait_without_limit(patch: Patch) -> None:
    patch(PromptsInFlight, "expire", lambda self, step: None)


@mutant
def follower_that_left_is_queued_again(patch: Patch) -> None:
    patch(PromptsInFlight, "remove", lambda self, request: None)


@mutant
def follower_waits_in_the_queue_too(patch: Patch) -> None:
    def wrong(self: PromptsInFlight, leader: Request) -> None:
        for follower in [each for each in self._followers.values() if each.leader is leader]:
            self._wait(follower.request, 0)

    patch(PromptsInFlight, "published", wrong)


@mutant
def released_followers_stay_outside_the_queue(patch: Patch) -> None:
    patch(PromptsInFlight, "_queue", lambda self, most: None)


@mutant
def leaders_keep_the_followers_that_left_them(patch: Patch) -> None:
    patch(PromptsInFlight, "_forget_follower", lambda self, follower: None)
