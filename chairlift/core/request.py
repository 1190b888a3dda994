"""State of one request in the scheduler: known tokens, computed tokens, and status."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING, Any

from chairlift.base.image_spans import ImageSpan
from chairlift.base.outputs import FinishReason
from chairlift.base.turn_cache import ResumedTurn
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.errors import InvariantError

if TYPE_CHECKING:
    from chairlift.core.rows.kind import RowKind

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
    """Status of a request. PREEMPTED and SWAPPED requests have lost their row; the KV of a SWAPPED request is in host
    memory."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


LEGAL_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    # A request goes from RUNNING back to WAITING when its admission is undone before its first step.
    RequestStatus.RUNNING: frozenset(set(RequestStatus) - {RequestStatus.RUNNING}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    # A request goes from SWAPPED to PREEMPTED when its saved KV was lost.
    RequestStatus.SWAPPED: frozenset({RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """Class of service, tenant and deadlines of a request. Times are seconds on the engine's clock."""

    service_class: str = "default"
    tenant: str = ""
    """Tenant whose usage includes the tokens of this request."""
    first_token_by: float = math.inf
    finish_by: float = math.inf
    seconds_per_token: float = math.inf
    """Maximum mean time per token in the decode phase, in seconds."""
    retention: int = 0
    """Rank of the request's blocks in the prefix cache after the request has left the batch: 0, 1 or 2. Blocks of a
    higher rank are evicted later."""
    session: str = ""
    """Name of the conversation or program that the request is a turn of. Only policies and routers read it; only
    policies read the next two."""
    tool: str = ""
    """Name of the tool that the client calls after the answer; empty if it calls none, or if this is unknown."""
    predicted_tokens: int | None = None
    """Predicted number of tokens of the answer; None without a prediction."""
    leases: tuple[tuple[int, float], ...] = ()
    """(number of leading tokens of the prompt whose blocks are to be kept, seconds after their last use)."""
    payer: str = ""
    """Tenant whose part of the budget these leases take. It may differ from the tenant that is charged for tokens."""

    @property
    def has_deadline(self) -> bool:
        return self.first_token_by < math.inf or self.finish_by < math.inf


NO_PROMISE: Service = Service()


class DecodeClock:
    """A counter that ticks once per decode step. All decoding requests share one clock, so one tick advances all of
    them."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


NOT_REFUSED = (-1, -1, 0.0)
SIZE_UNKNOWN = -1
_STILL = DecodeClock()  # never ticks; the clock of every request that is not decoding


class Request:
    """One sequence: a prompt, the tokens generated so far, and the number of tokens whose KV is computed.

    Prefill and decode are not separate phases. ``num_tokens - num_computed_tokens`` is the work before the next token
    can be sampled: a prompt, a chunk of one, one decode token, or a recompute after preemption.
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
        "has_copies",
        "images",
        "is_guaranteed",
        "is_guided",
        "is_queued",
        "is_ready",
        "kinds",
        "last_node",
        "limit",
        "mask_seconds",
        "max_total_tokens",
        "may_draft",
        "may_share",
        "min_tokens",
        "num_accepted_predicted",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_disk_tokens",
        "num_ever_computed",
        "num_host_tokens",
        "num_out_of_reach",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_rejected_predicted",
        "num_sample_positions",
        "num_shared_blocks",
        "params",
        "prediction",
        "priority",
        "progress_mark",
        "refused_at",
        "request_id",
        "reserved",
        "resumed",
        "resumed_at_step",
        "retention",
        "row_order",
        "rows_lost_until",
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
        "waits_for",
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
        images: tuple[ImageSpan, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + max_tokens
        self.stop_token_ids = stop_token_ids
        self.arrival_time = arrival_time
        self.priority = priority
        """Priority for the scheduling policy; lower values are served first."""
        self.service = service
        self.start_by = math.inf
        """Latest start time that still meets its deadlines, set by the policy; infinite without deadlines."""
        self.cache_salt = cache_salt
        self.adapter_id = adapter_id
        self.params = params
        """Object that the front end keeps with the request; the scheduler does not read it."""
        self.sampling = sampling
        """Sampling parameters for the executor; the scheduler does not read them."""
        self.min_tokens = min_tokens
        """Minimum number of generated tokens."""
        self.prediction = prediction
        """Token ids that the answer is expected to repeat. They do not change the answer."""
        self.images = images
        """Spans of the prompt whose input vectors come from an encoded image instead of token embeddings."""
        self.source = source
        """Another request with the same prompt (``n > 1``), whose blocks are shared as long as it exists."""
        self.may_share = may_share
        """Whether cached KV may be used instead of computing the prompt."""
        self.status = RequestStatus.WAITING
        self.is_ready = True
        """Whether a step may compute the request. False while its grammar, adapter, images or next mask are made."""
        self.finish_reason: FinishReason | None = None
        self.sequence = 0
        """Number of the request in the order of arrival, set by the scheduler."""
        self.size = SIZE_UNKNOWN
        """Number of tokens to compute at admission. While the request waits: an estimate."""
        self.slot = -1
        """Permanent row in the executor's InputBatch while running; -1 otherwise."""
        self.limit = self.max_total_tokens - 1
        """Number of KV positions at which the request stops computing. (The last sampled token is never an input.)"""
        self._begin_books()

    def _begin_kv(self) -> None:
        """Initialise the fields that the KV cache maintains."""
        self.block_ids: list[list[int]] = []
        """The block table: one list of block ids per cache group."""
        self.num_out_of_reach: list[int] = []
        """Per cache group: number of leading table entries that a sliding window has passed and released."""
        self.is_guaranteed = False
        """Whether the request can always continue: blocks that its windows released stay reserved for it."""
        self.reserved: list[tuple[int, int]] = []
        """Per cache group: (number of reserved blocks, number of reserved blocks that the request does not hold
        now)."""
        self.num_published = 0
        """Number of leading full blocks that were published to the prefix cache."""
        self.num_shared_blocks = 0
        """Number of blocks with K and V that the last admission shared with running requests."""
        self.last_node: PrefixNode | None = None
        """The prefix-cache node of the last published block."""
        self.has_copies = False
        """Whether the request has computed a block that the prefix cache had already, of another request."""
        self.retention = self.service.retention
        """Rank of the request's blocks in the prefix cache after the request has left the batch: 0, 1 or 2. Blocks of a
        higher rank are evicted later."""
        self.num_cached_tokens = 0
        """Prompt tokens read from the prefix cache at first admission. The next fields: those of them whose KV came
        back from host memory, and from disk."""
        self.num_host_tokens = 0
        self.num_disk_tokens = 0

    def _begin_books(self) -> None:
        """Initialise the fields that the engine maintains."""
        self._begin_kv()
        self.stop_reason: int | str | None = None
        self.is_guided = False
        """Whether a grammar or a thinking budget restricts the request's tokens, and so its drafts."""
        self.mask_seconds = 0.0
        """Expected seconds for which the request waits alone for the mask of each token; 0 if its masks are not
        slow."""
        self.may_draft = True
        """Whether the request may have drafts. False after its grammar failed on a draft."""
        self.siblings: list[Request] = []
        """Requests with the same prompt that wait until this request has computed the prompt, and then fork from it."""
        self.num_sample_positions = 1
        """Number of positions, counted from the end of the known tokens, at which the last chunk samples a token. A
        shorter chunk samples at fewer positions. Only the token of the last position is used."""
        self.is_queued = False
        """Whether the policy knows that the request waits for a row."""
        self.rows_lost_until = 0
        """End of the last image whose encoded rows are not in memory; 0 if all are. The request joins only if it need
        not compute positions before this one."""
        self.waits_for = ""
        """The reason why the request is not ready: ``adapter`` (being read), ``image`` (being encoded) or empty."""
        self.num_charged_tokens = 0
        """Number of tokens computed since admission that the request's tenant was charged for."""
        self.num_accepted_predicted = self.num_rejected_predicted = 0
        """Number of drafts from :attr:`prediction` that were accepted, and number that were rejected."""
        self.num_preemptions = 0
        self.progress_mark = -1
        """Number of known tokens at the last admission. The request is preempted again only after it has more."""
        self.admitted_at_step = -1
        """Index of the step in which the request got its row."""
        self.resumed: ResumedTurn | None = None
        """The paused turn that this request continues; set when it joins."""
        self.resumed_at_step = -1
        """Index of the step in which the request last resumed. Tokens that earlier steps sample for it are dropped."""
        self.short_of_blocks = False
        """Whether the request keeps its row, but lost its last blocks and waits for new blocks."""
        self.num_ever_computed = 0
        """Largest number of positions that were computed before a preemption discarded some of them. If the request
        computes these positions again, the tokens count as recomputed."""
        self.kinds: tuple[RowKind, ...] = ()
        """The request's kinds among those of the scheduler, which sets them; empty for plain text."""
        self.row_order = 0
        """The decode rows of a step are sorted by this number. A kind may set it when the request is added."""
        self.due_at = -1
        """Tick of the decode clock at which the request needs a new KV block or computes its last token. -1: no such
        tick is known."""
        self.refused_at: tuple[int, int, float] = NOT_REFUSED
        """(change counter of the KV cache, number of positions to get blocks for, watermark) when the request last did
        not fit. It is tried again only after one of the three has changed."""
        self.times_passed = 0
        """Number of later requests that were admitted before this one."""
        self._computed = 0
        self._clock = _STILL
        self._joined_at = 0

    @property
    def num_computed_tokens(self) -> int:
        """Number of leading positions whose KV is computed, or will be by scheduled steps."""
        return self._computed + self._clock.count - self._joined_at

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        if self._clock is not _STILL:
            raise InvariantError(f"{self.request_id} advances with the decode clock; leave it before setting tokens")
        self._computed = value

    @property
    def num_tokens(self) -> int:
        """Number of known tokens, plus one if a scheduled step will sample a token that is not known yet."""
        return max(len(self.token_ids), self.num_computed_tokens + 1)

    @property
    def reserve(self) -> int:
        """Number of positions that must have blocks before the request may run: all that it may ever need if it is
        guaranteed, otherwise the known tokens."""
        return self.limit if self.is_guaranteed else len(self.token_ids)

    @property
    def was_preempted(self) -> bool:
        """Whether the request lost its row, either to another request or because the weights were updated."""
        return bool(self.num_preemptions or self.num_ever_computed)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def decoding(self) -> bool:
        """Whether each tick of the decode clock advances this request by one token."""
        return self._clock is not _STILL

    def join(self, clock: DecodeClock) -> None:
        """From now on, let each tick of ``clock`` advance this request by one position."""
        self._clock = clock
        self._joined_at = clock.count

    def leave(self) -> None:
        """Stop advancing with the decode clock, at the position reached."""
        self._computed = self.num_computed_tokens
        self._clock = _STILL
        self._joined_at = 0

    def move_to(self, status: RequestStatus) -> None:
        """Change the status. Raises InvariantError unless :data:`LEGAL_TRANSITIONS` allows the change."""
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
