"""File 1 of 8. A request: what it knows, and what is computed for it.

The central idea of the engine is here. A request has ``num_tokens`` known tokens (its prompt and its answer so far).
The KV of the first ``num_computed_tokens`` of them is in the cache. The difference is the work before its next token
can be sampled:

- a new prompt of 500 tokens: 500 tokens of work (*prefill*), at once or in *chunks*;
- a request that generates: 1 token of work, its newest token (*decode*);
- a request that lost its KV after a *preemption*: its prompt and its answer so far (*recompute*).

So the scheduler does not need phases. A step closes a part of the gap of each request, and that is all.

The engine's version is ``chairlift/core/request.py``.
"""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["Request", "RequestStatus", "SamplingParams"]


class RequestStatus(enum.Enum):
    """WAITING: not started. RUNNING: has a row of the batch. PREEMPTED: has lost its row and its blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and how many. Temperature 0 takes the most likely token (*greedy*)."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    """Only the ``top_k`` most likely tokens are allowed; 0 allows all."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability are allowed; 1 allows all."""
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()


class Request:
    """One sequence of tokens. Only the scheduler and the KV cache change its fields."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        """All known tokens: the prompt, then the generated tokens."""
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.status = RequestStatus.WAITING
        self.slot = -1
        """The request's row of the batch while it runs; -1 otherwise."""
        self.num_computed_tokens = 0
        """Number of leading tokens whose KV is in the cache, or is being computed by the current step."""
        self.block_ids: list[int] = []
        """The block table: entry i is the block that has the KV of positions i * block_size and following."""
        self.num_cached_tokens = 0
        """Number of tokens that the prefix cache saved when the request last joined."""
        self.num_preemptions = 0
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def limit(self) -> int:
        """Number of positions whose KV the request may ever need. The last token that it samples is never an input."""
        return self.num_prompt_tokens + self.params.max_tokens - 1
