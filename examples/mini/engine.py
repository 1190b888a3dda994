"""File 7 of 8. The loop: schedule, execute, sample, update. This is the whole engine.

The engine's version is ``EngineCore.step`` in ``chairlift/engine/core.py``. It can schedule the next step before the
tokens of this one are known, and a server runs it in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kv_cache import KVCacheManager
from model import LlamaModel
from request import Request, SamplingParams
from sampler import sample
from scheduler import Scheduler, SchedulerOutput
from step_batch import build_step_batch

__all__ = ["EngineCore"]


class EngineCore:
    """Takes prompts as token ids, and generates tokens for all of them together.

    ``watch`` is called for every step with its :class:`SchedulerOutput` and the requests that it finished.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        block_size: int = 16,
        num_kv_blocks: int = 256,
        batching: str = "continuous",
        enable_prefix_caching: bool = True,
        watch: Callable[[SchedulerOutput, list[Request]], None] | None = None,
    ) -> None:
        self.kv = KVCacheManager(num_kv_blocks, block_size, enable_prefix_caching)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            batching=batching,
        )
        self.model = LlamaModel(model_dir, num_kv_blocks, block_size)
        self.watch = watch

    def add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Request:
        """Queue a request. Raises ValueError if it does not fit the model or the cache."""
        request = Request(request_id, prompt_token_ids, params)
        if request.num_prompt_tokens + params.max_tokens > self.model.max_model_len:
            raise ValueError(
                f"{request.num_prompt_tokens} tokens of prompt and {params.max_tokens} of answer do not fit into the"
                f" model's {self.model.max_model_len} positions; use a shorter prompt or fewer max_tokens"
            )
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """Run one step. Returns the requests that it has finished."""
        out = self.scheduler.schedule()
        batch = build_step_batch(out, self.kv.block_size)
        hidden = self.model.forward(batch)  # execute
        tokens = sample(self.model.compute_logits(hidden, batch), batch.sampling)
        finished = self.scheduler.update(out, tokens)
        if self.watch is not None:
            self.watch(out, finished)
        return finished

    def run(self) -> None:
        """Run steps until all requests have finished."""
        while self.scheduler.has_unfinished:
            self.step()
