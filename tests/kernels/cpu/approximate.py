"""Numbers with error bounds: the exact result of an operation in float64, and the maximum error of a correct
implementation.

Bounds are of first order and count roundings; u is the unit roundoff of a dtype (2^-24 in float32, 2^-8 in bf16). For a
sum of k products, the bound 4 sqrt(k) u is used instead of the worst case k u, because rounding errors behave like
random numbers and partly cancel each other (Higham and Mary, 2019). The worst-case bound is so large that a missing
product would not be detected.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

__all__ = ["Approximate", "assert_near", "products", "unit_roundoff"]


def unit_roundoff(dtype: torch.dtype) -> float:
    """Maximum relative error of rounding a number to ``dtype``."""
    return torch.finfo(dtype).eps / 2


U = unit_roundoff(torch.float32)
TINY = 1e-37
"""Error that is always allowed, because numbers below the smallest normal one may become zero."""


@dataclasses.dataclass(frozen=True, eq=False)
class Approximate:
    """A number that was computed in float32: its exact value and an error bound, as float64 tensors of one shape."""

    value: Tensor
    error: Tensor

    @classmethod
    def exactly(cls, x: Tensor) -> Approximate:
        return cls(x.double(), torch.zeros(x.shape, dtype=torch.float64))

    def rounded(self, dtype: torch.dtype = torch.float32, times: float = 1.0) -> Approximate:
        return Approximate(self.value, self.error + times * unit_roundoff(dtype) * (self.value.abs() + self.error))

    def __add__(self, other: Approximate) -> Approximate:
        return Approximate(self.value + other.value, self.error + other.error).rounded()

    def __sub__(self, other: Approximate) -> Approximate:
        return Approximate(self.value - other.value, self.error + other.error).rounded()

    def __mul__(self, other: Approximate) -> Approximate:
        error = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return Approximate(self.value * other.value, error).rounded()

    def __getitem__(self, index: object) -> Approximate:
        return Approximate(self.value[index], self.error[index])  # type: ignore[index]

    def silu(self) -> Approximate:
        """x / (1 + exp(-x)). Its steepest slope is 1.1; the exponential multiplies the rounding error of its
        argument."""
        value = torch.nn.functional.silu(self.value)
        return Approximate(value, 1.1 * self.error + (8 + 4 * self.value.abs()) * U * value.abs())

    def gelu(self) -> Approximate:
        """x times the standard normal distribution function of x, which is computed with an error of at most 1.2e-7.
        The steepest slope is 1.13."""
        value = torch.nn.functional.gelu(self.value)
        return Approximate(value, 1.13 * self.error + 4 * U * self.value.abs())

    def gelu_tanh(self) -> Approximate:
        """x * sigmoid(1.6 (x + 0.0447 x^3)), which equals GELU with the tanh approximation."""
        argument = math.sqrt(8 / math.pi) * (self.value + 0.044715 * self.value**3)
        value = self.value * torch.sigmoid(argument)  # torch's own subtracts numbers of nearly equal size
        off = (8 + 4 * argument.abs().clamp_max(200)) * U
        return Approximate(value, 1.13 * self.error + off * value.abs())

    def capped(self, cap: float) -> Approximate:
        """cap * tanh(x / cap)."""
        value = cap * torch.tanh(self.value / cap)
        return Approximate(value, self.error + 10 * U * value.abs())

    def layer_normed(self, eps: float) -> Approximate:
        """Layer norm over the last dimension, without weight and bias. The input must be exact."""
        size = self.value.shape[-1]
        centred = self.value - self.value.mean(-1, keepdim=True)
        factor = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        # The error of the mean is that of the sum. For the factor see rms_normed.
        off = (4 * math.sqrt(size) + 4) * U
        shift = off * self.value.abs().mean(-1, keepdim=True)
        relative = off + shift * factor
        return Approximate(centred * factor, factor * (2 * shift + centred.abs() * relative)).rounded(times=3)

    def rms_normed(self, eps: float) -> Approximate:
        """RMS norm over the last dimension, without weight."""
        size = self.value.shape[-1]
        squares = self.value.square().sum(-1, keepdim=True)
        factor = (squares / size + eps).rsqrt()
        # Error bound of a norm: half the relative error of the sum of squares, plus a few roundings of the factor.
        relative = (self.value.abs() * self.error).sum(-1, keepdim=True) / squares.clamp_min(1e-300)
        relative = relative + (4 * math.sqrt(size) + 4) * U
        return Approximate(self.value * factor, factor * (self.error + self.value.abs() * relative)).rounded()


def products(a: Tensor, b: Tensor) -> Approximate:
    """``a @ b.T`` with its error bound, for sums in float32."""
    a, b = a.double(), b.double()
    return Approximate(a @ b.T, 4 * math.sqrt(a.shape[1]) * U * (a.abs() @ b.abs().T))


def assert_near(found: Tensor, expected: Approximate, what: str) -> None:
    """Fail unless every element of ``found`` is within the error bound. NaN is never within it."""
    off = (found.double() - expected.value).abs()
    bad = ~(off <= expected.error + TINY)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        value, error = float(expected.value[where]), float(expected.error[where])
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} wrong; {where} is {float(found[where])!r},"
            f" and must be {value!r} to {error:.2g}"
        )
