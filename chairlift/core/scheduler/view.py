"""What a policy may see of the engine: rows, blocks, predicted times and predicted lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from chairlift.core.request import Request
from chairlift.core.scheduler.answer_lengths import AnswerLengths
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.costs import Costs

if TYPE_CHECKING:
    from chairlift.core.scheduler.batch import Batch

__all__ = ["View"]

_NO_BLOCKS: Final = 1 << 40
"""Number of blocks and positions of a cache that the view does not know."""


class View:
    """A scheduler's state, as a policy may read it. It changes nothing.

    A policy whose constructor has a parameter ``view`` gets one. It is empty until the scheduler that uses the policy
    attaches itself: no row, no request, unlimited blocks, default costs. A fork gets a view of its own, and the
    scheduler that uses the fork attaches itself to that one.

    Times are in seconds, on the engine's clock.
    """

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._costs = Costs([1])
        self._lengths = AnswerLengths()

    def attach(self, batch: Batch, costs: Costs | None, lengths: AnswerLengths | None) -> None:
        """Show this batch. Only the scheduler calls this method."""
        self._batch = batch
        self._costs = costs or self._costs
        self._lengths = lengths or self._lengths

    # -- the step ------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Time at which the newest step was scheduled."""
        return 0.0 if self._batch is None else self._batch.now

    @property
    def step(self) -> int:
        """Number of steps before the one that is being scheduled."""
        return 0 if self._batch is None else self._batch.step

    @property
    def token_budget(self) -> int:
        """Maximum number of tokens of a step."""
        return 0 if self._batch is None else self._batch.token_budget

    @property
    def num_decodes(self) -> int:
        """Number of requests that compute one token in every step."""
        return 0 if self._batch is None else self._batch.decodes.count

    @property
    def num_rows(self) -> int:
        """Number of rows that may be used, whether they are free or not."""
        return 0 if self._batch is None else self._batch.running_limit

    @property
    def free_rows(self) -> int:
        """Number of further requests that may join now."""
        return 0 if self._batch is None else self._batch.free_rows

    @property
    def num_waiting(self) -> int:
        """Number of requests without a row."""
        return 0 if self._batch is None else self._batch.num_waiting

    @property
    def running(self) -> Iterable[Request]:
        """The requests with a row, in the order in which they joined."""
        return () if self._batch is None else self._batch.running.values()

    @property
    def prompts(self) -> Iterable[Request]:
        """The requests with a row that have more than one token to compute."""
        return () if self._batch is None else self._batch.computable()

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt is being computed, or a waiting request could get a free row."""
        return self._batch is not None and self._batch.has_prefill_work

    def prompt_tokens(self, limit: int) -> int:
        """Number of tokens that the running requests and the first waiting ones still have to compute, at most
        ``limit``."""
        return 0 if self._batch is None else self._batch.num_prefill_tokens(limit)

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Number of positions of a block."""
        return 1 if self._batch is None else self._batch.kv.block_size

    @property
    def free_blocks(self) -> int:
        """Number of blocks that hold nothing, summed over all cache groups."""
        return _NO_BLOCKS if self._batch is None else self._batch.kv.counts().free

    @property
    def cached_blocks(self) -> int:
        """Number of blocks that hold only KV for later prompts, summed over all cache groups. They are evicted when
        their memory is needed."""
        return 0 if self._batch is None else self._batch.kv.counts().cached

    @property
    def capacity_tokens(self) -> int:
        """Number of positions that the whole cache holds."""
        return _NO_BLOCKS if self._batch is None else self._batch.kv.capacity_tokens

    def tokens_in_blocks(self, num_tokens: int) -> int:
        """``num_tokens`` rounded up to whole blocks: the part of :attr:`capacity_tokens` that a request of so many
        positions takes."""
        return -(-num_tokens // self.block_size) * self.block_size

    def cached_tokens(self, request: Request) -> int:
        """Number of leading positions whose KV exists: those of a running request, or those that a waiting request
        would not compute if it joined now."""
        return 0 if self._batch is None else self._batch.num_known(request)

    def cached_path(self, request: Request) -> list[int]:
        """One number per leading block of a request that is in the prefix cache. Two requests share these blocks as
        far as their numbers are equal."""
        cache = None if self._batch is None else self._batch.kv.prefix_cache
        if cache is None:
            return []
        return [id(node) for node in cache.walk(request, (len(request.token_ids) - 1) // self.block_size)]

    def uncached_tokens(self, request: Request) -> int:
        """Number of known tokens that are still to be computed; at least 1. It is an estimate while the request
        waits."""
        if request.slot < 0 and request.size >= 0:
            return max(1, request.size)
        return max(1, len(request.token_ids) - request.num_computed_tokens)

    # -- predictions ---------------------------------------------------------------------------------------------

    def answer_tokens(self, request: Request) -> int:
        """Predicted number of tokens of the whole answer: the prediction that came with the request, otherwise the mean
        of recent answers of its class that were at least as long as this one is now."""
        if request.service.predicted_tokens is not None:
            return request.service.predicted_tokens
        return self._lengths.expected(request)

    def tokens_left(self, request: Request) -> int:
        """Predicted number of tokens that the answer still gets; at least 1."""
        return max(1, self.answer_tokens(request) - request.num_output_tokens)

    def recent_answers(self, request: Request) -> list[int]:
        """Lengths of recently ended answers of the request's class of service, oldest first. Lengths of all classes
        while the class has few."""
        return self._lengths.recent(request)

    def prefill_seconds(self, request: Request) -> float:
        """Predicted seconds to compute the request's uncached tokens in steps without other work."""
        rest = self.uncached_tokens(request)
        return self._costs.model.prefill_seconds(rest, max(0, len(request.token_ids) - rest))

    def step_seconds(self, *, rows: int = 0, context: int = 0, tokens: int = 0, begin: int = 0) -> float:
        """Predicted seconds of a step with the present decode rows and with ``rows`` more rows, which attend to
        ``context`` positions together, and with ``tokens`` prompt tokens that follow ``begin`` computed ones."""
        features = StepFeatures()
        if self._batch is not None:
            features = self._batch.features(self.num_decodes)
        return self._costs.model.step_seconds(
            features._replace(
                num_decodes=features.num_decodes + rows,
                context_tokens=features.context_tokens + context,
                prefill_tokens=tokens,
                prefill_context=tokens * (begin + (tokens + 1) / 2),
            )
        )

    def prompt_seconds(self, tokens: int) -> float:
        """Predicted seconds of a step that computes nothing but the first ``tokens`` tokens of a prompt."""
        return self._costs.model.step_seconds(StepFeatures(0, 0, tokens, tokens * (tokens + 1) / 2))

    def decode_seconds(self, joining: Iterable[Request] = ()) -> float:
        """Predicted seconds of a step in which all running requests and those in ``joining`` decode."""
        requests = [*self.running, *joining]
        context = sum(max(len(request.token_ids), request.num_computed_tokens) for request in requests)
        return self._costs.model.step_seconds(StepFeatures(len(requests), context))

    def service_seconds(self, request: Request, answer_tokens: int | None = None) -> float:
        """Predicted seconds of the machine that the request takes: its prompt alone, then its part of steps with as
        many rows as now. ``answer_tokens`` replaces the predicted length."""
        rows = max(1, self.num_decodes)
        step = self.step_seconds(rows=rows - self.num_decodes)
        left = self.tokens_left(request) if answer_tokens is None else answer_tokens
        return self.prefill_seconds(request) + left * step / rows

    def due(self, request: Request) -> float:
        """Time by which the request's first token is wanted; infinite without a target."""
        return min(request.service.first_token_by, request.service.finish_by, math.inf)
