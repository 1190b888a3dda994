"""Losses of reinforcement learning, preferences and distillation, as functions of packed log-probabilities.

All take one number per target token or per sequence, in the order of a pack, and return losses that are not yet
averaged. The caller divides their sum by one constant of the whole optimiser step, which it knows before the first
backward pass (as :class:`~chairlift_train.loss.StepLoss` does). A mean per micro-batch would weight sequences by the
way in which they were packed.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.errors import ConfigError

__all__ = [
    "ClippedGain",
    "clipped_gain",
    "distillation_losses",
    "group_advantages",
    "kl_penalty",
    "preference_losses",
    "sequence_sums",
]


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], *, scale: Literal["std", "none"] = "std"
) -> list[float]:
    """Advantage of each answer among the answers to the same prompt (GRPO: Shao et al., 2024).

    It is the reward minus the mean of its group. With ``scale="std"`` it is divided by the group's standard deviation
    (of a sample, plus 0.0001, as in TRL); ``"none"`` leaves it (Dr. GRPO: Liu et al., 2025). ``groups`` [N] names the
    prompt of each answer. A group of one answer has the advantage 0. Raises ConfigError for numbers that do not fit
    together or are not finite.
    """
    if len(rewards) != len(groups):
        raise ConfigError(
            f"each answer needs a reward and a group, got {len(rewards)} rewards and {len(groups)} groups"
        )
    if wrong := [value for value in rewards if not math.isfinite(value)]:
        raise ConfigError(f"rewards must be finite, got {wrong[0]}; end the run, or give such an answer a fixed reward")
    if scale not in ("std", "none"):
        raise ConfigError(f"scale must be std or none, got {scale!r}")
    members: dict[Hashable, list[float]] = collections.defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].append(reward)
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        values = members[group]
        spread = 1.0
        if scale == "std":
            spread = (statistics.stdev(values) if len(values) > 1 else 0.0) + 1e-4
        found.append((reward - statistics.fmean(values)) / spread)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class ClippedGain:
    """Result of :func:`clipped_gain`, one entry per token."""

    losses: Tensor
    """[R] loss of each token, with a graph."""
    ratios: Tensor
    """[R] importance ratios, without a graph. They are exactly 1 if both log-probabilities are computed alike
    (:class:`~chairlift_train.exact.ExactNetwork`) and the weights are the same."""
    clipped: Tensor
    """bool [R]: whether the clip has removed the gradient of the token."""

    @property
    def drift(self) -> Tensor:
        """[R] estimate of KL(weights of the rollout || weights that are trained): ratio - 1 - log(ratio), which is
        never negative (Schulman, 2020)."""
        return self.ratios - 1 - self.ratios.log()


def clipped_gain(
    logprobs: Tensor,
    before: Tensor,
    advantages: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    most: float | None = None,
) -> ClippedGain:
    """The clipped objective of PPO (Schulman et al., 2017) as a loss per token.

    Args:
        logprobs: [R] log-probabilities of the sampled tokens under the weights that are trained, with a graph.
        before: [R] their log-probabilities when they were sampled.
        advantages: [R] advantage of each token.
        low: A ratio below 1 - ``low`` has no gradient if the advantage is negative.
        high: A ratio above 1 + ``high`` has no gradient if the advantage is positive. A larger ``high`` is DAPO's
            (Yu et al., 2025).
        most: Maximum ratio in the loss of tokens with a negative advantage, whose loss has no other bound (dual clip:
            Ye et al., 2020). It must be above 1. None: no maximum.

    Raises ConfigError for shapes or settings that do not fit together.
    """
    if not logprobs.shape == before.shape == advantages.shape or logprobs.ndim != 1:
        shapes = [list(each.shape) for each in (logprobs, before, advantages)]
        raise ConfigError(f"logprobs, before and advantages have one entry per token each, got {shapes}")
    if not (0 <= low <= 1 and high >= 0 and (most is None or most > 1)):
        raise ConfigError(f"low must be in [0, 1], high at least 0, most above 1; got {low}, {high}, {most}")
    ratios = (logprobs - before).exp()
    plain = ratios * advantages
    gain = torch.minimum(plain, ratios.clamp(1 - low, 1 + high) * advantages)
    kept = gain == plain
    if most is not None:
        floor = most * advantages
        is_bounded = (advantages < 0) & (floor > gain)
        gain = torch.where(is_bounded, floor, gain)
        kept &= ~is_bounded
    return ClippedGain(-gain, ratios.detach(), ~kept)


def kl_penalty(before: Tensor, reference: Tensor, beta: float) -> Tensor:
    """[R] what to add to the reward of each sampled token to stay near a reference: -beta * (log p - log p_reference).

    It belongs to the reward: as a term of the loss, this estimator has no gradient on average, and the usual
    alternative (ratio - 1 - log ratio) descends another divergence (Tang and Munos, 2025).
    """
    return -beta * (before - reference).detach()


def sequence_sums(values: Tensor, segments: Tensor, count: int) -> Tensor:
    """[count] sum of ``values`` [R] per sequence; ``segments`` (int64 [R]) has the number of each value's sequence."""
    return values.new_zeros(count).index_add(0, segments, values)


def preference_losses(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """[B] loss of each pair of a chosen and a rejected answer (DPO: Rafailov et al., 2023).

    All are [B] sums of the log-probabilities of an answer's tokens (:func:`sequence_sums`), under the trained weights
    (with a graph) and under the reference (:meth:`~chairlift_train.networks.NativeNetwork.reference`). The loss is
    log 2 where both agree. With ``label_smoothing`` above 0, this fraction of the pairs is taken to be the wrong way
    round (conservative DPO). Raises ConfigError for a ``beta`` that is not positive.
    """
    if beta <= 0 or not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"beta must be above 0 and label_smoothing in [0, 0.5), got {beta} and {label_smoothing}")
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return -(1 - label_smoothing) * functional.logsigmoid(margin) - label_smoothing * functional.logsigmoid(-margin)


def distillation_losses(logits: Tensor, token_ids: Tensor, teacher: Tensor) -> Tensor:
    """[R] cross-entropy of a student against the most likely tokens of its teacher (Hinton et al., 2015).

    Args:
        logits: [R, V] of the student, with a graph.
        token_ids: int64 [R, K] tokens that the teacher reports for each row; -1 where it reports fewer.
        teacher: [R, K] their log-probabilities. They are renormalised over the K tokens of a row.

    Raises ConfigError for shapes that do not fit together, and for a row without a token.
    """
    if token_ids.shape != teacher.shape or token_ids.ndim != 2 or len(token_ids) != len(logits):
        shapes = [list(each.shape) for each in (logits, token_ids, teacher)]
        raise ConfigError(f"a student's [R, V] logits need [R, K] tokens and log-probabilities, got {shapes}")
    is_given = token_ids >= 0
    if not bool(is_given.any(1).all()):
        raise ConfigError("a row has no token of the teacher; ask for logprobs=1 or more")
    weights = teacher.masked_fill(~is_given, -math.inf).softmax(-1)
    learned = logits.float().log_softmax(-1).gather(1, token_ids.clamp(min=0))
    return -(weights * learned).sum(-1)
