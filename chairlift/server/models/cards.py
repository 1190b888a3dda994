"""What a server with many models says about them: in the lists of OpenAI, Anthropic and Ollama, and in metrics."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from chairlift.fleet.models.policy import ModelState
from chairlift.metrics import prometheus
from chairlift.server.models.hosts import Host, Hosts
from chairlift.server.ollama.bodies import OllamaDetails, OllamaModel
from chairlift.server.ollama.models import loaded_models
from chairlift.server.openai.models import ModelCard, model_card

__all__ = ["ServedModelCard", "ServedModelList", "card", "merged_metrics", "model_metrics", "ollama_ps", "ollama_tags"]

_NEVER = "2318-01-01T00:00:00Z"


class ServedModelCard(ModelCard, kw_only=True):
    """One name of one of many models, or one adapter."""

    state: str = "unloaded"
    """``unloaded``, ``loading``, ``loaded``, ``unloading`` or ``failed``."""
    reason: str | None = None
    """Why the model cannot be loaded; null if it can."""
    pinned: bool = False
    """Whether the settings keep the model loaded."""
    memory_bytes: int | None = None
    """Memory that the model needs while it is loaded; null if it cannot be known."""
    num_running: int = 0
    """Number of requests that use the model."""
    num_waiting: int = 0
    """Number of requests that wait for the model to be loaded."""
    position: int | None = None
    """Place of the model among the models that wait to be loaded, from 1; null if it does not wait."""


class ServedModelList(msgspec.Struct, kw_only=True):
    """List of all names of all models and of their adapters."""

    object: str = "list"
    data: list[ServedModelCard]


def card(hosts: Hosts, host: Host, name: str, created: int) -> ServedModelCard:
    """The entry of one name in ``/v1/models``."""
    state = host.state
    base = ModelCard(id=name, created=created, root=host.entry.name) if state is None else model_card(state, name)
    if name in host.entry.adapters:
        base.parent = host.entry.name
    view = hosts.view(host)
    fields = {each: getattr(base, each) for each in base.__struct_fields__}
    return ServedModelCard(
        **fields,
        state=hosts.state_of(host),
        reason=hosts.problem(host) or None,
        pinned=host.entry.pinned,
        memory_bytes=view.num_bytes or None,
        num_running=view.num_running,
        num_waiting=view.num_waiting,
        position=view.position,
    )


async def ollama_tags(hosts: Hosts, started_at: int) -> list[OllamaModel]:
    """All models, for ``/api/tags``. Sizes of models that were not loaded yet are those of their memory."""
    when = datetime.fromtimestamp(started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    found: list[OllamaModel] = []
    for host in list(hosts.hosts.values()):
        state = host.state
        if state is not None and state.engine.info is not None:
            found += await loaded_models(state)
            continue
        for name in (*host.entry.names, *host.entry.adapters):
            tagged = name if ":" in name else f"{name}:latest"
            details = OllamaDetails(
                parent_model=host.entry.name if name in host.entry.adapters else "",
                format="",
                family="",
                families=[],
                parameter_size="",
                quantization_level="",
            )
            digest = hashlib.sha256(f"{host.entry.config.model.model}\0{name}".encode()).hexdigest()
            size = hosts.view(host).num_bytes
            found.append(
                OllamaModel(name=tagged, model=tagged, modified_at=when, size=size, digest=digest, details=details)
            )
    return found


async def ollama_ps(hosts: Hosts) -> list[OllamaModel]:
    """The models that are loaded, for ``/api/ps``, with the time at which they are unloaded without requests."""
    found: list[OllamaModel] = []
    for host in hosts.loaded():
        state = host.state
        if state is None or state.engine.info is None:
            continue
        expires = hosts.view(host).expires_at
        until = _NEVER
        if expires < math.inf:
            until = datetime.fromtimestamp(time.time() + expires - time.monotonic(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for model in await loaded_models(state):
            model.expires_at = until
            model.size_vram = 0
            model.context_length = state.engine.info.max_model_len
            found.append(model)
    await asyncio.sleep(0)
    return found


def model_metrics(hosts: Hosts) -> list[Metric]:
    """Metrics about loading, one line per model."""
    states = GaugeMetricFamily("chairlift:model_state", "1 for the state of the model.", labels=("model_name", "state"))
    gauges = {
        name: GaugeMetricFamily(f"chairlift:model_{name}", text, labels=("model_name",))
        for name, text in (
            ("memory_bytes", "Memory that the model needs while it is loaded."),
            ("requests_running", "Requests that use the model."),
            ("requests_waiting", "Requests that wait for the model to be loaded."),
            ("load_seconds", "Time that the last load took; 0 before the first."),
        )
    }
    counters = {
        name: CounterMetricFamily(f"chairlift:model_{name}", text, labels=("model_name",))
        for name, text in (
            ("loads", "Loads that succeeded."),
            ("unloads", "Times that the model was unloaded."),
            ("failures", "Loads that failed, and deaths of the engine."),
        )
    }
    for host in hosts.hosts.values():
        view = hosts.view(host)
        name = [host.entry.name]
        for state in ModelState:
            states.add_metric([*name, state.value], float(hosts.state_of(host) == state.value))
        values = (view.num_bytes, view.num_running, view.num_waiting, view.load_seconds)
        for gauge, value in zip(gauges.values(), values, strict=True):
            gauge.add_metric(name, value)
        counts = (view.num_loads, view.num_unloads, view.num_failures)
        for counter, count in zip(counters.values(), counts, strict=True):
            counter.add_metric(name, count)
    limit = GaugeMetricFamily("chairlift:models_memory_limit_bytes", "Memory that all models may need together.")
    limit.add_metric([], hosts.policy.limits.memory_bytes)
    used = GaugeMetricFamily("chairlift:models_memory_used_bytes", "Memory that the loaded models need together.")
    used.add_metric([], hosts.policy.used_bytes)
    return [states, *gauges.values(), *counters.values(), limit, used]


def merged_metrics(pages: Mapping[str, bytes], more: list[Metric]) -> bytes:
    """One page of metrics from the pages of several models: each metric has its lines together, and lines that do not
    name a model, such as those of the process, appear once."""
    heads: dict[str, list[str]] = {}
    lines: dict[str, dict[str, str]] = {}
    for page in (*pages.values(), prometheus.exposed(more)):
        name = ""
        for line in page.decode().splitlines():
            if line.startswith("# "):
                _, kind, name, *_ = line.split(" ", 3)
                head = heads.setdefault(name, [])
                if not any(each.startswith(f"# {kind} ") for each in head):
                    head.append(line)
            elif line:
                lines.setdefault(name, {}).setdefault(line.rpartition(" ")[0], line)
    found = [each for name, head in heads.items() for each in (*head, *lines.get(name, {}).values())]
    return "\n".join((*found, "")).encode()
