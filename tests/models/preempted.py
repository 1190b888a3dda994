"""Checks that an engine's greedy tokens do not depend on company and preemption, and that transformers agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from chairlift import LLM, SamplingParams
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.model_files import read_config
from tests.models.logprobs import PROMPTS
from tests.models.tiny import hf_logits

__all__ = ["check_company_and_preemption"]

_COMPARED: Final = 10
"""Number of tokens that are compared with transformers."""
_MOST: Final = 40
"""Number of tokens of an answer, if the model's positions allow it."""
_MODES: Final[tuple[dict[str, Any], ...]] = (
    {"preemption_mode": "recompute"},
    {"preemption_mode": "swap", "swap_space_bytes": 1 << 20},
)


def check_company_and_preemption(model: Path, theirs: Any, *, tolerance: float = 1e-3, **settings: Any) -> None:
    """Fail unless the greedy tokens of three prompts are the same alone, together and preempted (computed again and
    swapped). The first tokens must be the most likely ones of transformers' model ``theirs``, if it is given, up to
    ``tolerance`` in its logit relative to the largest. Prompts are computed in chunks of at most 24 tokens."""
    config = read_config(model)
    assert isinstance(config, NetworkConfig)
    length = min(max(map(len, PROMPTS)) + _MOST, config.max_model_len)
    count = length - max(map(len, PROMPTS))
    prompts = [each for each in PROMPTS if len(each) >= config.for_length(length).shortest_prompt]
    assert prompts, "the model takes none of the prompts"
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    common: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 24,
        "max_model_len": length,
        **settings,
    }
    ample = LLM(str(model), num_kv_blocks=60, **common)
    together = _tokens(ample, prompts, greedy)
    assert [_tokens(ample, [prompt], greedy)[0] for prompt in prompts] == together
    for prompt, tokens in zip(prompts, together, strict=True) if theirs is not None else ():
        logits = hf_logits(theirs, [*prompt, *tokens[:_COMPARED]])[len(prompt) - 1 : -1].float()
        short = logits.max(-1).values - logits[range(len(logits)), tokens[:_COMPARED]]
        assert float(short.max()) <= tolerance * float(logits.abs().max()), "another token is more likely"
    preempted = 0
    for mode in _MODES:
        llm = LLM(str(model), num_kv_blocks=9 - (_MOST - count) // 8, **common, **mode)
        assert _tokens(llm, prompts, greedy) == together
        preempted += llm.engine.scheduler.num_preemptions
    # K and V of windows, and states, may fit for all.
    grows = any(config.attends_in(layer) and window is None for layer, window in enumerate(config.layer_windows))
    assert preempted or not grows, "the cache was large enough for all"


def _tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
