"""Checks that a quantised directory computes what transformers computes with its dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from chairlift import LLM, SamplingParams
from tests.models.logprobs import PROMPTS, check_logprobs
from tests.models.quantized.make import parameters
from tests.models.tiny import hf_model

__all__ = ["check_layout"]


def check_layout(quantised: Path, twin: Path, **settings: Any) -> list[str]:
    """Fail unless the weights of ``quantised`` equal those of ``twin`` bit for bit, and its log-probabilities those of
    transformers with ``twin``, in chunks and in company, and its texts alone those in company. Returns the notes.
    """
    found, wanted = parameters(quantised), parameters(twin)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name
    notes = check_logprobs(quantised, hf_model(twin), 1e-4, dtype="float32", quantization="none", **settings)
    sizes = {"num_kv_blocks": 60, "skip_tokenizer_init": True, "dtype": "float32", "quantization": "none"}
    llm = LLM(quantised, **{**sizes, **settings})
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    company = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy)]
    assert [llm.generate([prompt], greedy)[0].outputs[0].token_ids for prompt in PROMPTS] == company
    return notes
