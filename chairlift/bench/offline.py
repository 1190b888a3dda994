"""``bench offline``: a seeded workload through the engine, all requests at once, and how near it comes to the floor."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from chairlift.bench.floor import Floor, ModelCost, workload_floor
from chairlift.bench.limits import Limits
from chairlift.errors import ConfigError, RequestError
from chairlift.executor.select import choose_isa, why_not_native, why_not_triton
from chairlift.kernels.cpu.library import default_threads
from chairlift.models.hf_config import ModelConfig
from chairlift.models.loader import resolve_dtype
from chairlift.outputs import RequestOutput
from chairlift.sampling_params import SamplingParams

if TYPE_CHECKING:
    from chairlift.llm import LLM

__all__ = ["NativePath", "OfflineRun", "Percentiles", "fit", "floor_of", "native_path", "room_of", "run_offline"]

Requests = list[tuple[list[int], int]]
"""Prompt token ids and number of output tokens."""

_WARM_UP_TOKENS: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a time in seconds, over requests."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Interpolated between the nearest values."""
        p50, p99 = np.percentile(values, [50, 99]).tolist()
        return cls(p50, p99)


@dataclasses.dataclass(frozen=True, slots=True)
class OfflineRun:
    """What it took to answer all requests."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_second: float
    steps: int
    time_to_first_token: Percentiles
    latency: Percentiles
    """From arrival to the last token."""
    preemptions: int
    held_row_tokens: int
    """Tokens computed for rows that had ended, while the rest of their static batch went on."""
    padding_avoided: int
    """Tokens that an engine which pads would have computed on top."""


@dataclasses.dataclass(frozen=True, slots=True)
class NativePath:
    """The kernels that run a model, or why PyTorch does."""

    isa: str | None
    dtype: torch.dtype
    threads: int
    reason: str
    """Empty with an isa."""
    triton: bool = False
    """Whether the Triton kernels do."""

    @property
    def kernels(self) -> str:
        """As the setting ``kernels`` names them."""
        return "triton" if self.triton else self.isa or "torch"

    def describe(self) -> str:
        """In a few words."""
        name = str(self.dtype).removeprefix("torch.")
        if self.triton:
            return f"triton in {name}"
        if self.isa is None:
            return f"PyTorch in {name}: {self.reason}"
        return f"{self.isa} in {name}, {self.threads} thread{'s' if self.threads > 1 else ''}"


def fit(requests: Requests, most_tokens: int) -> tuple[Requests, int]:
    """Requests shortened to ``most_tokens``, prompt and answer together, and how many of them were.

    An answer gets at most half of the room, and a prompt what is left beside its answer. Raises ConfigError when there
    is no room for two tokens.
    """
    if most_tokens < 2:
        raise ConfigError(f"requests need room for 2 tokens, and there is room for {most_tokens}; raise max_model_len")
    fitting = []
    for prompt, count in requests:
        answer = count if len(prompt) + count <= most_tokens else min(count, most_tokens // 2)
        fitting.append((prompt[: most_tokens - answer], answer))
    return fitting, sum(one != other for one, other in zip(requests, fitting, strict=True))


def run_offline(llm: LLM, requests: Requests) -> OfflineRun:
    """Answer requests greedily, to exactly their lengths, after a short warm-up.

    Raises RequestError when one of them fails.
    """
    shortened = [(prompt[-_WARM_UP_TOKENS:], min(count, _WARM_UP_TOKENS)) for prompt, count in requests[:4]]
    llm.generate([prompt for prompt, _ in shortened], [_greedy(count) for _, count in shortened])
    gc.collect()
    scheduler, log = llm.engine.scheduler, llm.engine.step_log
    preempted, last = scheduler.num_preemptions, scheduler.step
    held = padding = steps = 0
    begin = time.perf_counter()
    wanted = {llm.engine.add_request(prompt, _greedy(count), stream=False): count for prompt, count in requests}
    outputs: list[RequestOutput] = []
    while len(outputs) < len(requests):
        outputs += llm.engine.step()
        if len(log) and log[-1].step > last:  # summed up here, because the log forgets
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
    )


def native_path(llm: LLM, network: ModelConfig) -> NativePath:
    """What runs the model of ``llm``, whose configuration is ``network``."""
    config = llm.config
    dtype = resolve_dtype(network, config.model.dtype)
    device = torch.device(config.model.device)
    threads = config.model.threads or default_threads()
    if config.model.kernels == "torch":
        return NativePath(None, dtype, threads, "kernels is 'torch'")
    if device.type != "cpu" or config.model.kernels == "triton":
        reason = why_not_triton(network, dtype, device)
        return NativePath(None, dtype, threads, reason or "the Triton kernels do", triton=not reason)
    reason = why_not_native(network, dtype, device, config.cache.block_size)
    isa = None if reason else choose_isa(config, network, dtype, device)
    return NativePath(isa, dtype, threads, reason)


def floor_of(requests: Requests, llm: LLM, network: ModelConfig, path: NativePath, limits: Limits) -> Floor:
    """The least time for ``requests`` on the kernels' path. Raises ConfigError for a path without kernels."""
    if path.isa is None:
        raise ConfigError(f"the floor is that of the native kernels, and they do not run this model: {path.reason}")
    return workload_floor(
        [(len(prompt), count) for prompt, count in requests],
        ModelCost.of(network, path.dtype),
        limits.roof(path.isa, path.dtype, path.threads),
        max_num_seqs=llm.config.scheduler.max_num_seqs,
    )


def room_of(llm: LLM) -> int:
    """The most tokens, prompt and answer together, that one request may have."""
    return min(llm.max_model_len, llm.engine.kv.capacity_tokens + 1)


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
