"""Families that run through transformers' own classes compute what it computes, and what they cannot is refused."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from chairlift import LLM, SamplingParams
from chairlift.base.image_refusals import SEEING
from chairlift.cli.main import main
from chairlift.errors import ChairliftError, ConfigError, ModelLoadError
from chairlift.kernels.onednn import pack_weight
from chairlift.models.fallback import config as fallback_config
from chairlift.models.fallback import model as fallback_model
from chairlift.models.fallback import probe
from chairlift.models.fallback.config import read_transformers_config
from chairlift.models.fallback.families import ALIASES, ALLOWED, INSIDE, REFUSED
from chairlift.models.fallback.loading import check_stored_weights, load_transformers_model
from chairlift.models.fallback.model import TransformersLM
from chairlift.models.model_files import read_network
from chairlift.models.registry import FAMILIES
from tests.models.paged import PagedRunner
from tests.models.quantized import packers
from tests.models.quantized.make import model_pair
from tests.models.test_families import close, prompt
from tests.models.tiny import hf_logits, hf_model
from tests.models.tiny_transformers import tiny_transformers_model
from tools import model_table

SWEPT = ("gemma2", "gpt_oss", "qwen2_moe")
"""Caps, sinks, and a window that is in the mask only."""
REST = sorted(ALLOWED.intersection(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(SWEPT))
PROMPTS = [prompt(16, 1), [7], prompt(40, 2), prompt(33, 3)]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe-windows": (
        "qwen2_moe",
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "deepseek_v3-expanded": ("deepseek_v3", {}),
    "opt-post-norm": ("opt", {"do_layer_norm_before": False}),
}


def load(model_dir: Path, dtype: torch.dtype = torch.float32) -> TransformersLM:
    return load_transformers_model(model_dir, read_transformers_config(model_dir), dtype, torch.device("cpu"))


def check_answers(model_dir: Path, **settings: Any) -> LLM:
    """Greedy tokens, and log-probabilities of prompts and answers, equal transformers' whole passes: together, chunked
    (24 tokens a step), with a cached prefix (asked twice), and preempted (too few blocks for all)."""
    theirs = hf_model(model_dir)
    llm = LLM(
        model_dir,
        model_impl="transformers",
        dtype="float32",
        block_size=4,
        num_kv_blocks=31,
        max_num_batched_tokens=24,
        skip_tokenizer_init=True,
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    plain = dataclasses.replace(params, prompt_logprobs=None)
    first = llm.generate(PROMPTS, params)
    again = llm.generate([PROMPTS[2], *PROMPTS], plain)
    alone = llm.generate([PROMPTS[3]], plain)
    for output in [*first, *again, *alone]:
        assert output.error is None
        tokens, answer = list(output.prompt_token_ids), output.outputs[0]
        expected = hf_logits(theirs, [*tokens, *answer.token_ids]).float().log_softmax(-1)
        for place, token in enumerate(answer.token_ids):
            row = expected[len(tokens) - 1 + place]
            assert float(row[token]) >= float(row.max()) - 1e-3, "another token is more likely"
            assert answer.logprobs is not None
            assert abs(answer.logprobs[place][token].logprob - float(row[token])) <= 2e-3
        for place, entry in enumerate(output.prompt_logprobs or []):
            if entry is not None:
                assert abs(entry[tokens[place]].logprob - float(expected[place - 1, tokens[place]])) <= 2e-3
    return llm


@pytest.mark.parametrize("family", SWEPT)
def test_answers_equal_transformers(family: str, tmp_path: Path) -> None:
    llm = check_answers(tiny_transformers_model(tmp_path, family))
    assert llm.info.model_impl == "transformers"
    assert not llm.info.deterministic


@pytest.mark.nightly
@pytest.mark.parametrize("family", REST)
def test_answers_of_every_other_family_equal_transformers(family: str, tmp_path: Path) -> None:
    check_answers(tiny_transformers_model(tmp_path, family))


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_of_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, fields = VARIANTS[variant]
    check_answers(tiny_transformers_model(tmp_path, family, **fields), num_lookahead_steps=1)


def test_preemption_and_prefixes_were_part_of_it(tmp_path: Path) -> None:
    """The settings of check_answers do what its docstring says."""
    llm = check_answers(tiny_transformers_model(tmp_path, "llama"))
    assert llm.engine.scheduler.num_preemptions > 0
    assert llm.engine.core.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_logits_of_ragged_batches_equal_transformers(family: str, tmp_path: Path) -> None:
    """Also where values are narrower than keys (MLA, expanded)."""
    model_dir = tiny_transformers_model(tmp_path, family)
    theirs, runner = hf_model(model_dir), PagedRunner(load(model_dir), 8, num_blocks=256)
    sequences = {str(i): prompt(length, seed=i) for i, length in enumerate((40, 3, 61, 17))}
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in sequences}
    rng = random.Random(5)
    while rows := [
        (name, tokens[done : done + rng.choice((1, 1, 4, 17))])
        for name, tokens in sequences.items()
        if (done := len(runner.tokens.get(name, []))) < len(tokens)
    ]:
        rng.shuffle(rows)
        for (name, _), out in zip(rows, runner.step(rows), strict=True):
            logits[name].append(out)
    for name, tokens in sequences.items():
        assert close(torch.cat(logits[name]), hf_logits(theirs, tokens))


def test_llama_both_ways_gives_equal_tokens(tmp_path: Path) -> None:
    model_dir = tiny_transformers_model(tmp_path, "llama")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = []
    for model_impl in ("native", "transformers"):
        llm = LLM(model_dir, model_impl=model_impl, num_kv_blocks=60, skip_tokenizer_init=True)
        assert llm.info.model_impl == model_impl
        answers.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gemma2", "qwen2_moe"])
def test_half_precision_is_told_from_a_mistake(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(tiny_transformers_model(tmp_path, family), dtype)
    found = probe.compare_with_eager(model)
    assert model.dtype == dtype
    assert found.difference <= found.tolerance < 1.5


def test_a_quantised_checkpoint_becomes_floats(tmp_path: Path) -> None:
    settings, pack = packers.gptq()
    quantised, twin = model_pair(tmp_path, settings, pack)
    loaded, same = (load(model_dir) for model_dir in (quantised, twin))
    assert loaded.hf.state_dict().keys() == same.hf.state_dict().keys()
    logits, expected = (PagedRunner(model, 8).step([("a", prompt(40))])[0] for model in (loaded, same))
    assert close(logits, expected, 1e-5)


def test_weights_are_held_once_except_a_tied_head(tmp_path: Path) -> None:
    for tied in (False, True):
        model_dir = tiny_transformers_model(tmp_path / str(tied), "llama", tie_word_embeddings=tied)
        model, theirs = load(model_dir), hf_model(model_dir)
        layers = [module for module in model.hf.modules() if type(module) is torch.nn.Linear]
        packs = pack_weight(torch.zeros(16, 16)) is not None
        held = {id(each) for each in layers if each.weight.isfinite().all()}
        beside = {id(model.hf.lm_head)} if tied else set()
        assert held == (beside if packs else set(map(id, layers)))
        sizes = sum(parameter.nbytes for parameter in theirs.parameters())
        assert model.weight_bytes == sizes + (theirs.lm_head.weight.nbytes if tied and packs else 0)
        assert close(PagedRunner(model, 8).step([("a", prompt(40))])[0], hf_logits(theirs, prompt(40)))


@pytest.mark.parametrize("called", [False, True])
def test_code_that_reads_a_weight_gets_it_or_is_noticed(
    called: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    def reads(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.linear(x, self.gate_proj.weight)
        gate = gate + 0 * self.gate_proj(x) if called else gate
        out: torch.Tensor = self.down_proj(self.act_fn(gate) * self.up_proj(x))
        return out

    model_dir = tiny_transformers_model(tmp_path, "llama")
    expected = hf_logits(hf_model(model_dir), prompt(40))
    monkeypatch.setattr(LlamaMLP, "forward", reads)
    if not called:
        assert close(PagedRunner(load(model_dir), 8).step([("a", prompt(40))])[0], expected)
    elif pack_weight(torch.zeros(16, 16)) is not None:
        with pytest.raises(ModelLoadError, match="logits differ by nan"):
            load(model_dir)


# -- each way of getting it wrong is noticed, by the comparison at load ------------------------------------------------


def lose_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer attends to the tokens of the step, of whichever request."""
    from chairlift.kernels.sdpa import packed_attention

    def attend(self: Any, layer: int, q: Any, k: Any, v: Any, *, scale: float, window: int | None, **more: Any) -> Any:
        return packed_attention(q, k, v, (0, len(q)), scale=scale, window=window, **more)

    monkeypatch.setattr(probe.PagedContext, "attend", attend)


def lose_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if windows were what layers hand to their attention."""
    monkeypatch.setattr(probe, "_window_of", lambda *args: None)
    attention = fallback_model._attention

    def silent(*args: Any, sliding_window: Any = None, **kwargs: Any) -> Any:
        return attention(*args, **kwargs)

    monkeypatch.setattr(fallback_model, "_attention", silent)


def shift_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions count the tokens of the flat batch."""
    run = TransformersLM.run

    def shifted(self: TransformersLM, token_ids: torch.Tensor, positions: torch.Tensor, who: Any) -> torch.Tensor:
        return run(self, token_ids, torch.arange(len(positions)), who)

    monkeypatch.setattr(TransformersLM, "run", shifted)


def swap_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of all layers go to the cache of the first, whose tables the second reads."""
    attend = probe.PagedContext.attend

    def wrong(self: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        if self.seq_lens[0] == 8:
            return attend(self, layer, *args, **kwargs)
        return attend(self, layer ^ 1, *args, **kwargs)

    monkeypatch.setattr(probe.PagedContext, "attend", wrong)


def drop(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Attention is not told of a cap, or of sinks."""

    def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
        attend = probe.PagedContext.attend

        def without(self: Any, *args: Any, **kwargs: Any) -> Any:
            return attend(self, *args, **{**kwargs, name: None})

        monkeypatch.setattr(probe.PagedContext, "attend", without)

    return wrong


def ignore_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = probe.PagedContext.attend

    def wrong(self: Any, layer: int, q: torch.Tensor, *args: Any, scale: float, **kwargs: Any) -> Any:
        return attend(self, layer, q, *args, scale=q.shape[2] ** -0.5, **kwargs)

    monkeypatch.setattr(probe.PagedContext, "attend", wrong)


MISTAKES: list[tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("llama", "context lost", lose_context),
    ("qwen2_moe", "window lost", lose_window),
    ("gemma2", "window lost", lose_window),
    ("llama", "positions wrong", shift_positions),
    ("opt", "positions wrong", shift_positions),
    ("llama", "wrong layer index", swap_layers),
    ("gemma2", "cap dropped", drop("cap")),
    ("gpt_oss", "sinks dropped", drop("sinks")),
    ("granite", "scale ignored", ignore_scale),
]


@pytest.mark.parametrize(("family", "what", "spoil"), MISTAKES, ids=[f"{row[0]}: {row[1]}" for row in MISTAKES])
def test_a_mistake_is_noticed_at_load(
    family: str,
    what: str,
    spoil: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields: dict[str, Any] = {"granite": {"attention_multiplier": 0.1}}.get(family, {})
    if family == "qwen2_moe":
        fields = VARIANTS["qwen2_moe-windows"][1]
    if family == "gemma2":  # a cap of 50 cuts nothing off scores this small
        fields = {"attn_logit_softcapping": 0.5}
    model_dir = tiny_transformers_model(tmp_path, family, **fields)
    load(model_dir)
    spoil(monkeypatch)
    with pytest.raises(ModelLoadError, match=r"logits differ by \S+ of their spread, where rounding explains \S+;"):
        load(model_dir)


# -- what is refused, and how ------------------------------------------------------------------------------------------


def test_every_family_of_transformers_is_served_or_refused_with_a_reason() -> None:
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not ALLOWED & REFUSED.keys()
    seeing = {name for name, family in FAMILIES.items() if family.sees_images}  # no class for text alone
    assert known <= ALLOWED | REFUSED.keys() | seeing | INSIDE.keys()
    assert set(SEEING) == seeing, "refusals name other families than those that read images"
    native = {name for name, why in REFUSED.items() if why in ("state", "own")}
    inside = {name for name, family in FAMILIES.items() if family.text_type}  # the text model of another model
    assert set(INSIDE.values()) | set(ALIASES.values()) <= ALLOWED
    unknown = {"bailing_moe", "bailing_moe_v2", "gru", "lstm", "mimo"}  # transformers has no such models
    assert FAMILIES.keys() <= ALLOWED | native | seeing | inside | unknown


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("zamba2", "zamba2' is not supported, natively or through transformers: some of its layers keep a rec"),
        ("bamba", "recurrent state"),
        ("jamba", "recurrent state"),
        ("lfm3", "recurrent state"),
        ("recurrent_gemma", "recurrent state"),
        ("bloom", "AttentionInterface"),
        ("deepseek_v32", "by an index"),
        ("glm_moe_dsa", "by an index"),
        ("bitnet", "three values"),
        ("bart", "encoder"),
        ("mllama", "its layers for images attend to them by cross attention"),
        ("minimax_m3_vl_text", "by an index"),
        ("no-such-model", "has not been seen right"),
    ],
)
def test_families_are_refused_by_name(family: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 8}))
    for model_impl in ("auto", "transformers"):
        with pytest.raises(ModelLoadError, match=words):
            read_network(tmp_path, model_impl)
    with pytest.raises(ModelLoadError, match="is not supported; supported: "):
        read_network(tmp_path, "native")


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("dots1", {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}, "code from its own directory"),
        ("dots1", {"architectures": ["Dots1ForSequenceClassification"]}, "has no Dots1ForCausalLM"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types has linear_attention"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True: the model attends to another sequence"),
        ("llama", {"is_causal": False}, "is_causal is False"),
        ("llama", {"hidden_size": "wide"}, "transformers does not accept it"),
        ("llama", {"num_hidden_layers": 3}, r"12 unexpected \(model.layers.3|9 unexpected \(model.layers.3"),
        ("llama", {"num_hidden_layers": 5}, r"9 missing \(model.layers.4"),
        ("llama", {"intermediate_size": 80}, "of another shape"),
        ("dots1", {"quantization_config": {"quant_method": "hqq"}}, "hqq"),
    ],
)
def test_settings_that_a_checkpoint_may_not_have_are_refused(
    family: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model_dir = tiny_transformers_model(tmp_path, family)
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelLoadError, match=words):
        load(model_dir)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """As in files of DeepSeek V3, whose last layer is behind those of ``num_hidden_layers``."""
    model_dir = tiny_transformers_model(tmp_path, "deepseek_v3", num_hidden_layers=3)
    wanted = PagedRunner(load(model_dir), 8).step([("a", prompt(20))])[0]
    path = model_dir / "config.json"
    weights = load_file(model_dir / "model.safetensors")
    further = {
        name.replace("layers.2.", "layers.3."): each.clone() for name, each in weights.items() if "layers.2." in name
    }
    further["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file(weights | further, model_dir / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert torch.equal(PagedRunner(load(model_dir), 8).step([("a", prompt(20))])[0], wanted)
    path.write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelLoadError, match=r"unexpected \(model.layers.3"):
        load(model_dir)


def test_code_in_the_directory_that_transformers_has_is_not_needed(tmp_path: Path) -> None:
    model_dir = tiny_transformers_model(tmp_path, "dots1")
    path = model_dir / "config.json"
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_dots1.Dots1ForCausalLM"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **code}))
    assert read_transformers_config(model_dir).architecture == "Dots1ForCausalLM"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = tiny_transformers_model(tmp_path, "dots1")
    monkeypatch.setattr(fallback_config.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"is not installed; pip install 'chairlift\[hf\]'"):
        read_network(model_dir, "auto")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("kernels", "triton"), ("quantization", "int8"), ("kv_cache_dtype", "int8"), ("batch_invariant", True)],
)
def test_settings_of_other_kernels_are_refused(setting: str, value: Any, tmp_path: Path) -> None:
    model_dir = tiny_transformers_model(tmp_path, "dots1")
    with pytest.raises(ConfigError, match=f"{setting} is {value!r}, but model_type 'dots1' runs through transformers"):
        LLM(model_dir, skip_tokenizer_init=True, **{setting: value})


def test_weights_are_not_replaced(tmp_path: Path) -> None:
    model_dir = tiny_transformers_model(tmp_path, "dots1")
    llm = LLM(model_dir, num_kv_blocks=20, skip_tokenizer_init=True)
    with pytest.raises(ChairliftError, match="cannot be replaced while it serves"):
        llm.update_weights(model_dir, 1)
    assert llm.generate([PROMPTS[0]], SamplingParams(max_tokens=2))[0].error is None


@pytest.mark.parametrize(("kind", "longest"), [("longrope", 64), ("dynamic", 512)])
def test_a_rotation_that_depends_on_the_batch_ends_where_it_begins_to(kind: str, longest: int, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 64}
    fields = (
        {"rope_parameters": rope, "original_max_position_embeddings": 64}
        if kind == "longrope"
        else {"rope_parameters": rope}
    )
    config = read_transformers_config(
        tiny_transformers_model(tmp_path, "phi3" if kind == "longrope" else "llama", **fields)
    )
    assert config.max_model_len == longest
    assert f"rope_type is {kind!r}" in config.notes()[0]


def test_check_says_who_computes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tiny_transformers_model(tmp_path, "dots1"))
    assert main(["check", where, "--num-kv-blocks", "60", "--skip-tokenizer-init"]) == 0
    out = capsys.readouterr().out
    assert "transformers: PyTorch runs the layers between our attention; expect about" in out
    assert "greedy tokens alone and in a batch" in out
    assert main(["check", "--model-impl", "native"]) == 0
    assert "native: Chairlift's own code for this family" in capsys.readouterr().out


def test_numbers_that_are_not_finite_are_found(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model_dir = tiny_transformers_model(tmp_path, "dots1")
    check_stored_weights(model_dir, torch.float32)
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"tensor model\.norm\.weight has NaN"):
        check_stored_weights(model_dir, torch.float32)


def test_native_comes_first() -> None:
    """``auto`` serves the registry's families natively, although transformers could run them."""
    assert len(FAMILIES.keys() & ALLOWED) > 20


def test_the_page_is_up_to_date() -> None:
    page = model_table.PAGE.read_text()
    assert model_table.with_tables(page) == page, "run tools/model_table.py"
    assert all(page.count(f"| `{name}` |") == 1 for name in FAMILIES)
    with pytest.raises(ValueError, match="lacks <!-- native families"):
        model_table.with_tables(page.replace("<!-- native families", ""))
