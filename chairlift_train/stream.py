"""Packs the sequences of a source for every rank, in whole optimiser steps. A stream can be resumed after any pack.

Every rank plans the packs of all ranks from the lengths of the sequences, but builds only its own packs. So the ranks
need no communication. Needs NumPy.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from chairlift.errors import ConfigError
from chairlift_train.balance import Cost, deal_rows, level_rows
from chairlift_train.layout import Pack
from chairlift_train.pack import LookaheadPacker
from chairlift_train.sequences import Key, Sample, SourceCursor
from chairlift_train.stream_state import StreamSettings, pack_samples, unpack_samples
from chairlift_train.stream_stats import StreamMeter, StreamStats

if TYPE_CHECKING:
    from chairlift_train.torch_stream import TorchPackStream

__all__ = ["PackStream"]

_READ_AHEAD = 64
"""Number of sequences that are read from a list at a time."""
_MAX_LEFT_OUT = 100_000
"""Maximum number of consecutive sequences that ``overflow`` may leave out. The limit prevents an endless loop over an
endless source."""


class _Plan:
    """Plan of one pack. A plan without samples is a filler."""

    __slots__ = ("lengths", "num_targets", "num_tokens", "samples", "weight")

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
        self.lengths = tuple([len(sample.tokens) for sample in samples])
        self.num_tokens = sum(self.lengths)
        if 1 in self.lengths or any(sample.weights is not None for sample in samples):
            self.weight = math.fsum([sample.total_weight for sample in samples])
            self.num_targets = sum([sample.has_target for sample in samples])
        else:
            self.weight = float(self.num_tokens - len(samples))
            self.num_targets = len(samples)


@dataclasses.dataclass(slots=True)
class _Row:
    """A row: the plans of the packs that the ranks compute at the same time, one per rank."""

    plans: list[_Plan]
    step: int
    last_of_step: bool
    step_weight: float
    step_sequences: int


class PackStream:
    """Iterator over this rank's packs of ``source``. :mod:`~chairlift_train.sequences` describes the kinds of sources.

    :class:`~chairlift_train.pack.LookaheadPacker` packs the sequences. The packs are divided into rows with one pack
    per rank, and one or more rows form an optimiser step of the size ``step``. A step is planned completely before its
    first pack is returned, so each :class:`~chairlift_train.layout.Pack` has the constant that its loss is divided by.
    At the end, the last row is completed with ``filler`` packs, so that all ranks get the same number of packs and no
    token is lost.

    The packs depend only on the order of the source, the settings and the seed. All ranks together get the same packs
    for any number of ranks; if packs are balanced or shuffled, the number must divide ``window``.

    An invalid sequence raises ConfigError from ``next`` and is skipped; ``next`` can be called again. Iterating again
    after the end starts the next epoch.
    """

    def __init__(
        self,
        source: Any,
        capacity: int = 4096,
        *,
        pool: int = 256,
        align: int = 1,
        max_sequences: int | None = None,
        overflow: Literal["error", "split", "truncate", "drop", "own_pack"] = "error",
        order: Literal["oldest_first", "shuffled"] = "oldest_first",
        key: str | Callable[[Any], Key] | None = None,
        ranks: int = 1,
        rank: int = 0,
        balance: Cost | None = None,
        window: int = 128,
        step: str | None = None,
        seed: int = 0,
        pad_id: int = 0,
        flush_after: float | None = None,
    ) -> None:
        """Raises ConfigError for settings out of range.

        - ``capacity``: maximum number of tokens in a pack.
        - ``max_sequences``: maximum number of sequences in a pack.
        - ``pool``: number of pending sequences from which packs are formed. No sequence waits for more than ``pool``
          packs.
        - ``align``: each sequence is padded at its end to a multiple of this, with ``pad_id`` of weight 0.
        - ``overflow``: treatment of a sequence that is longer than the capacity. ``split`` makes several sequences with
          the same id. ``truncate`` keeps the beginning. ``drop`` leaves the sequence out. ``own_pack`` makes a larger
          pack for it. ``split`` and ``truncate`` leave out pieces without a target; ``stats().cut`` counts them.
        - ``order``: ``oldest_first`` returns packs in the order in which they were closed; ``shuffled`` shuffles the
          packs of each ``window``.
        - ``key``: name of a field, or function of the item. Sequences with different keys never share a pack.
        - ``balance``: cost by which each row gets packs of similar cost, chosen within a ``window``.
        - ``window``: number of packs, over all ranks, that are shuffled or balanced together.
        - ``step``: size of an optimiser step over all ranks: ``tokens:1M``, ``sequences:256`` or ``packs:8``. If a step
          is larger, the next step is smaller by the difference. None: one pack per rank.
        - ``flush_after``: time in seconds after which a pending sequence is returned in a pack, even if the pack is not
          full. Only for a queue as the source, with one rank.
        """
        if balance is not None and not isinstance(balance, Cost):
            raise ConfigError(f"balance must be a Cost, or None, got {balance!r:.80}")
        self._settings = StreamSettings(
            capacity=capacity,
            pool=pool,
            align=align,
            max_sequences=max_sequences,
            overflow=overflow,
            order=order,
            ranks=ranks,
            balance=None if balance is None else (balance.linear, balance.quadratic),
            window=window,
            step=step,
            seed=seed,
            pad_id=pad_id,
        )
        if not 0 <= rank < ranks or (flush_after is not None and ranks > 1):
            raise ConfigError(
                f"rank must be 0 to ranks - 1, and flush_after needs one rank; got {rank} of {ranks}, and {flush_after}"
            )
        self.rank = rank
        self._flush_after = flush_after
        self._cost = balance or Cost.tokens()
        self._cursor = SourceCursor(source, key, block=_READ_AHEAD)
        self._reset()

    def _reset(self) -> None:
        """Reset to the state of a stream that has read no sequence."""
        self._ended = False
        self._serial = 0  # serial number of the next sequence
        self._windows = 0  # number of windows that were divided among ranks
        self._progress = 0  # size of the open step so far, in the unit of ``step``
        self._step = 0  # number of the open step
        self._inside = False  # whether some, but not all packs of a step were returned
        self._left_out = 0  # number of consecutive sequences that were left out
        self._packer = self._new_packer()
        self._pending: dict[int, Sample] = {}
        self._window: list[_Plan] = []
        self._open: list[list[_Plan]] = []  # rows of the open step
        self._ready: deque[_Row] = deque()
        self._meter = StreamMeter(self._settings.capacity)

    def _new_packer(self) -> LookaheadPacker:
        settings = self._settings
        return LookaheadPacker(
            settings.capacity, settings.pool, align=settings.align, max_sequences=settings.max_sequences
        )

    # ---- output

    def __iter__(self) -> Iterator[Pack]:
        if self.ended:
            self._ended = False
            self._cursor.rewind()
        return self

    def __next__(self) -> Pack:
        return self._make_pack(self._next_row())

    async def __aiter__(self) -> AsyncIterator[Pack]:
        """Iterate the packs of a source that is an asyncio queue, until the queue gives None."""
        queue = self._cursor.source
        clock = asyncio.get_running_loop().time
        if self._cursor.kind != "queue":
            raise ConfigError("only an asyncio queue is read with 'async for'; use 'for pack in stream'")
        # (source index, time of arrival) of the waiting sequences, oldest first
        came = deque([(position, clock()) for position in sorted(self._waiting())])
        while not self._ended or self._ready:
            if self._ready:
                while self._ready:
                    yield self._make_pack(self._take_row())
                waiting = self._waiting() if came else set()
                came = deque(entry for entry in came if entry[0] in waiting)
            deadline = came[0][1] + self._flush_after if came and self._flush_after is not None else None
            if self._ended:
                return
            try:
                item = await asyncio.wait_for(queue.get(), None if deadline is None else max(0.0, deadline - clock()))
            except TimeoutError:
                self._flush()
                continue
            if item is None:
                self._finish()
            else:
                sample = self._cursor.take(item)
                serial = self._serial
                self._push(sample)
                if self._flush_after is not None and self._serial > serial:
                    came.append((sample.id, clock()))

    def _waiting(self) -> set[int]:
        """Source indices of the sequences that were read but are not yet in a returned pack."""
        plans = itertools.chain(self._window, *self._open)
        return {sample.id for sample in itertools.chain(self._pending.values(), *(plan.samples for plan in plans))}

    def steps(self) -> Iterator[list[Pack]]:
        """Iterate over lists of this rank's packs, one list per optimiser step."""
        packs: list[Pack] = []
        for pack in self:
            packs.append(pack)
            if pack.last_of_step:
                yield packs
                packs = []

    def every(self, count: int, first: int = 0) -> Iterator[tuple[int, Pack]]:
        """Iterate over every ``count``-th pack of the rest of the stream, beginning with pack number ``first``. Yields
        (number, pack).

        The other packs are planned but not built. This is what one of ``count`` loader processes needs.
        """
        iter(self)
        for number in itertools.count():
            try:
                row = self._next_row()
            except StopIteration:
                return
            if number >= first and (number - first) % count == 0:
                yield number, self._make_pack(row)

    def as_torch(self) -> TorchPackStream:
        """A ``torch.utils.data.IterableDataset`` of this stream's packs, for a DataLoader with ``batch_size=None``."""
        from chairlift_train.torch_stream import TorchPackStream

        return TorchPackStream(self)

    def stats(self) -> StreamStats:
        """Statistics over all ranks since the stream began; see :class:`~chairlift_train.stream_stats.StreamStats`."""
        return self._meter.snapshot()

    @property
    def ended(self) -> bool:
        """Whether the source has ended and all packs were returned."""
        return self._ended and not self._ready

    # ---- from the source to closed steps

    def _next_row(self) -> _Row:
        while not self._ready:
            if self._ended:
                raise StopIteration
            try:
                sample = self._cursor.read()
            except StopIteration:
                self._finish()
            else:
                self._push(sample)
        return self._take_row()

    def _take_row(self) -> _Row:
        row = self._ready.popleft()
        self._inside = not row.last_of_step
        return row

    def _push(self, sample: Sample, fits: bool = False) -> None:
        """Add a sequence to the pending sequences. If it is too long, its pieces are added instead."""
        settings = self._settings
        length = len(sample.tokens)
        if not fits and (length > settings.capacity or settings.align > 1):
            for piece in (sample,) if length <= settings.capacity else self._fitting(sample):
                self._push(piece.padded(settings.align, settings.pad_id), fits=True)
            return
        serial = self._serial
        meter = self._meter
        self._serial = serial + 1
        self._left_out = 0
        meter.on_read(length)
        sample.born = meter.packs
        if length > settings.capacity:
            self._close([sample], [serial])
            return
        self._pending[serial] = sample
        self._packer.add(serial, length, sample.key)
        if len(self._pending) >= settings.pool:
            self._close_next()

    def _fitting(self, sample: Sample) -> Iterator[Sample]:
        """Pieces of a sequence that is too long. Pieces without a target are left out."""
        truncates = self._settings.overflow == "truncate"
        kept = 0
        targets = 0
        for piece in self._fit(sample):
            if piece.weights is None or piece.has_target:
                kept += len(piece.tokens)
                targets += piece.num_targets
                yield piece
        lost = (len(sample.tokens) - kept, sample.num_targets - targets)
        if self._settings.overflow in ("truncate", "split"):
            self._meter.on_cut(sample.source, truncates, *lost, is_left_out=not kept)
        self._left_out += not kept
        if self._left_out >= _MAX_LEFT_OUT:
            raise ConfigError(
                f"the last {self._left_out:,} sequences are all longer than a pack ({self._settings.capacity} tokens),"
                f" and overflow {self._settings.overflow} leaves nothing of them to learn; raise capacity, or set"
                " overflow to split"
            )

    def _fit(self, sample: Sample) -> Iterable[Sample]:
        """Pieces that replace a sequence that is too long, by the setting ``overflow``."""
        length = len(sample.tokens)
        capacity = self._settings.capacity
        if self._settings.overflow == "own_pack":
            return (sample,)
        if self._settings.overflow == "drop":
            self._meter.dropped += 1
            return ()
        if self._settings.overflow == "truncate":
            self._meter.truncated += 1
            return (sample.piece(0, capacity),)
        if self._settings.overflow == "split":
            self._meter.split += 1
            return (sample.piece(start, min(length, start + capacity)) for start in range(0, length, capacity))
        raise ConfigError(
            f"sequence {sample.id} of the source has {length} tokens, but a pack takes {capacity}; raise capacity, or "
            "set overflow to split, truncate, drop or own_pack"
        )

    def _close_next(self) -> None:
        serials = self._packer.next_pack()
        self._close([self._pending.pop(serial) for serial in serials], serials)

    def _close(self, samples: list[Sample], serials: Sequence[int]) -> None:
        plan = _Plan(samples)
        last = self._serial - 1
        packs = self._meter.packs
        waited = [packs - sample.born for sample in samples], [last - serial for serial in serials]
        filled = sum([sample.filled for sample in samples])
        self._meter.on_pack(plan.lengths, *waited, self._cost.of(plan.lengths), filled)
        self._window.append(plan)
        if len(self._window) >= self._settings.gathered:
            self._deal()

    def _deal(self) -> None:
        """Divide the collected packs (``_window``) into rows with one pack per rank, and close the steps that are
        complete."""
        settings = self._settings
        plans = self._window
        self._window = []
        self._windows += 1
        fillers = -len(plans) % settings.ranks
        self._meter.fillers += fillers
        plans += [_Plan([]) for _ in range(fillers)]
        if not settings.uses_window:  # then the window is a single row
            self._add_row(plans)
            return
        seed = settings.seed * 2**32 + self._windows
        if settings.balance is not None:
            rows = deal_rows([self._cost_of(plan) for plan in plans], settings.ranks, seed)
        else:
            order = [index for (index,) in deal_rows([0.0] * len(plans), 1, seed)]
            rows = [order[start : start + settings.ranks] for start in range(0, len(plans), settings.ranks)]
        for row in rows:
            self._add_row([plans[index] for index in row])

    def _add_row(self, row: list[_Plan]) -> None:
        target = self._settings.goal[1]
        self._open.append(row)
        self._progress += self._amount(row)
        if self._progress >= target:
            self._progress = min(self._progress - target, target)
            self._close_step()

    def _amount(self, row: list[_Plan]) -> int:
        """Size of a row in the unit of the setting ``step``: packs, sequences or tokens."""
        unit = self._settings.goal[0]
        if unit == "packs":
            return len(row)
        return sum([len(plan.samples) if unit == "sequences" else plan.num_tokens for plan in row])

    def _close_step(self) -> None:
        """Assign the packs of the open step to ranks, and compute the constants that its losses are divided by."""
        rows = self._open
        self._open = []
        if self._settings.ranks == 1:  # no other rank waits, so costs do not matter
            self._meter.steps += 1
        else:
            rows = self._level(rows)
        weight = math.fsum([plan.weight for row in rows for plan in row])
        sequences = sum([plan.num_targets for row in rows for plan in row])
        last = len(rows) - 1
        for index, row in enumerate(rows):
            self._ready.append(_Row(row, self._step, index == last, weight, sequences))
        self._step += 1

    def _level(self, rows: list[list[_Plan]]) -> list[list[_Plan]]:
        """The rows of a step, with the packs of each row in the order of the ranks that compute them."""
        costs = [[self._cost_of(plan) for plan in row] for row in rows]
        if self._settings.balance is not None:
            assignment = level_rows(costs, self._step)
            rows = [[row[pack] for pack in chosen] for row, chosen in zip(rows, assignment, strict=True)]
            costs = [[row[pack] for pack in chosen] for row, chosen in zip(costs, assignment, strict=True)]
        self._meter.on_step(costs)
        return rows

    def _cost_of(self, plan: _Plan) -> float:
        return self._cost.of(plan.lengths)

    def _flush(self) -> None:
        """Pack all pending sequences, and close the open step."""
        while self._packer:
            self._close_next()
        if self._window:
            self._deal()
        if self._open:
            self._close_step()
        self._progress = 0

    def _finish(self) -> None:
        self._flush()
        self._ended = True

    def _make_pack(self, row: _Row) -> Pack:
        plan = row.plans[self.rank]
        filler = not plan.samples
        if filler:
            plan = _Plan([Sample(-1, np.full(1, self._settings.pad_id, np.int32))])
        tokens = np.concatenate([sample.tokens for sample in plan.samples])
        weights = np.ones(len(tokens), np.float32)
        described = False
        start = 0
        for sample, length in zip(plan.samples, plan.lengths, strict=True):
            if sample.weights is None:
                weights[start] = 0
            else:
                weights[start : start + length] = sample.weights
            described = described or sample.meta is not None
            start += length
        return Pack(
            tokens=tokens,
            lengths=plan.lengths,
            ids=tuple([sample.id for sample in plan.samples]),
            weights=weights,
            meta=tuple([sample.meta or {} for sample in plan.samples]) if described else (),
            step=row.step,
            last_of_step=row.last_of_step,
            step_weight=row.step_weight,
            step_sequences=row.step_sequences,
            filler=filler,
        )

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """State from which the stream can be resumed: plain Python and NumPy arrays, equal on every rank.

        It can be saved after any pack. It contains the sequences that were read but not yet returned, with their
        tokens.
        """
        plans = [*self._window, *itertools.chain(*self._open), *itertools.chain(*(row.plans for row in self._ready))]
        serials = self._packer.pending()
        samples = [self._pending[serial] for serial in serials] + [sample for plan in plans for sample in plan.samples]
        return {
            "version": 1,
            "settings": self._settings.state_dict(),
            "source": self._cursor.state_dict(),
            "epoch": self._cursor.epoch,
            "ended": self._ended,
            "serial": self._serial,
            "windows": self._windows,
            "progress": self._progress,
            "step": self._step,
            "inside": self._inside,
            "pending": serials,
            "plans": [len(plan.samples) for plan in plans],
            "window": len(self._window),
            "open": len(self._open),
            "ready": [[row.step, row.last_of_step, row.step_weight, row.step_sequences] for row in self._ready],
            "samples": pack_samples(samples),
            "stats": self._meter.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`, with the same settings and source, on any rank.

        The number of ranks may differ if the state was saved between two steps. Packs that were planned but not
        returned are then divided among the new ranks first, in their order. No sequence is lost or repeated.

        A source that is a plain iterator must be opened again before the call. Raises ConfigError, naming the
        difference, if the settings or the source differ; the stream is then unchanged, but a source with its own state
        may have moved.
        """
        if state.get("version") != 1:
            raise ConfigError(f"the state has version {state.get('version')}, but this release reads version 1")
        self._settings.check_same(state["settings"])
        ranks = int(state["settings"]["ranks"])
        mine = self._settings.ranks
        if ranks != mine and state.get("inside"):
            raise ConfigError(
                f"the state was saved inside a step of {ranks} ranks, whose packs are divided already; continue with "
                f"{ranks} ranks instead of {mine}, or from a state that was saved between two steps"
            )
        self._cursor.load_state_dict(state["source"], int(state["epoch"]))
        self._reset()
        self._ended = bool(state["ended"])
        self._serial = int(state["serial"])
        self._windows = int(state["windows"])
        self._progress = int(state["progress"])
        self._step, self._inside = int(state["step"]), bool(state.get("inside"))
        self._meter = StreamMeter.from_state(state["stats"])
        samples = unpack_samples(state["samples"])
        for serial in state["pending"]:
            sample = next(samples)
            self._pending[serial] = sample
            self._packer.add(serial, len(sample.tokens), sample.key)
        plans = (_Plan(list(itertools.islice(samples, count))) for count in state["plans"])
        self._window = list(itertools.islice(plans, state["window"]))
        self._open = [list(itertools.islice(plans, ranks)) for _ in range(state["open"])]
        self._ready.extend(_Row(list(itertools.islice(plans, ranks)), *row) for row in state["ready"])
        if ranks != mine:
            self._deal_again()

    def _deal_again(self) -> None:
        """Divide the packs that were planned for another number of ranks and not returned among the present ranks."""
        rows = [*(row.plans for row in self._ready), *self._open]
        closed = len({row.step for row in self._ready})
        self._step -= closed
        self._meter.steps -= closed
        # The previous step was larger than its planned size. The first of the new steps is smaller by this excess.
        begun = self._progress + closed * self._settings.goal[1] - sum(map(self._amount, rows))
        self._progress = max(0, begun)
        plans = [plan for row in [*rows, self._window] for plan in row if plan.samples]
        self._meter.fillers -= sum(not plan.samples for row in rows for plan in row)
        self._ready.clear()
        self._open = []
        self._window = []
        for plan in plans:
            self._window.append(plan)
            if len(self._window) >= self._settings.gathered:
                self._deal()
        if self._ended:
            self._flush()
