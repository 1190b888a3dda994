"""Time costs of steps, recomputes and copies, by the cost model, for code that must choose between them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from chairlift.request import Request
from chairlift.scheduler.cost_model import CostModel, StepFeatures
from chairlift.scheduler.deadlines import Estimate
from chairlift.scheduler.output import SchedulerOutput

__all__ = ["Costs"]

_STEADY = 8
"""One in this many steps that only decode is measured. They are all alike."""
_MEMORY = 0.1
_PACE_MEMORY = 0.01
_MOST_PACE = 16.0
"""Longest pause that counts, as a multiple of the step. A longer one says nothing about later pauses."""


class Costs:
    """A cost model and the sizes of blocks; learns from every step. ``block_bytes`` is per cache group."""

    def __init__(
        self, block_bytes: Sequence[int], model: CostModel | None = None, max_step_tokens: int = 1 << 30
    ) -> None:
        self.model = model or CostModel()
        self._block_bytes = tuple(block_bytes)
        self._bytes = sum(block_bytes)
        self._step_seconds = 0.0
        self._most_tokens = max_step_tokens
        self._passed = self._predicted = 0.0
        self.host_seconds = 0.0
        """Running mean of the time between two steps. One step of look-ahead hides most of it."""
        self._shortest = [0.0] * 64
        """Seconds of the shortest step with 2 ** (i - 1) to 2 ** i - 1 prompt tokens and no decode row. Entry 0 is for
        a step of one decode row. 0 means that no such step was seen."""

    def wants(self, out: SchedulerOutput) -> bool:
        """Whether there is something to learn from a step."""
        return bool(out.chunks or out.swap_out) or out.step % _STEADY == 0

    def num_copied(self, out: SchedulerOutput) -> float:
        """Blocks that a step copies to host memory or from there. One block of each cache group together counts 1."""
        moved = sum(self._block_bytes[group] for group, _, _ in (*out.swap_out, *out.swap_in))
        return moved / self._bytes if moved else 0.0

    def observe(self, features: StepFeatures, seconds: float, num_copied: float) -> None:
        """Learn from a step in which ``num_copied`` blocks (see :meth:`num_copied`) were copied."""
        self._step_seconds += (seconds - self._step_seconds) * (_MEMORY if self._step_seconds else 1.0)
        # Steps of one kind, with one decoding row or none, and without copies give the shortest step time.
        if not num_copied and features.num_decodes == (not features.prefill_tokens):
            size = features.prefill_tokens.bit_length()
            self._shortest[size] = min(self._shortest[size] or seconds, seconds)
        nbytes = round(num_copied * self._bytes)
        copying, alone = self.model.copy_seconds(nbytes), self.model.step_seconds(features)
        if 16 * copying > alone:  # a shorter copy is smaller than the spread of steps
            self.model.observe_copy(nbytes, seconds - alone)
        else:
            self.model.observe(features, seconds - copying)

    def passed(self, features: StepFeatures, own: float, seconds: float) -> None:
        """Learn that a step of ``own`` seconds ended ``seconds`` after the one before. There was work all the time."""
        self.host_seconds += (min(seconds - own, _MOST_PACE * own) - self.host_seconds) * _PACE_MEMORY
        if not self.model.num_observed:  # the prediction is a guess with an unknown error
            return
        predicted = self.model.step_seconds(features)
        self._passed += (min(seconds, _MOST_PACE * predicted) - self._passed) * _PACE_MEMORY
        self._predicted += (predicted - self._predicted) * _PACE_MEMORY

    def wall_seconds(self, features: StepFeatures) -> float:
        """Seconds from the end of one step to the end of the next. A wait is the sum of these.

        This is the model's prediction plus the host's time between steps and the share of unusually long steps, which
        the model hardly learns.
        """
        return self.model.step_seconds(features) * (self._passed / self._predicted if self._predicted else 1.0)

    def recompute_seconds(self, num_tokens: int) -> float:
        """Seconds to compute ``num_tokens`` lost positions of one request again."""
        return self.model.prefill_seconds(num_tokens)

    def swap_seconds(self, num_blocks: Sequence[int]) -> float:
        """Seconds to copy ``num_blocks`` blocks, one number per cache group, to host memory and back."""
        nbytes = sum(count * size for count, size in zip(num_blocks, self._block_bytes, strict=True))
        return 2 * self.model.copy_seconds(nbytes)

    def estimate(self, request: Request, num_tokens: int | None, num_shared: int) -> Estimate:
        """Estimate for a request that is expected to answer ``num_tokens`` tokens and shares ``num_shared`` of KV."""
        rest = max(1, request.num_prompt_tokens - num_shared)
        num_steps = math.ceil(rest / self._most_tokens)
        alone = min(self.model.step_seconds(StepFeatures(1, request.num_prompt_tokens)), self._shortest[0])
        return Estimate(
            to_first=self.model.prefill_seconds(rest, num_shared) + num_steps * self.host_seconds,
            to_first_at_least=self._least_seconds(rest),
            num_tokens=num_tokens,
            per_token=self._step_seconds + self.host_seconds,
            per_token_alone=alone,
        )

    def _least_seconds(self, num_tokens: int) -> float:
        """Lower bound of the seconds to compute ``num_tokens`` prompt tokens.

        A step of more tokens is never shorter than the shortest one seen with fewer. The model's prediction is no
        proof for sizes that were never seen: a request dropped for it would never be measured.
        """
        whole_steps, rest = divmod(num_tokens, self._most_tokens)
        seconds = whole_steps * max(self._shortest[1 : 1 + self._most_tokens.bit_length()])
        return seconds + max(self._shortest[1 : rest.bit_length()], default=0.0)

    def mixed_cost(self, num_decodes: int, context_tokens: int, num_tokens: int) -> float:
        """Seconds of a step with decode rows and prompt tokens, divided by the seconds of two separate steps."""
        pairs = num_tokens * (num_tokens + 1) / 2
        both = self.model.step_seconds(StepFeatures(num_decodes, context_tokens, num_tokens, pairs))
        decode = self.model.step_seconds(StepFeatures(num_decodes, context_tokens))
        return both / (decode + self.model.step_seconds(StepFeatures(0, 0, num_tokens, pairs)))

    def chunk_budget(self, num_decodes: int, context_tokens: int, seconds: float, most: int) -> int:
        """The most prompt tokens, of up to ``most``, with which a step of these decode rows takes at most ``seconds``.

        At least a sixteenth of ``most``: smoothness for some must not stop the others.
        """
        low, high = max(1, most // 16), most
        while low < high:
            middle = (low + high + 1) // 2
            features = StepFeatures(num_decodes, context_tokens, middle, middle * (middle + 1) / 2)
            if self.model.step_seconds(features) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low
