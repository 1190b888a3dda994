"""Training scheduler: which sequences of which clients share the next pack, and which step runs between two packs.

Calls of one model run in order. An optimiser step, a save or a load begins when all earlier calls of its model have
ended, and later calls begin when it has ended. Within these limits tenants share the machine by weighted fair queueing
(start-time fair queueing; Goyal et al., 1996): each has a virtual time, which grows by the predicted seconds of its
work divided by its weight, and the tenant with the smallest virtual time goes first. Long calls are divided between
data, so a short call shares the next pack with them instead of waiting for their end.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping

from chairlift.errors import InvariantError
from chairlift_train.service.schedule.prices import WorkPrices
from chairlift_train.service.schedule.work import STEP_KINDS, CallPart, TrainingCall, TrainingPack, TrainingStep

__all__ = ["NoRoomError", "TrainingScheduler"]


class NoRoomError(Exception):
    """Raised for a model that does not fit. The message is for its client."""


@dataclasses.dataclass(slots=True)
class _Queued:
    """A call that has not ended."""

    call: TrainingCall
    given: int = 0
    """Number of data that were handed out in packs."""
    ended: int = 0
    """Number of data whose packs have ended."""


@dataclasses.dataclass(slots=True)
class _Tenant:
    """Models of one API key, or of all callers if there are no keys."""

    name: str
    weight: float
    virtual: float = 0.0
    """Seconds of its work divided by its weight, on the scale of all tenants."""
    clock: float = 0.0
    """Virtual time of the model that was chosen last, on the scale of its models."""
    models: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True)
class _Model:
    """One training run in memory."""

    model_id: str
    tenant: _Tenant
    nbytes: int
    arrival: int
    """Number of models admitted before."""
    virtual: float = 0.0
    """Seconds of its work, on the scale of its tenant's models."""
    calls: deque[_Queued] = dataclasses.field(default_factory=deque)
    step_since_pack: bool = False
    """Whether a step of the model was handed out after the newest pack."""
    last_seq_id: int | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether the next work of the model must wait for work that runs."""
        return not self.calls or (self.calls[0].call.kind in STEP_KINDS and self.calls[0].given > 0)

    def next_pass(self) -> _Queued | None:
        """The first call with data that may be handed out now; None if there is none."""
        for queued in self.calls:
            if queued.call.kind in STEP_KINDS:
                return None
            if queued.given < len(queued.call.lengths):
                return queued
        return None


class TrainingScheduler:
    """Orders training work. One piece of work runs at a time: :meth:`next` is followed by :meth:`done`.

    ``token_budget`` is the maximum number of tokens in a pack, except for a single longer sequence. ``memory`` is the
    number of bytes for models, and ``max_models`` the maximum number of models of one tenant. ``weights`` maps a tenant
    to its weight; others have weight 1.
    """

    def __init__(
        self,
        *,
        token_budget: int,
        memory: int,
        max_models: int = 1 << 30,
        prices: WorkPrices | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.token_budget = token_budget
        self.prices = prices or WorkPrices()
        self.memory = memory
        self._max_models = max_models
        self.num_bytes = 0
        """Bytes of all admitted models."""
        self._weights = dict(weights or {})
        self._tenants: dict[str, _Tenant] = {}
        self._models: dict[str, _Model] = {}
        self._clock = 0.0
        """Virtual time of the tenant that was chosen last. It never decreases."""
        self._running: TrainingPack | TrainingStep | None = None
        self._number = 0
        self._num_admitted = 0

    # -- models ----------------------------------------------------------------------------------------------------

    @property
    def model_ids(self) -> list[str]:
        """Ids of the admitted models, the oldest first."""
        return list(self._models)

    def admit(self, model_id: str, tenant: str, nbytes: int) -> None:
        """Reserve memory for a model. Raises NoRoomError."""
        if model_id in self._models:
            raise InvariantError(f"model {model_id} is there already")
        free = self.memory - self.num_bytes
        if nbytes > free:
            raise NoRoomError(
                f"this adapter needs {nbytes:,} bytes, and {max(0, free):,} of {self.memory:,} are free; use a smaller"
                " rank, or wait until another training run ends"
            )
        owner = self._tenants.get(tenant, _Tenant(tenant, self._weights.get(tenant, 1.0)))
        if len(owner.models) >= self._max_models:
            raise NoRoomError(
                f"{len(owner.models)} adapters are in training for this API key, or for this session if there are no"
                f" keys, and at most {self._max_models} may be (--max-training-adapters-per-key); close the session of"
                " another one"
            )
        self._tenants[tenant] = owner
        owner.models.add(model_id)
        self._models[model_id] = _Model(model_id, owner, nbytes, self._num_admitted)
        self._num_admitted += 1
        self.num_bytes += nbytes

    def remove(self, model_id: str) -> list[int]:
        """Forget a model. Returns the ids of its calls that have not ended. Its running work has no result."""
        model = self._models.pop(model_id)
        self.num_bytes -= model.nbytes
        model.tenant.models.discard(model_id)
        if not model.tenant.models:
            del self._tenants[model.tenant.name]
        return [queued.call.seq_id for queued in model.calls]

    # -- calls -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any call has not ended."""
        return any(model.calls for model in self._models.values())

    def num_waiting(self, model_id: str) -> int:
        """Number of calls of the model that have not ended."""
        return len(self._models[model_id].calls)

    def add(self, call: TrainingCall) -> None:
        """Queue a call. Calls of a model are added in their order."""
        model = self._models[call.model_id]
        if model.last_seq_id is not None and call.seq_id <= model.last_seq_id:
            raise InvariantError(f"call {call.seq_id} of {call.model_id} came after call {model.last_seq_id}")
        if (call.kind in STEP_KINDS) == bool(call.lengths):
            raise InvariantError(f"call {call.seq_id} of {call.model_id}: {call.kind} with {len(call.lengths)} data")
        model.last_seq_id = call.seq_id
        if not model.calls:
            self._wake(model)
        model.calls.append(_Queued(call))

    def _wake(self, model: _Model) -> None:
        """Move the virtual times of a model that was idle up to those of the busy ones. Time in which it had no work
        gives it no claim on later time, and it goes before those that have had as much."""
        tenant = model.tenant
        busy = [each for each in self._models.values() if each.calls]
        own = [each.virtual for each in busy if each.tenant is tenant]
        model.virtual = max(model.virtual, min(own, default=tenant.clock))
        if not own:
            tenant.virtual = max(tenant.virtual, min((each.tenant.virtual for each in busy), default=self._clock))

    def cancel(self, model_id: str, seq_id: int) -> None:
        """Forget a call whose result is known: it failed in an earlier part. Its parts that run have no result."""
        model = self._models[model_id]
        model.calls = deque(queued for queued in model.calls if queued.call.seq_id != seq_id)

    # -- work ------------------------------------------------------------------------------------------------------

    def next(self) -> TrainingPack | TrainingStep | None:
        """The work to run now; None if there is none.

        Between two packs, each model may have one step. Steps go before the next pack, because their clients' next
        calls may then share it.
        """
        if self._running is not None:
            raise InvariantError("work was asked for while other work runs")
        ready = sorted((each for each in self._models.values() if not each.is_blocked), key=self._order)
        for model in ready:
            if model.calls[0].call.kind in STEP_KINDS and not model.step_since_pack:
                return self._begin_step(model)
        pack = self._pack(self.token_budget)
        for model in self._models.values():
            model.step_since_pack = False
        if pack is None:
            for model in ready:
                if model.calls[0].call.kind in STEP_KINDS:
                    return self._begin_step(model)
        self._running = pack
        return pack

    def _order(self, model: _Model) -> tuple[float, float, int]:
        return (model.tenant.virtual, model.virtual, model.arrival)

    def _begin_step(self, model: _Model) -> TrainingStep:
        queued = model.calls[0]
        queued.given = 1
        model.step_since_pack = True
        self._number += 1
        step = TrainingStep(self._number, queued.call, self.prices.step(queued.call.kind))
        self._choose(model, step.seconds)
        self._running = step
        return step

    def _choose(self, model: _Model, seconds: float) -> None:
        """Note that work of ``seconds`` was chosen because its model is the first in order."""
        self._clock = max(self._clock, model.tenant.virtual)
        model.tenant.clock = max(model.tenant.clock, model.virtual)
        self._charge(model, seconds)

    def _charge(self, model: _Model, seconds: float) -> None:
        model.virtual += seconds
        model.tenant.virtual += seconds / model.tenant.weight

    def _pack(self, budget: int) -> TrainingPack | None:
        """Fill a pack datum by datum; each comes from the model that is first in order. A datum that does not fit
        leaves its room to others, and its model is first in the next pack."""
        chosen: list[tuple[_Model, _Queued, int]] = []
        room = budget
        open_models = {model.model_id: model for model in self._models.values() if model.next_pass() is not None}
        seconds = self.prices.start()
        while open_models:
            model = min(open_models.values(), key=self._order)
            queued = model.next_pass()
            if queued is None:
                del open_models[model.model_id]
                continue
            length = queued.call.lengths[queued.given]
            if length > room and chosen:
                del open_models[model.model_id]
                continue
            cost = self.prices.sequence(length, queued.call.forward_only)
            self._choose(model, cost)
            chosen.append((model, queued, queued.given))
            queued.given += 1
            seconds += cost
            room -= length
            if room <= 0:
                break
        if not chosen:
            return None
        self._number += 1
        parts = _parts(chosen)
        return TrainingPack(self._number, parts, sum(part.num_tokens for part in parts), seconds)

    def done(self, work: TrainingPack | TrainingStep, seconds: float) -> list[tuple[str, int]]:
        """Note that work has ended after ``seconds``. Returns (model id, seq id) of the calls that have ended with
        it."""
        if self._running is not work:
            raise InvariantError(f"work {work.number} ended, but it does not run")
        self._running = None
        if isinstance(work, TrainingStep):
            shares = {work.call.model_id: 1.0}
            ended = self._end(work.call.model_id, work.call.seq_id, 1)
        else:
            self.prices.measured(work.seconds, seconds)
            shares = {}
            ended = []
            for part in work.parts:
                shares[part.model_id] = shares.get(part.model_id, 0.0) + part.num_tokens / work.num_tokens
                ended += self._end(part.model_id, part.seq_id, part.count)
        for model_id, share in shares.items():
            if model_id in self._models:  # what was charged was a prediction
                self._charge(self._models[model_id], share * (seconds - work.seconds))
        return ended

    def _end(self, model_id: str, seq_id: int, count: int) -> list[tuple[str, int]]:
        """Note that ``count`` data of a call, or a step, have ended."""
        model = self._models.get(model_id)
        if model is None:
            return []
        queued = next((each for each in model.calls if each.call.seq_id == seq_id), None)
        if queued is None:
            return []
        queued.ended += count
        if queued.ended < max(1, len(queued.call.lengths)):
            return []
        if queued is not model.calls[0]:
            raise InvariantError(f"call {seq_id} of {model_id} ended before call {model.calls[0].call.seq_id}")
        model.calls.popleft()
        return [(model_id, seq_id)]


def _parts(chosen: list[tuple[_Model, _Queued, int]]) -> tuple[CallPart, ...]:
    """One part per call, in the order in which the calls were first chosen. The data of a call that are in one pack
    follow each other."""
    grouped: dict[tuple[str, int], tuple[_Queued, list[int]]] = {}
    for model, queued, datum in chosen:
        grouped.setdefault((model.model_id, queued.call.seq_id), (queued, []))[1].append(datum)
    parts = []
    for (model_id, seq_id), (queued, data) in grouped.items():
        lengths = queued.call.lengths[data[0] : data[-1] + 1]
        is_last = data[-1] + 1 == len(queued.call.lengths)
        parts.append(CallPart(model_id, seq_id, data[0], len(data), sum(lengths), is_last))
    return tuple(parts)
