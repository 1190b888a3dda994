"""Checks of training calls before they are computed: what a caller may give, and what the message says otherwise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift_train.service.compute.calls import AdamParameters, Datum, PassCall, TrainingError
from chairlift_train.service.compute.losses import LOSSES, Loss

__all__ = ["CheckedDatum", "DatumLimits", "check_adam", "checked_data", "loss_of"]

_TARGETS: Final = "target_tokens"
_MOST: Final = 1e30
"""Largest factor of a step that float32 can hold, with room for its products."""


@dataclasses.dataclass(frozen=True, slots=True)
class DatumLimits:
    """What the model can compute."""

    vocab_size: int
    max_tokens: int
    """Maximum number of tokens of a datum."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedDatum:
    """A datum that can be computed."""

    token_ids: npt.NDArray[np.int32]
    """[N]."""
    targets: npt.NDArray[np.int64]
    """[N, K]."""
    inputs: Mapping[str, Tensor]
    """What else the loss reads, float64, [N] or in the shape of the targets."""
    shape: tuple[int, ...]
    """Shape of the targets as they were given, (N,) or (N, K)."""


def loss_of(call: PassCall) -> tuple[Loss, Mapping[str, float]]:
    """(the loss of a call, all of its options). Raises TrainingError."""
    loss = LOSSES.get(call.loss)
    if loss is None:
        raise TrainingError(f"there is no loss {call.loss!r:.80}; take one of {', '.join(LOSSES)}")
    options = dict(loss.options)
    for name, value in call.loss_config.items():
        if name not in options:
            known = f"takes {', '.join(options)}" if options else "takes no options"
            raise TrainingError(f"the loss {call.loss} {known}, got {name!r:.80}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise TrainingError(f"{name} of the loss {call.loss} must be a finite number, got {value!r:.80}")
        options[name] = float(value)
    low, high = options.get("clip_low_threshold", 0.0), options.get("clip_high_threshold", 1.0)
    if not 0 <= low <= 1 <= high:
        raise TrainingError(
            "clip_low_threshold must be from 0 to 1, and clip_high_threshold at least 1, because both are ratios (the"
            f" defaults are 0.8 and 1.2); got {low:g} and {high:g}"
        )
    if options.get("beta", 0.0) < 0:
        raise TrainingError(f"beta of the loss {call.loss} must not be negative, got {options['beta']:g}")
    return loss, options


def checked_data(call: PassCall, loss: Loss, limits: DatumLimits) -> list[CheckedDatum]:
    """The data of a call. Raises TrainingError, which gives the index of the datum."""
    if not call.datums:
        raise TrainingError("the call has no data; give at least one datum")
    found = []
    for index, datum in enumerate(call.datums):
        try:
            found.append(_checked(datum, call.loss, loss, limits))
        except TrainingError as error:
            raise TrainingError(f"datum {index}: {error}") from None
    return found


def _checked(datum: Datum, name: str, loss: Loss, limits: DatumLimits) -> CheckedDatum:
    token_ids = _ids("tokens", datum.tokens, limits)
    if not 1 <= len(token_ids) <= limits.max_tokens:
        raise TrainingError(f"{len(token_ids):,} tokens, and this model takes 1 to {limits.max_tokens:,}; divide it")
    known = (_TARGETS, *loss.needs, *loss.takes)
    for given in datum.inputs:
        if given not in known:
            raise TrainingError(f"the loss {name} reads {', '.join(known)}, and not {given!r:.80}; leave it out")
    for needed in (_TARGETS, *loss.needs):
        if needed not in datum.inputs:
            raise TrainingError(f"the loss {name} needs {needed}; give one value for each token")
    targets = _ids(_TARGETS, datum.inputs[_TARGETS], limits)
    shape = targets.shape
    if shape[:1] != token_ids.shape or len(shape) > 2 or (len(shape) == 2 and not loss.several_targets) or 0 in shape:
        several = " or [tokens, K]" if loss.several_targets else ""
        raise TrainingError(
            f"{_TARGETS} has the shape {list(shape)} for {len(token_ids)} tokens, and the loss {name} takes"
            f" [tokens]{several}"
        )
    inputs = {}
    for each in (*loss.needs, *loss.takes):
        if each in datum.inputs:
            inputs[each] = _numbers(each, datum.inputs[each], shape)
    mask = inputs.get("sequence_ratio_mask")
    if mask is not None and (bool((mask < 0).any()) or not bool(mask.sum() > 0)):
        raise TrainingError("sequence_ratio_mask must not be negative, and must select at least one token")
    wide = {key: value.reshape(len(token_ids), -1) for key, value in inputs.items()} if len(shape) == 2 else inputs
    return CheckedDatum(token_ids, targets.reshape(len(token_ids), -1), wide, shape)


def _ids(name: str, values: Any, limits: DatumLimits) -> npt.NDArray[Any]:
    ids = np.asarray(values)
    if ids.dtype.kind not in "iu":
        raise TrainingError(f"{name} must be whole numbers, got {ids.dtype}")
    if ids.ndim == 0 or (name == "tokens" and ids.ndim != 1):
        raise TrainingError(f"{name} must be a list of token ids, got the shape {list(ids.shape)}")
    wrong = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if wrong.size:
        raise TrainingError(
            f"{name} has the token id {int(wrong.flat[0])}, and the model knows 0 to {limits.vocab_size - 1}; use the"
            " model's own tokenizer"
        )
    return ids.astype(np.int32 if name == "tokens" else np.int64)


def _numbers(name: str, values: Any, shape: tuple[int, ...]) -> Tensor:
    given = np.asarray(values)
    if given.dtype.kind not in "iuf":
        raise TrainingError(f"{name} must be numbers, got {given.dtype}")
    if given.shape != shape:
        raise TrainingError(f"{name} has the shape {list(given.shape)}, and {_TARGETS} {list(shape)}; make them equal")
    numbers = given.astype(np.float64)
    if not np.isfinite(numbers).all():
        raise TrainingError(f"{name} has NaN or infinity; leave such a datum out")
    return torch.from_numpy(numbers)


def check_adam(adam: AdamParameters) -> None:
    """Raise TrainingError for parameters of AdamW that are out of range."""
    values = dataclasses.asdict(adam)
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise TrainingError(f"{name} must be a finite number of at least 0, got {value!r:.80}")
    if not adam.eps:
        raise TrainingError("eps must be above 0, because gradients may be 0")
    if max(adam.learning_rate, adam.learning_rate * adam.weight_decay) > _MOST:
        raise TrainingError(
            f"learning_rate and learning_rate * weight_decay must be at most {_MOST:g}, got {adam.learning_rate:g} and"
            f" weight_decay {adam.weight_decay:g}"
        )
    for name in ("beta1", "beta2"):
        if values[name] >= 1:
            raise TrainingError(f"{name} must be below 1, got {values[name]:g}")
