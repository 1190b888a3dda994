"""Lanes: long documents in equal chunks, with the model's state carried from each chunk to the next.

Truncated back-propagation through time (Williams and Peng, 1990) with slot refill: a lane whose document has ended goes
on with the next one at once, as a serving batch gives the row of a finished request to a waiting one. For recurrent
and state-space models, and for Transformers with a memory. Plain Python and NumPy.
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
from chairlift.train.layout import Layout
from chairlift.train.sequences import Sample, SourceCursor

if TYPE_CHECKING:
    import torch

__all__ = ["LaneBatch", "Lanes"]

_NO_TARGET = -100
"""Target that PyTorch's cross-entropy ignores."""


@dataclasses.dataclass(frozen=True, slots=True)
class LaneBatch:
    """One chunk of every lane. Row ``l`` continues row ``l`` of the batch before."""

    tokens: npt.NDArray[np.int32]
    """[lanes, chunk]; 0 where a lane has nothing to hold."""
    targets: npt.NDArray[np.int32]
    """[lanes, chunk]: the next token of the same document, for a chunk's last place the first of the next chunk; -100
    where none counts: at the end of a document, in the filling, where the weight is 0."""
    weights: npt.NDArray[np.float32]
    """[lanes, chunk]: loss weight of ``targets``, so one place to the left of ``Pack.weights``."""
    positions: npt.NDArray[np.int64]
    """[lanes, chunk]: each token's position in its own document; they go on over chunks and restart in the filling."""
    cu_seqlens: tuple[tuple[int, ...], ...]
    """Per lane the offsets of its segments: segment ``i`` is ``[cu_seqlens[l][i], cu_seqlens[l][i + 1])``."""
    ids: tuple[tuple[int, ...], ...]
    """Per lane and segment, which document of the source, from 0; -1 for filling."""
    carry: npt.NDArray[np.bool_]
    """[lanes]: whether the lane's last document continues in the next batch. The next batch then needs its state."""

    @property
    def reset(self) -> npt.NDArray[np.bool_]:
        """[lanes, chunk]: whether the state must be zero before this token. Nowhere else may it be."""
        return np.equal(self.positions, 0)

    @property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Per lane and segment, the position of the segment's first token in its document."""
        pairs = zip(self.positions, self.cu_seqlens, strict=True)
        return tuple(tuple(int(row[start]) for start in bounds[:-1]) for row, bounds in pairs)

    @property
    def layout(self) -> Layout:
        """Layout of all lanes one after another, [lanes * chunk], for code that looks no further back than a chunk."""
        return Layout.of([end - start for bounds in self.cu_seqlens for start, end in itertools.pairwise(bounds)])

    def tensors(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """``tokens``, ``targets``, ``positions`` in int64; ``weights`` in float32; ``reset``, ``carry`` in bool."""
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
    """[L] weight of each token as a target."""
    done: int = 0
    """Tokens already in a batch."""


class Lanes:
    """Documents of a source in ``lanes`` parallel streams of ``chunk`` tokens per batch; see :class:`LaneBatch`.

    ``source`` holds documents, as :mod:`~chairlift.train.sequences` says. Every token of it is in exactly one batch; a
    lane takes the next document when its own has ended, and lanes without one are filled up when the source ends. With
    ``refill="boundary"`` documents begin at chunk borders only: for models that cannot reset inside a chunk.

    One pass: iterating again goes on. The order depends on the source and the settings only.
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
        self.lanes, self.chunk, self.refill = lanes, chunk, refill
        self._cursor = SourceCursor(source)
        self._slots: list[_Document | None] = [None] * lanes
        self._ahead: collections.deque[_Document] = collections.deque()
        """Documents that were read and are in no lane yet. A bad document raises here, before any lane has moved."""
        self._batches = self._tokens = self._documents = 0

    def __iter__(self) -> Iterator[LaneBatch]:
        return self

    def __next__(self) -> LaneBatch:
        """The next chunk of every lane. Raises ConfigError for a document that cannot be used, once: it is left out
        when iteration goes on, and nothing else is lost."""
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
        """Read the documents that the next batch will take."""
        taken = 0
        for slot in self._slots:
            room = self.chunk - (len(slot.tokens) - slot.done if slot else 0)
            if self.refill == "boundary":
                room = 0 if slot else 1
            while room > 0:
                if taken == len(self._ahead):
                    try:
                        self._ahead.append(_document(self._cursor.read()))
                    except StopIteration:
                        return
                room -= len(self._ahead[taken].tokens)
                taken += 1

    def _fill(self, row: int, batch: LaneBatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Write one lane's chunk into ``batch``; its offsets and ids."""
        bounds, ids = [0], []
        while (start := bounds[-1]) < self.chunk:
            document, done, take = self._slots[row], 0, self.chunk - start
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
        """``batches``, ``documents`` begun, ``tokens``, and ``used``: the share of all places that held a token."""
        places = self._batches * self.lanes * self.chunk
        return {
            "batches": self._batches,
            "documents": self._documents,
            "tokens": self._tokens,
            "used": self._tokens / places if places else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """State after the last batch, as plain data and NumPy arrays. It resumes bit for bit."""
        return {
            "settings": dict(self._settings),
            "source": self._cursor.state_dict(),
            "slots": [dataclasses.asdict(slot) if slot else None for slot in self._slots],
            "ahead": [dataclasses.asdict(document) for document in self._ahead],
            "counts": [self._batches, self._tokens, self._documents],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, over the same source. Raises ConfigError when the settings differ."""
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
