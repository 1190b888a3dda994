"""A path given as a model by mistake gets an error that says what it is, and what to do, in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import chairlift
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.models.loader import resolve_model_dir
from chairlift.models.model_files import read_config
from chairlift.text.tokenizer.tokenizer import Tokenizer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134217728\n"
ASSETS = Path(chairlift.__file__).parent / "assets"


def refusal(path: Path | str) -> str:
    with pytest.raises(ModelLoadError) as refused:
        read_config(resolve_model_dir(path))
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama3.2:1b", ["'llama3.2:1b' looks like a name of Ollama's", "ollama show --modelfile llama3.2:1b"]),
        ("ollama://qwen2.5", ["Ollama", "ollama show --modelfile qwen2.5"]),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", ["give the model's id, Qwen/Qwen3-0.6B"]),
        ("/no/such/model", ["is not a directory", "config.json and *.safetensors", "Qwen/"]),
        ("/no/such/model.gguf", ["there is no file", "GGUF file that is there"]),
    ],
)
def test_a_mistaken_model_name_is_refused_with_the_remedy(name: str, words: list[str]) -> None:
    assert [word for word in words if word not in refusal(name)] == []


def test_a_missing_gguf_file_is_refused_with_the_names_of_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").touch()
    assert f"but there is '{tmp_path}/model-Q4_K_M.gguf'" in refusal(tmp_path / "model-Q4_K_S.gguf")
    assert "(beside it: model-Q4_K_M.gguf)" in refusal(tmp_path / "x.gguf")
    assert "is empty (0 bytes); download the file again" in refusal(tmp_path / "model-Q4_K_M.gguf")


def test_a_file_in_place_of_a_model_directory_is_refused_by_its_kind(tmp_path: Path) -> None:
    weights, notes, blob = tmp_path / "model.safetensors", tmp_path / "notes.txt", tmp_path / "sha256-1234"
    weights.write_bytes(b"\0" * 9)
    notes.write_text("hello")
    blob.write_bytes(b"GGUF\3\0\0\0")
    assert "is one file of a model; give the directory that holds it" in refusal(weights)
    assert "is a file, and no model" in refusal(notes)
    assert f"ln -s {blob} sha256-1234.gguf" in refusal(blob)


def test_a_directory_of_another_kind_is_refused_by_its_kind(tmp_path: Path) -> None:
    def make(name: str, **files: str) -> Path:
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / name

    adapter = {"adapter_config.json": json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"})}
    assert "is a LoRA adapter of 'Qwen/Qwen3-0.6B'" in refusal(make("lora", **adapter))
    assert "is a LoRA adapter, not a whole model" in refusal(make("broken", **{"adapter_config.json": "["}))
    assert "diffusers" in refusal(make("images", **{"model_index.json": "{}"}))
    assert "original format" in refusal(make("meta", **{"params.json": "{}"}))
    assert "Ollama" in refusal(make("store", **{"blobs/x": "", "manifests/y": ""}))
    cache = make("models--a--b", **{"snapshots/1234/config.json": "{}"})
    assert f"has no config.json, but {cache}/snapshots/1234 has one" in refusal(cache)
    (tmp_path / "empty").mkdir()
    assert "has no config.json, so it is not a Hugging Face model directory" in refusal(tmp_path / "empty")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors", "model.gguf"])
def test_git_lfs_pointers_are_known_wherever_they_stand(tmp_path: Path, file: str) -> None:
    from chairlift import LLM

    model = tmp_path / "model"
    shutil.copytree(ASSETS, model)
    (model / file).write_text(POINTER)
    given = model / file if file == "model.gguf" else model
    with pytest.raises(ModelLoadError, match=f"{file} is a Git-LFS pointer.*git lfs pull"):
        Tokenizer.from_dir(model) if file == "tokenizer.json" else LLM(given)


def test_a_model_without_weights_names_the_gguf_files_beside_it(tmp_path: Path) -> None:
    from chairlift import LLM

    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / name, model)
    (model / "small.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"no \*.safetensors, but GGUF files; give the path of one"):
        LLM(model)
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="is a LoRA adapter"):
        LLM(model)


def test_a_cache_larger_than_the_machine_is_refused() -> None:
    from chairlift import LLM

    with pytest.raises(ConfigError, match=r"KV cache would have [\d,]+ bytes .*this process's control group, has"):
        LLM(num_kv_blocks=900_000_000)
