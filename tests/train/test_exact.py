"""The forward pass of training has the engine's bits: those of rollouts that were generated token by token, in company.
Its gradient is that of the plain forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chairlift.base.lora_request import LoRARequest
from chairlift.base.sampling_params import SamplingParams
from chairlift.errors import ConfigError
from chairlift.kernels import experts
from chairlift.kernels.cpu.library import supported_isas
from chairlift.kernels.experts import route
from chairlift.kernels.weights import PLAIN
from chairlift.llm import LLM
from chairlift.lora.trainable import TrainableAdapter
from chairlift.lora.trainable_set import TrainableAdapters
from chairlift.models.causal_lm import CausalLM
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.hf_config import parse_config
from chairlift.models.layers.experts import MixtureOfExperts
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from chairlift_train import engine_pass, exact
from chairlift_train.async_loop import Rollout
from chairlift_train.collate import PackCollator
from chairlift_train.config import TrainConfig
from chairlift_train.exact import ExactNetwork
from chairlift_train.layout import Pack
from chairlift_train.networks import NativeNetwork
from chairlift_train.rollout import RolloutGenerator
from chairlift_train.run import train
from chairlift_train.stream import PackStream
from chairlift_train.trainer import Trainer, TrainerConfig, TrainingStepResult
from tests.models import tiny
from tests.native import needs_kernels
from tests.train import tiny_run
from tests.train.test_native_families import config_of, model_of, whole_error
from tests.train.test_trainer import examples, gradients, one_step

pytestmark = needs_kernels
pytest.importorskip("transformers")

PROMPTS = ([5, 9, 2, 7], [3], [8, 8, 1, 40, 41, 42, 43], list(range(20, 60)))
FAMILIES = ("llama", "gemma2", "qwen3_moe", "qwen3_next", "gpt2")
"""One tower of each kind: rotated, with caps and windows, of experts, with recurrent states, with learned positions."""
MORE = [name for name in (*tiny.MORE_FAMILIES, *tiny.EXPERT_FAMILIES, *tiny.RECURRENT_FAMILIES) if name not in FAMILIES]


def saved(family: str, folder: Path) -> Path:
    """Directory of a tiny model of the family, as transformers writes it."""
    return tiny.tiny_hf_model(folder, family)


def policy_of(folder: Path) -> CausalLM:
    model = load_model(folder, read_config(folder), torch.float32, weight_format=PLAIN)
    return model.train().requires_grad_(True)


def rollouts(llm: LLM, **more: Any) -> list[dict[str, Any]]:
    """Answers that were generated together, as items for a stream."""
    params = [
        SamplingParams(temperature=1.0, max_tokens=12 + 5 * i, ignore_eos=True, logprobs=0, seed=i)
        for i in range(len(PROMPTS))
    ]
    items = []
    for output in llm.generate([list(prompt) for prompt in PROMPTS], params, **more):
        answer = output.outputs[0]
        assert answer.logprobs is not None
        prompt = len(output.prompt_token_ids)
        found = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        items.append(
            {
                "input_ids": [*output.prompt_token_ids, *answer.token_ids],
                "loss_weight": [0.0] * prompt + [1.0] * len(found),
                "logprobs": [0.0] * prompt + found,
            }
        )
    return items


def packs_of(items: Sequence[dict[str, Any]], capacity: int = 90) -> Sequence[Pack]:
    (packs,) = PackStream(items, capacity=capacity, step=f"sequences:{len(items)}").steps()
    return packs


def differences(network: ExactNetwork, items: Sequence[dict[str, Any]]) -> list[float]:
    """|log-probability of the trainer - of the engine| of every generated token."""
    found: list[float] = []
    for pack in packs_of(items):
        batch = PackCollator()(pack)
        places = torch.from_numpy(pack.weights > 0).nonzero()[:, 0]
        before = torch.tensor([value for meta in pack.meta for value in meta["logprobs"]])[places]
        with torch.no_grad():
            now = network.logprobs(batch, pack, places - 1, batch["input_ids"][0][places])
        found += (now - before).abs().tolist()
    assert len(found) == sum(12 + 5 * i for i in range(len(PROMPTS)))
    return found


EACH = [(family, dtype) for family in (*FAMILIES, *MORE) for dtype in ("float32", "bfloat16")]
FIRST = [*((family, "float32") for family in FAMILIES), ("qwen3_moe", "bfloat16")]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*FIRST, *(pytest.param(*each, marks=pytest.mark.nightly) for each in EACH if each not in FIRST)],
)
def test_log_probabilities_of_rollouts_are_the_trainers_bit_for_bit(family: str, dtype: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    llm = LLM(folder, dtype=dtype, num_kv_blocks=64, skip_tokenizer_init=True)
    network = ExactNetwork(policy_of(folder), dtype=getattr(torch, dtype))
    assert max(differences(network, rollouts(llm))) == 0.0
    assert max(differences(network, rollouts(llm)[::-1])) == 0.0  # in other company


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_a_pack_in_several_steps_has_the_same_bits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(family, tmp_path)
    items = rollouts(LLM(folder, dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True))
    monkeypatch.setattr(engine_pass, "ROUTED_TOKENS", 21)  # not a multiple of a block
    assert max(differences(ExactNetwork(policy_of(folder)), items)) == 0.0


DRAWN = [{"temperature": 0.6}, {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.01}]


@pytest.mark.parametrize(
    ("given", "dtype", "kernels"),
    [
        (DRAWN[0], "float32", "auto"),
        (DRAWN[1], "bfloat16", "auto"),
        *(pytest.param(DRAWN[i], dtype, "auto", marks=pytest.mark.nightly) for i, dtype in ((1, "float32"),)),
    ],
)
def test_log_probabilities_of_the_sampled_distribution_are_the_trainers(
    given: dict[str, Any], dtype: str, kernels: str, tmp_path: Path
) -> None:
    folder = saved("llama", tmp_path)
    settings = {"num_kv_blocks": 64, "skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs"}
    llm = LLM(folder, dtype=dtype, kernels=kernels, **settings)
    generator = RolloutGenerator(llm, SamplingParams(max_tokens=20, ignore_eos=True, seed=3, **given))
    for ticket, prompt in enumerate(PROMPTS):
        generator.submit(ticket, prompt)
    found: list[Rollout] = []
    while len(found) < len(PROMPTS):
        found += generator.poll(wait=True)
    network = ExactNetwork(policy_of(folder), dtype=getattr(torch, dtype))
    cuts = "top_k" in given
    assert all(bool(rollout.kept) is cuts for rollout in found)
    for pack in packs_of([rollout.sequence() for rollout in found]):
        batch = PackCollator()(pack)
        places = torch.from_numpy(pack.weights > 0).nonzero()[:, 0]
        before = torch.tensor([value for meta in pack.meta for value in meta["logprobs"]])[places]
        every = [ids for meta in pack.meta for ids in meta["kept"]] if cuts else None
        kept = None if every is None else [every[place] for place in places]
        wanted = batch, pack, places - 1, batch["input_ids"][0][places]
        how = {"temperature": given["temperature"], "kept": kept}
        now = network.sampled_logprobs(*wanted, **how)
        assert torch.equal(now, before)
        assert now.sum().backward() is None and network.model.lm_head.weight.grad is not None
        if cuts:
            assert kept is not None and {len(ids) for ids in kept} <= set(range(1, 8)) and min(map(len, kept)) < 7
            assert not torch.equal(network.sampled_logprobs(*wanted, temperature=given["temperature"]), before)
        assert not torch.equal(network.logprobs(*wanted), before)


def test_experts_of_the_backward_pass_are_those_of_the_forward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts have equal scores, and the plain pass decides ties in another way than the engine."""
    policy = policy_of(saved("qwen3_moe", tmp_path))
    layers = [each for each in policy.modules() if isinstance(each, MixtureOfExperts)]
    with torch.no_grad():
        for layer in layers:
            layer.gate.weight[0] = layer.gate.weight[1]
    seen: list[Tensor] = []

    def tilted(logits: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        weights, chosen = route(logits + 1e-6 * torch.arange(logits.shape[1]), *given)
        seen.append(chosen)
        return weights, chosen

    monkeypatch.setattr(experts, "route", tilted)
    network = ExactNetwork(policy)
    (pack,) = packs_of(examples(3), 200)
    batch = PackCollator()(pack)
    rows = torch.arange(len(batch["input_ids"][0]) - 1)

    def backward() -> bool:
        """Whether all layers chose the engine's experts."""
        seen.clear()
        network.logprobs(batch, pack, rows, batch["input_ids"][0][rows + 1]).sum().backward()
        computed = [torch.from_numpy(each).long() for each in network._engine.runner.chosen_experts]
        assert len(seen) == len(layers) == len(computed)
        return all(map(torch.equal, seen[::-1], computed))

    assert backward()
    assert all(layer.forced is None for layer in layers)
    monkeypatch.setattr(exact, "forcing", lambda *_: None)
    assert not backward()


@pytest.mark.parametrize("change", ["in place", "fused optimiser"])
def test_new_weights_are_followed_by_both(change: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    llm = LLM(folder, dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True)
    policy = policy_of(folder)
    network = ExactNetwork(policy)
    old = rollouts(llm)
    assert max(differences(network, old)) == 0.0
    if change == "in place":
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.01)
    else:
        for parameter in policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW(policy.parameters(), 1e-3, fused=True).step()
    assert max(differences(network, old)) > 0.0
    llm.update_weights(hf_state_dict(policy), 1)
    assert max(differences(network, rollouts(llm))) == 0.0


@pytest.mark.planted("test_log_probabilities_of_rollouts_are_the_trainers_bit_for_bit")
@pytest.mark.parametrize("fault", ["last bit of one weight", "one layout", "another dtype", "torch"])
def test_a_fault_of_the_forward_pass_would_be_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("llama", tmp_path)
    items = rollouts(LLM(folder, dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True))
    policy = policy_of(folder)
    if fault == "last bit of one weight":
        with torch.no_grad():
            bits = policy.model.layers[0].self_attn.qkv_proj.weight.view(torch.int32)
            bits[0, :8] ^= 1
    network = ExactNetwork(policy, dtype=torch.bfloat16 if fault == "another dtype" else torch.float32)
    if fault == "one layout":
        places = engine_pass._Places
        monkeypatch.setattr(engine_pass, "_Places", lambda runner, starts: places(runner, (0, starts[-1])))
    if fault == "torch":

        def plain(self: ExactNetwork, batch: Any, pack: Pack, rows: Tensor, targets: Tensor) -> Tensor:
            logits = NativeNetwork.logits(self, batch, pack, rows)
            return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

        monkeypatch.setattr(ExactNetwork, "logprobs", plain)
    assert max(differences(network, items)) > 0.0


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)])
def test_a_step_learns_what_the_plain_forward_pass_teaches(family: str) -> None:
    config = parse_config(config_of(family))
    data = examples(9)
    plain, expected = one_step(model_of(config), data, 60)
    wide, _ = one_step(model_of(config), data, 60, double=True)
    rounding = whole_error(gradients(plain.model), gradients(wide.model))  # of float32, in the plain pass itself
    trainer, found = one_step(model_of(config), data, 60, forward="exact")
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert whole_error(gradients(trainer.model), gradients(plain.model)) < max(1e-5, 3 * rounding)


def test_gradients_in_16_bits_are_near_those_in_32(tmp_path: Path) -> None:
    data = examples(9)
    config = parse_config(config_of("llama"))
    plain, _ = one_step(model_of(config), data, 60)
    trainer, _ = one_step(model_of(config), data, 60, forward="exact", dtype="bfloat16")
    assert 0 < whole_error(gradients(trainer.model), gradients(plain.model)) < 0.1


def adapters_of(model: CausalLM, ranks: dict[str, int], *, attached: bool, **more: Any) -> dict[str, TrainableAdapter]:
    made = {}
    for name, rank in ranks.items():
        made[name] = TrainableAdapter(model, r=rank, alpha=2 * rank, attached=attached, **more)
        with torch.no_grad():
            for key, matrix in made[name].parameters.items():
                if "lora_B" in key:
                    matrix.normal_(0, 0.05)
    return made


WITH_HEAD = ("all-linear", "lm_head")


@pytest.mark.parametrize(
    ("family", "dtype", "targets"),
    [
        ("qwen2", "float32", ("all-linear",)),
        ("qwen2", "bfloat16", ("all-linear",)),
        ("qwen2", "float32", WITH_HEAD),
        ("gemma2", "bfloat16", WITH_HEAD),  # tied, and its logits are capped
    ],
)
def test_an_adapter_is_computed_as_the_engine_serves_it(
    family: str, dtype: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    folder = saved(family, tmp_path / "model")
    policy = policy_of(folder).requires_grad_(False)
    torch.manual_seed(0)
    adapter = adapters_of(policy, {"one": 4}, attached=True, targets=targets)["one"]
    network = ExactNetwork(policy, adapter, dtype=getattr(torch, dtype))
    llm = LLM(folder, dtype=dtype, num_kv_blocks=64, skip_tokenizer_init=True, enable_lora=True)
    for version in (1, 2):
        adapter.write(tmp_path / f"adapter-{version}")
        request = LoRARequest(f"one-{version}", version, str(tmp_path / f"adapter-{version}"))
        items = rollouts(llm, lora_request=request)
        assert max(differences(network, items)) == 0.0
        with torch.no_grad():
            for matrix in adapter.parameters.values():
                matrix.mul_(1.1)
        assert max(differences(network, items)) > 0.0


@pytest.mark.planted("test_an_adapter_is_computed_as_the_engine_serves_it")
def test_a_head_without_its_adapter_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExactNetwork, "_adapters_at", lambda self, pack, rows: None)
    with pytest.raises(AssertionError):
        test_an_adapter_is_computed_as_the_engine_serves_it("qwen2", "float32", WITH_HEAD, tmp_path)


@pytest.mark.parametrize("targets", [("all-linear",), WITH_HEAD])
def test_several_adapters_learn_what_they_learn_without_the_engine(targets: tuple[str, ...], tmp_path: Path) -> None:
    folder = saved("qwen2", tmp_path)
    items = [{**item, "adapter": name} for item, name in zip(examples(8), "abababba", strict=True)]
    found = []
    for forward in ("torch", "exact"):
        policy = policy_of(folder).requires_grad_(False)
        torch.manual_seed(0)
        adapters = TrainableAdapters(adapters_of(policy, {"a": 2, "b": 5}, attached=False, targets=targets))
        result = one_step_of(policy, adapters, items, forward)
        found.append((result, {name: p.grad.clone() for name, p in adapters.parameters.items() if p.grad is not None}))
    (plain, expected), (made, given) = found
    assert made.loss == pytest.approx(plain.loss, rel=1e-5)
    assert set(made.adapters) == {"a", "b"}
    assert whole_error(given, expected) < 1e-5


def one_step_of(policy: CausalLM, adapters: TrainableAdapters, items: list[dict[str, Any]], forward: str) -> Any:
    config = TrainerConfig(steps=1, warmup_steps=0, max_grad_norm=1e9, forward=forward)  # type: ignore[arg-type]
    stream = PackStream(items, 60, step=f"sequences:{len(items)}")
    return next(Trainer(policy, config, stream, adapter=adapters).run())


@pytest.mark.parametrize("isa", supported_isas())
def test_each_instruction_set_equals_the_engine_with_it(isa: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    items = rollouts(LLM(folder, dtype="float32", kernels=isa, num_kv_blocks=64, skip_tokenizer_init=True))
    assert max(differences(ExactNetwork(policy_of(folder), kernels=isa), items)) == 0.0


def test_a_run_with_an_exact_forward_pass_is_resumed_with_equal_bits(tmp_path: Path) -> None:
    tiny_run.write_records(tmp_path / "data.jsonl")
    raw = tiny_run.settings(tmp_path, steps=4, forward="exact", dropout=0.0)
    raw["model"] = {"config": config_of("llama"), "dtype": "float32"}

    def run_to(step: int, name: str) -> bytes:
        def stop(result: TrainingStepResult, trainer: Trainer) -> None:
            trainer.stop_requested = result.step == step

        outcome = train(TrainConfig.from_mapping({**raw, "output": str(tmp_path / name)}), on_step=stop)
        return (outcome.directory / "model.safetensors").read_bytes()

    halfway = run_to(2, "in parts")
    assert run_to(4, "in parts") == run_to(4, "whole") != halfway


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"dropout": 0.1}, "dropout"), ({"balance_loss": 0.01}, "balance_loss"), ({"sharding": "fsdp"}, "sharding")],
)
def test_settings_that_the_engine_cannot_follow_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"exact does not go with {words}"):
        one_step(model_of(parse_config(config_of("llama"))), examples(3), forward="exact", **changes)


def test_positions_that_do_not_begin_at_0_are_refused() -> None:
    network = ExactNetwork(model_of(parse_config(config_of("llama"))))
    (pack,) = packs_of(examples(2), 200)
    batch = PackCollator()(pack)
    batch["position_ids"] = batch["position_ids"] + 1
    with pytest.raises(ConfigError, match="begin at 0"):
        network.logits(batch, pack, torch.from_numpy(np.arange(3)))
