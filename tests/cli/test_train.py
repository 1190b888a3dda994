from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chairlift import LLM, SamplingParams
from chairlift_train.cli.train import Speed
from tests.cli.conftest import Run
from tests.train import tiny_run


def write_config(folder: Path, **sections: Any) -> Path:
    """A run on token ids in ``folder``; sections are merged into its settings."""
    raw = tiny_run.settings(folder)
    for name, value in sections.items():
        raw[name] = {**raw.get(name, {}), **value} if isinstance(value, dict) else value
    path = folder / "run.yaml"
    path.write_text(json.dumps(raw))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tiny_run.write_records(tmp_path / "data.jsonl")
    return write_config(tmp_path)


def test_a_run_ends_with_a_model_that_serves(chairlift: Run, model_dir: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "data.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    (tmp_path / "run.yaml").write_text(
        f"""
        model: {{path: {model_dir}, dtype: float32}}
        data: {{files: {tmp_path / "data.jsonl"}}}
        packing: {{capacity: 128, pool: 4, step: "sequences:4"}}
        training: {{steps: 30, warmup_steps: 2, learning_rate: 1e-2, weight_decay: 0}}
        """
    )
    code, out, err = chairlift("train", tmp_path / "run.yaml", "--output", tmp_path / "of today", "--quiet")
    folder = tmp_path / "of today" / "step-00000030"
    assert (code, err) == (0, [])
    assert out[0].startswith("trained 30 steps, loss ")
    assert out[0].endswith(f"the model is in {folder}")
    assert out[1] == f"serve it with: chairlift serve '{folder}'"
    llm = LLM(str(folder))
    assert llm.chat(turns[:1], SamplingParams(temperature=0.0, max_tokens=16))[0].outputs[0].text == "Hello."


def test_a_run_resumes_where_it_was_interrupted(chairlift: Run, config: Path) -> None:
    few = ("--set", "checkpoints.keep=9")
    code, out, err = chairlift("train", config, *few)
    assert code == 0
    assert "12/12" in err[-1]
    assert any(re.search(r" 0/12 \[00:0\d\]", line) for line in err)
    assert any(re.search(r" 1/12 \[00:0\d, \d\d:\d\d left, loss .* [\d,]+ tok/s", line) for line in err)
    folder = config.parent / "out" / "step-00000012"
    nothing_left = [
        f"nothing is left to do: trained 12 steps; the model is in {folder}",
        f"serve it with: chairlift serve {folder}",
    ]
    assert chairlift("train", config, "--quiet") == (0, nothing_left, [])
    code, _, err = chairlift("train", config, "--resume", "never")
    assert code == 2
    assert "has checkpoints (step-00000012) of an earlier run" in err[0]
    old = config.parent / "out" / "step-00000004"
    code, _, err = chairlift("train", config, "--resume", old)
    assert code == 2
    assert "has a newer checkpoint (step-00000012) than step-00000004" in err[0]
    elsewhere = config.parent / "elsewhere"
    code, resumed, _ = chairlift("train", config, "--resume", old, "--output", elsewhere, "--quiet")
    assert code == 0
    assert resumed[0].split(";")[0] == out[0].split(";")[0]
    mine, theirs = (load_file(each / "step-00000012" / "model.safetensors") for each in (elsewhere, old.parent))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_speed_is_known_from_the_first_step_and_leaves_it_out_later() -> None:
    now = [100.0]
    speed = Speed(lambda: now[0])
    speed.begin(5)
    found = []
    for seconds in (10.0, 2.0, 4.0):
        now[0] += seconds
        speed.add(6 + len(found), 120)
        found.append(speed.rates(15))
    assert found == [(12.0, 90.0), (60.0, 16.0), (40.0, 21.0)]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--set", "training.learning_rat=1"], "unknown key 'learning_rat'; allowed are steps, learning_rate,"),
        (["--set", "training.learning_rat=1"], "did you mean learning_rate?"),
        (["--set", "training.steps=many"], "training: steps must be a whole number, got 'many'"),
        (["--set", "training.schedule=sine"], "must be one of cosine, linear, constant, wsd, inverse_sqrt, got 'sine'"),
        (["--set", "training.steps=2024-13-45"], "steps must be a whole number, got '2024-13-45'"),
        (["--set", "packing.step=" + "[" * 3000], "step must be like tokens:1M"),
        (["--set", "threads=257"], "threads must be 1 to 256, got 257"),
        (["--processes", "0"], "processes must be at least 1, got 0"),
        (["--set", "training"], "--set takes key=value"),
        (["--set", "output.x=1"], "there is no section 'output'"),
        (["--set", "data.files=/nowhere.jsonl"], "data file /nowhere.jsonl does not exist"),
        (["--set", "data.source=a:B"], "either files or source"),
        (["--set", "data.files={a: []}"], "files: a has no file"),
        (["--set", "data.weights={a: 1}"], "weights must give every source in files a number above 0: files has data,"),
        (
            ["--set", "data.weights={data: 1}", "--set", "drift.weights={data: 1}"],
            "both data.weights and drift.weights",
        ),
        (["--set", "data.answers=some"], "must be one of auto, together, apart, got 'some'"),
        (["--set", "drift.reply=0.5"], "drift: unknown key 'reply'"),
        (["--set", "drift.replay=1"], "0 <= replay < 1"),
        (["--set", "drift.weights={a: much}"], "weights.a must be a number, got 'much'"),
        (["--set", "drift.weights={a: 1}"], "sources ['data'], weights {'a': 1.0}"),
        (["--set", "packing.step=often"], "step must be like tokens:1M"),
        (["--set", "packing.overflow=cut"], "must be one of error, split"),
        (["--set", "model.path=/nowhere"], "give either path"),
        (["--set", "model.config.num_hidden_layers=0"], "num_hidden_layers"),
        (["--set", "model.tokenizer=/nowhere"], "/nowhere has no tokenizer.json"),
        (["--output", "/dev/null"], "output /dev/null is not a directory"),
        (["--output", "/dev/null/run"], "output /dev/null/run is not a directory that can be written (/dev/null)"),
        (["--resume", "/nowhere"], "'/nowhere' is none"),
        (["--processes", "3", "--set", "packing.step=packs:8"], "a multiple of 3, got packs:8"),
    ],
)
def test_bad_settings_are_one_line_before_anything_starts(
    chairlift: Run, config: Path, flags: list[str], complaint: str
) -> None:
    code, out, err = chairlift("train", config, "--set", "training.steps=1", "--set", "training.warmup_steps=0", *flags)
    assert (code, out) == (2, [])
    assert len(err) == 1
    assert complaint in err[0]
    assert not (config.parent / "out").exists()


def test_bad_data_is_named_when_it_is_met(chairlift: Run, config: Path) -> None:
    with (config.parent / "data.jsonl").open("a") as file:
        file.write("{\n")
    code, _, err = chairlift("train", config, "--quiet")
    assert code == 2
    assert f"{config.parent / 'data.jsonl'}, line 61: not JSON" in err[-1]
    code, _, err = chairlift("train", config, "--quiet", "--set", "data.on_error=skip")
    assert code == 0
    assert err[-1].startswith("left out 1 record that")  # once, though 12 steps of 10 are two epochs


def test_sources_are_mixed_by_weight_and_what_was_ignored_is_said(chairlift: Run, tmp_path: Path) -> None:
    for name, token in (("a", 1), ("b", 2)):
        records = [{"input_ids": [token] * 8, "id": number} for number in range(40)]
        (tmp_path / f"{name}.json").write_text(json.dumps(records))
    files = {name: [str(tmp_path / f"{name}.*")] for name in "ab"}
    data = {"files": files, "weights": {"a": 9, "b": 1}}
    packing = {"capacity": 64, "pool": 2, "step": "sequences:100"}
    training = {"steps": 1, "warmup_steps": 0, "dropout": 0.0}
    config = write_config(tmp_path, data=data, packing=packing, training=training)
    code, _, err = chairlift("train", config, "--quiet")
    assert code == 0
    match = re.fullmatch(r"note: (\d+) records have the field 'id', which is ignored \(first: (.*)\)", err[0])
    assert match is not None and len(match[2].split("; ")) == 5
    assert all(
        re.fullmatch(rf"{re.escape(str(tmp_path))}/[ab].json, record \d+", each) for each in match[2].split("; ")
    )
    assert match is not None and 40 < int(match[1]) < 80, "each record counts once, and b is hardly read"


def test_cut_tokens_are_reported_by_source(chairlift: Run, tmp_path: Path) -> None:
    """Nothing is left to learn of the long prompt, so nothing is computed for it."""
    long = {"input_ids": [1] * 90, "loss_weight": [0] * 70 + [1] * 20}
    fits = {"input_ids": [1, 2, 3], "loss_weight": [0, 1, 1]}
    for name, records in (("a", [long, fits]), ("b", [fits, {"input_ids": [1] * 66}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records * 3))
    files = {name: [str(tmp_path / f"{name}.jsonl")] for name in "ab"}
    data = {"files": files, "shuffle": False, "epochs": 1}
    packing = {"capacity": 64, "overflow": "truncate", "step": "sequences:3"}
    training = {"steps": 3, "warmup_steps": 0, "dropout": 0.0}
    config = write_config(tmp_path, data=data, packing=packing, training=training)
    code, _, err = chairlift("train", config, "--quiet")
    assert code == 0
    assert [line.split(" (packing")[0] for line in sorted(err)] == [
        "a: 3 sequences did not fit in a pack and lost 270 tokens, 60 of them to learn; "
        "nothing to learn was left of 3, which are left out",
        "b: 3 sequences did not fit in a pack and lost 6 tokens, 6 of them to learn",
    ]


def test_dropped_sequences_and_data_without_targets_are_said(chairlift: Run, tmp_path: Path) -> None:
    records = [{"input_ids": [1] * 90}, {"input_ids": [1, 2, 3]}] * 3
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"files": [str(tmp_path / "a.jsonl")], "shuffle": False, "epochs": 1}
    packing = {"capacity": 64, "overflow": "drop", "step": "sequences:3"}
    config = write_config(tmp_path, data=data, packing=packing, training={"steps": 1, "warmup_steps": 0})
    code, _, err = chairlift("train", config, "--quiet")
    assert (code, err) == (0, ["left out 3 sequences that did not fit in a pack (packing.overflow, packing.capacity)"])
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1]}\n')
    code, _, err = chairlift("train", config, "--quiet", "--set", "data.epochs=null", "--output", tmp_path / "none")
    assert code == 2
    assert err[-1].startswith("chairlift: error: the last 100 steps have no target; give sequences of two tokens")


def test_a_directory_with_checkpoints_of_another_run_is_not_mixed_with_this(chairlift: Run, config: Path) -> None:
    few = ("--quiet", "--set", "training.steps=2", "--set", "training.warmup_steps=1")
    first, other = config.parent / "out", config.parent / "other"
    assert chairlift("train", config, *few, "--output", first)[0] == 0
    assert chairlift("train", config, *few, "--output", other)[0] == 0
    more = ("--quiet", "--set", "training.steps=3", "--set", "training.warmup_steps=1", "--output", first)
    code, _, err = chairlift("train", config, *more, "--resume", other / "step-00000002")
    assert code == 2 and "has checkpoints (step-00000002) of another run than" in err[-1]
    third = ("--output", config.parent / "third", "--resume", other / "step-00000002")
    assert chairlift("train", config, *more, *third)[0] == 0


def test_a_checkpoint_that_lacks_a_part_is_named(chairlift: Run, config: Path) -> None:
    few = ("--quiet", "--set", "training.steps=2", "--set", "training.warmup_steps=1")
    assert chairlift("train", config, *few)[0] == 0
    state = config.parent / "out" / "step-00000002" / "training" / "state.json"
    state.write_text("{}")
    code, _, err = chairlift("train", config, *few, "--set", "training.steps=3")
    assert code == 2 and "step-00000002 is damaged (its training/ is not what was written: see SHA256SUMS" in err[-1]
    (state.parent / "SHA256SUMS").unlink()  # as it was written before there was one
    code, _, err = chairlift("train", config, *few, "--set", "training.steps=3")
    assert code == 2 and "step-00000002: it is damaged (KeyError('trainer'))" in err[-1]


def test_changed_settings_are_named_with_the_way_out(chairlift: Run, config: Path) -> None:
    few = ("--quiet", "--set", "training.steps=2", "--set", "training.warmup_steps=1")
    assert chairlift("train", config, *few)[0] == 0
    more = ("--quiet", "--set", "training.steps=3", "--set", "training.warmup_steps=1", "--set", "packing.pool=3")
    code, _, err = chairlift("train", config, *more)
    assert code == 2
    assert "cannot go on from" in err[-1] and "pool was" in err[-1]
    assert err[-1].endswith("to start a new run, give another --output")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("data.train_on=all", "data.train_on was 'answers' and is 'all'"),
        ("data.add_eos=false", "data.add_eos was True and is False"),
        ("data.answers=apart", "data.answers was 'auto' and is 'apart'"),
        ("data.text_field=body", "data.text_field was 'text' and is 'body'"),
        ("data.columns={question: prompt}", "data.columns was {} and is {'question': 'prompt'}"),
        ("data.chat_template=TEMPLATE", "data.chat_template was 'sha256:"),
        ("model.tokenizer=OTHER", "the tokenizer was 'sha256:"),
    ],
)
def test_a_run_is_not_resumed_with_data_of_another_meaning(
    chairlift: Run, model_dir: Path, tmp_path: Path, change: str, complaint: str
) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "data.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    (tmp_path / "train.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    shutil.copytree(model_dir, tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    raw = {"model": {"path": str(model_dir)}, "data": {"files": str(tmp_path / "data.jsonl")}}
    raw["packing"] = {"capacity": 128, "pool": 4, "step": "sequences:4"}
    raw["training"] = {"steps": 1, "warmup_steps": 0}
    (tmp_path / "run.yaml").write_text(json.dumps(raw | {"output": str(tmp_path / "out")}))
    assert chairlift("train", tmp_path / "run.yaml", "--quiet")[0] == 0
    change = change.replace("TEMPLATE", str(tmp_path / "train.jinja")).replace("OTHER", str(tmp_path / "other"))
    more = ("--quiet", "--set", "training.steps=2")
    code, _, err = chairlift("train", tmp_path / "run.yaml", *more, "--set", change)
    assert code == 2
    assert "the data would have another meaning" in err[-1] and complaint in err[-1]
    assert chairlift("train", tmp_path / "run.yaml", *more, "--set", "data.on_error=skip")[0] == 0


def test_a_custom_source_is_loaded_by_its_path(chairlift: Run, config: Path) -> None:
    kept = {"source": "tests.cli.test_train:Counting", "options": {"first": 5}}
    raw = json.loads(config.read_text())
    config.write_text(json.dumps(raw | {"data": kept}))
    assert chairlift("train", config, "--quiet")[0] == 0
    for change, complaint in (
        ({"source": "tests.nowhere:A"}, "'tests.nowhere:A' cannot be imported: ModuleNotFoundError"),
        ({"source": "pathlib:Path"}, "has no __iter__, state_dict, load_state_dict"),
        ({"options": {"last": 1}}, "does not take these data.options"),
    ):
        config.write_text(json.dumps(raw | {"data": kept | change, "output": str(config.parent / "new")}))
        code, _, err = chairlift("train", config, "--quiet")
        assert (code, len(err)) == (2, 1)
        assert complaint in err[0]


def test_a_run_whose_source_has_ended_is_not_trained_again(chairlift: Run, config: Path) -> None:
    """The source would begin again if it were read again."""
    data = {"source": "tests.cli.test_train:Restarting"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"data": data}))
    code, out, _ = chairlift("train", config, "--quiet")
    assert (code, out[0].split(",")[0]) == (0, "trained 6 steps")
    folder = config.parent / "out" / "step-00000006"
    code, out, err = chairlift("train", config, "--quiet")
    assert (code, out[0], err) == (0, f"nothing is left to do: trained 6 steps; the model is in {folder}", [])


class Restarting:
    """As many sequences as six steps take, in every pass over it."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.next < 64:
            self.next += 1
            yield [(self.next + i) % tiny_run.VOCAB for i in range(8)]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Counting:
    """Sequences i, i + 1, i + 2 without end."""

    def __init__(self, first: int) -> None:
        self.next = first

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> list[int]:
        self.next += 1
        return [(self.next + i) % tiny_run.VOCAB for i in range(3)]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def run_process(*argv: str | Path, own_group: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "chairlift", "train", *map(str, argv)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=own_group)


@pytest.mark.nightly
def test_two_processes_learn_what_one_does_and_may_take_its_place(chairlift: Run, config: Path) -> None:
    """Also where it is the losses of all ranks that decide what comes next, and from one another's checkpoints."""
    tiny_run.write_records(config.parent / "more.jsonl", count=40, seed=1)
    files = {"data": [str(config.parent / "data.jsonl")], "more": [str(config.parent / "more.jsonl")]}
    config = write_config(
        config.parent,
        data={"files": files},
        packing={"step": "packs:4"},
        checkpoints={"keep": 9},
        drift={"mixing": "bandit", "weights": {"data": 2, "more": 1}},
    )
    folder = config.parent

    def read(name: str, step: int = 12) -> dict[str, torch.Tensor]:
        return load_file(folder / name / f"step-{step:08d}" / "model.safetensors")

    def close(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
        return all(torch.allclose(mine[name], theirs[name], rtol=0, atol=1e-5) for name in mine)

    two = run_process(config, "--processes", "2", "--output", folder / "two", "--quiet")
    code, one, _ = chairlift("train", config, "--quiet")
    out, err = two.communicate(timeout=300)
    assert (code, two.returncode) == (0, 0), err
    assert len(out.splitlines()) == 2, "only the first process reports"
    loss = [float(lines.split(", loss ")[1].split(";")[0]) for lines in (one[0], out)]
    assert loss[0] == pytest.approx(loss[1], abs=2e-4)
    assert close(read("out"), read("two"))
    assert not close(read("out"), read("out", 10))
    more = run_process(
        *(config, "--resume", folder / "out" / "step-00000004", "--processes", "2", "--output", folder / "one-two"),
        "--quiet",
    )
    fewer = ("--resume", folder / "two" / "step-00000004", "--output", folder / "two-one")
    assert chairlift("train", config, *fewer, "--quiet")[0] == 0
    _, err = more.communicate(timeout=300)
    assert more.returncode == 0, err
    assert close(read("out"), read("two-one"))
    assert close(read("out"), read("one-two"))


@pytest.mark.nightly
def test_processes_end_with_the_one_that_was_asked_to_train(config: Path, tmp_path: Path) -> None:
    """They would go on writing into the directory in which the same command begins again."""
    follow = {"files": [str(config.parent / "data.jsonl")], "access": "follow", "shuffle": False}
    config = write_config(tmp_path, data=follow)  # the file ends before the steps do: they wait for more of it
    process = run_process(config, "--processes", "2", own_group=True)
    assert process.stderr is not None
    try:
        seen = ""
        while "1/12" not in seen:
            more = process.stderr.read(1)
            assert more, seen
            seen += more
        process.kill()
        process.communicate(timeout=60)  # until nobody holds its pipes any more
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.full
def test_ctrl_c_writes_a_checkpoint_and_says_how_to_go_on(chairlift: Run, config: Path, tmp_path: Path) -> None:
    follow = {"files": [str(config.parent / "data.jsonl")], "access": "follow", "shuffle": False}
    config = write_config(tmp_path, data=follow)
    process = run_process(config)
    assert process.stderr is not None
    seen = ""
    while "1/12" not in seen:  # the first of the six steps that the file has
        more = process.stderr.read(1)
        assert more, seen
        seen += more
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    steps = int(out.split()[3].rstrip(";"))
    assert 1 <= steps <= 6
    assert out.splitlines()[1] == f"go on with: chairlift train {config}"
    assert (tmp_path / "out" / f"step-{steps:08d}" / "model.safetensors").is_file()
    tiny_run.write_records(tmp_path / "more.jsonl", count=90, seed=1)
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write((tmp_path / "more.jsonl").read_text())
    assert chairlift("train", config, "--quiet")[1][0].startswith("trained 12 steps")
