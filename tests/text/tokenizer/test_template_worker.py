"""Templates that would take years, or all memory, or the process: the next chat is answered all the same."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from chairlift.errors import OverloadedError, QueueFullError, RequestError, TemplateError, WorkerLostError
from chairlift.text.tokenizer import ChatTemplate
from chairlift.text.tokenizer.template_worker import TemplateWorker
from tests.text.tokenizer.test_chat_template import NAMED, TEMPLATES
from tests.tiers import one_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory limits and /proc need Linux")

HI = [{"role": "user", "content": "Hi"}]
CHATS: list[list[dict[str, str]]] = [
    HI,
    [{"role": "system", "content": "  Be\nbrief. "}, {"role": "user", "content": 'é😀\x00"\\\u2028'}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": " 2 "}, {"role": "user", "content": ""}],
    [{"role": "user", "content": "half \ud83d"}],
]
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BUILD = "{% set ns = namespace(s='xxxxxxxxxxxxxxxx') %}{% for i in range(99) %}"
BOMBS = {
    "nested loops": FOREVER,
    "nested loops of text": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "loops over messages": "{% for a in range(9999) %}{% for b in range(9999) %}{% for m in messages %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "loops that only break inside": "{% for a in range(99999) %}{% for b in range(99999) %}{% if b > 90000 %}"
    "{% break %}{% endif %}{% endfor %}{% endfor %}",
    "repetition of text": "{% set a = 'x' * 9999999 %}{% set b = a * 999999 %}{{ b }}",
    "text below the repetition limit, many times": "{% set ns = namespace(l=[]) %}{% for i in range(99) %}"
    "{% set ns.l = ns.l + ['x' * (16000000 - i)] %}{% endfor %}",
    "repetition of lists": "{% set a = [1] * 16000000 %}{% set b = a + a + a + a + a %}{% set c = b + b + b %}",
    "recursion by a macro": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for x in [[[]]] recursive %}{% for i in range(99999) %}{{ loop.index }}{% endfor %}"
    "{{ loop([[1]] * 99999) }}{% endfor %}",
    "a call block that calls itself": "{% macro f(n) %}{{ caller(n) }}{{ caller(n) }}{% endmacro %}"
    "{% macro g(n) %}{% if n %}{% call(m) f(n) %}{{ g(m - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ g(50) }}",
    "a namespace that doubles": BUILD + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a namespace of lists that doubles": "{% set ns = namespace(s=[1, 2]) %}{% for i in range(99) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "join": BUILD + "{% set ns.s = [ns.s, ns.s, ns.s] | join(ns.s) %}{% endfor %}",
    "replace": BUILD + "{% set ns.s = ns.s | replace('x', 'xxxxxxxx') %}{% endfor %}",
    "replace by method": BUILD + "{% set ns.s = ns.s.replace('x', 'xxxxxxxx') %}{% endfor %}",
    "format with a width": "{{ '%999999999d' | format(1) }}",
    "format by method with a width": "{{ '{:>999999999}'.format('x') }}",
    "center": "{{ 'x' | center(999999999) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "zfill": "{{ 'x'.zfill(999999999) }}",
    "expandtabs": "{{ '\t'.expandtabs(999999999) }}",
    "indent": BUILD + "{% set ns.s = ns.s | replace('x', 'x\n') | indent(9999) %}{% endfor %}",
    "tojson with an indent": "{{ [[[[[[[[1]]]]]]]] | tojson(indent=99999999) }}",
    "batch": "{% for row in range(99999) | batch(99999999, 'x') %}{{ row | length }}{% endfor %}",
    "slice": "{{ range(99999) | slice(99999999) | list | length }}",
    "lists of ranges": "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}"
    "{% set ns.l = ns.l + [range(99999) | list] %}{% endfor %}",
    "sort over and over": "{% for i in range(99999) %}{% set l = range(99999) | sort(reverse=true) %}{% endfor %}",
    "wordwrap": BUILD + "{% set ns.s = (ns.s ~ ' ' ~ ns.s) | wordwrap(1) %}{% endfor %}",
    "quadratic search": "{% set a = 'a' * 8000000 %}{% for i in range(9999) %}"
    "{{ (a ~ 'b').find(a ~ 'c') }}{% endfor %}",
    "macro text that doubles": "{% macro f(s, n) %}{% if n %}{{ f(s ~ s, n - 1) }}{% endif %}{% endmacro %}"
    "{{ f('xxxxxxxx', 99) }}",
    "encode to bytes": BUILD + "{% set ns.s = (ns.s ~ ns.s).encode().hex() %}{% endfor %}",
    "pretty printing": "{% set ns = namespace(l=[1]) %}{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}"
    "{% endfor %}{{ ns.l | pprint }}",
    "nested reference printing": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}"
    "{% endfor %}{{ ns.l }}",
    "huge numbers": "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "constants folded when compiled": "{{ 'x' * 15999999 * 1 ~ 'x' * 15999999 ~ 'y' * 15999999 }}" * 9,
    "a deep include": "{% include ['a', 'b'] %}",
}

PATIENCE = 60.0
"""Seconds that no chat takes that is no bomb, also where others keep the machine busy."""

T = TypeVar("T")


def run(work: Callable[[], Awaitable[T]]) -> T:
    """In a loop of its own; warnings about what was left behind are errors."""

    async def bounded() -> T:
        return await asyncio.wait_for(work(), 2 * PATIENCE)

    return asyncio.run(bounded())


async def answered(worker: TemplateWorker) -> None:
    """The next chat gets its text. (Not compared with a template in this process: compiling folds constants.)"""
    worker._time_limit = PATIENCE
    assert await worker.render(HI, variables={"level": 0}) == "fine"


def guarded(bomb: str) -> str:
    """A template that is a bomb for level 1 only."""
    return "{% if level == 1 %}" + bomb + "{% else %}fine{% endif %}"


def peak(pid: int) -> int:
    """Bytes of address space a process has had at most; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmPeak")), 0)


@pytest.mark.parametrize("name", one_in(3, BOMBS))
def test_a_bomb_harms_only_its_own_request(name: str) -> None:
    assert len(BOMBS) >= 20
    more = 100 << 20

    async def work() -> None:
        worker = TemplateWorker(guarded(BOMBS[name]), NAMED, time_limit=0.5, memory_bytes=more, max_chars=100_000)
        await worker.start()
        start = {pid: peak(pid) for pid in worker.pids}
        processes = list(worker._processes)
        failed = asyncio.ensure_future(worker.render(HI, variables={"level": 1}))
        highest = 0
        while not failed.done():
            await asyncio.wait([failed], timeout=0.01)
            highest = max([highest, *(peak(pid) - start[pid] for pid in worker.pids if pid in start)])
        with pytest.raises((RequestError, TemplateError)) as caught:
            await failed
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1100
        assert highest <= more + (1 << 20)
        await answered(worker)
        await worker.close()
        # Its time was up here, and not only in the kernel, which grants six times as much.
        assert [process._process.returncode for process in processes] != [-signal.SIGXCPU]

    run(work)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_workers_render_as_the_template_in_process_does(name: str) -> None:
    async def work() -> None:
        worker = TemplateWorker(TEMPLATES[name], NAMED, time_limit=PATIENCE)
        plain = ChatTemplate(TEMPLATES[name], NAMED)
        variables: dict[str, Any] = {"enable_thinking": True, "level": 1.5, "date_string": "today", "nothing": None}
        for chat in CHATS:
            for add in (True, False):
                for go_on in (True, False):
                    options: dict[str, Any] = {"add_generation_prompt": add, "continue_final_message": go_on}
                    expected = outcome(lambda: plain.render(chat, **options, **variables))  # noqa: B023
                    try:
                        got: Any = await worker.render(chat, variables=variables, **options)
                    except (RequestError, TemplateError) as error:
                        got = (type(error), str(error))
                    assert got == expected
        await worker.close()

    run(work)


def outcome(call: Callable[[], str]) -> Any:
    try:
        return call()
    except (RequestError, TemplateError) as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("template", "messages", "variables"),
    [
        (None, HI, {}),
        ("{% for %}", HI, {}),
        ("{{ raise_exception('no') }}", HI, {}),
        ("x", [], {}),
        ("x", "Hi", {}),
        ("x", [{"role": "user", "content": [{"type": "image_url"}]}], {}),
        ("x", HI, {"tools": 1}),
        ("x", HI, {"add_generation_prompt": False}),
        ("x", HI, {"list": [1]}),
    ],
)
def test_errors_are_those_of_the_template_in_process(template: str | None, messages: Any, variables: Any) -> None:
    async def work() -> None:
        worker = TemplateWorker(template, time_limit=PATIENCE)
        with pytest.raises((RequestError, TemplateError)) as caught:
            await worker.render(messages, variables=variables)
        await worker.close()
        names = {"tools", "list", "add_generation_prompt"} & set(variables)
        if not names:
            assert (type(caught.value), str(caught.value)) == outcome(lambda: ChatTemplate(template).render(messages))
        else:
            assert type(caught.value) is RequestError and names.pop() in str(caught.value)

    run(work)


def test_a_chat_whose_worker_is_killed_from_outside_is_tried_once_more_and_is_not_to_blame() -> None:
    async def work() -> None:
        source = guarded(FOREVER)
        worker = TemplateWorker(source, NAMED, time_limit=20)
        await answered(worker)
        for _ in range(2):
            bomb = asyncio.ensure_future(worker.render(HI, variables={"level": 1}))
            for _ in range(2):
                busy = await busy_one(worker)
                await answered(worker)
                os.kill(busy, signal.SIGKILL)
                while busy in worker.pids:
                    await asyncio.sleep(0.001)
            with pytest.raises(WorkerLostError, match="from outside"):
                await bomb
            await answered(worker)
        await worker.close()

    run(work)


def test_a_chat_whose_worker_is_killed_once_gets_its_text() -> None:
    async def work() -> None:
        loops = "{% for i in range(level) %}{% for j in range(9999) %}{% endfor %}{% endfor %}fine"
        worker = TemplateWorker(loops, NAMED, time_limit=PATIENCE)
        await answered(worker)
        chat = asyncio.ensure_future(worker.render(HI, variables={"level": 2000}))
        os.kill(await busy_one(worker), signal.SIGKILL)
        assert await chat == "fine"
        await worker.close()

    run(work)


@pytest.mark.full
@pytest.mark.parametrize(
    ("end", "times"),
    [(signal.SIGXCPU, 1), (signal.SIGSEGV, 2), (signal.SIGABRT, 2)],
    ids=["processor time", "no memory", "no memory in C++"],
)
def test_a_worker_that_ends_at_its_own_limits_blames_the_chat(end: signal.Signals, times: int) -> None:
    async def work() -> None:
        worker = TemplateWorker(guarded(FOREVER), NAMED, time_limit=20)
        await answered(worker)
        bomb = asyncio.ensure_future(worker.render(HI, variables={"level": 1}))
        for _ in range(times):
            busy = await busy_one(worker)
            os.kill(busy, end)
            while busy in worker.pids:
                await asyncio.sleep(0.001)
        with pytest.raises(TemplateError, match="fewer or shorter"):
            await bomb
        await worker.close()

    run(work)


async def busy_one(worker: TemplateWorker) -> int:
    """The worker that computes a chat."""
    while len(worker.busy_pids) != 1:
        await asyncio.sleep(0.001)
    (pid,) = worker.busy_pids
    start = ticks(pid)
    while ticks(pid) < start + 10:
        await asyncio.sleep(0.001)
    return pid


def ticks(pid: int) -> int:
    """Hundredths of a second of processor time."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def test_idle_workers_may_be_killed_without_anybody_noticing() -> None:
    async def work() -> None:
        source = guarded("")
        worker = TemplateWorker(source, NAMED)
        for _ in range(3):
            await answered(worker)
            gone = worker.pids
            for pid in gone:
                os.kill(pid, signal.SIGKILL)
            while any(Path(f"/proc/{pid}").exists() for pid in gone):
                await asyncio.sleep(0.001)
            await answered(worker)
        await worker.close()

    run(work)


def test_a_stopped_worker_is_replaced_when_the_time_is_up_and_the_chat_is_not_to_blame() -> None:
    async def work() -> None:
        source = guarded("")
        worker = TemplateWorker(source, NAMED, time_limit=0.03)
        await worker.start()
        stopped = worker.pids
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        long = [{"role": "user", "content": "x" * 3_000_000}]  # more than a pipe holds: the writer waits as well
        with pytest.raises(OverloadedError, match="too busy"):
            await worker.render(long)
        await answered(worker)
        while set(stopped) & set(worker.pids):  # it is killed at once, and waited for meanwhile
            await asyncio.sleep(0.001)
        await worker.close()

    run(work)


def test_a_spare_takes_over_at_once() -> None:
    """The chat after a bomb does not wait for an interpreter to start."""

    async def work() -> None:
        source = guarded(FOREVER)
        worker = TemplateWorker(source, NAMED)
        await answered(worker)
        while len(worker.pids) < 2:
            await asyncio.sleep(0.001)
        await asyncio.gather(*worker._tasks)  # the spare is up
        before = set(worker.pids)
        worker._time_limit = 0.3
        with pytest.raises(RequestError, match=r"0\.3 s of processor time"):
            await worker.render(HI, variables={"level": 1})
        await answered(worker)
        while len(before & set(worker.pids)) == 2:  # the killed one is being waited for
            await asyncio.sleep(0.001)
        assert len(before & set(worker.pids)) == 1, "the spare answered, and another one was started"
        await worker.close()

    run(work)


def test_chats_take_turns_and_processes_stay_few() -> None:
    async def work() -> None:
        source = "{{ messages[0].content }}"
        worker = TemplateWorker(source, num_workers=2, time_limit=PATIENCE)
        chats = [[{"role": "user", "content": f"chat {i}"}] for i in range(200)]
        texts = await asyncio.gather(*(worker.render(chat) for chat in chats))
        assert texts == [f"chat {i}" for i in range(200)]
        assert len(worker.pids) <= 3
        await worker.close()

    run(work)


def test_the_line_is_bounded() -> None:
    async def work() -> None:
        worker = TemplateWorker("{{ 1 }}", num_workers=1, time_limit=PATIENCE, max_waiting=3)
        await worker.start()
        results = await asyncio.gather(*(worker.render(HI) for _ in range(10)), return_exceptions=True)
        assert results[:4] == ["1"] * 4 and all(isinstance(result, QueueFullError) for result in results[4:])
        assert await worker.render(HI) == "1"
        await worker.close()

    run(work)


def test_a_worker_that_waits_for_the_processor_has_its_time() -> None:
    """It counts what it computes: on a busy machine that takes longer."""

    async def work() -> None:
        worker = TemplateWorker("fine", NAMED, time_limit=0.1)
        await worker.start()
        (pid,) = worker.pids
        os.kill(pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.3, os.kill, pid, signal.SIGCONT)
        assert await worker.render(HI) == "fine"
        assert pid in worker.pids
        await worker.close()

    run(work)


def test_callers_that_go_away_leave_the_others_their_own_texts() -> None:
    async def work() -> None:
        source = "{{ messages[0].content }}"
        worker = TemplateWorker(source, time_limit=PATIENCE)
        tasks = [asyncio.ensure_future(worker.render([{"role": "user", "content": str(i)}])) for i in range(100)]
        for i in range(0, 100, 3):
            await asyncio.sleep(0)
            tasks[i].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for i, result in enumerate(results):
            assert isinstance(result, asyncio.CancelledError) or result == str(i)
        assert sum(isinstance(result, str) for result in results) >= 66
        assert await worker.render(HI) == "Hi"
        await worker.close()

    run(work)


def test_output_is_capped() -> None:
    async def work() -> None:
        worker = TemplateWorker("{{ messages[0].content }}", max_chars=1000, time_limit=PATIENCE)
        for character in ("x", "é", "😀", "\x00", '"'):
            fits = [{"role": "user", "content": character * 1000}]
            assert await worker.render(fits) == character * 1000
            with pytest.raises(TemplateError, match="1,000 characters"):
                await worker.render([{"role": "user", "content": character * 1001}])
        await worker.close()

    run(work)


def test_memory_that_one_chat_took_is_there_for_the_next() -> None:
    async def work() -> None:
        source = "{{ messages | map(attribute='content') | map('length') | sum }}"
        worker = TemplateWorker(source, time_limit=PATIENCE)
        long = [{"role": "user", "content": "é" * 1_000_000}] * 10
        assert [await worker.render(long) for _ in range(4)] == ["10000000"] * 4
        await worker.close()

    run(work)


def test_a_worker_that_grew_is_replaced() -> None:
    async def work() -> None:
        worker = TemplateWorker("{{ messages | length }}", time_limit=PATIENCE)
        await worker.start()
        (first,) = worker.pids
        assert await worker.render([{"role": "user", "content": "x" * 1_000_000}] * 27) == "27"
        while first in worker.pids:
            await asyncio.sleep(0.001)
        await worker.close()

    run(work)


def test_starting_twice_takes_one_worker_and_none_without_a_template() -> None:
    async def work() -> list[int]:
        without, worker = TemplateWorker(None), TemplateWorker("{{ 1 }}")
        for each in (without, worker, worker):
            await each.start()
        pids = worker.pids
        assert (len(without.pids), len(pids)) == (0, 1)
        await worker.close()
        return pids

    assert not [pid for pid in run(work) if Path(f"/proc/{pid}").exists()]


@pytest.mark.full
def test_a_chat_that_fails_after_its_caller_has_gone_is_nobodys_error(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        worker = TemplateWorker("{{ raise_exception('no') }}", time_limit=PATIENCE)
        caller = asyncio.ensure_future(worker.render(HI))
        while not worker.pids:
            await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(TemplateError):
            await worker.render(HI)
        await worker.close()

    run(work)
    gc.collect()
    assert not caplog.messages


def test_close_ends_everything_and_chats_after_it_are_refused() -> None:
    async def work() -> list[int]:
        worker = TemplateWorker(guarded(FOREVER), time_limit=20)
        await worker.start()
        bomb = asyncio.ensure_future(worker.render(HI, variables={"level": 1}))
        while len(worker.pids) < 2:
            await asyncio.sleep(0.001)
        pids = worker.pids
        await worker.close()
        with pytest.raises(OverloadedError, match="stopping"):  # and not that the messages are at fault
            await bomb
        with pytest.raises(OverloadedError, match="stopping"):
            await worker.render(HI)
        assert worker.pids == []
        return pids

    assert not [pid for pid in run(work) if Path(f"/proc/{pid}").exists()]


def test_workers_die_with_the_process_that_started_them() -> None:
    code = (
        "import asyncio, os, signal\n"
        "from chairlift.text.tokenizer.template_worker import TemplateWorker\n"
        "async def main():\n"
        "    worker = TemplateWorker('x')\n"
        "    await worker.start()\n"
        "    print(*worker.pids, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids and all(Path(f"/proc/{pid}").exists() for pid in pids)
        parent.kill()
    deadline = time.monotonic() + PATIENCE
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.005)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_signals_for_the_whole_group_leave_workers_to_the_server() -> None:
    async def work() -> None:
        worker = TemplateWorker("x", time_limit=PATIENCE)
        await worker.start()
        pids = worker.pids
        for pid in pids:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
        assert await worker.render(HI) == "x"
        assert set(pids) <= set(worker.pids)
        await worker.close()

    run(work)


@pytest.mark.full
def test_a_worker_nobody_kills_ends_by_itself() -> None:
    """A server that hangs cannot kill; the kernel counts the worker's processor time."""

    async def work() -> None:
        worker = TemplateWorker(guarded(FOREVER), time_limit=50)
        with pytest.raises(TemplateError, match="died"):
            await worker.render(HI, variables={"level": 1})
        await worker.close()

    run(work)


def test_a_failed_start_of_a_worker_is_an_overload_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        worker = TemplateWorker("x", time_limit=PATIENCE)
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(OverloadedError, match="try again"):
            await worker.render(HI)
        monkeypatch.undo()
        assert await worker.render(HI) == "x"
        await worker.close()

    run(work)


def test_keys_in_the_environment_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_TEST_SECRET", "secret")

    async def work() -> None:
        worker = TemplateWorker("x", time_limit=PATIENCE)
        await worker.start()
        for pid in worker.pids:
            assert b"CHAIRLIFT_TEST_SECRET" not in Path(f"/proc/{pid}/environ").read_bytes()
        await worker.close()

    run(work)


def test_a_worker_starts_fast_and_light() -> None:
    """It loads the template engine and nothing that computes."""
    code = (
        "import sys, chairlift.text.tokenizer.template_worker\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'starlette') if name in sys.modules])\n"
        "print(len(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, count = done.stdout.splitlines()
    assert names == "[]" and int(count) < 300  # asyncio and the template engine are 190


def test_a_server_that_was_held_up_does_not_blame_the_chat() -> None:
    """For longer than a worker may take that gets no processor."""

    async def work() -> None:
        worker = TemplateWorker("fine", NAMED, time_limit=0.05)
        await worker.start()
        chat = asyncio.ensure_future(worker.render(HI))
        while (busy := worker._processes - set(worker._idle)) == set():
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # asked ...
        (process,) = (each for each in busy if each.alive)
        pipe = process._process._transport.get_pipe_transport(1).get_extra_info("pipe")  # type: ignore[attr-defined]
        time.sleep(0.6)  # ... and then this process does not run, as under SIGSTOP
        assert select.select([pipe], [], [], PATIENCE)[0], "the answer lies there"
        assert await chat == "fine"
        await worker.close()

    run(work)
