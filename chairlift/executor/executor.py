"""What the loop asks of the muscle. Whatever runs steps, real or simulated, here or elsewhere, is one of these."""

from __future__ import annotations

from typing import Any, Protocol

from chairlift.config import CacheGroup
from chairlift.models.flat_batch import SampledTokens
from chairlift.scheduler.output import SchedulerOutput

__all__ = ["Executor", "PendingTokens"]


class PendingTokens(Protocol):
    """Tokens on their way."""

    def result(self) -> SampledTokens:
        """Wait for the tokens; raises what the step raised."""
        ...


class Executor(Protocol):
    """Steps run in the order in which they are given, each on the state the one before it left."""

    cache_groups: list[CacheGroup]
    """The KV cache that was made, group by group."""
    block_size: int
    """Tokens per block."""
    block_bytes: list[int]
    """Per cache group, bytes of one block in all its layers: what copying it to host memory moves."""

    def execute(self, out: SchedulerOutput) -> Any:
        """Start the forward pass of a step; returns a handle for :meth:`sample`."""
        ...

    def sample(self, handle: Any, masks: Any = None) -> PendingTokens:
        """Start sampling; ``masks`` says which tokens a grammar allows (None: all)."""
        ...

    def shutdown(self) -> None:
        """Free everything."""
        ...
