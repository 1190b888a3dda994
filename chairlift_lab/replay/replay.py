"""Serves a trace with the real engine on a virtual clock, to predict within seconds how settings affect this traffic.

The scheduler, the KV cache and the engine core are the real code. Only the executor is simulated: it computes nothing,
and a step takes the time that the cost model predicts. A request that arrives during a step is seen at the next step,
as in a real engine. :func:`serve_trace` can also drive a real engine on the system's clock, so measured and simulated
results have the same meaning. Vidur (MLSys 2024) introduced simulation from a profile of steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from chairlift.base.step_batch import Masks, SampledTokens
from chairlift.config import CacheGroup, EngineConfig
from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.engine.adapters import Adapters
from chairlift.engine.clock import Clock, VirtualClock
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import InputProcessor, ModelLimits
from chairlift.engine.preparers import Preparers
from chairlift.errors import ConfigError, InvariantError
from chairlift.executor.executor import ImageMemory
from chairlift_lab.replay.clients import Clients, enter
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.padding import padded
from chairlift_lab.replay.served import Collector, RequestTiming, ServedTrace, Watch
from chairlift_lab.replay.traced_request import TracedRequest

__all__ = ["RequestTiming", "ServedTrace", "SimExecutor", "SimReport", "replay", "serve_trace", "simulated_core"]

_VOCAB_SIZE: Final = 2**31 - 1
"""Vocabulary size of simulated models. It is so large that the first token of every block of a prompt is unique."""
_TOKEN: Final = 1
_MAX_HOST_BLOCKS: Final = 1 << 22


class _Pending:
    """Sampled tokens of a simulated step, which become available when the step ends."""

    __slots__ = ("_clock", "_ready_at", "_tokens")

    def __init__(self, tokens: SampledTokens, clock: Clock, ready_at: float) -> None:
        self._tokens = tokens
        self._clock = clock
        self._ready_at = ready_at

    def result(self) -> SampledTokens:
        self._clock.wait_until(self._ready_at)
        return self._tokens


class SimExecutor:
    """Executor whose steps take the time that the cost model predicts. It returns a dummy token per sample position.

    Steps run one after another. Copies to and from host memory take additional time, at the cost model's bandwidth.
    With the system's clock, the executor sleeps.
    """

    ends_between_operators = True

    def __init__(
        self,
        cost: CostModel,
        clock: Clock,
        *,
        group: CacheGroup,
        block_size: int,
        bytes_per_token: int,
        images: ImageMemory | None = None,
        reads_shared_once: bool = False,
        capture_sizes: Sequence[int] = (),
    ) -> None:
        self.images = images
        self.reads_shared_once = reads_shared_once
        self.cache_groups = [group]
        self.block_size = block_size
        self.block_bytes = [block_size * bytes_per_token]
        self.num_lookahead_steps = 0
        self.operators = 0
        """Number of operators after each of which a prefill may stop, as the policy says; 0: steps end as a whole."""
        self._prompts: dict[int, int] = {}
        """Row -> number of known tokens of its request when it joined. Kept only with :attr:`operators`."""
        self._cost = cost
        self._capture_sizes = capture_sizes
        self._clock = clock
        self._free_at = 0.0

    def execute(self, out: SchedulerOutput) -> SchedulerOutput:
        features = StepFeatures.of(out.num_decodes, out.context_tokens, out.chunks, out.kind_bytes, out.shared_tokens)
        features = padded(features, self._capture_sizes)
        seconds = self._by_operators(out, features) if self.operators else self._cost.step_seconds(features)
        if out.swap_out or out.swap_in:
            seconds += self._cost.copy_seconds((len(out.swap_out) + len(out.swap_in)) * self.block_bytes[0])
        self._free_at = max(self._free_at, self._clock.now()) + seconds
        return out

    def _by_operators(self, out: SchedulerOutput, features: StepFeatures) -> float:
        """Seconds of a step whose chunks are operators of a prefill: each chunk takes its part of the time of its whole
        prompt, as if the weights were read once for all of them."""
        self._prompts |= {row.slot: len(row.token_ids) for row in out.joined}
        decodes = features._replace(prefill_tokens=0, prefill_context=0.0)
        seconds = self._cost.step_seconds(decodes) if out.num_decodes else 0.0
        for chunk in out.chunks:
            whole = max(self._prompts[chunk.slot], chunk.end)
            seconds += self._cost.prefill_seconds(whole) * chunk.num_tokens / whole
        return seconds

    def sample(self, handle: SchedulerOutput, masks: Masks | None = None) -> _Pending:
        count = handle.num_decodes + sum(chunk.samples for chunk in handle.chunks)
        return _Pending(SampledTokens([_TOKEN] * count), self._clock, self._free_at)

    def shutdown(self) -> None:
        """Do nothing: the executor has no resources to release."""


@dataclasses.dataclass(frozen=True, slots=True)
class SimReport:
    """Result of a simulated trace, and how reliable its cost model is."""

    machine: str
    model: str
    validity: str
    """``modelled, unvalidated`` unless the cost model was fitted to real steps."""
    served: ServedTrace

    def to_dict(self) -> dict[str, Any]:
        """The report as data for JSON."""
        return dataclasses.asdict(self)


# --- the loop --------------------------------------------------------------------------------------------------------


def serve_trace(
    core: EngineCore,
    trace: Sequence[TracedRequest],
    limits: ModelLimits,
    timings: list[RequestTiming] | None = None,
    *,
    max_concurrency: int | None = None,
    watch: Watch | None = None,
    request_seconds: float = 0.0,
) -> ServedTrace:
    """Serve a trace to its end, with greedy sampling and answers of exactly the requested lengths.

    Arrival times count from the call, on the clock of ``core``. The core can be simulated or real, and must be idle.

    - A turn of a chat is sent at its time or when the previous turn has ended, whichever is later. A turn with
      ``gap_ms`` is sent so long after that end.
    - A request with ``cancel_ms`` is aborted after that time.
    - With ``max_concurrency``, at most that many requests are in flight, as in a closed loop of users.
    - ``timings``, if given, gets one entry per admitted request.
    - ``watch``, if given, is called when a request is sent and when it has ended.
    - ``request_seconds`` pass from sending a request until the engine has it.

    Requests that are refused, or dropped at their deadline, are counted in the result. Raises RequestError when an
    admitted request fails and there is no ``watch``.
    """
    clock = core.clock
    inputs = InputProcessor(limits, None, core.kv, seed=0)
    collector = Collector(watch, core.scheduler.membership.held)
    refused = 0
    preemptions = core.scheduler.num_preemptions
    clients = Clients(trace, clock.now(), max_concurrency, request_seconds)
    while core.has_work or not clients.done:
        now = clock.now()
        while (sent := clients.send(now)) is not None:
            if not enter(core.add, inputs, trace[sent[0]], *sent, collector):
                refused += 1
                clients.ended(sent[0], now)
        _let_go(core, clients, collector, now)
        event = clients.next_event()
        if not core.has_work:
            if event is not None:
                clock.wait_until(event)
            elif not clients.done:
                raise InvariantError("some requests of the trace can never be sent")
            continue
        outputs = core.step()
        if outputs is not None:
            collector.take(outputs, clock.now())
            collector.step(core)
            for ended in outputs.finished:
                if tool := trace[int(ended.sequence_id)].tool:
                    core.paused(ended.sequence_id, [tool])
                clients.ended(int(ended.sequence_id), clock.now())
        elif not core.num_in_flight:
            events = [when for when in (core.next_event(), event) if when is not None]
            if not events:
                raise InvariantError("requests wait, but no step and no arrival will ever come")
            clock.wait_until(min(events))
    if timings is not None:
        timings += collector.timings.values()
    return collector.served(refused, core.scheduler.num_preemptions - preemptions)


def _let_go(core: EngineCore, clients: Clients, collector: Collector, now: float) -> None:
    """Abort requests whose client has disconnected. Also record requests of the same static batch that end because of
    this."""
    for index in clients.leaving(now):
        timing = collector.timings.get(str(index))
        if timing is None or timing.left >= 0:
            continue
        timing.cancelled = True
        collector.over(timing, now)
        mates = [ended for ended in core.abort([str(index)]) if ended.sequence_id != str(index)]
        collector.end(mates, now)
        for ended_index in (index, *(int(ended.sequence_id) for ended in mates)):
            clients.ended(ended_index, now)


def simulated_core(
    deployment: Deployment,
    config: EngineConfig,
    clock: Clock | None = None,
    adapters: Adapters | None = None,
    images: ImageMemory | None = None,
) -> tuple[EngineCore, ModelLimits]:
    """Create (simulated engine core, limits of its model). The default clock is a new virtual clock.

    Its steps also take the time to read the ``adapters`` of their rows, by their ``nbytes``. With ``images`` the core
    takes images, and this memory encodes them. Raises ConfigError for
    settings that need more memory or context length than the deployment has.
    """
    cache = config.cache
    scheduler = config.scheduler
    longest = config.model.max_model_len or deployment.max_model_len
    if longest > deployment.max_model_len:
        raise ConfigError(
            f"max_model_len is {longest}, but {deployment.model} takes {deployment.max_model_len}; lower it"
        )
    num_blocks = cache.num_kv_blocks
    if num_blocks is None:
        memory = cache.kv_cache_memory_bytes or deployment.kv_memory_bytes
        needed = -(-scheduler.max_num_seqs * longest // cache.block_size) + 1
        num_blocks = min(memory // (deployment.kv_bytes_per_token * cache.block_size), needed)
    if num_blocks < 2:
        raise ConfigError("the KV cache has no room for two blocks; raise kv_cache_memory_bytes or lower block_size")
    clock = clock or VirtualClock()
    host_bytes = cache.swap_space_bytes
    block_bytes = deployment.kv_bytes_per_token * cache.block_size
    host_blocks = -(-num_blocks // 10) if host_bytes is None else host_bytes // block_bytes
    if host_blocks > _MAX_HOST_BLOCKS:
        raise ConfigError(
            f"swap_space_bytes holds {host_blocks:,} blocks of this model, and a simulation has room for"
            f" {_MAX_HOST_BLOCKS:,}; lower it to {_MAX_HOST_BLOCKS * block_bytes}"
        )
    executor = SimExecutor(
        deployment.cost,
        clock,
        group=CacheGroup(num_blocks, None, host_blocks),
        block_size=cache.block_size,
        bytes_per_token=deployment.kv_bytes_per_token,
        images=images,
        reads_shared_once=deployment.reads_shared_once,
        capture_sizes=deployment.capture_sizes,
    )
    preparers = Preparers(adapters=adapters)
    core = EngineCore(executor, scheduler, max_model_len=longest, cache=cache, clock=clock, preparers=preparers)
    executor.operators = getattr(core.scheduler.policy, "operators", 0)
    return core, ModelLimits(_VOCAB_SIZE, longest, (), scheduler.promises)


def replay(
    trace: Sequence[TracedRequest], config: EngineConfig, deployment: Deployment, *, max_concurrency: int | None = None
) -> SimReport:
    """Simulate a trace. Equal traces, settings and cost models give identical reports.

    ``max_concurrency`` is that of :func:`serve_trace`. Raises ConfigError for the same errors as
    :func:`simulated_core`.
    """
    core, limits = simulated_core(deployment, config)
    served = serve_trace(
        core, trace, limits, max_concurrency=max_concurrency, request_seconds=deployment.request_seconds
    )
    return SimReport(deployment.machine, deployment.model, deployment.validity, served)
