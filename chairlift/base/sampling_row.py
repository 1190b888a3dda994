"""Sampling parameters of one answer, for the executor. Needs no torch, so that the engine can make them."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from chairlift.base.sampling_params import SamplingParams

__all__ = ["SamplingRow"]


@dataclasses.dataclass(slots=True, eq=False)
class SamplingRow:
    """Sampling parameters of one answer. They are made once at admission and never change."""

    params: SamplingParams
    seed: int
    """Seed as an unsigned 64-bit number, from :func:`~chairlift.base.seeds.sample_seed`."""
    num_prompt_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that are masked until ``min_tokens`` tokens were generated: the caller's stop tokens, and the
    end-of-sequence tokens unless ``ignore_eos``."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of each bad word; each has at least one id."""
    tag: int = 0
    """Number made from the cache salt. Rows with different tags never share KV, even if their tokens are equal."""
    reshapes: bool = dataclasses.field(init=False)
    """Whether any parameter can change which token has the highest logit."""
    plain_greedy: bool = dataclasses.field(init=False)
    """Whether the token is the arg max of the raw logits, and no log-probabilities are reported."""

    def __post_init__(self) -> None:
        params = self.params
        self.reshapes = bool(
            params.logit_bias
            or params.allowed_token_ids
            or self.bad_word_ids
            or (params.min_tokens and self.stop_token_ids)
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
        )
        self.plain_greedy = params.greedy and not self.reshapes and params.logprobs is None

    def masked_token_ids(self, history: npt.NDArray[np.int32]) -> list[int]:
        """Ids that must not come next: last tokens of bad words whose other tokens were just generated, and stop tokens
        before ``min_tokens``.

        ``history`` has the tokens of prompt and output so far. The result may have an id twice, and ids outside the
        vocabulary.
        """
        masked: list[int] = []
        if self.bad_word_ids:
            output = history[self.num_prompt_tokens :].tolist()
            for word in self.bad_word_ids:
                if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]:
                    masked.append(word[-1])
        if len(history) - self.num_prompt_tokens < self.params.min_tokens:
            masked += self.stop_token_ids
        return masked

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None
