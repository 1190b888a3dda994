"""What the loop asks of the muscle. Whatever runs steps, real or simulated, here or elsewhere, is one of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from chairlift.config import CacheGroup
from chairlift.scheduler.output import SchedulerOutput
from chairlift.step_batch import Masks, SampledTokens

__all__ = ["AdapterMemory", "Executor", "LiveWeights", "OnProgress", "PendingTokens", "WeightSource"]

WeightSource = str | Path | Mapping[str, Any]
"""A directory with safetensors, or tensors by name; the names are those of a Hugging Face checkpoint."""
OnProgress = Callable[[str, float], None]
"""Told a label, and the share that is done (0..1)."""


class PendingTokens(Protocol):
    """Tokens on their way."""

    def result(self) -> SampledTokens:
        """Wait for the tokens; raises what the step raised. To be called once, in the order of the steps."""
        ...


class Executor(Protocol):
    """Steps run in the order in which they are given, each on the state the one before it left, or would have left had
    it not failed: with look-ahead it was scheduled before anybody knows."""

    cache_groups: list[CacheGroup]
    """The KV cache that was made, group by group."""
    block_size: int
    """Tokens per block."""
    block_bytes: list[int]
    """Per cache group, bytes of one block in all its layers: what copying it to host memory moves."""
    num_lookahead_steps: int
    """Beyond the newest known tokens, how many steps it is best given, where nobody says otherwise."""

    def execute(self, out: SchedulerOutput) -> Any:
        """Start the forward pass of a step; returns a handle for :meth:`sample`."""
        ...

    def sample(self, handle: Any, masks: Masks | None = None) -> PendingTokens:
        """Start sampling; ``masks`` says which token ids are allowed where (None: all, everywhere).

        Sample positions are numbered as :class:`SchedulerOutput` says. Those without a mask are drawn as if there were
        no masks.
        """
        ...

    def shutdown(self) -> None:
        """Free everything."""
        ...


class AdapterMemory(Protocol):
    """What some executors and model runners have besides, as ``adapters``: low-rank adapters beside the model."""

    def read(self, path: Path, root: Path | None) -> Any:
        """The adapter in a directory, ready for :meth:`put`, with a ``digest`` of all that was read. Any thread may
        call it. With a ``root`` its files must lie there. Raises ModelLoadError."""
        ...

    def put(self, adapter_id: int, adapter: Any) -> None:
        """Let steps name it by a number above 0, between two of them."""
        ...

    def drop(self, adapter_id: int) -> None:
        """No later step names it."""
        ...


@runtime_checkable
class LiveWeights(Protocol):
    """What some executors and model runners can besides: other weights for the same network, between two steps."""

    def update_weights(self, source: WeightSource, progress: OnProgress | None = None) -> None:
        """Replace all weights; ``progress`` is told how far that is.

        ConfigError and ModelLoadError mean that nothing was changed; after anything else the model is not to be
        used.
        """
        ...
