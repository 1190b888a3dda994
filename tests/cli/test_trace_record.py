"""``chairlift trace record``: what a server tells becomes a trace, whatever happens on the way."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chairlift.errors import ChairliftError
from chairlift_lab.cli import trace_record
from chairlift_lab.workload.trace import TracedRequest, read_trace
from tests.cli.conftest import Result, Run
from tests.cli.terminal import Terminal
from tests.server.openai_fake import FakeServer, serve_fake

RECORD = {
    **{"arrival_seconds": 1.5, "arrival_unix": 1e9, "prompt_tokens": 140, "cached_tokens": 0, "output_tokens": 7},
    **{"answer_tokens": [7], "max_tokens": 9, "finish_reason": "stop", "cancel_ms": None, "tenant": ""},
    **{"service_tier": "default", "priority": 0, "ttft_ms": None, "tpot_ms": None, "deadline_ms": None},
    **{"ttft_seconds": 0.1, "tpot_seconds": 0.01, "e2e_seconds": 0.2, "queue_seconds": 0.0, "preemptions": 0},
    "hash_ids": [2**61, 5, 6],
}


def start(recording: str = "r1", began: float = 1e9) -> str:
    return event("start", {"recording": recording, "block_size": 16, "began_unix": began, "model": "tiny"})


def event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def record(number: int, **fields: Any) -> str:
    return f"id: {number}\ndata: {json.dumps(RECORD | fields)}\n\n"


END = event("end", {"reason": "complete"})
FOREVER = "forever"


Tell = Callable[..., "FakeTraffic"]


class FakeTraffic(FakeServer):
    """Answers the first /v1/traffic with the first script, and so on; a script is events, or a refusal."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[list[str] | tuple[int, str]] = []
        self.queries: list[dict[str, str]] = []
        self.app = Starlette(routes=[Route("/v1/traffic", self._traffic)])

    async def _traffic(self, request: Request) -> Response:
        self.queries.append(dict(request.query_params))
        script = self.scripts.pop(0) if self.scripts else (503, "it has no more to say")
        if isinstance(script, tuple):
            return JSONResponse({"error": {"message": script[1]}}, script[0])
        return StreamingResponse(self._play(script), media_type="text/event-stream")

    async def _play(self, script: list[str]) -> AsyncIterator[str]:
        for piece in script:
            if piece == FOREVER:
                self.started.set()
                while True:
                    await asyncio.sleep(0.005)
                    yield ": still here\n\n"
            yield piece


@pytest.fixture(scope="module")
def server() -> Iterator[FakeTraffic]:
    fake = FakeTraffic()
    with serve_fake(fake):
        yield fake


@pytest.fixture
def telling(server: FakeTraffic) -> Callable[..., FakeTraffic]:
    """The server, with its scripts."""

    def tell(*scripts: list[str] | tuple[int, str]) -> FakeTraffic:
        server.scripts[:], server.queries[:] = scripts, []
        server.started.clear()
        return server

    return tell


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command by itself: ``main`` would spend its time on the flags of all others."""

    def run(*argv: str | Path | int) -> Result:
        parser = argparse.ArgumentParser()
        trace_record.add_arguments(parser)
        code, failure = 2, []
        try:
            code = trace_record.run(parser.parse_args([str(arg) for arg in argv]))
        except ChairliftError as error:
            failure = [str(error)]
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines() + failure

    return run


@pytest.fixture(autouse=True)
def without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_record, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(trace_record, "_LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(trace_record, "_LOOK_SECONDS", 0.02)


def test_turns_that_call_tools_become_a_session_with_its_gaps(telling: Tell, command: Run, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    script = [
        start(),
        record(1, arrival_seconds=1.0),
        record(2, arrival_seconds=2.0),
        record(4, arrival_seconds=9.0, previous=1, tools=["search", "read"], gap_ms=7800.0),
        "event: lost\ndata: {}\n\n",
        record(5, arrival_seconds=12.0, previous=3, tools=["search"], gap_ms=100.0),
        record(6, arrival_seconds=20.0, previous=4, tools=["run_tests"], gap_ms=10800.0),
        END,
    ]
    code, out, _ = command("--url", telling(script).url, "-o", file)
    assert code == 0
    assert "  3 requests are turns of conversations that call tools" in out
    found = [(each.session, each.turn, each.tool, each.gap_ms) for each in read_trace(file)]
    assert found == [
        ("session-1", 0, "read + search", None),
        ("", 0, "", None),
        ("session-1", 1, "run_tests", 7800.0),
        ("", 0, "", None),
        ("session-1", 2, "", 10800.0),
    ]


def test_a_trace_is_what_was_told_in_order_of_arrival(telling: Tell, command: Run, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    promised = {"service_tier": "flex", "priority": -3, "ttft_ms": 500.0, "tpot_ms": 40.5, "deadline_ms": 9000.0}
    script = [
        start(),
        record(1, arrival_seconds=9.25, output_tokens=5, answer_tokens=[2, 3], tenant="tenant-1"),
        ": a comment\n\n",
        record(2, arrival_seconds=2.0, **promised),
        record(3, arrival_seconds=4.0, finish_reason="abort", cancel_ms=1234.5, output_tokens=0, answer_tokens=[0]),
        record(4, arrival_seconds=5.0, finish_reason="error", output_tokens=0, answer_tokens=[0]),
        END,
    ]
    flags = ("--requests", 4, "--duration", "10m", "--block-size", 16)
    fake = telling(script)
    code, out, err = command("--url", fake.url, "-o", file, *flags)
    assert (code, err) == (0, [])
    assert out == [
        f"{file}: 3 requests, 420 prompt tokens, 12 output tokens, 1 cancelled by their clients",
        "  requests with n answers are n lines: 4 in all",
        "  1 that failed before their first token are left out",
    ]
    assert fake.queries == [{"block_size": "16", "duration": fake.queries[0]["duration"], "requests": "4"}]
    assert 599 < float(fake.queries[0]["duration"]) <= 600
    alike: dict[str, Any] = {"prompt_tokens": 140, "prefix_ids": (2**61, 5, 6), "prefix_block": 16}
    assert read_trace(file) == [
        TracedRequest(arrival=0.0, output_tokens=7, **alike, **promised),
        TracedRequest(arrival=2.0, output_tokens=1, cancel_ms=1234.5, **alike),
        TracedRequest(arrival=7.25, output_tokens=2, tenant="tenant-1", **alike),
        TracedRequest(arrival=7.25, output_tokens=3, tenant="tenant-1", **alike),
    ]
    assert list(tmp_path.iterdir()) == [file]


def test_a_broken_connection_is_taken_up_again_and_gaps_are_counted(
    telling: Tell, command: Run, tmp_path: Path
) -> None:
    file = tmp_path / "t.jsonl"
    scripts = ([start(), record(1)], (503, "busy"), [start(), record(4, arrival_seconds=3.0), END])
    fake = telling(*scripts)
    code, out, _ = command("--url", fake.url, "-o", file)
    assert code == 0 and [query.get("recording") for query in fake.queries] == [None, "r1", "r1"]
    assert out[1:] == ["  not complete; 2 requests were lost on the way"]
    assert [request.arrival for request in read_trace(file)] == [0.0, 1.5]


def test_a_server_that_was_started_again_begins_another_recording(telling: Tell, command: Run, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    scripts = ([start(), record(1)], (404, "there is no recording 'r1'"), [start("r2", 1e9 + 60), record(1), END])
    fake = telling(*scripts)
    code, out, _ = command("--url", fake.url, "-o", file, "--requests", 5)
    assert code == 0 and fake.queries[2] == {"block_size": "64", "requests": "4"}
    assert [request.arrival for request in read_trace(file)] == [0.0, 60.0]
    assert re.search(
        r"the server forgot the recording 1 time, and what ended meanwhile \(about \d+ s\) is missing", out[1]
    )


def test_a_server_that_does_not_come_back_is_told(
    telling: Tell, command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_record, "_KEPT_SECONDS", 0.0)
    fake = telling([start(), record(1)])
    code, out, _ = command("--url", fake.url, "-o", tmp_path / "t.jsonl", "--duration", "0.1s")
    assert code == 0 and len(read_trace(tmp_path / "t.jsonl")) == 1
    assert re.fullmatch(r"  not complete; the server was gone in the last \d+ s, and what ended .*", out[1])
    fake = telling([start()])
    code, _, err = command("--url", fake.url, "-o", tmp_path / "u.jsonl", "--duration", "0.1s")
    assert code == 1 and "no request came and ended; the server was gone" in err[0]
    fake = telling([start(), record(1)])
    assert len(command("--url", fake.url, "-o", tmp_path / "v.jsonl", "--requests", 1)[1]) == 1, "that was all"
    assert len(fake.queries) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_well(telling: Tell, tmp_path: Path, number: int) -> None:
    file = tmp_path / "t.jsonl"
    fake = telling([start(), record(1), record(2), FOREVER])
    argv = [sys.executable, "-m", "chairlift", "trace", "record", "--url", fake.url, "-o", str(file)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert fake.started.wait(120)
        growing = tmp_path / "t.jsonl.recording"
        while not growing.exists() or growing.read_text().count("\n") < 2:
            assert process.poll() is None
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "") and "2 requests" in out
    assert len(read_trace(file)) == 2 and list(tmp_path.iterdir()) == [file]


def test_progress_is_shown_on_a_terminal(telling: Tell, tmp_path: Path) -> None:
    fake = telling([start(), record(1), FOREVER])
    terminal = Terminal("trace", "record", "--url", fake.url, "-o", str(tmp_path / "t.jsonl"))
    try:
        terminal.wait_for("recorded 1 requests in 00:00:")
        terminal.wait_for("/s")
        terminal.process.send_signal(signal.SIGINT)
        assert "1 requests, 140 prompt tokens" in terminal.read_to_the_end()
        assert terminal.process.wait(120) == 0
    finally:
        terminal.close()


def test_a_recording_without_requests_is_refused(telling: Tell, command: Run, tmp_path: Path) -> None:
    fake = telling([start(), END])
    code, out, err = command("--url", fake.url, "-o", tmp_path / "t.jsonl")
    assert (code, out, err) == (1, [], ["nothing was recorded: no request came and ended"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ((401, "no"), "wants an API key: give one with --api-key-file FILE"),
        ((404, "Not Found"), "cannot be recorded: Not Found"),
        ((429, "8 recordings run already"), "8 recordings run already"),
        ([event("start", {"recording": 5})], "begins in an unknown way"),
        ([start(), "id: 1\ndata: {}\n\n", END], "not of a known form"),
        ([start(), "id: 1\ndata: {]\n\n", END], "it has no more to say"),
    ],
)
def test_a_server_that_refuses_recordings_is_told_with_the_reason(
    telling: Tell, command: Run, tmp_path: Path, script: list[str] | tuple[int, str], told: str
) -> None:
    if told == "it has no more to say":  # a torn event is as a broken connection
        script = [start(), "id: 1\ndata: {]\n\n"]
        fake = telling(script, [start(), record(1), END])
        assert command("--url", fake.url, "-o", tmp_path / "t.jsonl")[0] == 0
        return
    fake = telling(script)
    code, out, err = command("--url", fake.url, "-o", tmp_path / "t.jsonl")
    assert (code, out, len(err)) == (2, [], 1) and told in err[0]
    assert not list(tmp_path.iterdir())


def test_requests_before_an_unknown_record_are_kept(telling: Tell, command: Run, tmp_path: Path) -> None:
    fake = telling([start(), record(1), "id: 2\ndata: {}\n\n", FOREVER])
    code, out, err = command("--url", fake.url, "-o", tmp_path / "t.jsonl")
    growing = tmp_path / "t.jsonl.recording"
    assert (code, out) == (2, []) and f"the requests until then are kept in {growing}, in the order" in err[0]
    assert len(read_trace(growing)) == 1
    fake = telling([start(), "id: 1\ndata: {}\n\n", FOREVER])
    assert command("--url", fake.url, "-o", tmp_path / "u.jsonl")[2][0].endswith("; nothing was recorded")


def test_an_unreachable_server_leaves_no_file(command: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        url = f"127.0.0.1:{held.getsockname()[1]}"
    code, _, err = command("--url", url, "-o", tmp_path / "t.jsonl")
    assert code == 2 and "no server answers" in err[0] and not list(tmp_path.iterdir())


def test_an_existing_file_is_not_overwritten(telling: Tell, command: Run, tmp_path: Path) -> None:
    file, growing = tmp_path / "t.jsonl", tmp_path / "t.jsonl.recording"
    fake = telling([start(), record(1), END])
    for path in (file, growing):
        path.write_text("precious")
        code, _, err = command("--url", fake.url, "-o", file)
        assert code == 2 and f"{path} is there already" in err[0] and path.read_text() == "precious"
        path.unlink()
    file.write_text("old")
    assert command("--url", fake.url, "-o", file, "--force")[0] == 0
    assert len(read_trace(file)) == 1


def test_a_full_disk_is_one_line(telling: Tell, command: Run, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl.recording").symlink_to("/dev/full")
    fake = telling([start(), record(1), FOREVER])
    code, out, err = command("--url", fake.url, "-o", tmp_path / "t.jsonl", "--force")
    assert (code, out, len(err)) == (2, [], 1)
    assert "t.jsonl.recording: No space left on device; " in err[0]


def test_a_missing_folder_is_refused(command: Run, tmp_path: Path) -> None:
    code, _, err = command("--url", "127.0.0.1:1", "-o", tmp_path / "no" / "t.jsonl")
    assert code == 2 and "No such file or directory" in err[0]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--duration", "soon"], "--duration must be a time such as 90s, 10m or 2h, got 'soon'"),
        (["--duration", "0"], "--duration must be a time"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--block-size", "8"], "--block-size must be from 16 to 512"),
    ],
)
def test_bad_settings_are_refused_in_one_line(command: Run, tmp_path: Path, flags: list[str], told: str) -> None:
    code, _, err = command("--url", "127.0.0.1:1", "-o", tmp_path / "t.jsonl", *flags)
    assert (code, len(err)) == (2, 1) and told in err[0] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400), (" 3s ", 3)])
def test_durations_are_read_with_their_units(text: str, seconds: float) -> None:
    assert trace_record._seconds(text) == seconds


def test_a_malformed_address_is_refused(chairlift: Run, tmp_path: Path) -> None:
    code, _, err = chairlift("trace", "record", "--url", "ftp://here", "-o", tmp_path / "t.jsonl")
    assert code == 2 and "--url must be like" in err[0]
