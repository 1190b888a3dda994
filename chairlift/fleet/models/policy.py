"""Decides which of several models are loaded, which is unloaded for another, and which requests wait.

The rules, in the order in which they apply:

- The memory of all models that are loaded, being loaded or being unloaded stays within a budget. One model is loaded
  at a time. The models with waiting requests are loaded in the order of their oldest request.
- The least recently used models without requests are unloaded first. If they are not enough and the oldest request has
  waited for ``patience`` seconds, models with running requests are drained: their new requests wait, and they are
  unloaded after their last running request. So nobody waits for ever.
- A model is not unloaded for another before it was loaded for a multiple of the time that its load took. So a model's
  place is used for loading at most a fixed share of the time, whatever the traffic.
- Pinned models are loaded at the start and stay.

The module has no clock, no processes and no requests: the caller reports events with their times, and follows the
actions of :meth:`ModelPolicy.next`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["Action", "ActionKind", "ModelPolicy", "ModelState", "ModelView", "PolicyLimits", "Refusal", "Ticket"]

_MAX_RETRY: Final = 60.0


class ModelState(enum.StrEnum):
    """Whether a model can serve requests."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"
    """The last loads failed, or the model can never fit. Requests are refused with the reason."""


class ActionKind(enum.Enum):
    """What the caller of :class:`ModelPolicy` must do."""

    LOAD = "load"
    """Start the model's engine; report :meth:`ModelPolicy.loaded` or :meth:`ModelPolicy.failed`."""
    UNLOAD = "unload"
    """End the model's engine, which has no requests; report :meth:`ModelPolicy.unloaded`."""
    CANCEL = "cancel"
    """The load takes too long: end the engine; report :meth:`ModelPolicy.failed`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """One order of the policy."""

    kind: ActionKind
    model: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLimits:
    """Constants of the policy. Times are seconds."""

    memory_bytes: int
    """Memory of all models together."""
    max_waiting: int = 256
    """Maximum number of requests that wait for a load."""
    residency: float = 2.0
    """A loaded model stays at least this many times as long as its load took."""
    least_residency: float = 1.0
    most_residency: float = 30.0
    patience: float = 10.0
    """Time that the oldest request waits before a model with running requests is drained for it."""
    load_timeout: float = 600.0
    """Time after which a load counts as failed."""
    max_tries: int = 3
    """Number of loads in a row that may die before the model counts as failed."""
    first_pause: float = 0.2
    """Time between a load that died and the next try. It doubles with each try."""
    cooldown: float = 30.0
    """Time during which requests for a failed model are refused without another try."""


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """One request that waits for its model or uses it."""

    model: str
    arrived: float
    number: int
    """Place in the order of arrival."""
    admitted: bool = False
    """Whether the request may use the model now."""
    failure: str = ""
    """Reason why the request can never use the model; empty if it waits or was admitted."""
    left: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why a request may not wait."""

    message: str
    retry_after: float
    failed: bool = False
    """Whether the model itself has failed. Otherwise too many requests wait."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """State of one model, for people."""

    name: str
    state: ModelState
    reason: str
    """Why the model has failed; empty otherwise."""
    pinned: bool
    num_bytes: int
    num_running: int
    num_waiting: int
    position: int | None
    """Place of the model among the models that wait for their load, from 1; None if it does not wait."""
    expires_at: float
    """Time at which the model is unloaded if it stays without requests; infinity: only when memory is needed."""
    num_loads: int
    num_unloads: int
    num_failures: int
    load_seconds: float
    """Time that the last load took; 0 before the first."""


class _Model:
    """What the policy knows of one model."""

    def __init__(self, name: str, num_bytes: int, pinned: bool, keep_seconds: float) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self.pinned = pinned
        self.default_keep = keep_seconds
        self.keep_seconds = keep_seconds
        self.state = ModelState.UNLOADED
        self.reason = ""
        self.running = 0
        self.waiting: list[Ticket] = []
        self.draining = False
        self.cancelled = False
        self.changed = 0.0
        """Time at which the state began."""
        self.last_used = 0.0
        self.load_seconds = 0.0
        self.tries = 0
        self.not_before = 0.0
        """Earliest time of the next load, after a load that died."""
        self.num_loads = self.num_unloads = self.num_failures = 0

    @property
    def holds_memory(self) -> bool:
        return self.state in (ModelState.LOADING, ModelState.LOADED, ModelState.UNLOADING)

    @property
    def is_idle(self) -> bool:
        return self.state is ModelState.LOADED and not self.running and not self.waiting

    @property
    def expires_at(self) -> float:
        return math.inf if self.pinned else self.last_used + self.keep_seconds

    def settle(self, state: ModelState, now: float) -> None:
        self.state = state
        self.changed = now
        self.draining = self.cancelled = False


class ModelPolicy:
    """The state of all models and their requests. Times must not decrease."""

    def __init__(self, limits: PolicyLimits) -> None:
        self.limits = limits
        self._models: dict[str, _Model] = {}
        self._pinned_bytes = 0
        self._next_number = 0

    # -- models ----------------------------------------------------------------------------------------------------

    def add(self, name: str, num_bytes: int, *, pinned: bool = False, keep_seconds: float = math.inf) -> None:
        """Add a model that needs ``num_bytes`` while it is loaded. It is unloaded after ``keep_seconds`` without
        requests."""
        self._models[name] = _Model(name, num_bytes, pinned, keep_seconds)
        self._pinned_bytes += num_bytes if pinned else 0

    def problem(self, name: str) -> str | None:
        """Reason why the model can never be loaded beside the pinned models; None if it can."""
        model = self._models[name]
        pinned = self._pinned_bytes - (model.num_bytes if model.pinned else 0)
        if model.num_bytes + pinned <= self.limits.memory_bytes:
            return None
        beside = f" beside the {pinned:,} of the pinned models" if pinned else ""
        return (
            f"it needs {model.num_bytes:,} bytes of memory{beside}, and all models together may have"
            f" {self.limits.memory_bytes:,} (models_memory_bytes); raise it, or lower the model's kv_cache_memory_bytes"
        )

    def keep(self, name: str, seconds: float | None) -> None:
        """Unload the model after ``seconds`` without requests: 0 at once, infinity never; None: as in the settings.
        Models that are pinned by the settings stay."""
        model = self._models[name]
        model.keep_seconds = model.default_keep if seconds is None else seconds

    @property
    def used_bytes(self) -> int:
        """Memory of all models that hold some."""
        return sum(model.num_bytes for model in self._models.values() if model.holds_memory)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a load."""
        return sum(len(model.waiting) for model in self._models.values())

    def view(self, name: str) -> ModelView:
        """State of one model."""
        model = self._models[name]
        line = [each.name for each in self._line()]
        return ModelView(
            name=name,
            state=ModelState.FAILED if self.problem(name) else model.state,
            reason=self.problem(name) or (model.reason if model.state is ModelState.FAILED else ""),
            pinned=model.pinned,
            num_bytes=model.num_bytes,
            num_running=model.running,
            num_waiting=len(model.waiting),
            position=line.index(name) + 1 if name in line else None,
            expires_at=model.expires_at,
            num_loads=model.num_loads,
            num_unloads=model.num_unloads,
            num_failures=model.num_failures,
            load_seconds=model.load_seconds,
        )

    def position(self, ticket: Ticket) -> int:
        """Place of a waiting request among all that wait for a load, from 1; 0 if it does not wait."""
        waiting = [each.number for model in self._models.values() for each in model.waiting]
        return 0 if ticket.number not in waiting else 1 + sum(number < ticket.number for number in waiting)

    # -- requests --------------------------------------------------------------------------------------------------

    def enter(self, name: str, now: float) -> Ticket | Refusal:
        """A request for a model arrives. The ticket is admitted at once, or waits; see :meth:`leave`."""
        model = self._models[name]
        if (problem := self.problem(name)) is not None:
            return Refusal(problem, _MAX_RETRY, failed=True)
        if model.state is ModelState.FAILED:
            again = model.changed + self.limits.cooldown
            if now < again:
                return Refusal(model.reason, max(1.0, again - now), failed=True)
            model.settle(ModelState.UNLOADED, now)
            model.tries = 0
        usable = model.state is ModelState.LOADED and not model.draining
        if not usable and self.num_waiting >= self.limits.max_waiting:
            return Refusal(f"{self.num_waiting} requests wait for models to be loaded", self.retry_after(name, now))
        ticket = Ticket(name, now, self._next_number)
        self._next_number += 1
        if usable:
            self._admit(model, ticket, now)
        else:
            model.waiting.append(ticket)
        return ticket

    def leave(self, ticket: Ticket, now: float) -> None:
        """A request has ended, or does not wait any more. Does nothing for a request that has left."""
        if ticket.left:
            return
        ticket.left = True
        model = self._models[ticket.model]
        if ticket in model.waiting:
            model.waiting.remove(ticket)
        elif ticket.admitted:
            model.running -= 1
            model.last_used = now

    def retry_after(self, name: str, now: float) -> float:
        """Seconds, from 1 to 60, after which a request for the model may find room."""
        line = [each for each in self._line() if each.name != name]
        known = [each.load_seconds for each in self._models.values() if each.load_seconds]
        usual = sum(known) / len(known) if known else 1.0
        seconds = sum((each.load_seconds or usual) + self._least_stay(each) for each in line)
        return min(_MAX_RETRY, max(1.0, math.ceil(seconds + usual)))

    def _admit(self, model: _Model, ticket: Ticket, now: float) -> None:
        ticket.admitted = True
        model.running += 1
        model.last_used = now

    # -- events of engines -----------------------------------------------------------------------------------------

    def loaded(self, name: str, now: float) -> list[Ticket]:
        """A load has succeeded. Returns the requests that may now use the model."""
        model = self._models[name]
        model.load_seconds = now - model.changed
        model.settle(ModelState.LOADED, now)
        model.tries = 0
        model.last_used = now
        model.num_loads += 1
        return self._admit_waiting(model, now)

    def failed(self, name: str, reason: str, now: float, *, again: bool) -> list[Ticket]:
        """A load has failed. ``again``: another try may succeed. Returns the requests that fail with it."""
        model = self._models[name]
        model.num_failures += 1
        model.tries += 1
        return self._stop_or_try_again(model, reason, now, again=again and not model.cancelled)

    def died(self, name: str, reason: str, now: float) -> list[Ticket]:
        """The engine of a loaded model has died. Its running requests end by themselves (:meth:`leave`). Returns the
        waiting requests that fail with it: none, unless the engine has died again and again."""
        model = self._models[name]
        model.num_failures += 1
        if now - model.changed > self.limits.cooldown:
            model.tries = 0
        model.tries += 1
        return self._stop_or_try_again(model, reason, now, again=True)

    def _stop_or_try_again(self, model: _Model, reason: str, now: float, *, again: bool) -> list[Ticket]:
        lost: list[Ticket] = []
        if again and model.tries < self.limits.max_tries:
            model.settle(ModelState.UNLOADED, now)
            model.not_before = now + self.limits.first_pause * 2 ** (model.tries - 1)
        else:
            lost, model.waiting = model.waiting, []
            model.reason = reason
            model.settle(ModelState.FAILED, now)
        for ticket in lost:
            ticket.failure = reason
            ticket.left = True
        return lost

    def unloaded(self, name: str, now: float) -> None:
        """The engine of a model has ended as ordered."""
        model = self._models[name]
        model.settle(ModelState.UNLOADED, now)
        model.num_unloads += 1
        model.keep_seconds = model.default_keep

    def _admit_waiting(self, model: _Model, now: float) -> list[Ticket]:
        admitted, model.waiting = model.waiting, []
        for ticket in admitted:
            self._admit(model, ticket, now)
        return admitted

    # -- decisions -------------------------------------------------------------------------------------------------

    def next(self, now: float) -> tuple[list[Action], list[Ticket]]:
        """(Actions to follow now, waiting requests that were admitted). Call it after every event, and at
        :meth:`wake_at`."""
        actions: list[Action] = []
        for model in self._models.values():
            if self._tries_again_at(model) <= now:
                model.settle(ModelState.UNLOADED, now)
                model.tries = 0
            elif model.state is ModelState.LOADING and not model.cancelled and now >= self._load_deadline(model):
                model.cancelled = True
                actions.append(Action(ActionKind.CANCEL, model.name))
            elif model.is_idle and now >= model.expires_at:
                actions.append(self._unload(model, now))
        head = self._head(now)
        victims = [] if head is None else self._victims(head, now)
        admitted = self._drain(victims, now)
        actions += [self._unload(each, now) for each in victims if not each.running and each.state is ModelState.LOADED]
        if head is not None and self._free_bytes >= head.num_bytes and not self._is_loading:
            head.settle(ModelState.LOADING, now)
            actions.append(Action(ActionKind.LOAD, head.name))
        return actions, admitted

    def wake_at(self, now: float) -> float:
        """Time after ``now`` at which :meth:`next` may have something to do without an event; infinity if there is no
        such time."""
        return min((when for when in self._times() if when > now), default=math.inf)

    def _times(self) -> Iterator[float]:
        """Times at which a decision may change."""
        waits = self._line()
        for model in self._models.values():
            yield self._tries_again_at(model)
            if model.state is ModelState.LOADING and not model.cancelled:
                yield self._load_deadline(model)
            if model.is_idle:
                yield model.expires_at
            if waits and model.state is ModelState.LOADED:
                yield self._may_go_at(model)
        for model in waits:
            yield model.not_before
            if model.waiting:
                yield model.waiting[0].arrived + self.limits.patience

    @property
    def _free_bytes(self) -> int:
        return self.limits.memory_bytes - self.used_bytes

    @property
    def _is_loading(self) -> bool:
        return any(model.state is ModelState.LOADING for model in self._models.values())

    def _line(self) -> list[_Model]:
        """Models that wait for their load: pinned ones first, then in the order of their oldest request."""
        wanted = [
            model
            for model in self._models.values()
            if model.state is ModelState.UNLOADED and (model.waiting or model.pinned) and not self.problem(model.name)
        ]
        return sorted(wanted, key=lambda model: (not model.pinned, model.waiting[0].number if model.waiting else 0))

    def _head(self, now: float) -> _Model | None:
        """The model that is loaded next; None if none waits, or while another is being loaded."""
        if self._is_loading:
            return None
        return next((model for model in self._line() if now >= model.not_before), None)

    def _least_stay(self, model: _Model) -> float:
        limits = self.limits
        return min(limits.most_residency, max(limits.least_residency, limits.residency * model.load_seconds))

    def _may_go_at(self, model: _Model) -> float:
        """Time at which a model may be unloaded for another."""
        return model.changed + self._least_stay(model)

    def _load_deadline(self, model: _Model) -> float:
        return model.changed + self.limits.load_timeout

    def _tries_again_at(self, model: _Model) -> float:
        """Time at which a pinned model that has failed is tried again without a request; infinity for others."""
        waits = model.pinned and model.state is ModelState.FAILED
        return model.changed + self.limits.cooldown if waits else math.inf

    def _victims(self, head: _Model, now: float) -> list[_Model]:
        """Models to unload or drain for ``head``; empty if it fits, or if not enough may go yet."""
        coming = sum(model.num_bytes for model in self._models.values() if model.state is ModelState.UNLOADING)
        missing = head.num_bytes - self._free_bytes - coming
        may_go = [
            model
            for model in self._models.values()
            if model.state is ModelState.LOADED and not model.pinned and now >= self._may_go_at(model)
        ]
        order = sorted((each for each in may_go if each.is_idle), key=lambda each: (each.last_used, each.name))
        if (chosen := _enough(order, missing)) is not None:
            return chosen
        asked = head.waiting[0].arrived if head.waiting else now - self.limits.patience
        if now < asked + self.limits.patience:
            return []
        rest = [each for each in may_go if not each.is_idle]
        order += sorted(rest, key=lambda each: (not each.draining, each.changed, each.name))
        return _enough(order, missing) or []

    def _drain(self, victims: Sequence[_Model], now: float) -> list[Ticket]:
        """Let the victims admit no more requests, and all others admit again. Returns the admitted requests."""
        admitted: list[Ticket] = []
        for model in self._models.values():
            model.draining = model in victims
            if model.state is ModelState.LOADED and not model.draining:
                admitted += self._admit_waiting(model, now)
        return admitted

    def _unload(self, model: _Model, now: float) -> Action:
        model.settle(ModelState.UNLOADING, now)
        return Action(ActionKind.UNLOAD, model.name)


def _enough(models: Sequence[_Model], missing: int) -> list[_Model] | None:
    """First models whose memory together is at least ``missing`` bytes, without those that are not needed for it; None
    if all are not enough."""
    chosen: list[_Model] = []
    total = 0
    for model in models:
        if total >= missing:
            break
        chosen.append(model)
        total += model.num_bytes
    if total < missing:
        return None
    for model in reversed(chosen[:-1]):
        if total - model.num_bytes >= missing:
            chosen.remove(model)
            total -= model.num_bytes
    return chosen
