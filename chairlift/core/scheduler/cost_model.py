"""Predicts step times. The model learns from the steps that ran.

The model is a roofline with phases that do not overlap. First a step reads the weights or computes with them, whichever
takes longer. Then its decode rows read their KV and its prompt chunks attend; both cost a time per position. If rows
read the KV of a shared prefix together, each further row only computes with it, at a price of its own. The step also
reads each of its adapters (LoRA) once, at a time per byte. Real kernels deviate from an ideal roofline (tiles,
caches, launches), so the first phase is a piecewise linear, rising function of the number of tokens. It has one knot
per doubling of the number of tokens, on both sides of the ridge (where computing begins to take longer than reading).
All terms are linear, with coefficients that must not be negative. So each prediction is positive and rises with every
feature.

The model is fitted online; memory and time per step do not grow. Each segment between two knots stores the normal
equations of its steps. Every few steps, the equations of all segments are solved together by coordinate descent
(non-negative least squares). Old steps of a segment lose weight only when new steps fall into the same segment, so an
hour of pure decoding does not erase what was learnt about prompts. Errors are relative, and outliers are damped (Huber,
1964), so unusually slow steps (the first ones, or those that the operating system interrupted) do little harm. For
sizes that were not observed, the prior is used, scaled by the observations at other sizes.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.core.scheduler.output import Chunk

__all__ = ["PRICES", "CostModel", "Roofline", "StepFeatures"]

_KNOTS_BELOW = 3
_KNOTS_ABOVE = 7
_NUM_KNOTS = _KNOTS_BELOW + _KNOTS_ABOVE + 1
PRICES = ("row", "prompt", "context", "pair", "adapter", "shared")
"""Names of the prices, which are the last coefficients of a model, in this order: seconds per decode row, per prompt
token, per position that decode rows read, per position that prompt tokens attend to, per byte of adapters, and per
position that is shared."""
_NUM_PRICES = len(PRICES)
_NUM_LOCAL = 2 + _NUM_PRICES
"""Number of features of a segment: the constant 1, the covered fraction of the segment, and six features with a price
(decode rows, prompt tokens, context that is read, prompt context, bytes of adapters, context that is shared)."""
_FEWEST_PRICES = 4
"""Number of prices in the oldest version: without adapters and without shared prefixes, the last two."""
_PAIRS = tuple((one, other) for one in range(_NUM_LOCAL) for other in range(one, _NUM_LOCAL))
_FORGET = 0.995
_REFIT_EVERY = 64
_SWEEPS = 30
_MIN_SECONDS = 1e-9
_OUTLIER = 2.0
"""If an observed error is larger than this multiple of the typical error, the step counts as an outlier and gets a
smaller weight."""


class StepFeatures(NamedTuple):
    """Features of a step that determine its cost."""

    num_decodes: int = 0
    """Number of rows that compute one token; each draft counts as a row."""
    context_tokens: int = 0
    """Number of positions that the decode rows attend to, summed over the rows."""
    prefill_tokens: int = 0
    """Number of prompt tokens in chunks, including recomputed tokens."""
    prefill_context: float = 0.0
    """Number of positions that the prompt tokens attend to, summed over the tokens (per chunk: tokens times mean
    context)."""
    adapter_bytes: float = 0.0
    """Bytes of the adapters of all rows. Each adapter counts once, because a step reads it once."""
    shared_tokens: int = 0
    """Number of positions among :attr:`context_tokens` whose KV the step has read already for another decode row."""

    @classmethod
    def of(
        cls,
        num_decodes: int,
        context_tokens: int,
        chunks: Iterable[Chunk],
        adapter_bytes: float = 0.0,
        shared_tokens: int = 0,
    ) -> StepFeatures:
        """Features of a step, from its number of decode rows, the context of these rows, and its prompt chunks."""
        tokens = 0
        context = 0.0
        for chunk in chunks:
            if chunk.drafts:
                num_decodes += chunk.num_tokens
                continue
            tokens += chunk.num_tokens
            context += chunk.num_tokens * (chunk.start + (chunk.num_tokens + 1) / 2)
        return cls(num_decodes, context_tokens, tokens, context, adapter_bytes, shared_tokens)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Initial estimate of the cost of each kind of work, in seconds."""

    weight_seconds: float = 0.02
    """Seconds to read all weights once."""
    token_seconds: float = 0.001
    """Seconds to compute one token that is sampled from."""
    prompt_share: float = 1.0
    """Cost of a token that is not sampled from, as a fraction of ``token_seconds``. Such a token skips the output
    head."""
    context_seconds: float = 3e-7
    """Seconds for a decode row to attend to one position."""
    shared_share: float = 0.5
    """Cost of attending to a position whose KV the step has read already for another row, as a fraction of
    ``context_seconds``."""
    pair_seconds: float = 1e-7
    """Seconds for a prompt token to attend to one position."""
    step_seconds: float = 0.0005
    """Seconds per step that do not depend on the step's content."""
    adapter_byte_seconds: float = 1e-10
    """Seconds to read one byte of an adapter."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
                raise ConfigError(f"{field.name} of a cost model must be above 0 and below a million, got {value!r}")
        for name in ("prompt_share", "shared_share"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name} of a cost model must be at most 1, got {getattr(self, name)!r}")

    @property
    def ridge(self) -> float:
        """Number of tokens in a step above which computing takes longer than reading the weights."""
        return self.weight_seconds / self.token_seconds


class CostModel:
    """Predicts seconds of steps, prompts and copies. Not thread-safe.

    ``prior`` is used until steps are observed, ``copy_bandwidth`` (bytes per second) until copies are observed.
    """

    def __init__(self, prior: Roofline | None = None, copy_bandwidth: float = 5e9) -> None:
        self.prior = prior or Roofline()
        if not 0 < copy_bandwidth < 1e15:
            raise ConfigError(f"copy_bandwidth must be in bytes per second and above 0, got {copy_bandwidth!r}")
        self.copy_bandwidth = copy_bandwidth
        self.num_observed = 0
        ridge = self.prior.ridge
        self._ends = [ridge * 2.0**power for power in range(-_KNOTS_BELOW, _KNOTS_ABOVE + 1)]
        self._begins = [0.0, *self._ends[:-1]]
        self._prior = self._prior_coefficients()
        self._clear()
        self._error = 1.0
        """Typical relative error: a running median."""
        self._log_scale = 0.0
        """Running mean of the logarithm of (observed time / time predicted by the prior)."""
        self._set(list(self._prior))

    # -- predictions ---------------------------------------------------------------------------------------------

    def step_seconds(self, step: StepFeatures) -> float:
        """Predicted seconds of one step. The result is above 0 and never decreases when a feature grows, except
        ``shared_tokens``."""
        tokens = step.num_decodes + self.prior.prompt_share * step.prefill_tokens
        at = min(bisect.bisect_left(self._ends, tokens), _NUM_KNOTS - 1)
        seconds = self._levels[at] + self._slopes[at] * (tokens - self._begins[at])
        row, prompt, context, pair, adapter, shared = self._prices
        seconds += row * step.num_decodes + prompt * step.prefill_tokens
        seconds = seconds + context * (step.context_tokens - step.shared_tokens) + pair * step.prefill_context
        return seconds + adapter * step.adapter_bytes + shared * step.shared_tokens

    def prefill_seconds(self, num_tokens: int, context: int = 0) -> float:
        """Predicted seconds to compute ``num_tokens`` prompt tokens after ``context`` earlier ones, in a step without
        other work."""
        return self.step_seconds(StepFeatures(0, 0, num_tokens, num_tokens * (context + (num_tokens + 1) / 2)))

    def copy_seconds(self, num_bytes: int) -> float:
        """Predicted seconds to copy KV between device and host memory."""
        return num_bytes / self.copy_bandwidth

    # -- coefficients --------------------------------------------------------------------------------------------

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds of a step without tokens, the increase in each stretch between two knots, and the prices of
        :data:`PRICES`."""
        return tuple(self._coefficients)

    def with_coefficients(self, coefficients: Sequence[float]) -> CostModel:
        """A model with the same prior and these :attr:`coefficients`, and without observations. Raises ConfigError for
        other numbers of coefficients, and if one is negative or not finite."""
        if len(coefficients) != len(self._coefficients):
            raise ConfigError(f"a cost model has {len(self._coefficients)} coefficients, got {len(coefficients)}")
        model = CostModel(self.prior, self.copy_bandwidth)
        fields = model.to_dict() | {"coefficients": list(coefficients), "num_observed": self.num_observed}
        return CostModel.from_dict(fields | {"error": self._error, "log_scale": self._log_scale})

    # -- observations --------------------------------------------------------------------------------------------

    def observe(self, step: StepFeatures, seconds: float) -> None:
        """Learn from a step that took ``seconds``. A time that is not above 0 is ignored."""
        self._observe(step, seconds, _FORGET)

    def _observe(self, step: StepFeatures, seconds: float, forget: float) -> None:
        if not 0 < seconds < math.inf:
            return
        self.num_observed += 1
        predicted = self.step_seconds(step)
        error = abs(seconds - predicted) / predicted
        weight = min(1.0, _OUTLIER * self._error / error) if error else 1.0
        self._error = max(0.01, self._error * (1.05 if error > self._error else 1 / 1.05))
        share = max(1 - forget, 1 / self.num_observed)
        off = math.log(seconds / self._scaled_prior(step)) if self.num_observed > 1 else 0.0
        first = math.log(seconds / self._prior_seconds(step)) if self.num_observed == 1 else 0.0
        self._log_scale += first + share * max(-1.0, min(1.0, off))
        # Errors are relative to the prediction. A step that took longer than predicted counts less, because noise only
        # makes steps longer.
        self._accumulate(step, seconds, weight / (predicted * max(seconds, predicted)), forget)
        if self.num_observed % _REFIT_EVERY == 0 or self.num_observed in (1, 2, 4, 8, 16, 32):
            self._set(self._solve(self._coefficients, _SWEEPS))

    def observe_copy(self, num_bytes: int, seconds: float) -> None:
        """Learn from a copy. A single outlier changes the bandwidth by at most 7 %."""
        if num_bytes > 0 and seconds > 0:
            off = math.log(num_bytes / seconds / self.copy_bandwidth)
            self.copy_bandwidth *= math.exp(0.1 * max(-0.7, min(0.7, off)))

    def fit(self, steps: Sequence[tuple[StepFeatures, float]], passes: int = 4) -> None:
        """Discard all observations, and learn from these steps with equal weight.

        Each pass detects outliers better than the previous pass.
        """
        for _ in range(passes):
            self._clear()
            for step, seconds in steps:
                self._observe(step, seconds, forget=1.0)
            self._set(self._solve(self._coefficients, 40 * _SWEEPS))

    def errors(self, steps: Iterable[tuple[StepFeatures, float]]) -> list[float]:
        """Relative errors of the predictions, ascending. Steps with a duration of 0 are left out, as in :meth:`fit`."""
        return sorted(abs(self.step_seconds(step) / seconds - 1) for step, seconds in steps if seconds > 0)

    # -- inside: coefficients are [base, rise per stretch, row, prompt token, context, pair, adapter byte, shared] ----

    def _prior_coefficients(self) -> list[float]:
        prior = self.prior
        base = prior.step_seconds + prior.weight_seconds
        levels = [max(0.0, end * prior.token_seconds - prior.weight_seconds) for end in self._ends]
        rises = [high - low for low, high in zip([0.0, *levels], levels, strict=False)]
        reads = [prior.context_seconds, prior.pair_seconds, prior.adapter_byte_seconds]
        return [base, *rises, 0.0, 0.0, *reads, prior.shared_share * prior.context_seconds]

    def _clear(self) -> None:
        self._gram = [[0.0] * len(_PAIRS) for _ in range(_NUM_KNOTS)]
        self._target = [[0.0] * _NUM_LOCAL for _ in range(_NUM_KNOTS)]

    def _set(self, coefficients: list[float]) -> None:
        self._coefficients = coefficients
        level = max(coefficients[0], _MIN_SECONDS)
        self._levels = []
        self._slopes = []
        for begin, end, rise in zip(self._begins, self._ends, coefficients[1:], strict=False):
            self._levels.append(level)
            self._slopes.append(rise / (end - begin))
            level += rise
        self._prices = tuple(coefficients[-_NUM_PRICES:])

    def _prior_seconds(self, step: StepFeatures) -> float:
        prior = self.prior
        tokens = step.num_decodes + prior.prompt_share * step.prefill_tokens
        seconds = prior.step_seconds + max(prior.weight_seconds, prior.token_seconds * tokens)
        read = step.context_tokens - step.shared_tokens
        seconds += prior.context_seconds * read + prior.pair_seconds * step.prefill_context
        seconds += prior.adapter_byte_seconds * step.adapter_bytes
        return seconds + prior.shared_share * prior.context_seconds * step.shared_tokens

    def _scaled_prior(self, step: StepFeatures) -> float:
        return self._prior_seconds(step) * math.exp(self._log_scale)

    def _accumulate(self, step: StepFeatures, seconds: float, weight: float, forget: float) -> None:
        tokens = step.num_decodes + self.prior.prompt_share * step.prefill_tokens
        at = min(bisect.bisect_left(self._ends, tokens), _NUM_KNOTS - 1)
        covered = (tokens - self._begins[at]) / (self._ends[at] - self._begins[at])
        read = step.context_tokens - step.shared_tokens
        counts = step.num_decodes, step.prefill_tokens, read, step.prefill_context, step.adapter_bytes
        local = (1.0, covered, *map(float, counts), float(step.shared_tokens))
        gram = self._gram[at]
        target = self._target[at]
        for pair, (one, other) in enumerate(_PAIRS):
            gram[pair] = forget * gram[pair] + weight * local[one] * local[other]
        for one, value in enumerate(local):
            target[one] = forget * target[one] + weight * value * seconds

    def _solve(self, start: list[float], sweeps: int) -> list[float]:
        """Solve non-negative least squares over all segments and the prior, by coordinate descent that begins at
        ``start``. Returns the coefficients."""
        size = len(start)
        gram = [[0.0] * size for _ in range(size)]
        target = [0.0] * size
        for at in range(_NUM_KNOTS):
            if not self._gram[at][0]:
                continue
            # The time of a step in this segment contains the whole increase of all earlier segments, and a fraction of
            # this segment's increase.
            spread = [list(range(at + 1)), [at + 1], *([size - _NUM_PRICES + price] for price in range(_NUM_PRICES))]
            for one, value in enumerate(self._target[at]):
                for i in spread[one]:
                    target[i] += value
            for (one, other), value in zip(_PAIRS, self._gram[at], strict=True):
                for i in spread[one]:
                    for j in spread[other]:
                        gram[i][j] += value
                        if one != other:
                            gram[j][i] += value
        scale = math.exp(self._log_scale)
        level = 0.0
        for i, prior in enumerate(self._prior):
            level += prior if i <= _NUM_KNOTS else 0.0
            usual = prior or (0.2 * level if i <= _NUM_KNOTS else 0.2 * self.prior.token_seconds)
            weight = (self._error / (usual * scale)) ** 2  # the prior may be off by 100 %, a step by its error
            gram[i][i] += weight
            target[i] += weight * prior * scale
        found = list(start)
        for _ in range(sweeps):
            for i, row in enumerate(gram):
                rest = target[i] - sum(map(float.__mul__, row, found))
                found[i] = max(0.0, found[i] + rest / row[i])
        return found

    # -- JSON ----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The whole state as JSON values. :meth:`from_dict` restores a model from these values; the restored model can
        continue to learn."""
        return {
            "prior": dataclasses.asdict(self.prior),
            "copy_bandwidth": self.copy_bandwidth,
            "num_observed": self.num_observed,
            "error": self._error,
            "log_scale": self._log_scale,
            "coefficients": self._coefficients,
            "gram": self._gram,
            "target": self._target,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> CostModel:
        """The model from a result of :meth:`to_dict`, including results of older versions without prices of adapters or
        of shared prefixes.

        Raises ConfigError for any other mapping.
        """
        try:
            model = cls(Roofline(**fields["prior"]), float(fields["copy_bandwidth"]))
            model.num_observed = int(fields["num_observed"])
            model._error = float(fields["error"])
            model._log_scale = float(fields["log_scale"])
            coefficients = [float(value) for value in fields["coefficients"]]
            grams = [[float(value) for value in row] for row in fields["gram"]]
            targets = [[float(value) for value in row] for row in fields["target"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is not a cost model: {error}; make one with chairlift sim --fit") from None
        missing = len(model._prior) - len(coefficients)
        if 0 < missing <= _NUM_PRICES - _FEWEST_PRICES:
            coefficients += [price * math.exp(model._log_scale) for price in model._prior[-missing:]]
            targets = [[*row, *[0.0] * missing] for row in targets]
            grams = [_widened(row, missing) for row in grams]
        shapes = [len(coefficients), len(grams), len(targets), *{len(row) for row in grams}]
        expected = [len(model._prior), _NUM_KNOTS, _NUM_KNOTS, len(_PAIRS)]
        numbers = [value for row in [coefficients, *grams, *targets] for value in row]
        if shapes != expected or {len(row) for row in targets} != {_NUM_LOCAL}:
            raise ConfigError("this cost model was made by another version; make it again with chairlift sim --fit")
        if not all(map(math.isfinite, [*numbers, model._error, model._log_scale])) or min(coefficients) < 0:
            raise ConfigError("this cost model has numbers out of range; make it again with chairlift sim --fit")
        model._gram = grams
        model._target = targets
        model._set(coefficients)
        return model


def _widened(gram: list[float], missing: int) -> list[float]:
    """Add the last ``missing`` features to the normal equations of a segment that was learned without them, as if all
    steps had the value 0."""
    values = iter(gram)
    return [0.0 if other >= _NUM_LOCAL - missing else next(values, math.nan) for _one, other in _PAIRS]
