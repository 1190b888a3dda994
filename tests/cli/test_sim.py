from __future__ import annotations

import json
from pathlib import Path

import pytest

from chairlift_lab.replay.side_by_side import demo
from tests.cli.conftest import Run

MODELLED = "modelled, unvalidated"
ON_A_GPU = ("sim", "--machine", "l4", "--model", "llama-3-8b", "--num-prompts", "20")


def test_a_workload_is_simulated_on_a_machine_of_the_table(chairlift: Run, tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    code, out, err = chairlift(*ON_A_GPU, "--arrivals", "poisson:2", "--json", record)
    assert (code, err) == (0, [])
    assert out[0] == "workload chat, 20 requests, arrivals poisson:2, seed 0"
    assert out[1] == f"llama-3-8b on l4 ({MODELLED})"
    assert any(line.startswith("throughput ") for line in out)
    assert [line.split("  ")[0] for line in out[-5:]] == [
        "in the queue",
        "time to first token",
        "time per output token",
        "between tokens",
        "whole request",
    ]
    written = json.loads(record.read_text())
    assert written["validity"] == written["results"][0]["validity"] == MODELLED
    assert written["results"][0]["served"]["requests"] == 20
    assert chairlift(*ON_A_GPU, "--arrivals", "poisson:2")[1] == out, "one seed, one result"
    assert chairlift(*ON_A_GPU, "--arrivals", "poisson:2", "--seed", "1")[1] != out


def test_no_output_takes_the_place_of_an_input(chairlift: Run, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 6, "output_length": 4}')
    before = trace.read_text()
    for command in (
        ("sim", "--machine", "l4", "--model", "llama-3-8b", "--trace", trace, "--json", trace),
        ("bench", "offline", "--trace", trace, "--html", trace),
        ("trace", "show", trace, "--svg", trace),
        (*ON_A_GPU, "--save", tmp_path / "x", "--json", tmp_path / "x"),
    ):
        code, out, err = chairlift(*command)
        assert (code, out) == (2, [])
        assert "is read or written for something else, too" in err[0]
    assert trace.read_text() == before
    assert not (tmp_path / "x").exists()


def test_one_model_over_two_sockets_is_compared_with_two_replicas(chairlift: Run, tmp_path: Path) -> None:
    known = ("sim", "--machine", "turin-9755", "--model", "llama-3-8b", "--num-prompts", "20", "--json", tmp_path / "r")
    latency = {}
    for name, flags in {"replicas": ("--replicas", "2"), "divided": ("--tensor-parallel-size", "2")}.items():
        code, out, err = chairlift(*known, "--arrivals", "poisson:1", *flags)
        assert (code, err) == (0, [])
        assert ("2 x turin-9755 as one engine" in out[1]) == (name == "divided")
        [result] = json.loads((tmp_path / "r").read_text())["results"]
        latency[name] = result["served"]["e2e"]["p50"]
    assert latency["divided"] < 0.7 * latency["replicas"]
    saved = tmp_path / "saved.json"
    assert chairlift(*ON_A_GPU, "--save", saved)[0] == 0
    for flags in (("--cost-model", saved), ("--machine", saved)):
        code, _, err = chairlift("sim", *flags, "--tensor-parallel-size", "2")
        assert code == 2
        assert "has costs that were measured, on as many processes as there were then" in err[0]
    code, _, err = chairlift(*known, "--compare", "tensor_parallel_size=1,2")
    assert code == 2
    assert "simulate each --tensor-parallel-size by itself" in err[0]


def test_compare_prints_a_rate_for_each_value_of_a_setting(chairlift: Run, tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    code, out, _ = chairlift(*ON_A_GPU, "--compare", "max_num_seqs=1,4,16", "--json", record)
    assert code == 0
    assert out[1].endswith(f"({MODELLED})")
    rates = [float(line.split()[1]) for line in out[-3:]]
    assert [line.split()[0] for line in out[-3:]] == ["1", "4", "16"]
    assert rates[0] < rates[1] < rates[2]
    results = json.loads(record.read_text())["results"]
    assert [each["settings"]["scheduler"]["max_num_seqs"] for each in results] == [1, 4, 16]
    off, on = chairlift(*ON_A_GPU, "--workload", "assistant", "--compare", "enable-prefix-caching=false,true")[1][-2:]
    assert float(off.split()[1]) < float(on.split()[1])


def test_a_trace_is_simulated_with_the_flags_of_the_engine(chairlift: Run, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [{"timestamp": 100 * i, "input_length": 600, "output_length": 4, "hash_ids": [7]} for i in range(9)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = chairlift("sim", "--machine", "l4", "--trace", trace, "--num-prompts", "8", "--max-num-seqs", "1")
    assert code == 0
    assert out[0] == f"trace {trace}, 8 requests"
    assert "of them from the prefix cache" in out[4]
    assert "3,584 of them" in out[4]
    assert "with 1.0 requests on average" in "\n".join(out)


def test_a_cost_model_fitted_on_this_machine_is_saved_and_used_again(
    chairlift: Run, tmp_path: Path, model_dir: Path
) -> None:
    saved, steps = tmp_path / "cost.json", tmp_path / "steps.jsonl"
    flags = ("--num-prompts", "12", "--max-num-seqs", "8")
    code, out, err = chairlift("sim", "--fit", model_dir, "--save", saved, "--save-steps", steps, *flags)
    assert code == 0, err
    assert "real steps, half of them within" in out[1]
    assert MODELLED not in "\n".join(out)
    again = chairlift("sim", "--cost-model", saved, *flags)
    assert again[1] == out
    fields = json.loads(steps.read_text().splitlines()[0])
    assert {"start", "end", "num_decodes", "context_tokens", "prefill_tokens", "prefill_context"} <= set(fields)
    code, out, err = chairlift("sim", "--step-log", steps, "--model", model_dir, "--num-kv-blocks", "64", *flags)
    assert (code, err) == (0, [])
    assert f"the machine of {steps}" in out[1]
    assert "real steps" in out[1]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ((), "say on what: --machine"),
        (("--machine", "h1000"), "--machine must be one of"),
        (("--machine", "l4", "--model", "gpt-5"), "model must be a directory with a config.json or one of"),
        (("--machine", "l4", "--model", "llama-3-70b"), "take a larger machine"),
        (("--machine", "l4", "--workload", "chats"), "workload must be one of chat"),
        (("--machine", "l4", "--arrivals", "poison:3"), "poisson:RATE"),
        (("--machine", "l4", "--num-prompts", "0"), "--num-prompts must be from 1"),
        (("--machine", "l4", "--seed", "-1"), "seed must be 0 or more"),
        (("--machine", "l4", "--compare", "speed=1,2"), "compare must be SETTING=A,B"),
        (("--machine", "l4", "--compare", "max_num_seqs"), "compare must be SETTING=A,B"),
        (
            ("--machine", "l4", "--compare", "max_num_seqs=1,many"),
            "--max-num-seqs must be a whole number, or one such as 32k",
        ),
        (("--machine", "l4", "--compare", "max_num_seqs=1,0"), "--max-num-seqs must be"),
        (("--machine", "l4", "--compare", "enable_prefix_caching=1"), "must be of type bool"),
        (("--machine", "l4", "--cost-model", "x"), "not allowed with argument --machine"),
        (("--machine", "l4", "--max-model-len", "9000"), "takes 8192"),
        (("--machine", "l4", "--save-steps", "x"), "--save-steps goes with --fit"),
        (("--machine", "l4", "--json", "/nowhere/x.json"), "cannot write /nowhere/x.json: No such file"),
        (("--machine", "l4", "--save", "/tmp"), "cannot write /tmp: Is a directory; give another --save"),
        (("--cost-model", "/nowhere.json"), "cannot read the cost model"),
        (("--step-log", "/nowhere.jsonl", "--num-kv-blocks", "9"), "cannot read the step log"),
        (("--trace", "/nowhere.jsonl", "--machine", "l4"), "cannot read the trace"),
        (("--trace", "t.jsonl", "--machine", "l4", "--arrivals", "all"), "--arrivals is for a workload"),
        (("--machine", "l4", "--threads"), "unknown flag '--threads'"),
        (("gate", "my:Policy", "--frist", "2"), "unknown flag '--frist'; did you mean --first"),
        (("seeds", "--seeds", "0"), "--seeds must be at least 1, got 0"),
        (("seeds", "--frist", "2"), "unknown flag '--frist'; did you mean --first"),
    ],
)
def test_wrong_usage_is_one_line(chairlift: Run, argv: tuple[str, ...], complaint: str) -> None:
    code, out, err = chairlift("sim", *argv)
    assert (code, out) == (2, [])
    assert len(err) == 1
    assert complaint in err[0]


@pytest.mark.parametrize("command", [("sim", "--machine", "l4"), ("trace", "replay", "FILE")])
@pytest.mark.parametrize(
    ("setting", "why"), [("threads", "threads in FILE means nothing"), ("top_k", "unknown setting 'top_k' in FILE")]
)
def test_settings_of_no_simulation_are_refused_in_a_file_too(
    chairlift: Run, tmp_path: Path, command: tuple[str, ...], setting: str, why: str
) -> None:
    config, recording = tmp_path / "c.json", tmp_path / "steps.jsonl"
    config.write_text(json.dumps({"max-num-seqs": 4, setting: 2}))
    recording.write_bytes(demo())
    argv = (recording if word == "FILE" else word for word in command)
    code, out, err = chairlift(*argv, "--config", config)
    assert (code, out) == (2, [])
    assert len(err) == 1 and err[0].startswith(f"chairlift: error: {why.replace('FILE', str(config))}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a cost model"),
        ("{}", "not a cost model: machine is None"),
        ('{"machine": "m", "model": "x", "validity": "v", "kv_bytes_per_token": 0}', "kv_bytes_per_token is 0"),
    ],
)
def test_damaged_cost_models_are_refused(chairlift: Run, tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "c.json").write_text(text)
    code, _, err = chairlift("sim", "--cost-model", tmp_path / "c.json")
    assert code == 2
    assert complaint in err[0]


@pytest.mark.parametrize("line", ["{", "{}", '{"start": 2, "end": 1}', "[]", "3"])
def test_damaged_step_logs_are_refused(chairlift: Run, tmp_path: Path, line: str) -> None:
    good = {"start": 0, "end": 1, "num_decodes": 1, "context_tokens": 1, "prefill_tokens": 0, "prefill_context": 0}
    line = json.dumps(good | {"start": 2}) if line.startswith('{"start') else line
    (tmp_path / "s.jsonl").write_text(json.dumps(good) + "\n" + line + "\n")
    code, _, err = chairlift("sim", "--step-log", tmp_path / "s.jsonl", "--num-kv-blocks", "9")
    assert code == 2
    assert "line 2 of" in err[0]


@pytest.mark.parametrize("field", ["num_decodes", "end"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e300"])
def test_step_logs_with_impossible_numbers_are_refused(chairlift: Run, tmp_path: Path, field: str, value: str) -> None:
    """NaN is neither below nor above anything: every time that was learnt from it was wrong, and nothing said so."""
    steps = [
        {"start": i, "end": i + 1, "num_decodes": 1, "context_tokens": 1, "prefill_tokens": 0, "prefill_context": 0}
        for i in range(40)
    ]
    lines = [json.dumps(step | {field: float(value)}) for step in steps]
    (tmp_path / "s.jsonl").write_text("\n".join(lines))
    code, _, err = chairlift("sim", "--step-log", tmp_path / "s.jsonl", "--num-kv-blocks", "9")
    assert (code, len(err)) == (2, 1)
    assert "a step cannot have" in err[0]


def test_a_step_log_needs_a_memory_and_enough_steps(chairlift: Run, tmp_path: Path) -> None:
    good = {"start": 0, "end": 1, "num_decodes": 1, "context_tokens": 1, "prefill_tokens": 0, "prefill_context": 0}
    (tmp_path / "s.jsonl").write_text(json.dumps(good) + "\n")
    assert "give --kv-cache-memory-bytes" in chairlift("sim", "--step-log", tmp_path / "s.jsonl")[2][0]
    assert "at least 16 steps" in chairlift("sim", "--step-log", tmp_path / "s.jsonl", "--num-kv-blocks", "9")[2][0]


@pytest.mark.parametrize("last", [{"start": 38, "end": 39.5}, {"start": 0, "end": 0.5}])
def test_steps_that_took_no_time_teach_nothing(chairlift: Run, tmp_path: Path, last: dict[str, float]) -> None:
    """Two that ended at once, and the first step of another log behind this one."""
    step = {"num_decodes": 1, "context_tokens": 1, "prefill_tokens": 0, "prefill_context": 0}
    steps = [step | times for times in (*({"start": i, "end": i + 0.5} for i in range(40)), last)]
    log, flags = tmp_path / "s.jsonl", ("--num-kv-blocks", "99", "--num-prompts", "2")
    log.write_text("\n".join(map(json.dumps, steps)))
    code, out, err = chairlift("sim", "--step-log", log, *flags)
    assert (code, err) == (0, [])
    assert "fitted on 40 real steps" in out[1]
    log.write_text("\n".join(map(json.dumps, [*steps[:15], step | {"start": 1, "end": 14.5}])))
    code, _, err = chairlift("sim", "--step-log", log, *flags)
    assert (code, "at least 16 steps" in err[0]) == (2, True)


def test_sim_seeds_counts_the_worlds_it_ran(chairlift: Run) -> None:
    code, out, err = chairlift("sim", "seeds", "--seeds", "3", "--first", "40")
    assert (code, err) == (0, [])
    assert out[0].startswith("3 seeds, ")
    assert chairlift("sim", "seeds", "--seed", "17")[1][0].startswith("1 seeds, ")


@pytest.mark.parametrize(("ttft_ms", "kept"), [(60_000, "100.0%"), (0.001, "0.0%")])
def test_the_report_says_how_many_requests_met_their_class_promises(chairlift: Run, ttft_ms: float, kept: str) -> None:
    classes = json.dumps({"default": {"ttft_ms": ttft_ms}})
    flags = ("--scheduling-policy", "priority", "--service-classes", classes, "--num-prompts", "5")
    code, out, err = chairlift("sim", "--machine", "l4", *flags)
    assert (code, err) == (0, [])
    assert f"promises        met for {kept} of the requests" in "\n".join(out)


def test_a_fleet_that_keeps_its_promises(chairlift: Run, tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    fleet = (*ON_A_GPU, "--arrivals", "poisson:3", "--replicas", "1,2", "--slo", "ttft:60000,tpot:60000")
    code, out, err = chairlift(*fleet, "--routing", "rr,forecast", "--target", "0.9", "--price", "1", "--json", record)
    assert (code, err) == (0, [])
    assert "100.0% of the requests meet their targets (required 90.0%); 83.9% to 100.0% of all" in out[-1]
    assert out[-1][0] == "1" and out[-1].endswith(", so more requests are needed to be sure of 90.0%")
    assert [line.split()[:2] for line in out[4:8]] == [["1", "rr"], ["1", "forecast"], ["2", "rr"], ["2", "forecast"]]
    results = json.loads(record.read_text())["results"]
    assert [each["replicas"] for each in results] == [1, 1, 2, 2]
    assert all(sum(each["requests_by_replica"]) == each["served"]["requests"] == 20 for each in results)
    code, out, _ = chairlift(*ON_A_GPU, "--replicas", "1", "--autoscale", "1-2", "--price", "2.5")
    assert code == 0 and [line.split()[0] for line in out[-2:]] == ["1", "1.0"] and "(to 1)" in out[-1]
    hopeless = (*ON_A_GPU, "--replicas", "1", "--slo", "ttft:0.001", "--target", "0.9")
    assert chairlift(*hopeless)[1][-1] == "none of these meets the targets of 90.0% of the requests; try more replicas"


def test_requests_of_a_replica_that_dies_move_to_another(chairlift: Run) -> None:
    code, out, _ = chairlift(*ON_A_GPU, "--replicas", "2", "--fail", "0@0.5", "--start-seconds", "1", "--resume")
    assert code == 0 and "moved" in out[3].split()
    assert out[4].split()[-2] == "0", "none is broken"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--target", "0.9"), "--target is about a fleet; say how many with --replicas"),
        (("--replicas", "2", "--target", "0.9"), "--target needs latency targets, but this traffic has none"),
        (("--replicas", "17"), "is measured on 1/2 of the traffic, and 10 requests are too few"),
        (("--replicas", "17", "--rollout", "1"), "17 replicas are simulated as flows of requests, without a rollout"),
        (("--replicas", "two"), "--replicas takes numbers such as 1,2,4, got 'two'"),
        (("--autoscale", "2"), "--autoscale takes MIN-MAX such as 1-4, got '2'"),
        (("--autoscale", "3-2"), "autoscaling needs at least 1 replica and a maximum of at least the minimum, got 3-2"),
        (("--replicas", "2", "--fail", "1"), "--fail takes REPLICA@SECONDS such as 0@12.5, got '1'"),
        (("--replicas", "2", "--compare", "max_num_seqs=1,2"), "--compare and --replicas are two comparisons"),
        (("--replicas", "2", "--slo", "speed:3"), "goodput wants limits in ms"),
    ],
)
def test_impossible_fleet_flags_are_refused(chairlift: Run, flags: tuple[str, ...], message: str) -> None:
    code, out, err = chairlift(*ON_A_GPU, *flags)
    assert (code, out) == (2, []) and message in err[0]


def test_presets_are_compared_with_their_settings_and_tune_refuses_static(chairlift: Run, tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    code, _, err = chairlift(*ON_A_GPU, "--compare", "preset=static,vllm,tgi", "--json", record)
    assert (code, err) == (0, [])
    schedulers = [result["settings"]["scheduler"] for result in json.loads(record.read_text())["results"]]
    assert [(each["preset"], each["batching"], each["prefill_mode"]) for each in schedulers] == [
        ("static", "static", "mixed"),
        ("vllm", "continuous", "mixed"),
        ("tgi", "continuous", "separate"),
    ]
    code, _, err = chairlift("tune", "--workload", "chat", "--output", tmp_path, "--preset", "static")
    assert code == 2 and "preset 'static' sets it" in err[-1]
