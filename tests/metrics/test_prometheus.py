from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift.base.outputs import FinishReason
from chairlift.metrics.prometheus import CONTENT_TYPE, FINISH_REASONS, REJECTION_REASONS, render
from chairlift.metrics.stats import (
    CAUSES,
    TRAINING_CALLS,
    TRAINING_PASSES,
    EngineStats,
    FinishedRequest,
    Histogram,
    RequestStats,
    TrainingStats,
    merge_stats,
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclasses.dataclass(frozen=True)
class Info:
    block_size: int = 16
    num_blocks: int = 99
    dtype: str = "bfloat16"
    kv_cache_dtype: str | None = None
    block_bytes: int = 1000
    speculative_method: str | None = None
    num_speculative_tokens: int = 0


def samples(stats: RequestStats, *, info: Info | None = None, up: bool = True, **settings: object) -> Samples:
    """Metrics as Prometheus reads them, by name and by the labels that not all of them have."""
    options: dict[str, object] = {"model_name": "tiny", "prefix": "chairlift", "num_waiting": 0, "now": 0.0} | settings
    text = render(stats, info, up=up, **options).decode()  # type: ignore[arg-type]
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if not sample.name.startswith("process_"):
                assert (labels.pop("model_name"), labels.pop("engine")) == (options["model_name"], "0")
            key = (sample.name, frozenset(labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def finished(**fields: object) -> FinishedRequest:
    plain: dict[str, object] = {
        "reason": "stop",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "generation_tokens": 5,
        "n": 1,
        "max_tokens": 20,
        "num_preemptions": 0,
        "e2e_seconds": 1.0,
        "queue_seconds": 0.25,
        "prefill_seconds": 0.25,
        "decode_seconds": 0.5,
    }
    return FinishedRequest(**plain | fields)  # type: ignore[arg-type]


def busy() -> RequestStats:
    stats = RequestStats()
    stats.step(
        EngineStats(
            num_running=3,
            used_blocks=25,
            cached_blocks=25,
            free_blocks=50,
            num_preemptions=7,
            num_finished_sequences=40,
            num_preempted_sequences=2,
            preemption_rate=0.03,
            prefix_cache_queries=100,
            prefix_cache_hits=60,
            num_computed_tokens=200,
            num_recomputed_tokens=50,
            step_tokens=12,
        )
    )
    stats.prompt_computed(20, 8)
    stats.first_token(0.3, now=90.0)
    stats.next_tokens(0.2, 9, now=91.0)
    stats.request_finished(finished())
    stats.request_finished(finished(reason="length", n=2, num_preemptions=1))
    stats.rejected["queue_tokens"] += 3
    stats.forecast_error.observe(0.2)
    stats.overrun_tokens = 6
    stats.num_restarts = 1
    return stats


@pytest.mark.parametrize("prefix", ["chairlift", "vllm"])
def test_the_records_are_what_is_shown(prefix: str) -> None:
    found = samples(busy(), info=Info(), prefix=prefix, num_waiting=5, now=93.5)
    theirs = {
        "num_requests_running": 3,
        "num_requests_waiting": 5,
        "kv_cache_usage_perc": 0.25,
        "num_preemptions_total": 7,
        "prompt_tokens_total": 20,
        "prompt_tokens_cached_total": 8,
        "generation_tokens_total": 10,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 60,
    }
    for name, expected in theirs.items():
        assert value(found, f"{prefix}:{name}") == expected, name
    assert value(found, f"{prefix}:num_requests_waiting_by_reason", reason="capacity") == 5
    assert value(found, f"{prefix}:num_requests_waiting_by_reason", reason="deferred") == 0
    assert value(found, f"{prefix}:request_success_total", finished_reason="length") == 1
    assert value(found, f"{prefix}:request_success_total", finished_reason="abort") == 0
    assert value(found, f"{prefix}:admission_rejections_total", reason="queue_tokens") == 3
    shape = {"block_size": "16", "num_gpu_blocks": "99", "cache_dtype": "bfloat16"}
    assert value(found, f"{prefix}:cache_config_info", **shape) == 1
    former = {"gpu_cache_usage_perc": 0.25, "gpu_prefix_cache_queries_total": 100, "gpu_prefix_cache_hits_total": 60}
    for name, expected in former.items():  # routers for vLLM read them, and nobody else
        assert found.get((f"{prefix}:{name}", frozenset())) == (expected if prefix == "vllm" else None), name
    # Ours have one name, whatever the others are called.
    assert value(found, "chairlift:preemption_rate", window="60s") == 0.03
    assert value(found, "chairlift:preemption_rate", window="total") == 0.05
    assert value(found, "chairlift:recomputed_token_share") == 0.25
    assert value(found, "chairlift:overrun_tokens_total") == 6
    assert value(found, "chairlift:engine_restarts_total") == 1
    assert value(found, "chairlift:engine_up") == 1
    assert value(found, "chairlift:seconds_since_last_token") == 2.5
    assert value(found, "process_resident_memory_bytes") > 0
    assert ("process_cpu_seconds_total", frozenset()) in found


HISTOGRAMS = {
    "time_to_first_token_seconds": "ttft",
    "inter_token_latency_seconds": "inter_token",
    "request_time_per_output_token_seconds": "time_per_output_token",
    "e2e_request_latency_seconds": "e2e",
    "request_queue_time_seconds": "queue",
    "request_inference_time_seconds": "inference",
    "request_prefill_time_seconds": "prefill",
    "request_decode_time_seconds": "decode",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    "request_prefill_kv_computed_tokens": "request_computed_tokens",
    "request_max_num_generation_tokens": "request_longest_answer",
    "request_params_max_tokens": "request_max_tokens",
    "request_params_n": "request_n",
    "request_num_preemptions": "request_preemptions",
    "iteration_tokens_total": "step_tokens",
    "forecast_wait_error_seconds": "forecast_error",
}


def test_the_last_minute_passes_without_work_too() -> None:
    for now, rate in ((150.9, 0.03), (151.1, 0.0)):
        assert value(samples(busy(), now=now), "chairlift:preemption_rate", window="60s") == rate


def test_every_histogram_is_there() -> None:
    held = {name for name, field in vars(RequestStats()).items() if isinstance(field, Histogram)}
    assert set(HISTOGRAMS.values()) == held


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_buckets_are_cumulative_and_agree_with_the_record(name: str) -> None:
    stats = busy()
    histogram: Histogram = getattr(stats, HISTOGRAMS[name])
    histogram.observe(1e9)
    found = samples(stats)
    bounds = [*histogram.bounds, math.inf]
    cumulative = [value(found, f"chairlift:{name}_bucket", le="+Inf" if b == math.inf else str(b)) for b in bounds]
    assert cumulative == [sum(histogram.counts[: index + 1]) for index in range(len(bounds))]
    assert cumulative[-1] > cumulative[-2] > 0
    assert value(found, f"chairlift:{name}_count") == sum(histogram.counts)
    assert value(found, f"chairlift:{name}_sum") == histogram.total


def test_training_is_counted_where_somebody_trains() -> None:
    stats = busy()
    assert not [name for name, _ in samples(stats) if "training" in name]
    stats.training = training = TrainingStats(num_adapters=3, adapter_bytes=500, seconds=2.5, samples=4)
    training.tokens.update(forward=10, backward=70)
    training.calls.update({"pass": 5, "optim_step": 2})
    training.failed["user"] += 1
    training.wait.observe(0.05)
    found = samples(stats)
    assert value(found, "chairlift:training_adapters") == 3
    assert value(found, "chairlift:training_adapter_bytes") == 500
    assert value(found, "chairlift:training_seconds_total") == 2.5
    assert value(found, "chairlift:training_samples_total") == 4
    assert {each: value(found, "chairlift:training_tokens_total", **{"pass": each}) for each in TRAINING_PASSES} == {
        "forward": 10,
        "backward": 70,
    }
    calls = {each: value(found, "chairlift:training_calls_total", kind=each) for each in TRAINING_CALLS}
    assert calls == {"create": 0, "pass": 5, "optim_step": 2, "save": 0, "load": 0}
    assert [value(found, "chairlift:training_failed_calls_total", category=each) for each in ("user", "server")] == [
        1,
        0,
    ]
    assert value(found, "chairlift:training_wait_seconds_bucket", le="0.1") == 1
    assert value(found, "chairlift:training_wait_seconds_bucket", le="0.03") == 0


def promised(**fields: object) -> FinishedRequest:
    return finished(has_deadline=True, **fields)


def test_the_time_in_collectives_is_shown_for_a_divided_model() -> None:
    stats = busy()
    name = "chairlift:collective_seconds_total"
    assert (name, frozenset()) not in samples(stats)
    stats.engine.collective_seconds = 1.5
    assert value(samples(stats), name) == 1.5
    share = "chairlift:collective_share"
    assert (share, frozenset()) not in samples(stats)
    stats.engine.collective_share = 0.25
    stats.last_token_time = 10.0
    assert value(samples(stats, now=11.0), share) == 0.25
    assert value(samples(stats, now=1e6), share) == 0, "nothing runs any more"


def test_the_share_of_the_machines_floor_is_shown() -> None:
    stats = busy()
    assert ("chairlift:floor_share", frozenset()) not in samples(stats), "nobody has measured the machine"
    stats.engine.floor_share = 0.75
    stats.last_token_time = 10.0
    assert value(samples(stats, now=11.0), "chairlift:floor_share") == 0.75
    assert value(samples(stats, now=1e6), "chairlift:floor_share") == 0, "nothing runs any more"
    assert value(samples(stats, now=11.0, up=False), "chairlift:floor_share") == 0


def test_the_load_of_experts_is_there_for_models_that_have_some() -> None:
    stats = busy()
    assert not [name for name, _ in samples(stats) if name == "chairlift:expert_imbalance"]
    stats.engine.expert_imbalance = [1.25, 3.0]
    found = samples(stats)
    assert [value(found, "chairlift:expert_imbalance", layer=layer) for layer in ("0", "1")] == [1.25, 3.0]


def test_adapters_are_named_where_they_are_served() -> None:
    stats = busy()
    assert not [name for name, _ in samples(stats) if "lora" in name]
    stats.engine = dataclasses.replace(
        stats.engine, max_loras=4, running_adapters=["law", "med"], waiting_adapters=["tax"], num_adapter_reads=7
    )
    for up, running, waiting in ((True, "law,med", "tax"), (False, "", "")):
        found = samples(stats, up=up)
        labels = {"max_lora": "4", "running_lora_adapters": running, "waiting_lora_adapters": waiting}
        assert value(found, "chairlift:lora_requests_info", **labels) > 1e9
        assert value(found, "chairlift:lora_adapter_reads_total") == 7


def test_images_are_counted_where_the_model_reads_them() -> None:
    stats = busy()
    assert not [name for name, _ in samples(stats) if "image" in name]
    counted = EngineStats(
        num_tiles_encoded=7,
        num_tile_hits=5,
        num_tiles_given_up=3,
        num_tiles_reencoded=2,
        image_bytes=900,
        max_image_bytes=1000,
    )
    stats.step(counted)
    before = samples(stats)
    stats.engine_died()
    stats.step(dataclasses.replace(counted, image_bytes=100))
    found = samples(stats)
    for name, count in (
        *(("image_tiles_encoded", 7), ("image_tile_hits", 5)),
        *(("image_tiles_given_up", 3), ("image_tiles_reencoded", 2)),
    ):
        assert value(before, f"chairlift:{name}_total") == count
        assert value(found, f"chairlift:{name}_total") == 2 * count, "counted over a restart"
    assert value(found, "chairlift:image_memory_bytes") == 100
    assert value(found, "chairlift:image_memory_limit_bytes") == 1000


def test_grammars_thinking_and_batches_are_counted_over_restarts() -> None:
    stats = RequestStats()
    counted = EngineStats(
        num_grammars_compiled=3,
        num_grammar_hits=9,
        num_grammars_failed=1,
        grammar_compile_seconds=0.25,
        num_thinking_limited=5,
        num_thinking_ended=4,
    )
    stats.step(counted)
    stats.engine_died()
    stats.step(counted)
    stats.batch_requests["failed"] += 2
    found = samples(stats)
    for name, expected in (
        *(("grammars_compiled", 6), ("grammar_cache_hits", 18), ("grammars_failed", 2)),
        *(("grammar_compile_seconds", 0.5), ("thinking_budget_answers", 10), ("thinking_budget_ended", 8)),
    ):
        assert value(found, f"chairlift:{name}_total") == expected
    assert value(found, "chairlift:batch_requests_total", outcome="failed") == 2
    assert value(found, "chairlift:batch_requests_total", outcome="completed") == 0


def test_promises_are_counted_by_class_and_kind() -> None:
    stats = RequestStats()
    stats.step(
        EngineStats(
            num_preemptions=10,
            num_swap_preemptions=3,
            num_tail_preemptions=2,
            num_swapped_out_blocks=7,
            num_swapped_in_blocks=5,
            num_offloaded_blocks=3,
            num_brought_back_blocks=2,
            num_late_dropped=4,
            num_late_downgraded=6,
            rows_by_class={"chat": 5, "default": 9},
            tenant_gap=120.5,
        )
    )
    for each in (
        finished(),
        promised(service_class="chat"),
        promised(service_class="chat", misses=("ttft", "tpot")),
        promised(service_class="chat", reason="deadline", misses=("deadline",)),
        promised(service_class="chat", reason="abort"),  # left before there was anything to say
        promised(service_class="chat", reason="abort", misses=("ttft",)),
        promised(service_class="chat", reason="error"),
    ):
        stats.request_finished(each)
    classes = {"default": 0, "flex": 0, "chat": 4}
    found = samples(stats, info=Info(), classes=classes)

    def of(name: str, **labels: str) -> float:
        return value(found, f"chairlift:{name}", **labels)

    assert (
        of("requests_by_class_total", service_class="chat"),
        of("requests_by_class_total", service_class="flex"),
    ) == (6, 0)
    assert of("requests_by_class_total", service_class="default") == 1
    assert of("requests_with_deadline_total", service_class="chat") == 4
    assert of("requests_with_deadline_total", service_class="default") == 0
    assert of("requests_within_deadline_total", service_class="chat") == 1
    misses = [of("deadline_misses_total", service_class="chat", kind=kind) for kind in ("ttft", "tpot", "deadline")]
    assert misses == [2, 1, 1]
    assert (of("late_requests_total", outcome="dropped"), of("late_requests_total", outcome="downgraded")) == (4, 6)
    assert (of("reserved_rows", service_class="chat"), of("reserved_rows_in_use", service_class="chat")) == (4, 4)
    assert (of("reserved_rows", service_class="default"), of("reserved_rows_in_use", service_class="default")) == (0, 0)
    assert of("tenant_gap") == 120.5
    methods = [of("preemptions_by_method_total", method=method) for method in ("recompute", "swap", "tail")]
    assert methods == [5, 3, 2]
    assert (of("swapped_blocks_total", direction="out"), of("swapped_bytes_total", direction="in")) == (7, 5000)
    assert [of("prefix_offload_blocks_total", direction=way) for way in ("out", "in")] == [3, 2]
    stats.engine_died()
    stats.num_restarts += 1
    stats.step(EngineStats(num_swapped_out_blocks=1))
    again = samples(stats, classes=classes)
    assert value(again, "chairlift:swapped_blocks_total", direction="out") == 8
    assert value(again, "chairlift:reserved_rows_in_use", service_class="chat") == 0
    assert not [name for name, _ in again if name == "chairlift:swapped_bytes_total"]


def test_pauses_leases_and_times_of_blocks_are_shown() -> None:
    stats = RequestStats()
    without = samples(stats)
    assert value(without, "chairlift:turns_after_pause_total", cache="kept") == 0
    assert not [name for name, _ in without if "lease_budget" in name or "paused_conversations" in name]
    first = EngineStats(
        num_pauses=5,
        num_leases=4,
        pauses_by_tool={"search": 2, "other": 1},
        turns_by_cache={"kept": 3, "displaced": 1},
        leased_blocks={"1": 0, "2": 1, "3": 7},
        lease_budget_blocks=20,
        leases_ended={"displaced": 6},
        block_reuse_gaps=[1, 2] + [0] * 12,
        num_block_reuse_seconds=0.5,
    )
    stats.step(first)
    stats.first_token(0.1, now=0.0)
    found = samples(stats, now=10.0)

    def of(name: str, **labels: str) -> float:
        return value(found, f"chairlift:{name}", **labels)

    assert (of("paused_conversations", tool="search"), of("paused_conversations", tool="other")) == (2, 1)
    assert (of("pauses_total"), of("pause_leases_total")) == (5, 4)
    assert [of("turns_after_pause_total", cache=name) for name in ("kept", "displaced", "expired")] == [3, 1, 0]
    assert (of("leased_blocks", level="3"), of("lease_budget_blocks")) == (7, 20)
    assert [of("lease_ended_blocks_total", reason=name) for name in ("displaced", "over_budget")] == [6, 0]
    assert (of("kv_block_reuse_gap_seconds_bucket", le="0.3"), of("kv_block_reuse_gap_seconds_sum")) == (3, 0.5)
    assert of("kv_block_lifetime_seconds_count") == 0
    assert not [name for name, _ in samples(stats, now=301.0) if "paused_conversations" in name], "it is idle"
    stats.engine_died()
    stats.step(EngineStats(turns_by_cache={"kept": 1}, block_reuse_gaps=[1] * 14, num_block_reuse_seconds=2.0))
    found = samples(stats, now=10.0)
    assert (of("turns_after_pause_total", cache="kept"), of("kv_block_reuse_gap_seconds_count")) == (4, 17)
    assert of("kv_block_reuse_gap_seconds_sum") == 2.5
    assert of("lease_budget_blocks") == 0
    merged = merge_stats([first, first])
    assert (merged.pauses_by_tool["search"], merged.leased_blocks["3"], merged.lease_budget_blocks) == (4, 14, 40)
    assert merged.block_reuse_gaps[:2] == [2, 4]


def test_the_error_of_forecasts_is_shown() -> None:
    found = samples(RequestStats(), forecast_within={1.0: 0.5, 1.25: 0.75, 2.0: None, 3.0: 1.0})
    shares = [value(found, "chairlift:forecast_within_ratio", ratio=ratio) for ratio in ("1", "1.25", "2")]
    assert shares[:2] == [0.5, 0.75] and math.isnan(shares[2])
    assert not [key for key in found if ("ratio", "3") in key[1]]
    assert set(samples(RequestStats())) == set(found)


def test_metrics_are_zero_or_absent_before_the_first_request() -> None:
    found = samples(RequestStats(), up=False)
    assert value(found, "chairlift:engine_up") == 0
    assert value(found, "chairlift:preemption_rate", window="total") == 0
    assert value(found, "chairlift:kv_cache_usage_perc") == 0
    names = {name for name, _ in found}
    assert not names & {"chairlift:seconds_since_last_token", "chairlift:cache_config_info"}


def test_an_engine_that_is_down_runs_nothing() -> None:
    found = samples(busy(), up=False)
    assert value(found, "chairlift:num_requests_running") == 0
    assert value(found, "chairlift:kv_cache_usage_perc") == 0
    assert value(found, "chairlift:prefix_cache_queries_total") == 100


def test_counters_go_on_after_a_restart() -> None:
    stats = busy()
    stats.engine_died()
    stats.num_restarts += 1
    stats.step(EngineStats(num_preemptions=2, num_computed_tokens=100))
    found = samples(stats)
    assert value(found, "chairlift:num_preemptions_total") == 9
    assert value(found, "chairlift:recomputed_token_share") == 50 / 300


def test_labels_are_closed_sets() -> None:
    """The page has the same lines for any counts and any model name."""
    assert set(FINISH_REASONS) == {reason.value for reason in FinishReason}
    stats = RequestStats()
    before = set(samples(stats))
    for index in range(10_000):
        stats.rejected[f"path-{index}"] += 1
        stats.finished[f'"}} evil{index} 1\n'] += 1
        stats.classes[f"class-{index}"] += 1
        stats.deadline_misses[f"class-{index}", "ttft"] += 1
    stats.rejected.update(REJECTION_REASONS)
    found = samples(stats)
    assert set(found) == before
    assert value(found, "chairlift:admission_rejections_total", reason="other") == 10_000
    assert value(found, "chairlift:admission_rejections_total", reason="draining") == 1
    assert value(found, "chairlift:request_success_total", finished_reason="other") == 10_000


def test_a_model_name_cannot_break_out_of_its_label() -> None:
    name = 'a"} 1\nevil{x="\\'
    found = samples(RequestStats(), model_name=name)
    assert not [key for key, _ in found if "evil" in key]


def test_the_text_is_of_the_kind_it_says() -> None:
    text = render(busy(), Info(), model_name="tiny", prefix="vllm", up=True, num_waiting=0, now=0.0).decode()
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"
    assert "# EOF" not in text and text.endswith("\n")
    assert "# TYPE vllm:generation_tokens_total counter\n" in text
    assert "# TYPE vllm:time_to_first_token_seconds histogram\n" in text


def test_the_records_do_not_need_prometheus() -> None:
    program = "import sys, chairlift.metrics.stats; print('prometheus_client' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_the_tasks_of_the_event_loop_are_counted() -> None:
    assert value(samples(RequestStats(), num_tasks=7), "chairlift:event_loop_tasks") == 7
    assert value(samples(RequestStats(), num_tasks=7, prefix="vllm"), "chairlift:event_loop_tasks") == 7


def test_the_age_of_the_queue_and_the_memory_of_the_engine_are_shown() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        found = samples(RequestStats(), oldest_wait=2.5, engine_pid=other.pid, prefix="vllm")
        assert value(found, "chairlift:oldest_waiting_request_seconds") == 2.5
        memory = value(found, "chairlift:engine_resident_memory_bytes")
        assert 0 < memory < value(found, "process_resident_memory_bytes")
        other.communicate(b"\n")
    for gone in (None, other.pid):
        assert not [name for name, _ in samples(RequestStats(), engine_pid=gone) if "engine_resident" in name]


def test_time_is_counted_by_causes_from_a_closed_set() -> None:
    stats = RequestStats()
    stats.charge({"decode": 1.5, "waiting_slots": 0.25, "made up": 9.0})
    stats.charge({"decode": 0.5, "delivery": 0.125})
    found = samples(stats)
    spent = {cause: value(found, "chairlift:request_seconds_total", cause=cause) for cause in CAUSES}
    assert spent == dict.fromkeys(CAUSES, 0.0) | {"decode": 2.0, "waiting_slots": 0.25, "delivery": 0.125}
    assert len([name for name, _ in found if name == "chairlift:request_seconds_total"]) == len(CAUSES)


def test_every_token_is_the_newest_when_it_comes() -> None:
    stats = RequestStats()
    stats.first_token(0.1, 5.0)
    assert stats.last_token_time == 5.0
    stats.next_tokens(0.2, 2, 7.0)
    assert stats.last_token_time == 7.0
