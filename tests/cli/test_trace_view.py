"""Recordings of steps on the command line: looked at, and simulated."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from chairlift.engine.step_export import read_recording
from tests.cli.conftest import Run
from tests.engine.test_step_export import watched
from tests.server.watched import make_truth


@pytest.fixture(scope="module")
def recorded() -> bytes:
    return watched(make_truth(seed=8), bursts=3)


@pytest.fixture
def steps(recorded: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(recorded + b"\n")
    return path


@contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[None]:
    """The process ends with the block, also after an error."""
    try:
        yield
    finally:
        process.kill()


def figure(lines: list[str], name: str) -> list[float]:
    found = next(line for line in lines if line.startswith(name))
    return [float(number.replace(",", "")) for number in re.findall(r"[0-9][0-9,.]*[0-9]|[0-9]", found)]


def test_a_replay_serves_what_was_recorded(chairlift: Run, steps: Path, recorded: bytes) -> None:
    code, out, err = chairlift("trace", "replay", steps)
    arrivals = read_recording(recorded).arrivals
    assert (code, err) == (0, [])
    assert out[0].startswith(f"{steps}: {len(arrivals)} requests, ")
    assert figure(out, "requests")[0] == len(arrivals)
    assert figure(out, "tokens")[0] == sum(each.prompt_tokens for each in arrivals)
    assert figure(out, "tokens")[-1] == sum(each.output_tokens for each in arrivals)


def test_settings_change_a_replay(chairlift: Run, steps: Path, tmp_path: Path) -> None:
    _, usual, _ = chairlift("trace", "replay", steps)
    path = tmp_path / "out.json"
    code, one, _ = chairlift("trace", "replay", steps, "--max-num-seqs", "1", "--json", path)
    assert code == 0
    assert figure(one, "throughput")[1] < 0.7 * figure(usual, "throughput")[1]
    record = json.loads(path.read_text())
    assert record["settings"]["scheduler"]["max_num_seqs"] == 1
    code, one, error = chairlift("trace", "replay", steps, "--max-num-seqs", "1", "--json", path, "--static")
    if code:  # what a busy machine recorded is refused where the simulator cannot follow it
        assert "no comparison: " in str(error)
        return
    record = json.loads(path.read_text())
    assert record["static"]["requests"] == record["served"]["requests"]
    assert any("static batching" in line for line in one)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("view",), "say what to show: a FILE, or --demo"),
        (("view", "FILE", "--demo"), "say what to show: a FILE, or --demo"),
        (("view", "FILE", "--port", "65536"), "--port must be from 0 to 65535, got 65536"),
        (("view", "/nowhere.jsonl"), "cannot read the recording /nowhere.jsonl: No such file"),
        (("view", "/tmp"), "cannot read the recording /tmp: Is a directory"),
        (("replay", "/nowhere.jsonl"), "cannot read the recording /nowhere.jsonl: No such file"),
        (("replay", "EMPTY"), "this is not a recording of steps"),
        (("replay", "TRAFFIC"), "this is not a recording of steps"),
        (("replay", "SHORT"), "known only for requests that arrived while /live was open"),
        (("replay", "FILE", "--json", "/nowhere/x.json"), "cannot write /nowhere/x.json: No such file"),
        (("replay", "FILE", "--num-kv-blocks", "1"), "--num-kv-blocks"),
        (("replay", "FILE", "--max-num-seqs", "0"), "--max-num-seqs"),
    ],
)
def test_an_impossible_view_is_refused_in_one_line(
    chairlift: Run, steps: Path, tmp_path: Path, argv: tuple[str, ...], message: str
) -> None:
    files = {"FILE": steps, "EMPTY": tmp_path / "empty", "TRAFFIC": tmp_path / "traffic", "SHORT": tmp_path / "short"}
    files["EMPTY"].write_bytes(b"")
    files["TRAFFIC"].write_text('{"timestamp": 0, "input_length": 5, "output_length": 3}\n')
    files["SHORT"].write_bytes(steps.read_bytes().split(b"\n")[0])
    code, out, err = chairlift("trace", *(str(files.get(arg, arg)) for arg in argv))
    assert (code, out, len(err)) == (2, [], 1)
    assert message in err[0]


def test_a_recording_is_shown_on_this_machine_until_ctrl_c(steps: Path) -> None:
    command = [sys.executable, "-m", "chairlift", "trace", "view", str(steps)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        killed(process),
    ):
        assert process.stdout is not None and process.stderr is not None
        found = re.match(r"http://127\.0\.0\.1:(\d+)/live ", process.stdout.readline())
        assert found is not None, process.stderr.read()
        with closing(http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)) as connection:
            for path, kind in (("/live", "text/html"), ("/live/export?format=jsonl", "application/x-ndjson")):
                connection.request("GET", path)
                reply = connection.getresponse()
                body = reply.read()
                assert (reply.status, reply.headers["content-type"].partition(";")[0]) == (200, kind)
            assert body == steps.read_bytes()
            connection.request("GET", "/")
            reply = connection.getresponse()
            reply.read()
            assert (reply.status, reply.headers["location"]) == (307, "/live")
            connection.request("GET", "/live", headers={"Host": "evil.example"})
            assert connection.getresponse().status == 421
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_the_simulator_learns_from_a_recording(chairlift: Run, steps: Path, model_dir: Path) -> None:
    flags = ("--model", model_dir, "--num-kv-blocks", "64", "--num-prompts", "5")
    code, out, err = chairlift("sim", "--step-log", steps, *flags)
    assert (code, err) == (0, [])
    assert f"the machine of {steps}" in out[1]
    steps.write_bytes(steps.read_bytes() + b'{"step": 1}\n')
    assert "of the recording cannot be read" in chairlift("sim", "--step-log", steps, *flags)[2][0]
