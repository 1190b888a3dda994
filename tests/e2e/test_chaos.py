"""Real processes are killed, stopped, cut off and drowned; every request ends in a way that its client can tell."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import chaos, load, pressure
from tests.e2e.load import Ask, Client, End, History, Submit, Violation
from tests.e2e.server_process import PATIENCE, ServerProcess
from tests.free_port import free_port

SEED = 1
nightly = pytest.mark.nightly


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=nightly)])
def test_an_engine_that_is_killed_is_replaced(kills: int) -> None:
    figures = asyncio.run(chaos.kill_engine(kills, random.Random(SEED)))
    assert figures["requests failed"] + figures["requests refused"] > 0
    assert figures["503 on /health"] >= (kills if kills > 2 else 1)
    assert figures["503 on /health, worst s"] <= (2 if kills > 2 else PATIENCE)


@pytest.mark.full
@pytest.mark.parametrize("seed", [SEED, *(pytest.param(seed, marks=nightly) for seed in range(2, 6))])
def test_an_engine_that_is_killed_while_it_loads_is_replaced(seed: int) -> None:
    asyncio.run(chaos.kill_while_it_loads(random.Random(seed)))


@pytest.mark.full
@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=nightly)])
def test_nothing_outlives_a_killed_server(kills: int) -> None:
    figures = asyncio.run(chaos.kill_api(kills, random.Random(SEED)))
    assert figures["last child gone, worst s"] <= (5 if kills > 1 else PATIENCE)
    assert figures["requests lost"] > 0


@pytest.mark.full
def test_a_stopped_engine_does_not_outlive_a_killed_server() -> None:
    asyncio.run(chaos.kill_api(1, random.Random(SEED), stopped=True))


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.8, pytest.param(10.0, marks=nightly)])
def test_an_engine_that_is_stopped_and_continued_answers(seconds: float) -> None:
    figures = asyncio.run(chaos.stop_engine(seconds, random.Random(SEED)))
    assert figures["requests cancelled"] == 10


@pytest.mark.full
@pytest.mark.parametrize("seconds", [1.5, pytest.param(10.0, marks=nightly)])
def test_a_server_that_is_stopped_and_continued_delivers_everything(seconds: float) -> None:
    asyncio.run(chaos.stop_api(seconds, random.Random(SEED)))


@pytest.mark.full
def test_a_server_without_a_descriptor_left_recovers() -> None:
    asyncio.run(chaos.scarce_files(random.Random(SEED)))


@pytest.mark.parametrize(("count", "rounds"), [(500, 1), pytest.param(1000, 10, marks=nightly)])
def test_clients_that_leave_leave_nothing_behind(count: int, rounds: int) -> None:
    figures = asyncio.run(chaos.disconnects(count, random.Random(SEED), rounds=rounds))
    assert figures["nothing left, worst s"] <= (1 if rounds > 1 else PATIENCE)
    assert figures["requests cancelled"] == count * rounds // 2


@pytest.mark.full
@pytest.mark.parametrize(("count", "rounds"), [(200, 1), pytest.param(1000, 10, marks=nightly)])
def test_clients_that_leave_leave_nothing_behind_where_memory_is_short(count: int, rounds: int) -> None:
    figures = asyncio.run(chaos.disconnects(count, random.Random(SEED), rounds=rounds, flags=chaos.LITTLE_MEMORY))
    assert figures["preemptions"] > 0


@pytest.mark.full
@pytest.mark.parametrize("count", [20, pytest.param(100, marks=nightly)])
def test_readers_that_do_not_read_are_cut_off(count: int) -> None:
    asyncio.run(pressure.stall_cut(count, random.Random(SEED)))


@nightly
def test_readers_that_do_not_read_hold_up_nobody() -> None:
    figures = asyncio.run(pressure.stall(100, random.Random(SEED), seconds=5.0, rounds=5))
    assert figures["stuck / alone"] <= 1.3
    assert figures["stalled / readers"] <= 1.3


@nightly
def test_too_many_are_turned_away_fast_and_the_others_served_as_ever() -> None:
    figures = asyncio.run(pressure.overload(30.0, random.Random(SEED)))
    assert figures["offered / peak"] > 7
    assert figures["429 p99 ms"] <= 150
    assert figures["goodput / peak"] >= 0.9
    assert figures["recovery s"] <= 5
    assert figures["deepest queue"] <= figures["queue cap"]
    assert figures["memory / before"] <= 1.2


@pytest.mark.nightly
def test_too_many_are_turned_away_and_the_others_served() -> None:
    """Also on a machine that others keep busy, whose figures say nothing of this server."""
    figures = asyncio.run(pressure.overload(3.0, random.Random(SEED), factor=4.0))
    assert figures["requests refused"] > 20
    assert figures["batch"] == 4, "it computes as much as it can all the while"
    assert figures["429 p50 ms"] < figures["answers p50 ms"], "who is turned away has not waited first"
    assert figures["deepest queue"] <= figures["queue cap"]
    assert figures["memory / before"] <= 1.5


@pytest.mark.parametrize("terminal", [False, True])
def test_a_server_that_is_told_to_stop_finishes_its_streams(terminal: bool) -> None:
    asyncio.run(chaos.drain(random.Random(SEED), terminal=terminal))


@pytest.mark.parametrize("how", ["second signal", "timeout", "stopped engine", "no restart"])
def test_a_client_that_is_cut_off_is_told_so(how: str) -> None:
    asyncio.run(chaos.cut_off(how, random.Random(SEED)))


@pytest.mark.full
def test_a_port_can_be_used_once() -> None:
    with ServerProcess("hashlm") as server:
        second = [sys.executable, "-m", "chairlift", "serve", "hashlm", "--port", str(server.port)]
        done = subprocess.run(second, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 2
        assert f"port {server.port}" in done.stderr
        assert "Traceback" not in done.stderr
        client = Client(server.port)
        asyncio.run(load.exact(client, random.Random(SEED)))


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
def test_a_full_disk_behind_the_log_stops_no_server() -> None:
    async def test() -> None:
        port = free_port()
        with Path("/dev/full").open("wb") as full:
            line = [sys.executable, "-m", "chairlift", "serve", "hashlm", "--port", str(port), "--log-requests"]
            process = subprocess.Popen(line, stdout=full, stderr=full)
        try:
            client = Client(port)
            await load.until(lambda: load.ready(client), what="a server that is ready")
            await load.exact(client, random.Random(SEED))
            process.terminate()
            assert await asyncio.to_thread(process.wait, PATIENCE) == 0
        finally:
            process.kill()

    asyncio.run(test())


# --- the history can fail --------------------------------------------------------------------------------------------


class Scripted:
    """A server that answers everybody the same bytes, and closes or waits."""

    def __init__(self, answer: bytes, *, waits: bool = False) -> None:
        self._answer, self._waits = answer, waits

    async def ask(self, ask: Ask, *, patience: float = PATIENCE) -> Submit:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}")
            writer.write(self._answer)
            if self._waits:
                await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = Client(server.sockets[0].getsockname()[1])
        submit = await client.ask(ask, patience=patience)
        server.close()
        return submit


ASK = Ask(prompt="a", max_tokens=3, seed=7)
TEXT, IDS = ASK.expected()[0].text, ASK.expected()[0].token_ids


def streamed(*events: str, ends: bool = True) -> bytes:
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    end = b"0\r\n\r\n" if ends else b""
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n%b" % (len(body), body, end)


def choice(text: str, ids: list[int], reason: str = "null") -> str:
    quoted = text.encode("unicode_escape").decode().replace("\\x", "\\u00")
    return f'{{"choices": [{{"index": 0, "text": "{quoted}", "token_ids": {ids}, "finish_reason": {reason}}}]}}'


USAGE = '{"choices": [], "usage": {"completion_tokens": 3}}'
ERROR = '{"error": {"message": "m", "type": "server_error", "param": null, "code": "engine_unavailable"}}'
WHOLE = (choice(TEXT, IDS), choice("", [], '"length"'), USAGE, "[DONE]")


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (streamed(*WHOLE), End.ANSWERED),
        (streamed(choice(TEXT, IDS), ERROR), End.FAILED),
        (streamed(*WHOLE, ends=False), End.LOST),
        (b"", End.LOST),
        (streamed(*WHOLE[:-1]), End.VIOLATION),
        (streamed(*WHOLE[:1], *WHOLE[2:]), End.VIOLATION),
        (streamed(*WHOLE[:2], *WHOLE[3:]), End.VIOLATION),
        (streamed(*WHOLE, choice("more", [1])), End.VIOLATION),
        (streamed(ERROR, "[DONE]"), End.VIOLATION),
        (streamed('{"error": "what"}'), End.VIOLATION),
        (streamed(choice(TEXT + "!", IDS), *WHOLE[1:]), End.VIOLATION),
        (streamed(choice(TEXT, IDS[:-1]), *WHOLE[1:]), End.VIOLATION),
    ],
)
def test_the_history_tells_how_a_request_ended(answer: bytes, end: End) -> None:
    submit = asyncio.run(Scripted(answer).ask(ASK))
    assert submit.end is end, submit.reason


@pytest.mark.full
def test_the_history_reports_a_stream_that_goes_silent() -> None:
    submit = asyncio.run(Scripted(streamed(*WHOLE, ends=False), waits=True).ask(ASK, patience=0.2))
    assert submit.end is End.VIOLATION and "silence" in submit.reason


def test_the_history_accepts_only_allowed_ends() -> None:
    history = History()
    history.submits = [Submit(ASK, 0.0, End.ANSWERED), Submit(ASK, 0.0, End.FAILED, code="engine_unavailable")]
    history.check(End.FAILED, refusals=("engine_unavailable",))
    with pytest.raises(Violation):
        history.check()
    with pytest.raises(Violation):
        history.check(End.FAILED)
    history.submits.append(Submit(ASK, 0.0))
    with pytest.raises(Violation):
        history.check(End.FAILED, refusals=("engine_unavailable",))
