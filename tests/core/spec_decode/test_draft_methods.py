"""A drafter is a module and a line in the table of methods: a made-up one works, and the loader does not know it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chairlift import LLM, ConfigError, SamplingParams
from chairlift.base.draft_methods import DRAFT_METHODS, DraftMethod
from chairlift.config import SpeculativeConfig
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator
from tests.core.spec_decode.parrot import Parrot
from tests.kernels.cpu.models import tiny_model
from tests.native import needs_kernels

PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFT_METHODS, "parrot", DraftMethod("tests.core.spec_decode.parrot", "list of tokens"))


@needs_kernels
@pytest.mark.usefixtures("registered")
def test_a_new_drafter_is_a_module_and_a_line(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    settings = {"dtype": "float32", "num_kv_blocks": 40, "threads": 1, "skip_tokenizer_init": True}
    tokens = list(LLM(model, **settings).generate([PROMPT], PARAMS)[0].outputs[0].token_ids)
    (tmp_path / "known").mkdir()
    wrong = [1 + token % 90 for token in tokens[12:]]
    (tmp_path / "known" / "tokens.json").write_text(json.dumps([*PROMPT, *tokens[:12], *wrong]))
    asked = {"method": "parrot", "model": str(tmp_path / "known"), "num_speculative_tokens": 3}
    llm = LLM(model, speculative_config=asked, **settings)
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and isinstance(drafts.speculator, AdaptiveSpeculator)
    parrot = drafts.speculator._proposer
    assert isinstance(parrot, Parrot) and llm.info.num_speculative_tokens == 3
    drafts.speculator._seconds, drafts.speculator.reach = lambda step: 1.0, drafts.speculator.most
    assert list(llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids) == tokens
    assert drafts.num_drafts > drafts.num_accepted > 6 and parrot.num_seen >= len(tokens)


@pytest.mark.usefixtures("registered")
def test_a_new_method_is_a_value_of_the_setting() -> None:
    assert SpeculativeConfig.parse({"method": "parrot", "model": "x"}).method == "parrot"
    with pytest.raises(ConfigError, match="parrot needs model, the directory or name of the list of tokens; got"):
        SpeculativeConfig.parse({"method": "parrot"})
    with pytest.raises(
        ConfigError, match="method must be ngram, suffix, draft_model, medusa, eagle3, mtp or parrot, got 'x'"
    ):
        SpeculativeConfig.parse({"method": "x"})
