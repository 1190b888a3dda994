"""Divides the time of each sequence by cause. Every second is charged to exactly one cause, so the causes add up to the
whole time.

The ledger keeps running totals: for waiting sequences, seconds by the reason why the first request cannot start; for
decoding sequences, seconds of decode, of slowdown by prefills (stretched), and between steps (host). Each step adds a
few numbers to these totals. When a sequence changes its phase, it is charged the difference between the totals now and
at its previous change. So the sum is exact even when steps overlap, and the cost of a step does not grow with the
number of rows.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from chairlift.core.request import Request
from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.metrics.stats import CAUSES

__all__ = ["CAUSES", "CauseLedger", "DecodeSeconds", "causes_until"]

DecodeSeconds = tuple[float, float, float]
"""Running totals of the seconds of decoding sequences: (decode, stretched by prefills, host time between steps)."""

_HELD_UP_BY: Final = (
    "",
    "slots",
    "blocks",
    "tokens",
    "reservation",
    "batch",
    "grammar",
    "adapter",
    "image",
    "prefix",
    "kv_load",
    "policy",
)
_WAITS: Final = ("waiting_step", *(f"waiting_{what}" for what in _HELD_UP_BY[1:]))
_RUNS: Final = ("decode", "stretched", "host")
_COLUMNS: Final = (*_WAITS, *_RUNS)
_NUM_WAITS: Final = len(_WAITS)
_DECODE, _STRETCHED, _HOST = range(_NUM_WAITS, len(_COLUMNS))
_MAX_NAMES: Final = 3
_MAX_TIMES: Final = 8


class _Phase(enum.Enum):
    """Phase of a sequence. The phase decides to which cause the sequence's time is charged."""

    HANGING = "hanging"
    """The sequence waits until the first answer of its request has computed the prompt. It is charged to the same
    causes as that answer."""
    WAITING = "waiting"
    JOINED = "joined"
    """The sequence has a row, but its first step has not begun."""
    CHUNK = "chunk"
    """The current step computes a part of the sequence's prompt."""
    BETWEEN = "between"
    """The sequence's prompt is partly computed, but the current step computes no part of it."""
    DECODING = "decoding"
    STALLED = "stalled"
    AWAY = "away"
    """The sequence was preempted, and has not yet computed its lost positions again."""
    HELD = "held"
    """The sequence has ended, but its static batch has not."""


_WHOLE: Final = {_Phase.AWAY: "preempted", _Phase.HELD: "waiting_batch"}
_BESIDES_HOST: Final = {
    _Phase.JOINED: "waiting_step",
    _Phase.BETWEEN: "waiting_tokens",
    _Phase.STALLED: "waiting_blocks",
}


@dataclasses.dataclass(slots=True)
class _Account:
    """Account of one sequence: seconds charged so far, and the ledger's totals when its phase last changed."""

    request: Request
    since: float
    seen: list[float]
    phase: _Phase = _Phase.WAITING
    share: float = 0.0
    """Fraction of the current step's tokens that belong to this sequence."""
    step: int = -1
    """Index of the step in which the sequence joined or was preempted. Results of earlier steps are ignored."""
    stalled: bool = False
    """Whether the sequence pauses during decoding, because it lacks blocks. Its newest token may still be computed by a
    step in flight."""
    back_at: int = 0
    """Number of positions that were computed before the preemption. The sequence counts as preempted until as many are
    computed again."""
    seconds: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    preempted_by: list[str] = dataclasses.field(default_factory=list)
    preempted_during: list[tuple[float, float]] = dataclasses.field(default_factory=list)


class CauseLedger:
    """Divides the time of each request among its causes, such as waiting or prefills of other requests. Its
    methods must be called for every event, in order of time, with times on one clock.

    ``now`` is the time at which the ledger starts. ``model`` predicts how much longer a step takes because of its
    prefills.
    """

    def __init__(self, model: CostModel, now: float) -> None:
        self.decoding: list[tuple[str, dict[str, float], DecodeSeconds]] = []
        """Sequences with stop strings that began to decode: (id, seconds charged so far, totals at that time). The code
        that finds stop strings takes these entries, because it completes the account of an answer that a stop string
        ends."""
        self._model = model
        self._at = now
        self._columns = [0.0] * len(_COLUMNS)
        self._waits_for = 0
        self._busy = False
        self._decode_share = 1.0
        self._accounts: dict[str, _Account] = {}
        self._hanging: dict[str, list[_Account]] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def decode_seconds(self) -> DecodeSeconds:
        columns = self._columns
        return columns[_DECODE], columns[_STRETCHED], columns[_HOST]

    # -- what happens --------------------------------------------------------------------------------------------

    def added(self, request: Request, now: float) -> None:
        """Note that the scheduler has accepted the request."""
        self._advance(now)
        account = self._accounts[request.request_id] = _Account(request, now, self._columns.copy())
        account.seconds["front_door"] = max(0.0, now - request.arrival_time)
        if request.source is not None and request in request.source.siblings:
            account.phase = _Phase.HANGING
            self._hanging.setdefault(request.source.request_id, []).append(account)

    def scheduled(self, out: SchedulerOutput, now: float) -> None:
        """Note that a step was scheduled at ``now``. The step may be empty."""
        waits_for = _HELD_UP_BY.index(out.held_up_by)
        if waits_for != self._waits_for or out.joined or out.preempted_for or out.stalled or self._hanging:
            self._advance(now)
            self._waits_for = waits_for
            for source_id in [name for name, (first, *_) in self._hanging.items() if not _source(first).siblings]:
                self._release(source_id, self._accounts[source_id])
            self._note_moves(out)
        if out.num_held and out.decode_slots is not None:
            self._advance(now)
            for name, _ in out.decode_rows:
                account = self._accounts[name]
                if account.request.finish_reason is not None and account.phase is _Phase.DECODING:
                    self._move(account, _Phase.HELD)

    def began(self, out: SchedulerOutput, now: float) -> None:
        """Note that the executor begins a step. Called when the executor was idle, or when the previous step has
        ended."""
        self._advance(now)
        self._busy = True
        self._decode_share = 1.0
        if not out.chunks:
            return
        self._decode_share = self._share_of_decodes(out)
        for name, chunk in zip(out.chunk_ids, out.chunks, strict=True):
            account = self._accounts.get(name)
            if account is None or account.step > out.step:
                continue
            if account.phase in (_Phase.JOINED, _Phase.BETWEEN):
                account.share = chunk.num_tokens / out.num_tokens
                self._move(account, _Phase.CHUNK)
            elif account.phase is _Phase.STALLED:
                self._decodes(account)

    def landed(self, out: SchedulerOutput, now: float) -> None:
        """Note that the tokens of a step, or its error, are known."""
        self._advance(now)
        self._busy = False
        for name, chunk in zip(out.chunk_ids, out.chunks, strict=True) if out.chunks else ():
            account = self._accounts.get(name)
            if account is None or account.step > out.step:
                continue
            if account.phase is _Phase.CHUNK or (account.phase is _Phase.AWAY and chunk.end >= account.back_at):
                if not chunk.samples:
                    self._move(account, _Phase.BETWEEN)
                elif account.stalled:
                    self._move(account, _Phase.STALLED)
                else:
                    self._decodes(account)

    def ended(self, request: Request, now: float) -> tuple[dict[str, float], list[str], list[tuple[float, float]]]:
        """Note that the request has ended. Returns three values:

        - Cause -> seconds. The sum is the time since the request's arrival.
        - Ids of the last requests that preempted it, at most 3, the newest at the end.
        - The last 8 intervals (from, until) in which it was preempted.
        """
        account = self._accounts.pop(request.request_id, None)
        if account is None:
            return {}, [], []
        self._advance(now)
        if account.phase is _Phase.HANGING:
            source = self._accounts[_source(account).request_id]
            self._inherit(account, source)
            hanging = self._hanging[source.request.request_id]
            hanging.remove(account)
            if not hanging:
                del self._hanging[source.request.request_id]
        else:
            self._charge(account)
        self._note_return(account)
        if request.request_id in self._hanging:
            self._release(request.request_id, account)
        return dict(account.seconds), account.preempted_by, account.preempted_during

    # -- inside --------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        seconds = now - self._at
        self._at = now
        columns = self._columns
        columns[self._waits_for] += seconds
        if self._busy:
            own = seconds * self._decode_share
            columns[_DECODE] += own
            columns[_STRETCHED] += seconds - own
        else:
            columns[_HOST] += seconds

    def _charge(self, account: _Account) -> None:
        elapsed = self._at - account.since
        phase = account.phase
        seconds = account.seconds
        if elapsed <= 0:
            return
        if phase is _Phase.WAITING or phase is _Phase.DECODING:
            columns = range(_NUM_WAITS) if phase is _Phase.WAITING else range(_NUM_WAITS, len(_COLUMNS))
            for column in columns:
                spent = self._columns[column] - account.seen[column]
                if spent:
                    seconds[_COLUMNS[column]] += spent
        elif phase is _Phase.CHUNK:
            seconds["prefill"] += elapsed * account.share
            seconds["stretched"] += elapsed - elapsed * account.share
        elif phase in _WHOLE:
            seconds[_WHOLE[phase]] += elapsed
        else:
            host = min(elapsed, self._columns[_HOST] - account.seen[_HOST])
            seconds["host"] += host
            seconds[_BESIDES_HOST[phase]] += elapsed - host
        account.since, account.seen = self._at, self._columns.copy()

    def _move(self, account: _Account, phase: _Phase) -> None:
        self._charge(account)
        if phase is _Phase.AWAY and account.phase is not phase:
            account.preempted_during = [*account.preempted_during[1 - _MAX_TIMES :], (self._at, self._at)]
        elif phase is not _Phase.AWAY:
            self._note_return(account)
        account.phase = phase
        account.since, account.seen = self._at, self._columns.copy()

    def _note_return(self, account: _Account) -> None:
        if account.phase is _Phase.AWAY:
            account.preempted_during[-1] = (account.preempted_during[-1][0], self._at)

    def _decodes(self, account: _Account) -> None:
        self._move(account, _Phase.DECODING)
        account.stalled = False
        if getattr(account.request.params, "stop", None):
            self.decoding.append((account.request.request_id, dict(account.seconds), self.decode_seconds))

    def _note_moves(self, out: SchedulerOutput) -> None:
        for name in out.stalled:
            account = self._accounts[name]
            account.stalled = True
            if account.phase is _Phase.DECODING:
                self._move(account, _Phase.STALLED)
        for name, by in out.preempted_for.items():
            if name not in self._accounts:  # the request ended between two steps
                continue
            account = self._accounts[name]
            self._move(account, _Phase.AWAY)
            account.step = out.step
            account.stalled = False
            account.back_at = account.request.num_ever_computed
            if by:
                account.preempted_by = [*(name for name in account.preempted_by if name != by), by][-_MAX_NAMES:]
        for row in out.joined if out.num_tokens else ():  # otherwise the scheduler put them back
            account = self._accounts[row.request_id]
            account.step = out.step
            if account.phase is _Phase.WAITING:
                self._move(account, _Phase.JOINED)

    def _share_of_decodes(self, out: SchedulerOutput) -> float:
        """Fraction of a step's time that its decode rows would have needed in a step without the prefills."""
        prompts = [chunk for chunk in out.chunks if chunk.why not in ("stalled", "verify")]
        num_decodes = out.num_decodes + len(out.chunks) - len(prompts)
        if not prompts or not num_decodes:
            return 0.0 if prompts else 1.0
        whole_step = StepFeatures.of(num_decodes, out.context_tokens, prompts, out.kind_bytes, out.shared_tokens)
        decodes_only = whole_step._replace(prefill_tokens=0, prefill_context=0.0)
        return min(1.0, self._model.step_seconds(decodes_only) / self._model.step_seconds(whole_step))

    def _inherit(self, account: _Account, source: _Account) -> None:
        self._charge(source)
        self._note_return(source)
        account.seconds, account.preempted_by = source.seconds.copy(), source.preempted_by.copy()
        account.preempted_during = source.preempted_during.copy()
        account.since, account.seen = self._at, self._columns.copy()

    def _release(self, source_id: str, source: _Account) -> None:
        """Charge the other answers of a request separately from now on, because the first answer has computed their
        common prompt."""
        for account in self._hanging.pop(source_id):
            self._inherit(account, source)
            account.phase = _Phase.WAITING


def _source(account: _Account) -> Request:
    if account.request.source is None:
        raise LookupError(f"{account.request.request_id} waits for nobody's prompt")
    return account.request.source


def causes_until(begun: Mapping[str, float], then: DecodeSeconds, now: DecodeSeconds) -> dict[str, float]:
    """Cause -> seconds, for a sequence that has decoded without a break since the totals were ``then``. ``begun`` and
    ``then`` come from an entry of :attr:`CauseLedger.decoding`; ``now`` are the current totals."""
    causes = dict(begun)
    for name, before, after in zip(_RUNS, then, now, strict=True):
        causes[name] = causes.get(name, 0.0) + max(0.0, after - before)
    return causes
