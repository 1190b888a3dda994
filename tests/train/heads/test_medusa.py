"""Medusa heads learn the tokens of their places, never across the border of a sequence, and are served as written.

Gradients of packs are compared with a plain loop over single sequences, on the hidden states that transformers
computes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from chairlift import LLM, SamplingParams
from chairlift.cli.main import main
from chairlift.errors import ConfigError
from chairlift.executor.drafters.medusa import MedusaHeads, load_medusa
from chairlift.kernels.weights import NATIVE, PLAIN
from chairlift.models.hf_config import parse_config, read_json
from chairlift.models.loader import load_model
from chairlift_train.config import TrainConfig, TrainerConfig
from chairlift_train.encoder import Encoder
from chairlift_train.heads import medusa, training
from chairlift_train.heads.medusa import MedusaNetwork
from chairlift_train.heads.training import HeadsTrainer
from chairlift_train.run import prepare, train
from chairlift_train.stream import PackStream
from chairlift_train.trainer import Trainer
from chairlift_train.varlen import VarlenContext
from tests.models.tiny import hf_model, tiny_hf_model
from tests.native import needs_kernels
from tests.train import tiny_run

SEQUENCES = [
    {"input_ids": [5, 9, 77, 3, 21, 64, 8, 100, 41, 2]},
    {"input_ids": [7, 11]},
    {"input_ids": [3, 90, 13, 55, 6, 31, 70] * 3, "loss_weight": [0] * 5 + [1, 2, 1, 0, 1, 1, 3] + [1] * 9},
    {"input_ids": [4]},
    {"input_ids": [8, 80, 18, 40], "loss_weight": [0, 0, 1, 1]},
]
NUM_HEADS, DECAY = 3, 0.7


def base_model(model_dir: Path) -> Any:
    network = parse_config(read_json(model_dir / "config.json"), where=str(model_dir))
    return load_model(model_dir, network, torch.float32, weight_format=PLAIN)


def filled_heads(model: Any, **settings: Any) -> MedusaNetwork:
    """Heads whose blocks are not the identity, so that every tensor has a gradient of its own."""
    heads = MedusaNetwork(model, **{"num_heads": NUM_HEADS, "num_layers": 2, **settings})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.trained.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return heads


def plain_gradients(model_dir: Path, heads: MedusaNetwork) -> dict[str, torch.Tensor]:
    """Gradients of the heads' loss, sequence by sequence and place by place."""
    model = hf_model(model_dir)
    own = {name: each.detach().clone().requires_grad_() for name, each in heads.trained.items()}
    weights = [given.get("loss_weight", [1] * len(given["input_ids"])) for given in SEQUENCES]
    total = sum(sum(each[1:]) for each in weights)
    for given, weight in zip(SEQUENCES, weights, strict=True):
        tokens = given["input_ids"]
        with torch.no_grad():
            states = model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        for head in range(NUM_HEADS):
            for place in range(len(tokens) - head - 2):
                target = place + head + 2
                if not weight[place + 1] or not weight[target]:
                    continue
                x = states[place]
                for layer in range(heads.num_layers):
                    linear = f"{head}.{layer}.linear"
                    x = x + functional.silu(own[f"{linear}.weight"] @ x + own[f"{linear}.bias"])
                matrix = own[f"{head}.{heads.num_layers}.weight"] if heads.own_output_heads else model.lm_head.weight
                loss = functional.cross_entropy(
                    (matrix.detach() if not heads.own_output_heads else matrix) @ x, torch.tensor(tokens[target])
                )
                part = DECAY ** (head + 1) * weight[target] * loss / total
                part.backward()  # type: ignore[no-untyped-call]
    return {name: each.grad for name, each in own.items() if each.grad is not None}


def largest_difference(tmp_path: Path, capacity: int, **settings: Any) -> float:
    """Between gradients of packs and of the plain loop."""
    model_dir = tiny_hf_model(tmp_path, "llama")
    model = base_model(model_dir)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    heads = filled_heads(model, **settings)
    expected = plain_gradients(model_dir, heads)
    stream = PackStream(SEQUENCES, capacity, step=f"sequences:{len(SEQUENCES)}")
    config = TrainerConfig(steps=1, warmup_steps=0, max_grad_norm=1e9, weight_decay=0.0)
    next(HeadsTrainer(heads, config, stream, decay=DECAY).run())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    found = {name: each.grad for name, each in heads.trained.items() if each.grad is not None}
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("own_output_heads", [False, True])
@pytest.mark.parametrize("capacity", [24, 64])
def test_gradients_are_those_of_single_sequences(own_output_heads: bool, capacity: int, tmp_path: Path) -> None:
    assert largest_difference(tmp_path, capacity, own_output_heads=own_output_heads) <= 3e-6


def across_borders(batch: Any, distance: int) -> Any:
    return RIGHT(batch | {"segment_ids": torch.zeros_like(batch["segment_ids"])}, distance)


def from_prompts(batch: Any, distance: int) -> Any:
    return RIGHT(batch | {"labels": batch["input_ids"]}, distance)


def one_short(batch: Any, distance: int) -> Any:
    return RIGHT(batch, distance - 1)


RIGHT = training.ahead


@pytest.mark.planted("test_gradients_are_those_of_single_sequences")
@pytest.mark.parametrize("plant", [across_borders, from_prompts, one_short])
def test_a_planted_bug_is_noticed(
    plant: Callable[[Any, int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "ahead", plant)
    assert largest_difference(tmp_path, 64) > 1e-4


@pytest.mark.planted("test_gradients_are_those_of_single_sequences")
def test_states_of_mixed_sequences_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = VarlenContext
    monkeypatch.setattr(medusa, "VarlenContext", lambda offsets: varlen([0, offsets[-1]]))
    assert largest_difference(tmp_path, 64) > 1e-4


def settings(tmp_path: Path, **heads: Any) -> dict[str, Any]:
    raw = tiny_run.settings(tmp_path)
    raw["model"] = {"path": str(tmp_path / "llama-0"), "dtype": "float32"}
    raw["training"]["dropout"] = 0.0
    raw["heads"] = {"method": "medusa", "num_heads": 2, **heads}
    return raw


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tiny_hf_model(tmp_path, "llama", num_hidden_layers=2)
    tiny_run.write_records(tmp_path / "data.jsonl")
    return tmp_path


def test_a_run_goes_on_bit_for_bit_and_holds_the_heads_only(run_dir: Path) -> None:
    raw = settings(run_dir)
    whole = train(TrainConfig.from_mapping(raw)).directory

    def stop(result: Any, trainer: Trainer) -> None:
        trainer.stop_requested = result.step == 5

    raw["output"] = str(run_dir / "again")
    assert not train(TrainConfig.from_mapping(raw), on_step=stop).finished
    again = train(TrainConfig.from_mapping(raw), on_step=stop)
    assert again.finished and again.steps == tiny_run.STEPS
    for name in ("medusa_lm_head.safetensors", "config.json", "training/state.safetensors"):
        assert (whole / name).read_bytes() == (again.directory / name).read_bytes()
    assert not (whole / "model.safetensors").exists()
    numbers = sum(each.numel() for each in load_file(whole / "medusa_lm_head.safetensors").values())
    state = sum(each.numel() for each in load_file(whole / "training" / "state.safetensors").values())
    assert state < 3 * numbers + 20_000, "the state has more than the heads and their moments"
    for change, message in (
        ({"num_heads": 3}, r"heads\.num_heads 2, and here it is 3"),
        ({"own_output_heads": True}, r"heads\.own_output_heads False"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(TrainConfig.from_mapping(settings(run_dir, **change)))
    raw = settings(run_dir)
    del raw["heads"]
    with pytest.raises(ConfigError, match="of an adapter or heads"):
        train(TrainConfig.from_mapping(raw))


def test_impossible_settings_are_refused(run_dir: Path) -> None:
    for change, message in (
        ({"method": "hydra"}, "method must be one of medusa, eagle3"),
        ({"num_heads": 0}, "num_heads must be 1 to 64, got 0"),
        ({"decay": 0}, "decay must be above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainConfig.from_mapping(settings(run_dir, **change))
    for changes, message in (
        ({"training": {"steps": 5, "warmup_steps": 0, "dropout": 0.1}}, "leave training.dropout"),
        ({"lora": {"r": 2}}, "both lora and heads"),
        ({"model": {"config": tiny_run.MODEL}}, r"give model\.path"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(TrainConfig.from_mapping(settings(run_dir) | changes))


# -- from the model's own answers to drafts ----------------------------------------------------------------------------


def test_answers_that_were_generated_are_read(tmp_path: Path) -> None:
    record = {
        "index": 0,
        "prompt": "x",
        "prompt_token_ids": [3, 4],
        "outputs": [{"token_ids": [5]}, {"token_ids": [6, 7]}],
    }
    items = Encoder().examples(record).items
    assert [item["input_ids"].tolist() for item in items] == [[3, 4, 5], [3, 4, 6, 7]]
    assert [item["loss_weight"].tolist() for item in items] == [[0, 0, 1], [0, 0, 1, 1]]
    assert not Encoder().examples(record).notes
    for broken, message in (
        ({"outputs": [], "error": "too long"}, r"has no answer \(too long\)"),
        ({"outputs": ["x"]}, "a list of answers"),
        ({"outputs": [{"text": "x"}]}, "token_ids of an answer must be a list of token ids"),
    ):
        with pytest.raises(ConfigError, match=message):
            Encoder().examples(record | broken)


def write_answers(model_dir: Path, folder: Path) -> list[list[int]]:
    """Write the model's answers to random prompts as ``answers.jsonl``, with ``chairlift generate``. Returns the
    prompts."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 100) for _ in range(6)] for _ in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    asked = ["generate", "--model", str(model_dir), "--prompts-file", str(folder / "prompts.jsonl")]
    asked += ["--max-tokens", "24", "--ignore-eos", "--dtype", "float32", "--num-kv-blocks", "60", "--quiet"]
    assert main([*asked, "--skip-tokenizer-init", "-o", str(folder / "answers.jsonl")]) == 0
    return prompts


@needs_kernels
@pytest.mark.parametrize("own_output_heads", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_heads_learn_what_the_model_says_and_draft_it(own_output_heads: bool, tmp_path: Path) -> None:
    """Commands of the documentation: generate, train, serve. The model answers everything alike, so heads learn it."""
    model_dir = tiny_hf_model(tmp_path, "llama")
    prompts = write_answers(model_dir, tmp_path)
    raw = {
        "model": {"path": str(model_dir), "dtype": "float32"},
        "data": {"files": [str(tmp_path / "answers.jsonl")]},
        "packing": {"capacity": 256, "step": "packs:2"},
        "training": {"steps": 60, "warmup_steps": 5, "learning_rate": 0.02, "weight_decay": 0.0},
        "heads": {"method": "medusa", "num_heads": 3, "own_output_heads": own_output_heads},
        "output": str(tmp_path / "out"),
        "threads": 1,
    }
    losses: list[float] = []
    heads_dir = train(TrainConfig.from_mapping(raw), on_step=lambda result, _: losses.append(result.loss)).directory
    assert losses[-1] < 0.5 * losses[0]
    assert len(load_medusa(heads_dir, base_model(model_dir).config.vocab_size, 64, torch.float32, NATIVE)) == 3
    shape: dict[str, Any] = {
        "model": str(model_dir),
        "num_kv_blocks": 60,
        "skip_tokenizer_init": True,
        "dtype": "float32",
    }
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    plain = LLM(**shape).generate(prompts[:4], params)
    llm = LLM(**shape, speculative_config={"method": "medusa", "model": str(heads_dir)})
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and isinstance(drafts.speculator._proposer, MedusaHeads)  # type: ignore[attr-defined]
    drafts.speculator._seconds = lambda step: 1.0  # type: ignore[attr-defined]
    drafted = llm.generate(prompts[:4], params)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert drafts.num_accepted > 0.25 * drafts.num_drafts > 0
