from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

QUICK = ("hashlm", "--input-len", "uniform:8:16", "--output-len", "3", "--num-prompts", "6")


def test_traffic_is_reported_as_lines_json_and_page(chairlift: Run, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    flags = ("--request-rate", "100", "--slo", "ttft:60000,tpot:60000", "--json", out, "--html", page)
    code, lines, err = chairlift("bench", "offline", *QUICK, *flags)
    assert (code, err) == (0, [])
    text = "\n".join(lines)
    assert "continuous batching, hashlm" in text
    assert "requests       6 completed, 0 failed" in text
    assert "100.0% of the requests met TTFT 60000 ms, TPOT 60000 ms" in text
    assert "preempted      0.0% of the requests" in text
    assert [line.split()[-1] for line in lines if line.startswith("ms ")] == ["p99"]
    assert sum(line.startswith("until it begins") for line in lines) == 1
    record = json.loads(out.read_text())
    assert (record["completed"], record["total_output_tokens"], record["request_rate"]) == (6, 18, 100.0)
    assert (record["output_lens"], record["backend"], record["errors"]) == ([3] * 6, "chairlift", [""] * 6)
    assert record["start_times"] == sorted(record["start_times"])
    own = record["chairlift"]
    assert (own["benchmark"], own["loop"], own["itl_between"], own["preemption_rate"]) == (
        "offline",
        "open",
        "tokens",
        0,
    )
    assert own["engine"]["scheduler"]["batching"] == "continuous"
    html = page.read_text()
    assert html.count("<svg") == 6
    assert "Time to first token (TTFT)" in html


@pytest.mark.full
def test_compare_static_runs_both_sides_in_turns(chairlift: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, lines, err = chairlift("bench", "offline", *QUICK, "--compare", "static", "--rounds", "2", "--json", out)
    assert (code, err) == (0, [])
    order = [line.partition(":")[0] for line in lines if ", round " in line]
    assert order == ["A, round 1", "B, round 1", "B, round 2", "A, round 2"]
    assert "A, static: static batching, hashlm" in lines
    record = json.loads(out.read_text())
    assert (record["benchmark"], record["compared"]["A"], record["compared"]["rounds"]) == ("offline", "static", 2)
    settings = {side: record["runs"][side][0]["chairlift"]["engine"]["scheduler"] for side in "AB"}
    assert [settings[side]["batching"] for side in "AB"] == ["static", "continuous"]
    ratio = record["compared"]["ratios"]["output_throughput"]
    sides = [[run["output_throughput"] for run in record["runs"][side]] for side in "AB"]
    assert ratio["per_round"] == pytest.approx([b / a for a, b in zip(*sides, strict=True)])


@pytest.mark.nightly
def test_several_sizes_are_one_table_with_the_best_static_batch_named(chairlift: Run, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    flags = ("--max-num-seqs", "4,1,2", "--compare", "static", "--rounds", "1", "--json", out, "--html", page)
    code, lines, err = chairlift("bench", "offline", *QUICK, *flags)
    assert (code, err) == (0, [])
    rows = [line for line in lines if re.match(r"(static|continuous), \d slots", line)]
    names = [f"{kind}, {slots} slots" for kind in ("continuous", "static") for slots in (1, 2, 4)]
    assert [row.split("  ")[0].removesuffix(" *") for row in rows] == names
    record = json.loads(out.read_text())
    rates = {(size["batching"], size["max_num_seqs"]): size["runs"][0]["output_throughput"] for size in record["sizes"]}
    best = max((rate, slots) for (kind, slots), rate in rates.items() if kind == "static")[1]
    assert f"fastest static: {best} slots, " in lines[-1]
    assert "the throughput of static batches, which is no claim: 8 rounds are needed" in lines[-1]
    assert any(row.startswith(f"static, {best} slots *") for row in rows)
    static = next(row.split() for row in rows if row.startswith("static, 4"))
    assert static.count("-") == 2, "no time per token"
    assert page.read_text().count("<svg") == 2
    code, lines, _ = chairlift("bench", "offline", *QUICK, "--max-num-seqs", "2,4", "--rounds", "1")
    assert code == 0
    assert "static" not in "".join(lines)


@pytest.mark.full
def test_a_trace_keeps_its_times_or_is_stretched_and_both_sides_are_asked_the_same(
    chairlift: Run, tmp_path: Path
) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    rows = [{"timestamp": 40 * i, "input_length": 10 + 40 * i, "output_length": 2} for i in range(5)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("bench", "offline", "hashlm", "--trace", trace, "--json", out)
    for more, span in (((), 0.16), (("--request-rate", "100"), 0.04)):
        assert chairlift(*flags, *more)[0] == 0
        starts = json.loads(out.read_text())["start_times"]
        assert starts[-1] - starts[0] == pytest.approx(span, abs=1e-5)
    code, lines, _ = chairlift(*flags, "--compare", "num_kv_blocks=5,block_size=16", "--rounds", "1")
    assert code == 0
    assert any(line.startswith("note: 3 requests were shortened, to the 65 tokens that fit") for line in lines)
    runs = json.loads(out.read_text())["runs"]
    assert runs["A"][0]["input_lens"] == runs["B"][0]["input_lens"] == [10, 50, 63, 63, 63]


@pytest.mark.full
def test_several_rates_are_several_engines(chairlift: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    same = ("--input-len", "64", "--output-len", "3", "--num-prompts", "4")
    code, lines, _ = chairlift("bench", "offline", "hashlm", *same, "--request-rate", "200,inf", "--json", out)
    assert code == 0
    assert [line.split()[0] for line in lines[-2:]] == ["200/s", "all"]
    runs = json.loads(out.read_text())["runs"]
    assert [run["chairlift"]["cached_tokens"] for run in runs] == [0, 0]  # the second knows nothing of the first


def test_bench_offline_runs_without_the_packages_of_the_server() -> None:
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('msgspec', 'aiohttp', 'starlette', 'uvicorn', 'uvloop', 'httptools',\n"
        "                                  'prometheus_client'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from chairlift.cli.main import main\n"
        f"sys.exit(main(['bench', 'offline', *{QUICK!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "6 completed, 0 failed" in done.stdout


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--trace", "/nowhere.jsonl"], "cannot read the trace /nowhere.jsonl"),
        (["--trace", "x", "--workload", "chat"], "not allowed with"),
        (["--compare", "static", "--baseline"], "not allowed with"),
        (["--slo", "ttft"], "goodput wants limits in ms"),
        (["--slo", ""], "goodput wants limits in ms"),
        (["--max-num-seqs", "2,4", "--compare", "block_size=8"], "compared with each other, and with --compare static"),
        (["--max-num-seqs", "2,4", "--request-rate", "1,2"], "take one --request-rate"),
        (["--max-num-seqs", "2,0"], "must be a number of slots above 0"),
        (["--compare", "fast"], "--compare must be static, or settings of the engine"),
        (["--compare", "max_num_seqs=many"], "--max-num-seqs must be a whole number, or one such as 32k"),
        (["--compare", "max_num_seqs=0"], "--max-num-seqs must be"),
        (["--compare", "static", "--request-rate", "1,2"], "one --request-rate"),
        (["--compare", "static", "--rounds", "0"], "--rounds must be from 1"),
        (["--request-rate", "0"], "--request-rate must be a number above 0"),
        (["--burstiness", "2"], "--burstiness goes with --request-rate"),
        (["--workload", "chats"], "workload must be one of"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(chairlift: Run, flags: list[str], complaint: str) -> None:
    code, out, err = chairlift("bench", "offline", "hashlm", *flags)
    assert (code, len(err)) == (2, 1)
    assert err[0].startswith("chairlift: error: ")
    assert complaint in err[0]
    assert not [line for line in out if line.startswith("requests")]


def test_the_fake_model_has_no_floor(chairlift: Run) -> None:
    code, out, err = chairlift("bench", "offline", "hashlm")
    assert (code, out) == (2, [])
    assert "give traffic, such as --workload chat" in err[0]


@pytest.mark.full
def test_speculation_in_continuous_and_static_batches_is_one_table(chairlift: Run, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    flags = ("--max-num-seqs", "1,3", "--compare", "speculation", "--rounds", "2", "--json", out, "--html", page)
    code, lines, err = chairlift("bench", "offline", *QUICK, *flags)
    assert (code, err) == (0, [])
    rows = [line for line in lines if re.match(r"\d slots, (static|continuous), with", line)]
    kinds = [f"{batching}, {drafts}" for drafts in ("with drafts", "without") for batching in ("continuous", "static")]
    assert [row.split("  ")[0] for row in rows] == [f"{slots} slots, {kind}" for slots in (1, 3) for kind in kinds]
    assert all(row.split()[-1] == "0" for row in rows), "nothing failed"
    for slots in (1, 3):
        assert f"With {slots} slots, continuous batching with drafts has " in lines[-1]
    assert lines[-1].count("no claim: 6 rounds are needed, and there were 2") == 4
    record = json.loads(out.read_text())
    sides = {(side["kind"], side["max_num_seqs"]): side for side in record["sides"]}
    assert len(sides) == 8 and all(len(side["runs"]) == 2 for side in sides.values())
    for (kind, _), side in sides.items():
        assert bool(side["settings"]["speculative_config"]) is kind.endswith("with drafts")
        assert side["runs"][0]["drafts"].keys() == {"rows", "drafts", "accepted"}
    assert page.read_text().count("<svg") == 1
