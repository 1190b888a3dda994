from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.cli.main import main
from chairlift_lab.cli.trace_picture import fact_lines
from chairlift_lab.workload.arrivals import Gamma
from chairlift_lab.workload.trace import TracedRequest, draw_trace, read_trace
from tests.cli.conftest import Run
from tests.text.tokenizer import tiny


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    flags = ("--arrivals", "poisson:2", "--cancel", "0.2:uniform:100:900", "--class", "weight=3,tenant=app,ttft_ms=500")
    more = ("--class", "tenant=batch,priority=5,service_tier=flex", "-n", "200", "--workload", "conversation")
    assert main(["trace", "draw", *flags, *more, "-o", str(path)]) == 0
    return path.read_bytes()


@pytest.fixture
def trace(drawn: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_bytes(drawn)
    capsys.readouterr()
    return path


def test_draw_writes_what_it_says(chairlift: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    code, out, err = chairlift("trace", "draw", "-o", path, "-n", "50", "--seed", "3", "--workload", "write")
    assert (code, err) == (0, [])
    assert out[:3] == [f"wrote {path}", "requests       50", "arrivals       all at once"]
    assert read_trace(path) == draw_trace("write", count=50, seed=3)


def test_every_flag_of_draw_counts(chairlift: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lengths = ("--input-len", "uniform:20:30", "--output-len", "fixed:7")
    chats = ("--turns", "fixed:3", "--think", "5", "--context", "170", "--shared-prefix", "32:1:2:0")
    assert chairlift("trace", "draw", "-o", path, *lengths, *chats, "--arrivals", "poisson:1", "-n", "90")[0] == 0
    requests = read_trace(path)
    assert {each.output_tokens for each in requests} == {7}
    assert {each.turn for each in requests} == {0, 1, 2}
    assert len({each.prefix_ids[:2] for each in requests}) == 2
    assert max(each.prompt_tokens for each in requests) <= 170
    code, out, _ = chairlift("trace", "draw", "-o", tmp_path / "u.jsonl", "--arrivals", "closed:4", "-n", "9")
    assert code == 0
    assert "4 users take turns" in out[-1]
    assert "hides queueing" in out[-1]
    file = ("--input-len", f"file:{path}", "--output-len", f"file:{path}", "-n", "9")
    assert chairlift("trace", "draw", "-o", tmp_path / "v.jsonl", *file)[0] == 0
    assert {each.output_tokens for each in read_trace(tmp_path / "v.jsonl")} == {7}


def test_trace_show_prints_arrivals_lengths_and_prefixes(chairlift: Run, trace: Path) -> None:
    code, out, err = chairlift("trace", "show", trace)
    assert (code, err) == (0, [])
    assert out[0] == f"{trace}, read as chairlift"
    text = "\n".join(out)
    assert out[1].startswith("requests       200, among them ")
    for word in (
        "requests/s over",
        "a Poisson process",
        "prompts  ",
        "answers  ",
        "of the prompt tokens",
        "leave early",
    ):
        assert word in text
    assert "tenant app, ttft 500 ms" in text
    assert "tenant batch, priority 5, tier flex" in text
    histograms = text.split("\n\n")[1:]
    assert [histogram.partition(",")[0] for histogram in histograms] == ["prompt lengths", "answer lengths", "arrivals"]
    for histogram in histograms:
        bars = histogram.splitlines()[1:]
        assert sum(int(bar.rpartition(" ")[2]) for bar in bars) == 200
        assert max(map(len, bars)) <= 60


def test_trace_show_prints_ascii_in_a_terminal_without_unicode(trace: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chairlift", "trace", "show", str(trace)],
        env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "40"},
        capture_output=True,
        timeout=300,
        check=True,
    )
    text = done.stdout.decode("ascii")
    assert "|####" in text
    assert "\\u" not in text


def test_trace_show_draws_a_picture(chairlift: Run, trace: Path, tmp_path: Path) -> None:
    code, out, _ = chairlift("trace", "show", trace, "--svg", tmp_path / "t.svg")
    assert code == 0
    assert out[-1] == f"wrote {tmp_path / 't.svg'}"
    assert (tmp_path / "t.svg").read_text().startswith("<svg ")


def test_trace_show_describes_a_trace_of_one_request(chairlift: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 3, "input_length": 1, "output_length": 16777216}\n')
    code, out, _ = chairlift("trace", "show", path)
    assert code == 0
    assert out[2] == "arrivals       all at once"
    assert any(line.strip().startswith("1 │") for line in out)


def test_trace_sample_and_convert_write_readable_traces(chairlift: Run, trace: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.jsonl"
    code, out, _ = chairlift("trace", "sample", trace, "-n", "50", "-o", small, "--seed", "1")
    assert code == 0
    assert out[0] == f"wrote {small}"
    assert 50 <= len(read_trace(small)) < 50 + 16
    assert chairlift("trace", "sample", trace, "-n", "50", "--window", "-o", small, "--force")[0] == 0
    assert len(read_trace(small)) == 50
    assert chairlift("trace", "sample", trace, "-n", "50", "--rate", "9", "-o", small, "--force")[0] == 0
    log = tmp_path / "gateway.csv"
    log.write_text("started,in,out\n2024-01-01 00:00:05,7,8\n2024-01-01 00:00:01,5,6\n2024-01-01 00:00:01,5,0\n")
    columns = ("--columns", "time=started,input=in,output=out", "--sort")
    code, out, _ = chairlift("trace", "sample", log, *columns, "-o", tmp_path / "all.jsonl")
    assert code == 0
    assert out[-1] == "note           requests without a prompt or an answer, left out: 1"
    assert [json.loads(line)["timestamp"] for line in (tmp_path / "all.jsonl").read_text().splitlines()] == [
        0.0,
        4000.0,
    ]


def test_sharegpt_texts_are_counted_with_the_given_tokenizer(chairlift: Run, tmp_path: Path) -> None:
    tiny.byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "chats.json"
    said = [{"from": "human", "value": "Hi there, you"}, {"from": "gpt", "value": "Hello"}]
    path.write_text(json.dumps([{"conversations": said}] * 3))
    code, out, _ = chairlift("trace", "show", path, "--arrivals", "constant:1")
    assert code == 0
    assert any("estimated, at 4 characters per token" in line for line in out)
    code, counted, _ = chairlift("trace", "show", path, "--arrivals", "constant:1", "--tokenizer", tmp_path)
    assert code == 0
    assert not any("estimated" in line for line in counted)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ((), "no command is given (for example: chairlift trace show)"),
        (("show",), "the following arguments are required: FILE"),
        (("show", "/nowhere.jsonl"), "cannot read the trace /nowhere.jsonl: No such file"),
        (("show", "TRACE", "--colums", "x"), "unknown flag '--colums'; did you mean --columns?"),
        (("show", "TRACE", "--columns", "time"), "columns must be FIELD=COLUMN"),
        (("show", "TRACE", "--columns", "time=a,input=b,output=c"), "line 1 of"),
        (("show", "TRACE", "--pattern", "x", "--format", "azure"), "not allowed with argument"),
        (("show", "TRACE", "--arrivals", "poisson:1"), "arrivals and a tokenizer are only for files of texts"),
        (("show", "TRACE", "--tokenizer", "/nowhere"), "/nowhere has no tokenizer.json"),
        (("show", "TRACE", "--svg", "/nowhere/x.svg"), "cannot write /nowhere/x.svg: No such file"),
        (("sample", "TRACE", "-o", "TRACE"), "is there already; give another -o, or --force to replace it"),
        (("sample", "TRACE", "-n", "0", "-o", "OUT"), "must be a whole number from 1"),
        (("sample", "TRACE", "-n", "201", "-o", "OUT"), "the trace has 200 requests"),
        (("sample", "TRACE", "--window", "-o", "OUT"), "say how many with -n"),
        (("sample", "TRACE", "--rate", "1", "--keep-rate", "-o", "OUT"), "not allowed with argument"),
        (("sample", "TRACE", "--rate", "-1", "-o", "OUT"), "rate must be from 0"),
        (("sample", "TRACE", "--rate", "1e300", "-o", "OUT"), "to 1,000,000,000 requests per second, got 1e+300"),
        (("sample", "TRACE", "--rate", "1e-320", "-o", "OUT"), "rate must be from 0.000001 to"),
        (("sample", "TRACE", "-o", "/nowhere/x"), "cannot write /nowhere/x: No such file"),
        (("draw", "-n", "5"), "the following arguments are required: -o/--output"),
        (("draw", "-o", "OUT", "--workload", "chats"), "workload must be one of chat, assistant"),
        (("draw", "-o", "OUT", "--arrivals", "poison:1"), "arrivals must be one of all, constant:RATE"),
        (("draw", "-o", "OUT", "--input-len", "9"), "lengths must be one of lognormal:MU:SIGMA"),
        (("draw", "-o", "OUT", "--think", "9"), "say how many turns they have with --turns"),
        (("draw", "-o", "OUT", "--cancel", "0.1"), "--cancel must be SHARE:FORM"),
        (("draw", "-o", "OUT", "--cancel", "x:fixed:3"), "the share of --cancel must be a number, got 'x'"),
        (("draw", "-o", "OUT", "--shared-prefix", "a"), "tokens of --shared-prefix must be a whole number, got 'a'"),
        (("draw", "-o", "OUT", "--shared-prefix", "512:1:1:1:1"), "--shared-prefix must be TOKENS[:SHARE"),
        (("draw", "-o", "OUT", "--shared-prefix", "100"), "blocks of 512 tokens"),
        (("draw", "-o", "OUT", "--class", "colour=red"), "--class must be FIELD=VALUE,... with weight, tenant"),
        (("draw", "-o", "OUT", "--class", "tenant"), "--class must be FIELD=VALUE"),
        (("draw", "-o", "OUT", "--class", "priority=1,priority=2"), "each once"),
        (("draw", "-o", "OUT", "--class", "priority=high"), "priority of --class must be a whole number, got 'high'"),
        (("draw", "-o", "OUT", "--class", "ttft_ms=-1"), "ttft_ms must be a number from 0"),
        (("draw", "-o", "OUT", "--seed", "-1"), "must be a whole number from 0"),
    ],
)
def test_wrong_usage_is_one_line_and_writes_nothing(
    chairlift: Run, trace: Path, tmp_path: Path, argv: tuple[str, ...], complaint: str
) -> None:
    before = trace.read_bytes()
    names = {"TRACE": str(trace), "OUT": str(tmp_path / "out.jsonl")}
    code, out, err = chairlift("trace", *(names.get(word, word) for word in argv))
    assert (code, out) == (2, [])
    assert len(err) == 1
    assert complaint in err[0]
    assert trace.read_bytes() == before
    assert os.listdir(tmp_path) == [trace.name]


def test_the_most_frequent_classes_are_named() -> None:
    plain = TracedRequest(arrival=0.0, prompt_tokens=3, output_tokens=2)
    assert not any("class" in line for line in fact_lines([plain]))
    tenants = [dataclasses.replace(plain, tenant=name) for name in "abcdefghi" for _ in range(2)]
    lines = fact_lines([plain] * 7 + tenants)[-9:]
    assert lines[0] == "classes        7 (28.0%): no class"
    assert [line.split(":")[-1] for line in lines[1:8]] == [f" tenant {name}" for name in "abcdefg"]
    assert lines[8].strip() == "and 2 more"


def test_of_few_requests_chance_is_not_called_a_burst() -> None:
    """Gaps of gamma arrivals are a Poisson process's at shape 1, burstier below it."""

    def said(shape: float, count: int, seed: int) -> str:
        (line,) = [
            line for line in fact_lines(draw_trace("chat", Gamma(4.0, shape), count, seed=seed)) if "gaps" in line
        ]
        return line

    assert sum("as in a Poisson process" in said(1.0, 60, seed) for seed in range(20)) >= 17
    assert "burstier than" in said(0.25, 60, 1)
    assert "burstier than" in said(0.7, 3000, 1)
    assert "steadier than" in said(4.0, 60, 1)
