from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift.config import EngineConfig
from chairlift.core.scheduler.cost_model import CostModel, Roofline, StepFeatures
from chairlift.engine.step_export import read_recording
from chairlift.engine.step_recorder import StepRecorder
from chairlift.errors import ConfigError
from chairlift_lab.bench.tune_state import kept_latencies
from chairlift_lab.cli.sim import report_lines
from chairlift_lab.replay.calibrate import calibrate, describe_fit, fit_steps
from chairlift_lab.replay.machines import (
    MACHINES,
    MODELLED,
    MODELS,
    Deployment,
    deploy,
    shape_from_name,
)
from chairlift_lab.replay.replay import RequestTiming, ServedTrace, SimReport, replay, serve_trace, simulated_core
from chairlift_lab.replay.side_by_side import (
    batching_sides,
    compare_sides,
    recorded_config,
    recorded_deployment,
    recorded_trace,
)
from chairlift_lab.workload.arrivals import Gamma, parse_arrivals
from chairlift_lab.workload.lengths import Fixed
from chairlift_lab.workload.trace import TracedRequest, draw_trace
from chairlift_lab.workload.traffic import Chats, ToolPauses, Traffic
from tests.tiers import one_in

STEP = Roofline(
    weight_seconds=0.02,
    token_seconds=0.001,
    prompt_share=0.7,
    context_seconds=1e-6,
    pair_seconds=1e-7,
    step_seconds=0.001,
)
FLAT = Roofline(weight_seconds=0.1, token_seconds=1e-9, context_seconds=1e-15, pair_seconds=1e-15, step_seconds=1e-12)
"""A step takes 0.1 s, whatever is in it."""


def deployment(cost: Roofline = STEP, **changes: Any) -> Deployment:
    return dataclasses.replace(
        Deployment(
            machine="m",
            model="x",
            cost=CostModel(cost),
            kv_bytes_per_token=1000,
            kv_memory_bytes=10**9,
            max_model_len=16_384,
        ),
        **changes,
    )


def served(trace: list[TracedRequest], cost: Roofline = STEP, **settings: Any) -> ServedTrace:
    return replay(trace, EngineConfig.from_flat(settings), deployment(cost)).served


def one(arrival: float, prompt: int = 10, output: int = 3, **fields: Any) -> TracedRequest:
    return TracedRequest(arrival=arrival, prompt_tokens=prompt, output_tokens=output, **fields)


def test_a_request_alone_has_the_times_of_its_steps() -> None:
    figures = served([one(5.0, output=4)], FLAT)
    assert (figures.requests, figures.steps, figures.output_tokens) == (1, 4, 4)
    assert [figures.ttft.p50, figures.tpot.p50, figures.itl.p99] == pytest.approx([0.1] * 3)
    assert figures.e2e.mean == figures.seconds == pytest.approx(0.4)
    assert figures.queue.mean == 0
    assert figures.output_tokens_per_second == pytest.approx(10)
    assert figures.utilisation == pytest.approx(1)


def test_gaps_between_tokens_are_those_within_a_request() -> None:
    itl = served([one(0.0, output=3), one(0.05, output=2), one(5.0, output=1), one(9.0, output=2)], FLAT).itl
    assert [itl.mean, itl.p50, itl.p99] == pytest.approx([0.1] * 3)
    assert served([one(0.0, output=1)], FLAT).itl.mean == 0


def test_a_step_takes_what_the_cost_model_says_of_it() -> None:
    """A prompt of 100 in two chunks beside a decode."""
    trace = [one(0.0, prompt=40, output=3), one(0.01, prompt=100, output=1)]
    figures = served(trace, max_num_batched_tokens=64)
    cost = CostModel(STEP)
    steps = [StepFeatures(0, 0, 40, 40 * 20.5), StepFeatures(1, 41, 63, 63 * 32)]
    steps += [StepFeatures(1, 42, 37, 37 * (63 + 19))]
    assert figures.seconds == pytest.approx(sum(map(cost.step_seconds, steps)))
    assert figures.steps == 3


def test_a_request_that_comes_during_a_step_starts_at_the_next() -> None:
    figures = served([one(0.0, output=3), one(0.15, output=1)], FLAT)
    assert figures.queue.mean == pytest.approx(0.05 / 2)
    assert figures.ttft.mean == pytest.approx((0.1 + 0.15) / 2)
    assert figures.steps == 3


def test_the_clock_jumps_over_times_without_requests() -> None:
    figures = served([one(0.0, output=1), one(1000.0, output=1)], FLAT)
    assert figures.seconds == pytest.approx(1000.1)
    assert figures.utilisation == pytest.approx(0.2 / 1000.1)
    assert figures.steps == 2


def test_one_seed_is_one_result() -> None:
    trace = draw_trace("chat", Gamma(6.0, 0.5), 120, seed=4)
    config = EngineConfig.from_flat({"max_num_seqs": 16, "num_kv_blocks": 200})
    first = replay(trace, config, deployment())
    assert first.served.preemptions > 0
    assert replay(trace, config, deployment()) == first
    other = draw_trace("chat", Gamma(6.0, 0.5), 120, seed=5)
    assert replay(other, config, deployment()) != first


@pytest.mark.full
def test_the_result_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "import json; from chairlift.config import EngineConfig; from chairlift_lab.replay.machines import *\n"
        "from chairlift_lab.replay.replay import replay; from chairlift_lab.workload.trace import draw_trace\n"
        "trace = draw_trace('assistant', count=40)\n"
        "print(json.dumps(replay(trace, EngineConfig(), deploy('l4', MODELS['llama-3-8b'])).to_dict()))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": salt}, capture_output=True, check=True)
        for salt in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout
    assert json.loads(runs[0].stdout)["served"]["requests"] == 40


@pytest.mark.full
@pytest.mark.parametrize("load", one_in(3, [0.6, 0.3, 0.8]))
def test_one_slot_with_poisson_arrivals_is_an_m_d_1_queue(load: float) -> None:
    """Exactly Lindley's recursion on these arrivals, and nearly Pollaczek and Khinchine's mean over many of them."""
    count = 12_000
    times = Gamma(load / 0.1).times(count, seed=1)
    figures = served([one(time, prompt=1, output=1) for time in times], FLAT, max_num_seqs=1)
    waits, wait = [0.0], 0.0
    for gap in np.diff(times):
        wait = max(0.0, wait + 0.1 - float(gap))
        waits.append(wait)
    assert figures.queue.mean == pytest.approx(np.mean(waits), rel=1e-6)
    assert figures.queue.p99 == pytest.approx(np.percentile(waits, 99), rel=1e-6)
    assert figures.queue.mean == pytest.approx(load * 0.1 / (2 * (1 - load)), rel=0.12)
    assert figures.utilisation == pytest.approx(load, rel=0.05)


def test_the_replay_obeys_littles_law() -> None:
    """Requests in the system = rate of arrival x time in the system, whatever the scheduler does."""
    trace = draw_trace("chat", parse_arrivals("poisson:3"), 400, seed=2)
    figures = served(trace, max_num_seqs=32)
    inside = figures.requests_per_second * (figures.e2e.mean - figures.queue.mean)
    assert figures.mean_rows == pytest.approx(inside, rel=0.25)


def test_continuous_batching_beats_static_and_more_rows_beat_fewer() -> None:
    trace = draw_trace("chat", count=100)
    rates = {
        batching: served(trace, batching=batching, max_num_seqs=16).output_tokens_per_second
        for batching in ("continuous", "dynamic", "static")
    }
    assert rates["continuous"] > 1.5 * rates["static"]
    assert rates["dynamic"] == pytest.approx(rates["static"], rel=0.3)
    assert served(trace, max_num_seqs=4).output_tokens_per_second < rates["continuous"]


def test_a_static_batch_delivers_nothing_before_its_last_answer_has_ended() -> None:
    """With steps of 0.1 s; what its users see is what counts, also for their promises."""
    trace = [dataclasses.replace(one(0.0, output=output), ttft_ms=300.0) for output in (2, 5)]
    figures = served(trace, FLAT, batching="static", max_num_seqs=4)
    assert figures.ttft == figures.e2e
    assert (figures.ttft.mean, figures.tpot.mean, figures.itl.mean) == pytest.approx((0.5, 0.0, 0.0))
    assert figures.goodput == 0.0
    assert kept_latencies(arrivals(trace, batching="static", max_num_seqs=4)) == pytest.approx([0.5, 0.5])
    assert served(trace, FLAT, batching="dynamic", max_num_seqs=4).goodput == 1.0


def test_equal_prefixes_are_computed_once() -> None:
    trace = draw_trace("assistant", parse_arrivals("poisson:2"), 40)
    shared, alone = served(trace), served(trace, enable_prefix_caching=False)
    assert shared.cached_tokens == 39 * 1024
    assert alone.cached_tokens == 0
    assert shared.ttft.mean < 0.7 * alone.ttft.mean


def test_cancelled_requests_do_not_count_as_cached_prompts() -> None:
    trace = [
        TracedRequest(arrival=place, prompt_tokens=1024, output_tokens=100, prefix_ids=(1, 2), cancel_ms=left)
        for place, left in enumerate((None, 50.0, 50.0))
    ]
    figures = served(trace)
    assert (figures.requests, figures.cancelled) == (1, 2)
    assert (figures.prompt_tokens, figures.cached_tokens) == (1024, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"batching": "static"},
        {"batching": "dynamic", "preferred_batch_sizes": "4,8", "batch_wait_ms": 50.0},
        {"preset": "triton-dynamic"},
    ],
)
def test_a_recording_of_batches_is_replayed_in_batches(settings: dict[str, Any]) -> None:
    core, limits = simulated_core(deployment(), EngineConfig.from_flat({"max_num_seqs": 8, **settings}))
    recorder = StepRecorder(core, most_bytes=1 << 24)
    ran = serve_trace(core, [one(0.1 * place, output=10 + 20 * (place % 5)) for place in range(40)], limits)
    recording = read_recording(recorder.take())
    replayed = replay(recorded_trace(recording), recorded_config(recording), recorded_deployment(recording)).served
    assert replayed.output_tokens_per_second == pytest.approx(ran.output_tokens_per_second, rel=0.02)
    other = recorded_config(recording, preset="tgi").scheduler  # wins over what was recorded
    assert (other.batching, other.prefill_mode, other.preset) == ("continuous", "separate", "tgi")
    figures, *_ = compare_sides(recording, *batching_sides())
    assert figures["upper"]["tokens_per_second"] > 1.2 * figures["lower"]["tokens_per_second"]


@pytest.mark.parametrize(("long", "short", "held"), [(11, 1, 0.5), (11, 6, 0.25), (3, 3, 0.0)])
def test_a_static_batch_counts_tokens_computed_for_rows_that_have_ended(long: int, short: int, held: float) -> None:
    """A first token comes with the prompt; after it a batch of two computes two rows until its longer answer ends."""
    core, limits = simulated_core(deployment(), EngineConfig.from_flat({"max_num_seqs": 2}))
    recorder = StepRecorder(core, most_bytes=1 << 24)
    serve_trace(core, [one(0.0, output=output) for output in (long, short) * 12], limits)
    figures, *_ = compare_sides(read_recording(recorder.take()), *batching_sides())
    assert figures["lower"]["held_share"] == pytest.approx(held)
    assert figures["words"][-1].startswith(f"Of what simulated static batches compute for answers, {held:.0%} is")


def test_a_replay_has_the_memory_of_the_recorded_engine_unless_told_otherwise() -> None:
    core, limits = simulated_core(deployment(), EngineConfig.from_flat({"max_num_seqs": 8, "num_kv_blocks": 40}))
    recorder = StepRecorder(core, most_bytes=1 << 24)
    serve_trace(core, [one(0.1 * place, output=20) for place in range(9)], limits)
    recording = read_recording(recorder.take())

    def blocks(**changes: Any) -> int:
        core, _ = simulated_core(recorded_deployment(recording), recorded_config(recording, **changes))
        return core.kv.pools[0].num_blocks

    assert blocks() == 40
    assert blocks(block_size=32) == 20
    assert blocks(kv_cache_memory_bytes=10 * 16 * 1000) == 10
    assert blocks(num_kv_blocks=7) == 7


@pytest.mark.full
def test_where_memory_is_so_short_that_static_batches_win_that_is_said() -> None:
    settings = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "num_kv_blocks": 60}
    tokens = dataclasses.replace(STEP, weight_seconds=0.001, token_seconds=0.002)  # so that recomputing is dear
    core, limits = simulated_core(deployment(tokens), EngineConfig.from_flat(settings))
    recorder = StepRecorder(core, most_bytes=1 << 24)
    serve_trace(core, [one(0.0, prompt=16, output=400) for _ in range(40)], limits)
    figures, *_ = compare_sides(read_recording(recorder.take()), *batching_sides())
    ratio = figures["upper"]["tokens_per_second"] / figures["lower"]["tokens_per_second"]
    assert ratio < 0.9
    assert figures["words"][1].startswith("Simulated, both: ")
    assert f"this is {ratio:.2f} times as much; the simulation is right within " in figures["words"][1]


def _recorded(settings: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The lines of a recording of continuous batching, answers of many lengths."""
    core, limits = simulated_core(deployment(), EngineConfig.from_flat({"max_num_seqs": 8} | (settings or {})))
    recorder = StepRecorder(core, most_bytes=1 << 24)
    serve_trace(core, [one(0.1 * place, output=10 + 20 * (place % 5)) for place in range(40)], limits)
    return [json.loads(line) for line in recorder.take().splitlines()]


def _joined(lines: list[dict[str, Any]]) -> bytes:
    return b"\n".join(json.dumps(line).encode() for line in lines)


def test_static_batches_have_no_time_per_token() -> None:
    static = replay([one(0.0, output=9)] * 4, EngineConfig.from_flat({"batching": "static"}), deployment())
    assert static.served.delivered_whole
    lines = {line.split("  ")[0]: line.split()[-4:] for line in report_lines(static)}
    assert lines["time per output token"] == lines["between tokens"] == ["-"] * 4
    assert "-" not in lines["time to first token"]


def test_measured_figures_stand_first_and_simulated_ones_are_marked() -> None:
    recording = read_recording(_joined(_recorded()))
    figures, *_ = compare_sides(recording, *batching_sides())
    whole = [(each.ended or 0) - each.arrival for each in recording.arrivals]
    assert figures["measured"]["whole_p50"] == pytest.approx(float(np.median(whole)))
    assert 0 < figures["measured"]["first_p50"] < figures["measured"]["whole_p50"]
    assert figures["words"][0].startswith("Measured: ")
    assert all("imulated" in text for text in figures["words"][1:])
    assert all("all 40 within" in figures["words"][place] for place in (0, 3)), "40 requests have no 99th percentile"
    assert figures["measured"]["whole_p99"] == pytest.approx(max(whole))
    other, *_ = compare_sides(recording, *batching_sides(max_num_seqs=4))
    assert not other["words"][0].startswith("Measured"), "with other settings nothing was measured"


@pytest.mark.parametrize(
    ("gap", "count", "claim"),
    [
        (2.0, 24, "Both keep up with the requests as they arrive, so these rates are those of the traffic."),
        (0.0, 40, "times as much; the simulation is right within 5%."),
        (0.0, 8, "They do not differ by more than the error of the simulation (5%)."),
    ],
)
def test_a_ratio_is_claimed_only_of_sides_that_differ_and_do_not_keep_up(gap: float, count: int, claim: str) -> None:
    core, limits = simulated_core(deployment(), EngineConfig.from_flat({"max_num_seqs": 8}))
    recorder = StepRecorder(core, most_bytes=1 << 24)
    serve_trace(core, [one(gap * place, output=40 + 60 * (place % 5)) for place in range(count)], limits)
    figures, *_ = compare_sides(read_recording(recorder.take()), *batching_sides())
    assert figures["words"][1].endswith(claim), figures["words"][1]


def test_a_step_model_that_does_not_fit_is_refused_with_the_reason() -> None:
    lines, rng, late = _recorded(), np.random.default_rng(0), 0.0
    for line in lines:  # a machine whose steps take anything, whatever is in them
        begin = late
        if "step" in line:
            late += 0.05 * float(np.exp(rng.normal(0, 1.5)))
            line["t"] = [line["t"][0] + begin, line["t"][1] + late]
    with pytest.raises(ConfigError, match=r"no comparison: the step model misses half of the .* by more than \d+%"):
        compare_sides(read_recording(_joined(lines)), *batching_sides())


def test_a_simulation_that_contradicts_the_recording_is_refused() -> None:
    """The steps say 0.7 s, the requests took three times as long: something that no step shows."""
    lines = _recorded()
    for line in lines:
        for change in line.get("do", ()):
            if change[0] == "end":
                change[2] *= 3.0
    with pytest.raises(ConfigError, match=r"no comparison: an answer \(median\) took .* in a simulation of the same"):
        compare_sides(read_recording(_joined(lines)), *batching_sides())


def test_time_between_the_steps_of_rows_that_decode_on_belongs_to_the_steps() -> None:
    lines = _recorded()
    steps = [line for line in lines if "step" in line]
    for number, line in enumerate(steps):  # the host takes 20 ms between any two steps
        line["t"] = [line["t"][0] + 0.02 * number, line["t"][1] + 0.02 * number]
    seconds = [each for _, each in read_recording(_joined(lines)).steps]
    plain = [each for _, each in read_recording(_joined(_recorded())).steps]
    more = np.array(seconds[1:]) - np.array(plain[1:])
    assert float(np.median(more)) == pytest.approx(0.02, abs=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
def test_looking_ahead_changes_no_work_and_little_time(depth: int) -> None:
    trace = draw_trace("chat", parse_arrivals("poisson:3"), 60)
    plain, ahead = served(trace), served(trace, num_lookahead_steps=depth)
    assert ahead.output_tokens == plain.output_tokens
    assert ahead.seconds == pytest.approx(plain.seconds, rel=0.05)


def test_goodput_is_the_share_of_requests_that_met_their_targets() -> None:
    trace = [one(0.0, ttft_ms=150.0, tpot_ms=100.001), one(0.0, ttft_ms=99.0), one(0.0, deadline_ms=299.0), one(0.0)]
    assert served(trace, FLAT).goodput == pytest.approx(1 / 3)
    assert served([one(0.0)], FLAT).goodput is None


def test_promises_reach_the_policy() -> None:
    """One slot: the urgent request that came last goes first, where the policy looks, and one too late is dropped."""
    trace = [one(0.0, output=5), one(0.01, output=5), one(0.02, output=5, priority=-5, tenant="t")]
    plain = served(trace, FLAT, max_num_seqs=1)
    urgent = [*trace[:2], dataclasses.replace(trace[2], ttft_ms=600.0)]
    assert served(urgent, FLAT, max_num_seqs=1).goodput == 0.0
    assert served(urgent, FLAT, max_num_seqs=1, scheduling_policy="priority").goodput == 1.0
    assert plain.goodput is None
    late = [*trace[:2], one(0.02, output=5, deadline_ms=1.0)]
    figures = served(late, FLAT, max_num_seqs=1, scheduling_policy="priority", late_requests="drop")
    assert (figures.requests, figures.dropped, figures.goodput) == (2, 1, 0.0)
    unknown = [one(0.0), one(0.0, service_tier="gold")]
    assert served(unknown, FLAT, scheduling_policy="priority").refused == 1
    assert served(unknown, FLAT).refused == 0


def test_requests_that_can_never_fit_are_refused_and_the_others_are_served() -> None:
    trace = [one(0.0), one(0.0, prompt=20_000), one(0.0, prompt=600), one(0.1)]
    figures = served(trace, num_kv_blocks=33)
    assert (figures.requests, figures.refused) == (2, 2)


def test_settings_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes 16384"):
        served([one(0.0)], max_model_len=20_000)
    with pytest.raises(ConfigError, match="no room for two blocks"):
        served([one(0.0)], kv_cache_memory_bytes=17_000)
    with pytest.raises(ConfigError, match=r"swap_space_bytes holds .* blocks of this model"):
        served([one(0.0)], swap_space_bytes=2**50)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefill_mode": "separate"},
        {"prefill_mode": "prefill_first", "scheduling_policy": "priority"},
        {"num_lookahead_steps": 1},
        {"num_lookahead_steps": 2, "scheduling_policy": "priority"},
    ],
    ids=str,
)
def test_the_context_of_decodes_is_exact(settings: dict[str, Any]) -> None:
    """The scheduler's record of each step, compared with the rows of that step."""
    few = {"max_num_seqs": 8, "num_kv_blocks": 120, "max_num_batched_tokens": 128, **settings}
    core, limits = simulated_core(deployment(), EngineConfig.from_flat(few))
    trace = draw_trace("chat", parse_arrivals("poisson:4"), 60)
    computed: dict[str, int] = {}
    records: list[Any] = []

    class Check:
        @staticmethod
        def landed(record: Any) -> None:
            records.append(record)

    core.events.subscribe("the test", Check)
    figures = serve_trace(core, trace, limits)
    for record in records:
        for name in record.preempted:
            computed.pop(name, None)
        for name, chunk in record.chunks:
            computed[name] = chunk.end
        for name, _ in record.decodes:
            computed[name] += 1
        assert record.context_tokens == sum(computed[name] for name, _ in record.decodes)
    assert figures.preemptions > 0
    assert len(records) == figures.steps > 100


def test_every_model_on_every_machine_it_fits_on_is_marked_as_modelled() -> None:
    fitting = 0
    for machine in MACHINES:
        for shape in MODELS.values():
            if shape.weight_bytes > 0.4 * MACHINES[machine].memory:
                with contextlib.suppress(ConfigError):
                    deploy(machine, shape)
                continue
            modelled = deploy(machine, shape)
            fitting += 1
            assert modelled.validity == MODELLED
            assert Deployment.from_dict(json.loads(json.dumps(modelled.to_dict()))).to_dict() == modelled.to_dict()
    assert fitting > 100
    with pytest.raises(ConfigError, match=r"141 GB of weights, but h100-sxm has 72 GB .* take a larger machine"):
        deploy("h100-sxm", MODELS["llama-3-70b"])
    report = replay([one(0.0)], EngineConfig(), deploy("h100-sxm", MODELS["llama-3-8b"]))
    assert isinstance(report, SimReport)
    assert report.to_dict()["validity"] == "modelled, unvalidated"


def test_the_shapes_are_those_of_the_models() -> None:
    """Weights in billions, and KV bytes per token, as the models' cards have them."""
    known = {"qwen2.5-0.5b": (0.494, 12_288), "llama-3-8b": (8.03, 131_072), "llama-3-70b": (70.6, 327_680)}
    known |= {"qwen3-0.6b": (0.596, 114_688), "llama-3.2-1b": (1.236, 32_768), "smollm-135m": (0.1345, 46_080 // 2)}
    known |= {"mistral-7b": (7.25, 131_072), "qwen2.5-7b": (7.62, 57_344), "qwen2.5-32b": (32.8, 262_144)}
    for name, (billions, kv_bytes) in known.items():
        shape = MODELS[name]
        assert shape.weight_bytes / 2e9 == pytest.approx(billions, rel=0.01), name
        assert shape.kv_bytes == kv_bytes, name


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_model_of_ones_own_has_the_shape_that_its_config_says(tmp_path: Path, dtype: str, size: int) -> None:
    config = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    config |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True}
    config |= {"max_position_embeddings": 2048, "torch_dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = dataclasses.replace(MODELS["smollm-135m"], name=str(tmp_path), itemsize=size)
    assert shape_from_name(str(tmp_path)) == known


def test_a_floor_of_the_table_equals_that_by_hand() -> None:
    """Qwen2.5-0.5B, 32 rows of 512 tokens: 0.988 GB of weights and 0.201 GB of KV."""
    roofline = MODELS["qwen2.5-0.5b"].on(
        dataclasses.replace(MACHINES["h100-sxm"], bandwidth_share=1, step_seconds=1e-9)
    )
    seconds = CostModel(roofline).step_seconds(StepFeatures(32, 32 * 512))
    assert seconds == pytest.approx((0.988e9 + 0.2013e9) / 3.35e12, rel=0.01)


def test_a_model_over_two_sockets_costs_half_and_its_exchanges() -> None:
    """Llama 3 8B: 15 GB are read, 32 layers meet 4 times, and a token has 852,000 numbers of which half are the
    other's."""
    shape, machine = MODELS["llama-3-8b"], MACHINES["turin-9755"]
    one, two = shape.on(machine), shape.on(machine, 2)
    assert two.weight_seconds == pytest.approx(one.weight_seconds / 2) == pytest.approx(15.0e9 / 864e9, rel=0.01)
    assert two.context_seconds == pytest.approx(one.context_seconds / 2)
    assert two.step_seconds - one.step_seconds == pytest.approx(32 * 4 * 3e-6)
    assert two.token_seconds - one.token_seconds / 2 == pytest.approx(852_000 / 60e9, rel=0.01)
    both, single = deploy("turin-9755", shape, 2), deploy("turin-9755", shape)
    assert both.kv_memory_bytes == pytest.approx(2 * single.kv_memory_bytes + shape.weight_bytes, rel=1e-6)
    assert both.machine.startswith("2 x turin-9755")
    large = MODELS["llama-3-70b"]
    with pytest.raises(ConfigError, match="141 GB of weights, but turin-9755 has 128 GB"):
        deploy("turin-9755", large)
    assert deploy("turin-9755", large, 2).kv_memory_bytes > 100e9
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but h100-sxm is a GPU"):
        deploy("h100-sxm", shape, 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3, but qwen2\.5-0\.5b has 2 KV heads"):
        deploy("turin-9755", MODELS["qwen2.5-0.5b"], 3)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="h100-sxm"):
        deploy("h1000", MODELS["llama-3-8b"])
    with pytest.raises(ConfigError, match="llama-3-8b"):
        shape_from_name("gpt-5")
    with pytest.raises(ConfigError, match="not a cost model"):
        Deployment.from_dict({"machine": "x"})


def test_calibration_finds_the_machine_it_runs_on() -> None:
    """On a simulated machine, whose times are known."""
    core, limits = simulated_core(deployment(), EngineConfig.from_flat({"max_num_seqs": 64}))
    times = calibrate(core, limits, 64)
    assert 150 < len(times.steps) < 400
    assert len(times.lines) == len(times.steps)
    assert {1, 2, 4, 8, 16, 32, 64} <= {step.num_decodes for step, _ in times.steps}
    assert list(core.events.subscribers) == ["the step log"]
    assert not any(record.preempted for record in core.step_log)
    truth, fitted = CostModel(STEP), fit_steps(times.steps, MODELS["qwen2.5-0.5b"])
    assert "half of them within 0%" in describe_fit(fitted, times.steps)
    unseen = [StepFeatures(rows, rows * 200, 0, 0.0) for rows in range(1, 65)]
    unseen += [StepFeatures(rows, rows * 200, 300, 300 * 150) for rows in (0, 1, 20, 40)]
    errors = fitted.errors([(step, truth.step_seconds(step)) for step in unseen])
    assert errors[len(errors) // 2] < 0.03
    assert errors[-1] < 0.15
    trace = draw_trace("chat", parse_arrivals("poisson:4"), 100)
    figures = served(trace)
    simulated = replay(trace, EngineConfig(), dataclasses.replace(deployment(), cost=fitted)).served
    for name in ("ttft", "tpot", "e2e"):
        assert getattr(simulated, name).p50 == pytest.approx(getattr(figures, name).p50, rel=0.05)
        assert getattr(simulated, name).p99 == pytest.approx(getattr(figures, name).p99, rel=0.1)


def test_a_model_without_room_is_calibrated_with_what_fits() -> None:
    core, limits = simulated_core(
        deployment(max_model_len=48), EngineConfig.from_flat({"max_num_seqs": 2, "num_kv_blocks": 4})
    )
    times = calibrate(core, limits, 2)
    assert max(step.prefill_tokens for step, _ in times.steps) <= 2 * 48
    with pytest.raises(ConfigError, match="at least 16 steps"):
        fit_steps(times.steps[:15])


def arrivals(trace: list[TracedRequest], max_concurrency: int | None = None, **settings: Any) -> list[RequestTiming]:
    """Times at which requests were sent, and their results, with steps of 0.1 s."""
    core, limits = simulated_core(deployment(FLAT), EngineConfig.from_flat(settings))
    timings: list[RequestTiming] = []
    serve_trace(core, trace, limits, timings, max_concurrency=max_concurrency)
    return timings


def test_a_turn_waits_for_the_one_before_it_and_for_its_time() -> None:
    turns = [one(0.0, output=5, session="a", turn=0), one(0.1, output=1, session="b"), one(0.2, session="a", turn=1)]
    turns += [one(0.3, output=1), one(2.0, output=1, session="a", turn=4)]
    sent = [timing.request.arrival for timing in arrivals(turns)]
    assert sorted(sent) == pytest.approx([0.0, 0.1, 0.3, 0.5, 2.0])
    late = [one(0.0, output=8, session="a"), one(0.1, output=8, session="a", turn=1), one(0.2, session="a", turn=2)]
    assert [timing.request.arrival for timing in arrivals(late)] == pytest.approx([0.0, 0.8, 1.6])
    refused = [one(0.0, prompt=20_000, session="a"), one(0.0, output=1, session="a", turn=1)]
    assert [timing.request.turn for timing in arrivals(refused)] == [1], "whose first turn is refused may ask again"


def test_users_of_a_closed_loop_send_one_request_after_the_other() -> None:
    trace = [one(0.0, output=output) for output in (2, 5, 3, 1, 1)]
    timings = arrivals(trace, max_concurrency=2)
    assert [timing.request.arrival for timing in timings] == pytest.approx([0.0, 0.0, 0.2, 0.5, 0.5])
    assert max(timing.last for timing in timings) == pytest.approx(0.6)
    alone = replay(trace, EngineConfig(), deployment(FLAT), max_concurrency=1).served
    assert alone.mean_rows == 1
    assert alone.queue.p99 == pytest.approx(0)


@pytest.mark.parametrize("batching", ["continuous", "static", "dynamic"])
def test_a_request_cancelled_before_its_end_is_aborted(batching: str) -> None:
    trace = [one(0.0, output=40, cancel_ms=250.0), one(0.0, output=4, cancel_ms=5000.0), one(0.0, output=4)]
    settings = {"batching": batching, "max_num_seqs": 4}
    figures = served(trace, FLAT, **settings)
    assert (figures.requests, figures.cancelled, figures.output_tokens) == (2, 1, 8)
    assert figures.seconds == pytest.approx(0.4)
    assert figures.goodput is None
    promised = [dataclasses.replace(request, ttft_ms=1.0) for request in trace]
    assert served(promised, FLAT, **settings).goodput == 0.0, "of the two who stayed"
    session = [dataclasses.replace(trace[0], session="a"), one(0.0, output=1, session="a", turn=1)]
    if batching == "continuous":
        assert [timing.request.arrival for timing in arrivals(session)] == pytest.approx([0.0, 0.3])


def test_a_request_cancelled_in_the_queue_is_never_started() -> None:
    figures = served([one(0.0, output=9), one(0.0, cancel_ms=200.0)], FLAT, max_num_seqs=1)
    assert (figures.requests, figures.cancelled, figures.steps) == (1, 1, 9)


KV_BOUND = dataclasses.replace(STEP, context_seconds=1e-4, shared_share=0.1)


def shares(prefix: int) -> list[TracedRequest]:
    """16 requests whose prompts have the first ``prefix`` of their 4 prefix ids in common."""
    own = [tuple(range(prefix)) + tuple(range(100 + 10 * n, 104 + 10 * n - prefix)) for n in range(16)]
    return [one(0.0, prompt=2048, output=20, prefix_ids=ids, prefix_block=512) for ids in own]


def test_rows_that_read_a_prefix_together_decode_faster_and_others_as_before() -> None:
    def seconds(prefix: int, together: bool) -> float:
        place = deployment(KV_BOUND, reads_shared_once=together)
        return replay(shares(prefix), EngineConfig.from_flat({}), place).served.seconds

    assert seconds(0, True) == seconds(0, False)
    assert seconds(3, True) < 0.5 * seconds(3, False)


def test_a_recording_has_what_rows_share() -> None:
    core, limits = simulated_core(deployment(KV_BOUND, reads_shared_once=True), EngineConfig.from_flat({}))
    recorder = StepRecorder(core)
    lines = [recorder.take()]
    serve_trace(core, shares(3), limits)
    lines.append(recorder.take())
    recording = read_recording(b"\n".join(lines))
    recorded = [features.shared_tokens for features, _ in recording.steps]
    assert recorded == [record.features.shared_tokens for record in core.step_log]
    assert max(recorded) == 15 * 3 * 512
    assert [json.loads(record.to_json())["shared_tokens"] for record in core.step_log] == recorded
    states = [line["state"] for line in recording.lines if "state" in line]
    assert max(state[5] for state in states) == 15 * 3 * 512 // core.kv.block_size
    assert recorded_deployment(recording).reads_shared_once
    again = fit_steps(recording.steps)
    alone = StepFeatures(16, 32_000)
    assert again.step_seconds(alone._replace(shared_tokens=20_000)) < again.step_seconds(alone)


def test_deployments_of_older_versions_read_each_row() -> None:
    place = deployment(reads_shared_once=True)
    fields = place.to_dict()
    assert Deployment.from_dict(json.loads(json.dumps(fields))).reads_shared_once
    del fields["reads_shared_once"]
    assert not Deployment.from_dict(json.loads(json.dumps(fields))).reads_shared_once
    assert deploy("turin-9755", MODELS["qwen2.5-0.5b"]).reads_shared_once


def test_a_gap_counts_from_the_end_of_the_turn_before() -> None:
    def sent(first: int, gap: float | None) -> float:
        turns = [one(0.0, 40, first, session="a", tool="t"), one(5.0, 60, session="a", turn=1, gap_ms=gap)]
        core, limits = simulated_core(deployment(), EngineConfig())
        timings: list[RequestTiming] = []
        serve_trace(core, turns, limits, timings)
        assert core.kv.eviction.num_pauses == 1
        return timings[1].request.arrival - timings[0].left

    assert sent(3, 250.0) == pytest.approx(0.25)
    assert sent(300, 250.0) == pytest.approx(0.25), "a slow answer delays the next turn"
    assert sent(3, None) > 4.0


def test_leases_keep_the_cache_of_simulated_agents() -> None:
    tools = (ToolPauses("search", 3.0, 0.3),)
    traffic = Traffic(prompt=Fixed(64), output=Fixed(8), chats=Chats(Fixed(6), first=Fixed(600), tools=tools))
    trace = traffic.draw(60, parse_arrivals("poisson:20"), seed=1)
    flood = [one(number / 8, prompt=300, output=4) for number in range(200)]
    trace = sorted([*trace, *flood], key=lambda request: request.arrival)
    rules = {name: served(trace, cache_eviction=name, num_kv_blocks=420) for name in ("lru", "lease")}
    assert rules["lease"].cached_tokens > 1.1 * rules["lru"].cached_tokens
