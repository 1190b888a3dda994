"""Every panel of vLLM's dashboards has data with ``--metrics-prefix vllm``, or reads a feature that does not exist
here. The series and labels below are those that the expressions of the panels read, in the dashboards ``grafana.json``,
``vllm_overview``, ``vllm_instances``, ``vllm_kv_cache``, ``vllm_speculative_decoding``, ``performance_statistics`` and
``query_statistics`` of vLLM's examples."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift.metrics.prometheus import render
from chairlift.metrics.stats import EngineStats, ReplicaCounts, RequestStats, merge_stats
from tests.metrics.test_prometheus import Info, busy

ENGINE = ("model_name", "engine")
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_max_tokens"),
    *("request_params_n", "request_prefill_kv_computed_tokens", "iteration_tokens_total"),
    "time_per_output_token_seconds",
)
SERIES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "prompt_tokens_cached_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "mm_cache_queries_total", "mm_cache_hits_total"),
    *("external_prefix_cache_queries_total", "external_prefix_cache_hits_total"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("kv_offload_load_bytes_total", "kv_offload_store_bytes_total"),
    *("gpu_cache_usage_perc", "gpu_prefix_cache_queries_total", "gpu_prefix_cache_hits_total"),
)
LABELLED = {
    "request_success_total": ("finished_reason", ("stop", "length", "abort", "error")),
    "num_requests_waiting_by_reason": ("reason", ("capacity", "deferred")),
    "prompt_tokens_by_source_total": (
        "source",
        ("local_compute", "local_cache_hit", "host", "disk", "external_kv_transfer"),
    ),
    "prompt_tokens_cached_by_source_total": ("source", ("device", "host", "disk")),
    "spec_decode_num_accepted_tokens_per_pos_total": ("position", ("0", "1")),
    "engine_sleep_state": ("sleep_state", ("awake", "weights_offloaded", "discard_all")),
    "cache_config_info": ("block_size", ("16",)),
    "lora_requests_info": ("max_lora", ("4",)),
}
"""Series -> (label, values that a panel selects or shows)."""
TARGETS = {
    "time_to_first_token_seconds": ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"),
    "request_time_per_output_token_seconds": ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"),
}
"""Histogram -> bounds of buckets that a panel compares with a latency target."""
PLAIN = {
    "http_requests_total": ("handler", "method", "status"),
    "http_request_duration_seconds_sum": ("handler", "method"),
    "http_request_duration_seconds_count": ("handler", "method"),
    "process_cpu_seconds_total": (),
    "process_resident_memory_bytes": (),
    "process_open_fds": (),
    "process_max_fds": (),
    "process_start_time_seconds": (),
}
"""Series of the server's process, which have no model's name -> labels."""
ABSENT = (
    *("num_requests_kv_fetch_by_stage", "nixl_xfer_time_seconds", "nixl_bytes_transferred"),
    *("nixl_post_time_seconds", "nixl_num_descriptors", "nixl_num_failed_transfers"),
    *("kv_offload_load_time", "kv_offload_store_time", "kv_offload_load_size", "kv_offload_store_size"),
    *("kv_offload_lookup_sync_delay_seconds", "kv_offload_cpu_cache_usage_perc", "kv_offload_allocation_failure"),
    *("simple_kv_offload_save_outcomes", "simple_kv_offload_load_blocks", "simple_kv_offload_used_blocks"),
    *("sleep_mode_operation_duration_seconds", "rl_weight_update_operation_duration_seconds"),
    *("estimated_flops_per_gpu", "estimated_read_bytes_per_gpu", "estimated_write_bytes_per_gpu"),
)
"""Panels in rows that vLLM fills only with a feature that does not exist here: sampling of KV blocks, KV connectors,
sleep mode, and counts of a GPU's work."""

Found = dict[str, list[tuple[dict[str, str], float]]]


def exposed(stats: RequestStats, *, up: bool = True) -> Found:
    return read(render(stats, Info(), model_name="m", prefix="vllm", up=up, num_waiting=2, now=0.0))


def test_each_replica_has_its_own_label_and_sums_are_the_totals() -> None:
    stats, found = served(), dict[int, ReplicaCounts]()
    for index, waiting in ((0, 1), (2, 0)):
        engine = EngineStats(num_running=index + 1, num_waiting=waiting, used_blocks=index, free_blocks=2)
        engine.num_preemptions, engine.prefix_cache_hits, engine.accepted_at = 3 + index, 20 + index, [1, index]
        found[index] = ReplicaCounts(engine, prompt_tokens=8 + index, cached_tokens=3, generation_tokens=5 * index)
    stats.step(merge_stats([each.engine for each in found.values()]))
    stats.prompt_tokens, stats.cached_tokens, stats.generation_tokens = 18, 6, 10
    options: dict[str, Any] = {"model_name": "m", "up": True, "num_waiting": 4, "now": 0.0}
    shown = read(render(stats, Info(), prefix="vllm", counts=found, **options))
    single = read(render(stats, Info(), prefix="vllm", **options))

    def of(name: str, **labels: str) -> dict[str, float]:
        return {has["engine"]: value for has, value in shown[f"vllm:{name}"] if labels.items() <= has.items()}

    assert of("num_requests_running") == {"0": 1, "2": 3}
    assert of("num_requests_waiting") == {"0": 1, "2": 0, "all": 3}
    assert of("num_requests_waiting_by_reason", reason="capacity") == {"0": 1, "2": 0, "all": 3}
    assert of("kv_cache_usage_perc") == of("gpu_cache_usage_perc") == {"0": 0.0, "2": 0.5}
    assert of("generation_tokens_total") == {"0": 0, "2": 10} and of("prompt_tokens_total") == {"0": 8, "2": 10}
    assert of("prompt_tokens_by_source_total", source="local_compute") == {"0": 5, "2": 7}
    assert of("num_preemptions_total") == {"0": 3, "2": 5}
    assert of("spec_decode_num_accepted_tokens_per_pos_total", position="1") == {"0": 0, "2": 2}
    assert of("e2e_request_latency_seconds_count") == {"all": 2}
    assert shown.keys() == single.keys()
    for name, samples in shown.items():
        if name.startswith("vllm:") and not name.endswith(("usage_perc", "lora_requests_info")):
            assert sum(value for _, value in samples) == sum(value for _, value in single[name]), name
        elif name.startswith("chairlift:"):
            assert str(samples) == str(single[name]), "alerts compare metrics with the same labels"


def read(text: bytes) -> Found:
    found: Found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def served() -> RequestStats:
    """Statistics of a server that has drafts, adapters and images, and answered requests."""
    stats = busy()
    engine = dataclasses.replace(stats.engine, num_verified_rows=4, num_draft_tokens=8, num_accepted_tokens=5)
    stats.engine = dataclasses.replace(engine, accepted_at=[3, 2], max_loras=4, num_tile_hits=1, num_tiles_encoded=2)
    stats.responded("/v1/chat/completions", "POST", 200, 0.5)
    stats.responded("/v1/chat/completions", "POST", 503, 0.01)
    return stats


def test_each_panel_has_its_series() -> None:
    found = exposed(served())
    for name in (*SERIES, *(f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count"))):
        assert f"vllm:{name}" in found, name
        for labels, _ in found[f"vllm:{name}"]:
            assert labels["model_name"] == "m" and labels["engine"] == "0", name
    for name, (label, values) in LABELLED.items():
        assert {labels[label] for labels, _ in found[f"vllm:{name}"]} >= set(values), name
    for name, bounds in TARGETS.items():
        assert {labels["le"] for labels, _ in found[f"vllm:{name}_bucket"]} >= set(bounds), name
    for name, wanted in PLAIN.items():
        assert all(set(labels) == set(wanted) for labels, _ in found[name]), name


def test_no_panel_of_a_feature_that_does_not_exist_has_data() -> None:
    found = exposed(served())
    assert not [name for name in found for absent in ABSENT if name.startswith(f"vllm:{absent}")]


def test_histograms_of_requests_have_values() -> None:
    found = exposed(served())
    counts = {name: found[f"vllm:{name}_count"][0][1] for name in HISTOGRAMS}
    assert not [name for name, count in counts.items() if not count]
    assert found["vllm:request_prefill_kv_computed_tokens_sum"][0][1] == 2 * (10 - 4)


def test_prompt_tokens_by_source_are_all_prompt_tokens() -> None:
    stats = served()
    stats.host_tokens, stats.disk_tokens = 1, 5
    found = exposed(stats)
    by_source = {labels["source"]: value for labels, value in found["vllm:prompt_tokens_by_source_total"]}
    assert by_source == {"local_compute": 12, "local_cache_hit": 2, "host": 1, "disk": 5, "external_kv_transfer": 0}
    assert sum(by_source.values()) == found["vllm:prompt_tokens_total"][0][1]


def test_responses_are_counted_by_route_and_class_of_status() -> None:
    found = exposed(served())
    counts = {labels["status"]: value for labels, value in found["http_requests_total"]}
    assert counts == {"2xx": 1, "5xx": 1}
    (seconds,) = [value for _, value in found["http_request_duration_seconds_sum"]]
    assert seconds == pytest.approx(0.51)


def counters(found: Found) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    grows = ("_total", "_bucket", "_count", "_sum")
    return {
        (name, tuple(sorted(labels.items()))): value
        for name, samples in found.items()
        for labels, value in samples
        if name.endswith(grows) and not name.startswith("process_")
    }


def test_counters_never_fall_over_restarts_of_the_engine_and_changes_of_the_fleet() -> None:
    """The engine dies and comes back, a second replica joins, steps, and leaves. A replica's record is told again and
    again until its next step, as the fleet does it."""
    stats = served()
    seen = [counters(exposed(stats))]

    def told(*replicas: EngineStats) -> None:
        stats.step(replicas[0] if len(replicas) == 1 else merge_stats(replicas))
        seen.append(counters(exposed(stats)))

    for _ in range(2):
        stats.engine_died()
        seen.append(counters(exposed(stats, up=False)))
        first = EngineStats(num_preemptions=2, prefix_cache_hits=5, accepted_at=[1], max_loras=4, num_tiles_encoded=1)
        told(first)
        told(first)
        second = EngineStats(num_preemptions=1, prefix_cache_hits=3, accepted_at=[0, 1], max_loras=4)
        told(first, second)
        told(first, second)
        told(dataclasses.replace(first, num_preemptions=3), second)
        told(dataclasses.replace(first, num_preemptions=3), second.only_counters())
        assert (first.num_preemptions, first.accepted_at) == (2, [1]), "the fleet's record is not changed"
    for before, after in itertools.pairwise(seen):
        fallen = [key for key, value in before.items() if key in after and after[key] < value]
        assert not fallen
    assert seen[-1]["vllm:num_preemptions_total", (("engine", "0"), ("model_name", "m"))] == 7 + 2 * 4
