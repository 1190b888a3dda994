"""Turns a source of sequences into packs for every rank, in whole optimiser steps, resumable after any pack.

Every rank plans the packs of all ranks from lengths, and makes only its own. So ranks agree without communication.
NumPy only.
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
from chairlift.train.balance import Cost, deal_rows, level_rows
from chairlift.train.layout import Pack
from chairlift.train.pack import LookaheadPacker
from chairlift.train.sequences import Key, Sample, SourceCursor
from chairlift.train.stream_state import StreamSettings, pack_samples, unpack_samples
from chairlift.train.stream_stats import StreamMeter, StreamStats

if TYPE_CHECKING:
    from chairlift.train.torch_stream import TorchPackStream

__all__ = ["PackStream"]

_READ_AHEAD = 64
"""Number of sequences that are read from a list together."""
_MOST_LEFT_OUT = 100_000
"""Number of sequences in a row that ``overflow`` may leave out. An endless source would be read for ever otherwise."""


class _Plan:
    """Plan of one pack. Without samples it is a filler."""

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
    """One pack for each rank."""

    plans: list[_Plan]
    step: int
    last_of_step: bool
    step_weight: float
    step_sequences: int


class PackStream:
    """Iterates this rank's packs of ``source``; see :mod:`~chairlift.train.sequences` for what a source may hold.

    Sequences are packed by :class:`~chairlift.train.pack.LookaheadPacker`. Packs are dealt to ranks in rows of one
    each, and rows make optimiser steps, which close on what ``step`` asks for. A step is planned whole before its
    first pack is handed out, so each :class:`~chairlift.train.layout.Pack` knows the constant its loss is divided by.
    At the end the last row is filled up with ``filler`` packs: all ranks take equally many, and no token is lost.

    The output depends on the order of the source, the settings and the seed alone, and the packs over all ranks are
    the same for any number of ranks (that divides ``window``, if packs are balanced or shuffled).

    A bad sequence raises ConfigError from the iterator's ``next`` and is passed; ``next`` may be called again.
    Iterating again after the end begins the source again: the next epoch.
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

        - ``capacity``: tokens in a pack at most; ``max_sequences``: sequences in one at most.
        - ``pool``: sequences that are pending, from which packs are made; none waits for more than ``pool`` packs.
        - ``align``: each sequence is filled up to a multiple of this with ``pad_id``, of weight 0, at its end.
        - ``overflow``: what becomes of a sequence longer than the capacity. ``split`` makes each piece a sequence
          with the same id; ``own_pack`` makes it a pack that is too large. A piece whose tokens all have weight 0
          teaches nothing: ``split`` and ``truncate`` leave it out, and ``stats().cut`` counts it.
        - ``order``: ``oldest_first`` hands packs out as they close; ``shuffled`` shuffles those of a ``window``.
        - ``key``: a field, or a function of the item; sequences with different keys never share a pack.
        - ``balance``: rows are made of packs that cost alike, among those of a ``window`` (packs over all ranks).
        - ``step``: ``tokens:1M``, ``sequences:256`` or ``packs:8``, over all ranks. What one step has too much of, the
          next gets less of. None: a step is one pack per rank.
        - ``flush_after``: of a queue (one rank): what has waited for so many seconds is handed out, however full.
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
        """Reset to the state of a stream that has read nothing."""
        self._ended = False
        self._serial = 0  # of the next sequence
        self._windows = 0  # dealt so far
        self._progress = 0  # of the open step towards what it closes on
        self._step = 0  # the open step
        self._inside = False  # a step that was handed out in part
        self._left_out = 0  # sequences in a row
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

    # ---- what comes out

    def __iter__(self) -> Iterator[Pack]:
        if self.ended:
            self._ended = False
            self._cursor.rewind()
        return self

    def __next__(self) -> Pack:
        return self._make_pack(self._next_row())

    async def __aiter__(self) -> AsyncIterator[Pack]:
        """Packs of a source that is an asyncio queue, until it yields None."""
        queue, clock = self._cursor.source, asyncio.get_running_loop().time
        if self._cursor.kind != "queue":
            raise ConfigError("only an asyncio queue is read with 'async for'; use 'for pack in stream'")
        came = deque([(position, clock()) for position in sorted(self._waiting())])  # what waits, the oldest first
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
                sample, serial = self._cursor.take(item), self._serial
                self._push(sample)
                if self._flush_after is not None and self._serial > serial:
                    came.append((sample.id, clock()))

    def _waiting(self) -> set[int]:
        """Source positions of sequences that were read and not handed out."""
        plans = itertools.chain(self._window, *self._open)
        return {sample.id for sample in itertools.chain(self._pending.values(), *(plan.samples for plan in plans))}

    def steps(self) -> Iterator[list[Pack]]:
        """This rank's packs of one optimiser step at a time."""
        packs: list[Pack] = []
        for pack in self:
            packs.append(pack)
            if pack.last_of_step:
                yield packs
                packs = []

    def every(self, count: int, first: int = 0) -> Iterator[tuple[int, Pack]]:
        """Packs number ``first``, ``first + count`` and so on from here, each with its number.

        The others are planned, but not put together: what one of ``count`` loaders reads.
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
        """This stream as a ``torch.utils.data.IterableDataset``, for a DataLoader with ``batch_size=None``."""
        from chairlift.train.torch_stream import TorchPackStream

        return TorchPackStream(self)

    def stats(self) -> StreamStats:
        """Figures over all ranks, since the stream began; see :class:`~chairlift.train.stream_stats.StreamStats`."""
        return self._meter.snapshot()

    @property
    def ended(self) -> bool:
        """Whether the source has ended and all packs were handed out."""
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
        """Make a sequence pending. If it does not fit, its pieces become pending instead."""
        settings, length = self._settings, len(sample.tokens)
        if not fits and (length > settings.capacity or settings.align > 1):
            for piece in (sample,) if length <= settings.capacity else self._fitting(sample):
                self._push(piece.padded(settings.align, settings.pad_id), fits=True)
            return
        serial, meter = self._serial, self._meter
        self._serial, self._left_out = serial + 1, 0
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
        """Pieces of a sequence that is too long. A piece is left out where only weights of 0 remain in it."""
        truncates, kept, targets = self._settings.overflow == "truncate", 0, 0
        for piece in self._fit(sample):
            if piece.weights is None or piece.has_target:
                kept += len(piece.tokens)
                targets += piece.num_targets
                yield piece
        lost = (len(sample.tokens) - kept, sample.num_targets - targets)
        if self._settings.overflow in ("truncate", "split"):
            self._meter.on_cut(sample.source, truncates, *lost, is_left_out=not kept)
        self._left_out += not kept
        if self._left_out >= _MOST_LEFT_OUT:
            raise ConfigError(
                f"the last {self._left_out:,} sequences are all longer than a pack ({self._settings.capacity} tokens),"
                f" and overflow {self._settings.overflow} leaves nothing of them to learn; raise capacity, or set"
                " overflow to split"
            )

    def _fit(self, sample: Sample) -> Iterable[Sample]:
        """Sequences that replace one that is too long."""
        length, capacity = len(sample.tokens), self._settings.capacity
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
        plan, last, packs = _Plan(samples), self._serial - 1, self._meter.packs
        waited = [packs - sample.born for sample in samples], [last - serial for serial in serials]
        filled = sum([sample.filled for sample in samples])
        self._meter.on_pack(plan.lengths, *waited, self._cost.of(plan.lengths), filled)
        self._window.append(plan)
        if len(self._window) >= self._settings.gathered:
            self._deal()

    def _deal(self) -> None:
        """Divide the window into rows of one pack per rank, and close steps."""
        settings, plans = self._settings, self._window
        self._window = []
        self._windows += 1
        fillers = -len(plans) % settings.ranks
        self._meter.fillers += fillers
        plans += [_Plan([]) for _ in range(fillers)]
        if not settings.uses_window:  # then it is one row
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
        """Amount by which a row brings a step closer to its end, in the unit of ``step``."""
        unit = self._settings.goal[0]
        if unit == "packs":
            return len(row)
        return sum([len(plan.samples) if unit == "sequences" else plan.num_tokens for plan in row])

    def _close_step(self) -> None:
        """Assign the packs of the open step to ranks, and set the constants that its losses are divided by."""
        rows, self._open = self._open, []
        if self._settings.ranks == 1:  # nobody waits for it, whatever its packs cost
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
        """The rows of a step with the packs of each in the order of the ranks that take them."""
        costs = [[self._cost_of(plan) for plan in row] for row in rows]
        if self._settings.balance is not None:
            taken = level_rows(costs, self._step)
            rows = [[row[pack] for pack in chosen] for row, chosen in zip(rows, taken, strict=True)]
            costs = [[row[pack] for pack in chosen] for row, chosen in zip(costs, taken, strict=True)]
        self._meter.on_step(costs)
        return rows

    def _cost_of(self, plan: _Plan) -> float:
        return self._cost.of(plan.lengths)

    def _flush(self) -> None:
        """Hand out all pending sequences, and close the open step."""
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
        described, start = False, 0
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
        """All that decides the rest of the stream: plain Python and NumPy arrays, the same on every rank.

        Save it after any pack. What was handed out is not in it; what has been read and waits is, tokens and all.
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
        """Go on where :meth:`state_dict` was called, with the same settings and source, on any rank.

        The number of ranks may be another, if the state was taken between two steps: what had been dealt to ranks and
        not handed out is dealt again, first of all and in its order. No sequence is lost or comes twice.

        Raises ConfigError, naming what differs, when the settings or the source are not the same; then nothing has
        changed but the position of a source that keeps its own. A source that can only be iterated must be given anew.
        """
        if state.get("version") != 1:
            raise ConfigError(f"the state has version {state.get('version')}, but this release reads version 1")
        self._settings.check_same(state["settings"])
        ranks, mine = int(state["settings"]["ranks"]), self._settings.ranks
        if ranks != mine and state.get("inside"):
            raise ConfigError(
                f"the state was taken inside a step of {ranks} ranks, whose packs are dealt already; go on with "
                f"{ranks} ranks instead of {mine}, or from a state that was taken between two steps"
            )
        self._cursor.load_state_dict(state["source"], int(state["epoch"]))
        self._reset()
        self._ended, self._serial = bool(state["ended"]), int(state["serial"])
        self._windows, self._progress = int(state["windows"]), int(state["progress"])
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
        """Divide what was planned for another number of ranks, and not handed out, among as many as there are now."""
        rows = [*(row.plans for row in self._ready), *self._open]
        closed = len({row.step for row in self._ready})
        self._step -= closed
        self._meter.steps -= closed
        # What the first of these steps got less of, because the one before it had too much.
        begun = self._progress + closed * self._settings.goal[1] - sum(map(self._amount, rows))
        self._progress = max(0, begun)
        plans = [plan for row in [*rows, self._window] for plan in row if plan.samples]
        self._meter.fillers -= sum(not plan.samples for row in rows for plan in row)
        self._ready.clear()
        self._open, self._window = [], []
        for plan in plans:
            self._window.append(plan)
            if len(self._window) >= self._settings.gathered:
                self._deal()
        if self._ended:
            self._flush()
