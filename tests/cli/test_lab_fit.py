"""``chairlift lab fit`` from the command line: from a record to a machine file that ``sim`` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chairlift.cli.main import main
from tests.lab.fitting.known_machine import machine, record, serve, traffic

FLAGS = ("--machine", "turin-9755", "--model", "smollm-135m", "--preset", "vllm", "--no-enable-prefix-caching")
SIZES = ("--max-num-seqs", "16", "--max-num-batched-tokens", "512")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    for seed, rate in enumerate((1.0, 3.0)):
        timings = serve(traffic(rate, 20, seed, outputs=(4, 20)), machine(seed=seed))
        (folder / f"rate{rate:.0f}.json").write_text(json.dumps(record(timings)))
    return folder


def test_a_fit_becomes_a_machine(records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, facts = tmp_path / "mine.json", tmp_path / "facts.json"
    held = ("--hold-back", f"{records}/rate3.json")
    wanted = ("--save", str(here), "--json", str(facts), "--name", "mine")
    assert main(["lab", "fit", f"{records}/rate1.json", *held, *FLAGS, *SIZES, *wanted]) == 0
    out = capsys.readouterr().out
    assert "fitted on  rate1.json: request records, 20 requests" in out and "held back  rate3.json" in out
    assert "data sheet" in out and "constant step" in out and f"wrote {here}" in out
    assert json.loads(facts.read_text())["requests"][0]["run"] == "rate3.json"
    assert main(["sim", "--machine", str(here), "--num-prompts", "20", "--arrivals", "poisson:2"]) == 0
    assert "smollm-135m on mine (fitted to 1 run; on 1 held back" in capsys.readouterr().out
    tuned = ["tune", "--fleet", "--machine", str(here), "--workload", "chat", "--num-prompts", "20"]
    assert main([*tuned, "--arrivals", "poisson:1", "--slo", "ttft:90000"]) == 0
    assert "smollm-135m on mine" in capsys.readouterr().out
    assert main(["sim", "--machine", str(here), "--model", "llama-3-8b"]) == 2
    assert "a machine file has its own model; leave it out" in capsys.readouterr().err


def test_settings_of_one_file(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"{records}/rate1.json@max_num_seqs=8,policy-share=0.5"
    assert main(["lab", "fit", file, *FLAGS, *SIZES, "--no-polish"]) == 0
    out = capsys.readouterr().out
    assert "max_num_seqs 8, policy_share 0.5" in out and "No run was held back" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rate1.json", "--hold-back", "rate1.json"], "is fitted and held back"),
        (["rate1.json", "--capture-sizes", "0,4"], "--capture-sizes must be none, vllm, or whole numbers"),
        (["rate1.json@max_num_seqs", "--no-polish"], "'max_num_seqs' in "),
        (["rate1.json", "--save", "rate1.json"], "is read or written for something else"),
        (["none.json"], "cannot read"),
        (["rate1.json", "--machine", "h1000"], "machine must be one of"),
        (["rate1.json", "--enable-prefix-caching"], "say so with --no-enable-prefix-caching"),
    ],
)
def test_wrong_flags_are_explained(
    records: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    words = [f"{records}/{word}" if ".json" in word else word for word in words]
    assert main(["lab", "fit", *FLAGS, *SIZES, *words]) == 2
    assert message in capsys.readouterr().err
