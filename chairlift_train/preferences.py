"""Learns from pairs of answers (DPO), wherever the two answers of a pair are packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from chairlift.errors import ConfigError
from chairlift_train.collate import PackCollator
from chairlift_train.layout import Pack
from chairlift_train.networks import NativeNetwork
from chairlift_train.objectives import preference_losses, sequence_sums

__all__ = ["PreferenceStats", "learn_preferences", "pair_items"]

_collate = PackCollator(keys=("input_ids", "position_ids"))


@dataclasses.dataclass(frozen=True, slots=True)
class PreferenceStats:
    """Measurements of a step on pairs."""

    loss: float
    """Mean loss of the pairs; log 2 where the trained weights agree with the reference."""
    margin: float
    """Mean of beta times the change of log p(chosen) - log p(rejected) against the reference."""
    accuracy: float
    """Fraction of the pairs whose margin is above 0."""


def pair_items(
    pair: int, prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int]
) -> list[dict[str, object]]:
    """The two answers of a pair as items for :class:`~chairlift_train.stream.PackStream`. ``pair`` counts the pairs of
    a step from 0. Raises ConfigError for an empty prompt or answer."""
    if not prompt or not chosen or not rejected:
        raise ConfigError(f"pair {pair} has an empty prompt or answer; leave it out")
    return [
        {
            "input_ids": [*prompt, *answer],
            "loss_weight": [0.0] * len(prompt) + [1.0] * len(answer),
            "pair": pair,
            "is_chosen": is_chosen,
        }
        for answer, is_chosen in ((chosen, True), (rejected, False))
    ]


def learn_preferences(
    network: NativeNetwork, packs: Sequence[Pack], *, beta: float = 0.1, label_smoothing: float = 0.0
) -> PreferenceStats:
    """Add the gradient of the mean preference loss of a step's pairs (:func:`pair_items`) to the parameters.

    The loss of a pair needs the log-probabilities of both answers, which may be in different packs. So two passes
    without gradients find them, under the adapter and under the model without it. The derivative of the loss by each
    answer's log-probability is then a number, by which a third pass multiplies the answer's gradient. Raises
    ConfigError for a pair of which only one answer is in ``packs``, and for a network without an adapter.
    """
    with torch.no_grad():
        now = _sums(network, packs)
    with network.reference():
        before = _sums(network, packs)
    pairs = sorted({pair for pair, _ in now})
    if missing := [pair for pair in pairs if {(pair, True), (pair, False)} - now.keys()]:
        raise ConfigError(f"only one answer of pair {missing[0]} is in the step; pack both into one step")
    chosen, rejected, *reference = (
        torch.tensor([sums[pair, side] for pair in pairs]) for sums in (now, before) for side in (True, False)
    )
    leaves = chosen.requires_grad_(), rejected.requires_grad_()
    losses = preference_losses(*leaves, *reference, beta=beta, label_smoothing=label_smoothing)
    mean = losses.mean()
    slopes = torch.autograd.grad(mean, leaves)
    factors = {
        (pair, side): float(slope[i])
        for side, slope in zip((True, False), slopes, strict=True)
        for i, pair in enumerate(pairs)
    }
    for pack in packs:
        logprobs, segments = _logprobs(network, pack)
        factor = torch.tensor([factors[meta["pair"], meta["is_chosen"]] for meta in pack.meta])
        (logprobs * factor[segments]).sum().backward()  # type: ignore[no-untyped-call]
    margins = beta * ((chosen - rejected) - (reference[0] - reference[1])).detach()
    return PreferenceStats(float(mean.detach()), float(margins.mean()), float((margins > 0).float().mean()))


def _sums(network: NativeNetwork, packs: Sequence[Pack]) -> Mapping[tuple[int, bool], float]:
    """(pair, whether the answer is the chosen one) -> sum of the log-probabilities of the answer's tokens."""
    found = dict[tuple[int, bool], float]()
    for pack in packs:
        logprobs, segments = _logprobs(network, pack)
        sums = sequence_sums(logprobs.double(), segments, len(pack.meta)).tolist()
        found |= {(meta["pair"], meta["is_chosen"]): value for meta, value in zip(pack.meta, sums, strict=True)}
    return found


def _logprobs(network: NativeNetwork, pack: Pack) -> tuple[Tensor, Tensor]:
    """(log-probability, number of the sequence in the pack) of each target token."""
    batch = _collate(pack)
    places = torch.from_numpy(pack.weights > 0).nonzero()[:, 0]
    segments = torch.arange(len(pack.lengths)).repeat_interleave(torch.tensor(pack.lengths))[places]
    return network.logprobs(batch, pack, places - 1, batch["input_ids"][0][places]), segments
