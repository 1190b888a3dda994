"""``bench offline``: measures an engine that runs in this process.

By default, all requests of a random workload start at once, and the time is compared with the floor. Alternatively,
requests start at planned times, like in ``bench serve`` but without HTTP. The time of a token is then the time when the
engine returns it, counted from the planned start of its request.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import time
from typing import TYPE_CHECKING, Final

import torch

from chairlift.base.outputs import RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import ModelLimits
from chairlift.errors import ConfigError, RequestError
from chairlift.kernels.roof import GPU
from chairlift.loading.native_path import NativePath
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.step_cost import ModelCost
from chairlift_lab.bench.floor import BUDGETS, GPU_BUDGETS, Floor, workload_floor
from chairlift_lab.bench.limits import Limits, measure_device, measure_limits
from chairlift_lab.bench.machine import HostMachine
from chairlift_lab.bench.other_load import OtherLoad
from chairlift_lab.bench.serve_run import Load, LoadOutcome, Progress, ServeRun, Target, quiet_collector
from chairlift_lab.bench.serve_run import fit as fit_trace
from chairlift_lab.replay.replay import RequestTiming, serve_trace
from chairlift_lab.replay.served import Percentiles
from chairlift_lab.replay.traced_request import TracedRequest

if TYPE_CHECKING:
    from chairlift.llm import LLM

__all__ = [
    *("WARM_UP", "OfflineRun", "fit", "floor_of", "limits_of", "room_of", "run_here"),
    "run_offline",
]

Requests = list[tuple[list[int], int]]
"""(prompt token ids, number of output tokens) of each request."""

_WARM_UP_TOKENS: Final = 8
WARM_UP: Final = tuple(TracedRequest(arrival=0.0, prompt_tokens=8, output_tokens=8) for _ in range(4))


@dataclasses.dataclass(frozen=True, slots=True)
class OfflineRun:
    """Results of a run in which all requests were answered. Times are in seconds."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_second: float
    steps: int
    time_to_first_token: Percentiles
    latency: Percentiles
    """Time from the arrival of a request to its last token."""
    preemptions: int
    held_row_tokens: int
    """Number of tokens computed for rows that had ended while other rows of their static batch continued."""
    padding_avoided: int
    """Number of padding tokens that an engine with padded batches would have computed in addition."""
    collective_seconds: float = 0.0
    """Time inside steps in which the processes of a divided model waited for each other."""


def fit(requests: Requests, max_tokens: int) -> tuple[Requests, int]:
    """Shorten requests to at most ``max_tokens`` for prompt and answer together; see
    :func:`chairlift_lab.bench.serve_run.fit`. Returns (requests, number of shortened requests)."""
    lengths = [TracedRequest(arrival=0.0, prompt_tokens=len(ids), output_tokens=count) for ids, count in requests]
    fitting, cut = fit_trace(lengths, max_tokens)
    pairs = zip(requests, fitting, strict=True)
    return [(ids[: each.prompt_tokens], each.output_tokens) for (ids, _), each in pairs], cut


def run_offline(llm: LLM, requests: Requests) -> OfflineRun:
    """Run all requests at once, after a short warm-up, with greedy sampling and answers of exactly the given lengths.

    Raises RequestError when a request fails.
    """
    shortened = [(prompt[-_WARM_UP_TOKENS:], min(count, _WARM_UP_TOKENS)) for prompt, count in requests[:4]]
    llm.generate([prompt for prompt, _ in shortened], [_greedy(count) for _, count in shortened])
    gc.collect()
    scheduler = llm.engine.scheduler
    log = llm.engine.step_log
    preempted = scheduler.num_preemptions
    last = scheduler.step
    held = padding = steps = 0
    waited = llm.engine.core.stats().collective_seconds
    begin = time.perf_counter()
    wanted = {llm.engine.add_request(prompt, _greedy(count), stream=False): count for prompt, count in requests}
    outputs: list[RequestOutput] = []
    while len(outputs) < len(requests):
        outputs += llm.engine.step()
        if len(log) and log[-1].step > last:  # the log keeps only the last steps
            last = log[-1].step
            steps += 1
            held += log[-1].num_held
            padding += log[-1].padding_avoided
    seconds = time.perf_counter() - begin
    for output in outputs:
        if output.error is not None or len(output.outputs[0].token_ids) != wanted[output.request_id]:
            raise RequestError(f"a request ended early: {output.error or 'it has too few tokens'}")
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    tokens = sum(wanted.values())
    return OfflineRun(
        requests=len(requests),
        prompt_tokens=sum(len(prompt) for prompt, _ in requests),
        output_tokens=tokens,
        seconds=seconds,
        output_tokens_per_second=tokens / seconds,
        steps=steps,
        time_to_first_token=Percentiles.of([(each.first_token_time or 0.0) - each.arrival_time for each in metrics]),
        latency=Percentiles.of([(each.finished_time or 0.0) - each.arrival_time for each in metrics]),
        preemptions=scheduler.num_preemptions - preempted,
        held_row_tokens=held,
        padding_avoided=padding,
        collective_seconds=llm.engine.core.stats().collective_seconds - waited,
    )


def limits_of(llm: LLM, path: NativePath, machine: HostMachine) -> Limits:
    """Measure the limits of the device that runs the model: this machine's processors or a GPU.

    Raises ConfigError if PyTorch runs the model, because the floor is defined for Chairlift's kernels only.
    """
    device = torch.device(llm.config.model.device)
    if path.isa is None and not (path.triton and device.type == "cuda"):
        raise ConfigError(f"the floor is that of compiled kernels, and they do not run this model: {path.reason}")
    dtype = path.dtype if path.quantization is None else torch.float8_e4m3fn
    return measure_limits(machine, path.threads) if path.isa else measure_device(device, dtype)


def floor_of(requests: Requests, llm: LLM, network: NetworkConfig, path: NativePath, limits: Limits) -> Floor:
    """Minimum time for ``requests`` on the kernels ``path``, given the ``limits`` of :func:`limits_of`."""
    dtype = torch.int8 if path.quantization else path.dtype
    roof = limits.roof(path.isa, dtype, path.threads) if path.isa else limits.roof(GPU, path.dtype, 1)
    kept = torch.int8 if llm.config.cache.kv_cache_dtype == "int8" else None
    return workload_floor(
        [(len(prompt), count) for prompt, count in requests],
        ModelCost.of(network, path.dtype, path.quantization, kept),
        roof,
        max_num_seqs=llm.config.scheduler.max_num_seqs,
        budgets=BUDGETS if path.isa else GPU_BUDGETS,
    )


def room_of(llm: LLM) -> int:
    """Maximum number of tokens in the prompt and answer of one request."""
    return min(llm.max_model_len, llm.engine.kv.capacity_tokens + 1)


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


# --- traffic ---------------------------------------------------------------------------------------------------------


def run_here(
    core: EngineCore, limits: ModelLimits, target: Target, load: Load, progress: Progress | None = None
) -> ServeRun:
    """Run a load on an idle engine, with greedy sampling and answers of exactly the requested lengths.

    Times are those of the clock of ``core``. A request that the engine refuses, drops or fails to compute has the
    status ``failed``. Ctrl-C ends the run early: the outcomes so far are returned, and the engine cannot be used any
    more.
    """
    sent: list[RequestTiming] = []
    running = 0

    def watch(timing: RequestTiming) -> None:
        nonlocal running
        if timing.left < 0:
            running += 1
            sent.append(timing)
            return
        running -= 1
        if progress is not None:
            progress(running, _outcome(timing, timing.left))

    interrupted = False
    serve_trace(core, WARM_UP, limits)
    date = datetime.datetime.now()
    begin = core.clock.now()
    other_load = OtherLoad()
    with quiet_collector():
        try:
            serve_trace(core, load.requests, limits, max_concurrency=load.max_concurrency, watch=watch)
        except KeyboardInterrupt:
            interrupted = True
    end = core.clock.now()
    return ServeRun(
        server=target,
        load=load,
        outcomes=[_outcome(timing, end) for timing in sorted(sent, key=lambda timing: timing.index)],
        date=date,
        begin=begin,
        seconds=max(end - begin, 1e-9),
        cpu_share=None,
        interrupted=interrupted,
        busy=other_load.share(),
    )


def _outcome(timing: RequestTiming, now: float) -> LoadOutcome:
    request = timing.request
    whole = timing.tokens > 1 and timing.first == timing.last
    found = LoadOutcome(
        index=timing.index,
        scheduled=request.arrival,
        start=request.arrival,
        headers=timing.started,
        end=timing.left if timing.left >= 0 else now,
        wanted_tokens=request.output_tokens,
        prompt_tokens=request.prompt_tokens,
        times=timing.times[:1] if whole else timing.times,
        counts=[timing.tokens] if whole else [1] * timing.tokens,
        completion_tokens=timing.tokens,
        cached_tokens=timing.cached_tokens,
        preempted=timing.preempted,
    )
    if timing.ended:
        found.status = "completed"
        found.finish_reason = "length"
    elif timing.cancelled:
        found.status = "cancelled"
    elif timing.dropped:
        found.fail("too late", "it could not be answered by its deadline")
    elif timing.error:
        found.fail("failed" if timing.started >= 0 else "refused", timing.error)
    return found
