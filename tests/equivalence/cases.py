"""Workloads, the outputs of transformers and Chairlift for them, and a comparison of the outputs.

Two implementations round differently. If the scores of two tokens differ by less than :data:`NEAR_TIE`, one
implementation may choose the first token and the other the second, and the rest of the text differs. A different text
is therefore checked token by token: given the tokens before it, each token's score must be within :data:`NEAR_TIE` of
the highest score. With random weights of standard deviation 0.25 such near ties are rare, and their number is limited,
too.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from chairlift import LLM, RequestOutput, SamplingParams
from tests.executor.sampling import reference
from tests.models.tiny import hf_logits

__all__ = [
    "EOS",
    "FACTORS",
    "NEAR_TIE",
    "Job",
    "agree",
    "check_text",
    "greedy_jobs",
    "longest",
    "make_llm",
    "run",
    "sampled_jobs",
    "transformers_greedy",
]

VOCAB, EOS = 128, 1
NEAR_TIE = 1e-4
MAX_NEAR_TIES = 2
"""Maximum number of near ties in the 64 prompts of one run."""
MOST_PROMPT, MOST_OUTPUT = 70, 16

FACTORS: dict[str, Sequence[Any]] = {
    "family": ("llama", "mistral", "qwen2", "qwen3", "gpt2"),
    "max_num_batched_tokens": (1, 7, 16, 64, 2048),
    "block_size": (1, 8, 16, 32),
    "arrival": ("together", "reversed", "staggered"),
    "batching": ("continuous", "static", "dynamic"),
    "num_lookahead_steps": (0, 1, 2),
    "cache": ("ample", "tight", "preempting"),
    "enable_prefix_caching": (True, False),
    "kernels": ("auto", "torch"),
}
"""Setting -> its values. No combination of the values may change a generated token."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload."""

    prompt: list[int]
    params: SamplingParams


def _prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Random prompts of random lengths. Every third prompt begins with one of two common beginnings, so that prefixes
    can be shared."""
    roots = [[rng.randrange(2, VOCAB) for _ in range(40)] for _ in range(2)]
    prompts: list[list[int]] = []
    for i in range(count):
        length = rng.randint(1, MOST_PROMPT)
        fresh = [rng.randrange(2, VOCAB) for _ in range(length)]
        root = roots[i // 3 % 2][: rng.choice((8, 33, 40))] if i % 3 == 0 else []
        prompts.append((root + fresh)[:MOST_PROMPT])
    prompts[-1] = list(prompts[0])  # one prompt occurs twice
    return prompts


def greedy_jobs(count: int = 64, seed: int = 0) -> list[Job]:
    """Greedy requests with random lengths of prompt and output. Most of them may end early at the end-of-sequence
    token."""
    rng = random.Random(seed)
    return [
        Job(
            prompt,
            SamplingParams(temperature=0.0, max_tokens=rng.randint(1, MOST_OUTPUT), ignore_eos=rng.random() < 0.25),
        )
        for prompt in _prompts(rng, count)
    ]


def sampled_jobs(count: int, seed: int = 0) -> list[Job]:
    """Seeded requests with one or three outputs. Every sampling parameter is used in some of them."""
    rng = random.Random(seed)
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 2.0},
        {"top_k": 5},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 3.0, "min_p": 0.05},
        {"temperature": 1.5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"temperature": 2.0, "logit_bias": {5: 4.0, 6: -4.0}, "min_tokens": 4},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ]
    jobs: list[Job] = []
    for i, prompt in enumerate(_prompts(rng, count)):
        more = settings[i % len(settings)]
        seed, max_tokens = rng.getrandbits(40), rng.randint(5, MOST_OUTPUT)
        jobs.append(Job(prompt, SamplingParams(n=1 + 2 * (i % 2), seed=seed, max_tokens=max_tokens, **more)))
    return jobs


def longest(jobs: Sequence[Job]) -> int:
    """Largest number of positions that one of the requests may need."""
    return max(len(job.prompt) + (job.params.max_tokens or 0) for job in jobs)


def transformers_greedy(model: PreTrainedModel, job: Job) -> list[int]:
    """Output of transformers' ``generate`` for one prompt, including the end-of-sequence token."""
    prompt = torch.tensor([job.prompt])
    with torch.inference_mode():
        out = model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=job.params.max_tokens,
            do_sample=False,
            eos_token_id=None if job.params.ignore_eos else EOS,
            pad_token_id=EOS,
        )
    return [int(token_id) for token_id in out[0, len(job.prompt) :]]


def make_llm(model_dir: Path, jobs: Sequence[Job], *, tight: bool = False, **settings: Any) -> LLM:
    """Engine with a tiny model in float32. With ``tight``, its KV cache has room for only 1.5 times the longest
    request."""
    settings = {"block_size": 16, "max_num_seqs": 64, **settings}
    blocks = -(-longest(jobs) // settings["block_size"])
    settings["num_kv_blocks"] = blocks + max(2, blocks // 2) if tight else 64 * blocks
    return LLM(model_dir, dtype="float32", skip_tokenizer_init=True, **settings)


def run(
    llm: LLM, jobs: Sequence[Job], arrival: str = "together", *, preempting: bool = False, seed: int = 0
) -> list[RequestOutput]:
    """Run all jobs and return the outputs in the order of the jobs.

    ``together`` adds all requests before the first step, ``reversed`` does so in reverse order, and ``staggered`` adds
    them in random order with zero to three steps between two arrivals. ``preempting`` preempts a running request before
    about every seventh step, although the cache has room.
    """
    rng = random.Random(seed)
    order = list(range(len(jobs)))
    if arrival == "reversed":
        order.reverse()
    elif arrival == "staggered":
        rng.shuffle(order)
    done: dict[str, RequestOutput] = {}

    def step() -> None:
        running = list(llm.engine.scheduler.running)
        if preempting and running and rng.random() < 0.15:
            llm.engine.scheduler.preempt(rng.choice(running))
        done.update((output.request_id, output) for output in llm.engine.step() if output.finished)

    for index in order:
        llm.engine.add_request(jobs[index].prompt, jobs[index].params, request_id=str(index), stream=False)
        for _ in range(rng.randint(0, 3) if arrival == "staggered" else 0):
            step()
    # Each step computes at least one token, and a preempted request recomputes its tokens only a few times.
    for _ in range(100 * sum(len(job.prompt) + MOST_OUTPUT * job.params.n for job in jobs)):
        if not llm.engine.has_unfinished:
            break
        step()
    llm.engine.check_invariants()
    assert sorted(done) == sorted(str(index) for index in order), "not every request was answered, or one twice"
    return [done[str(index)] for index in range(len(jobs))]


def check_text(model: PreTrainedModel, job: Job, token_ids: Sequence[int], seed: int | None = None) -> None:
    """Fail unless every token of an output is correct given the tokens before it, up to :data:`NEAR_TIE`.

    ``seed`` is the output's 64-bit seed for jobs that are not greedy. The score of a token is transformers' logit after
    the transforms of the slow reference sampler.
    """
    ends_early = bool(token_ids) and token_ids[-1] == EOS and not job.params.ignore_eos
    assert len(token_ids) == job.params.max_tokens or ends_early, f"{len(token_ids)} tokens, then no reason to stop"
    assert job.params.ignore_eos or EOS not in token_ids[:-1], "text goes on after the end-of-sequence token"
    logits = hf_logits(model, [*job.prompt, *token_ids[:-1]])[len(job.prompt) - 1 :].tolist()
    for place, token_id in enumerate(token_ids):
        stops = () if job.params.ignore_eos else (EOS,)
        scores = reference.reshape(logits[place], job.params, job.prompt, token_ids[:place], stops)
        if seed is not None:
            scores = reference.truncate(scores, job.params)
            position = len(job.prompt) + place
            scores = [score + reference.gumbel(seed, position, i) for i, score in enumerate(scores)]
        best = max(scores)
        assert scores[token_id] >= best - NEAR_TIE, (
            f"token {place} is {token_id} with score {scores[token_id]:.5f},"
            f" but {scores.index(best)} scores {best:.5f} (prompt of {len(job.prompt)} tokens)"
        )


def agree(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]], check: Callable[[int], None]) -> None:
    """Fail unless the texts are equal. A few may differ after a near tie, if ``check(index)`` accepts them."""
    assert len(expected) == len(got)
    different = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if list(a) != list(b)]
    for i in different:
        check(i)
    assert len(different) <= MAX_NEAR_TIES, f"{len(different)} of {len(got)} texts part at near ties: too many for luck"
