"""A small model that makes drafts. The KV of its layers is stored after that of the served model's layers, in the same
blocks and with the same block tables.

It computes prompts in the same steps as the served model, so shared, copied and swapped blocks contain its KV too. Its
tokens are sampled with the request's own parameters and noise, as in the served model. So if both models have similar
probabilities, they draw the same token at any temperature. Speculative decoding with draft models: Leviathan et al.,
2023.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from chairlift.base.step_batch import StepBatch
from chairlift.core.request import Request
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.spec_decode.upkeep import Upkeep
from chairlift.errors import ConfigError, InvariantError
from chairlift.executor.drafters.drafting import DraftTimes, block_tables
from chairlift.executor.drafters.runner import DraftRunner
from chairlift.executor.drafters.source import DraftSource, Served
from chairlift.models.context import LayerState
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_network

__all__ = ["DraftModel", "load_drafts"]

_MAX_CATCH_UP: Final = 256
"""Maximum number of tokens per call that the small model computes for rows whose KV in it is not up to date. So these
rows do not delay a step for long."""


class _Part(NamedTuple):
    """Tokens of one row in a forward pass of the small model: positions ``start`` to ``end`` (excluded)."""

    row: int
    """Index of the row among the rows passed to :meth:`DraftModel.propose`."""
    request: Request
    start: int
    end: int


class DraftModel:
    """Makes drafts for decoding requests. See :class:`~chairlift.core.spec_decode.adaptive.Proposer`.

    Args:
        runner: Runs the small model, whose layers are part of the served model's cache.
        most: Maximum number of drafts for a row in one step.
        num_slots: Number of rows of the engine.
        max_model_len: Maximum sequence length of the engine, in tokens.
        max_positions: Maximum sequence length of the small model, in tokens.
        own_tokens: Size of the small model's vocabulary, with its padding.
        tokens: Size of the served model's vocabulary, with its padding.
        block_size: Tokens per block.
        max_tokens: Maximum number of tokens in a forward pass.
    """

    def __init__(
        self,
        runner: DraftRunner,
        *,
        most: int,
        num_slots: int,
        max_model_len: int,
        max_positions: int,
        block_size: int,
        max_tokens: int,
        own_tokens: int,
        tokens: int,
    ) -> None:
        self._runner = runner
        self._last_own = own_tokens - 1
        self._num_tokens = tokens
        self._block_size = block_size
        self.most = most
        self._most_positions = min(max_positions, max_model_len)
        self._max_tokens = max_tokens
        self._tokens = np.zeros((num_slots, max_model_len + 1), dtype=np.int32)
        """Per slot: the tokens of its sequence, followed by its drafts."""
        self._counts = [0] * num_slots
        """Per slot: number of leading positions whose KV is valid: the small model has computed it for the tokens that
        are now in ``_tokens``."""
        self._sure = [0] * num_slots
        """Per slot: number of leading tokens in ``_tokens`` that are known tokens of the request, not drafts."""
        self._owners: list[str | None] = [None] * num_slots
        self._preempted: dict[str, int] = {}
        """Id of a request that lost its row -> number of leading positions whose KV the small model had computed at
        that time."""
        self._times = DraftTimes()
        self.upkeep = Upkeep()
        """Decides whether prompts are computed with the served model. Otherwise the small model computes a prompt
        before the first drafts of its request."""
        self.sleeps = False
        self._has_gaps = False
        """Whether shared blocks may lack the small model's KV, because the upkeep was off at times."""

    # -- beside the model ----------------------------------------------------------------------------------------

    def follow(self, out: SchedulerOutput, batch: StepBatch) -> None:
        """Compute the prompt chunks of a step. Must be called after the served model has copied and loaded its
        blocks."""
        keeps = self.upkeep.passes(bool(out.joined))
        self._has_gaps |= not keeps
        for slot in out.left:
            self._leave(slot)
        for row in out.joined:
            count = len(row.token_ids)
            self._tokens[row.slot, :count] = self._own(row.token_ids)
            self._leave(row.slot)
            self._owners[row.slot], self._sure[row.slot] = row.request_id, count
            computed = self._preempted.pop(row.request_id, row.num_computed_tokens)
            # Blocks of a preempted request may have come back from another request, which has gaps.
            self._counts[row.slot] = 0 if self._has_gaps else min(computed, row.num_computed_tokens)
        if not keeps:
            return
        started = time.perf_counter()
        prompt_tokens: list[np.ndarray] = []
        first = len(batch.slots) - len(out.chunks)
        for row_index, chunk in enumerate(out.chunks, first):
            if not chunk.drafts and chunk.start <= self._counts[chunk.slot]:
                begin, end = batch.cu_seqlens[row_index : row_index + 2]
                prompt_tokens.append(np.arange(begin, end))
                self._tokens[chunk.slot, chunk.start : chunk.end] = self._own(batch.token_ids[begin:end])
                self._counts[chunk.slot] = chunk.end
        if prompt_tokens:
            prompts = batch.only(np.concatenate(prompt_tokens))
            self._runner.forward(dataclasses.replace(prompts, token_ids=self._own(prompts.token_ids)))
        self.upkeep.kept(time.perf_counter() - started)

    def saw(self, hidden: Tensor, batch: StepBatch, token_ids: Sequence[int]) -> None:
        """Do nothing: the small model does not use the served model's hidden states."""

    # -- drafts --------------------------------------------------------------------------------------------------

    def seconds(self, num_rows: int) -> float:
        """Expected seconds in which one draft for each of ``num_rows`` rows is made; 0 before the first drafts."""
        return self._times.seconds(num_rows)

    def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """Drafts for each row: at most the given number, and only as many as fit into the request's blocks."""
        drafts: list[list[int]] = [[] for _ in rows]
        limits = [0] * len(rows)
        parts = list[_Part]()
        room = min(self._max_tokens, len(rows) + _MAX_CATCH_UP)
        for index, (request, requested) in enumerate(rows):
            known = len(request.token_ids)
            # A table of recurrent states has at most as many entries as one of K and V.
            positions = max(len(table) for table in request.block_ids) * self._block_size
            limits[index] = min(requested, min(positions, self._most_positions) - known + 1)
            start = self._begin(request)
            end = min(known, start + room)
            if limits[index] > 0 and start < end and self._has_window(request, start):
                parts.append(_Part(index, request, start, end))
                room -= end - start
        begin = time.perf_counter()
        for number in range(max(limits, default=0)):
            if not parts:
                break
            drawn = self._pass(parts)
            parts = self._extend(parts, drawn, drafts, limits)
            if number:  # the first pass also computes outdated KV
                self._times.note(len(rows), time.perf_counter() - begin)
            begin = time.perf_counter()
        return drafts

    def forget(self, request: Request) -> None:
        """Forget the small model's state of a request that has ended."""
        self._preempted.pop(request.request_id, None)
        if request.request_id in self._owners:
            self._owners[self._owners.index(request.request_id)] = None

    def _leave(self, slot: int) -> None:
        """Note that the request in ``slot`` leaves its row. The small model's KV may be used again if the request
        returns."""
        owner = self._owners[slot]
        if owner is not None:
            computed = min(self._counts[slot], self._sure[slot])  # later positions may have the KV of rejected drafts
            self._preempted[owner], self._owners[slot] = computed, None

    def _begin(self, request: Request) -> int:
        """Copy the request's new tokens into ``_tokens``. Returns the first position that the small model must
        compute."""
        slot = request.slot
        known = len(request.token_ids)
        if self._owners[slot] != request.request_id:
            self._owners[slot], self._sure[slot], self._counts[slot] = request.request_id, 0, 0
        sure = min(self._sure[slot], known)
        fresh = self._own(request.token_ids[sure:])
        wrong = np.flatnonzero(self._tokens[slot, sure:known] != fresh)
        right = sure + int(wrong[0]) if len(wrong) else known
        self._tokens[slot, sure:known] = fresh
        self._sure[slot] = known
        self._counts[slot] = min(self._counts[slot], right, known - 1)
        return self._counts[slot]

    def _own(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The tokens as the small model reads them, int32. Ids that only the served model has become the last id of the
        small model. They are padding of the vocabulary, so drafts after them may be bad, but answers do not change."""
        return np.minimum(np.asarray(token_ids, dtype=np.int32), self._last_own)

    def _has_window(self, request: Request, start: int) -> bool:
        """Whether the request still has the blocks to which position ``start`` attends. A row that catches up may need
        blocks that the model's sliding windows have passed, whose entries are 0 (the null block); it has no drafts."""
        firsts = ((group, max(0, start + 1 - window)) for group, window in self._runner.windows.items())
        return all(request.block_ids[group][first // self._block_size] for group, first in firsts)

    def _pass(self, parts: Sequence[_Part]) -> dict[int, int]:
        """Compute the tokens of ``parts`` in one forward pass. Returns row index -> token sampled after the row's last
        token. Rows whose known tokens are not all computed yet have no entry."""
        slots = np.array([part.request.slot for part in parts], dtype=np.int32)
        ends = np.array([part.end for part in parts], dtype=np.int32)
        lengths = np.array([part.end - part.start for part in parts], dtype=np.int32)
        cu_seqlens = np.concatenate(([0], np.cumsum(lengths)), dtype=np.int32)
        positions = np.concatenate([np.arange(part.start, part.end, dtype=np.int32) for part in parts])
        rows = np.repeat(np.arange(len(parts)), lengths)
        tables = block_tables([part.request.block_ids for part in parts], -(-int(ends.max()) // self._block_size))
        blocks = tables[:, rows, positions // self._block_size].astype(np.int64)
        complete = [i for i, part in enumerate(parts) if part.end >= len(part.request.token_ids)]
        batch = StepBatch(
            token_ids=self._tokens[slots[rows], positions],
            positions=positions,
            cu_seqlens=cu_seqlens,
            seq_lens=ends,
            block_tables=tables,
            slot_mapping=np.ascontiguousarray(blocks * self._block_size + positions % self._block_size),
            slots=slots,
            tokens=self._tokens,
            sampling=[part.request.sampling for part in parts],
            sample_rows=np.array(complete, dtype=np.int32),
            sample_tokens=cu_seqlens[1:][complete] - 1,
        )
        hidden = self._runner.forward(batch)
        for part in parts:
            self._counts[part.request.slot] = part.end
        tokens = self._runner.sample(hidden, batch, None).token_ids
        return {parts[i].row: token for i, token in zip(complete, tokens, strict=True)}

    def _extend(
        self, parts: Sequence[_Part], drawn: dict[int, int], drafts: list[list[int]], limits: Sequence[int]
    ) -> list[_Part]:
        """Append each token of ``drawn`` to its row's drafts. Returns the parts of the next forward pass: one token of
        each row that may get more drafts."""
        next_parts: list[_Part] = []
        for index, request, _, end in parts:
            token = drawn.get(index, -1)
            if not 0 <= token < self._num_tokens:  # no token, or padding that only the small model has
                continue
            drafts[index].append(token)
            if len(drafts[index]) < limits[index]:
                self._tokens[request.slot, end] = token
                next_parts.append(_Part(index, request, end, end + 1))
        return next_parts


def load_drafts(folder: Path, served: Served) -> DraftSource:
    """Read the small model in ``folder``. Raises ConfigError and ModelLoadError."""
    subject = f"speculative_config: the draft model {served.name!r:.200}"
    small = read_network(folder, "native")
    target = served.network
    if not isinstance(small, NetworkConfig):
        raise ConfigError(f"{subject} has no native family; use another")
    sizes = small.vocab_size, target.vocab_size
    if found := _other_tokenizer(served.model_dir, folder, *sizes):
        raise ConfigError(f"{subject} has another tokenizer ({found}); use a model of the same series")
    served.check_runs(small)
    length = min(served.config.model.max_model_len or small.max_model_len, small.max_model_len)
    small = small.for_length(length)
    weight_format = served.backend.weight_format(None)
    model = load_model(folder, small, served.dtype, "cpu", served.progress, weight_format=weight_format)
    if any(isinstance(layer, LayerState) for layer in model.kv_cache_spec()):
        raise ConfigError(f"{subject} has recurrent states, which cannot go back; use another")

    def make(runner: DraftRunner, **sizes: int) -> DraftModel:
        if runner.draft is None:
            raise InvariantError(f"{type(runner).__name__} was made without the small model")
        vocab = {"own_tokens": small.vocab_size, "tokens": target.vocab_size}
        return DraftModel(runner.draft, most=served.most, max_positions=length, **vocab, **sizes)

    return DraftSource(make=make, small=model, layers=model.kv_cache_spec())


def _other_tokenizer(model_dir: Path, small_dir: Path, small_size: int, size: int) -> str:
    """How the tokenizers in the two directories differ, if both have one and they give different ids to a token; else
    empty. Drafts with wrong ids would almost never be accepted.

    ``small_size`` and ``size`` are the numbers of rows of the two vocabularies. They may differ, because vocabularies
    are padded (Qwen2.5: 151,936 rows in small models and 152,064 in large ones), if the tokenizers say that all tokens
    are in both.
    """
    files = [directory / "tokenizer.json" for directory in (model_dir, small_dir)]
    if not all(file.exists() for file in files):
        lacking = "" if small_size == size else "one of the two has no tokenizer.json to compare them"
        return lacking and f"{small_size} tokens instead of {size}, and {lacking}"
    texts = [file.read_bytes() for file in files]
    if texts[0] == texts[1] and small_size == size:
        return ""
    own, other = (Tokenizer.from_str(text.decode()).get_vocab(with_added_tokens=True) for text in texts)
    highest = max((own[token] for token in own.keys() & other.keys()), default=0)
    if highest >= min(small_size, size):
        return f"{small_size} tokens instead of {size}, and both tokenizers have the token {highest}"
    different = sorted(token for token in own.keys() & other.keys() if own[token] != other[token])
    if different:
        return f"{different[0]!r:.40} is another id there"
    return "" if own.keys() & other.keys() else "no token is in both"
