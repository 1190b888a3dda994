"""Interface between the engine and an executor. The executor may be real or simulated, in this process or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from chairlift.base.image_spans import ImageTile
from chairlift.base.step_batch import Masks, SampledTokens
from chairlift.config import CacheGroup
from chairlift.core.scheduler.output import SchedulerOutput

__all__ = [
    "AdapterMemory",
    "BlockBytes",
    "Executor",
    "ImageMemory",
    "LiveWeights",
    "OnProgress",
    "PendingTokens",
    "WeightSource",
]

WeightSource = str | Path | Mapping[str, Any]
"""A directory with safetensors, or a mapping from the weight names of a Hugging Face checkpoint to tensors."""
OnProgress = Callable[[str, float], None]
"""Function that reports progress: it is called with (label of the current work, fraction done from 0 to 1)."""


class PendingTokens(Protocol):
    """Tokens of a step that the device may not have computed yet."""

    def result(self) -> SampledTokens:
        """Wait for the tokens, and return them. Raises the error of the step, if the step failed. Call it once per
        step, in the order of the steps."""
        ...


class Executor(Protocol):
    """Runs steps in the order of the calls. Each step uses the state that the previous step left. If the previous step
    failed, the next step uses the state as if the failed step had run, because with look-ahead a step is scheduled
    before the failure is known."""

    cache_groups: list[CacheGroup]
    """Cache groups: the layers of a group use the same block table for each request."""
    block_size: int
    """Number of tokens whose K and V one block of the KV cache holds."""
    block_bytes: list[int]
    """Per cache group: bytes of one block over all its layers. A copy of the block to host memory copies this number of
    bytes."""
    num_lookahead_steps: int
    """Number of steps to schedule ahead, unless a setting gives another number."""

    def execute(self, out: SchedulerOutput) -> Any:
        """Start the forward pass of a step. Returns a handle for :meth:`sample`."""
        ...

    def sample(self, handle: Any, masks: Masks | None = None) -> PendingTokens:
        """Start to sample the step's tokens. ``masks`` maps sample position -> allowed token ids (None: no masks).

        :class:`SchedulerOutput` defines the order of the sample positions. At positions without a mask all ids are
        allowed.
        """
        ...

    def shutdown(self) -> None:
        """Free all resources of the executor."""
        ...


class BlockBytes(Protocol):
    """Content of blocks as bytes. It is the attribute ``blocks`` of executors and model runners whose blocks may
    outlive the process; None or missing for others. Call it between two steps."""

    def take(self, group: int, block: int) -> bytes:
        """Content of a block of a cache group, which is ``block_bytes[group]`` bytes."""
        ...

    def put(self, group: int, block: int, content: bytes) -> None:
        """Overwrite a block with the result of :meth:`take` for a block with the same tokens."""
        ...

    def prepare(self, nbytes: int) -> None:
        """Have the memory of the blocks that are used first allocated, at most ``nbytes``. Any thread may call it."""
        ...


class AdapterMemory(Protocol):
    """Low-rank adapters of the model. It is the attribute ``adapters`` of executors and model runners that serve
    adapters."""

    def read(self, path: Path, root: Path | None) -> Any:
        """Read the adapter in a directory. Returns it in the form that :meth:`put` takes, with two attributes:
        ``digest`` of all files read, and ``nbytes``, its size in memory. Any thread may call this method. With
        ``root``, all files must be inside that directory. Raises ModelLoadError."""
        ...

    def put(self, adapter_id: int, adapter: Any) -> None:
        """Store an adapter under a number above 0, so that later steps may use it. Call it between two steps."""
        ...

    def drop(self, adapter_id: int) -> None:
        """Remove the adapter with this number. No later step may use it."""
        ...


class ImageMemory(Protocol):
    """Encoded images for the model. It is the attribute ``images`` of executors and model runners that read images."""

    def encode(self, tile: ImageTile) -> Iterator[None]:
        """Compute the embeddings of an image tile in several pieces. The iterator yields after each piece, so that
        steps may run between two pieces. When the iterator ends, the tile's embeddings are stored."""
        ...

    def rest(self) -> None:
        """Release the processors that the encoder uses, because a step comes next. Called after one or more pieces."""
        ...

    def holds(self, key: bytes) -> bool:
        """Whether the embeddings of the image tile with this key are stored, so that steps may use them."""
        ...

    def nbytes(self, num_rows: int) -> int:
        """Number of bytes of the embeddings of a tile with this number of rows."""
        ...

    def drop(self, key: bytes) -> None:
        """Remove the embeddings of the tile with this key. No later step may use them."""
        ...


@runtime_checkable
class LiveWeights(Protocol):
    """Optional interface of executors and model runners that can replace the weights of the network between two
    steps."""

    def update_weights(self, source: WeightSource, progress: OnProgress | None = None) -> None:
        """Replace all weights. ``progress`` is called with (label, fraction done).

        If it raises ConfigError or ModelLoadError, the old weights stay in use. After any other error the model must
        not be used.
        """
        ...
