"""On the native kernels a request says the same, to the last bit of its logprobs, in whatever company and order.

Each case is a random model and a random mixture of requests. They are answered one at a time by an engine with room for
everything, then together by one with random settings: chunks, prefix sharing, preemption, look-ahead, threads.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from chairlift import LLM, RequestOutput, SamplingParams
from chairlift.kernels import ops
from chairlift.kernels.cpu.library import supported_isas
from chairlift.models.layers.decoder import DecoderLayer
from tests.equivalence.cases import Job, longest, run
from tests.kernels.cpu.models import FAMILIES, VOCAB, tiny_model
from tests.models.tiny import RECURRENT_FAMILIES
from tests.native import needs_kernels
from tests.sweep import sweep

pytestmark = needs_kernels

MOST_TOKENS = 1500
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "mistral-200": ("mistral", {"sliding_window": 200}),
    # Operations that PyTorch computes between the kernels must not depend on the batch either.
    "gemma3_text": ("gemma3_text", {"sliding_window": 24}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5, "num_key_value_heads": 4}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "lfm2": ("lfm2", {"hidden_size": 128, "layer_types": ["conv", "full_attention", "conv"]}),
    "olmo2": ("olmo2", {}),
}
"""Family, and what differs from the tiny model of that name."""
WITHOUT_STATES = [name for name, (family, _) in MODELS.items() if family not in RECURRENT_FAMILIES]
"""Models without recurrent states."""
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0},
    {},
    {"temperature": 2.0},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 3.0, "min_p": 0.05},
    {"temperature": 1.5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 2.0},
    {"temperature": 2.0, "logit_bias": {5: 4.0, 6: -4.0}, "min_tokens": 4},
    {"temperature": 2.0, "allowed_token_ids": [3, 4, 5, 60, 61, 99, 130]},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


@dataclasses.dataclass(frozen=True)
class Case:
    """Some requests, who answers them, and how they meet."""

    model: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    settings: dict[str, Any]
    tight: bool
    preempting: bool
    arrival: str
    jobs: list[Job]

    @property
    def how(self) -> dict[str, str | None]:
        """Settings of the dtypes in which the model runs."""
        return {
            "dtype": self.dtype,
            "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache_dtype,
        }


def draw_jobs(rng: random.Random) -> list[Job]:
    """A few requests; half of them begin alike, and some go beyond what attention takes in one tile."""
    most = rng.choice((20, 60, 60, 120, 120, 300)) if rng.random() < 0.97 else 1200
    root = [rng.randrange(2, VOCAB) for _ in range(most)]
    jobs: list[Job] = []
    for _ in range(rng.randint(2, 8)):
        shared = root[: rng.randint(1, most)] if rng.random() < 0.5 else []
        fresh = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, max(1, most - len(shared))))]
        prompt = (shared + fresh)[:most]
        more: dict[str, Any] = {"seed": rng.getrandbits(40), **rng.choice(SAMPLING)}
        if rng.random() < 0.6:
            more["logprobs"] = rng.choice((0, 1, 5))
        if rng.random() < 0.15:
            more["prompt_logprobs"] = rng.choice((0, 2))
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 3)), max_tokens=rng.randint(4, 20), ignore_eos=rng.random() < 0.5, **more
        )
        jobs.append(Job(prompt, params))
    return jobs


def draw_case(seed: int) -> Case:
    rng = random.Random(seed)
    settings = {
        "max_num_batched_tokens": rng.choice((1, 7, 16, 17, 33, 64, 256, 2048)),
        "max_num_seqs": rng.choice((1, 3, 8, 64)),
        "block_size": rng.choice((16, 16, 32, 64)),
        "enable_prefix_caching": rng.random() < 0.6,
        "num_lookahead_steps": rng.choice((0, 0, 1, 2)),
        "batching": rng.choice(("continuous", "continuous", "continuous", "static", "dynamic")),
        "threads": rng.choice((1, 2)),
    }
    return Case(
        model=rng.choice(list(MODELS)),
        dtype=rng.choice(("bfloat16", "float32")),
        quantization=rng.choice((None, None, "int8", "int4")),
        kv_cache_dtype=rng.choice(("auto", "int8")),
        settings=settings,
        tight=rng.random() < 0.4,
        preempting=rng.random() < 0.3,
        arrival=rng.choice(("together", "reversed", "staggered", "staggered")),
        jobs=draw_jobs(rng),
    )


class Alone:
    """Models, and for each an engine that answers one request at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model_dir = functools.cache(self._model_dir)
        self.engine = functools.cache(self._engine)

    def _model_dir(self, model: str) -> Path:
        family, more = MODELS[model]
        return tiny_model(self.folder / model, family, max_position_embeddings=MOST_TOKENS, **more)

    def _engine(self, model: str, isa: str, **how: str | None) -> LLM:
        return self.llm(model, isa, num_kv_blocks=200, enable_prefix_caching=False, threads=1, **how)

    def llm(self, model: str, isa: str, **settings: Any) -> LLM:
        return LLM(self.model_dir(model), kernels=isa, skip_tokenizer_init=True, **settings)

    def answer(self, case: Case, isa: str) -> list[RequestOutput]:
        llm = self.engine(case.model, isa, **case.how)
        return [run(llm, [job])[0] for job in case.jobs]

    def together(self, case: Case, isa: str) -> tuple[list[RequestOutput], collections.Counter[str]]:
        """The same requests under the case's settings, and counts that say what was exercised."""
        size = case.settings["block_size"]
        # Answers to one prompt run side by side; only what is theirs alone takes blocks of its own.
        most = -(-longest(case.jobs) // size) * max(job.params.n for job in case.jobs)
        blocks = most + 2 if case.tight else len(case.jobs) * most + 2
        llm = self.llm(case.model, isa, num_kv_blocks=blocks, **case.how, **case.settings)
        outputs = run(llm, case.jobs, case.arrival, preempting=case.preempting, seed=len(case.jobs))
        seen: collections.Counter[str] = collections.Counter()
        seen["preempted"] = llm.engine.scheduler.num_preemptions
        seen["cached"] = sum(output.num_cached_tokens for output in outputs)
        return outputs, seen


def facts(output: RequestOutput) -> list[tuple[str, Any]]:
    """The parts of an output that must not change. Logprobs are float32 numbers, so equal ones have equal bits."""
    found: list[tuple[str, Any]] = []
    for answer in output.outputs:
        found.append((f"token ids of answer {answer.index}", answer.token_ids))
        found.append((f"finish reason of answer {answer.index}", answer.finish_reason))
        found.append((f"logprobs of answer {answer.index}", answer.logprobs))
    return [*found, ("prompt logprobs", output.prompt_logprobs)]


def check(alone: Alone, isa: str, seed: int) -> collections.Counter[str]:
    case = draw_case(seed)
    expected = alone.answer(case, isa)
    outputs, seen = alone.together(case, isa)
    for i, (one, other) in enumerate(zip(expected, outputs, strict=True)):
        what = f"{case.model}, {case.how}, {isa}, {case.settings}, {case.jobs[i].params}"
        for (name, truth), (_, found) in zip(facts(one), facts(other), strict=True):
            assert found == truth, (
                f"{name} of request {i} of {len(case.jobs)} differ between alone and together:"
                f" {first_difference(truth, found)} ({what})"
            )
    return seen


def first_difference(truth: Any, found: Any) -> str:
    if isinstance(truth, list) and isinstance(found, list) and len(truth) == len(found):
        place = next(i for i, (a, b) in enumerate(zip(truth, found, strict=True)) if a != b)
        return f"at {place}, {truth[place]!r} and {found[place]!r}"
    return f"{truth!r} and {found!r}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("models"))


SHARE = 60 // max(1, len(supported_isas()))
"""Cases of each instruction-set path; ten times as many at night."""


@pytest.mark.parametrize("count", [SHARE, pytest.param(10 * SHARE, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("isa", supported_isas())
def test_a_request_says_the_same_alone_and_in_any_batch(
    isa: str, count: int, alone: Alone, request: pytest.FixtureRequest
) -> None:
    seen: collections.Counter[str] = collections.Counter()
    sweep(request, count, lambda seed: seen.update(check(alone, isa, seed)))
    if request.config.getoption("--seeds") is None:  # else there may be too few to say
        assert seen["preempted"] > count and seen["cached"] > 10 * count, f"{seen}: equality would prove little"


# -- the test can fail -------------------------------------------------------------------------------------------------


def depends_on_the_batch(rows: Tensor) -> Tensor:
    return rows + 1e-3 * len(rows)


def depends_on_the_place(rows: Tensor) -> Tensor:
    out = rows.clone()
    out[-1] *= 1 + 2**-7
    return out


def remembers(rows: Tensor, last: list[Tensor] = []) -> Tensor:  # noqa: B006
    """A little of the step before."""
    out = rows + 1e-3 * last[-1][0] if last else rows
    last[:] = [rows.clone()]
    return out


@pytest.mark.full
@pytest.mark.planted("test_a_request_says_the_same_alone_and_in_any_batch")
@pytest.mark.parametrize("wrong", [depends_on_the_batch, depends_on_the_place, remembers])
def test_an_operation_that_looks_at_its_batch_is_noticed(
    wrong: Callable[[Tensor], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = DecoderLayer.forward

    def planted(self: DecoderLayer, x: Tensor, *rest: Any) -> Tensor:
        return ops.call_out(wrong, forward(self, x, *rest), width=72)

    alone, isa = Alone(tmp_path), supported_isas()[-1]
    check(alone, isa, 0)
    monkeypatch.setattr(DecoderLayer, "forward", planted)
    alone = Alone(tmp_path)
    noticed = 0
    for seed in range(6):
        try:
            check(alone, isa, seed)
        except AssertionError as error:
            noticed += "differ between alone and together" in str(error)
    assert noticed >= 5
