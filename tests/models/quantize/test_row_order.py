"""Copies of a model have its rows in the order of Hugging Face's checkpoints, for every family.

The loader reorders the rows of q and k in families that rotate neighbours or a part of a head, and rows of q and gates.
A copy with the loader's order would be read as another model. Changes that must make these fail: pieces in the loader's
order; calibrated rows in the loader's order; pieces that end within a head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.kernels.weights import PLAIN
from chairlift.models import loader
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.formats.quantize.run import quantize_model
from chairlift.models.formats.stored_rows import StoredRows
from chairlift.models.loader import load_model, open_checkpoint
from chairlift.models.model_files import read_config
from tests.models.gguf.make import to_gguf
from tests.models.paged import packed_logits
from tests.models.quantize.test_run import small
from tests.models.test_families import prompt
from tests.models.tiny import EXPERT_FAMILIES, FAMILIES, MORE_FAMILIES, RECURRENT_FAMILIES, tiny_hf_model

ALL = (*FAMILIES, *MORE_FAMILIES, *EXPERT_FAMILIES, *RECURRENT_FAMILIES)
REORDERED = ("ernie4_5", "glm", "glm4", "cohere2", "helium", "phi", "stablelm", "qwen3_5_text")
"""Families of :data:`ALL` without experts whose rows the loader reorders, and whose weights can be written."""


def copied(model_dir: Path) -> dict[str, torch.Tensor]:
    """All weights as :meth:`~chairlift.models.loader.Checkpoint.pieces` gives them, by Hugging Face's names."""
    found = {}
    with open_checkpoint(model_dir, read_config(model_dir)) as checkpoint:
        for part in checkpoint.parts:
            rows = torch.full(part.shape, torch.nan)
            for first, piece in checkpoint.pieces(part):
                assert not isinstance(piece, StoredRows)
                rows[first : first + len(piece)] = piece
            found[part.name] = part.stored(rows).contiguous()
    return found


def weights(model_dir: Path) -> dict[str, torch.Tensor]:
    """All weights of a loaded model, by Hugging Face's names, in float32."""
    return hf_state_dict(load_model(model_dir, read_config(model_dir), "float32", weight_format=PLAIN))


@pytest.mark.parametrize("most", [1 << 22, 1000], ids=["whole", "pieces"])
@pytest.mark.parametrize("family", ALL)
def test_pieces_have_the_rows_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, most: int
) -> None:
    """Pieces of 1,000 numbers end within heads."""
    model_dir = tiny_hf_model(tmp_path, family)
    wanted = weights(model_dir)
    monkeypatch.setattr(loader, "MOST_NUMBERS", most)
    found = copied(model_dir)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "granite"])
def test_pieces_of_a_gguf_file_have_the_rows_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    model_dir = tiny_hf_model(tmp_path, family)
    found, wanted = copied(to_gguf(model_dir, tmp_path / "model.gguf")), weights(model_dir)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=5e-7)


@pytest.mark.parametrize("calibrated", [False, True], ids=["nearest", "gptq"])
@pytest.mark.parametrize("family", REORDERED)
def test_a_quantised_copy_is_the_model(tmp_path: Path, family: str, calibrated: bool) -> None:
    """Eight bits change the logits little, most in delta nets. Rows in another order change them altogether."""
    more: dict[str, Any] = {"qwen3_5_text": {"num_hidden_layers": 3}, "helium": {"head_dim": 32}}.get(family, {})
    model_dir, out = small(tmp_path, family, **more), tmp_path / "out"
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"the quick brown fox number {number} jumps over it" for number in range(20)))
    quantize_model(model_dir, out, "int8", texts if calibrated else None)
    tokens = prompt(40)
    before, after = (
        packed_logits(load_model(each, read_config(each), "float32", weight_format=PLAIN), [tokens])[0]
        for each in (model_dir, out)
    )
    assert (after - before).norm() < 0.15 * before.norm()
