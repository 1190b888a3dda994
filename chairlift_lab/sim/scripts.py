"""Scripted token masks and sample positions, which take the place of grammars and drafts in simulations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from chairlift.base.step_batch import Masks, mask_bits
from chairlift.core.request import Request
from chairlift.core.scheduler.output import FAILED_ROW, SchedulerOutput, StepResult
from chairlift.engine.core import EngineCore
from chairlift.models.hashlm import reference_tokens
from chairlift_lab.sim.policy_watch import Violation
from chairlift_lab.sim.world import VOCAB_SIZE, allowed_at

__all__ = ["Scripts"]


class Scripts:
    """Gives the engine the token masks of a world, and checks tokens that are sampled but then discarded.

    A chunk with several sample positions gives several tokens; the request uses only the last of these tokens.
    """

    def __init__(self, core: EngineCore, windows: Sequence[int | None]) -> None:
        self.num_masks = self.num_checked = 0
        self._scheduler = core.scheduler
        self._update = core.scheduler.update
        self._windows = windows
        self._args: dict[Request, dict[str, Any]] = {}
        self._extra: dict[int, list[tuple[int, Request, int]]] = {}
        """Step number -> (index of the sample position, request, tokens before it) of each token that is discarded."""
        core.masks.others = self._masks
        core.scheduler.update = self._checked  # type: ignore[method-assign]

    def follow(self, request: Request, args: dict[str, Any]) -> None:
        """Use the masks and sample positions in ``args``, from an arrival event, for ``request``."""
        self._args[request] = args
        request.num_sample_positions = args["sample_positions"]

    def _sample_positions(self, out: SchedulerOutput) -> Iterator[tuple[Request, int, bool]]:
        """Yield the sample positions of a step that was just scheduled: (request, number of tokens before the position,
        whether the request uses the sampled token)."""
        running = self._scheduler.running
        for name, _ in out.decode_rows:
            yield running[name], running[name].num_computed_tokens, True
        for name, chunk in zip(out.chunk_ids, out.chunks, strict=True):
            for length in range(chunk.end - chunk.samples + 1, chunk.end + 1):
                yield running[name], length, length == chunk.end

    def _masks(self, out: SchedulerOutput) -> Masks | None:
        masks = {}
        for index, (request, length, used) in enumerate(self._sample_positions(out)):
            if not used:
                self._extra.setdefault(out.step, []).append((index, request, length))
            if allowed := allowed_at(self._args[request], length):
                masks[index] = mask_bits(allowed, VOCAB_SIZE)
        self.num_masks += len(masks)
        return masks or None

    def _checked(self, out: SchedulerOutput, tokens: Sequence[int], now: float) -> StepResult:
        for index, request, length in self._extra.pop(out.step, ()):
            late = request.finish_reason is not None or request.slot < 0 or request.resumed_at_step > out.step
            if not late and tokens[index] != FAILED_ROW:
                self._check(request, length, tokens[index])
        return self._update(out, tokens, now)

    def _check(self, request: Request, length: int, token: int) -> None:
        prefix = request.token_ids[:length]
        args = self._args[request]
        served_alone = (request.sampling, self._windows, VOCAB_SIZE, 1, lambda position: allowed_at(args, position))
        expected = reference_tokens(prefix, *served_alone)[0]
        if len(prefix) != length or token != expected:
            raise Violation(f"{request.request_id}: token {token} after {length} tokens instead of {expected}")
        self.num_checked += 1
