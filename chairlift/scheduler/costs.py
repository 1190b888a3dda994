"""What things cost in time, as the cost model has learnt it: for whoever has to choose."""

from __future__ import annotations

import math
from collections.abc import Sequence

from chairlift.request import Request
from chairlift.scheduler.cost_model import CostModel, StepFeatures
from chairlift.scheduler.deadlines import Outlook
from chairlift.scheduler.output import SchedulerOutput

__all__ = ["Costs"]

_STEADY = 8
"""Of steps that only decode, which are all alike, one in so many is looked at."""
_MEMORY = 0.1
_PACE_MEMORY = 0.01
_MOST_PACE = 16.0
"""A longer pause says nothing about those to come."""


class Costs:
    """A cost model and the sizes of blocks; learns from every step. ``block_bytes`` is per cache group."""

    def __init__(
        self, block_bytes: Sequence[int], model: CostModel | None = None, max_step_tokens: int = 1 << 30
    ) -> None:
        self.model = model or CostModel()
        self._bytes = sum(block_bytes)
        self._step_seconds = 0.0
        self._most_tokens = max_step_tokens
        self._passed = self._predicted = 0.0
        self.host_seconds = 0.0
        """Between the end of a step and the next, as a running mean; with a step ahead most of it is hidden."""
        self._shortest = [0.0] * 64
        """Seconds of the shortest step of 2 ** (i - 1) to 2 ** i - 1 prompt tokens alone; first that of one decode
        row; 0 where there was none."""

    def wants(self, out: SchedulerOutput) -> bool:
        """Whether there is something to learn from a step."""
        return bool(out.chunks or out.swap_out) or out.step % _STEADY == 0

    def observe(self, features: StepFeatures, seconds: float, num_copied: int) -> None:
        """Learn from a step; ``num_copied`` is how many blocks went to host memory or came from there in it."""
        self._step_seconds += (seconds - self._step_seconds) * (_MEMORY if self._step_seconds else 1.0)
        # Of one kind, of one row where it decodes, and without copies: what it takes at least.
        if not num_copied and features.num_decodes == (not features.prefill_tokens):
            size = features.prefill_tokens.bit_length()
            self._shortest[size] = min(self._shortest[size] or seconds, seconds)
        copying, alone = self.model.copy_seconds(num_copied * self._bytes), self.model.step_seconds(features)
        if 16 * copying > alone:  # less is lost in how much steps differ
            self.model.observe_copy(num_copied * self._bytes, seconds - alone)
        else:
            self.model.observe(features, seconds - copying)

    def passed(self, features: StepFeatures, own: float, seconds: float) -> None:
        """A step that took ``own`` seconds landed so many after the one before, with work all the time."""
        self.host_seconds += (min(seconds - own, _MOST_PACE * own) - self.host_seconds) * _PACE_MEMORY
        if not self.model.num_observed:  # a guess, and nobody knows how far off
            return
        predicted = self.model.step_seconds(features)
        self._passed += (min(seconds, _MOST_PACE * predicted) - self._passed) * _PACE_MEMORY
        self._predicted += (predicted - self._predicted) * _PACE_MEMORY

    def wall_seconds(self, features: StepFeatures) -> float:
        """From the end of one step to the end of the next: a wait is the sum of these. Beyond what the model says it
        has the host's time between steps, and the share of unusually long steps, which teach the model little.
        """
        return self.model.step_seconds(features) * (self._passed / self._predicted if self._predicted else 1.0)

    def recompute_seconds(self, num_tokens: int) -> float:
        """To compute so many lost positions of one request again."""
        return self.model.prefill_seconds(num_tokens)

    def swap_seconds(self, num_blocks: int) -> float:
        """To copy so many blocks of every cache group to host memory, and back."""
        return 2 * self.model.copy_seconds(num_blocks * self._bytes)

    def outlook(self, request: Request, num_tokens: int | None, num_shared: int) -> Outlook:
        """Of a request whose answer is expected to have so many tokens, and that shares the KV of the first few."""
        rest = max(1, request.num_prompt_tokens - num_shared)
        num_steps = math.ceil(rest / self._most_tokens)
        alone = min(self.model.step_seconds(StepFeatures(1, request.num_prompt_tokens)), self._shortest[0])
        return Outlook(
            to_first=self.model.prefill_seconds(rest, num_shared) + num_steps * self.host_seconds,
            to_first_at_least=self._least_seconds(rest),
            num_tokens=num_tokens,
            per_token=self._step_seconds + self.host_seconds,
            per_token_alone=alone,
        )

    def _least_seconds(self, num_tokens: int) -> float:
        """To compute so many prompt tokens: no step of more tokens is shorter than the shortest seen of fewer.

        What the model predicts for sizes that were never seen is no proof that a deadline is lost; and what is dropped
        for it never would be.
        """
        whole_steps, rest = divmod(num_tokens, self._most_tokens)
        seconds = whole_steps * max(self._shortest[1 : 1 + self._most_tokens.bit_length()])
        return seconds + max(self._shortest[1 : rest.bit_length()], default=0.0)

    def mixed_cost(self, num_decodes: int, context_tokens: int, num_tokens: int) -> float:
        """How long one step of decode rows and prompt tokens takes, as a multiple of two steps of one kind each."""
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
