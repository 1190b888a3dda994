"""The bundled model's Medusa heads: small, made by the command in the repository, and right often enough to help."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chairlift import LLM, SamplingParams
from chairlift.errors import ConfigError
from chairlift.scheduler.drafts import Drafts
from chairlift.spec_decode.adaptive import AdaptiveSpeculator
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels
from tools.guide import read_guide
from tools.train_bundled_heads import FILES, HEADS_DIR, train_heads

pytestmark = needs_kernels


def test_they_are_small() -> None:
    assert {path.name for path in HEADS_DIR.iterdir()} == set(FILES)
    assert sum(path.stat().st_size for path in HEADS_DIR.iterdir()) <= 3_000_000


def test_drafts_are_often_right_and_change_no_answer() -> None:
    questions = [entry.held_back[0] for entry in read_guide() if entry.held_back][::8]
    chats = [[{"role": "user", "content": text}] for text in questions]
    params = SamplingParams(temperature=0.0, max_tokens=60)
    plain = LLM(num_kv_blocks=200).chat(chats, params)
    llm = LLM(num_kv_blocks=200, speculative_config={"method": "medusa"})
    drafts = _drafts_are_free(llm)
    drafted = llm.chat(chats, params)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert 1 + drafts.num_accepted / drafts.num_verified > 1.7, "tokens of a row with drafts in a step"


def _drafts_are_free(llm: LLM) -> Drafts:
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and isinstance(drafts.speculator, AdaptiveSpeculator)
    drafts.speculator._seconds = lambda step: 1.0
    drafts.speculator._proposer.seconds = lambda num_rows: 0.0  # type: ignore[method-assign, union-attr]
    return drafts


def test_other_models_have_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"medusa needs model.*only the bundled model comes with heads"):
        LLM(tiny_hf_model(tmp_path, "llama"), skip_tokenizer_init=True, speculative_config={"method": "medusa"})


@pytest.mark.nightly
def test_the_same_commands_make_the_same_heads(tmp_path: Path) -> None:
    few = ("training.steps=4", "training.warmup_steps=1", "checkpoints.every=2")
    folders = [train_heads(tmp_path / name, few, count=60) for name in ("first", "again")]
    weights = [load_file(folder / FILES[1]) for folder in folders if folder is not None]
    assert len(weights) == 2 and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
