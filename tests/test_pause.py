"""An LLM that another thread pauses: its call waits, and goes on with the same tokens, or ends with those it has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from chairlift import LLM, ConfigError, SamplingParams
from chairlift.base.outputs import RequestOutput

PARAMS = SamplingParams(max_tokens=3000, ignore_eos=True, seed=3)
PROMPT = list(range(40, 80))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("hashlm", max_model_len=32768)


@pytest.fixture
def call(llm: LLM) -> Iterator[Future[list[RequestOutput]]]:
    """A call in another thread, which has begun."""
    began = threading.Event()
    llm.engine.core.events.subscribe("this test", Begin(began))
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(llm.generate, [PROMPT], PARAMS)
        assert began.wait(60)
        yield job
        llm.resume_generation()
    llm.engine.core.events.unsubscribe("this test")


class Begin:
    """Sets an event when a step was scheduled."""

    def __init__(self, began: threading.Event) -> None:
        self._began = began

    def scheduled(self, *_: object) -> None:
        self._began.set()


def test_a_paused_call_goes_on_with_the_same_tokens(llm: LLM, call: Future[list[RequestOutput]]) -> None:
    llm.pause_generation()
    assert llm.is_paused() and not call.done()
    known = llm.engine.core.stats().num_steps
    llm.reset_prefix_cache(recompute=True)
    assert llm.engine.core.stats().num_steps == known
    llm.resume_generation()
    (found,) = call.result(60)
    assert found.outputs[0].token_ids == llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids


def test_an_abort_returns_what_there_is(llm: LLM, call: Future[list[RequestOutput]]) -> None:
    llm.pause_generation("abort")
    (found,) = call.result(60)
    answer = found.outputs[0]
    assert answer.finish_reason == "abort" and 0 < len(answer.token_ids) < 3000
    llm.resume_generation()
    assert llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids[: len(answer.token_ids)] == answer.token_ids


def test_another_mode_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="got 'wait'"):
        llm.pause_generation("wait")  # type: ignore[arg-type]
