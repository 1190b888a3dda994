"""The bundled model's Medusa heads and EAGLE-3 layer: small, made by the command in the repository, and right often
enough to help."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chairlift import LLM, SamplingParams
from chairlift.core.scheduler.drafts import Drafts
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator
from chairlift.errors import ConfigError
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels
from tools.guide import read_guide
from tools.train_bundled_heads import FILES, HEADS_DIR, LAYER_DIR, LAYER_FILES, train_heads

pytestmark = needs_kernels


@pytest.mark.parametrize(("folder", "files"), [(HEADS_DIR, FILES), (LAYER_DIR, LAYER_FILES)])
def test_the_bundled_heads_are_small(folder: Path, files: tuple[str, ...]) -> None:
    assert {path.name for path in folder.iterdir()} == set(files)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_000_000


@pytest.mark.parametrize(("method", "least"), [("medusa", 1.7), ("eagle3", 2.7)])
def test_drafts_are_often_right_and_change_no_answer(method: str, least: float) -> None:
    questions = [entry.held_back[0] for entry in read_guide() if entry.held_back][::8]
    chats = [[{"role": "user", "content": text}] for text in questions]
    params = SamplingParams(temperature=0.0, max_tokens=60)
    plain = LLM(num_kv_blocks=200).chat(chats, params)
    llm = LLM(num_kv_blocks=200, speculative_config={"method": method})
    drafts = _drafts_are_free(llm)
    drafted = llm.chat(chats, params)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert 1 + drafts.num_accepted / drafts.num_verified > least, "tokens of a row with drafts in a step"


def _drafts_are_free(llm: LLM) -> Drafts:
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and isinstance(drafts.speculator, AdaptiveSpeculator)
    drafts.speculator._seconds, drafts.speculator.reach = lambda step: 1.0, drafts.speculator.most
    drafts.speculator._proposer.seconds = lambda num_rows: 0.0  # type: ignore[method-assign, union-attr]
    return drafts


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_models_other_than_the_bundled_one_have_no_heads(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{method} needs model.*only the bundled model comes with heads"):
        LLM(tiny_hf_model(tmp_path, "llama"), skip_tokenizer_init=True, speculative_config={"method": method})


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "name"), [("medusa", FILES[1]), ("eagle3", LAYER_FILES[1])])
def test_the_same_commands_make_the_same_heads(method: str, name: str, tmp_path: Path) -> None:
    few = ("training.steps=4", "training.warmup_steps=1", "checkpoints.every=2")
    folders = [train_heads(tmp_path / work, few, count=60, method=method) for work in ("first", "again")]
    weights = [load_file(folder / name) for folder in folders if folder is not None]
    assert len(weights) == 2 and all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
