"""The engine in a process of its own: exact answers, cancellation in every state, death and return."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from chairlift.base.outputs import FinishReason, OutputKind, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.async_engine import AsyncEngine, EngineState
from chairlift.engine.output_stream import OutputStream
from chairlift.errors import (
    ConfigError,
    EngineDeadError,
    ModelLoadError,
    OverloadedError,
    PromptTooLongError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
)
from chairlift.loading.model import read_tokenizer
from tests.e2e.oracle import expected_hashlm

LONG = SamplingParams(max_tokens=3000, ignore_eos=True, seed=1)


def config(model: str = "hashlm", **settings: Any) -> EngineConfig:
    return EngineConfig.from_flat({"model": model, "max_num_seqs": 8, "num_kv_blocks": 2000} | settings)


@asynccontextmanager
async def running(
    model: str = "hashlm", more: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine.start(config(model, **(more or {})), read_tokenizer=read_tokenizer, **settings)
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.shutdown()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 180)

    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(bounded())


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams, kind: OutputKind) -> list[RequestOutput]:
    return [output async for output in await engine.submit(prompt, params, kind=kind)]


async def quiet(engine: AsyncEngine) -> None:
    """Until the engine holds nothing."""
    while engine.stats.engine.used_blocks or engine.stats.engine.num_running or engine.stats.engine.num_waiting:
        await asyncio.sleep(0.005)


def test_answers_are_those_of_a_request_alone_whatever_is_delivered() -> None:
    async def test() -> None:
        async with running() as engine:
            jobs, wanted = [], []
            for i in range(30):
                params = SamplingParams(n=1 + i % 3, seed=i, max_tokens=20 + i, temperature=0.5 * (i % 3))
                prompt = list(range(1, 5 + 3 * (i % 7)))
                kind = list(OutputKind)[i % 3]
                jobs.append(collect(engine, prompt, params, kind))
                wanted.append((kind, [expected_hashlm(prompt, params, index) for index in range(params.n)]))
            for (kind, expected), outputs in zip(wanted, await asyncio.gather(*jobs), strict=True):
                for index, one in enumerate(expected):
                    mine = [o for output in outputs for o in output.outputs if o.index == index]
                    if kind is OutputKind.DELTA:
                        assert [t for o in mine for t in o.token_ids] == one.token_ids
                        assert "".join(o.text for o in mine) == one.text
                        assert [o.finish_reason for o in mine if o.finish_reason] == [one.finish_reason]
                    else:
                        assert (mine[-1].token_ids, mine[-1].text) == (one.token_ids, one.text)
                        assert mine[-1].finish_reason == one.finish_reason
                assert outputs[-1].finished and not any(output.finished for output in outputs[:-1])
            await quiet(engine)
            assert engine.num_requests == engine.num_queued == engine.intake.num_tokens == 0
            assert sum(engine.stats.finished.values()) == 30 and engine.stats.ttft.total > 0

    run(test)


def test_a_stop_string_ends_the_text_and_the_engine_hears_of_it() -> None:
    async def test() -> None:
        async with running() as engine:
            plain = (await collect(engine, "abc", LONG, OutputKind.FINAL))[0].outputs[0].text
            stop = plain[40:43]
            params = SamplingParams(max_tokens=3000, ignore_eos=True, seed=1, stop=[stop])
            for kind in OutputKind:
                outputs = await collect(engine, "abc", params, kind)
                texts = [output.outputs[0].text for output in outputs]
                text = "".join(texts) if kind is OutputKind.DELTA else texts[-1]
                assert text == plain[: plain.index(stop)]
                assert outputs[-1].outputs[0].finish_reason is FinishReason.STOP
                assert outputs[-1].outputs[0].stop_reason == stop
            await quiet(engine)

    run(test)


@pytest.mark.parametrize("state", ["queued", "running", "half read", "finished"])
def test_a_cancelled_request_leaves_nothing_behind(state: str) -> None:
    async def test() -> None:
        async with running("hashlm:2ms", {"max_num_seqs": 2}) as engine:
            others = [await engine.submit("x", LONG) for _ in range(2)] if state == "queued" else []
            short = SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
            stream = await engine.submit("abc", short if state == "finished" else LONG)
            neighbour = asyncio.create_task(collect(engine, "abc", short, OutputKind.FINAL))
            if state in ("half read", "finished"):
                async for output in stream:
                    if output.finished or state == "half read":
                        break
            elif state == "running":
                while stream.request_id in engine.intake:
                    await asyncio.sleep(0.001)
            stream.abort()
            stream.abort()
            assert [output async for output in stream] == []
            for other in others:
                await other.aclose()
            answer = (await neighbour)[0].outputs[0]
            assert answer.token_ids == expected_hashlm(list(b"abc"), short, 0).token_ids
            await quiet(engine)
            assert engine.num_requests == 0

    run(test)


def test_a_prompt_that_cannot_be_served_is_refused_with_both_numbers() -> None:
    async def test() -> None:
        async with running(more={"num_kv_blocks": 10}) as engine:
            for prompt in ("a" * 10**6, {"prompt": "a" * 10**6}):  # not tokenized, which would stop everybody
                with pytest.raises(PromptTooLongError, match="the text has 1,000,000 characters"):
                    await engine.submit(prompt, LONG)
            with pytest.raises(PromptTooLongError, match=r"500 .*144"):
                await engine.submit([1] * 500, SamplingParams())
            with pytest.raises(RequestError, match="empty"):
                await engine.submit("", SamplingParams())
            assert engine.num_requests == 0

    run(test)


class Noting:
    """Notes the ids that are reported, in order."""

    def __init__(self) -> None:
        self.began_with: list[OutputStream] = []
        self.ended_with: list[tuple[OutputStream, FinishReason | None]] = []

    def began(self, stream: OutputStream) -> None:
        self.began_with.append(stream)

    def ended(self, stream: OutputStream, cut_off: FinishReason | None, now: float) -> None:
        self.ended_with.append((stream, cut_off))


def test_the_queue_is_bounded_and_its_timeout_is_kept() -> None:
    async def test() -> None:
        async with running("hashlm:5ms", {"max_num_seqs": 1}, max_queued_requests=2) as engine:
            told = Noting()
            engine.events.subscribe("test", told)
            first = await engine.submit("a", LONG)
            await anext(first)
            waiting = [await engine.submit("b", LONG, name="mine", queue_timeout=patience) for patience in (0.05, None)]
            assert engine.named("mine") == waiting and engine.requests() == [first, *waiting]
            with pytest.raises(QueueFullError) as full:
                await engine.submit("d", LONG)
            assert 1 <= full.value.retry_after <= 60
            with pytest.raises(QueueTimeoutError):
                await anext(waiting[0])
            assert engine.stats.rejected == {"queue_requests": 1, "queue_timeout": 1}
            again = await engine.submit("d", LONG, timeout=0.05)
            with pytest.raises(OverloadedError, match="not finished in time"):
                await anext(again)
            late = await engine.submit("e", LONG, timeout=60, arrival=time.monotonic() - 60)  # it has had its time
            with pytest.raises(OverloadedError, match="not finished in time"):
                await anext(late)
            for stream in (first, waiting[1]):
                stream.abort()
            await quiet(engine)
            assert told.began_with == [first, *waiting, again, late] and engine.named("mine") == []
            error, abort = FinishReason.ERROR, FinishReason.ABORT
            ended = [(waiting[0], error), (again, error), (late, error), (first, abort), (waiting[1], abort)]
            assert told.ended_with == ended
            short = SamplingParams(max_tokens=1, ignore_eos=True, seed=1)
            await collect(engine, "abc", short, OutputKind.FINAL)
            assert told.ended_with[-1] == (told.began_with[-1], None)

    run(test)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_engine_process_is_reported_and_started_again(how: signal.Signals) -> None:
    async def test() -> None:
        async with running("hashlm:2ms") as engine:
            streams = [await engine.submit("a", LONG) for _ in range(10)]
            await anext(streams[0])
            assert engine.stats.engine.num_running
            before = engine.replicas.engine_pid
            assert before is not None
            os.kill(before, how)
            for stream in streams:
                with pytest.raises(EngineDeadError, match=how.name) as told:
                    async for _ in stream:
                        pass
                assert told.value.taken
            assert engine.stats.finished == {"error": 10}
            assert engine.state is not EngineState.READY and engine.check_health()
            assert engine.stats.engine.num_running == engine.stats.num_restarts == 0
            with pytest.raises(EngineDeadError) as refused:
                await engine.submit("a", LONG)
            assert not refused.value.taken
            while engine.state is not EngineState.READY:
                await asyncio.sleep(0.01)
            assert engine.replicas.engine_pid != before and engine.stats.num_restarts == 1 and not engine.check_health()
            short = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
            answer = (await collect(engine, "abc", short, OutputKind.FINAL))[0].outputs[0]
            assert answer.token_ids == expected_hashlm(list(b"abc"), short, 0).token_ids

    run(test)


def test_without_restart_the_engine_stays_down() -> None:
    async def test() -> None:
        async with running(restart=False) as engine:
            os.kill(engine.replicas.engine_pid or 0, signal.SIGKILL)
            await engine.stopped.wait()
            assert engine.state is EngineState.STOPPED and "SIGKILL" in engine.failure

    run(test)


def test_a_process_that_hangs_is_noticed() -> None:
    async def test() -> None:
        async with running("hashlm:2ms", health_timeout=0.1) as engine:
            stream = await engine.submit("a", LONG)
            await anext(stream)
            while engine.check_health():  # on a busy machine a step may take longer than that
                await anext(stream)
            os.kill(engine.replicas.engine_pid or 0, signal.SIGSTOP)
            while not engine.check_health():
                await asyncio.sleep(0.01)
            assert "has not finished a step" in engine.check_health()
            os.kill(engine.replicas.engine_pid or 0, signal.SIGCONT)
            while engine.check_health():
                await asyncio.sleep(0.01)
            stream.abort()

    run(test)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "settings"), [(ModelLoadError, {}), (ConfigError, {"device": "cuda"})])
def test_a_model_that_cannot_be_loaded_is_an_error_of_its_kind(
    kind: type[Exception], settings: dict[str, Any], tmp_path: Path
) -> None:
    async def test() -> None:
        model = str(tmp_path) if kind is ModelLoadError else "bundled"
        engine = AsyncEngine.start(config(model, **settings), read_tokenizer=read_tokenizer)
        with pytest.raises(kind):
            await engine.wait_ready()
        assert engine.state is EngineState.STOPPED and engine.failure
        with pytest.raises(EngineDeadError):
            engine.check_room()
        await engine.shutdown()

    run(test)


def test_a_connection_that_breaks_the_frame_format_is_closed() -> None:
    async def test() -> None:
        from chairlift.engine.process import process_client

        class Client:
            num_lost = 0

            def lost(self) -> None:
                self.num_lost += 1

            def take(self, message: Any) -> None:
                raise AssertionError

        class Transport(asyncio.Transport):
            aborted = False

            def abort(self) -> None:
                self.aborted = True

        client, transport = Client(), Transport()
        stream = process_client._Stream(client)  # type: ignore[arg-type]
        stream.connection_made(transport)
        stream.data_received(b"\xff\xff\xff\xff")
        stream.connection_lost(None)
        assert transport.aborted and client.num_lost == 1

    run(test)


@pytest.mark.full
def test_the_engine_starts_again_where_no_temporary_file_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or one that became read-only, does not stand in the way of an engine that has to come back."""

    async def test() -> None:
        monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
        async with running() as engine:
            os.kill(engine.replicas.engine_pid or 0, signal.SIGKILL)
            while engine.state is EngineState.READY:
                await asyncio.sleep(0)
            while engine.state is EngineState.DOWN:
                await asyncio.sleep(0.01)
            assert engine.state is EngineState.READY and engine.stats.num_restarts == 1

    run(test)


def test_an_engine_whose_server_has_died_meanwhile_does_not_load() -> None:
    from chairlift.engine.process import process_client
    from chairlift.engine.process.messages import Start, encode

    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(encode(Start(config().to_flat(), 20)))
        with theirs:
            another = [process_client._BOOT, process_client._ROOT, str(os.getppid())]
            assert subprocess.run([sys.executable, "-P", "-c", *another], stdin=theirs, timeout=60).returncode == 1


def test_no_process_is_left_when_the_loop_is_cancelled() -> None:
    pids = []

    async def test() -> None:
        async with running() as engine:
            pids.append(engine.replicas.engine_pid)
            await engine.submit("a", LONG)

    run(test)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_an_engine_that_is_stopped_before_it_has_connected_says_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TOKENIZERS_PARALLELISM", "false"
    )  # or tokenizers says that it was forked, if it has worked here

    async def test() -> None:
        engine = AsyncEngine.start(config(), read_tokenizer=read_tokenizer)
        while engine.replicas.engine_pid is None:
            await asyncio.sleep(0)
        await engine.shutdown()

    run(test)
    assert capfd.readouterr() == ("", "")
