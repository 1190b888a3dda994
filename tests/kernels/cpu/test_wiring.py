"""A new architecture is a Python file: what its layers do is recorded, and no kernel has to know of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chairlift import LLM, SamplingParams
from chairlift.kernels import ops
from chairlift.models import loader
from chairlift.models.causal_lm import CausalLM
from chairlift.models.context import AttentionContext
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.decoder import DecoderLayer
from tests.kernels.cpu.models import VOCAB, tiny_model
from tests.native import needs_kernels

pytestmark = needs_kernels


class ParallelLayer(DecoderLayer):
    """Attention and MLP side by side (GPT-J)."""

    def forward(self, x: Tensor, rotary: ops.Rotary | None, positions: Tensor, ctx: AttentionContext) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotary, positions, ctx)
        out: Tensor = x + attended + self.mlp(self.post_attention_layernorm(x))
        return out


class CappedLayer(DecoderLayer):
    """The result of attention passes a function that has no kernel."""

    def forward(self, x: Tensor, rotary: ops.Rotary | None, positions: Tensor, ctx: AttentionContext) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotary, positions, ctx)
        x = x + ops.call_out(lambda rows: 2 * torch.tanh(rows / 2), attended, width=72)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class ScaledLayer(DecoderLayer):
    """q, k and v are changed before they become heads, so their product cannot be fused; layer 1 has no positions."""

    def forward(self, x: Tensor, rotary: ops.Rotary | None, positions: Tensor, ctx: AttentionContext) -> Tensor:
        attention = self.self_attn
        qkv = ops.call_out(torch.sin, attention.qkv_proj(self.input_layernorm(x)), width=256)
        heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        q, k, v = ops.rotary_heads(qkv, None if attention.layer == 1 else rotary, *heads)
        out = ctx.attend(attention.layer, q, k, v, scale=attention.scale, window=attention.window)
        x = x + attention.o_proj(out.flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


def family(layer: Callable[[NetworkConfig, int], nn.Module]) -> type[CausalLM]:
    class Model(CausalLM):
        def __init__(self, config: NetworkConfig) -> None:
            super().__init__(config)
            self.model.layers = nn.ModuleList(layer(config, i) for i in range(config.num_hidden_layers))

    return Model


PROMPTS = [[5, 9, 77, 3, 21, 64, 8, 100, 41, 2, 90, 13, 55, 6, 31, 70, 11, 12, 99, 4], [7], [3] * 40]
EMBED = ["EMBED", "ROTARY"]


def answers(model_dir: Path, kernels: str) -> tuple[list[Any], Any]:
    """Token ids and log-probabilities, and who computed them."""
    settings = {"num_kv_blocks": 50, "max_num_seqs": 4, "max_num_batched_tokens": 32, "skip_tokenizer_init": True}
    llm = LLM(model_dir, kernels=kernels, dtype="float32", **settings)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=4)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    return outputs, llm.engine.core.executor._runner  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (ParallelLayer, ["RMS_NORM", "QKV", "ATTENTION", "LINEAR", "RMS_NORM", "LINEAR_SILU", "LINEAR"]),
        (
            CappedLayer,
            [*("RMS_NORM", "QKV", "ATTENTION", "LINEAR", "CALL", "ADD", "RMS_NORM", "LINEAR_SILU", "LINEAR")],
        ),
        (
            ScaledLayer,
            [*("RMS_NORM", "LINEAR", "CALL", "HEADS", "ATTENTION", "LINEAR", "RMS_NORM", "LINEAR_SILU", "LINEAR")],
        ),
    ],
)
def test_layers_written_in_python_run_natively(
    layer: type[DecoderLayer], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tiny_model(tmp_path, "llama")
    ordinary, _ = answers(model_dir, "torch")
    monkeypatch.setattr(loader, "CausalLM", family(layer))
    truth, _ = answers(model_dir, "torch")
    assert [one.token_ids for one in truth] != [one.token_ids for one in ordinary], "the layer changes nothing"
    found, runner = answers(model_dir, "auto")
    assert [op.kind.name for op in runner.program.plan.ops] == [*EMBED, *3 * expected, "RMS_NORM"]
    for one, other in zip(truth, found, strict=True):
        assert one.token_ids == other.token_ids
        for here, there in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert set(here) == set(there)
            assert all(abs(here[i].logprob - there[i].logprob) < 1e-4 for i in here)


def test_a_head_that_is_not_one_product_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Capped(CausalLM):
        def compute_logits(self, hidden: Tensor) -> Tensor:
            return ops.call_out(torch.tanh, self.lm_head(hidden), width=VOCAB)

    model_dir = tiny_model(tmp_path, "llama")
    monkeypatch.setattr(loader, "CausalLM", Capped)
    with pytest.raises(AssertionError, match=r"compute_logits of Capped .*kernels='torch'"):
        answers(model_dir, "auto")
    answers(model_dir, "torch")
