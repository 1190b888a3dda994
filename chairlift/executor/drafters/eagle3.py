"""Drafts with EAGLE-3: one decoder layer on hidden states of the served model. See :mod:`chairlift.models.eagle3`.

The layer's KV is stored after the served model's layers, in the same blocks and with the same block tables. So shared,
copied and swapped blocks contain it too. The entry at position p depends on token p + 1, so the last entry of a shared
block may belong to another continuation. That can only make a draft worse: every draft is checked. Blocks that were
computed while the layer kept no hidden states lack its KV, and requests on such blocks get no drafts.

The served model's hidden states are collected per row. The layer computes them when the row drafts next, or when
several states have collected. So the layer need not run in every step for rows without drafts. KV that drafts wrote is
replaced when the served model's own hidden states are known.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.step_batch import StepBatch
from chairlift.core.request import Request
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.spec_decode.upkeep import Upkeep
from chairlift.executor.drafters.drafting import DraftTimes, block_tables, drawing_batch, take_rows
from chairlift.executor.drafters.kept_blocks import KeptBlocks
from chairlift.executor.drafters.runner import DraftProgram, DraftRunner
from chairlift.executor.drafters.source import DraftSource, Served
from chairlift.models.eagle3 import Eagle3, load_eagle3
from chairlift.models.mtp import Mtp

__all__ = ["Eagle3Drafter", "load_drafts"]

_Int32 = npt.NDArray[np.int32]

_MAX_WAITING: Final = 8
"""If a row has collected hidden states of this many positions, the drafting layer computes them, even if no drafts are
needed."""
_MIN_TOKENS: Final = 256
"""Minimum of the number of tokens that the drafting layer can compute in one call."""


class _Part(NamedTuple):
    """Positions ``start`` to ``end`` of one row that the drafting layer computes in one call."""

    slot: int
    start: int
    end: int
    table: Sequence[Sequence[int]] | npt.NDArray[np.int32]
    """Block table of the row: block ids per cache group."""
    tapped: int = -1
    """Where the hidden state of position ``first`` is: its index among the hidden states of the newest step. Below 0:
    the hidden states of all positions are in the drafter's own storage."""
    first: int = 0


class _Layer:
    """The drafting layer as a step program.

    Args:
        network: The layer.
        runner: Runner of the served model.
        max_tokens: Maximum number of tokens in a call.
        projects: Whether the input is the served model's hidden states, which the layer projects to features.
    """

    def __init__(self, network: Eagle3 | Mtp, runner: DraftRunner, max_tokens: int, *, projects: bool) -> None:
        config = network.config
        self.max_tokens = max_tokens
        recorder: Any = runner.recorder()
        width = len(config.taps) * config.target_hidden_size if projects else config.layer.hidden_size
        given = recorder.given(width)
        features = network.project(given) if projects else given
        own = network.embed_tokens
        embedded = runner.embed(recorder.token_ids) if own is None else own(recorder.token_ids)
        self._next, out = network(embedded, features, recorder.positions, recorder)
        self._program: DraftProgram = runner.program_of(recorder, out, max_tokens, [self._next])
        self.given: npt.NDArray[np.uint8] = self._program.rows_of(given, max_tokens).view(torch.uint8).numpy()
        """Inputs of the next run, as bytes: [max_tokens, ...]. The run overwrites them."""

    def run(self, batch: StepBatch, kept: npt.NDArray[np.intp]) -> tuple[Tensor, Tensor]:
        """Compute a batch of T tokens with the inputs in the first T rows of :attr:`given`.

        Returns, for the tokens ``kept`` [K], (features of the next positions, hidden states for the output head), each
        [K, D]. The next run overwrites both.
        """
        out = self._program.run(batch, kept)
        return self._program.rows_of(self._next, len(out)), out


class Eagle3Drafter:
    """Makes drafts for decoding requests. See :class:`~chairlift.core.spec_decode.adaptive.Proposer`.

    Args:
        network: The drafting layer, whose cache is part of the served model's.
        runner: Runner of the served model.
        most: Maximum number of drafts for a row in one step.
        num_slots: Number of rows of the engine.
        max_model_len: Maximum sequence length of the engine, in tokens.
        block_size: Tokens per block.
        max_tokens: Maximum number of tokens in a step of the engine.
    """

    def __init__(
        self,
        network: Eagle3 | Mtp,
        runner: DraftRunner,
        *,
        most: int,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        max_tokens: int,
    ) -> None:
        self._network = network
        self._runner = runner
        self._block_size = block_size
        self.most = most
        self._most_positions = min(max_model_len, network.config.layer.max_position_embeddings)
        self._first = _Layer(network, runner, max(max_tokens, _MIN_TOKENS), projects=True)
        self._further = _Layer(network, runner, num_slots, projects=False)
        self._depth = _MAX_WAITING + most + 2
        """Number of positions per slot whose hidden states are stored. Position p is stored at index p % depth."""
        # As bytes in numpy: indexing in torch would start threads that spin on the model's processors.
        self._tapped = runner.tapped.view(torch.uint8).numpy()
        nbytes = self._tapped.shape[1]
        self._stored = np.zeros((num_slots, self._depth, nbytes), dtype=np.uint8)  # a page costs memory when it is used
        """Hidden states of the served model at the newest positions of each slot, as bytes: [slots, positions, ...]."""
        self._ends = np.zeros(num_slots, dtype=np.int32)
        """Per slot: number of leading positions with known tokens whose hidden states the served model has computed."""
        self._counts = np.zeros(num_slots, dtype=np.int32)
        """Per slot: number of leading positions that the drafting layer has computed from the served model's hidden
        states."""
        self._owners: list[str | None] = [None] * num_slots
        """Per slot: id of the request to which the slot's entries in the other arrays belong; None if hidden states of
        the slot's request are missing."""
        self._whole = np.zeros(num_slots, dtype=np.bool_)
        """Per slot: whether there is an owner."""
        self.upkeep = Upkeep()
        """Decides whether hidden states are kept. A request has no drafts if hidden states were not kept from its first
        step on, or when its shared blocks were computed."""
        self._kept = KeptBlocks(*runner.draft_blocks, block_size)
        self._tokens: _Int32 = np.zeros((num_slots, 0), dtype=np.int32)
        """Token ids [slots, positions] of every slot: the engine's own array. Drafts are written after the known
        tokens."""
        self._times = DraftTimes()
        self._step = -1
        """Number of the newest step that :meth:`follow` has seen."""
        self.sleeps = False

    # -- beside the model ----------------------------------------------------------------------------------------

    def follow(self, out: SchedulerOutput, batch: StepBatch) -> None:
        """Note in which rows of the step the request is new."""
        captured = self._runner.captures
        keeps = self.upkeep.passes(bool(out.joined), out.step - self._step)
        self._step = out.step
        self.sleeps = not keeps
        if captured and not keeps:
            self._kept.stop(np.flatnonzero(self._whole).tolist(), self._counts)
        self._kept.joined(out)
        if keeps != captured:
            self._runner.captures = keeps  # from the next step on
            self._owners = [None] * len(self._owners)
            self._whole[:] = False
        elif keeps:
            for row in out.joined:
                whole = self._kept.has_all(row)
                self._owners[row.slot], self._whole[row.slot] = row.request_id if whole else None, whole
                self._ends[row.slot] = self._counts[row.slot] = row.num_computed_tokens
        self._kept.grew(out, self._whole)

    def saw(self, hidden: Tensor, batch: StepBatch, token_ids: Sequence[int]) -> None:
        """Store the served model's hidden states of a step's tokens, except the tokens of rejected drafts. Rows with
        many new positions, such as prompts, are computed by the layer at once."""
        self._tokens = batch.tokens
        if self.upkeep.is_on:
            begin = time.perf_counter()
            self._keep(batch, token_ids)
            self.upkeep.kept(time.perf_counter() - begin)

    def _keep(self, batch: StepBatch, token_ids: Sequence[int]) -> None:
        """Store the hidden states of a step; see :meth:`saw`."""
        whole = self._whole[batch.slots]
        if not whole.any():
            return
        starts = batch.positions[batch.cu_seqlens[:-1]]
        lengths = np.diff(batch.cu_seqlens)
        for first, _, chunk in batch.verifies:
            lengths[batch.sample_rows[first]] = 1 + chunk.num_accepted(token_ids[first : first + chunk.samples])
        slots = batch.slots
        gaps = self._ends[slots] != starts  # a row that went back, or came back without its newest positions
        self._counts[slots[gaps]] = np.where(
            self._ends[slots[gaps]] < starts[gaps],
            starts[gaps],
            np.minimum(self._counts[slots[gaps]], starts[gaps]),
        )
        ends = starts + lengths
        self._ends[slots] = ends
        waiting = ends - self._counts[slots]
        long = whole & (waiting > self._depth)
        if long.any():
            self._compute([self._prompt_part(batch, int(row), int(ends[row])) for row in np.flatnonzero(long)])
        kept = np.minimum(lengths, self._depth)
        rows = np.repeat(np.arange(len(slots)), kept)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(kept) - kept, kept)
        offsets = within + np.repeat(lengths - kept, kept)
        places = (starts[rows] + offsets) % self._depth
        sources = batch.cu_seqlens[rows] + offsets
        self._stored[slots[rows], places] = self._tapped[sources]
        full = np.flatnonzero(whole & ~long & (waiting > _MAX_WAITING))
        if len(full):
            begins = self._counts[slots].tolist()
            behind = (ends - 1).tolist()
            self._compute(
                [_Part(int(slots[row]), begins[row], behind[row], batch.block_tables[:, row]) for row in full.tolist()]
            )

    def _prompt_part(self, batch: StepBatch, row: int, end: int) -> _Part:
        """The part of a row's prompt that the drafting layer has not computed yet, up to the last position whose next
        token is known."""
        slot = int(batch.slots[row])
        at = int(batch.cu_seqlens[row])
        start = int(self._counts[slot])
        return _Part(slot, start, end - 1, batch.block_tables[:, row], at, int(batch.positions[at]))

    # -- drafts --------------------------------------------------------------------------------------------------

    def seconds(self, num_rows: int) -> float:
        """Expected seconds in which one draft for each of ``num_rows`` rows is made; 0 before the first drafts."""
        return self._times.seconds(num_rows)

    def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """Drafts for each row: at most the given number, and only as many as fit into the request's blocks."""
        drafts: list[list[int]] = [[] for _ in rows]
        limits = [0] * len(rows)
        active = list[int]()
        parts = list[_Part]()
        for index, (request, requested) in enumerate(rows):
            slot = request.slot
            known = len(request.token_ids)
            # A table of recurrent states has at most as many entries as one of K and V.
            positions = max(len(table) for table in request.block_ids) * self._block_size
            limits[index] = min(requested, min(positions, self._most_positions) - known + 2)
            is_ready = self._owners[slot] == request.request_id and self._ends[slot] == known - 1 > 0
            if limits[index] > 0 and is_ready:
                start = min(int(self._counts[slot]), known - 2)
                parts.append(_Part(slot, start, known - 1, request.block_ids))
                active.append(index)
        begin = time.perf_counter()
        features, hidden = self._compute(parts, samples=True)
        for number in range(max(limits, default=0)):
            if not active:
                break
            if number:
                features, hidden = self._pass([rows[index][0] for index in active], number, features)
            drawn = self._draw([rows[index][0] for index in active], number, hidden)
            going = []
            for at, (index, token) in enumerate(zip(active, drawn, strict=True)):
                request = rows[index][0]
                if token >= 0:
                    drafts[index].append(token)
                    self._tokens[request.slot, len(request.token_ids) + number] = token
                    if number + 1 < limits[index]:
                        going.append(at)
            if 0 < len(going) < len(active):
                features = take_rows(features, going)
            active = [active[at] for at in going]
        if count := max(map(len, drafts), default=0):
            self._times.note(len(parts), (time.perf_counter() - begin) / count)
        return drafts

    def forget(self, request: Request) -> None:
        """Do nothing: the next request in the slot begins with its own positions."""

    def _compute(self, parts: Sequence[_Part], samples: bool = False) -> tuple[Tensor, Tensor]:
        """Compute positions from the served model's hidden states, in several calls if they are too many.

        With ``samples``, returns for the last position of each part (features of the next position, hidden states for
        the output head), each [parts, D]; otherwise both are empty.
        """
        found: list[tuple[Tensor, Tensor]] = []
        waiting = [part for part in parts if part.start < part.end]
        while waiting:
            room = self._first.max_tokens
            pieces = list[_Part]()
            while waiting and room:
                part = waiting.pop(0)
                end = min(part.end, part.start + room)
                pieces.append(part._replace(end=end))
                if end < part.end:
                    waiting.insert(0, part._replace(start=end))
                room -= end - part.start
            made = self._call(pieces, samples and not (waiting and waiting[0].slot == pieces[-1].slot), samples)
            if not found and not waiting:
                return made
            found.append((made[0].clone(), made[1].clone()))  # the next call overwrites them
        if not found:
            empty = torch.zeros(0, self._network.config.layer.hidden_size)
            return empty, empty
        return torch.cat([each for each, _ in found]), torch.cat([each for _, each in found])

    def _call(self, parts: Sequence[_Part], is_last: bool, samples: bool) -> tuple[Tensor, Tensor]:
        """Call the layer once. With ``samples``, the results are those of the last position of each part. Without
        ``is_last``, the last part gives no result, because it continues in the next call."""
        slots = np.array([part.slot for part in parts], dtype=np.int32)
        starts, ends = (np.array([part[at] for part in parts], dtype=np.int32) for at in (1, 2))
        lengths = ends - starts
        cu_seqlens = np.concatenate(([0], np.cumsum(lengths)), dtype=np.int32)
        rows = np.repeat(np.arange(len(parts)), lengths)
        positions = np.arange(cu_seqlens[-1], dtype=np.int32) - cu_seqlens[rows] + starts[rows]
        batch = self._batch(slots, [part.table for part in parts], cu_seqlens, positions, rows, ends)
        given = self._first.given[: len(rows)]
        given[:] = self._stored[slots[rows], positions % self._depth]
        for part, begin in zip(parts, cu_seqlens.tolist(), strict=False):
            if part.tapped >= 0:
                skipped = max(part.first - part.start, 0)
                first = part.tapped + part.start + skipped - part.first
                count = part.end - part.start - skipped
                given[begin + skipped : begin + skipped + count] = self._tapped[first : first + count]
        kept = np.zeros(0, np.intp)
        if samples:
            kept = (cu_seqlens[1:] - 1).astype(np.intp)[: len(parts) if is_last else -1]
        features, hidden = self._first.run(batch, kept)
        self._counts[slots] = ends
        return features, hidden

    def _pass(self, requests: Sequence[Request], number: int, features: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the position before draft ``number`` of each request with the drafting layer. Its inputs are
        ``features``, which the layer itself computed for that position. Returns the same as :meth:`_compute`."""
        slots = np.array([request.slot for request in requests], dtype=np.int32)
        positions = np.array([len(request.token_ids) - 2 + number for request in requests], dtype=np.int32)
        rows = np.arange(len(requests))
        cu_seqlens = np.arange(len(requests) + 1, dtype=np.int32)
        tables = [request.block_ids for request in requests]
        batch = self._batch(slots, tables, cu_seqlens, positions, rows, positions + 1)
        self._further.given[: len(rows)] = features.view(torch.uint8).numpy()
        return self._further.run(batch, rows)

    def _batch(
        self,
        slots: _Int32,
        tables: Sequence[Any],
        cu_seqlens: _Int32,
        positions: _Int32,
        rows: npt.NDArray[np.intp],
        ends: _Int32,
    ) -> StepBatch:
        """Batch for the drafting layer. Its input token at each position is the token after that position."""
        size = self._block_size
        blocks = block_tables(tables, -(-int(ends.max()) // size))
        places = blocks[:, rows, positions // size].astype(np.int64) * size + positions % size
        return StepBatch(
            token_ids=self._tokens[slots[rows], positions + 1],
            positions=positions,
            cu_seqlens=cu_seqlens,
            seq_lens=ends,
            block_tables=blocks,
            slot_mapping=np.ascontiguousarray(places),
        )

    def _draw(self, requests: Sequence[Request], number: int, hidden: Tensor) -> list[int]:
        """Sample draft ``number`` of each request with the noise of the draft's position; -1 if no token could be
        sampled."""
        slots = np.array([request.slot for request in requests], dtype=np.int32)
        lengths = np.array([len(request.token_ids) + number for request in requests], dtype=np.int32)
        sampling = [request.sampling for request in requests]
        head = self._network.lm_head
        batch = drawing_batch(self._tokens, slots, lengths, sampling)
        return self._runner.draw(hidden, batch, None if head is None else head.weight, self._network.target_ids)


def load_drafts(folder: Path, served: Served) -> DraftSource:
    """Read the drafting layer in ``folder``. Raises ConfigError and ModelLoadError."""
    layer = load_eagle3(folder, served.native, served.dtype, served.backend.weight_format(None))
    served.check_runs(layer.config.layer)

    def make(runner: DraftRunner, **sizes: int) -> Eagle3Drafter:
        return Eagle3Drafter(layer, runner, most=served.most, **sizes)

    return DraftSource(make=make, taps=layer.config.taps, layers=layer.kv_cache_spec())
