"""Layers for a further token (MTP): answers are those without, and each draft is that of transformers' own layer.
A layer that knows each next token is always right, also beside recurrent states.

Changes that must make these fail: the halves of the projection exchanged; the model's last norm left out; the feature
of the next position from the other side of the layer's norm; the token of another place.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from chairlift import LLM, SamplingParams
from chairlift.errors import ConfigError, ModelLoadError
from tests.core.spec_decode.test_eagle3 import drafts_are_free
from tests.models.gguf.make import to_gguf
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels

pytestmark = needs_kernels
ASKED = {"method": "mtp", "num_speculative_tokens": 3}
SETTINGS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 120, "threads": 1}
NAMES = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "glm4_moe": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_next"), ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
}
LAYERS: dict[str, Any] = {
    "mimo": Qwen2DecoderLayer,
    "glm4_moe": Glm4MoeDecoderLayer,
    "qwen3_5_text": Qwen3_5DecoderLayer,
    "qwen3_next": Qwen3NextDecoderLayer,
}


class Reference:
    """The model in transformers, and its layer for a further token, without a cache. ``write`` puts the layer into the
    model's files."""

    def __init__(self, where: Path, family: str) -> None:
        self.family = family
        self.is_qwen = family.startswith("qwen")
        """Whether norms multiply by 1 + their weights, and the layer's tensors have a prefix of their own."""
        self.where = where
        self.target: Any = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
        config = AutoConfig.from_pretrained(where)
        config._attn_implementation = "sdpa"
        attends = config.layer_types.index("full_attention") if self.is_qwen else config.num_hidden_layers - 1
        self.layer = LAYERS[family](config, attends).eval()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, value in [*self.layer.named_parameters(), *self.layer.named_buffers()]:
                noise = torch.randn(value.shape, generator=generator)
                value.copy_(1 + 0.1 * noise if "norm" in name else 0.25 * noise)
        width = config.hidden_size
        first, second, projection, last = NAMES[family]
        self.own = {
            f"{name}.weight": 1 + 0.25 * torch.randn(width, generator=generator) for name in (first, second, last)
        }
        self.own[f"{projection}.weight"] = torch.randn(width, 2 * width, generator=generator) / 8
        self.prefix = "model.mtp_layers.0." if family == "mimo" else f"model.layers.{config.num_hidden_layers}."
        if self.is_qwen:
            self.prefix = "mtp."

    def write(self) -> None:
        stored = {**self.own}
        for last, value in self.layer.state_dict().items():
            name = f"layers.0.{last}" if self.is_qwen else last
            if name.endswith("experts.gate_up_proj"):
                for expert, both in enumerate(value):
                    for part, rows in zip(("gate", "up"), both.chunk(2), strict=True):
                        stored[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = rows
            elif name.endswith("experts.down_proj"):
                stored |= {
                    name.replace("down_proj", f"{expert}.down_proj.weight"): rows for expert, rows in enumerate(value)
                }
            else:
                stored[name] = value
        path = self.where / "model.safetensors"
        layer = {self.prefix + name: value.contiguous().clone() for name, value in stored.items()}
        save_file({**load_file(path), **layer}, path, {"format": "pt"})
        config = json.loads((self.where / "config.json").read_text())
        config["num_nextn_predict_layers"] = 1
        if self.family == "mimo":
            config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        (self.where / "config.json").write_text(json.dumps(config))

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        eps = self.target.config.rms_norm_eps
        weight = self.own[f"{name}.weight"] + self.is_qwen
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * weight

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """``count`` greedy drafts after ``tokens``."""
        first, second, projection, last = NAMES[self.family]
        given = list(tokens)
        with torch.inference_mode():
            features = self.target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
            for _ in range(count):
                embedded = self._norm(self.target.model.embed_tokens(torch.tensor(given[1:])), first)
                both = [embedded, self._norm(features, second)]
                x = torch.cat(both[::-1] if self.family == "mimo" else both, -1) @ self.own[f"{projection}.weight"].T
                places = torch.arange(len(x))[None]
                rotation = self.target.model.rotary_emb(x[None], places)
                mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
                found = self.layer(x[None], attention_mask=mask, position_embeddings=rotation, position_ids=places)
                found = (found[0] if isinstance(found, tuple) else found)[0]
                out = self._norm(found[-1], last)
                given.append(int(self.target.lm_head(out).argmax()))
                following = found[-1] if self.family == "glm4_moe" else out
                features = torch.cat((features, following[None]))
        return given[len(tokens) :]


def tiny(folder: Path, family: str) -> tuple[Path, Reference]:
    """A model with its layer. GLM-4.5-Air has 46 decoder layers, by which its files are known."""
    shape: dict[str, Any] = {"num_hidden_layers": 46, "std": 0.1} if family == "glm4_moe" else {"num_hidden_layers": 3}
    where = tiny_hf_model(folder, "qwen2" if family == "mimo" else family, tie_word_embeddings=False, **shape)
    reference = Reference(where, family)
    reference.write()
    return where, reference


@pytest.mark.parametrize(
    "family",
    ["mimo", "qwen3_5_text", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("glm4_moe", "qwen3_next"))],
)
def test_drafts_are_those_of_transformers_and_answers_those_without(family: str, tmp_path: Path) -> None:
    where, reference = tiny(tmp_path, family)
    prompts = [[random.Random(i).randrange(2, 100) for _ in range(20 + 17 * i)] for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    plain = [each.outputs[0].token_ids for each in LLM(where, **SETTINGS).generate(prompts, params)]
    llm = LLM(where, speculative_config=ASKED, max_num_batched_tokens=45, **SETTINGS)
    drafter = drafts_are_free(llm)
    propose, made, rng = drafter.propose, list[tuple[list[int], list[int]]](), random.Random(1)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}

    def noted(rows: Any) -> Any:
        drafts = []
        for (request, limit), found in zip(rows, propose(rows), strict=True):
            made.append((list(request.token_ids), list(found)))
            count = request.num_prompt_tokens
            right = list(answers[tuple(request.token_ids[:count])][len(request.token_ids) - count :])
            drafts.append([*right[: rng.randint(0, limit)]])  # so that some are accepted
        return drafts

    drafter.propose = noted  # type: ignore[method-assign]
    assert [each.outputs[0].token_ids for each in llm.generate(prompts, params)] == plain
    wrong = sum(found != reference.drafts(tokens, max(1, len(found))) for tokens, found in made)
    assert len(made) > 15 and wrong <= 1  # a near tie
    drafter.propose = propose  # type: ignore[method-assign]
    assert [each.outputs[0].token_ids for each in llm.generate(prompts, params)] == plain
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
    expected = [each.outputs[0].token_ids for each in LLM(where, **SETTINGS).generate(prompts, sampled)]
    assert [each.outputs[0].token_ids for each in llm.generate(prompts, sampled)] == expected


@pytest.mark.parametrize("family", ["qwen3_5_text"])
def test_a_layer_that_knows_the_next_token_is_always_right(family: str, tmp_path: Path) -> None:
    """No layer of the model adds anything, so the next token follows from the newest one alone. The layer for a further
    token passes its embedding on."""
    where, reference = tiny(tmp_path, family)
    tensors = load_file(where / "model.safetensors")
    adding = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
    tensors |= {name: torch.zeros_like(each) for name, each in tensors.items() if name.endswith(adding)}
    width = reference.target.config.hidden_size
    tensors["mtp.fc.weight"] = torch.cat((torch.eye(width), torch.zeros(width, width)), 1)
    tensors |= {f"mtp.{name}.weight": torch.zeros(width) for name in ("pre_fc_norm_embedding", "norm")}
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, where / "model.safetensors", {"format": "pt"})
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [[5, 9, 33], [7, 8]]
    plain = [each.outputs[0].token_ids for each in LLM(where, **SETTINGS).generate(prompts, params)]
    llm = LLM(where, speculative_config=ASKED, **SETTINGS)
    drafts_are_free(llm)
    assert [each.outputs[0].token_ids for each in llm.generate(prompts, params)] == plain
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and drafts.num_accepted == drafts.num_drafts > 20


def test_models_without_the_layer_are_refused(tmp_path: Path) -> None:
    where = tiny_hf_model(tmp_path, "qwen2", num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"mtp is for models of the types glm4_moe, mimo, .* this one is qwen2"):
        LLM(where, speculative_config=ASKED, **SETTINGS)
    with pytest.raises(ConfigError, match="leave model out"):
        LLM(where, speculative_config={**ASKED, "model": "x"}, **SETTINGS)
    with pytest.raises(ConfigError, match="is a GGUF file; use method ngram or suffix"):
        LLM(to_gguf(where, tmp_path / "model.gguf"), speculative_config={"method": "mimo_mtp"}, **SETTINGS)
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**config, "model_type": "mimo"}))
    with pytest.raises(ModelLoadError, match=r"lacks 'model.mtp_layers.0.final_layernorm.weight'"):
        LLM(where, speculative_config=ASKED, **SETTINGS)
