"""Computes the knots of a trace file: quantiles, rank correlation, arrivals, and sessions with their gaps.

Two things are not in every file. Mooncake's traces have times in ticks of 3 s; arrivals are spread evenly within a
tick, because a tick is not a burst. They have no sessions either, but ids of prompt blocks: a request continues the
latest request whose complete blocks are the beginning of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from chairlift.errors import ConfigError
from chairlift_lab.laboratory.knots import SessionKnots, TraceKnots
from chairlift_lab.laboratory.quantiles import Quantiles, rank_correlation
from chairlift_lab.replay.traced_request import TracedRequest
from chairlift_lab.workload.summary import summarise

__all__ = ["fit_knots", "inferred_sessions", "spread_ticks"]

_FEWEST = 20
_BLOCK = 64
_MOST_SHARED = 4096
_RUN = 100


def fit_knots(
    trace: Sequence[TracedRequest], *, name: str, title: str, source: str, licence: str, keeps_gaps: bool = False
) -> TraceKnots:
    """Knots of a trace in order of arrival. Sessions are inferred from prefix ids if the trace names none.

    Raises ConfigError for a trace with fewer than 20 requests, or whose requests all arrive at once.
    """
    if len(trace) < _FEWEST or trace[-1].arrival == trace[0].arrival:
        raise ConfigError(
            f"knots need at least {_FEWEST} requests with arrival times, and the trace has {len(trace):,} within"
            f" {trace[-1].arrival - trace[0].arrival if trace else 0:g} s"
        )
    requests = spread_ticks(trace)
    if not any(request.session for request in requests):
        requests = inferred_sessions(requests)
    chains = collections.defaultdict[str, list[TracedRequest]](list)
    for number, request in enumerate(requests):
        chains[request.session or f" {number}"].append(request)
    many = any(len(chain) > 1 for chain in chains.values())
    # A trace may begin in the middle of a session. Its first prompt is then no first prompt.
    firsts = [chain[0] for chain in chains.values() if not chain[0].turn] or [chain[0] for chain in chains.values()]
    fresh: list[int] = [request.prompt_tokens for request in firsts]
    outputs: list[int] = [request.output_tokens for request in firsts]
    later: list[int] = []
    gaps: list[float] = []
    for chain in chains.values():
        for before, after in itertools.pairwise(chain):
            later.append(max(1, after.prompt_tokens - before.prompt_tokens - before.output_tokens))
            outputs.append(after.output_tokens)
            gaps.append(after.arrival - before.arrival)
    sessions = None
    if many:
        sessions = SessionKnots(
            turns=Quantiles.of([len(chain) for chain in chains.values()]),
            fresh=Quantiles.of(later),
            gap_seconds=Quantiles.of(gaps),
            keeps_gaps=keeps_gaps,
            most_tokens=max(request.prompt_tokens + request.output_tokens for request in requests),
        )
    return TraceKnots(
        name=name,
        title=title,
        source=source,
        licence=licence,
        basis=f"computed from the file, {len(requests):,} requests",
        rate=round((len(requests) - 1) / (requests[-1].arrival - requests[0].arrival), 4),
        burstiness=_burstiness([request.arrival for request in firsts]),
        prompt=Quantiles.of(fresh),
        output=Quantiles.of([request.output_tokens for request in requests]),
        correlation=round(rank_correlation([*fresh, *later], outputs), 3),
        sessions=sessions,
        shared_tokens=_shared_tokens(requests),
        repeated=round(summarise(requests).repeated or 0.0, 3),
        block=_BLOCK,
    )


def _burstiness(times: Sequence[float]) -> float:
    """Standard deviation of the gaps divided by their mean: the median over runs of 100 gaps. A pause of minutes within
    an hour is no burst, and would make all other gaps seem equal."""
    gaps = np.diff(times)
    runs = [gaps[at : at + _RUN] for at in range(0, max(1, len(gaps) - _RUN + 1), _RUN)]
    spread = [float(np.std(run) / np.mean(run)) for run in runs if np.mean(run) > 0]
    return max(0.001, round(float(np.median(spread)), 3)) if spread else 1.0


def _shared_tokens(requests: Sequence[TracedRequest]) -> int:
    """Number of tokens with which nearly all prompts begin."""
    shared = 0
    while shared * requests[0].prefix_block < _MOST_SHARED:
        heads = collections.Counter(request.prefix_ids[: shared + 1] for request in requests if request.prefix_ids)
        if not heads or heads.most_common(1)[0][1] < 0.9 * len(requests):
            break
        shared += 1
    return min(shared * requests[0].prefix_block, min(request.prompt_tokens for request in requests)) // _BLOCK * _BLOCK


def spread_ticks(trace: Sequence[TracedRequest]) -> list[TracedRequest]:
    """The trace with the arrivals of each tick spread evenly up to the next tick, if most requests share their time
    with others. Otherwise the trace as it is."""
    times = sorted({request.arrival for request in trace})
    if len(times) < 2 or len(trace) < 2 * len(times):
        return list(trace)
    tick = float(np.median(np.diff(times)))
    at = collections.defaultdict[float, list[TracedRequest]](list)
    for request in trace:
        at[request.arrival].append(request)
    spread = []
    for number, time in enumerate(times):
        width = min(tick, times[number + 1] - time) if number + 1 < len(times) else tick
        spread += [
            dataclasses.replace(request, arrival=time + width * index / len(at[time]))
            for index, request in enumerate(at[time])
        ]
    return spread


def inferred_sessions(trace: Sequence[TracedRequest]) -> list[TracedRequest]:
    """The trace with sessions found from prefix ids: a request continues the latest request, not continued yet, whose
    complete blocks are the beginning of its own. One common block is no sign of a session."""
    known: dict[int, int] = {}
    sessions: dict[int, tuple[str, int]] = {}
    found = []
    for index, request in enumerate(trace):
        chain = 0
        heads = []
        for block in request.prefix_ids:
            chain = hash((chain, block))
            heads.append(chain)
        before = next((known.pop(heads[n]) for n in range(len(heads) - 1, 0, -1) if heads[n] in known), None)
        session, turn = (str(index), 0) if before is None else sessions[before]
        turn += before is not None
        sessions[index] = (session, turn)
        complete = request.prompt_tokens // request.prefix_block
        if complete >= 2 and len(heads) >= complete:
            known[heads[complete - 1]] = index
        found.append(dataclasses.replace(request, session=session, turn=turn) if request.prefix_ids else request)
    return found
