"""Creates an engine with HashLM, and its expected outputs."""

from __future__ import annotations

from typing import Any

from chairlift.base.outputs import RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.seeds import sample_seed
from chairlift.config import CacheConfig, CacheGroup, SchedulerConfig
from chairlift.engine.clock import VirtualClock
from chairlift.engine.engine import Engine
from chairlift.engine.input_processor import ModelLimits
from chairlift.executor.local import LocalExecutor
from chairlift.models.hashlm import HashLM, reference_tokens
from chairlift_lab.sim.oracle import byte_tokenizer

__all__ = ["EOS", "LENGTH", "VOCAB", "alone", "drain", "greedy", "make_engine"]

BLOCK, LENGTH, VOCAB, EOS = 4, 64, 20, 19


def make_engine(
    *,
    model: type[HashLM] = HashLM,
    num_blocks: int = 65,
    text: bool = False,
    eos: tuple[int, ...] = (EOS,),
    seed: int | None = None,
    caching: bool = True,
    **config: Any,
) -> Engine:
    scheduler = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, **config})
    groups = [CacheGroup(num_blocks)]
    executor = LocalExecutor(
        model(groups, BLOCK, VOCAB, LENGTH),
        num_slots=scheduler.max_num_seqs,
        max_model_len=LENGTH,
        block_size=BLOCK,
    )
    return Engine(
        executor,
        ModelLimits(VOCAB, LENGTH, eos),
        scheduler,
        tokenizer=byte_tokenizer() if text else None,
        cache=CacheConfig(enable_prefix_caching=caching),
        seed=seed,
        clock=VirtualClock(),
    )


def greedy(max_tokens: int = 8, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "seed": 1, "max_tokens": max_tokens, "ignore_eos": True, **params})


def alone(prompt: list[int], params: SamplingParams, index: int = 0) -> list[int]:
    """Expected tokens of a request that is served alone, if no stop token or stop string ends its output."""
    row = SamplingRow(params=params, seed=sample_seed(params.seed or 0, index), num_prompt_tokens=len(prompt))
    return reference_tokens(prompt, row, [None], VOCAB, params.max_tokens or 0)


def drain(engine: Engine, most: int = 500) -> dict[str, list[RequestOutput]]:
    """Run steps until all requests have ended. Returns request id -> all outputs of the request."""
    seen: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished:
        outputs = engine.step()
        assert len({output.request_id for output in outputs}) == len(outputs), "a step tells of a request twice"
        for output in outputs:
            seen.setdefault(output.request_id, []).append(output)
        engine.check_invariants()
        most -= 1
        assert most, "the requests do not come to an end"
    assert engine.kv.counts().used == 0
    return seen
