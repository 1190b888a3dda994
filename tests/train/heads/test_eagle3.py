"""The drafting layer learns what it will draft: gradients of packs equal those of a loop that drafts row by row.

The loop is plain torch on the hidden states that transformers computes. For each token of each sequence, it drafts as
the engine does: keys of the served model's features up to this token, then keys of the layer's own features.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from chairlift import LLM, SamplingParams
from chairlift.errors import ConfigError
from chairlift.executor.drafters.eagle3 import Eagle3Drafter
from chairlift.kernels.weights import NATIVE
from chairlift.models.eagle3 import Eagle3, hidden_at, load_eagle3, stored_tensors
from chairlift.models.model_files import read_config
from chairlift_train.config import TrainConfig, TrainerConfig
from chairlift_train.heads import eagle3, training, unrolled
from chairlift_train.heads.eagle3 import Eagle3Network, check_taps, default_taps
from chairlift_train.heads.training import HeadsTrainer
from chairlift_train.heads.vocabulary import frequent_tokens
from chairlift_train.run import prepare, train
from chairlift_train.stream import PackStream
from chairlift_train.trainer import Trainer
from chairlift_train.varlen import VarlenContext
from tests.models.tiny import hf_model, tiny_hf_model
from tests.native import needs_kernels
from tests.tiers import one_in
from tests.train import tiny_run
from tests.train.heads.test_medusa import SEQUENCES, base_model, write_answers

NUM_STEPS, DECAY, TAPS = 3, 0.7, (2, 0, 1)
KNOWN = np.array([i for i in range(128) if i % 4 != 1], dtype=np.int32)
"""A reduced vocabulary, which some targets are not in."""


def filled_layer(model: Any, **settings: Any) -> Eagle3Network:
    """A layer whose norms and biases are not those of a new layer, so that every tensor has a gradient of its own."""
    generator = torch.Generator().manual_seed(1)
    settings = {"num_steps": NUM_STEPS, "taps": TAPS, "target_ids": KNOWN, **settings}
    network = Eagle3Network(model, **settings)
    with torch.no_grad():
        for name, parameter in network.trained.items():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((1 + 0.1 * noise) if "norm" in name else 0.15 * noise)
    return network


class Plain:
    """The layer in plain torch, one position at a time. ``weights`` are the published tensors, with gradients."""

    def __init__(self, weights: dict[str, Tensor], model: Any) -> None:
        self.weights, self.model, self.config = weights, model, model.config
        self.head_dim = self.config.hidden_size // self.config.num_attention_heads

    def __getitem__(self, name: str) -> Tensor:
        return self.weights.get(f"{name}.weight", self.weights.get(f"midlayer.{name}.weight", torch.empty(0)))

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self[name]

    def position(
        self, feature: Tensor, token: int, position: int, cache: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(result of a position, its keys and values). ``cache`` has those of all earlier positions."""
        embedding = self.model.model.embed_tokens.weight[token].detach()
        x = torch.cat((self.norm(embedding, "input_layernorm"), self.norm(feature, "hidden_norm")))
        q, k, v = ((self[f"self_attn.{name}_proj"] @ x).view(-1, self.head_dim) for name in "qkv")
        half = self.head_dim // 2
        theta = self.config.rope_parameters["rope_theta"]
        angles = position / theta ** (torch.arange(half) / half)
        turned = [
            torch.cat(
                (
                    each[:, :half] * angles.cos() - each[:, half:] * angles.sin(),
                    each[:, half:] * angles.cos() + each[:, :half] * angles.sin(),
                ),
                dim=-1,
            )
            for each in (q, k)
        ]
        keys, values = (torch.stack(each, dim=1) for each in zip(*cache, (turned[1], v), strict=True))
        group = len(q) // len(k)
        keys, values = (each.repeat_interleave(group, dim=0) for each in (keys, values))
        scores = (keys @ turned[0][:, :, None])[..., 0] / self.head_dim**0.5
        out = (scores.softmax(-1)[:, None] @ values)[:, 0].flatten()
        hidden = feature + self["self_attn.o_proj"] @ out
        inner = self.norm(hidden, "post_attention_layernorm")
        gated = functional.silu(self["mlp.gate_proj"] @ inner) * (self["mlp.up_proj"] @ inner)
        return hidden + self["mlp.down_proj"] @ gated, (turned[1], v)

    def loss(self, tokens: list[int], weight: list[float], distribution: bool) -> Tensor:
        """Sum of the losses of all drafts behind each token of a sequence."""
        with torch.no_grad():
            out = self.model.model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
            states = torch.cat([out.hidden_states[tap][0] for tap in TAPS], dim=-1)
            logits = self.model.lm_head(out.last_hidden_state[0])
        features, firsts, given = states @ self["fc"].T, list[tuple[Tensor, Tensor]](), list[Tensor]()
        for place in range(len(tokens) - 1):
            hidden, pair = self.position(features[place], tokens[place + 1], place, firsts)
            firsts.append(pair)
            given.append(hidden)
        head = self.weights.get("lm_head.weight", self.model.lm_head.weight.detach())
        ids = list(range(128))
        if "d2t" in self.weights:
            ids = (self.weights["d2t"] + torch.arange(len(head))).tolist()
        total = torch.zeros(())
        for place in range(len(tokens) - 2):
            feature, cache = features[place], firsts[:place]
            for step in range(NUM_STEPS):
                target = place + step + 2
                if target >= len(tokens):
                    break
                if step == 0:
                    feature, cache = given[place], firsts[: place + 1]
                else:
                    feature, pair = self.position(feature, tokens[target - 1], place + step, cache)
                    cache = [*cache, pair]
                if weight[place + 1] and weight[target] and tokens[target] in ids:
                    learned: Tensor = torch.tensor(ids.index(tokens[target]))
                    if distribution:
                        learned = logits[target - 1][ids].softmax(-1)
                    nll = functional.cross_entropy(head @ self.norm(feature, "norm"), learned)
                    total = total + DECAY ** (step + 1) * weight[target] * nll
        return total


def plain_gradients(model_dir: Path, network: Eagle3Network, sequences: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Gradients of the loss by published name, sequence by sequence and position by position."""
    own = {
        name: each.clone().requires_grad_(each.is_floating_point())
        for name, each in stored_tensors(network.layer).items()
    }
    plain = Plain(own, hf_model(model_dir))
    weights = [given.get("loss_weight", [1] * len(given["input_ids"])) for given in sequences]
    total = sum(sum(each[1:]) for each in weights)
    for given, weight in zip(sequences, weights, strict=True):
        part = plain.loss(given["input_ids"], weight, network.distribution) / total
        if part.requires_grad:
            part.backward()  # type: ignore[no-untyped-call]
    return {name: each.grad for name, each in own.items() if each.grad is not None}


def packed_gradients(
    network: Eagle3Network, capacity: int, sequences: list[dict[str, Any]], **packing: Any
) -> dict[str, Tensor]:
    """Gradients of one optimiser step over packs, by published name."""
    stream = PackStream(sequences, capacity, step=f"sequences:{len(sequences)}", **packing)
    config = TrainerConfig(steps=1, warmup_steps=0, max_grad_norm=1e9, weight_decay=0.0)
    next(HeadsTrainer(network, config, stream, decay=DECAY).run())
    with torch.no_grad():
        for parameter in network.trained.values():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return {name: each for name, each in stored_tensors(network.layer).items() if each.is_floating_point()}


def largest_difference(tmp_path: Path, capacity: int = 64, **settings: Any) -> float:
    """Largest difference between gradients of packs and of the plain loop, relative to the largest of its tensor."""
    model_dir = tiny_hf_model(tmp_path, "llama")
    model = base_model(model_dir)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    network = filled_layer(model, **settings)
    expected = plain_gradients(model_dir, network, SEQUENCES)
    found = packed_gradients(network, capacity, SEQUENCES)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found.keys() == expected.keys()
    assert all(float(each.abs().max()) > 0 for each in expected.values())
    return difference(found, expected)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference between two sets of gradients, relative to the largest of its tensor."""
    return max(float((found[name] - each).abs().max() / each.abs().max()) for name, each in expected.items())


CASES: dict[str, dict[str, Any]] = {
    "reduced vocabulary": {},
    "the model's output head": {"own_output_head": False, "target_ids": None},
    "all tokens": {"target_ids": None},
    "probabilities": {"distribution": True},
}


@pytest.mark.parametrize("name", one_in(3, CASES))
@pytest.mark.parametrize("capacity", [24, pytest.param(64, marks=pytest.mark.nightly)])
def test_gradients_are_those_of_drafting_row_by_row(name: str, capacity: int, tmp_path: Path) -> None:
    assert largest_difference(tmp_path, capacity, **CASES[name]) <= 3e-6


def packed_against_alone(tmp_path: Path, family: str, distribution: bool = False) -> float:
    """Difference between gradients of packs of several sequences and of packs of one sequence each."""
    model_dir = tiny_hf_model(tmp_path, family)
    found = [
        packed_gradients(filled_layer(base_model(model_dir), distribution=distribution), 64, SEQUENCES, **packing)
        for packing in ({"max_sequences": 1}, {})
    ]
    return difference(found[1], found[0])


@pytest.mark.parametrize("family", one_in(3, ("gpt2", "llama", "qwen2", "mistral", "qwen3", "gemma2", "cohere2")))
@pytest.mark.parametrize("distribution", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_packs_give_the_gradient_of_sequences_alone(family: str, distribution: bool, tmp_path: Path) -> None:
    assert packed_against_alone(tmp_path, family, distribution) <= 3e-6


def test_positions_that_run_on_change_the_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with learned positions shows it. Rotated positions are relative, so an offset changes nothing."""
    positions_run_on(monkeypatch)
    assert packed_against_alone(tmp_path, "gpt2") > 1e-3


def test_a_sequence_never_changes_the_gradient_of_another(tmp_path: Path) -> None:
    """Other tokens in a sequence without targets change no bit of the gradient."""
    model_dir = tiny_hf_model(tmp_path, "llama")
    rng, found = random.Random(0), []
    learned = [{"input_ids": [rng.randrange(128) for _ in range(length)]} for length in (9, 14)]
    for seed in range(2):
        rng = random.Random(seed)
        others: list[dict[str, Any]] = [
            {"input_ids": [rng.randrange(128) for _ in range(n)], "loss_weight": [0.0] * n} for n in (7, 11, 5)
        ]
        for other in others:  # one target, behind a token that is none, has no loss; without any, the packer drops it
            other["loss_weight"][-1] = 1.0
        mixed = [others[0], learned[0], others[1], learned[1], others[2]]
        found.append(packed_gradients(filled_layer(base_model(model_dir)), 64, mixed))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# -- the tests can fail ------------------------------------------------------------------------------------------------


def taps_in_another_order(patch: pytest.MonkeyPatch) -> None:
    right = hidden_at

    def wrong(model: Any, taps: Any, *given: Any) -> Any:
        return right(model, sorted(taps), *given)

    patch.setattr(eagle3, "hidden_at", wrong)


def targets_are_one_short(patch: pytest.MonkeyPatch) -> None:
    right = training.ahead
    patch.setattr(training, "ahead", lambda batch, distance: right(batch, distance - 1))


def targets_of_other_sequences_count(patch: pytest.MonkeyPatch) -> None:
    right = training.ahead

    def wrong(batch: Any, distance: int) -> Any:
        return right({**batch, "segment_ids": torch.zeros_like(batch["segment_ids"])}, distance)

    patch.setattr(training, "ahead", wrong)


def tokens_are_not_shifted(patch: pytest.MonkeyPatch) -> None:
    right = Eagle3Network._later
    patch.setattr(Eagle3Network, "_later", lambda self, batch, distance: right(self, batch, distance - 1))


def rows_are_token_ids(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Eagle3Network, "head_labels", lambda self, labels: labels.clamp(max=len(KNOWN) - 1))


def rows_are_those_of_the_next_token(patch: pytest.MonkeyPatch) -> None:
    right = Eagle3Network.head_labels

    def wrong(self: Eagle3Network, labels: Tensor) -> Tensor:
        rows = right(self, labels)
        return ((rows + 1) % len(KNOWN)).where(rows != -100, rows)

    patch.setattr(Eagle3Network, "head_labels", wrong)


def sequences_of_a_pack_are_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unrolled, "VarlenContext", lambda offsets: VarlenContext([0, offsets[-1]]))


def later_steps_see_other_sequences(patch: pytest.MonkeyPatch) -> None:
    right = unrolled.unrolled_attention

    def wrong(q: Tensor, first: Any, later: Any, cu_seqlens: Any, scale: float) -> Tensor:
        return right(q, first, later, [0, cu_seqlens[-1]], scale)

    patch.setattr(unrolled, "unrolled_attention", wrong)


def the_model_sees_other_sequences(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eagle3, "VarlenContext", lambda offsets: VarlenContext([0, offsets[-1]]))


def positions_run_on(patch: pytest.MonkeyPatch) -> None:
    right = Eagle3Network.states

    def wrong(self: Eagle3Network, batch: Any, pack: Any) -> Any:
        return right(self, {**batch, "position_ids": torch.arange(pack.num_tokens)[None]}, pack)

    patch.setattr(Eagle3Network, "states", wrong)


def positions_of_later_steps_stay(patch: pytest.MonkeyPatch) -> None:
    right, seen = Eagle3.forward, list[Tensor]()

    def wrong(self: Any, embedded: Tensor, features: Tensor, positions: Tensor, ctx: Any) -> Any:
        if ctx._first is None:
            seen[:] = [positions]
        return right(self, embedded, features, seen[0], ctx)

    patch.setattr(Eagle3, "forward", wrong)


def later_steps_read_the_models_features(patch: pytest.MonkeyPatch) -> None:
    right, seen = Eagle3.forward, list[Tensor]()

    def wrong(self: Any, embedded: Tensor, features: Tensor, positions: Tensor, ctx: Any) -> Any:
        if ctx._first is None:
            seen[:] = [features]
        return right(self, embedded, seen[0], positions, ctx)

    patch.setattr(Eagle3, "forward", wrong)


def later_steps_read_the_normalised_result(patch: pytest.MonkeyPatch) -> None:
    right = Eagle3.forward
    patch.setattr(Eagle3, "forward", lambda *given: (right(*given)[1],) * 2)


def later_steps_forget_their_own_keys(patch: pytest.MonkeyPatch) -> None:
    right = unrolled.unrolled_attention

    def wrong(q: Tensor, first: Any, later: Any, cu_seqlens: Any, scale: float) -> Tensor:
        return right(q, first, later[-1:], cu_seqlens, scale)

    patch.setattr(unrolled, "unrolled_attention", wrong)


PLANTED = (
    taps_in_another_order,
    targets_are_one_short,
    later_steps_see_other_sequences,
    rows_are_those_of_the_next_token,
    later_steps_read_the_models_features,
    targets_of_other_sequences_count,
    tokens_are_not_shifted,
    rows_are_token_ids,
    sequences_of_a_pack_are_one,
    the_model_sees_other_sequences,
    positions_of_later_steps_stay,
    later_steps_read_the_normalised_result,
    later_steps_forget_their_own_keys,
)


@pytest.mark.planted("test_packs_give_the_gradient_of_sequences_alone")
@pytest.mark.parametrize("plant", one_in(5, PLANTED))
def test_a_planted_bug_changes_the_gradient(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert largest_difference(tmp_path) > 1e-3


# -- settings, and a run -----------------------------------------------------------------------------------------------


def settings(tmp_path: Path, **heads: Any) -> dict[str, Any]:
    raw = tiny_run.settings(tmp_path)
    raw["model"] = {"path": str(tmp_path / "llama-0"), "dtype": "float32"}
    raw["training"]["dropout"] = 0.0
    raw["heads"] = {"method": "eagle3", "num_steps": 2, "draft_vocab_size": 50, **heads}
    return raw


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tiny_hf_model(tmp_path, "llama", num_hidden_layers=2)
    tiny_run.write_records(tmp_path / "data.jsonl")
    return tmp_path


PUBLISHED = {
    "fc.weight": [64, 2 * 64],
    "midlayer.hidden_norm.weight": [64],
    "midlayer.input_layernorm.weight": [64],
    "midlayer.post_attention_layernorm.weight": [64],
    "midlayer.self_attn.q_proj.weight": [64, 128],
    "midlayer.self_attn.k_proj.weight": [32, 128],
    "midlayer.self_attn.v_proj.weight": [32, 128],
    "midlayer.self_attn.o_proj.weight": [64, 64],
    "midlayer.mlp.gate_proj.weight": [96, 64],
    "midlayer.mlp.up_proj.weight": [96, 64],
    "midlayer.mlp.down_proj.weight": [64, 96],
    "norm.weight": [64],
    "lm_head.weight": [50, 64],
    "d2t": [50],
    "t2d": [128],
}
"""Names and shapes in files of EAGLE-3's authors, for the sizes of these tests and two taps."""


def test_a_run_goes_on_bit_for_bit(run_dir: Path) -> None:
    raw = settings(run_dir)
    whole = train(TrainConfig.from_mapping(raw)).directory

    def stop(result: Any, trainer: Trainer) -> None:
        trainer.stop_requested = result.step == 5

    raw["output"] = str(run_dir / "again")
    assert not train(TrainConfig.from_mapping(raw), on_step=stop).finished
    again = train(TrainConfig.from_mapping({**raw, "heads": {**raw["heads"], "method": "eagle"}}), on_step=stop)
    assert again.finished and again.steps == tiny_run.STEPS
    for name in ("model.safetensors", "config.json", "training/state.safetensors"):
        assert (whole / name).read_bytes() == (again.directory / name).read_bytes()
    config = json.loads((whole / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 50
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert config["norm_before_residual"] is False, "readers have different defaults"
    assert {name: list(each.shape) for name, each in load_file(whole / "model.safetensors").items()} == PUBLISHED
    layer = load_eagle3(whole, read_config(run_dir / "llama-0"), torch.float32, NATIVE)
    assert layer.target_ids is not None and len(layer.target_ids) == 50
    for change, message in (
        ({"draft_vocab_size": 40}, r"heads\.draft_vocab_size 50, and here it is 40"),
        ({"taps": [0]}, r"heads\.taps \[0, 1\], and here it is \[0\]"),
        ({"method": "medusa", "num_steps": 4, "draft_vocab_size": None}, r"heads\.num_heads None, and here it is 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(TrainConfig.from_mapping(settings(run_dir, **change)))


@pytest.mark.nightly
@pytest.mark.parametrize("targets", ["tokens", "distribution"])
def test_a_run_that_is_killed_goes_on_bit_for_bit(targets: str, run_dir: Path) -> None:
    whole = train(TrainConfig.from_mapping(settings(run_dir, targets=targets))).directory
    raw = settings(run_dir, targets=targets) | {"output": str(run_dir / "killed")}
    (run_dir / "settings.json").write_text(json.dumps(raw))
    for death in (("written", "2"), ("step", "5"), ("flushed", "3"), ("never", "0")):
        command = [sys.executable, "-m", "tests.train.tiny_run", str(run_dir), *death]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == (0 if death[0] == "never" else -signal.SIGKILL), done.stderr
    for name in ("model.safetensors", "config.json", "training/state.safetensors"):
        assert (whole / name).read_bytes() == (run_dir / "killed" / whole.name / name).read_bytes()


def test_impossible_settings_are_refused(run_dir: Path) -> None:
    for change, message in (
        ({"num_heads": 3}, "num_heads is not a setting of method eagle3"),
        ({"method": "medusa"}, "num_steps, draft_vocab_size is not a setting of method medusa"),
        ({"num_steps": 0}, "num_steps must be 1 to 64, got 0"),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be at least 1, got 0"),
        ({"targets": "logits"}, "targets must be one of tokens, distribution"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainConfig.from_mapping(settings(run_dir, **change))
    impossible: list[tuple[dict[str, Any], str]] = [
        ({"taps": [0, 2]}, r"different layers of the model, which are 0 to 1, got \[0, 2\]"),
        ({"taps": [0, 0]}, "different layers of the model"),
        ({"taps": [1, 0]}, "begins with 1"),
        ({"draft_vocab_size": 129}, "at most the model's 128 tokens, got 129"),
    ]
    for change, message in impossible:
        with pytest.raises(ConfigError, match=message):
            prepare(TrainConfig.from_mapping(settings(run_dir, **change)))
    raw = settings(run_dir)
    raw["data"] |= {"access": "stream", "shuffle": False}
    with pytest.raises(ConfigError, match="needs files and access: random"):
        TrainConfig.from_mapping(raw)


def test_default_taps_follow_from_the_number_of_layers() -> None:
    assert [default_taps(n) for n in (1, 2, 3, 4, 7, 8, 30)] == [
        *((0,), (0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 6), (2, 4, 5), (2, 15, 27)),
    ]
    for layers in range(1, 40):
        check_taps(default_taps(layers), layers)


def test_the_most_frequent_targets_are_kept() -> None:
    examples: list[dict[str, Any]] = [
        {"input_ids": [9, 5, 5, 7, 2]},
        {"input_ids": [8, 8, 8, 8, 7, 5], "loss_weight": [0, 0, 0, 0, 1, 0]},
    ]
    assert frequent_tokens(examples, 10, 2).tolist() == [5, 7]
    assert frequent_tokens(examples, 10, 5).tolist() == [0, 1, 2, 5, 7]


# -- from the model's own answers to drafts ----------------------------------------------------------------------------


def accepted_length(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[list[list[int]], float]:
    """(answers, tokens per step of a row with drafts), with drafts in every step."""
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and isinstance(drafts.speculator._proposer, Eagle3Drafter)  # type: ignore[attr-defined]
    drafts.speculator._seconds = lambda step: 1.0  # type: ignore[attr-defined]
    drafts.speculator._proposer._times.note = lambda *given: None  # type: ignore[attr-defined,method-assign]
    answers = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]
    assert drafts.num_drafts > 20
    return answers, 1 + drafts.num_accepted / drafts.num_verified


@pytest.mark.full
@needs_kernels
@pytest.mark.parametrize("draft_vocab_size", [None, pytest.param(100, marks=pytest.mark.nightly)])
def test_a_layer_learns_what_the_model_says_and_drafts_it(draft_vocab_size: int | None, tmp_path: Path) -> None:
    """Commands of the documentation: generate, train, serve."""
    model_dir = tiny_hf_model(tmp_path, "llama")
    prompts = write_answers(model_dir, tmp_path)
    raw = {
        "model": {"path": str(model_dir), "dtype": "float32"},
        "data": {"files": [str(tmp_path / "answers.jsonl")]},
        "packing": {"capacity": 256, "step": "packs:2"},
        "training": {"steps": 60, "warmup_steps": 5, "learning_rate": 0.01, "weight_decay": 0.0},
        "checkpoints": {"every": 1, "keep": 100},
        "heads": {"method": "eagle3", "num_steps": 3, "draft_vocab_size": draft_vocab_size},
        "output": str(tmp_path / "out"),
        "threads": 1,
    }
    losses: list[float] = []
    trained = train(TrainConfig.from_mapping(raw), on_step=lambda result, _: losses.append(result.loss)).directory
    assert losses[-1] < 0.5 * losses[0]
    tensors = load_file(trained / "model.safetensors")
    assert ("d2t" in tensors) == ("lm_head.weight" in tensors) == (draft_vocab_size is not None)
    shape: dict[str, Any] = {"num_kv_blocks": 60, "skip_tokenizer_init": True, "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    plain = [list(each.outputs[0].token_ids) for each in LLM(str(model_dir), **shape).generate(prompts[:4], params)]
    lengths = []
    for layer in (tmp_path / "out" / "step-00000001", trained):
        llm = LLM(str(model_dir), **shape, speculative_config={"method": "eagle3", "model": str(layer)})
        answers, length = accepted_length(llm, prompts[:4], params)
        assert answers == plain
        lengths.append(length)
    assert lengths[1] > lengths[0] + 0.5, lengths
