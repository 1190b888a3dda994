"""Layouts of the most used repositories load and equal their oracle, or are refused by name.

The oracle of a directory is transformers with the dequantised weights. That of a GGUF file is the same file with the
numbers of the public package as floats; files of floats are compared with transformers in tests/models/gguf. Changes
that must make these fail: settings inside ``text_config`` not read; a layer of a publisher's exceptions quantised.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.grouped import dequantized
from chairlift.kernels.weights import PLAIN
from chairlift.models.fallback.config import read_transformers_config
from chairlift.models.fallback.loading import load_transformers_model
from chairlift.models.formats.stored_rows import StoredRows
from chairlift.models.loader import load_model, open_tensors
from chairlift.models.model_files import read_config
from chairlift.models.registry import FAMILIES
from tests.models.paged import PagedRunner, packed_logits
from tests.models.preempted import check_company_and_preemption
from tests.models.quantized.make import parameters
from tests.models.quantized.make_repository import Made, make_refused, make_repository
from tests.models.quantized.repositories import REPOSITORIES, Repository
from tests.models.test_families import prompt
from tests.models.tiny import hf_logits, hf_model

TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit."""
LOADED = {each.name: each for each in REPOSITORIES if not each.refused}
REFUSED = {each.name: each for each in REPOSITORIES if each.refused}
_SHORT = ("deepseek-ai/DeepSeek-R1",)
"""Repositories that the default tests compare; the nightly tests compare all others."""
KINDS = {each.layout: each.name for each in reversed(LOADED.values())}
"""Layout -> a repository that has it."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """How close a repository is to its oracle."""

    oracle: str
    weights: float
    """Largest difference between two weights."""
    logits: float
    """Largest difference between two logits, relative to the largest."""


def compare(folder: Path, repository: Repository) -> Compared:
    """Write a repository and compare it with its oracle."""
    made = make_repository(folder, repository)
    if repository.family not in FAMILIES:
        return _compare_through_transformers(made)
    found, wanted = parameters(made.quantised), parameters(made.twin)
    assert found.keys() == wanted.keys()
    weights = max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
    tokens = prompt(40)
    ours = _logits(made.quantised, tokens)
    if repository.is_gguf:
        oracle, theirs = "the file of floats", _logits(made.twin, tokens)
    else:
        oracle, theirs = "transformers", hf_logits(hf_model(made.twin), tokens)
    return Compared(oracle, weights, float((ours - theirs).abs().max() / theirs.abs().max()))


def _compare_through_transformers(made: Made) -> Compared:
    """As :func:`compare`, for a model without a native family."""
    found, wanted = _tensors(made.quantised), _tensors(made.twin)
    assert found.keys() == wanted.keys()
    weights = max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
    config = read_transformers_config(made.quantised)
    model = load_transformers_model(made.quantised, config, torch.float32, torch.device("cpu"))
    tokens = prompt(40)
    ours, theirs = PagedRunner(model, 8).step([("a", tokens)])[0].float(), hf_logits(hf_model(made.twin), tokens)
    return Compared("transformers, which runs it", weights, float((ours - theirs).abs().max() / theirs.abs().max()))


def _tensors(model_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory in float32."""
    with contextlib.ExitStack() as stack:
        return {
            name: dequantized(source[0 : source.get_shape()[0]]).float()
            if isinstance(source, StoredRows)
            else source.get_tensor(name).float()
            for name, source in open_tensors(model_dir, None, stack).items()
        }


def _logits(path: Path, tokens: list[int]) -> torch.Tensor:
    model = load_model(path, read_config(path).for_length(len(tokens)), "float32", weight_format=PLAIN)
    return packed_logits(model, [tokens])[0].float()


def refusal(folder: Path, repository: Repository) -> str:
    """The message with which a repository is refused."""
    path = make_refused(folder, repository)
    with pytest.raises(ModelLoadError) as caught:
        load_model(path, read_config(path), "float32", weight_format=PLAIN)
    return str(caught.value)


def test_most_repositories_load() -> None:
    assert len(REPOSITORIES) >= 100
    assert max(Counter(each.name for each in REPOSITORIES).values()) == 1
    assert len(LOADED) >= 85


@pytest.mark.parametrize("name", REFUSED)
def test_a_repository_is_refused_by_name_with_a_remedy(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, REFUSED[name])
    assert all(word in message for word in REFUSED[name].refused), message
    assert "use " in message or "original" in message, message


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in _SHORT else pytest.mark.nightly) for each in LOADED]
)
def test_a_repository_equals_its_oracle(tmp_path: Path, name: str) -> None:
    found = compare(tmp_path, LOADED[name])
    assert found.weights == 0.0
    assert found.logits <= TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("layout", KINDS)
def test_answers_of_a_layout_are_the_same_alone_in_company_in_chunks_and_preempted(tmp_path: Path, layout: str) -> None:
    repository = LOADED[KINDS[layout]]
    made = make_repository(tmp_path, repository)
    theirs = None if repository.is_gguf else hf_model(made.twin)
    texts = {"mmproj": "none"} if repository.whole else {}  # layouts have no weights of image encoders
    check_company_and_preemption(made.quantised, theirs, quantization="none", **texts)
