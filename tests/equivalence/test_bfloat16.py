"""bf16 on the native kernels: as near to exact arithmetic as transformers in bf16, and the same text but for ties.

Exact is transformers in float64 on the same weights, which are bf16 numbers.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from chairlift import LLM, SamplingParams
from chairlift.kernels.cpu.library import supported_isas
from tests.equivalence.cases import Job, greedy_jobs, transformers_greedy
from tests.models.tiny import FAMILIES, hf_logits, hf_model, tiny_hf_model
from tests.native import needs_kernels

pytestmark = needs_kernels

TIE = 0.1
"""Two tokens are as good as equal in bf16 when their exact logprobs are this near. In bf16, logprobs of these models
are off by 0.01 on average, and each of the two by a few times that now and then."""
MOST_ERROR = 1.5
"""Mean error of our logprobs, in that of transformers' own bf16."""
SIZES = {"hidden_size": 128, "intermediate_size": 224, "head_dim": 32}


@dataclasses.dataclass(frozen=True)
class Truth:
    """One family."""

    model_dir: Path
    exact: PreTrainedModel
    """in float64"""
    rounded: PreTrainedModel
    """in bf16"""
    jobs: list[Job]
    answers: list[list[int]]
    """by ``rounded``"""

    @classmethod
    def of(cls, folder: Path, family: str) -> Truth:
        model_dir = tiny_hf_model(folder, family, std=0.08, dtype=torch.bfloat16, **SIZES)
        rounded = hf_model(model_dir, torch.bfloat16)
        jobs = greedy_jobs(32)
        answers = [transformers_greedy(rounded, job) for job in jobs]
        return cls(model_dir, hf_model(model_dir, torch.float64), rounded, jobs, answers)

    def logprobs(self, model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
        """float64 [n, vocab]: of what follows each token."""
        return hf_logits(model, list(token_ids)).double().log_softmax(-1)

    def llm(self, isa: str) -> LLM:
        return LLM(self.model_dir, dtype="bfloat16", kernels=isa, num_kv_blocks=600, skip_tokenizer_init=True)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Truth]:
    return cache(lambda family: Truth.of(tmp_path_factory.mktemp("models"), family))


def errors(truth: Truth, isa: str) -> tuple[float, float]:
    """Mean distance of the logprobs of random texts from the exact ones: ours, and that of transformers in bf16."""
    rng = random.Random(0)
    texts = [[rng.randrange(2, 128) for _ in range(rng.randint(2, 200))] for _ in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    for text, output in zip(texts, truth.llm(isa).generate(texts, params), strict=True):
        assert output.prompt_logprobs is not None
        found = [entry[token].logprob for token, entry in zip(text, output.prompt_logprobs, strict=True) if entry]
        exact, rounded = (
            truth.logprobs(model, text)[:-1].gather(1, torch.tensor(text[1:])[:, None]).flatten()
            for model in (truth.exact, truth.rounded)
        )
        ours.append((torch.tensor(found).double() - exact).abs())
        theirs.append((rounded - exact).abs())
    return float(torch.cat(ours).mean()), float(torch.cat(theirs).mean())


def ties(truth: Truth, isa: str) -> int:
    """Answer all jobs; fail where a token is worse than a tie. Returns how many texts part from transformers'."""
    outputs = truth.llm(isa).generate([job.prompt for job in truth.jobs], [job.params for job in truth.jobs])
    parted = 0
    for job, theirs, output in zip(truth.jobs, truth.answers, outputs, strict=True):
        ours = output.outputs[0].token_ids
        if ours == theirs:
            continue
        parted += 1
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        assert place is not None, f"{ours} and {theirs}: one ends where the other goes on"
        exact = truth.logprobs(truth.exact, [*job.prompt, *ours[:place]])[-1]
        distance = float((exact[ours[place]] - exact[theirs[place]]).abs())
        assert distance <= TIE, f"token {place}: {ours[place]} and {theirs[place]} are {distance:.4f} apart, no tie"
    return parted


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_as_exact_as_those_of_transformers(family: str, isa: str, truth: Callable[[str], Truth]) -> None:
    ours, theirs = errors(truth(family), isa)
    assert 0 < ours <= MOST_ERROR * theirs


@pytest.mark.planted("test_logprobs_are_as_exact_as_those_of_transformers")
def test_a_small_mistake_in_one_layer_is_noticed(tmp_path: Path, truth: Callable[[str], Truth]) -> None:
    llama = truth("llama")
    wrong = dataclasses.replace(llama, model_dir=tmp_path / "wrong")
    shutil.copytree(llama.model_dir, wrong.model_dir)
    weights = load_file(wrong.model_dir / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"] *= 1.05
    save_file(weights, wrong.model_dir / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = errors(wrong, supported_isas()[-1])
    assert ours > MOST_ERROR * theirs


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("family", FAMILIES)
def test_text_parts_from_transformers_only_at_ties(family: str, isa: str, truth: Callable[[str], Truth]) -> None:
    assert ties(truth(family), isa) <= len(truth(family).jobs) // 4
