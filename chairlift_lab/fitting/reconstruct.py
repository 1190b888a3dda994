"""Recovers the steps behind the token times of requests.

All rows of a step get their tokens at nearly the same time. So token times of all requests are divided into clusters,
and a cluster is the end of a step. Its members are the rows; a member's first token is the end of its prompt. The
prompt tokens of a request are spread over the newest steps since it was sent, as far as the token budget of each step
allows. That is the order in which engines that serve first come, first served compute them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.errors import ConfigError
from chairlift_lab.fitting.run import MeasuredRequest, TimedStep

__all__ = ["SomeSteps", "recover_steps"]

_CLOSE: Final = 1 / 3
"""Largest distance of two neighbours in a cluster, as a fraction of the median time between tokens."""
_FEWEST: Final = 16


@dataclasses.dataclass(slots=True)
class _Step:
    """A cluster of tokens. ``end`` is the time of its first token."""

    end: float
    decodes: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(request, number of its earlier tokens)."""
    firsts: list[int] = dataclasses.field(default_factory=list)
    """Requests with their first token."""
    room: int = 0
    """Prompt tokens that still fit into the step."""
    chunks: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(first position, number of tokens) of each chunk of a prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class SomeSteps:
    """Steps with known times, and how many tokens they explain."""

    steps: Sequence[TimedStep]
    clusters: int
    torn: float
    """Fraction of the clusters that contain two tokens of one request, so that they are two steps at least."""


def recover_steps(requests: Sequence[MeasuredRequest], max_num_batched_tokens: int) -> SomeSteps:
    """Steps of a run. A step is only timed if a row decoded both in it and in the step before, so that the engine was
    not idle in between.

    Raises ConfigError if too few steps have a known time.
    """
    steps, torn = _clusters(requests, max_num_batched_tokens)
    _place_prompts(steps, requests)
    timed = []
    for before, step in itertools.pairwise(steps):
        stayed = {request for request, _ in before.decodes} | set(before.firsts)
        if step.decodes and all(request in stayed for request, _ in step.decodes):
            timed.append((_features(step, requests), step.end - before.end))
    if len(timed) < _FEWEST:
        raise ConfigError(
            f"the token times of {len(requests):,} requests give {len(timed)} steps with a known time, and a fit needs"
            f" {_FEWEST}; record more requests, or longer answers"
        )
    return SomeSteps(timed, len(steps), torn / len(steps))


def _clusters(requests: Sequence[MeasuredRequest], budget: int) -> tuple[list[_Step], int]:
    """(steps in the order of their ends, number of clusters with two tokens of one request)."""
    gaps = np.concatenate([np.diff(request.times) for request in requests])
    if not len(gaps):
        raise ConfigError("no answer has two tokens, so the times of steps are unknown; record longer answers")
    close = _CLOSE * float(np.median(gaps))
    events = sorted(
        (time, request, index) for request, measured in enumerate(requests) for index, time in enumerate(measured.times)
    )
    steps: list[_Step] = []
    newest = -np.inf
    members: set[int] = set()
    torn = 0
    for time, request, index in events:
        if time - newest > close or (request in members and time - steps[-1].end > close):
            steps.append(_Step(time, room=budget))
            members = set()
        torn += request in members
        members.add(request)
        newest = time
        step = steps[-1]
        if index:
            step.decodes.append((request, index))
            step.room -= 1
        else:
            step.firsts.append(request)
    return steps, torn


def _place_prompts(steps: Sequence[_Step], requests: Sequence[MeasuredRequest]) -> None:
    """Divide each prompt into chunks of the steps up to its first token: as few steps as have room, of which the first
    ones are filled."""
    ends = [step.end for step in steps]
    for at, step in enumerate(steps):
        for request in sorted(step.firsts):
            # The step that was running when the request was sent cannot contain it.
            earliest = min(at, int(np.searchsorted(ends, requests[request].start)) + 1)
            left = requests[request].prompt_tokens
            begin = at
            room = step.room
            while begin > earliest and room < left:
                begin -= 1
                room += max(0, steps[begin].room)
            done = 0
            for place in steps[begin:at]:
                take = min(max(0, place.room), left - done - 1)  # the last token is computed in the last step
                if take:
                    place.room -= take
                    place.chunks.append((done, take))
                    done += take
            step.room -= left - done
            step.chunks.append((done, left - done))


def _features(step: _Step, requests: Sequence[MeasuredRequest]) -> StepFeatures:
    context = sum(requests[request].prompt_tokens + index for request, index in step.decodes)
    tokens = sum(count for _, count in step.chunks)
    pairs = sum(count * (start + (count + 1) / 2) for start, count in step.chunks)
    return StepFeatures(len(step.decodes), context, tokens, pairs)
