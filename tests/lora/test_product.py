"""Rows with adapters compute what PEFT computes, for every family; rows without keep their bits, and nobody sees whom
they are computed with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, LoRARequest, RequestOutput, SamplingParams
from chairlift.kernels.cpu.library import supported_isas
from tests.lora.adapters import peft_logits, random_adapter
from tests.models.tiny import EXPERT_FAMILIES, FAMILIES, MORE_FAMILIES, RECURRENT_FAMILIES, tiny_hf_model
from tests.native import needs_kernels

PROMPTS = [[5, 9, 77, 3, 21, 64, 8, 100, 41, 2, 90, 13, 55, 6, 31, 70], [7], [3] * 40]
SMALL: dict[str, Any] = {"num_kv_blocks": 60, "max_num_batched_tokens": 24, "skip_tokenizer_init": True}
GROUPS = ("gpt2", "llama", "gpt_neox", "glm", "gemma2", "olmo2", "opt", "phi3", "cohere2")
"""One of each kind: names, transposed products, rows by head, in pairs, norms over all heads, fused products."""
WITH_EXPERTS = (*EXPERT_FAMILIES, "qwen3_next", "qwen3_5_moe_text")
EXPERTS_LEFT_OUT = ["q_proj", "k_proj", "v_proj", "o_proj"]


MAMBA = ("falcon_h1", "mamba2", "nemotron_h")
"""Families whose ``out_proj`` PEFT refuses to adapt."""


def engine(model_dir: Path, kernels: str = "auto", **settings: Any) -> LLM:
    return LLM(model_dir, kernels=kernels, enable_lora=True, **{"dtype": "float32", **SMALL, **settings})


def answers(
    llm: LLM, prompts: Sequence[list[int]], adapters: Sequence[LoRARequest | None], num_tokens: int = 8
) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    return llm.generate(list(prompts), params, lora_request=list(adapters))


def bits(output: RequestOutput) -> list[tuple[int, float]]:
    answer = output.outputs[0]
    assert answer.logprobs is not None
    return [(token, row[token].logprob) for token, row in zip(answer.token_ids, answer.logprobs, strict=True)]


def check(model_dir: Path, outputs: Sequence[RequestOutput], adapters: Sequence[LoRARequest | None]) -> None:
    """Fail unless each token is PEFT's best, and its log-probability PEFT's."""
    for path in {None if each is None else Path(each.lora_path) for each in adapters}:
        mine = [
            output
            for output, each in zip(outputs, adapters, strict=True)
            if (None if each is None else Path(each.lora_path)) == path
        ]
        whole = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in mine]
        for output, logits in zip(mine, peft_logits(model_dir, path, whole), strict=True):
            expected = logits[len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
            for place, (token, logprob) in enumerate(bits(output)):
                assert expected[place, token] >= float(expected[place].max()) - 1e-3, "another token is more likely"
                assert abs(logprob - float(expected[place, token])) <= 1e-3, "its log-probability is another"


def compare(
    model_dir: Path, tmp_path: Path, *settings: dict[str, Any], kernels: Sequence[str] = ("auto", "torch")
) -> None:
    paths = [random_adapter(model_dir, tmp_path / f"a{n}", seed=n, **each) for n, each in enumerate(settings)]
    asked = [None, *(LoRARequest(f"a{n}", n + 1, path) for n, path in enumerate(paths))]
    for each in kernels:
        llm = engine(model_dir, each)
        adapters = [one for _ in PROMPTS for one in asked]
        outputs = answers(llm, [prompt for prompt in PROMPTS for _ in asked], adapters)
        check(model_dir, outputs, adapters)


@pytest.mark.parametrize("family", GROUPS)
def test_answers_equal_peft(family: str, tmp_path: Path) -> None:
    compare(tiny_hf_model(tmp_path, family), tmp_path, {"r": 5}, {"r": 33, "use_rslora": True})


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted({*FAMILIES, *MORE_FAMILIES, *RECURRENT_FAMILIES} - {*GROUPS, *WITH_EXPERTS}))
def test_answers_of_every_family_equal_peft(family: str, tmp_path: Path) -> None:
    left_out = {"exclude_modules": ["out_proj", "conv1d"]} if family in MAMBA else {}
    first, second = {"r": 5, **left_out}, {"r": 33, "use_rslora": True, **left_out}
    compare(tiny_hf_model(tmp_path, family), tmp_path, first, second)


@pytest.mark.nightly
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_attention_of_families_with_experts_equals_peft(family: str, tmp_path: Path) -> None:
    compare(tiny_hf_model(tmp_path, family), tmp_path, {"r": 5, "target_modules": EXPERTS_LEFT_OUT})


TARGETS = {
    "q": {"target_modules": ["q_proj"]},
    "k": {"target_modules": ["k_proj"]},
    "qv": {"target_modules": ["q_proj", "v_proj"]},
    "o": {"target_modules": ["o_proj"]},
    "gate": {"target_modules": ["gate_proj"]},
    "up": {"target_modules": ["up_proj"]},
    "down": {"target_modules": ["down_proj"]},
    "patterns": {
        "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.up_proj": 40},
        "alpha_pattern": {"v_proj": 3, "layers.0.self_attn.q_proj": 1},
    },
    "one-layer": {"layers_to_transform": [1], "layers_pattern": "layers", "target_modules": ["q_proj", "down_proj"]},
}


def test_every_target_set_equals_peft(tmp_path: Path) -> None:
    compare(tiny_hf_model(tmp_path, "qwen3"), tmp_path, *list(TARGETS.values())[:4])
    model_dir = tiny_hf_model(tmp_path, "llama", seed=1, intermediate_size=80, head_dim=16)
    compare(model_dir, tmp_path / "second", *list(TARGETS.values())[4:], kernels=("auto",))


@needs_kernels
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_company(settings: dict[str, Any], tmp_path: Path) -> None:
    """Batches of 0 to 8 adapters and none, over chunked prompts: each row alone, and in company, and without adapters
    in an engine that knows none."""
    model_dir = tiny_hf_model(tmp_path, "qwen2", num_hidden_layers=2)
    asked: list[LoRARequest | None] = [None]
    for n in range(8):
        path = random_adapter(model_dir, tmp_path / f"a{n}", seed=n, r=(3, 16, 40)[n % 3])
        asked.append(LoRARequest(f"a{n}", n + 1, path))
    prompts = [PROMPTS[n % 3] for n in range(len(asked))]
    llm = engine(model_dir, supported_isas()[-1], enable_prefix_caching=False, **settings)
    together = [bits(output) for output in answers(llm, prompts, asked)]
    alone = [bits(*answers(llm, [prompt], [each])) for prompt, each in zip(prompts, asked, strict=True)]
    assert together == alone
    assert len({str(each) for each in together[0::3]}) == 3, "an adapter changed nothing"
    plain = LLM(model_dir, kernels=supported_isas()[-1], **{"dtype": "float32", **SMALL, **settings})
    base = answers(plain, prompts[:1], [None])
    assert bits(base[0]) == together[0]


@needs_kernels
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_rounded_weights_are_as_near_with_an_adapter_as_without(settings: dict[str, Any], tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", num_hidden_layers=2)
    path = random_adapter(model_dir, tmp_path / "a", r=20)
    asked = [None, LoRARequest("a", 1, path)]
    tokens = [(7 * n) % 128 for n in range(48)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = engine(model_dir, **settings).generate([tokens] * 2, params, lora_request=asked)
    errors = []
    for output, expected in ((outputs[0], None), (outputs[1], path), (outputs[1], None)):
        (logits,) = peft_logits(model_dir, expected, [tokens])
        logprobs = logits.log_softmax(-1)
        assert output.prompt_logprobs is not None
        rows = [row for row in output.prompt_logprobs[1:] if row is not None]
        found = [row[token].logprob for row, token in zip(rows, tokens[1:], strict=True)]
        right = [float(logprobs[n, token]) for n, token in enumerate(tokens[1:])]
        errors.append(sum(abs(a - b) for a, b in zip(found, right, strict=True)) / len(found))
    base, adapted, of_another = errors
    assert adapted < 2 * base and of_another > 5 * adapted


def test_preemption_prefix_cache_and_forks_keep_the_adapter(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama")
    paths = [random_adapter(model_dir, tmp_path / f"a{n}", seed=n) for n in range(3)]
    asked = [None, *(LoRARequest(f"a{n}", n + 1, path) for n, path in enumerate(paths))]
    prompt = PROMPTS[0] * 2
    for settings in ({"num_kv_blocks": 9}, {"num_kv_blocks": 9, "preemption_mode": "swap"}, {"max_loras": 1}):
        llm = engine(model_dir, **settings)
        for _ in range(2):  # the second time the prefix cache has all of it
            outputs = answers(llm, [prompt] * len(asked), asked, 20)
            check(model_dir, outputs, asked)
        if "num_kv_blocks" in settings:
            assert llm.engine.core.stats().num_preemptions
        llm.engine.check_invariants()
        llm.engine.core.preparers.adapters.check_invariants()
        several = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, n=3)
        (forked,) = llm.generate([prompt], several, lora_request=asked[2])
        assert {tuple(each.token_ids) for each in forked.outputs} == {tuple(outputs[2].outputs[0].token_ids[:4])}


def test_speculation_keeps_the_adapter(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama")
    asked = [None, LoRARequest("a", 1, random_adapter(model_dir, tmp_path / "a"))]
    prompts = [PROMPTS[0] * 2] * 2
    plain = [bits(each) for each in answers(engine(model_dir), prompts, asked, 30)]
    drafting = engine(model_dir, speculative_config='{"method": "ngram", "prompt_lookup_min": 1}')
    assert [bits(each) for each in answers(drafting, prompts, asked, 30)] == plain


@needs_kernels
def test_a_small_model_drafts_for_rows_with_adapters(tmp_path: Path) -> None:
    """It has no adapter itself."""
    model_dir = tiny_hf_model(tmp_path, "llama")
    asked = [None, LoRARequest("a", 1, random_adapter(model_dir, tmp_path / "a"))]
    prompts = [PROMPTS[0] * 2] * 2
    plain = [bits(each) for each in answers(engine(model_dir), prompts, asked, 30)]
    small = {"method": "draft_model", "model": str(model_dir), "num_speculative_tokens": 4}
    drafting = engine(model_dir, speculative_config=small)
    assert [bits(each) for each in answers(drafting, prompts, asked, 30)] == plain


def test_an_adapter_that_is_loaded_again_shares_nothing(tmp_path: Path) -> None:
    model_dir, target = tiny_hf_model(tmp_path, "llama"), tmp_path / "a"
    llm = engine(model_dir)
    asked = LoRARequest("a", 1, random_adapter(model_dir, target, seed=1))
    check(model_dir, answers(llm, PROMPTS[:1], [asked]), [asked])
    random_adapter(model_dir, target, seed=2)
    assert llm.remove_lora(1) and not llm.remove_lora(1)
    check(model_dir, answers(llm, PROMPTS[:1], [asked]), [asked])


@pytest.mark.planted
@pytest.mark.parametrize("mutation", ["scale", "patterns", "order", "start", "a-of-another", "no-down", "tokens"])
def test_each_missing_piece_changes_the_answer(mutation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.lora import reader, settings, torch_bank
    from chairlift.lora.adapter import Adapter, LowRank

    read = reader.read_adapter

    def spoil(adapter: Adapter) -> Adapter:
        for name, parts in adapter.layers.items():
            if mutation == "order" and "qkv" in name:
                parts[0] = LowRank(parts[0].start, parts[0].a, parts[0].b.flip(0))
            if mutation == "start" and len(parts) == 3:
                parts[1] = LowRank(parts[2].start, parts[1].a, parts[1].b)
            if mutation == "a-of-another" and len(parts) == 2:
                parts[0], parts[1] = (LowRank(p.start, o.a, p.b) for p, o in zip(parts, parts[::-1], strict=True))
        if mutation == "no-down":
            adapter.layers.pop("model.layers.1.mlp.down_proj")
        return adapter

    if mutation == "scale":
        monkeypatch.setattr(settings.AdapterSettings, "scale_of", lambda self, module: self.alpha / self.rank)
    elif mutation == "patterns":
        monkeypatch.setattr(
            settings.AdapterSettings, "scale_of", lambda self, module: self.alpha / self.rank_of(module)
        )
    elif mutation == "tokens":
        monkeypatch.setattr(torch_bank.TorchAdapters, "begin", lambda self, adapters: None)
    else:
        monkeypatch.setattr(torch_bank, "read_adapter", lambda *args, **options: spoil(read(*args, **options)))
    model_dir = tiny_hf_model(tmp_path, "llama", num_hidden_layers=2)
    patterns = {"alpha_pattern": {"q_proj": 30}} if mutation == "patterns" else {}
    with pytest.raises(AssertionError, match=r"token|log-prob"):
        compare(model_dir, tmp_path, {"r": 4, "use_rslora": mutation == "scale", **patterns}, kernels=("torch",))
