"""Reads which models a server has, from a directory or a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.errors import ConfigError
from chairlift.fleet.models.catalog import CatalogEntry, read_catalog


def read(path: Path, text: str = "", **settings: object) -> list[CatalogEntry]:
    if text:
        path = path / "models.yaml"
        path.write_text(text)
    return read_catalog(str(path), settings, 1000)


def test_a_directory_names_its_models(tmp_path: Path) -> None:
    for name in ("llama 3", "qwen"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "small.gguf").touch()
    (tmp_path / "mmproj-small.gguf").touch()
    found = read(tmp_path)
    assert [entry.name for entry in found] == ["llama-3", "qwen", "small"]
    assert found[2].config.model.model == str(tmp_path / "small.gguf")
    assert found[0].config.cache.kv_cache_memory_bytes == 1000


def test_a_file_names_models_with_their_settings(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    text = """
models:
  chat:
    model: here
    aliases: [gpt-4o, c]
    pinned: true
    adapters: {formal: there}
    kv-cache-memory-bytes: 1GB
    keep_alive: 60
    weight: 2
  small: hashlm
"""
    chat, small = read(tmp_path, text, max_num_seqs=7)
    assert chat.names == ("chat", "gpt-4o", "c") and chat.pinned and chat.keep_alive == 60
    assert chat.config.model.model == str(tmp_path / "here") and chat.config.lora.enable_lora
    assert chat.adapters == {"formal": "there"} and chat.config.cache.kv_cache_memory_bytes == 10**9
    assert small.config.model.model == "hashlm" and small.config.scheduler.max_num_seqs == 7 and not small.pinned
    assert (chat.weight, small.weight) == (2.0, 1.0)
    assert small.config.cache.kv_cache_memory_bytes is None, "HashLM keeps no K and V"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {}", "must have 'models:'"),
        ("- a", "must have 'models:'"),
        ("models: {a: hashlm}\nport: 1", "has port beside 'models:'"),
        ("models: {a: {pinned: true}}", "a needs 'model:'"),
        ("models: {a: 3}", "a must be a path"),
        ("models: {a: {model: x, max_num_seq: 3}}", "did you mean 'max_num_seqs'"),
        ("models: {a: {model: x, max_num_seqs: 0}}", "a: max_num_seqs must be"),
        ("models: {a: {model: x, pinned: 1}}", "pinned must be true or false"),
        ("models: {a: {model: x, keep_alive: -1}}", "keep_alive must be a number of seconds"),
        ("models: {a: {model: x, weight: 0}}", "weight must be a number from 0.01 to 100, got 0"),
        ("models: {a: {model: x, adapters: [y]}}", "adapters must be names and paths"),
        ("models: {'a b': x}", "names must be of letters"),
        ("models: {a: x, b: {model: y, aliases: a}}", "the name 'a' is given to 'a' and to 'b'"),
        ("models: {a: {model: x, device: cuda}}", "device is 'cuda'"),
        ("models: {a: [", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        read(tmp_path, text)


def test_a_place_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no directory with a config\.json"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "missing.yaml")
