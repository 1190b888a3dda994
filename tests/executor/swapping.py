"""Two requests take turns in a KV cache that is too small for both, so that each must be loaded back from host
memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.core.kv_cache.manager import KVCacheManager, NewBlocks
from chairlift.core.request import Request
from chairlift.core.scheduler.output import Chunk, NewRow, SchedulerOutput
from chairlift.executor.executor import Executor

__all__ = ["TURN", "Turns", "sampling_row"]

TURN = 5
"""Number of tokens generated before the other request's turn."""


def sampling_row(index: int, prompt: Sequence[int], **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(temperature=0.5, **params), seed=index, num_prompt_tokens=len(prompt))


@dataclasses.dataclass
class _Seat:
    request: Request
    joined: bool = False
    in_memory: bool = False


class Turns:
    """Runs two requests in turns. With ``swaps``, the request whose turn ends is saved to host memory and its blocks
    are freed. Without ``swaps``, the cache must have room for both requests.

    Steps with and without ``swaps`` differ only in their block ids, so the results must be equal to the last bit.
    """

    def __init__(self, executor: Executor, swaps: bool) -> None:
        self.executor = executor
        self.swaps = swaps
        self.kv = KVCacheManager(
            executor.cache_groups, executor.block_size, max_step_tokens=1 << 20, enable_prefix_caching=False
        )
        self.out = SchedulerOutput(1)
        self.num_saved = self.num_brought = 0
        """Number of blocks that were saved to host memory, and number of blocks that were loaded back."""
        self.results: list[Any] = []
        """Sampled tokens of every step."""

    def run(self, prompts: list[list[int]], turns: int, **params: Any) -> list[list[int]]:
        """Run both requests in turns. Returns the tokens generated for each prompt."""
        seats = []
        for slot, prompt in enumerate(prompts):
            one = Request(f"r{slot}", prompt, max_tokens=TURN * turns, sampling=sampling_row(slot, prompt, **params))
            one.slot = slot
            seats.append(_Seat(one))
        for _ in range(turns):
            for seat in seats:
                self._come(seat)
                for _ in range(TURN):
                    self._step(seat)
                if self.swaps:
                    self._go(seat)
        return [seat.request.token_ids[seat.request.num_prompt_tokens :] for seat in seats]

    def _come(self, seat: _Seat) -> None:
        one = seat.request
        if seat.in_memory:
            admission = self.kv.swap_in(one, len(one.token_ids), 0.0, self.out.step)
        elif not seat.joined:
            admission = self.kv.admit(one, len(one.token_ids))
        else:
            return
        assert admission is not None
        self.out.swap_in += admission.swap_in
        self.num_brought += len(admission.swap_in)
        one.num_computed_tokens = computed = admission.num_computed_tokens
        seat.joined, seat.in_memory = True, False
        tables = [list(table) for table in one.block_ids]
        row = NewRow(
            one.slot, one.request_id, list(one.token_ids), one.num_prompt_tokens, computed, tables, one.sampling
        )
        self.out.joined.append(row)

    def _go(self, seat: _Seat) -> None:
        one = seat.request
        saved = self.kv.swap_out(one, one.num_computed_tokens, self.out.step - 1)
        assert saved is not None
        self.out.swap_out += saved
        self.num_saved += len(saved)
        self.out.left.append(one.slot)
        one.num_computed_tokens, seat.in_memory = 0, True

    def _step(self, seat: _Seat) -> None:
        one, out = seat.request, self.out
        grown: list[NewBlocks] | None = self.kv.tables.extend(one, len(one.token_ids), out.step - 1)
        assert grown is not None
        out.new_blocks = [(one.slot, blocks) for blocks in grown]
        count = len(one.token_ids) - one.num_computed_tokens
        out.chunks = [Chunk(one.slot, one.num_computed_tokens, count, True, "prefill")]
        sampled = self.executor.sample(self.executor.execute(out)).result()
        self.results.append(sampled)
        one.num_computed_tokens = len(one.token_ids)
        one.token_ids += sampled.token_ids
        self.kv.step_done(out.step)
        self.out = SchedulerOutput(out.step + 1)
