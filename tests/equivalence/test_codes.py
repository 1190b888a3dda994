"""Models with weights of 8 and 4 bits on the native kernels, against the same arithmetic in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift import LLM, SamplingParams
from chairlift.kernels.grouped import GROUP, GroupKind
from chairlift.kernels.rounding import rounded_rows
from chairlift.kernels.weights import PLAIN
from chairlift.models.layers.linear import Linear, TokenEmbedding
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.kernels.cpu.models import FAMILIES, tiny_model
from tests.models.paged import packed_logits
from tests.native import needs_kernels

pytestmark = needs_kernels

PROMPT = [5, 9, 77, 3, 120, 64, 64, 11, 2, 30, 31, 32]
PROMPTS = [PROMPT, PROMPT[::-1], PROMPT[5:] + PROMPT[:4], [7, 81, 4, 4, 19]]


def rounded(rows: Tensor) -> Tensor:
    """Activations as they are where codes are multiplied with them."""
    blocks = torch.nn.functional.pad(rows.float(), (0, -rows.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    highest = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * torch.where(highest > 0, torch.tensor(127.0) / highest, 0.0)).round()
    return (codes * (highest / 127)).flatten(-2)[..., : rows.shape[-1]]


def reference_logits(model_dir: Path, bits: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """[tokens, V] of each prompt, by PyTorch in float32."""
    model = load_model(model_dir, read_config(model_dir), "float32", weight_format=PLAIN)
    done = set()
    for module in model.modules():
        if isinstance(module, (Linear, TokenEmbedding)) and id(module.weight) not in done:
            done.add(id(module.weight))
            least = 8 if isinstance(module, TokenEmbedding) or module is model.lm_head else bits
            if isinstance(module, TokenEmbedding) and not model.config.tie_word_embeddings:
                continue  # it is only looked up, and stays as it is
            module.weight.data = rounded_rows(module.weight.data, GroupKind(least, GROUP)).dequantize()
    forward = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: forward(self, rounded(x)))
    return [packed_logits(model, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_the_same_arithmetic(
    family: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tiny_model(tmp_path, family)
    llm = LLM(model_dir, dtype="float32", quantization=f"int{bits}", skip_tokenizer_init=True, num_kv_blocks=20)
    assert llm.info.quantization == ("int8" if bits == 8 else "int4+int8")
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=20, logprobs=20)
    errors = []
    for output, logits in zip(
        llm.generate(PROMPTS, params), reference_logits(model_dir, bits, monkeypatch), strict=True
    ):
        entries = [*(output.prompt_logprobs or [])[1:], (output.outputs[0].logprobs or [])[0]]
        for entry, row in zip(entries, logits.log_softmax(-1), strict=True):
            errors += [abs(each.logprob - float(row[token])) for token, each in (entry or {}).items()]
    error = torch.tensor(errors)
    # Rounding is a step: a sum that differs in its last bit, as on another processor, may round to another code, and
    # all later positions of its prompt differ. Wrong arithmetic differs at every position.
    assert error.quantile(0.25) < 1e-4 and error.max() < 0.25, (error.quantile(0.25), error.max())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_new_weights_are_rounded_like_the_first(quantization: str, tmp_path: Path) -> None:
    one, other = (tiny_model(tmp_path / str(seed), "qwen2", seed=seed) for seed in (0, 1))
    settings: dict[str, Any] = {"quantization": quantization, "skip_tokenizer_init": True, "num_kv_blocks": 20}
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=5)
    llm, fresh = LLM(one, **settings), LLM(other, **settings)
    before, wanted = (each.generate([PROMPT], params)[0].outputs[0] for each in (llm, fresh))
    llm.update_weights(other, 1)
    after = llm.generate([PROMPT], params)[0].outputs[0]
    assert (after.token_ids, after.logprobs) == (wanted.token_ids, wanted.logprobs)
    assert before.logprobs != wanted.logprobs


def test_rounded_weights_are_named(tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path, "llama")
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 20}
    plain, small = (LLM(model_dir, quantization=each, **settings).info for each in (None, "int8"))
    assert (plain.quantization, small.quantization) == (None, "int8")
    assert plain.fingerprint != small.fingerprint and small.deterministic
    assert small.weight_bytes < 0.6 * plain.weight_bytes
