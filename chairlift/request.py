"""The life of one request, as the brain sees it: tokens known, tokens computed, where it stands."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

from chairlift.errors import InvariantError
from chairlift.kv_cache.prefix_node import PrefixNode
from chairlift.outputs import FinishReason

__all__ = [
    "LEGAL_TRANSITIONS",
    "NOT_REFUSED",
    "NO_PROMISE",
    "SIZE_UNKNOWN",
    "DecodeClock",
    "Request",
    "RequestStatus",
    "Service",
]


class RequestStatus(enum.Enum):
    """Where a request stands. SWAPPED is a preempted request whose KV is kept in host memory."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


LEGAL_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    # From RUNNING back to WAITING where an admission is undone before its first step.
    RequestStatus.RUNNING: frozenset(set(RequestStatus) - {RequestStatus.RUNNING}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    # From SWAPPED to PREEMPTED where the saved KV turned out to be lost.
    RequestStatus.SWAPPED: frozenset({RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """What a request was promised. Times are seconds on the engine's clock."""

    service_class: str = "default"
    tenant: str = ""
    """Who is charged for it."""
    first_token_by: float = math.inf
    finish_by: float = math.inf
    seconds_per_token: float = math.inf
    """Longest mean time per token of the decode phase that the request allows."""
    retention: int = 0
    """How long its blocks stay in the prefix cache when it leaves: 0, or 1 or 2 to outlast those below."""

    @property
    def has_deadline(self) -> bool:
        return self.first_token_by < math.inf or self.finish_by < math.inf


NO_PROMISE: Service = Service()


class DecodeClock:
    """A counter that ticks once per decode step. All decoding requests share one, so one tick advances all of them."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


NOT_REFUSED = (-1, -1, 0.0)
SIZE_UNKNOWN = -1
_STILL = DecodeClock()  # never ticks: the clock of every request that does not decode with the others


class Request:
    """One sequence: a prompt, the tokens generated so far, and how many of them have their KV computed.

    There are no phases. ``num_tokens - num_computed_tokens`` is the work left before the next token can be sampled,
    whether it is a prompt, a chunk of one, one decode token, or a recompute after preemption.
    """

    __slots__ = (
        "_clock",
        "_computed",
        "_joined_at",
        "adapter_id",
        "admitted_at_step",
        "arrival_time",
        "block_ids",
        "cache_salt",
        "due_at",
        "finish_reason",
        "is_guaranteed",
        "is_guided",
        "is_ready",
        "last_node",
        "limit",
        "max_total_tokens",
        "may_draft",
        "may_share",
        "min_tokens",
        "num_accepted_predicted",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_ever_computed",
        "num_out_of_reach",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_rejected_predicted",
        "num_sample_positions",
        "params",
        "prediction",
        "priority",
        "progress_mark",
        "refused_at",
        "request_id",
        "reserved",
        "resumed_at_step",
        "retention",
        "sampling",
        "sequence",
        "service",
        "short_of_blocks",
        "siblings",
        "size",
        "slot",
        "source",
        "start_by",
        "status",
        "stop_reason",
        "stop_token_ids",
        "times_passed",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        *,
        max_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str = "",
        adapter_id: int = 0,
        params: Any = None,
        sampling: Any = None,
        service: Service = NO_PROMISE,
        source: Request | None = None,
        may_share: bool = True,
        min_tokens: int = 0,
        prediction: tuple[int, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + max_tokens
        self.stop_token_ids = stop_token_ids
        self.arrival_time = arrival_time
        self.priority = priority
        """Lower goes first."""
        self.service = service
        self.start_by = math.inf
        """When it must start at the latest to keep its deadlines, in the policy's opinion; infinite without any."""
        self.cache_salt = cache_salt
        self.adapter_id = adapter_id
        self.params = params
        """What the front end keeps with the request; the brain never looks inside."""
        self.sampling = sampling
        """What the executor needs to sample; the brain only carries it."""
        self.min_tokens = min_tokens
        """The answer has no fewer, unless its caller leaves."""
        self.prediction = prediction
        """A text that the answer is expected to repeat. It changes no token."""
        self.source = source
        """The request whose prompt this one shares (``n > 1``): its blocks are shared when it is still there."""
        self.may_share = may_share
        """Whether KV that others computed may stand in for computing the prompt."""
        self.status = RequestStatus.WAITING
        self.is_ready = True
        """Whether it may join: not before its grammar is compiled."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.sequence = 0
        """Order of arrival, set by the scheduler."""
        self.size = SIZE_UNKNOWN
        """Tokens that it had to compute when it joined; while it waits, as far as known when it was queued."""
        self.slot = -1
        """Permanent row in the executor's InputBatch while running; -1 otherwise."""
        self.limit = self.max_total_tokens - 1
        """KV positions after which this row stops computing (the last token sampled is never an input)."""
        self._begin_books()

    def _begin_books(self) -> None:
        """What scheduler and KV cache write down about a request."""
        self.is_guided = False
        """Whether a grammar or a thinking budget says what may come next. Drafts must be allowed there, too."""
        self.may_draft = True
        """Whether it may have drafts: not after a grammar broke behind one."""
        self.siblings: list[Request] = []
        """Requests that wait for this one's prompt to be computed, then fork from it."""
        self.num_sample_positions = 1
        """How many of its last positions the chunk that reaches the newest known token samples; fewer where it is
        shorter. The request takes the token of the last one; the others are dropped."""
        self.block_ids: list[list[int]] = []
        """The block table, one list per cache group."""
        self.num_out_of_reach: list[int] = []
        """Per cache group: leading table entries that a sliding window has left behind and given back."""
        self.is_guaranteed = False
        """Whether it can always go on: it may reacquire the blocks that its sliding windows released."""
        self.reserved: list[tuple[int, int]] = []
        """Per cache group: blocks reserved for it, and how many of them it does not hold now."""
        self.num_published = 0
        """Leading full blocks already offered to the prefix cache."""
        self.last_node: PrefixNode | None = None
        """The prefix-cache node of the last published block."""
        self.retention = self.service.retention
        """How long its blocks stay in the prefix cache when it leaves: 0, or 1 or 2 to outlast those below."""
        self.num_cached_tokens = 0
        """Prompt tokens read from the prefix cache at first admission."""
        self.num_charged_tokens = 0
        """Computed tokens of this admission that its tenant has been charged for."""
        self.num_accepted_predicted = self.num_rejected_predicted = 0
        """Drafts from :attr:`prediction` that were right, and that were not."""
        self.num_preemptions = 0
        self.progress_mark = -1
        """Number of known tokens at the last admission; a victim must have more."""
        self.admitted_at_step = -1
        """Step in which it was given its row."""
        self.resumed_at_step = -1
        """Tokens that earlier steps sample for this request are out of date and dropped."""
        self.short_of_blocks = False
        """Whether it runs, lost blocks at the end of its table, and waits for as many."""
        self.num_ever_computed = 0
        """Most positions it had computed before it lost some."""
        self.due_at = -1
        """Tick of the decode clock at which the scheduler must look at this decoding request next."""
        self.refused_at: tuple[int, int, float] = NOT_REFUSED
        """State of the KV cache, reserve and watermark at which this request last did not fit."""
        self.times_passed = 0
        """How often a later request was admitted past this one."""
        self._computed = 0
        self._clock = _STILL
        self._joined_at = 0

    @property
    def num_computed_tokens(self) -> int:
        """Leading positions whose KV is computed, or will be by the steps already scheduled."""
        return self._computed + self._clock.count - self._joined_at

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        if self._clock is not _STILL:
            raise InvariantError(f"{self.request_id} advances with the decode clock; leave it before setting tokens")
        self._computed = value

    @property
    def num_tokens(self) -> int:
        """Tokens known, plus the placeholder of one that a scheduled step is about to sample."""
        return max(len(self.token_ids), self.num_computed_tokens + 1)

    @property
    def reserve(self) -> int:
        """Positions that must have blocks before it may run: all that it may ever need, or what is known."""
        return self.limit if self.is_guaranteed else len(self.token_ids)

    @property
    def was_preempted(self) -> bool:
        """Whether it had a row before and lost it, to another request or to an update of the weights."""
        return bool(self.num_preemptions or self.num_ever_computed)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def decoding(self) -> bool:
        """Whether this request advances by one token with every tick of the decode clock."""
        return self._clock is not _STILL

    def join(self, clock: DecodeClock) -> None:
        """Advance by one position with every tick of ``clock`` from now on."""
        self._clock = clock
        self._joined_at = clock.count

    def leave(self) -> None:
        """Stop advancing with the decode clock. The position that was reached stays."""
        self._computed = self.num_computed_tokens
        self._clock = _STILL
        self._joined_at = 0

    def move_to(self, status: RequestStatus) -> None:
        """Change status along :data:`LEGAL_TRANSITIONS`; raises InvariantError for any other change."""
        if status not in LEGAL_TRANSITIONS[self.status]:
            raise InvariantError(
                f"request {self.request_id}: {self.status.name} -> {status.name} is not a legal change"
            )
        self.status = status

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, tokens={len(self.token_ids)},"
            f" computed={self.num_computed_tokens}, slot={self.slot})"
        )
