"""``system_fingerprint`` is another one when answers may be others, and the same for a copy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from chairlift.config import EngineConfig
from chairlift.loading.loaded import fingerprint
from chairlift.loading.model import load_executor
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_hf_model(tmp_path, "llama")


def test_other_weights_of_the_same_size_have_another_fingerprint(model_dir: Path, tmp_path: Path) -> None:
    before = fingerprint(str(model_dir), "m", "float32")
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    assert fingerprint(str(copy), "m", "float32") == before
    assert fingerprint(str(model_dir), "m", "bfloat16") != before
    file = model_dir / "model.safetensors"
    size = file.stat().st_size
    save_file({name: weight + 0.5 for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    assert file.stat().st_size == size
    assert fingerprint(str(model_dir), "m", "float32") != before


@needs_kernels
def test_keys_and_values_in_8_bits_have_another_fingerprint(model_dir: Path) -> None:
    infos = []
    for settings in ({}, {"kv_cache_dtype": "int8"}):
        given = {"model": str(model_dir), "num_kv_blocks": 20, "skip_tokenizer_init": True, **settings}
        config = EngineConfig.from_flat(given)
        infos.append(load_executor(config).info)
    plain, int8 = infos
    assert (plain.kv_cache_dtype, int8.kv_cache_dtype) == (None, "int8") and plain.fingerprint != int8.fingerprint
    assert plain.dtype == int8.dtype and plain.deterministic and int8.deterministic
    assert int8.block_bytes < plain.block_bytes / 2


def test_a_fingerprint_reads_only_a_part_of_a_large_file(tmp_path: Path) -> None:
    """A hole in a file costs no time to write, but reading 1 TiB of zeros would take minutes."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**40)
        short = fingerprint(str(tmp_path))
        file.truncate(2**40 + 1)
    assert fingerprint(str(tmp_path)) != short


def test_a_fingerprint_ignores_everything_that_is_no_file(model_dir: Path) -> None:
    """A cache whose files were pruned, a folder with a file's name, and what a stranger's archive may bring along: a
    pipe that nobody writes to, and a device without end."""
    before = fingerprint(str(model_dir))
    (model_dir / "evaluation.json").mkdir()
    (model_dir / "pruned.json").symlink_to("nowhere")
    (model_dir / "pruned.safetensors").symlink_to("nowhere")
    os.mkfifo(model_dir / "pipe.json")
    (model_dir / "zeros.json").symlink_to("/dev/zero")
    assert fingerprint(str(model_dir)) == before


def test_one_character_of_a_long_json_counts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b" " * (3 << 20))
    before = fingerprint(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(b" " * (2 << 20) + b"1" + b" " * ((1 << 20) - 1))
    assert fingerprint(str(tmp_path)) != before
