"""Limits for a governor's proposals: bounds, small steps, no oscillation, and a return to the configured settings after
harm."""

from __future__ import annotations

import dataclasses
from collections import deque

from chairlift.core.scheduler.governor import UNHEALTHY, Bounds, Observation, Settings

__all__ = ["GuardRails"]

_WATERMARK_STEP = 0.04


class GuardRails:
    """Limits a governor's proposals.

    Settings stay within bounds, change in small steps, and do not change direction too soon. After a change that costs
    throughput, the configured settings are used for a while.
    """

    def __init__(
        self,
        configured: Settings,
        bounds: Bounds,
        *,
        cool_down: float = 4.0,
        worst_drop: float = 0.4,
        patience: int = 16,
        hold: float = 30.0,
    ) -> None:
        self.configured = configured
        self.bounds = bounds
        self._cool_down = cool_down
        """Minimum seconds before a setting may change in the opposite direction."""
        self._worst_drop = worst_drop
        self._patience = patience
        self._hold = self._first_hold = hold
        self._held_until = float("-inf")
        self._moved: dict[str, tuple[int, float]] = {}
        """Name of a setting -> (direction of its last change, time of that change)."""
        self._busy: deque[tuple[float, float]] = deque(maxlen=patience)
        """(tokens per second, fraction of prompt tokens) of each window in which requests waited, since the last large
        change."""
        self._base = configured
        """Settings after the last large change."""
        self._before: tuple[float, float] | None = None
        """Mean of ``_busy`` before the last large change of the settings; None if it is already known whether that
        change did harm."""

    def harmed(self, now: float, seen: Observation) -> str:
        """Reason to use the configured settings for a while; "" if there is none. Each large change is judged once."""
        if not seen.waiting or not seen.tokens_per_second:
            return ""
        self._busy.append((seen.tokens_per_second, seen.prefill_share))
        if self._before is None or len(self._busy) < self._patience:
            return ""
        (speed, share), (was, share_was) = self._mean(), self._before
        self._before = None
        # Throughput is not compared between different kinds of traffic. With many preemptions it is not compared
        # either: avoiding them costs throughput, and the configured settings would preempt more.
        unlike = abs(share - share_was) > 0.1 or seen.preemption_rate > UNHEALTHY
        if unlike or speed >= was * (1 - self._worst_drop) or seen.settings == self.configured:
            return ""
        self._held_until = now + self._hold
        self._hold = min(self._hold * 2, 16 * self._first_hold)
        return f"{speed:.0f} tokens/s after {was:.0f} before; the configured settings, for a while"

    def held(self, now: float) -> bool:
        """Whether the configured settings are in use because a change did harm."""
        return now < self._held_until

    def limit(self, now: float, current: Settings, proposed: Settings) -> Settings:
        """The allowed settings that are nearest to ``proposed``."""
        proposed = self.bounds.clamp(proposed)
        running = self._step("running", now, current.running, proposed.running)
        tokens = self._step("tokens", now, current.tokens, proposed.tokens)
        watermark = current.watermark
        if abs(proposed.watermark - watermark) >= _WATERMARK_STEP / 2 and self._may_reverse(
            "watermark", now, proposed.watermark - watermark
        ):
            watermark += max(-_WATERMARK_STEP, min(proposed.watermark - watermark, _WATERMARK_STEP))
        return self.bounds.clamp(Settings(running, tokens, watermark))

    def moved(self, now: float, before: Settings, after: Settings) -> None:
        """Note that the settings were changed."""
        for field in dataclasses.fields(Settings):
            old, new = getattr(before, field.name), getattr(after, field.name)
            if old != new:
                self._moved[field.name] = (1 if new > old else -1, now)
        if _differ(self._base, after) and len(self._busy) >= self._patience // 2:
            self._base, self._before = after, self._mean()
            self._busy.clear()

    def _step(self, name: str, now: float, at: int, proposed: int) -> int:
        """Next value of a setting on the way from ``at`` to ``proposed``: at most an eighth (at least 1) higher, or at
        most a half lower.

        The value stays the same if the change is less than a twentieth, or reverses a change within the cool-down.
        """
        aim = max(at // 2, min(proposed, at + max(1, at // 8)))
        if abs(aim - at) < max(1.0, at / 20):
            return at
        return aim if self._may_reverse(name, now, aim - at) else at

    def _may_reverse(self, name: str, now: float, change: float) -> bool:
        direction, when = self._moved.get(name, (0, 0.0))
        return direction * change >= 0 or now - when >= self._cool_down

    def _mean(self) -> tuple[float, float]:
        count = len(self._busy)
        return sum(speed for speed, _ in self._busy) / count, sum(share for _, share in self._busy) / count


def _differ(one: Settings, other: Settings) -> bool:
    """Whether a change from ``one`` to ``other`` counts as large, that is, as more than fine-tuning."""
    ratios = (one.running / other.running, one.tokens / other.tokens)
    return any(not 0.8 < ratio < 1.25 for ratio in ratios) or abs(one.watermark - other.watermark) > 0.1
