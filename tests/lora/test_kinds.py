"""Adapters of every kind compute what PEFT computes: DoRA, biases, replaced modules, embeddings, output heads, new
tokens and experts, beside rows without an adapter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from chairlift import LoRARequest
from chairlift.kernels.cpu.library import supported_isas
from chairlift.lora.reader import WEIGHTS_NAME
from chairlift.lora.settings import CONFIG_NAME
from tests.lora.adapters import random_adapter
from tests.lora.test_product import PROMPTS, answers, bits, check, compare, engine
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels

TIED = {"tie_word_embeddings": True}
APART = {"tie_word_embeddings": False}
Q = ["q_proj"]
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dora": ("qwen3", {}, {"use_dora": True, "r": 5}),
    "dora-rslora": ("qwen2", {}, {"use_dora": True, "use_rslora": True, "target_modules": ["v_proj", "up_proj"]}),
    "dora-transposed": ("gpt2", {}, {"use_dora": True, "fan_in_fan_out": True}),
    "dora-by-head": ("gpt_neox", {}, {"use_dora": True}),
    "added-bias": ("llama", {}, {"lora_bias": True}),
    "own-biases": ("qwen2", {}, {"bias": "lora_only", "target_modules": ["q_proj", "v_proj"]}),
    "all-biases": ("llama", {"attention_bias": True}, {"bias": "all", "target_modules": Q}),
    "embedding": ("llama", APART, {"target_modules": [*Q, "embed_tokens"]}),
    "embedding-scaled": ("gemma", {}, {"target_modules": [*Q, "embed_tokens"]}),
    "embedding-tied": ("llama", TIED, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "head": ("llama", APART, {"target_modules": [*Q, "lm_head"]}),
    "head-tied": ("qwen3", TIED, {"target_modules": ["lm_head"]}),
    "head-dora": ("llama", APART, {"target_modules": ["lm_head"], "use_dora": True}),
    "saved": ("llama", APART, {"target_modules": Q, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved-embedding": ("llama", TIED, {"target_modules": Q, "modules_to_save": ["embed_tokens"]}),
    "saved-linear": ("qwen2", {}, {"target_modules": ["v_proj"], "modules_to_save": ["q_proj", "down_proj"]}),
    "saved-both": (
        "llama",
        TIED,
        {"target_modules": Q, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tokens": ("llama", APART, {"target_modules": Q, "trainable_token_indices": [3, 7, 64]}),
    "tokens-tied": ("llama", TIED, {"target_modules": Q, "trainable_token_indices": {"embed_tokens": [3, 7, 64]}}),
    "patterns": (
        "llama",
        {},
        {
            "rank_pattern": {r"(q|k)_proj": 7, r"model\.layers\.[12]\.(self_attn|mlp)\.(?:o|up)_proj": 3},
            "alpha_pattern": {r"^model\.layers\.0\..*(v|gate)_proj": 3, "layers.1.*": 5},
        },
    ),
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all-linear": ("qwen3_moe", {}),
    "shared": ("qwen2_moe", {}),
    "groups": ("glm4_moe", {}),
    "mixtral": ("mixtral", {}),
    "transposed": (
        "gpt_oss",
        {"target_modules": Q, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "down": ("qwen3_moe", {"target_modules": Q, "target_parameters": ["mlp.experts.down_proj"]}),
    "router": ("olmoe", {"target_modules": Q, "target_parameters": ["mlp.gate.weight", "mlp.experts.gate_up_proj"]}),
}
SHORT = ("dora", "all-biases", "embedding-tied", "head", "saved", "tokens-tied", "patterns")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in SHORT else pytest.mark.nightly) for k in KINDS])
def test_every_kind_equals_peft(kind: str, tmp_path: Path) -> None:
    family, model, settings = KINDS[kind]
    compare(tiny_hf_model(tmp_path, family, **model), tmp_path, settings)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "shared" else pytest.mark.nightly) for k in EXPERTS])
def test_experts_equal_peft(kind: str, tmp_path: Path) -> None:
    family, settings = EXPERTS[kind]
    compare(tiny_hf_model(tmp_path, family), tmp_path, settings, {"target_modules": Q})


def per_expert(path: Path, count: int) -> None:
    """Write the matrices of fused experts under the names of single experts, as with transformers 4."""
    tensors = load_file(path / WEIGHTS_NAME)
    for name in [name for name in tensors if ".experts." in name and ".lora_A." in name]:
        a, b = tensors.pop(name), tensors.pop(name.replace("lora_A", "lora_B"))
        base = name.partition(".experts.")[0] + ".experts"
        rank = len(a) // count
        for expert in range(count):
            own_a = a[expert * rank : (expert + 1) * rank]
            own_b = b.reshape(len(b), rank, count)[:, :, expert]
            halves = {"down_proj": own_b}
            if ".base_layer." in name:
                halves = dict(zip(("gate_proj", "up_proj"), own_b.chunk(2), strict=True))
            for module, rows in halves.items():
                tensors[f"{base}.{expert}.{module}.lora_A.weight"] = own_a.clone()
                tensors[f"{base}.{expert}.{module}.lora_B.weight"] = rows.contiguous()
    save_file(tensors, path / WEIGHTS_NAME)


def test_single_experts_equal_fused_ones(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "qwen3_moe")
    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    path = random_adapter(model_dir, tmp_path / "a", target_modules=Q, target_parameters=both)
    asked = [LoRARequest("a", 1, path)] * len(PROMPTS)
    outputs = answers(engine(model_dir), PROMPTS, asked)
    check(model_dir, outputs, asked)
    per_expert(path, 6)
    again = answers(engine(model_dir), PROMPTS, asked)
    assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids for each in outputs]
    check_close(again, outputs)


def check_close(some: Any, others: Any) -> None:
    for a, b in zip(some, others, strict=True):
        for (_, one), (_, other) in zip(bits(a), bits(b), strict=True):
            assert abs(one - other) <= 1e-4


RENAMED: dict[str, Callable[[str], str]] = {
    "adapter-name": lambda name: re.sub(r"(lora_[AB])\.", r"\1.default.", name),
    "compiled": lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
    "distributed": lambda name: f"module.{name}",
    "no-prefix": lambda name: name.removeprefix("base_model.model."),
    "no-prefix-of-the-class": lambda name: name.removeprefix("base_model.model.model."),
    "saved-with-the-wrapper": lambda name: name.replace(
        "lm_head.weight", "lm_head.modules_to_save.default.weight"
    ).replace("embed_tokens.weight", "embed_tokens.modules_to_save.default.weight"),
}


@pytest.mark.parametrize("how", RENAMED)
def test_names_of_training_frameworks_are_understood(how: str, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", **APART)
    path = random_adapter(model_dir, tmp_path / "a", modules_to_save=["lm_head", "embed_tokens"])
    asked = [LoRARequest("a", 1, path)] * len(PROMPTS)
    expected = [bits(each) for each in answers(engine(model_dir), PROMPTS, asked)]
    tensors = load_file(path / WEIGHTS_NAME)
    save_file({RENAMED[how](name): tensor for name, tensor in tensors.items()}, path / WEIGHTS_NAME)
    assert [bits(each) for each in answers(engine(model_dir), PROMPTS, asked)] == expected


@needs_kernels
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("qwen2", {}, marks=pytest.mark.nightly),
        ("qwen2", {"dtype": "bfloat16"}),
        ("qwen2", {"dtype": "bfloat16", "quantization": "int8"}),
        ("qwen2_moe", {"dtype": "bfloat16"}),
        pytest.param("qwen2_moe", {"dtype": "bfloat16", "quantization": "int8"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_company_of_any_kind(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, family, num_hidden_layers=2, **APART)
    kinds: list[dict[str, Any]] = [
        {"r": 3},
        {"use_dora": True, "r": 20, "target_modules": ["q_proj", "o_proj"]},
        {"modules_to_save": ["lm_head", "embed_tokens"], "target_modules": Q},
        {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "r": 40},
        {"lora_bias": True, "target_modules": ["q_proj"]},
        {"trainable_token_indices": [3, 5, 7], "target_modules": Q},
    ]
    if "moe" in family:
        kinds[0] |= {"target_modules": Q, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
        kinds[1] = {"target_modules": ["shared_expert_gate", "o_proj"], "target_parameters": ["mlp.gate.weight"]}
    asked: list[LoRARequest | None] = [None]
    for n, each in enumerate(kinds):
        asked.append(LoRARequest(f"a{n}", n + 1, random_adapter(model_dir, tmp_path / f"a{n}", seed=n, **each)))
    prompts = [PROMPTS[n % 3] for n in range(len(asked))]
    llm = engine(model_dir, supported_isas()[-1], enable_prefix_caching=False, **settings)
    together = [bits(output) for output in answers(llm, prompts, asked)]
    alone = [bits(*answers(llm, [prompt], [each])) for prompt, each in zip(prompts, asked, strict=True)]
    assert together == alone
    assert len({str(each) for each in together[0::3]}) == 3, "an adapter changed nothing"


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_norms_follow_replaced_weights(kernels: str, tmp_path: Path) -> None:
    """DoRA's norms, offsets of biases and tied rows belong to the weights that are served."""
    first, second = (tiny_hf_model(tmp_path / f"m{n}", "qwen2", seed=n, num_hidden_layers=2, **TIED) for n in (1, 2))
    settings = {"use_dora": True, "bias": "lora_only", "trainable_token_indices": [3, 7]}
    path = random_adapter(first, tmp_path / "a", **settings)
    asked = [LoRARequest("a", 1, path)] * 3
    llm = engine(first, kernels)
    check(first, answers(llm, PROMPTS, asked), asked)
    llm.update_weights(second, 1)
    expected = answers(engine(second, kernels), PROMPTS, asked)
    assert [bits(each) for each in answers(llm, PROMPTS, asked)] == [bits(each) for each in expected]
    check(second, expected, asked)


@pytest.mark.planted
@pytest.mark.parametrize(
    ("kind", "name", "planted"),
    [
        ("dora", "_gains", lambda *_: None),
        ("all-biases", "_offsets", lambda *_: None),
        ("saved", "_whole", lambda *_: None),
        ("tokens-tied", "with_tied_rows", lambda adapter, own: adapter),
    ],
)
def test_each_missing_effect_changes_the_answer(
    kind: str, name: str, planted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chairlift.lora import effects, torch_bank

    monkeypatch.setattr(torch_bank if name == "with_tied_rows" else effects, name, planted)
    family, model, settings = KINDS[kind]
    with pytest.raises(AssertionError, match=r"token|log-prob"):
        compare(tiny_hf_model(tmp_path, family, **model), tmp_path, settings, kernels=("torch",))


@pytest.mark.planted
@pytest.mark.parametrize("planted", ["router", "columns", "scale", "gate"])
def test_each_missing_part_of_experts_changes_the_answer(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chairlift.kernels.experts import ExpertChange
    from chairlift.lora import torch_bank

    def spoiled(first: Any, down: Any, router: Any, gate: Any) -> ExpertChange:
        if planted == "columns":
            first = {expert: first.get((expert + 1) % 6, ()) for expert in range(6)}
        if planted == "scale":
            down = {expert: [(at, a, b / 2) for at, a, b in parts] for expert, parts in down.items()}
        return ExpertChange(first, down, None if planted == "router" else router, None if planted == "gate" else gate)

    monkeypatch.setattr(torch_bank, "ExpertChange", spoiled)
    settings: dict[str, Any] = {"target_modules": ["shared_expert_gate"], "std": 0.4}
    settings["target_parameters"] = ["mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    with pytest.raises(AssertionError, match=r"token|log-prob"):
        compare(tiny_hf_model(tmp_path, "qwen2_moe"), tmp_path, settings, kernels=("torch",))


def test_vectors_that_contradict_the_settings_are_refused(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", num_hidden_layers=2)
    path = random_adapter(model_dir, tmp_path / "a", use_dora=True)
    config = json.loads((path / CONFIG_NAME).read_text())
    (path / CONFIG_NAME).write_text(json.dumps({**config, "use_dora": False}))
    llm = engine(model_dir, "torch")
    with pytest.raises(Exception, match="use_dora=False"):
        answers(llm, PROMPTS[:1], [LoRARequest("a", 1, path)])
    tensors = load_file(path / WEIGHTS_NAME)
    save_file({k: v for k, v in tensors.items() if "magnitude" not in k}, path / WEIGHTS_NAME)
    (path / CONFIG_NAME).write_text(json.dumps(config))
    with pytest.raises(Exception, match="no lora_magnitude_vector"):
        answers(llm, PROMPTS[:1], [LoRARequest("a", 2, path)])
