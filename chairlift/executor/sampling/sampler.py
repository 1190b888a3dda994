"""The sampler: one token per row, from the model's logits and the request's parameters.

It has no state and no random generator. A row's token depends only on its logits, its parameters and its tokens so far.
The order of transforms is vLLM's: grammar mask, allowed ids, bias, bad words, ``min_tokens``; then repetition penalty,
presence and frequency penalties; then, for rows that are not greedy, temperature, min-p, top-k, top-p and the random
draw. Log-probabilities come from the raw logits, or from those after all of these (:func:`processed_logits`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.row_failures import raw_reason, shaped_reason
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.step_batch import Masks
from chairlift.executor.sampling import logits as transforms
from chairlift.executor.sampling.gumbel import gumbel_argmax
from chairlift.executor.sampling.logprobs import TokenLogprobs, token_logprobs

__all__ = ["Sampler", "SamplerOutput", "processed_logits"]

_VALUES_PER_SLICE = 1 << 20  # 4 MiB of float32 at a time
_Ids = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True)
class SamplerOutput:
    """The drawn tokens, one per row, in the order of the rows."""

    token_ids: list[int]
    """Token id per row; -1 if no token could be drawn (see :attr:`errors`)."""
    logprobs: list[TokenLogprobs | None]
    """One entry per row; None for a row that did not ask for log-probabilities, and for a failed row."""
    errors: dict[int, str]
    """Row -> reason why it has no token. Only failed rows have an entry, so it is usually empty."""


class Sampler:
    """Draws one token for each row of logits. It has no state, so several threads may use the same object.

    ``logprobs_mode`` is the setting of this name: ``raw_logprobs`` or ``processed_logprobs``.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs") -> None:
        self._processed = logprobs_mode == "processed_logprobs"

    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        tokens: Sequence[npt.NDArray[np.int32]],
        masks: Masks | None = None,
    ) -> SamplerOutput:
        """Sample one token per row.

        Args:
            logits: raw logits ``[R, V]`` in the model's dtype; not changed.
            rows: parameters of the R rows.
            tokens: prompt and output so far of the R rows (int32, one-dimensional). Only the length matters unless
                penalties or bad words are used; the length is the new token's position.
            masks: ids that a grammar allows, for the rows that have a mask; None allows all.

        A row whose logits have NaN or +inf, or that has no allowed token left, yields -1 and a reason. The other rows
        are not affected.

        Raises:
            ValueError: ``logits``, ``rows`` and ``tokens`` do not have the same length.
        """
        if not len(logits) == len(rows) == len(tokens):
            raise ValueError(f"{len(logits)} rows of logits, {len(rows)} rows, {len(tokens)} token lists: must agree")
        if not rows:
            return SamplerOutput([], [], {})
        highest, argmax = logits.max(dim=-1)  # NaN counts as highest; on a tie the lowest id is taken
        token_ids: list[int] = argmax.tolist()
        output = SamplerOutput(token_ids, [None] * len(rows), {})
        for i, value in _not_finite(highest):
            output.errors[i] = raw_reason(value)
        if masks or not all(row.plain_greedy for row in rows):
            self._sample_shaped(logits, rows, tokens, masks or {}, output)
            reporting = [i for i, row in enumerate(rows) if row.params.logprobs is not None and i not in output.errors]
            if reporting and self._processed:
                _report_processed(logits, rows, tokens, masks, reporting, output)
            elif reporting:
                _report_logprobs(logits, rows, reporting, output)
        for i in output.errors:
            token_ids[i] = -1
        return output

    def _sample_shaped(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        tokens: Sequence[npt.NDArray[np.int32]],
        masks: Masks,
        output: SamplerOutput,
    ) -> None:
        """Replace the token (the arg max of the raw logits) in rows whose mask or parameters may select another token.
        Works in slices of rows, so that float32 copies stay small."""
        shaped = [i for i, row in enumerate(rows) if i in masks or row.reshapes or not row.params.greedy]
        shaped = [i for i in shaped if i not in output.errors]
        step = max(1, _VALUES_PER_SLICE // logits.shape[1])
        for start in range(0, len(shaped), step):
            part = shaped[start : start + step]
            index = torch.tensor(part, device=logits.device)
            scores = logits.index_select(0, index).to(torch.float32)
            masked = [j for j, i in enumerate(part) if i in masks]
            if masked:
                bits = torch.from_numpy(np.stack([masks[part[j]] for j in masked]).view(np.int32)).to(logits.device)
                transforms.apply_allowed_mask(scores, torch.tensor(masked, device=logits.device), bits)
            part_rows = [rows[i] for i in part]
            part_tokens = [tokens[i] for i in part]
            _reshape(scores, part_rows, part_tokens)
            _truncate(scores, part_rows)
            self._draw(scores, part, part_rows, part_tokens, output)

    def _draw(
        self,
        scores: Tensor,
        part: list[int],
        rows: list[SamplingRow],
        tokens: list[npt.NDArray[np.int32]],
        output: SamplerOutput,
    ) -> None:
        highest, argmax = scores.max(dim=-1)
        for i, token_id in zip(part, argmax.tolist(), strict=True):
            output.token_ids[i] = token_id
        for j, value in _not_finite(highest):
            output.errors[part[j]] = shaped_reason(value)
        drawn = [j for j, i in enumerate(part) if i not in output.errors and not rows[j].params.greedy]
        if drawn:
            if len(drawn) < len(part):
                scores = scores[torch.tensor(drawn, device=scores.device)]
            winners = gumbel_argmax(scores, [rows[j].seed for j in drawn], [len(tokens[j]) for j in drawn])
            for j, token_id in zip(drawn, winners.tolist(), strict=True):
                output.token_ids[part[j]] = token_id


def _reshape(scores: Tensor, rows: Sequence[SamplingRow], tokens: Sequence[npt.NDArray[np.int32]]) -> None:
    """Apply, in place, the parameters that can change the arg max."""
    if not any(row.reshapes for row in rows):
        return
    allowed, bias, masked, seen, generated = (_Pairs(scores) for _ in range(5))
    for i, (row, history) in enumerate(zip(rows, tokens, strict=True)):
        params = row.params
        if not row.reshapes:
            continue
        output = history[row.num_prompt_tokens :]
        if params.allowed_token_ids:
            allowed.add(i, params.allowed_token_ids)
        if params.logit_bias:
            bias.add(i, params.logit_bias, params.logit_bias.values())
        masked.add(i, row.masked_token_ids(history))
        if params.repetition_penalty != 1.0:
            seen.add(i, np.unique(history))
        if params.presence_penalty or params.frequency_penalty:
            generated.add(i, *np.unique(output, return_counts=True))
    limited = [(i, None) for i, row in enumerate(rows) if row.params.allowed_token_ids]
    if limited:
        transforms.keep_only_token_ids(scores, _index(scores, limited), *allowed.tensors())
    if bias:
        transforms.add_logit_bias(scores, *bias.tensors(), bias.values())
    if masked:
        transforms.mask_token_ids(scores, *masked.tensors())
    if seen:
        row_ids, ids = seen.tensors()
        repetition = _floats(scores, (row.params.repetition_penalty for row in rows))
        transforms.apply_repetition_penalty(scores, row_ids, ids, repetition[row_ids])
    if generated:
        row_ids, ids = generated.tensors()
        presence = _floats(scores, (row.params.presence_penalty for row in rows))[row_ids]
        frequency = _floats(scores, (row.params.frequency_penalty for row in rows))[row_ids]
        transforms.apply_presence_and_frequency_penalties(scores, row_ids, ids, generated.values(), presence, frequency)


def _truncate(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply, in place, temperature, min-p, top-k and top-p to the rows that are not greedy."""
    settings = [(i, row.params) for i, row in enumerate(rows) if not row.params.greedy]
    if any(params.temperature != 1.0 for _, params in settings):
        divisors = (1.0 if row.params.greedy else row.params.temperature for row in rows)
        transforms.apply_temperature(scores, _floats(scores, divisors))
    min_p = [(i, params.min_p) for i, params in settings if params.min_p > 0.0]
    if min_p:
        transforms.apply_min_p(scores, _index(scores, min_p), _floats(scores, (value for _, value in min_p)))
    top_k = [(i, params.top_k) for i, params in settings if 0 < params.top_k < scores.shape[1]]
    if top_k:
        transforms.apply_top_k(scores, _index(scores, top_k), [value for _, value in top_k])
    top_p = [(i, params.top_p) for i, params in settings if params.top_p < 1.0]
    if top_p:
        bars = torch.tensor([value for _, value in top_p], dtype=torch.float64, device=scores.device)
        transforms.apply_top_p(scores, _index(scores, top_p), bars)


class _Pairs:
    """Collects (row, token id, value) triples of a batch as flat tensors. Ids outside the vocabulary are left out."""

    def __init__(self, scores: Tensor) -> None:
        self._device = scores.device
        self._vocab_size = scores.shape[1]
        self._rows: list[_Ids] = [np.empty(0, dtype=np.int64)]
        self._token_ids: list[_Ids] = [np.empty(0, dtype=np.int64)]
        self._values: list[npt.NDArray[np.float32]] = []

    def add(
        self,
        row: int,
        token_ids: Iterable[int] | npt.NDArray[np.int32],
        values: Iterable[float] | npt.NDArray[np.int64] = (),
    ) -> None:
        ids = np.fromiter(token_ids, dtype=np.int64)
        keep = (ids >= 0) & (ids < self._vocab_size)
        if keep.any():
            self._rows.append(np.full(int(keep.sum()), row, dtype=np.int64))
            self._token_ids.append(ids[keep])
            numbers = np.fromiter(values, dtype=np.float32)
            self._values.append(numbers[keep] if len(numbers) else numbers)

    def __bool__(self) -> bool:
        return len(self._rows) > 1

    def tensors(self) -> tuple[Tensor, Tensor]:
        """(rows, token ids) of the collected triples, each int64 ``[K]``."""
        rows = np.concatenate(self._rows)
        ids = np.concatenate(self._token_ids)
        return torch.from_numpy(rows).to(self._device), torch.from_numpy(ids).to(self._device)

    def values(self) -> Tensor:
        """Values of the collected (row, token id, value) triples, float32 ``[K]``."""
        return torch.from_numpy(np.concatenate(self._values)).to(self._device)


def processed_logits(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    tokens: Sequence[npt.NDArray[np.int32]],
    masks: Masks | None = None,
) -> Tensor:
    """Logits float32 [R, V] whose softmax is the distribution from which :class:`Sampler` draws: after masks, bias,
    penalties, temperature, min-p, top-k and top-p. Ids that cannot be drawn have -inf. A greedy row has no temperature.
    The arguments are those of :class:`Sampler`; ``logits`` is not changed."""
    scores = logits.to(torch.float32, copy=True)
    masked = sorted(masks or ())
    if masks and masked:
        bits = torch.from_numpy(np.stack([masks[i] for i in masked]).view(np.int32)).to(logits.device)
        transforms.apply_allowed_mask(scores, torch.tensor(masked, device=logits.device), bits)
    _reshape(scores, rows, tokens)
    _truncate(scores, rows)
    return scores


def _report_logprobs(logits: Tensor, rows: Sequence[SamplingRow], reporting: list[int], output: SamplerOutput) -> None:
    """Add log-probabilities of the logits for the rows ``reporting``, which asked for them."""
    part = logits if len(reporting) == len(rows) else logits[torch.tensor(reporting, device=logits.device)]
    counts = [rows[i].params.logprobs or 0 for i in reporting]
    found = token_logprobs(part, [output.token_ids[i] for i in reporting], counts)
    for i, logprobs in zip(reporting, found, strict=True):
        output.logprobs[i] = logprobs


def _report_processed(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    tokens: Sequence[npt.NDArray[np.int32]],
    masks: Masks | None,
    reporting: list[int],
    output: SamplerOutput,
) -> None:
    """Add log-probabilities of the processed logits for the rows ``reporting``, in slices of rows."""
    step = max(1, _VALUES_PER_SLICE // logits.shape[1])
    for start in range(0, len(reporting), step):
        part = reporting[start : start + step]
        own = {j: masks[i] for j, i in enumerate(part) if i in masks} if masks else None
        index = torch.tensor(part, device=logits.device)
        scores = processed_logits(logits[index], [rows[i] for i in part], [tokens[i] for i in part], own)
        counts = [rows[i].params.logprobs or 0 for i in part]
        found = token_logprobs(scores, [output.token_ids[i] for i in part], counts)
        for i, logprobs in zip(part, found, strict=True):
            output.logprobs[i] = logprobs


def _index(like: Tensor, settings: Sequence[tuple[int, object]]) -> Tensor:
    return torch.tensor([i for i, _ in settings], dtype=torch.int64, device=like.device)


def _floats(like: Tensor, values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32, device=like.device)


def _not_finite(highest: Tensor) -> list[tuple[int, float]]:
    """(row, highest value) of each row whose highest value is NaN or infinite. It needs one transfer from the
    device."""
    return [(i, value) for i, value in enumerate(highest.tolist()) if not math.isfinite(value)]
