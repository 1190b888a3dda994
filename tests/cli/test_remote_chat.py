"""``chairlift chat --url``: the same terminal, another one's model."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.cli.remote_server import RemoteServer
from chairlift.errors import EngineDeadError
from tests.cli.conftest import Run
from tests.cli.terminal import Terminal
from tests.server.openai_fake import FakeServer, serve_fake


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve_fake(FakeServer()) as served:
        yield served


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_lines_are_answered_with_their_history(
    chairlift: Run, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "Hi", "and then?", "/reset", "again", "/exit", "never asked")
    code, out, err = chairlift("chat", "--url", fake.url, "--system", "Be kind.", "--top-k", 3, "--logprobs", 2)
    assert (code, err) == (0, [])
    assert out == ["2: Hi", "4: and then?", "2: again"]
    first, second, third = fake.bodies
    assert second["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "2: Hi"},
        {"role": "user", "content": "and then?"},
    ]
    assert [turn["content"] for turn in third["messages"]] == ["Be kind.", "again"]
    settings = {name: value for name, value in first.items() if name != "messages"}
    assert settings == {"model": "tiny", "stream": True, "temperature": 0.0, "top_k": 3, "max_tokens": 512}


@pytest.mark.parametrize("suffix", ["/", "/v1", "/v1/"])
def test_the_url_may_be_that_of_a_client_library(
    chairlift: Run, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    say(monkeypatch, "Hi")
    assert chairlift("chat", "--url", fake.url.removeprefix("http://") + suffix, "--model", "little") == (
        0,
        ["1: Hi"],
        [],
    )
    assert fake.bodies[0]["model"] == "little"


@pytest.mark.parametrize(
    "command", [("chat",), ("top", "--once"), ("bench", "serve"), ("trace", "record", "-o", "/dev/null")]
)
def test_every_command_calls_a_server_url_and_knows_the_older_name(chairlift: Run, command: tuple[str, ...]) -> None:
    for flag in ("--url", "--base-url"):
        code, _, err = chairlift(*command, flag, "ftp://here")
        assert code == 2 and "must be like http://127.0.0.1:8000, got 'ftp://here'" in err[0]
    name = [word for word in command if not word.startswith(("-", "/"))]
    code, out, _ = chairlift(*name, "--help")
    assert "--url URL" in "".join(out) and "--base-url" not in "".join(out)


@pytest.mark.parametrize("lists_room", [True, False])
def test_the_oldest_turns_leave_when_the_context_is_full(
    chairlift: Run, monkeypatch: pytest.MonkeyPatch, lists_room: bool
) -> None:
    with serve_fake(FakeServer(room=40, lists_room=lists_room)) as fake:
        say(monkeypatch, *["one two three four five"] * 4)
        code, out, err = chairlift("chat", "--url", fake.url)
    assert code == 0
    assert len(out) == 4
    assert [line for line in err if "left out the oldest" in line] == err != []
    assert all(body["max_tokens"] == 40 - (len(body["messages"]) // 2 * 13 + 6) for body in fake.bodies)


@pytest.mark.parametrize("other", [FakeServer(tokenize=False), FakeServer(counts="inputs")], ids=["none", "its own"])
def test_a_server_that_counts_no_tokens_will_do(
    chairlift: Run, monkeypatch: pytest.MonkeyPatch, other: FakeServer
) -> None:
    with serve_fake(other) as fake:
        say(monkeypatch, "Hi", "Ho")
        assert chairlift("chat", "--url", fake.url) == (0, ["1: Hi", "3: Ho"], [])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_shown_on_a_terminal_and_stays_out_of_the_answer(
    chairlift: Run, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    deltas = [{name: "Let me"}, {name: " see."}, {"content": "Yes"}, {"content": "."}]
    script = "script " + json.dumps([{"choices": [{"index": 0, "delta": delta}]} for delta in deltas])
    say(monkeypatch, script, "and then?")
    assert chairlift("chat", "--url", fake.url) == (0, ["Yes.", "3: and then?"], [])
    assert fake.bodies[1]["messages"][1] == {"role": "assistant", "content": "Yes."}
    terminal = Terminal("run", "tiny", script, "--url", fake.url)
    assert "\x1b[90mLet me see.\x1b[0m\r\n\r\nYes.\r\n" in terminal.read_to_the_end()
    assert terminal.process.wait() == 0


def test_a_failed_turn_is_reported_and_leaves_the_history_as_it_was(
    chairlift: Run, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [
        "fail 429 rate_limit_exceeded",
        "fail 503 server_draining",
        "fail 500 internal_error",
        "fail 400 invalid_value",
    ]
    say(monkeypatch, "Hi", *failing, "break", "cut", "and then?")
    code, out, err = chairlift("chat", "--url", fake.url)
    assert code == 1
    assert out == ["1: Hi", "ab", "ab", "3: and then?"]
    assert err == [
        "chairlift: error: scripted rate_limit_exceeded; try again in 7 s",
        "chairlift: error: scripted server_draining; try again in 7 s",
        "chairlift: error: scripted internal_error",
        "chairlift: error: scripted invalid_value",
        "chairlift: error: the answer broke off: the engine died",
        "chairlift: error: the answer broke off: the server closed the connection",
    ]


def test_no_answer_can_take_over_the_terminal(
    chairlift: Run, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "say \x1b[2Jred\x9b31m\u202eback\ttab", "fail 400 \x1b]0;title\x07")
    code, out, err = chairlift("chat", "--url", fake.url)
    assert (code, out) == (1, ["�[2Jred�31m�back\ttab"])
    assert err == ["chairlift: error: scripted �]0;title�"]


@pytest.mark.parametrize("line", ["secret", "me secret"])
def test_the_key_comes_from_a_file(chairlift: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    file = tmp_path / "key"
    with serve_fake(FakeServer(key="secret")) as fake:
        code, _, err = chairlift("chat", "--url", fake.url)
        assert code == 2 and "give one with --api-key-file" in err[0]
        file.write_text("wrong\n")
        code, _, err = chairlift("chat", "--url", fake.url, "--api-key-file", file)
        assert code == 2 and "is refused" in err[0] and "wrong" not in err[0]
        file.write_text(f"# mine\n\n{line}\nanother one\n")
        say(monkeypatch, "Hi")
        assert chairlift("chat", "--url", fake.url, "--api-key-file", file) == (0, ["1: Hi"], [])


@pytest.mark.parametrize("content", ["", "# nothing\n", "three more words\n", "schlüssel\n"])
def test_a_file_without_a_key_is_refused(chairlift: Run, tmp_path: Path, content: str) -> None:
    file = tmp_path / "key"
    file.write_text(content, encoding="utf-8")
    code, _, err = chairlift("chat", "--url", "http://127.0.0.1:1", "--api-key-file", file)
    assert code == 2 and "must have a key" in err[0] and len(err) == 1


def test_an_unreadable_key_file_is_refused(chairlift: Run, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff")
    for name, why in (("none", "No such file or directory"), ("key", "it is not UTF-8 text")):
        code, _, err = chairlift("chat", "--url", "http://127.0.0.1:1", "--api-key-file", tmp_path / name)
        assert (code, err) == (2, [f"chairlift: error: cannot read the API key file {tmp_path / name}: {why}"])


def test_an_unreachable_server_is_told_with_the_command_that_starts_one(chairlift: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    code, out, err = chairlift("chat", "--url", f"http://127.0.0.1:{port}")
    assert (code, out, len(err)) == (2, [], 1)
    assert f"no server answers at http://127.0.0.1:{port}" in err[0] and "chairlift serve" in err[0]


def test_a_server_that_still_loads_is_told_with_the_time_to_try_again(chairlift: Run, fake: FakeServer) -> None:
    fake.loading = True
    code, _, err = chairlift("chat", "--url", fake.url)
    assert (code, err) == (2, ["chairlift: error: the model is being loaded; try again in 7 s"])


def test_a_server_without_the_openai_api_is_refused(chairlift: Run, fake: FakeServer) -> None:
    code, _, err = chairlift("chat", "--url", f"{fake.url}/elsewhere")
    assert code == 2 and "not an OpenAI-compatible server" in err[0]


@pytest.mark.parametrize(
    "url", ["ftp://here", "http://", "http://here:port", "http://me:pw@here", "http://[::1", "http://here:99999"]
)
def test_a_malformed_url_is_refused(chairlift: Run, url: str) -> None:
    code, _, err = chairlift("chat", "--url", url)
    assert code == 2 and "--url must be like" in err[0]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--max-num-seqs", "4"], "--max-num-seqs"),
        (["some/model"], "--model some/model"),
        (["--model", "huge"], "it has tiny, little"),
        (["--n", "2"], "leave n out"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_flags_of_a_local_model_are_refused_beside_a_url(
    chairlift: Run, fake: FakeServer, flags: list[str], told: str
) -> None:
    code, _, err = chairlift("chat", "--url", fake.url, *flags)
    assert code == 2 and told in err[0] and len(err) == 1


@pytest.mark.parametrize("flag", ["--model", "--api-key-file"])
def test_flags_of_a_server_are_refused_without_a_url(chairlift: Run, flag: str) -> None:
    code, _, err = chairlift("chat", flag, "thing")
    assert code == 2 and "needs --url" in err[0]


def test_nothing_heavy_is_loaded(fake: FakeServer) -> None:
    program = "import sys; from chairlift.cli.main import main; code = main(sys.argv[1:]); "
    program += "print(code, [name for name in ('torch', 'numpy', 'starlette') if name in sys.modules])"
    command = [sys.executable, "-c", program, "chat", "--url", fake.url]
    run = subprocess.run(command, input="Hi\n", capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["1: Hi", "0 []"]


@pytest.mark.parametrize("message", ["endless", "silent"])
def test_ctrl_c_stops_the_answer(fake: FakeServer, message: str) -> None:
    terminal = Terminal("chat", "--url", fake.url)
    try:
        terminal.wait_for(f"tiny at {fake.url}. /help lists the commands")
        terminal.wait_for("> ")
        terminal.type(f"{message}\n")
        terminal.wait_for(f"{message}\r\n")
        if message == "endless":
            terminal.wait_for("on on ")
        else:
            fake.started.wait(120)
        assert not fake.left.is_set()
        terminal.interrupt_at_the_prompt()
        terminal.wait_for("\r\n> ")
        assert fake.left.wait(120)
        terminal.type("and now?\n")
        terminal.wait_for("3: and now?")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(120) == 0
    finally:
        terminal.close()


def test_ctrl_c_ends_a_chat_that_is_piped(fake: FakeServer) -> None:
    command = [sys.executable, "-m", "chairlift", "chat", "--url", fake.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        process.stdin.write("endless\n")
        process.stdin.flush()
        assert process.stdout.read(3) == "on "
        process.send_signal(2)
        assert process.wait(120) == 130
    assert fake.left.wait(120)


@pytest.mark.parametrize("close", ["", "Connection: close\r\n"])
def test_an_answer_that_comes_byte_by_byte_is_given_up(close: str) -> None:
    """A byte always comes before a time limit per read."""
    left = threading.Event()

    def drip(server: socket.socket) -> None:
        with server.accept()[0] as peer, contextlib.suppress(OSError):
            peer.recv(1 << 16)
            peer.sendall(f"HTTP/1.1 200 OK\r\n{close}Content-Length: 300\r\n\r\n".encode())
            while not left.wait(0.01):
                peer.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = threading.Thread(target=drip, args=(server,))
        peer.start()
        there = RemoteServer(f"http://127.0.0.1:{server.getsockname()[1]}")
        try:
            with (
                pytest.raises(EngineDeadError, match="has not answered for"),
                there.request("GET", "/v1/models", seconds=0.3, whole=True) as response,
            ):
                response.read()
        finally:
            left.set()
            peer.join()
