"""HashLM under the real executor: every way of cutting the work gives the tokens of a request served alone."""

from __future__ import annotations

import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.config import CacheGroup
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.request import Request
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.executor.local import LocalExecutor
from chairlift.models.hashlm import HashLM, reference_tokens

VOCAB, LENGTH, BLOCK = 97, 64, 4


def serve(
    jobs: list[tuple[list[int], int]], windows: tuple[int | None, ...], budget: int, blocks: int
) -> list[Request]:
    groups = [CacheGroup(blocks, window) for window in windows]
    executor = LocalExecutor(HashLM(groups, BLOCK, VOCAB, LENGTH), num_slots=4, max_model_len=LENGTH, block_size=BLOCK)
    kv = KVCacheManager(groups, BLOCK, max_step_tokens=budget)
    scheduler = Scheduler(kv, max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=LENGTH)
    requests = [
        Request(f"r{i}", prompt, max_tokens=count, sampling=_row(i, prompt)) for i, (prompt, count) in enumerate(jobs)
    ]
    for one in requests:
        scheduler.add(one)
    for step in range(1, 2_000):
        out = scheduler.schedule(float(step))
        if out.num_tokens:
            scheduler.update(out, executor.sample(executor.execute(out)).result().token_ids, float(step))
        if not scheduler.has_unfinished:
            break
    executor.shutdown()
    return requests


def _row(index: int, prompt: list[int]) -> SamplingRow:
    return SamplingRow(SamplingParams(temperature=0.5), seed=index, num_prompt_tokens=len(prompt))


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 3)])
@pytest.mark.parametrize(("budget", "blocks"), [(1, 40), (3, 40), (64, 40), (7, 12)])
def test_tokens_are_those_of_a_request_alone(windows: tuple[int | None, ...], budget: int, blocks: int) -> None:
    jobs = [([(i * j) % VOCAB for j in range(1 + 4 * i)], 3 + 2 * i) for i in range(6)]
    jobs += [(jobs[3][0] + [1, 2], 8)]  # shares a beginning
    for index, one in enumerate(serve(jobs, windows, budget, blocks)):
        prompt, count = jobs[index]
        expected = reference_tokens(prompt, _row(index, prompt), windows, VOCAB, count)
        assert one.token_ids[one.num_prompt_tokens :] == expected, one
