"""New versions of a client's adapter reach the engine between two steps, and answers that have begun keep theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, LoRARequest, RequestOutput, SamplingParams
from tests.lora.test_product import bits
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels
from tests.train.service.compute import calls
from tests.train.service.compute.calls import ADAM, make, round_of

pytestmark = needs_kernels
pytest.importorskip("transformers")


def asked(llm: LLM, version: LoRARequest) -> str:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    return llm.engine.add_request([5, 9, 77, 3], params, lora_request=version, stream=False)


def finished(llm: LLM, *requests: str) -> list[Any]:
    found: dict[str, RequestOutput] = {}
    while len(found) < len(requests):
        found |= {output.request_id: output for output in llm.engine.step() if output.finished}
    return [bits(found[each]) for each in requests]


def check_versions(tmp_path: Path) -> None:
    folder = tiny_hf_model(tmp_path, "llama")
    llm = LLM(folder, dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True, enable_lora=True)
    trainer = calls.trainer(tmp_path)
    make(trainer, "a")

    def published(number: int) -> LoRARequest:
        trainer.save("a", tmp_path / f"version{number}", optimizer=False)
        return LoRARequest(f"a:{number}", number, tmp_path / f"version{number}")

    first = published(1)
    (alone,) = finished(llm, asked(llm, first))
    running = asked(llm, first)
    for _ in range(3):
        llm.engine.step()
    trainer.forward_backward(round_of("a", 0))
    trainer.optim_step("a", ADAM)
    second = published(2)
    assert llm.remove_lora(1), "the first version is not known"  # it leaves memory after its last answer
    late = asked(llm, second)
    old, new = finished(llm, running, late)
    assert old == alone, "an answer that had begun changed its version"
    assert new != alone, "the new version is not used"
    assert finished(llm, asked(llm, second)) == [new], "it had parts of the other version"
    assert len(llm.engine.core.preparers.adapters.resident) == 1
    llm.engine.check_invariants()


def test_answers_keep_their_version_and_later_requests_have_the_next(tmp_path: Path) -> None:
    check_versions(tmp_path)


@pytest.mark.planted("test_answers_keep_their_version_and_later_requests_have_the_next")
def test_a_version_that_is_saved_late_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second version has the weights from before the step."""
    monkeypatch.setattr(calls.AdapterTrainer, "optim_step", lambda self, model_id, adam: {})
    with pytest.raises(AssertionError, match="the new version is not used"):
        check_versions(tmp_path)
