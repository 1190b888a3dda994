"""EAGLE-3: answers are those without, files are read as published, and each draft is the one that plain torch makes.

Plain torch gets the hidden states that transformers computes, and keeps no cache: it computes every position of the
layer again for each draft. So a wrong tap, a token of another place, and KV that a rejected draft left behind all show.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from chairlift import LLM, SamplingParams
from chairlift.core.scheduler.output import Chunk
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.executor.backends.native import native_runner
from chairlift.executor.drafters.eagle3 import Eagle3Drafter
from chairlift.kernels.cpu.library import supported_isas
from chairlift.kernels.weights import NATIVE
from chairlift.models import eagle3
from chairlift.models.eagle3 import load_eagle3, read_eagle3_config
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.model_files import read_config
from tests.core.spec_decode.test_equivalence import MOST_TOKENS, Models, compare, draw_jobs, draw_settings
from tests.equivalence.cases import Job, longest, run
from tests.equivalence.test_determinism import WITHOUT_STATES
from tests.kernels.cpu.models import VOCAB
from tests.native import needs_kernels
from tests.sweep import sweep
from tests.tiers import one_in

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def write_layer(
    folder: Path,
    target: NetworkConfig,
    *,
    seed: int = 0,
    taps: Sequence[int] = (2, 0, 1),
    rows: int | None = 90,
    embeds: bool = False,
    nested: bool = False,
    std: float = 0.25,
    **said: Any,
) -> Path:
    """A layer of random weights in EAGLE-3's files; ``rows`` None: with the head of the model. ``nested``: as the
    library speculators writes them. Features are small, so that attention decides what is drafted."""
    generator = torch.Generator().manual_seed(seed)
    width, hidden = target.hidden_size, target.hidden_size
    heads, kv_heads, size, inner = 2, 1, 32, 80

    def random_matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    prefix = "layers.0." if nested else "midlayer."
    tensors = {"fc.weight": random_matrix(hidden, len(taps) * width) / 50, "norm.weight": 1 + random_matrix(hidden)}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        tensors[f"{prefix}self_attn.{name}_proj.weight"] = random_matrix(count * size, 2 * hidden)
    tensors[f"{prefix}self_attn.o_proj.weight"] = random_matrix(hidden, heads * size)
    for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        tensors[f"{prefix}mlp.{name}_proj.weight"] = random_matrix(*shape)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = 1 + random_matrix(hidden)
    if said.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + random_matrix(len(taps) * width)
    if embeds:
        tensors["embed_tokens.weight"] = random_matrix(target.vocab_size, hidden)
    if rows is not None:
        ids = torch.randperm(target.vocab_size, generator=generator)[:rows].sort().values
        tensors |= {"lm_head.weight": random_matrix(rows, hidden), "d2t": ids - torch.arange(rows)}
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    layer = {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": MOST_TOKENS,
    }
    more = {} if rows is None else {"draft_vocab_size": rows}
    if nested:
        config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "architectures": ["Eagle3Speculator"],
        }
        config |= {"eagle_aux_hidden_state_layer_ids": list(taps), **more, **said}
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, **layer, **more, **said}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def asked_of(layer: Path, most: int = 8) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(layer), "num_speculative_tokens": most}


def drafts_are_free(llm: LLM) -> Eagle3Drafter:
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and isinstance(drafts.speculator, AdaptiveSpeculator)
    drafter = drafts.speculator._proposer
    assert isinstance(drafter, Eagle3Drafter)
    drafts.speculator._seconds, drafts.speculator.reach = lambda step: 1.0, drafts.speculator.most
    drafter._times.note = lambda *given: None  # type: ignore[method-assign]
    return drafter


def check(models: Models, seed: int) -> collections.Counter[str]:
    rng = random.Random(seed)
    model, dtype, settings = rng.choice(WITHOUT_STATES), rng.choice(("bfloat16", "float32")), draw_settings(rng)
    settings["num_lookahead_steps"] = None
    isa, where = rng.choice(supported_isas()), models.model_dir(model)
    target = read_config(where)
    shape: dict[str, Any] = {"rows": rng.choice((None, 60, VOCAB)), "embeds": rng.random() < 0.3}
    shape |= {"nested": rng.random() < 0.5, "norm_before_residual": rng.random() < 0.5}
    taps = [rng.randrange(target.num_hidden_layers) for _ in range(rng.randint(1, 3))]
    layer = write_layer(
        where.parent / f"eagle3-{seed}", target, seed=seed, taps=[2 if taps[0] == 1 else taps[0], *taps[1:]], **shape
    )
    jobs = draw_jobs(rng, repetitive=True)
    expected = [run(models.alone(model, isa, dtype), [job])[0] for job in jobs]
    most = -(-longest(jobs) // settings["block_size"]) * max(job.params.n for job in jobs)
    blocks = most + 2 if rng.random() < 0.5 else len(jobs) * most + 2
    asked = asked_of(layer, rng.randint(1, 8))
    llm = models.llm(model, isa, dtype, num_kv_blocks=blocks, speculative_config=asked, **settings)
    drafts_are_free(llm)
    outputs = run(llm, jobs, rng.choice(("together", "staggered")), preempting=rng.random() < 0.4, seed=seed)
    compare(expected, outputs, jobs, (model, dtype, isa, settings, shape))
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None
    return collections.Counter(accepted=drafts.num_accepted, drafted=drafts.num_drafts)


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.nightly)])
def test_eagle3_changes_no_bit(count: int, models: Models, request: pytest.FixtureRequest) -> None:
    seen: collections.Counter[str] = collections.Counter()
    sweep(request, count, lambda seed: seen.update(check(models, seed)))
    if request.config.getoption("--seeds") is None:
        assert seen["accepted"] > count and seen["drafted"] > 10 * count, seen


# -- what it drafts ----------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


class Reference:
    """The layer in plain torch, without a cache."""

    def __init__(self, folder: Path, target: Any) -> None:
        self.weights = {
            name.removeprefix("midlayer."): value for name, value in load_file(folder / "model.safetensors").items()
        }
        self.config = json.loads((folder / "config.json").read_text())
        self.taps = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.target = target

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """``count`` greedy drafts after ``tokens``."""
        weights, given = self.weights, list(tokens)
        with torch.inference_mode():
            states = self.target.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            fed = torch.cat([states[tap][0] for tap in self.taps], dim=-1)
            if "input_norm.weight" in weights:
                fed = norm(fed, weights["input_norm.weight"])
            features = fed @ weights["fc.weight"].T
            for _ in range(count):
                found = self._layer(features, torch.tensor(given[1:]))
                out = norm(found[-1], weights["norm.weight"])
                head = weights.get("lm_head.weight", self.target.lm_head.weight)
                row = int((head @ out).argmax())
                given.append(row + int(weights["d2t"][row]) if "d2t" in weights else row)
                following = out if self.config.get("norm_output") else found[-1]
                features = torch.cat((features, following[None]))
        return given[len(tokens) :]

    def _layer(self, features: Tensor, token_ids: Tensor) -> Tensor:
        weights, length = self.weights, len(features)
        embedding = weights.get("embed_tokens.weight", self.target.model.embed_tokens.weight)
        normed = norm(features, weights["hidden_norm.weight"])
        x = torch.cat((norm(embedding[token_ids], weights["input_layernorm.weight"]), normed), dim=-1)
        q, k, v = (
            (x @ weights[f"self_attn.{name}_proj.weight"].T).view(length, -1, 32).transpose(0, 1) for name in "qkv"
        )
        angles = torch.arange(length)[:, None] / 5000.0 ** (torch.arange(0, 32, 2) / 32)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def turned(heads: Tensor) -> Tensor:
            return heads * cos + torch.cat((-heads[..., 16:], heads[..., :16]), dim=-1) * sin

        k, v = (each.repeat_interleave(2, dim=0) for each in (turned(k), v))
        attended = functional.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
        attended = attended.transpose(0, 1).flatten(1) @ weights["self_attn.o_proj.weight"].T
        hidden = (normed if self.config.get("norm_before_residual") else features) + attended
        inner = norm(hidden, weights["post_attention_layernorm.weight"])
        gate = functional.silu(inner @ weights["mlp.gate_proj.weight"].T) * (inner @ weights["mlp.up_proj.weight"].T)
        return hidden + gate @ weights["mlp.down_proj.weight"].T


def proposals(
    models: Models, layer: Path, temperature: float = 0.0, **settings: Any
) -> list[tuple[list[int], list[int]]]:
    """(tokens of a row, what was drafted after them) for several requests in one batch.

    The engine checks other drafts: the right ones, a drawn number of them, and sometimes a wrong one.
    """
    asked = SamplingParams(temperature=temperature, max_tokens=16, ignore_eos=True, seed=7)
    jobs = [Job([random.Random(i).randrange(2, VOCAB) for _ in range(20 + 17 * i)], asked) for i in range(4)]
    alone = models.alone("llama", "auto", "float32")
    answers = {tuple(job.prompt): run(alone, [job])[0].outputs[0].token_ids for job in jobs}
    settings = {"num_kv_blocks": 120, "threads": 1, "max_num_batched_tokens": 45, **settings}
    llm = models.llm("llama", "auto", "float32", speculative_config=asked_of(layer, 4), **settings)
    drafter = drafts_are_free(llm)
    propose, made, rng = drafter.propose, list[tuple[list[int], list[int]]](), random.Random(1)

    def noted(rows: Any) -> Any:
        drafts: list[list[int]] = []
        for (request, limit), found in zip(rows, propose(rows), strict=True):
            made.append((list(request.token_ids), list(found)))
            known, prompt = len(request.token_ids), request.num_prompt_tokens
            right = list(answers[tuple(request.token_ids[:prompt])][known - prompt :][: rng.randint(0, limit)])
            if right and rng.random() < 0.3:
                right[-1] = (right[-1] + 1) % VOCAB
            drafts.append(right)
        return drafts

    drafter.propose = noted  # type: ignore[method-assign]
    run(llm, jobs)
    return made


def differences(models: Models, folder: Path, **shape: Any) -> tuple[int, int]:
    """(rows whose drafts differ from those of plain torch or are missing, all rows)."""
    where = models.model_dir("llama")
    layer = write_layer(folder / "layer", read_config(where), **shape)
    made = proposals(models, layer)
    plain = Reference(layer, AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32))
    return sum(drafts != plain.drafts(tokens, max(1, len(drafts))) for tokens, drafts in made), len(made)


SHAPES: dict[str, dict[str, Any]] = {
    "as published": {},
    "with the model's head": {"rows": None},
    "with its own embedding": {"embeds": True, "rows": VOCAB},
    "normalised features": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
}


@pytest.mark.parametrize("name", one_in(2, sorted(SHAPES)))
def test_each_draft_is_that_of_plain_torch(name: str, models: Models, tmp_path: Path) -> None:
    wrong, count = differences(models, tmp_path, **SHAPES[name])
    assert count > 20 and wrong <= 1  # a near tie


def test_a_reduced_vocabulary_draws_with_the_noise_of_the_models_ids(models: Models, tmp_path: Path) -> None:
    target = read_config(models.model_dir("llama"))
    drafted = {}
    for name in ("with d2t", "without"):
        layer = write_layer(tmp_path / name, target, rows=VOCAB)
        if name == "without":
            tensors = load_file(layer / "model.safetensors")
            save_file({key: value for key, value in tensors.items() if key != "d2t"}, layer / "model.safetensors")
        drafted[name] = proposals(models, layer, temperature=1.0)
    assert drafted["with d2t"] == drafted["without"]
    assert len({tuple(drafts) for _, drafts in drafted["without"]}) > 15


def test_a_row_without_drafts_is_computed_now_and_then(models: Models, tmp_path: Path) -> None:
    where = models.model_dir("llama")
    layer = write_layer(tmp_path / "layer", read_config(where))
    settings: dict[str, Any] = {"num_kv_blocks": 60, "threads": 1, "speculative_config": asked_of(layer, 4)}
    llm = models.llm("llama", "auto", "float32", **settings)
    drafter = drafts_are_free(llm)
    prompt, params = list(range(2, 30)), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    llm.engine.add_request(prompt, params, request_id="a")
    drafter._times.known = {1: 1e9}
    for _ in range(40):
        llm.engine.step()
    request = llm.engine.scheduler.decodes.requests[0]
    plain = Reference(layer, AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32))
    assert 1 < len(request.token_ids) - drafter._counts[request.slot] < 12
    assert list(drafter.propose([(request, 3)])[0]) == plain.drafts(list(request.token_ids), 3)


# -- what is refused ---------------------------------------------------------------------------------------------------


def spoilt(folder: Path, target: NetworkConfig, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> Path:
    write_layer(folder, target)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tapping(*taps: int) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps)}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, config: tensors.pop("fc.weight"), r"lacks 'fc.weight' \(1 tensors in all\)"),
        (lambda tensors, config: tensors.pop("d2t"), "lacks 'd2t', the token ids of its 90 rows"),
        (lambda tensors, config: tensors["d2t"].add_(100), "d2t must give ascending token ids below 131"),
        (lambda tensors, config: tensors.update({"midlayer.x": torch.zeros(2)}), "has 'x', which EAGLE-3 has not"),
        (lambda tensors, config: tensors.pop("lm_head.weight"), "lacks 'lm_head.weight', and the model's has another"),
        (
            lambda tensors, config: tensors.update({"midlayer.self_attn.q_proj.weight": torch.zeros(64, 72)}),
            r"q_proj.weight has shape \[64, 72\], and this model needs \[64, 144\]",
        ),
        (lambda tensors, config: config.update(architectures=["LlamaForCausalLM"]), "is not EAGLE-3's"),
        (lambda tensors, config: config.update(vocab_size=64), "vocab_size is 64, and the model has 131 tokens"),
        (lambda tensors, config: config.update(target_hidden_size=8), "is 8, and the model's hidden size 72"),
        (lambda tensors, config: config.update(draft_vocab_size=0), "whole number from 1 to 131, got 0"),
        (lambda tensors, config: config.update(fc_norm=True), "fc_norm is set, which is not supported"),
        (lambda tensors, config: config.update(tapping(2, 3)), "layers of the model, which has 3; got"),
        (lambda tensors, config: config.update(eagle_config={}), "needs a model of at least 4 layers; this one has 3"),
    ],
)
def test_files_that_do_not_fit_are_refused(change: Any, message: str, models: Models, tmp_path: Path) -> None:
    target = read_config(models.model_dir("llama"))
    with pytest.raises(ModelLoadError, match=message):
        load_eagle3(spoilt(tmp_path / "layer", target, change), target, torch.float32, NATIVE)


def test_taps_follow_both_conventions(models: Models, tmp_path: Path) -> None:
    target = dataclasses.replace(read_config(models.model_dir("llama")), num_hidden_layers=32)
    found = {
        taps: read_eagle3_config(write_layer(tmp_path / str(taps), target, taps=taps), target).taps
        for taps in ((2, 16, 29), (1, 15, 28), ())
    }
    assert set(found.values()) == {(2, 16, 29)}


def test_files_elsewhere_and_other_kernels_are_refused(models: Models, tmp_path: Path) -> None:
    target = read_config(models.model_dir("llama"))
    layer = write_layer(tmp_path / "layer", target)
    with pytest.raises(ModelLoadError, match="is a file; give the directory of an EAGLE-3 draft"):
        load_eagle3(Path(__file__), target, torch.float32, NATIVE)
    with pytest.raises(ConfigError, match="eagle3 runs on the native CPU kernels, and torch runs this model"):
        models.llm("llama", "torch", "float32", num_kv_blocks=20, speculative_config=asked_of(layer))
    (layer / "model.safetensors").rename(layer / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="has its weights only as pickle"):
        models.llm("llama", "auto", "float32", num_kv_blocks=20, speculative_config=asked_of(layer))


# -- the test can fail -------------------------------------------------------------------------------------------------


def taps_in_another_order(patch: pytest.MonkeyPatch) -> None:
    record = native_runner._record
    patch.setattr(native_runner, "_record", lambda model, recorder, taps: record(model, recorder, sorted(taps)))


def taps_a_layer_later(patch: pytest.MonkeyPatch) -> None:
    record = native_runner._record
    patch.setattr(
        native_runner, "_record", lambda model, recorder, taps: record(model, recorder, [min(2, t + 1) for t in taps])
    )


def tokens_are_not_shifted(patch: pytest.MonkeyPatch) -> None:
    batch = Eagle3Drafter._batch

    def wrong(
        self: Eagle3Drafter, slots: Any, tables: Any, cu_seqlens: Any, positions: Any, rows: Any, ends: Any
    ) -> Any:
        found = batch(self, slots, tables, cu_seqlens, positions, rows, ends)
        found.token_ids = self._tokens[slots[rows], positions]
        return found

    patch.setattr(Eagle3Drafter, "_batch", wrong)


def ids_are_rows_of_the_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eagle3, "_target_ids", lambda files, config, folder: np.arange(90, dtype=np.int32))


def kv_of_drafts_is_kept(patch: pytest.MonkeyPatch) -> None:
    one_pass = Eagle3Drafter._pass

    def wrong(self: Eagle3Drafter, requests: Any, number: int, features: Any) -> Any:
        for request in requests:
            self._counts[request.slot] = len(request.token_ids) - 1 + number
        return one_pass(self, requests, number, features)

    patch.setattr(Eagle3Drafter, "_pass", wrong)


def states_of_rejected_drafts_count(patch: pytest.MonkeyPatch) -> None:
    right = Chunk.num_accepted

    def wrong(self: Chunk, tokens: Any) -> int:
        return len(self.drafts) if inspect.stack()[1].function == "_keep" else right(self, tokens)

    patch.setattr(Chunk, "num_accepted", wrong)


def prompts_are_left_out(patch: pytest.MonkeyPatch) -> None:
    compute = Eagle3Drafter._compute

    def wrong(self: Eagle3Drafter, parts: Any, samples: bool = False) -> Any:
        if samples:
            return compute(self, parts, samples)
        for part in parts:
            self._counts[part.slot] = part.end
        return None

    patch.setattr(Eagle3Drafter, "_compute", wrong)


PLANTED = (
    taps_in_another_order,
    taps_a_layer_later,
    tokens_are_not_shifted,
    ids_are_rows_of_the_head,
    kv_of_drafts_is_kept,
    states_of_rejected_drafts_count,
    prompts_are_left_out,
)


@pytest.mark.planted("test_each_draft_is_that_of_plain_torch")
@pytest.mark.parametrize("plant", one_in(4, PLANTED))
def test_a_planted_bug_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    wrong, _ = differences(models, tmp_path)
    assert wrong > 3
