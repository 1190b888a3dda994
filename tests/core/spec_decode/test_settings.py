"""Settings that turn drafts on, refused settings, and steps with drafts in the record, the live view and metrics."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from chairlift import LLM, ConfigError, RequestError, SamplingParams
from chairlift.config import EngineConfig, SpeculativeConfig
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.drafts import Drafts
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator, speculator_from_config
from chairlift.core.spec_decode.ngram import NgramProposer
from chairlift.core.spec_decode.suffix import SuffixProposer
from chairlift.engine.step_recorder import StepRecorder
from chairlift.executor.backends.triton.backend import TritonBackend
from chairlift.executor.select import choose_backend
from chairlift.metrics.prometheus import render
from chairlift.metrics.stats import EngineStats, RequestStats
from tests.executor.test_select import network
from tests.kernels.cpu.models import tiny_model


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "speculative_config is not JSON"),
        ('"ngram"', "must be an object like"),
        ({"method": "ngram", "num_tokens": 3}, r"unknown keys \['num_tokens'\]; known: .*num_speculative_tokens"),
        ({}, "method must be ngram, suffix, draft_model, medusa, eagle3 or mtp, got None"),
        ({"method": "eagle"}, "method must be ngram, suffix, draft_model, medusa, eagle3 or mtp, got 'eagle'"),
        ({"method": "eagle3", "model": 7}, "eagle3 needs model, the .* layer .*got method 'eagle3' and model 7"),
        ({"method": "draft_model"}, "draft_model needs model"),
        ({"method": "ngram", "model": "x"}, "ngram takes no model; got method 'ngram' and model 'x'"),
        ({"method": "draft_model", "model": 7}, "draft_model needs model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be .* from 1 to 64, got 0"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "from 1 to 64, got 65"),
        ({"method": "ngram", "num_speculative_tokens": True}, "from 1 to 64, got True"),
        ({"method": "ngram", "prompt_lookup_min": 17}, "prompt_lookup_min must be .* from 1 to 16, got 17"),
        ({"method": "ngram", "prompt_lookup_min": "3"}, "from 1 to 16, got '3'"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 8}, "max_tree_depth is for method suffix, not ngram"),
        ({"method": "medusa", "prompt_lookup_min": 3}, "prompt_lookup_min is for method ngram and suffix, not medusa"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "must be a number from 0.0 to 1.0, got 1.5"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "from 0 to 1000000, got -1"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse(given)


def test_settings_as_text_and_as_object_are_equal() -> None:
    asked = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2}
    assert SpeculativeConfig.parse(asked) == SpeculativeConfig.parse(json.dumps(asked))
    assert SpeculativeConfig.parse({"method": "ngram"}) == SpeculativeConfig(
        method="ngram", num_speculative_tokens=8, prompt_lookup_min=3
    )


def test_the_settings_reach_the_suffixes() -> None:
    asked = {"method": "suffix", "prompt_lookup_min": 2, "suffix_decoding_max_tree_depth": 9}
    asked |= {"suffix_decoding_max_spec_factor": 2, "suffix_decoding_min_token_prob": 0.25}
    asked |= {"suffix_decoding_max_cached_requests": 5, "num_speculative_tokens": 7}
    config = EngineConfig.from_flat({"speculative_config": json.dumps(asked)}).scheduler
    speculator = speculator_from_config(config, Costs([1]), 0)
    assert speculator is not None and speculator.most == 7
    proposer = speculator._proposer
    assert isinstance(proposer, SuffixProposer)
    found = (proposer._run, proposer._depth, proposer._factor, proposer._least, proposer._max_answers)
    assert found == (2, 9, 2, 0.25, 5)


def test_the_triton_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "why_not", lambda *given: "")
    given = (network(), torch.bfloat16, torch.device("cuda"))
    asked = '{"method": "ngram"}'
    with pytest.raises(ConfigError, match=r"speculative_config is set, but the Triton kernels"):
        choose_backend(EngineConfig.from_flat({"speculative_config": asked}), *given)
    assert (
        choose_backend(EngineConfig.from_flat({"speculative_config": asked, "kernels": "torch"}), *given).kernels
        == "torch"
    )


def drafts_told(stats: RequestStats) -> dict[str, float]:
    """Metrics of drafts under vLLM's prefix; of those by place, the place behind the name."""
    text = render(stats, None, up=True, model_name="m", prefix="vllm", num_waiting=0, now=0.0).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        each.name + each.labels.get("position", ""): each.value
        for each in samples
        if each.name.startswith("vllm:spec_decode") and not each.name.endswith("_created")
    }


def test_metrics_have_the_names_of_vllm_and_go_on_after_a_restart() -> None:
    def counts() -> EngineStats:
        return EngineStats(num_verified_rows=5, num_draft_tokens=20, num_accepted_tokens=7, accepted_at=[4, 3])

    stats = RequestStats()
    assert sum(drafts_told(stats).values()) == 0
    stats.step(counts())
    expected = {
        "vllm:spec_decode_num_drafts_total": 5.0,
        "vllm:spec_decode_num_draft_tokens_total": 20.0,
        "vllm:spec_decode_num_accepted_tokens_total": 7.0,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total0": 4.0,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total1": 3.0,
    }
    assert drafts_told(stats) == expected
    stats.engine_died()
    assert drafts_told(stats) == expected
    stats.step(counts())
    assert drafts_told(stats) == {name: 2 * value for name, value in expected.items()}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


def make(model_dir: Path, **settings: Any) -> LLM:
    return LLM(model_dir, skip_tokenizer_init=True, num_kv_blocks=50, dtype="float32", threads=1, **settings)


PARAMS = SamplingParams(temperature=0.0, allowed_token_ids=[5], max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("asked", [{"method": "ngram"}, '{"method": "ngram"}'])
def test_an_object_or_its_text_turns_drafts_on(model_dir: Path, asked: Any) -> None:
    llm = make(model_dir, speculative_config=asked)
    assert llm.engine.scheduler.drafts is not None
    assert llm.generate([[5] * 9], PARAMS)[0].outputs[0].token_ids == [5] * 20


def test_without_the_setting_only_requests_with_a_prediction_have_drafts(model_dir: Path) -> None:
    llm = make(model_dir)
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and drafts.speculator.only_known and llm.info.speculative_method is None
    assert isinstance(drafts.speculator, AdaptiveSpeculator)
    drafts.speculator._seconds = lambda step: 1.0
    llm.generate([[5] * 9], PARAMS)
    assert not drafts.num_drafts
    expecting = dataclasses.replace(PARAMS, prediction=[5] * 15 + [6, 7])
    without, answer = (output.outputs[0] for output in llm.generate([[5] * 9, [5] * 8], [PARAMS, expecting]))
    assert without.token_ids == answer.token_ids == [5] * 20
    assert not without.accepted_prediction_tokens
    assert answer.accepted_prediction_tokens == drafts.num_accepted >= 14
    assert answer.rejected_prediction_tokens == drafts.num_drafts - drafts.num_accepted >= 2
    assert not drafts._known and not drafts.speculator._texts


def test_a_prediction_that_cannot_be_used_changes_nothing(model_dir: Path) -> None:
    llm = make(model_dir, num_lookahead_steps=1)
    assert llm.engine.scheduler.drafts is None and not llm.info.takes_predictions
    answer = llm.generate([[5] * 9], dataclasses.replace(PARAMS, prediction=[5] * 15))[0].outputs[0]
    assert answer.token_ids == [5] * 20
    assert (answer.accepted_prediction_tokens, answer.rejected_prediction_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("text", "prediction is text, but the tokenizer was not loaded"),
        ([5, 1000], "prediction has token id 1000"),
        ([5] * 1000, "prediction has 1000 tokens, but the model takes"),
        ([-1], "each id in prediction must be between 0"),
        ("\ud800", "prediction has half a surrogate pair"),
        (7, "prediction must be a list of token ids, got 7"),
    ],
)
def test_a_bad_prediction_is_refused(model_dir: Path, given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(model_dir).generate([[5] * 9], SamplingParams(prediction=given))


def test_the_metrics_name_the_method_that_makes_drafts(model_dir: Path) -> None:
    def told(**settings: Any) -> bool:
        info = make(model_dir, **settings).info
        text = render(RequestStats(), info, up=True, model_name="m", prefix="vllm", num_waiting=0, now=0.0).decode()
        return 'method="ngram"' in text and 'num_speculative_tokens="8"' in text

    assert told(speculative_config='{"method": "ngram"}') and not told()


def test_an_empty_prediction_is_none() -> None:
    assert SamplingParams(prediction="").prediction is None and SamplingParams(prediction=[]).prediction is None


def test_the_engines_description_names_the_method(model_dir: Path) -> None:
    info = make(model_dir, speculative_config='{"method": "ngram", "num_speculative_tokens": 5}').info
    assert (info.speculative_method, info.num_speculative_tokens, info.takes_predictions) == ("ngram", 5, True)


def test_a_step_with_drafts_is_recorded_and_seen(model_dir: Path) -> None:
    llm = make(model_dir)
    engine = llm.engine
    scheduler = engine.scheduler
    scheduler.drafts = Drafts(scheduler.batch, speculator := AdaptiveSpeculator(lambda step: 1.0, 4, NgramProposer(2)))
    speculator.reach = 4
    recorder = StepRecorder(engine.core)
    llm.generate([[5] * 9], PARAMS)
    verifies = [record for record in engine.core.step_log if any(chunk.drafts for _, chunk in record.chunks)]
    assert verifies and [row.why for row in verifies[0].rows] == ["verify"]
    assert set(verifies[0].accepted.values()) == {5}  # all four drafts, and the token behind them
    written = [json.loads(line) for line in verifies[0].to_json().splitlines()]
    assert written[0]["chunks"][0][3] == "verify" and list(written[0]["accepted"].values()) == [5]
    lines = [json.loads(line) for line in recorder.take().splitlines()]
    seen = [chunk for line in lines for chunk in line.get("chunks", ()) if chunk[5] == "verify"]
    assert len(seen) == len(verifies) and seen[0][3:5] == [5, 5]  # tokens computed, and tokens it yielded
    assert scheduler.drafts.accepted_at[:1] == [scheduler.drafts.num_verified]


@pytest.mark.parametrize("batching", ["continuous", "static", "dynamic"])
def test_rows_that_have_ended_have_no_drafts(model_dir: Path, batching: str) -> None:
    """Rows of a static batch compute until the batch ends, and nothing would use the tokens of drafts."""
    llm = make(model_dir, batching=batching)
    scheduler = llm.engine.scheduler
    scheduler.drafts = Drafts(scheduler.batch, speculator := AdaptiveSpeculator(lambda step: 1.0, 4, NgramProposer(2)))
    speculator.reach = 4
    short = dataclasses.replace(PARAMS, max_tokens=3)
    outputs = llm.generate([[5] * 9, [5] * 8], [PARAMS, short])
    assert [answer.outputs[0].token_ids for answer in outputs] == [[5] * 20, [5] * 3]
    assert 10 < scheduler.drafts.num_drafts < 22
    held = sum(record.num_held for record in llm.engine.step_log)
    assert bool(held) is (batching == "static")
