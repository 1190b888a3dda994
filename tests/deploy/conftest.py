"""Metrics of a real server, read once for all tests."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift.metrics.stats import AutoscalingStats, ReplicaStats, TrainingStats
from chairlift.server.http.app import make_app
from tests.deploy.promql import Exposed
from tests.server.harness import INFO, Client, StateOnlyEngine, make_state, run, serving


@pytest.fixture(scope="session")
def exposed() -> dict[str, Exposed]:
    """Name -> series, for every series of ``GET /metrics`` and for ``up``, which Prometheus adds itself."""
    engine = StateOnlyEngine()
    drafts = {"speculative_method": "ngram", "num_speculative_tokens": 8}
    engine.info = dataclasses.replace(INFO, block_bytes=4096, **drafts)
    engine.replicas.engine_pid = os.getpid()
    engine.stats.last_token_time = time.monotonic()
    engine.stats.engine.floor_share = 0.5  # as with the native kernels
    engine.stats.engine.collective_seconds = 0.5  # as with tensor_parallel_size
    engine.stats.engine.collective_share = 0.1
    engine.stats.engine.lease_budget_blocks = 4  # as with leases
    engine.stats.engine.leased_blocks = {"3": 1}
    engine.stats.engine.pauses_by_tool = {"search": 1}
    engine.stats.engine.max_loras = 4
    engine.stats.engine.max_image_bytes = 1 << 20
    engine.stats.engine.expert_imbalance = [1.5]
    engine.stats.training = TrainingStats()
    bodies: list[str] = []

    async def scrape() -> None:
        async with serving(make_app(make_state(engine))) as client:
            bodies.append(await _metrics(client))
            numbers = {"unstarted": 0, "started": 1, "unstarted_tokens": 0, "sent": 1, "restarts": 0}
            engine.replicas.known = [
                ReplicaStats(index=0, pid=os.getpid(), state="ready", kv_cache_usage=0.5, **numbers)
            ]
            engine.replicas.scaling = AutoscalingStats(min_replicas=1, max_replicas=2, wanted_replicas=1)
            bodies.append(await _metrics(client))

    run(scrape())
    found = {"up": Exposed("gauge", {})}
    for family in (family for body in bodies for family in text_string_to_metric_families(body)):
        values: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for sample in family.samples:
            for label, value in sample.labels.items():
                values[sample.name][label].add(value)
            values[sample.name]  # creates the entry even without labels
        for name, labels in values.items():
            found[name] = Exposed(family.type, {label: frozenset(each) for label, each in labels.items()})
    return found


async def _metrics(client: Client) -> str:
    reply = await client.get("/metrics")
    assert reply.status == 200
    return reply.body.decode()
