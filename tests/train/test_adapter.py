"""An adapter learns what PEFT would teach it, is written as PEFT writes it, and goes on bit for bit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional

from chairlift import LLM, LoRARequest, SamplingParams
from chairlift.errors import ConfigError
from chairlift.kernels.weights import PLAIN
from chairlift.lora.trainable import TrainableAdapter
from chairlift.models.hf_config import parse_config, read_json
from chairlift.models.loader import load_model
from chairlift_train.config import TrainConfig, TrainerConfig
from chairlift_train.run import prepare, train
from chairlift_train.stream import PackStream
from chairlift_train.trainer import Trainer
from tests.lora.adapters import peft_logits
from tests.models.tiny import FAMILIES, MORE_FAMILIES, hf_model, tiny_hf_model
from tests.train import tiny_run

SEQUENCES = [[5, 9, 77, 3, 21, 64, 8, 100, 41, 2], [7, 11], [3, 90, 13, 55, 6, 31, 70] * 3]
KINDS = ("gpt2", "llama", "gpt_neox", "glm", "olmo2", "opt", "phi3")
"""One of each kind of names, fused products and orders of rows."""


def base_model(model_dir: Path) -> Any:
    network = parse_config(read_json(model_dir / "config.json"), where=str(model_dir))
    return load_model(model_dir, network, torch.float32, weight_format=PLAIN)


def filled(adapter: TrainableAdapter) -> TrainableAdapter:
    """With numbers in B, so that A has a gradient too."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapter


def peft_gradients(model_dir: Path, adapter_dir: Path) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss over all targets of :data:`SEQUENCES`, computed one by one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = PeftModel.from_pretrained(hf_model(model_dir), str(adapter_dir), is_trainable=True).eval()
    targets = sum(len(tokens) - 1 for tokens in SEQUENCES)
    for tokens in SEQUENCES:
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
        (functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="sum") / targets).backward()
    return {name.replace(".default", ""): each.grad for name, each in model.named_parameters() if each.grad is not None}


def compare_gradients(model_dir: Path, tmp_path: Path, **settings: Any) -> None:
    model = base_model(model_dir)
    adapter = filled(TrainableAdapter(model, **{"r": 5, "alpha": 7.0, **settings}))
    adapter.write(tmp_path / "adapter")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    stream = PackStream(SEQUENCES, 64, step=f"sequences:{len(SEQUENCES)}")
    config = TrainerConfig(steps=1, warmup_steps=0, max_grad_norm=1e9, weight_decay=0.0)
    trainer = Trainer(model, config, stream, adapter=adapter)
    next(trainer.run())
    expected = peft_gradients(model_dir, tmp_path / "adapter")
    gradients = {name: each.grad for name, each in adapter.parameters.items()}
    with torch.no_grad():
        for name, parameter in adapter.parameters.items():
            parameter.copy_(gradients[name])
    found = adapter.tensors()  # in PEFT's order of rows
    assert found.keys() == expected.keys(), "other modules are trained"
    for name, gradient in expected.items():
        most = 2e-5 + 5e-4 * float(gradient.abs().max())  # sums over many tokens, in float32
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=most), f"the gradient of {name} is another"
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("family", KINDS)
def test_gradients_equal_pefts(family: str, tmp_path: Path) -> None:
    compare_gradients(tiny_hf_model(tmp_path, family), tmp_path, rslora=family == "llama")


@pytest.mark.parametrize("target", ["q_proj", "k_proj", "v_proj"])
def test_one_part_of_a_fused_layer_is_adapted_alone(target: str, tmp_path: Path) -> None:
    compare_gradients(tiny_hf_model(tmp_path, "llama", num_hidden_layers=2), tmp_path, targets=(target,))


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True)])
def test_an_output_head_learns_what_peft_teaches_it(family: str, tied: bool, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, family, tie_word_embeddings=tied)
    compare_gradients(model_dir, tmp_path, targets=("all-linear", "lm_head"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert "lm_head" in config["target_modules"]


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted({*FAMILIES, *MORE_FAMILIES} - set(KINDS)))
def test_gradients_of_every_family_equal_pefts(family: str, tmp_path: Path) -> None:
    compare_gradients(tiny_hf_model(tmp_path, family), tmp_path)


@pytest.mark.planted("test_gradients_equal_pefts")
@pytest.mark.parametrize("mutation", ["scale", "order", "target"])
def test_each_missing_piece_changes_the_gradient(
    mutation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutation == "scale":
        monkeypatch.setattr(TrainableAdapter, "scale", property(lambda self: self.alpha))
    elif mutation == "order":
        monkeypatch.setattr(torch.Tensor, "argsort", lambda self: torch.arange(len(self)))
    else:
        attach = TrainableAdapter._attach
        monkeypatch.setattr(
            TrainableAdapter, "_attach", lambda self: (self._parts.pop("model.layers.1.mlp.down_proj"), attach(self))
        )
    with pytest.raises((AssertionError, TypeError, KeyError)):
        compare_gradients(tiny_hf_model(tmp_path, "glm" if mutation == "order" else "llama"), tmp_path)


def settings(tmp_path: Path, **lora: Any) -> dict[str, Any]:
    raw = tiny_run.settings(tmp_path)
    raw["model"] = {"path": str(tmp_path / "llama-0")}
    raw["lora"] = {"r": 4, "alpha": 8, "dropout": 0.1, **lora}
    return raw


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tiny_hf_model(tmp_path, "llama", num_hidden_layers=2)
    tiny_run.write_records(tmp_path / "data.jsonl")
    return tmp_path


def test_a_run_goes_on_bit_for_bit_and_holds_the_adapter_only(run_dir: Path) -> None:
    raw = settings(run_dir)
    whole = train(TrainConfig.from_mapping(raw)).directory
    seen: list[int] = []

    def stop(result: Any, trainer: Trainer) -> None:
        seen.append(result.step)
        trainer.stop_requested = result.step == 5

    raw["output"] = str(run_dir / "again")
    assert not train(TrainConfig.from_mapping(raw), on_step=stop).finished
    again = train(TrainConfig.from_mapping(raw), on_step=stop)
    assert again.finished and seen == list(range(1, tiny_run.STEPS + 1))
    for name in ("adapter_model.safetensors", "adapter_config.json", "training/state.safetensors"):
        assert (whole / name).read_bytes() == (again.directory / name).read_bytes()
    assert not (whole / "model.safetensors").exists()
    numbers = sum(each.numel() for each in load_file(whole / "adapter_model.safetensors").values())
    state = sum(each.numel() for each in load_file(whole / "training" / "state.safetensors").values())
    assert state < 3 * numbers + 20_000, "the state has more than the adapter and its moments"
    for change, message in (
        ({"alpha": 9}, "lora.alpha 8"),
        ({"r": 5}, "lora.r 4"),
        ({"targets": ["q_proj"]}, "another model"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(TrainConfig.from_mapping(settings(run_dir, **change)))
    without = {key: value for key, value in settings(run_dir).items() if key != "lora"}
    with pytest.raises(ConfigError, match="of an adapter"):
        train(TrainConfig.from_mapping(without))
    tiny_hf_model(run_dir, "llama", num_hidden_layers=2, rms_norm_eps=1e-5, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="another base model"):
        train(TrainConfig.from_mapping(settings(run_dir)))


def test_a_trained_adapter_is_served_and_read_by_peft(run_dir: Path) -> None:
    raw = settings(run_dir, dropout=0.0, targets=["q_proj", "v_proj", "layers.1.mlp.down_proj"])
    raw["training"]["learning_rate"] = 0.05
    found = train(TrainConfig.from_mapping(raw)).directory
    written = json.loads((found / "adapter_config.json").read_text())
    assert "model.layers.1.mlp.down_proj" in written["target_modules"] and written["base_model_name_or_path"]
    model_dir, prompt = run_dir / "llama-0", [5, 9, 3, 21, 14, 8]
    llm = LLM(model_dir, enable_lora=True, num_kv_blocks=40, skip_tokenizer_init=True, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([prompt] * 2, params, lora_request=[LoRARequest("mine", 1, found), None])
    adapted, plain = (output.outputs[0].token_ids for output in outputs)
    (logits,) = peft_logits(model_dir, found, [[*prompt, *adapted]])
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == adapted != plain


def test_impossible_settings_are_refused(run_dir: Path) -> None:
    for change, message in (
        ({"targets": ["query"]}, "lora.targets has 'query'.*q_proj"),
        ({"targets": []}, "targets is empty"),
        ({"r": 0}, "r must be 1 to 1024"),
        ({"alpha": 0}, "alpha must be above 0"),
        ({"dropout": 1}, "dropout must be"),
        ({"rank": 4}, "unknown key 'rank'"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(TrainConfig.from_mapping(settings(run_dir, **change)))
    raw = settings(run_dir)
    raw["model"] = {"config": tiny_run.MODEL}
    with pytest.raises(ConfigError, match=r"model\.path"):
        TrainConfig.from_mapping(raw)
    model = base_model(run_dir / "llama-0")
    TrainableAdapter(model, r=2, alpha=2)
    with pytest.raises(ConfigError, match="has an adapter already"):
        TrainableAdapter(model, r=2, alpha=2)
