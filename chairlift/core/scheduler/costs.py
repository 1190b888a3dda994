"""Costs in seconds of steps, recomputes and copies, predicted by the cost model. The scheduler compares these costs to
choose between alternatives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from chairlift.core.request import Request
from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift.core.scheduler.deadlines import Estimate
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.scheduler.row_times import RowTimes

__all__ = ["Costs"]

_STEADY = 8
"""Steps that only decode are similar, so the model learns from one in this many of such steps."""
_MEMORY = 0.1
_PACE_MEMORY = 0.01
_MAX_PACE = 16.0
"""Limit for learning the pause between two steps, as a multiple of the step time. A longer pause counts as this long,
because it says nothing about later pauses."""


class Costs:
    """A cost model together with the sizes of KV blocks. It learns from every step. ``block_bytes`` has one entry per
    cache group: bytes of a block."""

    def __init__(
        self, block_bytes: Sequence[int], model: CostModel | None = None, max_step_tokens: int = 1 << 30
    ) -> None:
        self.model = model or CostModel()
        self._row_times = RowTimes(self.model)
        self._block_bytes = tuple(block_bytes)
        self._bytes = sum(block_bytes)
        self._step_seconds = 0.0
        self._max_step_tokens = max_step_tokens
        self._passed = self._predicted = 0.0
        self.host_seconds = 0.0
        """Running mean of the seconds between two steps. Scheduling one step ahead hides most of this time."""
        self._shortest = [0.0] * 64
        """Entry i: seconds of the shortest step with 2 ** (i - 1) to 2 ** i - 1 prompt tokens and no decode row. Entry
        0: shortest step with one decode row and no prompt. 0 means that no such step was seen."""

    def wants(self, out: SchedulerOutput) -> bool:
        """Whether the model can learn from this step."""
        return bool(out.chunks or out.swap_out) or out.step % _STEADY == 0

    def num_copied(self, out: SchedulerOutput) -> float:
        """Number of blocks that a step copies to or from host memory, weighted by their size. One block from each cache
        group, together, counts as 1."""
        moved = sum(self._block_bytes[group] for group, _, _ in (*out.swap_out, *out.swap_in))
        return moved / self._bytes if moved else 0.0

    def observe(self, features: StepFeatures, seconds: float, num_copied: float) -> None:
        """Learn from a step that took ``seconds`` and copied ``num_copied`` blocks (see :meth:`num_copied`)."""
        self._step_seconds += (seconds - self._step_seconds) * (_MEMORY if self._step_seconds else 1.0)
        # The shortest step times come from steps without copies that have either one decode row or only prompt tokens.
        if not num_copied and features.num_decodes == (not features.prefill_tokens):
            size = features.prefill_tokens.bit_length()
            self._shortest[size] = min(self._shortest[size] or seconds, seconds)
        nbytes = round(num_copied * self._bytes)
        copying = self.model.copy_seconds(nbytes)
        without_copy = self.model.step_seconds(features)
        if 16 * copying > without_copy:  # the noise of step times hides a shorter copy
            self.model.observe_copy(nbytes, seconds - without_copy)
        else:
            self._row_times.observe(features, seconds - copying)
            self.model.observe(features, seconds - copying)

    def passed(self, features: StepFeatures, own: float, seconds: float) -> None:
        """Learn the pause between steps: a step that took ``own`` seconds ended ``seconds`` after the previous step,
        and there was work to do all the time."""
        self.host_seconds += (min(seconds - own, _MAX_PACE * own) - self.host_seconds) * _PACE_MEMORY
        if not self.model.num_observed:  # the prediction is a guess with an unknown error
            return
        predicted = self.model.step_seconds(features)
        self._passed += (min(seconds, _MAX_PACE * predicted) - self._passed) * _PACE_MEMORY
        self._predicted += (predicted - self._predicted) * _PACE_MEMORY

    def decode_seconds(self, features: StepFeatures) -> float:
        """Predicted seconds of a step, close to the newest steps with as many rows. It compares steps of nearby sizes
        better than the model, but may fall where a step grows."""
        return self._row_times.seconds(features)

    def wall_seconds(self, features: StepFeatures) -> float:
        """Seconds from the end of one step to the end of the next step. The time that a request waits is the sum of
        these times.

        The result is the model's prediction, plus the host time between steps, plus an extra time for unusually long
        steps, to which the model gives little weight.
        """
        return self.model.step_seconds(features) * (self._passed / self._predicted if self._predicted else 1.0)

    def recompute_seconds(self, num_tokens: int) -> float:
        """Seconds to compute ``num_tokens`` lost positions of one request again."""
        return self.model.prefill_seconds(num_tokens)

    def swap_seconds(self, num_blocks: Sequence[int]) -> float:
        """Seconds to copy blocks to host memory and back. ``num_blocks`` has the number of blocks per cache group."""
        nbytes = sum(count * size for count, size in zip(num_blocks, self._block_bytes, strict=True))
        return 2 * self.model.copy_seconds(nbytes)

    def estimate(self, request: Request, num_tokens: int | None, num_shared: int) -> Estimate:
        """Estimate for a request: its answer is expected to have ``num_tokens`` tokens, and ``num_shared`` of its
        positions are cached."""
        rest = max(1, request.num_prompt_tokens - num_shared)
        num_steps = math.ceil(rest / self._max_step_tokens)
        pause = request.mask_seconds if request.mask_seconds > self._step_seconds else 0.0
        per_token_alone = min(self.model.step_seconds(StepFeatures(1, request.num_prompt_tokens)), self._shortest[0])
        return Estimate(
            to_first=self.model.prefill_seconds(rest, num_shared) + num_steps * self.host_seconds + pause,
            to_first_at_least=self._least_seconds(rest),
            num_tokens=num_tokens,
            per_token=self._step_seconds + self.host_seconds + pause,
            per_token_alone=per_token_alone,
        )

    def _least_seconds(self, num_tokens: int) -> float:
        """Lower bound of the seconds that ``num_tokens`` prompt tokens take.

        The bound uses only measured steps: a step takes at least as long as the shortest measured step with fewer
        tokens. The model's prediction is not used, because it may be too high for sizes that were never seen; requests
        that are dropped because of it would never be measured.
        """
        whole_steps, rest = divmod(num_tokens, self._max_step_tokens)
        seconds = whole_steps * max(self._shortest[1 : 1 + self._max_step_tokens.bit_length()])
        return seconds + max(self._shortest[1 : rest.bit_length()], default=0.0)

    def chunk_budget(
        self, decodes: StepFeatures, seconds: float, limit: int, at_least: int | None = None, begin: int = 0
    ) -> int:
        """Maximum number of prompt tokens, up to ``limit``, with which a step with the rows of ``decodes`` takes at
        most ``seconds``. The tokens follow ``begin`` computed tokens of their prompt, to which they also attend.

        The result is at least ``at_least`` (default: ``limit // 16``), so that prompts always make progress.
        """
        low, high = min(limit, max(1, limit // 16) if at_least is None else at_least), limit
        while low < high:
            middle = (low + high + 1) // 2
            pairs = middle * begin + middle * (middle + 1) / 2
            features = decodes._replace(prefill_tokens=middle, prefill_context=pairs)
            if self.model.step_seconds(features) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low
