"""What the training service does and has done: counters for ``/metrics``, and who trains for the live view."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from chairlift.metrics.stats import TrainingStats
from chairlift_train.service.log.records import ModelRecord, SamplerRecord
from chairlift_train.service.schedule.work import TrainingCall, TrainingPack, TrainingStep

__all__ = ["TrainingProgress"]

_KEPT: Final = 100
"""Number of the newest packs and steps that are shown."""


@dataclasses.dataclass(slots=True)
class _Run:
    """One training run in memory."""

    record: ModelRecord
    tokens: int = 0
    """Tokens of its passes so far."""
    steps: int = 0
    loss: float | None = None
    """Sum of the losses of its newest pass."""
    seconds: float = 0.0
    """Its share of the seconds of computing."""
    waiting: dict[int, tuple[TrainingCall, float]] = dataclasses.field(default_factory=dict)
    """Seq id -> (call that has not ended, when it could have begun)."""
    begun: set[int] = dataclasses.field(default_factory=set)
    """Seq ids of the waiting calls of which a part was computed."""


class TrainingProgress:
    """Counts the work of the service. ``clock`` is in seconds. Runs and calls that are not known are ignored, because a
    run may end while its work is computed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.stats = TrainingStats()
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        self._work: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._samplers: dict[str, _Sampler] = {}
        self._forward: set[tuple[str, int]] = set()
        """(model id, seq id) of the calls without a backward pass in the work that began last."""

    def restarted(self) -> None:
        """Note that all runs are taken up again. Counters stay."""
        for run in self._runs.values():
            run.waiting.clear()
            run.begun.clear()

    def entered(self, record: ModelRecord, call: TrainingCall) -> None:
        """Note that a call may be computed as soon as the machine is free."""
        run = self._runs.setdefault(record.model_id, _Run(record))
        run.waiting[call.seq_id] = call, self._clock()

    def begins(self, work: TrainingPack | TrainingStep) -> None:
        """Note that work begins."""
        self._forward.clear()
        for model_id, seq_id in _calls(work):
            run = self._runs.get(model_id)
            if run is None or seq_id not in run.waiting:
                continue
            call, since = run.waiting[seq_id]
            if call.forward_only:
                self._forward.add((model_id, seq_id))
            if seq_id not in run.begun:
                run.begun.add(seq_id)
                self.stats.wait.observe(self._clock() - since)

    def sliced(self, seconds: float) -> None:
        """Note the longest piece of some work that nothing could interrupt."""
        self.stats.longest_slice = max(self.stats.longest_slice, seconds)

    def done(self, work: TrainingPack | TrainingStep, seconds: float) -> None:
        """Note that the work that began last has ended."""
        self.stats.seconds += seconds
        tokens: Counter[str] = Counter()
        if isinstance(work, TrainingStep):
            kind = work.call.kind
            owners = [work.call.model_id]
            if (run := self._runs.get(work.call.model_id)) is not None:
                run.seconds += seconds
        else:
            kind = "pass"
            owners = [part.model_id for part in work.parts]
            for part in work.parts:
                run = self._runs.get(part.model_id)
                if run is None:
                    continue
                run.tokens += part.num_tokens
                run.seconds += seconds * part.num_tokens / work.num_tokens
                tokens[part.model_id] += part.num_tokens
                is_forward = (part.model_id, part.seq_id) in self._forward
                self.stats.tokens["forward" if is_forward else "backward"] += part.num_tokens
        self._work.append(
            {
                "number": work.number,
                "kind": kind,
                "seconds": round(seconds, 4),
                "runs": list(dict.fromkeys(owners)),
                "tokens": dict(tokens),
            }
        )

    def ended(self, model_id: str, seq_id: int, *, failed: str = "", loss: float | None = None) -> None:
        """Note that a call has its answer. ``failed`` is the category of its error; empty if it has none."""
        run = self._runs.get(model_id)
        known = None if run is None else run.waiting.pop(seq_id, None)
        if failed:
            self.stats.failed[failed] += 1
        if run is None or known is None:
            return
        run.begun.discard(seq_id)
        self.stats.calls[known[0].kind] += 1
        if loss is not None:
            run.loss = loss
        if known[0].kind == "optim_step" and not failed:
            run.steps += 1

    def forgot(self, model_id: str) -> None:
        """Note that a run has left the memory."""
        self._runs.pop(model_id, None)

    # -- samples ---------------------------------------------------------------------------------------------------

    def sampling(self, sampler: SamplerRecord, count: int) -> None:
        """Note that a request for ``count`` samples begins."""
        known = self._samplers.setdefault(sampler.sampler_id, _Sampler(sampler))
        known.running += count

    def sampled(self, sampler_id: str, count: int, num_tokens: int) -> None:
        """Note that a request for ``count`` samples has ended with ``num_tokens`` tokens."""
        known = self._samplers.get(sampler_id)
        self.stats.samples += count
        if known is not None:
            known.running -= count
            known.samples += count
            known.tokens += num_tokens

    def forgot_session(self, session_id: str) -> None:
        """Note that a session has ended."""
        for name in [name for name, each in self._samplers.items() if each.record.session_id == session_id]:
            del self._samplers[name]

    # -- the live view ---------------------------------------------------------------------------------------------

    def num_waiting(self) -> int:
        """Number of calls that have entered the scheduler and have no answer."""
        return sum(len(run.waiting) for run in self._runs.values())

    def shown(self) -> dict[str, Any]:
        """Runs, samplers and the newest work as plain data. Owners are names of API keys, or ids of sessions."""
        return {
            "runs": [
                {
                    "run": name,
                    "owner": run.record.owner or run.record.session_id,
                    "rank": run.record.config.rank,
                    "tokens": run.tokens,
                    "steps": run.steps,
                    "loss": run.loss,
                    "seconds": round(run.seconds, 3),
                    "waiting_calls": len(run.waiting),
                    "is_computed": bool(run.begun),
                }
                for name, run in self._runs.items()
            ],
            "samplers": [
                {
                    "sampler": name,
                    "owner": each.record.owner or each.record.session_id,
                    "follows": each.record.follows,
                    "running": each.running,
                    "samples": each.samples,
                    "tokens": each.tokens,
                }
                for name, each in self._samplers.items()
            ],
            "work": list(self._work),
        }


@dataclasses.dataclass(slots=True)
class _Sampler:
    """One sampling session that was used."""

    record: SamplerRecord
    running: int = 0
    samples: int = 0
    tokens: int = 0


def _calls(work: TrainingPack | TrainingStep) -> Iterable[tuple[str, int]]:
    if isinstance(work, TrainingStep):
        return [(work.call.model_id, work.call.seq_id)]
    return [(part.model_id, part.seq_id) for part in work.parts]
