"""Adapters are read as PEFT writes them, and whatever would be computed wrongly is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift.errors import ModelLoadError
from chairlift.lora.adapter import Adapter
from chairlift.lora.reader import WEIGHTS_NAME, adapter_directory, read_adapter
from chairlift.lora.settings import CONFIG_NAME, read_settings
from chairlift.lora.sites import Sites
from tests.lora.adapters import random_adapter

_Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def written(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(model_dir, tmp_path_factory.mktemp("adapter") / "a")


@pytest.fixture
def adapter(written: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def read(path: Path, sites: Sites, **options: Any) -> Adapter:
    return read_adapter(path, sites, **{"max_rank": 64, **options})


def configure(path: Path, **fields: Any) -> None:
    config = json.loads((path / CONFIG_NAME).read_text())
    (path / CONFIG_NAME).write_text(json.dumps({**config, **fields}))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, path / WEIGHTS_NAME)


def test_the_hub_is_asked_once_for_an_adapter(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that left memory is read again while requests wait, and they must not wait for another host."""
    asked = []

    def snapshot_download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(written)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("chairlift.lora.reader._SNAPSHOTS", {})
    assert [adapter_directory(Path("someone/adapter")) for _ in range(2)] == [written] * 2
    assert asked == ["someone/adapter"]


def test_all_layers_are_found(adapter: Path, sites: Sites) -> None:
    found = read(adapter, sites)
    assert len(found.layers) == 8 and found.rank == 4
    starts = [part.start for part in found.layers["model.layers.0.self_attn.qkv_proj"]]
    assert starts == [0, 64, 96]


def test_the_digest_is_of_all_that_counts(adapter: Path, sites: Sites) -> None:
    first = read(adapter, sites).digest
    assert read(adapter, sites).digest == first
    configure(adapter, lora_alpha=9)
    assert read(adapter, sites).digest != first


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"proj": 2}}, 2.0),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 2}}, 2.0),
        ({"alpha_pattern": {r"layers\.\d+\.self_attn\.q_proj": 2, "q_proj": 1}}, 0.5),
    ],
)
def test_the_scale_follows_from_the_adapters_settings(fields: dict[str, Any], scale: float, adapter: Path) -> None:
    configure(adapter, **fields)
    settings = read_settings(adapter / CONFIG_NAME)
    assert settings.scale_of("model.layers.0.self_attn.q_proj") == pytest.approx(scale)


REFUSED_SETTINGS: dict[str, Any] = {
    "use_dora": True,
    "lora_bias": True,
    "bias": "some",
    "modules_to_save": ["lm_head"],
    "layer_replication": [[0, 1]],
    "trainable_token_indices": [1],
    "target_parameters": ["experts.gate_up_proj"],
    "use_qalora": True,
    "alora_invocation_tokens": [1],
    "init_lora_weights": "pissa_niter_4",
    "fan_in_fan_out": True,
    "peft_type": "LOHA",
    "task_type": "SEQ_CLS",
    "something_new": 3,
    "r": 0,
    "lora_alpha": "8",
    "rank_pattern": {"(a+)+": 4},
}


@pytest.mark.parametrize("key", REFUSED_SETTINGS)
def test_settings_that_are_refused_are_named(key: str, adapter: Path, sites: Sites) -> None:
    configure(adapter, **{key: REFUSED_SETTINGS[key]})
    with pytest.raises(ModelLoadError, match=key):
        read(adapter, sites)


@pytest.mark.parametrize("init", ["olora", "corda", "loftq", "lora_ga", "pissa", ["pissa"]])
def test_inits_that_change_the_base_are_refused(init: Any, adapter: Path, sites: Sites) -> None:
    configure(adapter, init_lora_weights=init)
    with pytest.raises(ModelLoadError, match="init_lora_weights"):
        read(adapter, sites)


REFUSED_TENSORS = {
    "base_model.model.lm_head.lora_A.weight": "lora_A but no lora_B",
    "base_model.model.lm_head.weight": r"shape \[4, 64\]",
    "base_model.model.score.weight": "heads for classes",
    "base_model.model.model.norm.weight": "norms are not adapted",
    "base_model.model.model.embed_tokens.lora_embedding_A": "only one of lora_embedding_A and lora_embedding_B",
    "base_model.model.model.embed_tokens.lora_magnitude_vector": "use_dora",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": "use_dora=False",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias": "lora_bias=False",
    "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight": "experts",
    "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": "another model",
}


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_every_tensor_is_used_or_the_adapter_is_refused(name: str, adapter: Path, sites: Sites) -> None:
    rewrite(adapter, lambda tensors: tensors.update({name: torch.zeros(4, 64)}))
    with pytest.raises(ModelLoadError, match=REFUSED_TENSORS[name]):
        read(adapter, sites)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop(_Q), "no lora_A"),
        (lambda tensors: tensors.update({_Q: torch.zeros(5, 64)}), r"shape \[5, 64\]"),
        (lambda tensors: tensors.update({_Q: torch.zeros(4, 64, dtype=torch.int8)}), "stored as I8"),
        (lambda tensors: tensors.update({_Q: torch.full((4, 64), float("nan"))}), "NaN"),
        (lambda tensors: tensors.clear(), "no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: Any, problem: str, adapter: Path, sites: Sites) -> None:
    rewrite(adapter, change)
    with pytest.raises(ModelLoadError, match=problem):
        read(adapter, sites)


def test_a_rank_above_the_limit_is_refused_with_both_numbers(adapter: Path, sites: Sites) -> None:
    with pytest.raises(ModelLoadError, match="rank 4, and max_lora_rank is 3"):
        read(adapter, sites, max_rank=3)


def test_a_damaged_file_is_refused(adapter: Path, sites: Sites) -> None:
    whole = (adapter / WEIGHTS_NAME).read_bytes()
    (adapter / WEIGHTS_NAME).write_bytes(whole[:-10])
    with pytest.raises(ModelLoadError, match="damaged"):
        read(adapter, sites)


def test_a_git_lfs_pointer_is_named(adapter: Path, sites: Sites) -> None:
    (adapter / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors is a Git-LFS pointer"):
        read(adapter, sites)


def test_pickles_are_never_opened(adapter: Path, sites: Sites) -> None:
    (adapter / WEIGHTS_NAME).rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match="unpickling"):
        read(adapter, sites)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_links_are_followed_before_the_root_is_compared(name: str, adapter: Path, sites: Sites, tmp_path: Path) -> None:
    root = tmp_path / "root"
    inside = Path(shutil.copytree(adapter, root / "a"))
    assert read(inside, sites, root=root).rank == 4
    (inside / name).unlink()
    (inside / name).symlink_to(adapter / name)
    with pytest.raises(ModelLoadError, match=re.escape(str(root))):
        read(inside, sites, root=root)
    assert read(inside, sites).rank == 4
