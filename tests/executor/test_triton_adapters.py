"""Adapters on the Triton kernels: the CPU's tokens, in any mixture, after any capture. Interpreted where there is no
GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton import conftest  # before anything that imports the kernels, which it makes interpreted ones

# isort: split
from chairlift import LLM, LoRARequest, RequestOutput, SamplingParams
from chairlift.config import EngineConfig
from chairlift.errors import ModelLoadError
from chairlift.executor.backends.native.backend import NativeBackend
from chairlift.executor.backends.triton.backend import TritonBackend
from chairlift.kernels.low_rank_pool import LowRankPool
from chairlift.kernels.triton.decode_state import DecodeState
from chairlift.kernels.triton.program import TritonProgram
from chairlift.lora import device_bank, kinds
from chairlift.lora.device_bank import DeviceAdapters
from chairlift.lora.effects import change_of
from chairlift.lora.kinds import EMBEDDING, EXPERTS, LOW_RANK, VECTORS, WHOLE
from chairlift.lora.reader import read_adapter
from chairlift.lora.sites import sites_of
from chairlift.models.causal_lm import CausalLM
from chairlift.models.model_files import read_config
from tests.executor.test_triton_runner import OverwritingGraphs, runner_of
from tests.lora.adapters import random_adapter
from tests.models.test_families import load as load_model
from tests.models.tiny import tiny_hf_model

if conftest.MISSING:
    pytest.skip(conftest.MISSING, allow_module_level=True)
device, interpreter = conftest.device, conftest.interpreter

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
SETTINGS: list[dict[str, Any]] = [
    {"r": 3},
    {"r": 18, "use_dora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    {"r": 5, "target_modules": ["k_proj", "up_proj", "lm_head"], "lora_bias": True},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return tiny_hf_model(folder, "llama", num_hidden_layers=1, intermediate_size=32, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Eight: one of each kind, and five small ones."""
    folder, found = tmp_path_factory.mktemp("adapters"), []
    for n in range(8):
        settings = SETTINGS[n] if n < len(SETTINGS) else {"r": 2 + n, "target_modules": ["v_proj", "up_proj"]}
        found.append(LoRARequest(f"a{n}", n + 1, random_adapter(model_dir, folder / f"a{n}", seed=n, **settings)))
    return found


def load(model_dir: Path, device: object, kernels: str = "triton", **settings: Any) -> LLM:
    sizes = {"max_num_seqs": 4, "num_kv_blocks": 40, "block_size": 16, "max_model_len": 32, "dtype": "float32"}
    lora = {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 8, "max_lora_rank": 18}
    how = {**sizes, **lora, **settings}
    return LLM(model_dir, skip_tokenizer_init=True, kernels=kernels, device=str(device), **how)


def poisoned(llm: LLM) -> LLM:
    """The engine, with NaN in every slot of its pool, and words that are no words."""
    pool = runner_of(llm)._pool.pool
    pool.numbers.fill_(float("nan"))
    pool.words.fill_(1 << 20)
    return llm


def outputs(
    llm: LLM, asked: Sequence[LoRARequest | None], prompts: Sequence[list[int]] = PROMPTS, most: int = 3
) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, logprobs=0)
    given = [prompts[n % len(prompts)] for n in range(len(asked))]
    return llm.generate(given, params, lora_request=list(asked))


def answers(llm: LLM, asked: Sequence[LoRARequest | None], **how: Any) -> list[list[tuple[int, float]]]:
    """(token, log-probability) of each answer."""
    found = []
    for output in outputs(llm, asked, **how):
        assert output.error is None, output.error
        answer = output.outputs[0]
        assert answer.logprobs is not None
        rows = zip(answer.token_ids, answer.logprobs, strict=True)
        found.append([(token, row[token].logprob) for token, row in rows])
    return found


def close(mine: list[list[tuple[int, float]]], others: list[list[tuple[int, float]]]) -> None:
    for one, other in zip(mine, others, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        np.testing.assert_allclose([score for _, score in one], [score for _, score in other], atol=1e-4)


@pytest.fixture(scope="module")
def truth(model_dir: Path, adapters: list[LoRARequest]) -> Callable[..., list[list[tuple[int, float]]]]:
    """Function that returns the answers of the CPU's kernels, or PyTorch's."""
    llm = load(model_dir, "cpu", "auto")
    return functools.partial(answers, llm)


@pytest.fixture
def by_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreting matmuls takes longer than all the rest, so torch's library computes them."""
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", 0)


@pytest.mark.parametrize("rows", [0, pytest.param(64, marks=pytest.mark.full)], ids=["library", "kernels"])
def test_tokens_are_those_of_the_cpu(
    rows: int,
    model_dir: Path,
    adapters: list[LoRARequest],
    truth: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts and decodes; rows with each kind of adapter, and one without."""
    monkeypatch.setattr("chairlift.kernels.triton.program.SMALL_ROWS", rows)
    asked = [None, *adapters[:3]]
    llm = poisoned(load(model_dir, device))
    mine = answers(llm, asked)
    close(mine, truth(asked))
    assert len({str(answer) for answer in answers(llm, asked, prompts=[[5]])}) == 4


def test_a_row_has_the_same_bits_in_any_company(
    model_dir: Path, adapters: list[LoRARequest], device: torch.device
) -> None:
    """Also a row without adapters, in an engine that knows none."""
    asked = [None, *adapters[:3]]
    llm = load(model_dir, device, batch_invariant=True, enable_prefix_caching=False)
    together = answers(llm, asked, most=2)
    for n, each in list(enumerate(asked))[1:3]:
        assert answers(llm, [each], prompts=[PROMPTS[n]], most=2) == [together[n]]
    plain = load(model_dir, device, batch_invariant=True, enable_lora=False)
    assert answers(plain, [None], most=2) == [together[0]]


@pytest.mark.full
def test_a_graph_serves_any_mixture(
    model_dir: Path, adapters: list[LoRARequest], truth: Any, device: torch.device, by_library: None
) -> None:
    """Captured with one adapter, then used with eight and with none."""
    llm = poisoned(load(model_dir, device, max_loras=8, max_num_seqs=8, enable_prefix_caching=False))
    runner = runner_of(llm)
    if not conftest.ON_GPU:
        runner.graphs = OverwritingGraphs()
    mixtures: list[list[LoRARequest | None]] = [
        [*[None] * 7, adapters[0]],
        list(adapters),
        [None] * 8,
    ]
    counts = []
    for asked in mixtures:
        close(answers(llm, asked, most=2), truth(asked, most=2))
        counts.append(runner.graphs.num_graphs)
    # One for prompts and one for decodes; steps without adapters have graphs of their own.
    assert [count - counts[0] for count in counts] == [0, 0, 2]
    assert {kind.adapted for kind in runner._decodes} == {adapted for _, adapted in runner._bodies} == {False, True}


def test_adapters_take_turns_in_two_slots(
    model_dir: Path,
    adapters: list[LoRARequest],
    truth: Any,
    device: torch.device,
    by_library: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slot is full of NaN between two adapters."""
    copy, copied = LowRankPool.copy, []

    def poisoning(self: LowRankPool, slot: int, adapter: Any) -> None:
        self.numbers[slot].fill_(float("nan"))
        copied.append(slot)
        copy(self, slot, adapter)

    monkeypatch.setattr(LowRankPool, "copy", poisoning)
    llm = load(model_dir, device, max_loras=2, num_lookahead_steps=1)
    asked = [*adapters[:5], None, adapters[0], adapters[3]]
    close(answers(llm, asked, most=2), truth(asked, most=2))
    assert len(copied) >= 5 and set(copied) == {0, 1}


def test_prompt_logprobs_and_host_sampling_use_the_adapter(
    model_dir: Path, adapters: list[LoRARequest], device: torch.device, by_library: None
) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=0, logprobs=0, repetition_penalty=1.3
    )
    asked = [adapters[2], None, adapters[0]]
    found = []
    for llm in (load(model_dir, device), load(model_dir, "cpu", "auto")):
        for output in llm.generate(PROMPTS[:3], params, lora_request=asked):
            assert output.error is None and output.prompt_logprobs is not None
            scores = [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:] if each]
            found.append((output.outputs[0].token_ids, scores))
    for mine, other in zip(found[:3], found[3:], strict=True):
        assert mine[0] == other[0]
        np.testing.assert_allclose(mine[1], other[1], atol=1e-4)


@pytest.mark.full
def test_dora_follows_replaced_weights(
    model_dir: Path, adapters: list[LoRARequest], tmp_path: Path, device: torch.device, by_library: None
) -> None:
    other = tiny_hf_model(
        tmp_path, "llama", seed=1, num_hidden_layers=1, intermediate_size=32, tie_word_embeddings=False
    )
    llm, asked = load(model_dir, device), [adapters[1], None]
    before = answers(llm, asked)
    llm.update_weights(other, version=1)
    after = answers(llm, asked)
    close(after, answers(load(other, "cpu", "auto"), asked))
    assert before != after


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    WHOLE: ("llama", {"tie_word_embeddings": False}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    EMBEDDING: ("llama", {"tie_word_embeddings": False}, {"target_modules": ["embed_tokens"]}),
    EXPERTS: ("qwen3_moe", {}, {}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_kinds_without_kernels_are_refused_with_their_name(kind: str, tmp_path: Path, device: torch.device) -> None:
    family, model, settings = REFUSED[kind]
    folder = tiny_hf_model(tmp_path, family, **model)
    path = random_adapter(folder, tmp_path / "a", **settings)
    network = load_model(folder)
    how: dict[str, Any] = {"max_rank": 8, "capacity": 1}
    multiplied = [id(module.weight) for module in network.modules() if hasattr(module, "weight")]
    bank = DeviceAdapters(network.to(device), torch.float32, device, multiplied=multiplied, **how)
    with pytest.raises(ModelLoadError, match=rf"a: it changes {kind}.*; serve it with kernels='torch', or merge"):
        bank.read(path, None)
    assert kind not in TritonBackend.abilities.adapters and kind in NativeBackend.abilities.adapters
    assert kind in kinds.kinds_of(read_adapter(path, sites_of(network), max_rank=8), sites_of(network))


def test_the_others_are_computed(model_dir: Path, adapters: list[LoRARequest]) -> None:
    sites = sites_of(CausalLM(read_config(model_dir)))
    found = [kinds.kinds_of(read_adapter(Path(each.lora_path), sites, max_rank=18), sites) for each in adapters[:3]]
    # PEFT saves the head beside an adapter for the head. It is the model's own.
    assert found == [[LOW_RANK], [LOW_RANK, VECTORS], [LOW_RANK, VECTORS, WHOLE]]
    assert TritonBackend.abilities.adapters == (LOW_RANK, VECTORS)


def test_the_pool_is_part_of_the_memory_plan(model_dir: Path, device: torch.device) -> None:
    llm = load(model_dir, device)
    pool = runner_of(llm)._pool.pool
    backend, network = TritonBackend("triton"), read_config(model_dir)

    def planned(**settings: Any) -> int:
        config = EngineConfig.from_flat({"max_loras": 4, "max_lora_rank": 18, **settings})
        return backend.adapter_bytes(config, network, torch.float32)

    assert planned(enable_lora=True) == pool.numbers.nbytes + pool.words.nbytes
    assert planned(enable_lora=False) == 0


def swap_slots(patch: pytest.MonkeyPatch) -> None:
    place = DeviceAdapters.place
    patch.setattr(DeviceAdapters, "place", lambda self, ids: np.where(place(self, ids) >= 0, 3 - place(self, ids), -1))


def forget_slots_of_decodes(patch: pytest.MonkeyPatch) -> None:
    note = DecodeState.note
    patch.setattr(DecodeState, "note", lambda self, name, *rest: name == "adapters" or note(self, name, *rest))


def keep_slots_of_the_first_decode(patch: pytest.MonkeyPatch) -> None:
    """What a graph does that was captured with the slots of its first step."""
    run = TritonProgram.run
    seen: dict[int, torch.Tensor] = {}

    def captured(self: TritonProgram, given: Any, step: Any = None, launch: Any = None, adapters: Any = None) -> Any:
        if step is not None and step.adapters is not None and step.cu_seqlens is None:
            step.adapters.copy_(seen.setdefault(len(step.adapters), step.adapters.clone()))
        return run(self, given, step, launch, adapters)

    patch.setattr(TritonProgram, "run", captured)


def leave_the_head_alone(patch: pytest.MonkeyPatch) -> None:
    run = TritonProgram.run

    def without(self: TritonProgram, given: Any, step: Any = None, launch: Any = None, adapters: Any = None) -> Any:
        return run(self, given, step, launch)

    patch.setattr(TritonProgram, "run", without)


def leave_prompts_alone(patch: pytest.MonkeyPatch) -> None:
    run = TritonProgram.run

    def without(self: TritonProgram, given: Any, step: Any = None, launch: Any = None, adapters: Any = None) -> Any:
        if step is not None and step.adapters is not None and step.cu_seqlens is not None:
            step.adapters.fill_(-1)
        return run(self, given, step, launch, adapters)

    patch.setattr(TritonProgram, "run", without)


def forget_dora(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_bank, "change_of", lambda *given: change_of(*given)._replace(gains=None))


BROKEN = [
    swap_slots,
    forget_slots_of_decodes,
    keep_slots_of_the_first_decode,
    leave_the_head_alone,
    leave_prompts_alone,
    forget_dora,
]


@pytest.mark.planted("test_tokens_are_those_of_the_cpu")
@pytest.mark.parametrize("broken", BROKEN, ids=[broken.__name__ for broken in BROKEN])
def test_planted_mistakes_are_noticed(
    broken: Callable[[pytest.MonkeyPatch], None],
    model_dir: Path,
    adapters: list[LoRARequest],
    truth: Any,
    device: torch.device,
    by_library: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch)
    llm = load(model_dir, device)

    def check() -> None:
        for asked in ([None, *adapters[:3]], [adapters[2], None, None, adapters[1]]):
            close(answers(llm, asked), truth(asked))

    with pytest.raises(AssertionError):
        check()
