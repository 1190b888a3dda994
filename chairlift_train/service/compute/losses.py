"""The losses of training calls, as functions of the log-probabilities of one datum's targets.

All are sums over tokens, never means, so the gradients of two calls add up to the gradient of their data together.
``p`` is the log-probability of a target under the trained weights, ``q`` under those that sampled it, ``A`` its
advantage, and ``r = exp(p - q)``. Unlike losses share a forward pass, because each needs only log-probabilities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from chairlift_train.objectives import clipped_gain

__all__ = ["LOSSES", "Loss"]

Inputs = Mapping[str, Tensor]
Options = Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """A loss by its name on the wire."""

    compute: Callable[[Tensor, Inputs, Options], Tensor]
    """Function of (log-probabilities p, float64 [N] or [N, K], with a graph; inputs of the datum; options) -> the sum
    of the datum's losses, a scalar."""
    needs: tuple[str, ...] = ()
    """Names of the inputs [N] that a datum must have, besides ``target_tokens``."""
    takes: tuple[str, ...] = ()
    """Names of further inputs, which may be missing."""
    options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Name of an option of the call -> its default."""
    several_targets: bool = False
    """Whether a position may have K targets."""


_CLIP: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Smallest and largest ratio, as absolute ratios."""


def _cross_entropy(p: Tensor, given: Inputs, _options: Options) -> Tensor:
    """-sum w p. Custom losses C of a client are this loss with the weights w = -dC/dp, of any sign."""
    weights = given.get("weights")
    return -(p if weights is None else p * weights).sum()


def _importance_sampling(p: Tensor, given: Inputs, _options: Options) -> Tensor:
    """-sum r A."""
    return -((p - given["logprobs"]).exp() * given["advantages"]).sum()


def _ppo(p: Tensor, given: Inputs, options: Options) -> Tensor:
    """-sum min(r A, clip(r) A) (Schulman et al., 2017)."""
    return _clipped(p, given["logprobs"], given["advantages"], options)


def _clipped(p: Tensor, q: Tensor, advantages: Tensor, options: Options) -> Tensor:
    low, high = 1 - options["clip_low_threshold"], options["clip_high_threshold"] - 1
    return clipped_gain(p, q, advantages, low=low, high=high).losses.sum()


def _cispo(p: Tensor, given: Inputs, options: Options) -> Tensor:
    """-sum of clip(r) p A, where the clipped ratio is a constant (MiniMax-M1, 2025)."""
    ratios = (p - given["logprobs"]).detach().exp()
    clipped = ratios.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -(clipped * p * given["advantages"]).sum()


def _dro(p: Tensor, given: Inputs, options: Options) -> Tensor:
    """-sum of p A - beta / 2 (p - q)^2 (Richemond et al., 2024)."""
    drift = p - given["logprobs"]
    return -(p * given["advantages"] - options["beta"] / 2 * drift * drift).sum()


def _gspo(p: Tensor, given: Inputs, options: Options) -> Tensor:
    """PPO's loss with one ratio for the whole sequence, whose logarithm is the mean of p - q over the tokens of
    ``sequence_ratio_mask``. Each token's gradient is its own (GSPO-token; Zheng et al., 2025)."""
    mask = given["sequence_ratio_mask"]
    mean = ((p - given["logprobs"]).detach() * mask).sum() / mask.sum()
    return _clipped(mean + (p - p.detach()), torch.zeros_like(p), given["advantages"], options)


_RATIO: Final = ("logprobs", "advantages")
LOSSES: Final[Mapping[str, Loss]] = {
    "cross_entropy": Loss(_cross_entropy, takes=("weights",), several_targets=True),
    "importance_sampling": Loss(_importance_sampling, _RATIO),
    "ppo": Loss(_ppo, _RATIO, options=_CLIP),
    "cispo": Loss(_cispo, _RATIO, options=_CLIP),
    "dro": Loss(_dro, _RATIO, options={"beta": 0.05}),
    "gspo": Loss(_gspo, (*_RATIO, "sequence_ratio_mask"), options=_CLIP),
}
"""Name of each loss -> the loss."""
