"""Interface between the engine's loop and an executor, which may be real or simulated, local or remote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from chairlift.config import CacheGroup
from chairlift.scheduler.output import SchedulerOutput
from chairlift.step_batch import Masks, SampledTokens
from chairlift.vision.spans import ImageTile

__all__ = ["AdapterMemory", "Executor", "ImageMemory", "LiveWeights", "OnProgress", "PendingTokens", "WeightSource"]

WeightSource = str | Path | Mapping[str, Any]
"""A directory with safetensors, or tensors by name; the names are those of a Hugging Face checkpoint."""
OnProgress = Callable[[str, float], None]
"""Called with a label and the share done (0 to 1)."""


class PendingTokens(Protocol):
    """Tokens that are being computed."""

    def result(self) -> SampledTokens:
        """Wait for the tokens. Raises the step's error. Call it once per step, in the order of the steps."""
        ...


class Executor(Protocol):
    """Runs steps in the order in which they are given. Each uses the state that the step before leaves, or would have
    left without its failure: with look-ahead a step is scheduled before the failure is known."""

    cache_groups: list[CacheGroup]
    """Groups of the KV cache."""
    block_size: int
    """Tokens per block."""
    block_bytes: list[int]
    """Per cache group, bytes of one block in all its layers; this is what a copy to host memory moves."""
    num_lookahead_steps: int
    """Preferred number of steps to schedule beyond the newest known tokens, if there is no setting."""

    def execute(self, out: SchedulerOutput) -> Any:
        """Start the forward pass of a step. Returns a handle for :meth:`sample`."""
        ...

    def sample(self, handle: Any, masks: Masks | None = None) -> PendingTokens:
        """Start sampling. ``masks`` are the allowed token ids by sample position (None: no masks).

        :class:`SchedulerOutput` defines the numbers of sample positions. Positions without a mask are sampled as
        without masks.
        """
        ...

    def shutdown(self) -> None:
        """Free all resources."""
        ...


class AdapterMemory(Protocol):
    """Low-rank adapters beside the model: the attribute ``adapters`` of executors and model runners that serve some."""

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


class ImageMemory(Protocol):
    """Encoded images beside the model: the attribute ``images`` of executors and model runners that read some."""

    def encode(self, tile: ImageTile) -> Iterator[None]:
        """Compute the rows of a tile, and yield after each piece. Steps may run between two pieces. The memory holds
        the rows when the iterator ends."""
        ...

    def holds(self, key: bytes) -> bool:
        """Whether steps may name the rows of a tile."""
        ...

    def size(self, key: bytes) -> int:
        """Bytes of the rows of a tile that is held."""
        ...

    def drop(self, key: bytes) -> None:
        """No later step names the rows of this tile."""
        ...


@runtime_checkable
class LiveWeights(Protocol):
    """Optional interface of executors and model runners: replacing the weights of the network between two steps."""

    def update_weights(self, source: WeightSource, progress: OnProgress | None = None) -> None:
        """Replace all weights. ``progress`` is called with the share done.

        After ConfigError and ModelLoadError nothing was changed. After any other error the model must not be used.
        """
        ...
