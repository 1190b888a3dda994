"""Divides long documents into chunks of equal length, for models that carry a state from each chunk to the next.

This is truncated back-propagation through time (Williams and Peng, 1990) in several parallel rows, called lanes. When
the document of a lane ends, the lane continues at once with the next document, as a serving batch gives a finished
request's row to a waiting request. For recurrent and state-space models, and for Transformers with a memory. Needs
NumPy.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError
from chairlift_train.layout import Layout
from chairlift_train.sequences import Sample, SourceCursor

if TYPE_CHECKING:
    import torch

__all__ = ["LaneBatch", "Lanes"]

_NO_TARGET = -100
"""Target that PyTorch's cross-entropy ignores."""


@dataclasses.dataclass(frozen=True, slots=True)
class LaneBatch:
    """One chunk of every lane. Row ``l`` continues row ``l`` of the previous batch."""

    tokens: npt.NDArray[np.int32]
    """[lanes, chunk] token ids; 0 for padding."""
    targets: npt.NDArray[np.int32]
    """[lanes, chunk] the next token of the same document. At the end of a chunk it is the first token of the next
    chunk. It is -100 at the end of a document, in padding, and where the weight is 0."""
    weights: npt.NDArray[np.float32]
    """[lanes, chunk] loss weight of ``targets``: shifted left by one position compared with ``Pack.weights``."""
    positions: npt.NDArray[np.int64]
    """[lanes, chunk] position of each token in its document, counted over all chunks. Padding restarts at 0."""
    cu_seqlens: tuple[tuple[int, ...], ...]
    """Offsets of the segments of each lane ``l``: segment ``i`` is ``[cu_seqlens[l][i], cu_seqlens[l][i + 1])``."""
    ids: tuple[tuple[int, ...], ...]
    """For each lane: source index of the document of each segment; -1 for padding."""
    carry: npt.NDArray[np.bool_]
    """[lanes] whether the lane's last document continues in the next batch, which then needs the model's state."""

    @property
    def reset(self) -> npt.NDArray[np.bool_]:
        """[lanes, chunk] whether the model's state must be set to zero before a token, because a document begins with
        it."""
        return np.equal(self.positions, 0)

    @property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """For each lane: position of each segment's first token in its document."""
        pairs = zip(self.positions, self.cu_seqlens, strict=True)
        return tuple(tuple(int(row[start]) for start in bounds[:-1]) for row, bounds in pairs)

    @property
    def layout(self) -> Layout:
        """Layout of all lanes one after another, [lanes * chunk], for models that carry no state between chunks."""
        return Layout.of([end - start for bounds in self.cu_seqlens for start, end in itertools.pairwise(bounds)])

    def tensors(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """Fields as tensors: ``tokens``, ``targets`` and ``positions`` in int64, ``weights`` in float32, ``reset`` and
        ``carry`` in bool."""
        import torch

        names = ("tokens", "targets", "positions", "weights", "reset", "carry")
        made = {name: torch.from_numpy(np.ascontiguousarray(getattr(self, name))) for name in names}
        return {
            name: (tensor.long() if tensor.dtype == torch.int32 else tensor).to(device) for name, tensor in made.items()
        }


@dataclasses.dataclass(slots=True)
class _Document:
    id: int
    tokens: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    """[L] loss weight of each token of the document as a target."""
    done: int = 0
    """Number of the document's tokens that earlier batches contained."""


class Lanes:
    """Iterator over batches (:class:`LaneBatch`) with ``chunk`` tokens in each of ``lanes`` parallel lanes.

    ``source`` is a source of documents (see :mod:`~chairlift_train.sequences`). Every token is in exactly one batch. A
    lane continues with the next document when its document ends. After the end of the source, empty lanes are padded.
    With ``refill="boundary"``, documents begin only at the start of a chunk, for models that cannot reset their state
    inside a chunk.

    The source is read once: a second loop continues where the first stopped. The batches depend only on the source and
    the settings.
    """

    def __init__(
        self, source: Any, lanes: int = 8, chunk: int = 512, *, refill: Literal["now", "boundary"] = "now"
    ) -> None:
        if lanes < 1 or chunk < 1 or refill not in ("now", "boundary"):
            raise ConfigError(
                'Lanes needs lanes >= 1, chunk >= 1 and refill "now" or "boundary", '
                f"got lanes={lanes}, chunk={chunk}, refill={refill!r}"
            )
        self._settings = {"lanes": lanes, "chunk": chunk, "refill": refill}
        self.lanes = lanes
        self.chunk = chunk
        self.refill = refill
        self._cursor = SourceCursor(source)
        self._slots: list[_Document | None] = [None] * lanes
        self._ahead: collections.deque[_Document] = collections.deque()
        """Documents that were read and are not yet in a lane. Reading ahead raises errors before any lane changes."""
        self._batches = self._tokens = self._documents = 0

    def __iter__(self) -> Iterator[LaneBatch]:
        return self

    def __next__(self) -> LaneBatch:
        """The next chunk of every lane. Raises ConfigError for an invalid document. The next call skips this document,
        and no other document is lost."""
        self._read_ahead()
        if not self._ahead and not any(self._slots):
            raise StopIteration
        shape = (self.lanes, self.chunk)
        batch = LaneBatch(
            np.zeros(shape, np.int32),
            np.full(shape, _NO_TARGET, np.int32),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.int64),
            (),
            (),
            np.zeros(self.lanes, np.bool_),
        )
        bounds, ids = zip(*(self._fill(row, batch) for row in range(self.lanes)), strict=True)
        batch.targets[batch.weights == 0] = _NO_TARGET
        batch.carry[:] = [slot is not None for slot in self._slots]
        self._batches += 1
        return dataclasses.replace(batch, cu_seqlens=bounds, ids=ids)

    def _read_ahead(self) -> None:
        """Read the documents that the next batch needs."""
        needed = 0
        for slot in self._slots:
            room = self.chunk - (len(slot.tokens) - slot.done if slot else 0)
            if self.refill == "boundary":
                room = 0 if slot else 1
            while room > 0:
                if needed == len(self._ahead):
                    try:
                        self._ahead.append(_document(self._cursor.read()))
                    except StopIteration:
                        return
                room -= len(self._ahead[needed].tokens)
                needed += 1

    def _fill(self, row: int, batch: LaneBatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Write the next chunk of lane ``row`` into ``batch``. Returns (segment offsets, segment ids)."""
        bounds = [0]
        ids = []
        while (start := bounds[-1]) < self.chunk:
            document = self._slots[row]
            done = 0
            take = self.chunk - start
            if document is None and self._ahead and (start == 0 or self.refill == "now"):
                document = self._slots[row] = self._ahead.popleft()
                self._documents += 1
            if document is not None:
                done = document.done
                take = min(take, len(document.tokens) - done)
                batch.tokens[row, start : start + take] = document.tokens[done : done + take]
                targets = document.tokens[done + 1 : done + 1 + take]
                batch.targets[row, start : start + len(targets)] = targets
                batch.weights[row, start : start + len(targets)] = document.weights[done + 1 : done + 1 + take]
                document.done += take
                self._tokens += take
                if document.done == len(document.tokens):
                    self._slots[row] = None
            batch.positions[row, start : start + take] = np.arange(done, done + take)
            bounds.append(start + take)
            ids.append(document.id if document is not None else -1)
        return tuple(bounds), tuple(ids)

    def stats(self) -> dict[str, float]:
        """Counts of ``batches``, started ``documents`` and ``tokens``, and ``used``: the fraction of the positions that
        is not padding."""
        positions = self._batches * self.lanes * self.chunk
        return {
            "batches": self._batches,
            "documents": self._documents,
            "tokens": self._tokens,
            "used": self._tokens / positions if positions else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """State after the last batch, as plain data and NumPy arrays. A resumed iterator gives identical batches."""
        return {
            "settings": dict(self._settings),
            "source": self._cursor.state_dict(),
            "slots": [dataclasses.asdict(slot) if slot else None for slot in self._slots],
            "ahead": [dataclasses.asdict(document) for document in self._ahead],
            "counts": [self._batches, self._tokens, self._documents],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`, with the same source. Raises ConfigError if settings differ."""
        if state["settings"] != self._settings:
            raise ConfigError(
                f"the state was taken with {state['settings']}, but this object has {self._settings}; "
                "make it with the same settings"
            )
        self._cursor.load_state_dict(state["source"])
        self._slots = [_Document(**slot) if slot else None for slot in state["slots"]]
        self._ahead = collections.deque(_Document(**document) for document in state["ahead"])
        self._batches, self._tokens, self._documents = state["counts"]


def _document(sample: Sample) -> _Document:
    weights = np.ones(len(sample.tokens), np.float32) if sample.weights is None else sample.weights
    return _Document(sample.id, sample.tokens, weights)
