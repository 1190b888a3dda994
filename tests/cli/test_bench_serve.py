from __future__ import annotations

import argparse
import gzip
import itertools
import json
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import ConfigError
from chairlift_lab.cli import bench_serve
from tests.cli.conftest import Run
from tests.lab.bench.scripted_server import PATIENCE, Exchange, ScriptedServer, answer, event, serving

QUICK = ("--input-len", "uniform:8:16", "--output-len", "3", "--num-prompts", "6", "--num-warmups", "0")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with serving(ScriptedServer()) as server:
        yield server


def test_one_run_is_reported_as_lines_json_and_page(chairlift: Run, server: ScriptedServer, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    out.write_text("of last time")
    flags = ("--url", f"{server.url}/v1", "--request-rate", "100", "--goodput", "ttft:5000", "tpot:5000")
    code, lines, err = chairlift("bench", "serve", *QUICK, *flags, "--json", out, "--html", page)
    assert (code, err) == (0, [])
    assert lines[0] == f"scripted at {server.url}, completions, prompts as token ids"
    text = "\n".join(lines)
    assert "requests       6 completed, 0 failed" in text
    assert "100.0% of the requests met TTFT 5000 ms, TPOT 5000 ms" in text
    assert [line.split()[-1] for line in lines if line.startswith("ms ")] == ["p99"]
    record = json.loads(out.read_text())
    assert (record["completed"], record["total_output_tokens"], record["request_rate"]) == (6, 18, 100.0)
    assert record["output_lens"] == [3] * 6
    assert all(8 <= length <= 16 for length in record["input_lens"])
    assert record["start_times"] == sorted(record["start_times"])
    own = record["chairlift"]
    assert (own["benchmark"], own["loop"], own["itl_between"], own["seed"]) == ("serve", "open", "tokens", 0)
    html = page.read_text()
    assert html.count("<svg") == 6
    assert "Serving scripted" in html
    assert "Time to first token (TTFT)" in html


@pytest.mark.parametrize("path", ["", "/v1"])
def test_the_share_of_time_in_collectives_is_that_of_the_slowest_replica(
    chairlift: Run, path: str, tmp_path: Path
) -> None:
    samples = [("tiny", 0, "0.02"), ("tiny", 1, "0.113"), ("other", 0, "0.5")]
    lines = [f'chairlift:collective_share{{model_name="{name}",engine="{n}"}} {value}' for name, n, value in samples]
    metrics = "\n".join(["# TYPE chairlift:collective_share gauge", *lines, ""])
    out = tmp_path / "out.json"
    with serving(ScriptedServer(name="tiny", owner="chairlift", metrics=metrics)) as server:
        code, report, _ = chairlift("bench", "serve", *QUICK, "--url", f"{server.url}{path}", "--json", out)
    assert code == 0
    assert "processes      waited for each other for 11.3% of the time of the last steps" in report
    assert json.loads(out.read_text())["chairlift"]["collective_share"] == 0.113


@pytest.mark.parametrize("server", [{"owner": "a test"}, {}, {"metrics": ""}, {"name": "tiny2"}])
def test_a_server_on_one_process_has_no_share_of_collectives(chairlift: Run, server: dict[str, str]) -> None:
    sample = 'chairlift:collective_share{model_name="tiny",engine="0"} 0.5\n'
    ours = {"owner": "chairlift", "name": "tiny", "metrics": sample if server else "chairlift:idle 0\n"}
    with serving(ScriptedServer(**{**ours, **server})) as scripted:  # type: ignore[arg-type]
        code, report, _ = chairlift("bench", "serve", *QUICK, "--url", scripted.url)
    assert code == 0
    assert "processes" not in "\n".join(report)


def test_a_models_name_cannot_command_the_terminal(chairlift: Run, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    with serving(ScriptedServer(name="<b>\x1b[2J\u202e")) as server:
        code, lines, _ = chairlift("bench", "serve", *QUICK, "--url", server.url, "--html", page)
        _, _, refused = chairlift("bench", "serve", *QUICK, "--url", server.url, "--model", "other")
    assert code == 0
    assert lines[0].startswith("<b>\ufffd[2J\ufffd at ")
    assert "it has <b>\ufffd[2J\ufffd" in refused[0]
    assert "Serving &lt;b&gt; [2J " in page.read_text()


def test_the_seed_decides_lengths_and_times(chairlift: Run, server: ScriptedServer, tmp_path: Path) -> None:
    records = []
    for name, seed in (("a", "4"), ("b", "4"), ("c", "5")):
        path = tmp_path / name
        flags = ("--url", server.url, "--arrivals", "poisson:500", "--seed", seed, "--json", path)
        assert chairlift("bench", "serve", *QUICK, *flags)[0] == 0
        records.append(json.loads(path.read_text()))
    lengths = [record["input_lens"] for record in records]
    assert lengths[0] == lengths[1] != lengths[2]
    assert records[0]["request_rate"] == records[1]["request_rate"] != records[2]["request_rate"]
    prompts = [json.dumps(exchange.body["prompt"]) for exchange in server.exchanges[-20:-7]]
    assert len({*prompts[:6], *prompts[7:]}) == 12  # and prompts are fresh


def test_texts_of_a_data_set_are_sent_as_they_are(chairlift: Run, tmp_path: Path) -> None:
    chat = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "x" * 12}]
    chat += [{"from": "human", "value": "and now?"}, {"from": "gpt", "value": "y" * 8}]
    chats, prompts = tmp_path / "chats.json", tmp_path / "prompts.jsonl.gz"
    chats.write_text(json.dumps([{"conversations": chat}]))
    prompts.write_bytes(gzip.compress(b'{"prompt": "tell me"}\n{"prompt": "more", "output_tokens": 2}\n'))
    with serving(ScriptedServer()) as server:
        flags = ("--url", server.url, "--num-warmups", "0")
        code, lines, _ = chairlift("bench", "serve", *flags, "--dataset", chats)
        assert code == 0
        assert lines[0] == f"scripted at {server.url}, chat completions, prompts as text"
        sent = [exchange.body for exchange in server.exchanges[-2:]]
        assert [body["max_tokens"] for body in sent] == [3, 2]
        assert sent[0]["messages"] == [{"role": "user", "content": "hello there"}]
        assert [message["content"] for message in sent[1]["messages"]] == ["hello there", "x" * 12, "and now?"]
        code, lines, _ = chairlift("bench", "serve", *flags, "--dataset", prompts, "--output-len", "5")
        assert code == 0
        sent = [exchange.body for exchange in server.exchanges[-2:]]
        assert sorted(body["prompt"] for body in sent) == ["more", "tell me"]
        assert [body["max_tokens"] for body in sent] == [5, 5]
        code, _, err = chairlift("bench", "serve", *flags, "--dataset", chats, "--endpoint", "completions")
        assert code == 2
        assert "has chats, which go to --endpoint chat" in err[0]


def test_a_server_that_still_loads_is_waited_for(chairlift: Run) -> None:
    async def loading(exchange: Exchange) -> None:
        if exchange.number < 2:
            exchange.refuse("503 Service Unavailable", "it still loads")
        else:
            await answer(exchange)

    with serving(ScriptedServer(loading)) as server:
        code, lines, err = chairlift("bench", "serve", *QUICK, "--url", server.url)
        assert code == 0
        assert len(err) == 1
        assert err[0].startswith(f"waiting up to 600 s: {server.url} takes no requests now (503: it still loads)")
        assert "requests       6 completed, 0 failed" in "\n".join(lines)
    with serving(ScriptedServer(loading)) as server:
        code, _, err = chairlift("bench", "serve", *QUICK, "--url", server.url, "--ready-check-timeout-sec", "0")
        assert code == 2
        assert "takes no requests now" in err[0]


def test_several_rates_are_several_runs(chairlift: Run, server: ScriptedServer, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    flags = ("--url", server.url, "--request-rate", "50,200,inf", "--json", out, "--html", page)
    code, lines, _ = chairlift("bench", "serve", *QUICK, *flags)
    assert code == 0
    assert [line.split()[0] for line in lines[-3:]] == ["50/s", "200/s", "all"]
    record = json.loads(out.read_text())
    assert [run["request_rate"] for run in record["runs"]] == [50.0, 200.0, "inf"]
    assert "Speed for each user, and in total" in page.read_text()


def test_two_servers_are_compared_in_rounds(chairlift: Run, server: ScriptedServer, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    with serving(ScriptedServer()) as other:
        flags = ("--compare", server.url, other.url, "--rounds", "2", "--request-rate", "200")
        code, lines, _ = chairlift("bench", "serve", *QUICK, *flags, "--json", out, "--html", page)
    assert code == 0
    assert "B over A, 2 rounds" in lines
    record = json.loads(out.read_text())
    ratio = record["compared"]["ratios"]["output_throughput"]
    sides = [[run["output_throughput"] for run in record["runs"][side]] for side in "AB"]
    assert ratio["per_round"] == pytest.approx([b / a for a, b in zip(*sides, strict=True)])
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    assert [run["chairlift"]["url"] for side in "AB" for run in record["runs"][side]] == [server.url] * 2 + [
        other.url
    ] * 2
    assert "Side by side" in page.read_text()


def test_a_trace_keeps_its_times_or_is_stretched(chairlift: Run, server: ScriptedServer, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    rows = [{"timestamp": 40 * i, "input_length": 10 + i, "output_length": 2} for i in range(5)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--url", server.url, "--trace", trace, "--num-warmups", "0", "--json", out)
    for more, span in (((), 0.16), (("--request-rate", "100"), 0.04), (("--num-prompts", "3"), 0.08)):
        assert chairlift("bench", "serve", *flags, *more)[0] == 0
        record = json.loads(out.read_text())
        assert record["input_lens"] == [10, 11, 12, 13, 14][: record["num_prompts"]]
        gaps = [after - before for before, after in itertools.pairwise(record["start_times"])]
        assert span <= record["start_times"][-1] and statistics.median(gaps) < 2 * span / len(gaps)
    assert record["num_prompts"] == 3


def test_a_closed_loop_of_chats_is_reported(chairlift: Run, server: ScriptedServer) -> None:
    flags = ("--url", server.url, "--endpoint", "chat", "--arrivals", "closed:2")
    code, lines, _ = chairlift("bench", "serve", *QUICK, *flags)
    assert code == 0
    assert lines[0].endswith("chat completions, prompts as text")
    assert any(line.startswith("note: closed loop: at most 2") for line in lines)


def test_failures_are_exit_code_1(chairlift: Run, tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.number % 2:
            exchange.refuse("429 Too Many Requests", "full \x1b[31m")
        else:
            await answer(exchange)

    page = tmp_path / "out.html"
    with serving(ScriptedServer(script)) as server:
        code, lines, _ = chairlift("bench", "serve", *QUICK, "--url", server.url, "--html", page)
    assert code == 1
    assert "failed         3 x HTTP 429: full  [31m" in lines
    assert "HTTP 429" in page.read_text()


def stopped(out: Path, where: Callable[[str], list[str]], answered: int, last: int) -> tuple[str, dict[str, Any]]:
    """Ctrl-C when the server, which answers only so many requests, has begun with the last one."""

    async def script(exchange: Exchange) -> None:
        if exchange.number < answered:
            await answer(exchange)
        else:
            exchange.head()
            exchange.chunk(event({"choices": [{"text": "x"}]}))
            if exchange.number == last:
                await exchange.writer.drain()
                last_is_there.set()
            await exchange.until_left()

    last_is_there = threading.Event()
    with serving(ScriptedServer(script)) as server:
        command = [sys.executable, "-m", "chairlift", "bench", "serve", *QUICK, *where(server.url)]
        flags = ["--request-rate", "20", "--json", str(out)]
        process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert last_is_there.wait(PATIENCE)
        process.send_signal(signal.SIGINT)
        lines, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (130, "")
    return lines, json.loads(out.read_text())


def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    lines, record = stopped(tmp_path / "out.json", lambda url: ["--url", url], answered=3, last=6)
    assert "requests       2 completed, 0 failed" in lines
    assert "stopped early: 4 requests were not answered yet" in lines
    assert (record["completed"], record["chairlift"]["unfinished"]) == (2, 4)


def test_a_run_that_ctrl_c_cut_short_is_compared_with_none(tmp_path: Path) -> None:
    """A B, B A: the last of the four, whose first two requests are answered."""
    lines, record = stopped(tmp_path / "out.json", lambda url: ["--compare", url, url], answered=22, last=25)
    assert [len(record["runs"][side]) for side in "AB"] == [2, 2]
    assert "B over A, 1 rounds" in lines
    assert len(record["compared"]["ratios"]["output_throughput"]["per_round"]) == 1


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--url", "ftp://x"], "must be like http://127.0.0.1:8000, got 'ftp://x'"),
        (["--request-rate", "0"], "--request-rate must be a number above 0"),
        (["--request-rate", "1,,2"], "--request-rate must be a number above 0"),
        (["--request-rate", "nan"], "--request-rate must be a number above 0"),
        (["--arrivals", "sometimes"], "arrivals must be one of"),
        (["--num-prompts", "0"], "--num-prompts must be from 1 to"),
        (["--max-concurrency", "0"], "--max-concurrency must be from 1"),
        (["--seed", "-1"], "--seed must be from 0"),
        (["--rounds", "0"], "--rounds must be from 1"),
        (["--timeout", "0"], "--timeout must be from 0.001"),
        (["--temperature", "-1"], "--temperature must be from 0"),
        (["--burstiness", "2"], "--burstiness goes with --request-rate"),
        (["--burstiness", "0", "--request-rate", "3"], "--burstiness must be from 0.001"),
        (["--input-len", "5"], "go together"),
        (["--output-len", "5"], "go together"),
        (["--input-len", "many", "--output-len", "5"], "lengths must be one of"),
        (["--input-len", "0", "--output-len", "5"], "length"),
        (["--workload", "chats"], "workload must be one of"),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--goodput", "ttft"], "goodput wants limits in ms"),
        (["--api-key-file", "/nowhere"], "cannot read the API key file /nowhere"),
        (["--compare", "http://127.0.0.1:1", "http://127.0.0.1:1", "--request-rate", "1,2"], "one --request-rate"),
    ],
)
def test_contradictory_flags_are_refused_before_anything_is_sent(flags: list[str], complaint: str) -> None:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    with pytest.raises(ConfigError) as caught:
        bench_serve.run(parser.parse_args(flags))
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--url", "http://127.0.0.1:1", "--ready-check-timeout-sec", "0"],
            "no server answers at http://127.0.0.1:1",
        ),
        (["--endpoint", "embeddings"], "invalid choice: 'embeddings'"),
        (["--request-rate", "1", "--arrivals", "all"], "not allowed with"),
        (["--workload", "chat", "--trace", "x"], "not allowed with"),
        (["--compare", "http://127.0.0.1:1"], "expected 2 arguments"),
        (["--json", "/nowhere/out.json"], "cannot write /nowhere/out.json"),
        (["--html", "/nowhere/out.html"], "give another --html"),
        (["--ignore-eso"], "did you mean --ignore-eos?"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(chairlift: Run, flags: list[str], complaint: str) -> None:
    code, out, err = chairlift("bench", "serve", *flags)
    assert (code, out) == (2, [])
    assert len(err) == 1
    assert err[0].startswith("chairlift: error: ")
    assert complaint in err[0]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from chairlift.cli.main import main; main(['bench', 'serve', '--help']);"
        "print([name for name in ('torch', 'aiohttp', 'numpy', 'uvloop') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
