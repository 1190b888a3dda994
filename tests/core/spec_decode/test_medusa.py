"""Medusa heads: answers are those without, heads are read as published, and each guesses the token of its place.

What heads guess is compared with plain torch, given the hidden states that transformers computes.
"""

from __future__ import annotations

import collections
import inspect
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from chairlift import LLM, SamplingParams
from chairlift.core.scheduler.output import Chunk
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.executor.drafters.medusa import MedusaHeads, load_medusa
from chairlift.kernels.cpu.library import supported_isas
from chairlift.kernels.weights import NATIVE
from tests.core.spec_decode.test_equivalence import Models, compare, draw_jobs, draw_settings
from tests.equivalence.cases import Job, longest, run
from tests.equivalence.test_determinism import WITHOUT_STATES
from tests.kernels.cpu.models import VOCAB
from tests.native import needs_kernels
from tests.sweep import sweep

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def write_heads(
    folder: Path,
    hidden: int,
    *,
    count: int = 3,
    layers: int = 1,
    seed: int = 0,
    std: float = 0.25,
    shared: bool = False,
) -> Path:
    """Heads of random weights, in Medusa's files. ``shared``: they use the model's output head."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for head in range(count):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(hidden, hidden) * std
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(hidden) * std
        if not shared:
            tensors[f"{head}.{layers}.weight"] = torch.randn(VOCAB, hidden) * std
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    said = {"medusa_num_heads": count, "medusa_num_layers": layers, "base_model_name_or_path": "x", "version": "2"}
    said |= {"original_lm_head": True} if shared else {}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def hidden_size(model_dir: Path) -> int:
    config = json.loads((model_dir / "config.json").read_text())
    size: int = config.get("hidden_size", config.get("n_embd"))
    return size


def asked_of(heads: Path, most: int = 8) -> dict[str, Any]:
    return {"method": "medusa", "model": str(heads), "num_speculative_tokens": most}


def drafts_are_free(llm: LLM) -> MedusaHeads:
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and isinstance(drafts.speculator, AdaptiveSpeculator)
    heads = drafts.speculator._proposer
    assert isinstance(heads, MedusaHeads)
    drafts.speculator._seconds, drafts.speculator.reach = lambda step: 1.0, drafts.speculator.most
    heads.seconds = lambda num_rows: 0.0  # type: ignore[method-assign]
    return heads


def check(models: Models, seed: int) -> collections.Counter[str]:
    rng = random.Random(seed)
    model, dtype, settings = rng.choice(WITHOUT_STATES), rng.choice(("bfloat16", "float32")), draw_settings(rng)
    settings["num_lookahead_steps"] = None
    isa, where = rng.choice(supported_isas()), models.model_dir(model)
    sizes: dict[str, Any] = {"count": rng.randint(1, 4), "layers": rng.randint(1, 2), "shared": rng.random() < 0.5}
    heads = write_heads(where.parent / f"medusa-{seed}", hidden_size(where), seed=seed, **sizes)
    jobs = draw_jobs(rng, repetitive=True)
    expected = [run(models.alone(model, isa, dtype), [job])[0] for job in jobs]
    most = -(-longest(jobs) // settings["block_size"]) * max(job.params.n for job in jobs)
    blocks = most + 2 if rng.random() < 0.5 else len(jobs) * most + 2
    asked = asked_of(heads, rng.randint(1, 8))
    llm = models.llm(model, isa, dtype, num_kv_blocks=blocks, speculative_config=asked, **settings)
    drafts_are_free(llm)
    outputs = run(llm, jobs, rng.choice(("together", "staggered")), preempting=rng.random() < 0.4, seed=seed)
    compare(expected, outputs, jobs, (model, dtype, isa, settings))
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None
    return collections.Counter(accepted=drafts.num_accepted, drafted=drafts.num_drafts)


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.nightly)])
def test_medusa_changes_no_bit(count: int, models: Models, request: pytest.FixtureRequest) -> None:
    seen: collections.Counter[str] = collections.Counter()
    sweep(request, count, lambda seed: seen.update(check(models, seed)))
    if request.config.getoption("--seeds") is None:
        assert seen["accepted"] > count and seen["drafted"] > 10 * count, seen


def guesses(
    models: Models, tmp_path: Path, temperature: float, shared: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """(drafts of the heads for several requests, drafts of plain torch from the hidden states of transformers)."""
    where = models.model_dir("llama")
    width = hidden_size(where)
    heads = write_heads(tmp_path / "heads", width, count=4, layers=2, std=0.5, shared=shared)
    settings = {"num_kv_blocks": 120, "threads": 1, "speculative_config": asked_of(heads), "max_num_batched_tokens": 33}
    llm = models.llm("llama", "auto", "float32", **settings)
    drafter = drafts_are_free(llm)
    propose, made = drafter.propose, list[tuple[list[int], list[int]]]()

    def noted(rows: Any) -> Any:
        found = propose(rows)
        made.extend((list(request.token_ids), list(drafts)) for (request, _), drafts in zip(rows, found, strict=True))
        return found

    drafter.propose = noted  # type: ignore[method-assign]
    params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True)
    run(llm, [Job([random.Random(i).randrange(2, VOCAB) for _ in range(20 + 17 * i)], params) for i in range(4)])
    weights, model = load_file(heads / "medusa_lm_head.safetensors"), _hf(where)
    wanted = []
    for tokens, drafts in made:
        with torch.inference_mode():
            state = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
            right = []
            for head in range(len(drafts)):
                x = state
                for layer in range(2):
                    weight, bias = (weights[f"{head}.{layer}.linear.{part}"] for part in ("weight", "bias"))
                    x = x + torch.nn.functional.silu(weight @ x + bias)
                matrix = model.lm_head.weight if shared else weights[f"{head}.2.weight"]
                right.append(int((matrix @ x).argmax()))
        wanted.append(right)
    return [drafts for _, drafts in made], wanted


def _hf(where: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)


@pytest.mark.parametrize("shared", [False, True])
def test_each_head_guesses_the_token_of_its_place(shared: bool, models: Models, tmp_path: Path) -> None:
    drafts, wanted = guesses(models, tmp_path, temperature=0.0, shared=shared)
    assert len(drafts) > 30 and max(map(len, drafts)) == 4
    assert sum(one != other for one, other in zip(drafts, wanted, strict=True)) <= 1  # a near tie


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("isa", supported_isas())
def test_the_blocks_compute_what_plain_torch_does(
    dtype: str, off: float, isa: str, models: Models, tmp_path: Path
) -> None:
    width = hidden_size(models.model_dir("llama"))
    heads = write_heads(tmp_path / "heads", width, count=3, layers=2)
    settings = {"num_kv_blocks": 40, "threads": 2, "speculative_config": asked_of(heads), "max_num_seqs": 7}
    drafter = drafts_are_free(models.llm("llama", isa, dtype, **settings))
    weights = load_file(heads / "medusa_lm_head.safetensors")
    kind = getattr(torch, dtype)
    for rows, count in ((1, 3), (7, 2), (3, 1), (1, 3)):
        states = torch.randn(rows, width).to(kind)
        made = drafter._blocks.run(states, count)
        assert made.shape == (count, rows, width) and made.dtype == kind
        alone = torch.cat([drafter._blocks.run(states[row : row + 1], count).clone() for row in range(rows)], 1)
        assert torch.equal(alone, made)
        for head in range(count):
            x = states.float()
            for layer in range(2):
                weight, bias = (weights[f"{head}.{layer}.linear.{part}"] for part in ("weight", "bias"))
                x = x + torch.nn.functional.silu(x @ weight.to(kind).float().T + bias)
            torch.testing.assert_close(made[head].float(), x, rtol=off, atol=off * float(x.abs().max()))


def test_a_row_has_at_most_as_many_drafts_as_heads(models: Models, tmp_path: Path) -> None:
    heads = write_heads(tmp_path / "heads", hidden_size(models.model_dir("llama")), count=3)
    for asked, most in ((8, 3), (2, 2)):
        llm = models.llm("llama", "auto", "float32", num_kv_blocks=40, speculative_config=asked_of(heads, asked))
        speculator = llm.engine.scheduler.drafts.speculator
        assert (speculator.most, speculator._most_proposed) == (asked, most)
        assert llm.info.num_speculative_tokens == most


# -- what is refused ---------------------------------------------------------------------------------------------------


def spoilt(folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> Path:
    write_heads(folder, 64)
    path = folder / "medusa_lm_head.safetensors"
    tensors, config = load_file(path), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, path)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, config: tensors.pop("1.0.linear.bias"), r"lacks '1.0.linear.bias' \(1 tensors in all\)"),
        (lambda tensors, config: tensors.update({"9.1.weight": torch.zeros(2, 2)}), "has '9.1.weight', which Medusa"),
        (
            lambda tensors, config: tensors.update({"0.1.weight": torch.zeros(7, 64)}),
            r"shape \[7, 64\], and this model",
        ),
        (lambda tensors, config: config.pop("medusa_num_heads"), "does not say how many Medusa heads"),
        (lambda tensors, config: config.update(original_lm_head=True), "has '0.1.weight', which Medusa heads have not"),
        (
            lambda tensors, config: config.update(original_lm_head="x"),
            "original_lm_head must be true or false, got 'x'",
        ),
        (
            lambda tensors, config: config.update(medusa_num_layers=0),
            "medusa_num_layers must be .* from 1 to 64, got 0",
        ),
    ],
)
def test_files_that_are_not_heads_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_medusa(spoilt(tmp_path / "heads", change), VOCAB, 64, torch.float32, NATIVE)


def test_pickled_heads_and_other_kernels_are_refused(models: Models, tmp_path: Path) -> None:
    heads = write_heads(tmp_path / "heads", hidden_size(models.model_dir("llama")))
    with pytest.raises(ModelLoadError, match="is a file; give the directory of the Medusa heads"):
        load_medusa(Path(__file__), VOCAB, 64, torch.float32, NATIVE)
    with pytest.raises(ConfigError, match="medusa runs on the native CPU kernels, and torch runs this model"):
        models.llm("llama", "torch", "float32", num_kv_blocks=20, speculative_config=asked_of(heads))
    (heads / "medusa_lm_head.safetensors").rename(heads / "medusa_lm_head.pt")
    with pytest.raises(ModelLoadError, match=r"medusa_lm_head.pt, are pickled"):
        models.llm("llama", "auto", "float32", num_kv_blocks=20, speculative_config=asked_of(heads))


# -- the test can fail -------------------------------------------------------------------------------------------------


def state_of_the_last_sample_position(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Chunk, "num_accepted", _all_but_for_the_brain(Chunk.num_accepted))


def _all_but_for_the_brain(right: Any) -> Any:
    def wrong(self: Chunk, tokens: Any) -> int:
        caller = inspect.stack()[1].function
        return len(self.drafts) if caller == "_places" else right(self, tokens)

    return wrong


def heads_in_another_order(patch: pytest.MonkeyPatch) -> None:
    init = MedusaHeads.__init__
    patch.setattr(MedusaHeads, "__init__", lambda self, heads, *given: init(self, heads[::-1], *given))


def state_before_the_newest(patch: pytest.MonkeyPatch) -> None:
    """Drafts are made from a row's hidden state of the step before the newest one."""
    places, states_at = MedusaHeads._places, MedusaHeads._states_at
    kept: dict[int, torch.Tensor] = {}

    def wrong(self: MedusaHeads, found: Sequence[int]) -> torch.Tensor:
        slots = {place: slot for slot, place in places(self).items()}
        right = states_at(self, found)
        before = [kept.get(slots[place], state) for place, state in zip(found, right, strict=True)]
        kept.update((slots[place], state.clone()) for place, state in zip(found, right, strict=True))
        return torch.stack(before)

    patch.setattr(MedusaHeads, "_states_at", wrong)


@pytest.mark.full
@pytest.mark.planted("test_each_head_guesses_the_token_of_its_place")
@pytest.mark.parametrize("plant", [state_of_the_last_sample_position, heads_in_another_order, state_before_the_newest])
def test_a_planted_bug_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    drafts, wanted = guesses(models, tmp_path, temperature=0.0, shared=plant is heads_in_another_order)
    assert sum(one != other for one, other in zip(drafts, wanted, strict=True)) > 3
