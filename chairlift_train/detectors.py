"""Two detectors of a change in the mean of a stream of numbers. Their state is bounded; standard library only."""

from __future__ import annotations

import math
from typing import Any, Protocol

from chairlift.errors import ConfigError

__all__ = ["Adwin", "Detector", "PageHinkley"]


class Detector(Protocol):
    """Protocol of a change detector for :class:`~chairlift_train.drift.DriftSampler`. Its state is plain data."""

    before: float
    """Mean of the stream's values before the last detected change."""
    after: float
    """Mean of the values after the last detected change, up to its detection."""
    recent: int
    """Number of values over which the mean ``after`` is computed."""

    def update(self, value: float) -> bool:
        """Add the next value. Returns whether a change was detected. Raises ConfigError for a value that is not
        finite."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ConfigError(f"a detector needs finite numbers, got {value}; leave out steps without a loss")
    return float(value)


class PageHinkley:
    """Page-Hinkley test: cumulative sums of the deviations above and below the running mean (Page, 1954; Hinkley,
    1971).

    Deviations are divided by the standard deviation since the last change, and limited to four, so the settings do not
    depend on the unit of the values. Time and memory are O(1). It is meant for abrupt changes. Use :class:`Adwin` for
    slow changes, and if the spread of the values grows.
    """

    def __init__(self, delta: float = 0.5, threshold: float = 15.0, warmup: int = 30) -> None:
        """Create a detector. Raises ConfigError for settings out of range.

        - ``delta``: deviation that is ignored at every value; half of the smallest change to detect.
        - ``threshold``: a change is detected when the sum of the deviations beyond ``delta`` exceeds this number.
        - ``warmup``: number of values from which the mean and the standard deviation are estimated first.
        """
        if delta < 0 or threshold <= 0 or warmup < 2:
            raise ConfigError(
                "PageHinkley needs delta >= 0, threshold > 0 and warmup >= 2, "
                f"got delta={delta}, threshold={threshold}, warmup={warmup}"
            )
        self.delta = delta
        self.threshold = threshold
        self.warmup = warmup
        self.before = self.after = 0.0
        self.recent = 0
        self._restart()

    def _restart(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0
        # For each direction (up, down): [cumulative sum of deviations, number of values since this sum was last 0, sum
        # of these values].
        self._runs: list[list[float]] = [[0.0, 0, 0.0], [0.0, 0, 0.0]]

    def update(self, value: float) -> bool:
        """Add the next value. Returns whether a change was detected. Raises ConfigError for a value that is not
        finite."""
        value = _finite(value)
        if self._count >= self.warmup:
            deviation = math.sqrt(self._squares / (self._count - 1))
            scaled = (value - self._mean) / max(deviation, 1e-12 * (1 + abs(self._mean)))
            scaled = max(-4.0, min(4.0, scaled))
            for sign, run in zip((1, -1), self._runs, strict=True):
                run[0] += sign * scaled - self.delta
                run[1] += 1
                run[2] += value
                if run[0] <= 0:
                    run[:] = [0.0, 0, 0.0]
        self._count += 1
        step = value - self._mean
        self._mean += step / self._count
        self._squares += step * (value - self._mean)
        largest = max(self._runs)
        if largest[0] <= self.threshold:
            return False
        _, recent, total = largest
        self.recent = int(recent)
        self.after = total / recent
        self.before = (self._mean * self._count - total) / (self._count - recent)
        self._restart()
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "moments": [self._count, self._mean, self._squares],
            "runs": [list(run) for run in self._runs],
            "last": [self.before, self.after, self.recent],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count, self._mean, self._squares = state["moments"]
        self._runs = [list(run) for run in state["runs"]]
        self.before, self.after, self.recent = state["last"]


class Adwin:
    """ADWIN: a window of recent values that drops its older part when the mean changes (Bifet and Gavaldà, 2007).

    The window is stored as O(log n) buckets of 1, 2, 4... values, with at most ``buckets`` buckets of each size. A
    change is detected if, for some split of the window, the means of the two parts differ by more than a bound. The
    window is then cut where a change is most likely. The values should vary by about 1, like losses in nats or
    logarithms of lengths.
    """

    def __init__(self, delta: float = 0.002, clock: int = 4, buckets: int = 5, min_side: int = 5) -> None:
        """Create a detector. Raises ConfigError for settings out of range.

        - ``delta``: significance level. A smaller number gives fewer false alarms.
        - ``clock``: number of values between two tests for a change.
        - ``buckets``: maximum number of buckets of each size.
        - ``min_side``: minimum number of values on each side of a split.
        """
        if not 0 < delta < 1 or clock < 1 or buckets < 2 or min_side < 1:
            raise ConfigError(
                "Adwin needs 0 < delta < 1, clock >= 1, buckets >= 2 and min_side >= 1, "
                f"got delta={delta}, clock={clock}, buckets={buckets}, min_side={min_side}"
            )
        self.delta = delta
        self.clock = clock
        self.buckets = buckets
        self.min_side = min_side
        self.before = self.after = 0.0
        self.recent = 0
        self._ticks = 0
        self._rows: list[list[tuple[float, float]]] = [[]]
        """``_rows[k]``: (mean, sum of squared deviations) of each bucket of ``2**k`` values, oldest bucket first."""

    def update(self, value: float) -> bool:
        """Add the next value. Returns whether a change was detected. Raises ConfigError for a value that is not
        finite."""
        self._rows[0].append((_finite(value), 0.0))
        self._merge()
        self._ticks += 1
        return self._ticks % self.clock == 0 and self._cut()

    def _merge(self) -> None:
        for k, row in enumerate(self._rows):
            if len(row) <= self.buckets:
                return
            (mean_a, squares_a), (mean_b, squares_b) = row[:2]
            del row[:2]
            if k + 1 == len(self._rows):
                self._rows.append([])
            squares = squares_a + squares_b + (mean_a - mean_b) ** 2 * 2**k / 2
            self._rows[k + 1].append(((mean_a + mean_b) / 2, squares))

    def _cut(self) -> bool:
        window = [(2**k, *bucket) for k in reversed(range(len(self._rows))) for bucket in self._rows[k]]
        count = sum(size for size, _, _ in window)
        if count < 2 * self.min_side:
            return False
        total = sum(size * mean for size, mean, _ in window)
        centre = total / count
        variance = sum(squares + size * (mean - centre) ** 2 for size, mean, squares in window) / count
        confidence = math.log(2 * math.log(count) / self.delta)
        found = False
        cut = 0
        best = 0.0
        older = 0
        older_total = 0.0
        for index, (size, mean, _) in enumerate(window[:-1], start=1):
            older += size
            older_total += size * mean
            newer = count - older
            before, after = older_total / older, (total - older_total) / newer
            sides = older - self.min_side + 1, newer - self.min_side + 1
            if min(sides) > 0:
                # If one side of the split has few values, a difference can be chance. So ``min_side`` - 1 is subtracted
                # from both counts, which enlarges the bound.
                inverse = 1 / sides[0] + 1 / sides[1]
                bound = math.sqrt(2 * inverse * variance * confidence) + 2 / 3 * inverse * confidence
                found = found or abs(after - before) > bound
            likelihood = older * newer * (after - before) ** 2
            if likelihood > best:
                best = likelihood
                cut = index
                last = (before, after, newer)
        if found:
            self.before, self.after, self.recent = last
            self._drop(cut)
        return found

    def _drop(self, buckets: int) -> None:
        for row in reversed(self._rows):
            count = min(buckets, len(row))
            del row[:count]
            buckets -= count

    def state_dict(self) -> dict[str, Any]:
        rows = [[list(bucket) for bucket in row] for row in self._rows]
        return {"ticks": self._ticks, "rows": rows, "last": [self.before, self.after, self.recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ticks = state["ticks"]
        self._rows = [[(float(mean), float(squares)) for mean, squares in row] for row in state["rows"]]
        self.before, self.after, self.recent = state["last"]
