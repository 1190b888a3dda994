"""Reads the items of a source of sequences, and returns to a saved position in the source. Needs NumPy.

A source gives token ids (a list, an array, a tensor) or mappings with these fields:

- ``input_ids``: [L] token ids.
- ``labels``: [L] as in Hugging Face's data sets: equal to ``input_ids``, or -100 for a token that is not a target.
- ``completion_mask``, ``assistant_masks``, ``loss_mask``, ``loss_weight``: [L] factors of the loss weight of each token
  as a target.
- ``weight``: one factor for the whole sequence.
- ``attention_mask``: [L]. Tokens with a 0 are padding and are removed.
- ``seq_lengths`` and ``position_ids``: they must describe one sequence. :func:`packed_lengths` reads those of several.
- All other fields are passed on as ``meta``.
"""

from __future__ import annotations

import array
import dataclasses
import inspect
import itertools
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError

__all__ = ["Key", "Sample", "SourceCursor", "packed_lengths", "read_sample"]

Key = str | int | None
"""Key of a sequence. Sequences with different keys never share a pack."""

_PER_TOKEN = ("completion_mask", "assistant_masks", "loss_mask", "loss_weight")
_READ = frozenset({"input_ids", "labels", "weight", "attention_mask", *_PER_TOKEN})
_INT32 = np.dtype(np.int32)
_LARGEST = 2**31 - 1
_ROWS_AT_ONCE = 1000
_TOGETHER = 2**18
"""Maximum total number of tokens in a block of sequences that are read together."""


@dataclasses.dataclass(slots=True)
class Sample:
    """A sequence, or a piece of a sequence."""

    id: int
    """Index of the sequence in the source."""
    tokens: npt.NDArray[np.int32]
    """[L] token ids."""
    weights: npt.NDArray[np.float32] | None = None
    """[L] loss weight of each token as a target; the first is 0. None: 0 for the first token and 1 for all others."""
    meta: Mapping[str, Any] | None = None
    key: Key = None
    born: int = 0
    """Number of packs that had been closed when the sequence was read. It is used to measure the sequence's delay."""
    filled: int = 0
    """Number of tokens that :meth:`padded` added at the end."""

    @property
    def total_weight(self) -> float:
        """Sum of the loss weights of the sequence's tokens."""
        return len(self.tokens) - 1.0 if self.weights is None else float(self.weights.sum(dtype=np.float64))

    @property
    def num_targets(self) -> int:
        """Number of tokens whose weight is not 0."""
        return len(self.tokens) - 1 if self.weights is None else int(np.count_nonzero(self.weights))

    @property
    def source(self) -> str:
        """Name of the sequence's source, from its field ``source``. ``data`` if it has no such field."""
        name = None if self.meta is None else self.meta.get("source")
        return name.partition("@")[0] if isinstance(name, str) else "data"

    @property
    def has_target(self) -> bool:
        """Whether the sequence has a target: a token whose weight is not 0."""
        return len(self.tokens) > 1 if self.weights is None else bool(self.weights.any())

    def piece(self, start: int, end: int) -> Sample:
        """Tokens ``start`` to ``end`` (exclusive) as a separate sequence. Its first token is not a target."""
        weights = None if self.weights is None else self.weights[start:end].copy()
        if weights is not None:
            weights[0] = 0
        return dataclasses.replace(self, tokens=self.tokens[start:end].copy(), weights=weights)

    def padded(self, align: int, token: int) -> Sample:
        """The sequence padded to a multiple of ``align`` with ``token``. The padding is not a target."""
        extra = -len(self.tokens) % align
        if not extra:
            return self
        weights = np.zeros(len(self.tokens) + extra, np.float32)
        weights[1 : len(self.tokens)] = 1 if self.weights is None else self.weights[1:]
        return dataclasses.replace(
            self, tokens=np.append(self.tokens, np.full(extra, token, np.int32)), weights=weights, filled=extra
        )


def read_sample(item: Any, position: int = 0, key: str | Callable[[Any], Key] | None = None) -> Sample:
    """Check an item of a source, and copy its fields. ``key`` is the name of a field, or a function of the item.

    Raises ConfigError, naming ``position``, if the item is not a sequence of at least one token id.
    """
    described = not isinstance(item, (np.ndarray, list)) and isinstance(item, Mapping)
    if isinstance(key, str) and described and key not in item:
        raise _wrong(position, f"has the fields {sorted(map(str, item))}", f"give it the key {key!r}")
    group: Any
    if key is None:
        group = None
    elif callable(key):
        group = key(item)
    elif described:
        group = item[key]
    else:
        group = None
    if group.__hash__ is None:  # an unhashable key cannot be used
        raise _wrong(position, f"has the key {group!r:.40}", "give it a string or a whole number")
    if not described:
        return Sample(position, _token_ids(item, position), key=group)
    if "input_ids" not in item:
        raise _wrong(position, f"has the fields {sorted(map(str, item))}", "give it token ids as input_ids")
    tokens = _token_ids(item["input_ids"], position)
    if len(packed_lengths(item, len(tokens), position)) > 1:
        given = "seq_lengths" if item.get("seq_lengths") is not None else "position_ids"
        raise _wrong(position, f"has {given} of several sequences", "give each sequence by itself")
    weights: npt.NDArray[np.float32] | None = None
    if item.get("labels") is not None:
        labels = _vector(item["labels"], "labels", len(tokens), position)
        is_target = labels == tokens
        if not (is_target | (labels == -100)).all():
            raise _wrong(position, "has labels that are neither -100 nor its input_ids", "do not shift the labels")
        weights = is_target.astype(np.float32)
    for name in _PER_TOKEN:
        if item.get(name) is not None:
            factor = _vector(item[name], name, len(tokens), position).astype(np.float32)
            weights = factor if weights is None else weights * factor
    if item.get("weight") is not None:
        try:
            own = np.float32(float(item["weight"]))
        except (TypeError, ValueError):
            raise _wrong(position, f"has the weight {item['weight']!r:.40}", "give one number") from None
        weights = (np.ones(len(tokens), np.float32) if weights is None else weights) * own
    if weights is not None and not np.isfinite(weights).all():
        raise _wrong(position, "has a loss weight that is not finite", "give finite weights")
    if item.get("attention_mask") is not None:
        real = _vector(item["attention_mask"], "attention_mask", len(tokens), position) != 0
        if not real.all():
            tokens = tokens[real]
            weights = None if weights is None else weights[real]
            if not tokens.size:
                raise _wrong(position, "is nothing but padding", "leave it out")
    if weights is not None:
        weights[0] = 0
    meta = {name: value for name, value in item.items() if name not in _READ}
    return Sample(position, tokens, weights, meta or None, group)


def packed_lengths(item: Mapping[str, Any], length: int, position: int = -1) -> list[int]:
    """Lengths of the sequences in an item of ``length`` tokens, which another program may have packed.

    ``seq_lengths`` (TRL) gives them, or ``position_ids`` that begin again at 0. Raises ConfigError for values that
    describe no such sequences.
    """
    lengths = [length]
    if item.get("seq_lengths") is not None:
        given = _as_array(item["seq_lengths"])
        if given.ndim != 1 or given.dtype.kind not in "iu" or (given < 1).any() or given.sum() != length:
            told = f"{str(item['seq_lengths'])[:60]} for {length} tokens"
            raise _wrong(position, f"has the seq_lengths {told}", "give whole numbers that add up to this number")
        lengths = [int(each) for each in given]
    if item.get("position_ids") is None:
        return lengths
    positions = _vector(item["position_ids"], "position_ids", length, position)
    real = np.ones(length, np.bool_)
    if item.get("attention_mask") is not None:
        real = _vector(item["attention_mask"], "attention_mask", length, position) != 0
    if (positions[real] == np.arange(np.count_nonzero(real))).all():
        return lengths
    starts = np.flatnonzero(positions == 0)
    found = np.diff(np.append(starts, length))
    is_runs = len(starts) and starts[0] == 0 and (positions == np.arange(length) - np.repeat(starts, found)).all()
    if not is_runs or (item.get("seq_lengths") is not None and lengths != found.tolist()):
        raise _wrong(
            position,
            f"has the position_ids {str(positions.tolist())[:60]}, which do not count each sequence from 0",
            "give position_ids that do, or leave them out",
        )
    return [int(each) for each in found]


def _read_block(items: Sequence[Any], position: int) -> list[Sample] | None:
    """Read several ``items`` as :func:`read_sample` does, but copy their tokens only once, into one array.

    Returns None unless all items are valid arrays of one dtype, and also if they are long: a single sample would then
    keep the large copy in memory, and little time would be saved.
    """
    if set(map(type, items)) != {np.ndarray} or len({item.dtype for item in items}) > 1:
        return None
    lengths = list(map(len, items)) if all(item.ndim == 1 for item in items) else [0]
    if not all(lengths) or sum(lengths) > _TOGETHER or items[0].dtype.kind not in "iu":
        return None
    joined = np.concatenate(items)
    if joined.min() < 0 or (joined.dtype != _INT32 and joined.max() > _LARGEST):
        return None
    tokens = joined.astype(_INT32, copy=False)
    ends = list(itertools.accumulate(lengths))
    return [
        Sample(position + index, tokens[end - length : end])
        for index, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]


def _wrong(position: int, what: str, remedy: str) -> ConfigError:
    name = f"sequence {position} of the source" if position >= 0 else "the record"
    return ConfigError(f"{name} {what}; {remedy}, or skip it")


def _token_ids(values: Any, position: int) -> npt.NDArray[np.int32]:
    found = values if type(values) is np.ndarray else _as_array(values)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
        raise _wrong(position, f"is {str(values)[:60]}, not a row of token ids", "give at least one integer, [L]")
    if found.dtype is _INT32:
        tokens = found.copy()
    elif found.max() > _LARGEST:
        raise _wrong(position, f"holds the token id {found.max()}", f"ids are at most {_LARGEST}")
    else:
        tokens = found.astype(_INT32)
    if tokens.item(tokens.argmin()) < 0:  # four times as fast as tokens.min()
        raise _wrong(position, f"holds the token id {tokens.min()}", "ids are at least 0")
    return tokens


def _vector(values: Any, name: str, length: int, position: int) -> npt.NDArray[Any]:
    found = _as_array(values)
    if found.shape != (length,) or found.dtype.kind not in "iufb":
        given = f"{found.dtype} {list(found.shape)}"
        raise _wrong(position, f"has {name} {given} for {length} tokens", "give one number per token")
    return found


def _as_array(values: Any) -> npt.NDArray[Any]:
    if isinstance(values, (list, tuple)) and values:
        try:
            return np.frombuffer(array.array("i", values), np.int32)  # three times as fast as np.array
        except (TypeError, OverflowError):
            pass
    elif hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    try:
        return np.asarray(values)
    except ValueError:  # ragged
        return np.asarray(values, dtype=object)


class SourceCursor:
    """Reads a source item by item, and can return to a saved position.

    There are three ways to return to a position:

    - An indexed source (``len`` and ``[]``) is read from that index.
    - A source with ``state_dict`` and ``load_state_dict`` (torchdata, Hugging Face's IterableDataset), or whose
    iterator
      has ``get_state`` and ``set_state`` (Grain), restores its own state.
    - Any other source is read again from its beginning, and must give the same items.

    Checksums of the items at positions 0, 1, 2, 4, 8 ... are stored, to detect a source that has changed.
    """

    def __init__(self, source: Any, key: str | Callable[[Any], Key] | None = None, *, block: int = 0) -> None:
        """Create a cursor at the beginning of a source. Raises ConfigError if ``source`` is not a source.

        ``block``: number of arrays of a list that are checked and copied together. This takes half the time, but the
        arrays of a block are freed only together.
        """
        self.source = source
        self.kind = _kind(source)
        """Kind of the source: ``indexed``, ``iterable`` or ``queue``."""
        self.position = 0
        """Number of items that were read in the current epoch."""
        self.epoch = 0
        self._key = key
        self._in_batches = hasattr(source, "select") and hasattr(source, "features")  # a Hugging Face dataset
        self._iterator: Iterator[Any] | None = None
        self._checksums: dict[int, int] = {}
        self._block: list[Sample] = []  # samples read ahead, in reverse order
        self._block_size = block if type(source) is list and key is None else 0
        self._single_until = 0  # position up to which a list is read item by item

    def read(self) -> Sample:
        """The next sequence. Raises StopIteration at the end, and ConfigError for an invalid item, which is skipped."""
        if self._block_size and not self._block and self.position >= self._single_until:
            self._read_ahead()
        if self._block:
            self.position += 1
            return self._noted(self._block.pop())
        if self.kind == "indexed" and not self._in_batches:
            if self.position >= len(self.source):
                raise StopIteration
            return self.take(self.source[self.position])
        if self._iterator is None:
            self._iterator = self._open()
        return self.take(next(self._iterator))

    def take(self, item: Any) -> Sample:
        """Check ``item``, and count it as the next item of the source."""
        position = self.position
        self.position += 1
        return self._noted(read_sample(item, position, self._key))

    def _read_ahead(self) -> None:
        """Read a block of a list. If the block has other items than plain arrays, it will be read item by item."""
        items = self.source[self.position : self.position + self._block_size]
        block = _read_block(items, self.position) if items else None
        if block is None:
            self._single_until = self.position + self._block_size
        else:
            self._block = block[::-1]

    def _noted(self, sample: Sample) -> Sample:
        position = sample.id
        if not position & (position - 1):
            self._checksums[position] = zlib.crc32(sample.tokens.tobytes())
        return sample

    def rewind(self) -> None:
        """Go to the beginning of the source for the next epoch."""
        self._go_to(self.epoch + 1, 0, {})

    def _go_to(self, epoch: int, position: int, checksums: dict[int, int]) -> None:
        """Set epoch and position. A source with ``set_epoch``, which shuffles, is told the epoch."""
        self.position = position
        self._iterator = None
        self._checksums = checksums
        self._block = []
        self._single_until = 0
        if epoch != self.epoch and hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """State of the cursor as plain data: the position, checksums, and the state of the source if it has one."""
        state: dict[str, Any] = {"kind": self.kind, "position": self.position}
        state["checksums"] = [[position, value] for position, value in self._checksums.items()]
        if self.kind == "indexed":
            state["length"] = len(self.source)
        elif self._iterator is not None and hasattr(self._iterator, "get_state"):
            state["own"] = self._iterator.get_state()
        elif _has_own_state(self.source) and (self._iterator is not None or not self.epoch):
            state["own"] = self.source.state_dict()  # not between two epochs
        return state

    def load_state_dict(self, state: Mapping[str, Any], epoch: int = 0) -> None:
        """Return to a saved position in an epoch. Raises ConfigError if the source differs from the saved one."""
        if state["kind"] != self.kind:
            raise ConfigError(f"the state is of a source of the kind {state['kind']}, but this one is {self.kind}")
        if self.kind == "indexed" and state["length"] != len(self.source):
            raise ConfigError(
                f"the source has {len(self.source)} sequences, but had {state['length']} when the state was taken; "
                "resume with the same data, or start a new stream"
            )
        self._go_to(epoch, int(state["position"]), {int(index): int(value) for index, value in state["checksums"]})
        if self.kind == "indexed":
            for position in self._checksums:
                self._check(self.source[position], position)
        elif state.get("own") is not None:
            if hasattr(self.source, "load_state_dict"):
                self.source.load_state_dict(state["own"])
            self._iterator = iter(self.source)
            if hasattr(self._iterator, "set_state"):
                self._iterator.set_state(state["own"])
        elif self.kind == "iterable":
            self._run_forward()

    def _open(self) -> Iterator[Any]:
        if self.kind == "queue":
            raise ConfigError("an asyncio queue is read with 'async for pack in stream', inside its event loop")
        if self.kind == "indexed":  # a Hugging Face dataset: its iterator reads many rows together
            rest = self.source.select(range(self.position, len(self.source)))
            return _rows_of_tables(rest) if rest.format["type"] is None else iter(rest)
        return iter(self.source)

    def _run_forward(self) -> None:
        self._iterator = iter(self.source)
        for position in range(self.position):
            try:
                item = next(self._iterator)
            except StopIteration:
                raise ConfigError(
                    f"the source ended after {position} sequences, but {self.position} had been read when the state "
                    "was taken; resume with the same data from its beginning"
                ) from None
            if position in self._checksums:
                self._check(item, position)

    def _check(self, item: Any, position: int) -> None:
        if zlib.crc32(read_sample(item, position).tokens.tobytes()) != self._checksums[position]:
            raise ConfigError(
                f"sequence {position} of the source is not what it was when the state was taken; resume with the "
                "same data in the same order, or start a new stream"
            )


def _has_own_state(source: Any) -> bool:
    """Whether the source can save and restore its position exactly.

    The state of a shuffled Hugging Face stream does not contain the items in its buffer. So such a stream is read again
    from its beginning.
    """
    parts = [getattr(source, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return False
        parts += filter(None, [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())])
    return hasattr(source, "load_state_dict")


def _rows_of_tables(dataset: Any) -> Iterator[dict[str, Any]]:
    """Rows of a Hugging Face dataset. Lists of numbers are NumPy views of Arrow's memory, not Python lists."""
    for table in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
        columns = {name: _column(name, table.column(name).combine_chunks()) for name in table.column_names}
        for row in range(table.num_rows):
            yield {name: column[row] for name, column in columns.items()}


def _column(name: str, values: Any) -> Sequence[Any]:
    is_list = name in _READ and str(values.type).startswith(("list<", "large_list<"))
    if is_list and not values.null_count and not values.values.null_count:
        numbers = values.values.to_numpy(zero_copy_only=False)
        if numbers.dtype.kind in "iufb":
            return [numbers[start:end] for start, end in itertools.pairwise(values.offsets.to_numpy().tolist())]
    found: Sequence[Any] = values.to_pylist()
    return found


def _kind(source: Any) -> str:
    if inspect.iscoroutinefunction(getattr(source, "get", None)):
        return "queue"
    torch = sys.modules.get("torch")
    is_torch_iterable = torch is not None and isinstance(source, torch.utils.data.IterableDataset)
    if isinstance(source, (Mapping, str, bytes)) or not (hasattr(source, "__iter__") or hasattr(source, "__getitem__")):
        raise ConfigError(
            f"a source is a sequence, an iterable or an asyncio queue of token ids or mappings with input_ids, got "
            f"{type(source).__name__}"
        )
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not is_torch_iterable:
        return "indexed"
    return "iterable"
