"""GPTQ (Frantar et al., 2022): rounds weights column by column. After each column, the later columns are changed to
compensate its error, as measured on the layer's inputs for calibration texts.

Decoder layers are processed in order, and so are the linear layers within them. The inputs of a linear layer are
computed by the already quantised layers before it. Only one Hessian is in memory at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from chairlift.errors import ConfigError
from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.models.causal_lm import CausalLM
from chairlift.models.context import PackedContext
from chairlift.models.formats.quantize.rounding import Squares, fitted_scales, nearest_codes, round_rows
from chairlift.models.layers.experts import MixtureOfExperts
from chairlift.models.layers.linear import Linear, Stack

__all__ = ["Calibrated", "CalibrationPack", "calibrate", "gptq", "output_error"]

_BLOCK: Final = 128
"""Number of columns whose errors are collected before all later columns are corrected."""
_DAMPING: Final = 0.01
"""Value added to the Hessian's diagonal, as a fraction of the diagonal's mean."""
_MOST_DAMPING: Final = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class CalibrationPack:
    """Calibration samples that form one flat batch."""

    token_ids: Tensor
    """Token ids of all samples, int64 [T]."""
    cu_seqlens: list[int]
    """Offsets of the samples in the batch; the last is T."""

    @property
    def positions(self) -> Tensor:
        """int64 [T], positions that start at 0 in each sample."""
        pairs = zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False)
        return torch.cat([torch.arange(end - start) for start, end in pairs])


@dataclasses.dataclass(frozen=True, slots=True)
class Calibrated:
    """A quantised weight and its errors."""

    parameter: str
    """Name of the weight, as in ``model.named_parameters()``."""
    rows: GroupedRows
    squares: Squares
    output_errors: tuple[float, float] | None = None
    """Squared error of the layer's outputs on the samples, divided by the sum of the squared outputs: (with these rows,
    with every weight rounded to the nearest code). None for experts, which read only some of the samples."""


def gptq(weight: Tensor, hessian: Tensor, kind: GroupKind, dtype: torch.dtype) -> GroupedRows:
    """Quantise ``weight`` [N, K] float32 for inputs with ``hessian`` [K, K] float32, which is 2 X X^T.

    The group of ``kind`` must divide 128 and K. Columns are processed in order, in blocks of 128. The scales of a group
    are values of ``dtype``. They are chosen when its first column is reached, for the corrected values of all its
    columns, and errors weigh as much as the squared inputs of their column. Columns whose inputs are always 0 are
    rounded to the nearest code. Raises ConfigError for inputs that are not finite.
    """
    inverse, (n, k) = _inverse_factor(hessian), weight.shape
    columns = weight.t().clone(memory_format=torch.contiguous_format)  # so that each column is contiguous
    codes = torch.empty(k, n, dtype=torch.uint8)
    scales = torch.empty(k // kind.group, n)
    zeros = torch.empty(k // kind.group, n)
    importance = hessian.diagonal().contiguous()
    for start in range(0, k, _BLOCK):
        end = min(start + _BLOCK, k)
        block = columns[start:end]
        errors = torch.empty_like(block)
        for place in range(end - start):
            column = start + place
            values = block[place]
            group, first = divmod(column, kind.group)
            if first == 0:
                ahead = block[place : place + kind.group].t().contiguous()
                used = importance[column : column + kind.group]
                scales[group], zeros[group] = fitted_scales(ahead, kind, dtype, used if bool(used.any()) else None)
            code = nearest_codes(values, scales[group], zeros[group], kind.bits)
            codes[column] = code.to(torch.uint8)
            errors[place] = (values - (code - zeros[group]) * scales[group]) / inverse[column, column]
            block[place:].addr_(inverse[column, column:end], errors[place], alpha=-1)
        columns[end:].addmm_(inverse[start:end, end:].t(), errors, alpha=-1)
    minimums = (-zeros * scales).t().contiguous() if kind.minimum else None
    return GroupedRows(kind, codes.t().contiguous(), scales.t().contiguous(), minimums)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Upper Cholesky factor [K, K] of the damped Hessian's inverse. The damping is increased until the factorisation
    succeeds."""
    if not bool(hessian.isfinite().all()):
        raise ConfigError(
            "the model's hidden states on the calibration texts are not finite; check the model with `chairlift check`,"
            " or leave --calibrate out"
        )
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1.0  # an input that is always 0; the rest of its row and column is 0, too
    mean = float(diagonal.mean())
    damping = _DAMPING
    diagonal.add_(damping * mean)
    while True:
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                factor: Tensor = upper
                return factor
        if damping > _MOST_DAMPING:
            raise ConfigError("the calibration texts make inputs too much alike; give more and other texts")
        diagonal.add_(9 * damping * mean)
        damping *= 10


def output_error(weight: Tensor, rows: GroupedRows, hessian: Tensor) -> float:
    """||W X - Q X||^2 / ||W X||^2 for ``weight`` W [N, K] float32 and ``rows`` Q, where ``hessian`` is 2 X X^T."""
    lost = weight - rows.dequantize()
    whole = float(((weight @ hessian) * weight).sum(dtype=torch.float64))
    return float(((lost @ hessian) * lost).sum(dtype=torch.float64)) / whole if whole else 0.0


def calibrate(
    model: CausalLM,
    packs: Sequence[CalibrationPack],
    kind_of: Callable[[str], GroupKind | None],
    dtype: torch.dtype,
    progress: Callable[[float], None] = lambda share: None,
) -> Iterator[Calibrated]:
    """Quantise every matrix in the decoder layers of a model with plain weights, in order.

    ``kind_of`` returns the kind of a parameter by its name, or None if it keeps its dtype. Weights of experts are
    rounded to the nearest codes, with scales for the inputs of the layer of experts. The model cannot be used
    afterwards: a layer's weights are replaced by the dequantised values in float32, and are freed when all samples have
    passed through the layer. ``progress`` is called with the fraction of layers that are complete. Raises ConfigError
    for inputs that are not finite.
    """
    layers = model.model.layers
    with torch.no_grad():
        states = [_embedded(model, pack) for pack in packs]
        for number, layer in enumerate(layers):
            layer.float()
            for name, module in layer.named_modules():
                whole = f"model.layers.{number}.{name}.weight"
                if not isinstance(module, Linear | Stack) or (kind := kind_of(whole)) is None:
                    continue
                if isinstance(module, Linear):
                    yield _quantise(whole, module, _hessian(model, number, module, packs, states), kind, dtype)
                else:
                    experts = layer.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
                    importance = _squares_for(model, number, experts, module, packs, states)
                    yield _quantise_stack(whole, module, importance, kind, dtype)
            states = [_through(model, number, *each) for each in zip(packs, states, strict=True)]
            layer.to("meta")
            progress((number + 1) / len(layers))


def _quantise(name: str, linear: Linear, hessian: Tensor, kind: GroupKind, dtype: torch.dtype) -> Calibrated:
    weight = linear.weight.detach().clone()
    nearest, _ = round_rows(weight, kind, dtype)
    rows = gptq(weight, hessian, kind, dtype)
    linear.weight.copy_(rows.dequantize())
    lost = weight - linear.weight
    sums = (float(each.square_().sum(dtype=torch.float64)) for each in (weight.clone(), lost))
    errors = (output_error(weight, rows, hessian), output_error(weight, nearest, hessian))
    return Calibrated(name, rows, Squares(*sums), errors)


def _quantise_stack(
    name: str, stack: Stack, importance: Tensor | None, kind: GroupKind, dtype: torch.dtype
) -> Calibrated:
    rows, squares = round_rows(stack.weight.detach(), kind, dtype, importance)
    stack.weight.copy_(rows.dequantize())
    return Calibrated(name, rows, squares)


def _squares_for(
    model: CausalLM,
    number: int,
    experts: nn.Module,
    stack: Stack,
    packs: Sequence[CalibrationPack],
    states: Sequence[Tensor],
) -> Tensor | None:
    """Sum of the squared inputs of a stack for all tokens of the samples, float32 [K]. None if the stack does not read
    the inputs of the layer of experts."""
    reads_inputs = (
        isinstance(experts, MixtureOfExperts) and experts.latent_in is None and stack is experts.experts.first
    )
    if not reads_inputs:
        return None
    squares = torch.zeros(stack.shape.in_features)
    _look_at_inputs(model, number, experts, packs, states, lambda x: squares.add_(x.square().sum(0)))
    return squares if bool(squares.any()) else None


def _embedded(model: CausalLM, pack: CalibrationPack) -> Tensor:
    """Input of the first layer for the samples of a pack: float32 [tokens, hidden size]."""
    return model.model.embed(pack.token_ids, pack.positions).float()


def _through(model: CausalLM, number: int, pack: CalibrationPack, hidden: Tensor) -> Tensor:
    """Outputs of layer ``number`` for the inputs ``hidden``: both [tokens, hidden size]."""
    rotary = model.model.rotations(pack.positions, hidden.dtype)[number]
    out: Tensor = model.model.layers[number](hidden, rotary, pack.positions, PackedContext(pack.cu_seqlens))
    return out


class _SeenEnough(Exception):
    """Ends a forward pass after the linear layer whose inputs are needed."""


def _hessian(
    model: CausalLM, number: int, linear: Linear, packs: Sequence[CalibrationPack], states: Sequence[Tensor]
) -> Tensor:
    """Hessian 2 X X^T for a linear layer, in float32 [K, K]. X are the K inputs of the layer, for all tokens of the
    samples."""
    total = torch.zeros(linear.shape.in_features, linear.shape.in_features)
    _look_at_inputs(model, number, linear, packs, states, lambda x: total.addmm_(x.t(), x, alpha=2.0))
    return total


def _look_at_inputs(
    model: CausalLM,
    number: int,
    module: nn.Module,
    packs: Sequence[CalibrationPack],
    states: Sequence[Tensor],
    look: Callable[[Tensor], object],
) -> None:
    """Call ``look`` with the inputs [tokens, K] of ``module`` in decoder layer ``number``, for each pack."""

    def end(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        look(inputs[0])
        raise _SeenEnough

    handle = module.register_forward_pre_hook(end)
    try:
        for pack, hidden in zip(packs, states, strict=True):
            try:
                _through(model, number, pack, hidden)
            except _SeenEnough:
                continue
    finally:
        handle.remove()
