from __future__ import annotations

import json
from pathlib import Path

import pytest

from chairlift.errors import ConfigError
from chairlift.models.formats.quantize import samples
from chairlift.models.formats.quantize.samples import make_packs, read_texts
from chairlift.text.tokenizer.tokenizer import Tokenizer
from tests.text.tokenizer import tiny


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.txt", "one\ntwo\r\n  \nthree", ["one\ntwo", "three"]),
        ("a.txt", "one\ntwo\nthree\n\n", ["one", "two", "three"]),
        ("a.md", "\ufeffone", ["one"]),
        ("a.jsonl", '{"text": "one\\n\\ntwo\u2028"}\n\n{"text": "three", "id": 1}\n{"text": " "}', None),
    ],
)
def test_lines_paragraphs_and_json_lines_become_texts(
    tmp_path: Path, name: str, content: str, texts: list[str] | None
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert read_texts(tmp_path / name) == (texts or ["one\n\ntwo\u2028", "three"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "cannot read --calibrate .*none.txt: No such file"),
        ("a.txt", b"\xff\xfe\x00", "it is not UTF-8 text"),
        ("a.txt", b"\n  \n", "has no text"),
        ("a.jsonl", b'{"text": "x"}\n{"prompt": "y"}', "line 2 must be a JSON object with a text"),
        ("a.jsonl", b"hello", "line 1 must be a JSON object"),
    ],
)
def test_files_without_texts_are_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_texts(tmp_path / name)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    tiny.byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return Tokenizer.from_dir(tmp_path)


def contents(texts: list[str], tokenizer: Tokenizer, longest: int = 99) -> list[list[int]]:
    packs, count = make_packs(texts, tokenizer, longest)
    found = []
    for pack in packs:
        assert pack.cu_seqlens[-1] == len(pack.token_ids) == len(pack.positions)
        for start, end in zip(pack.cu_seqlens, pack.cu_seqlens[1:], strict=False):
            found.append(pack.token_ids[start:end].tolist())
            assert pack.positions[start:end].tolist() == list(range(end - start))
    assert len(found) == count
    return found


def test_samples_are_cut_and_packed(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_LONGEST", 12)
    texts = ["hello there everybody", "a", "", "<s>begun"]
    wanted = [tokenizer.encode(text, add_special_tokens=text[:1] != "<")[:8] for text in texts]
    assert sorted(contents(texts, tokenizer, 8)) == sorted(ids for ids in wanted if ids)
    packs, _ = make_packs(texts, tokenizer, 8)
    assert max(len(pack.token_ids) for pack in packs) <= 12


def test_too_many_tokens_are_drawn_from(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_TOKENS", 50)
    texts = [f"sample number {number}" for number in range(40)]
    found = contents(texts, tokenizer)
    assert sum(map(len, found)) == 50
    assert found == contents(texts, tokenizer)
    assert found[:3] != [tokenizer.encode(text) for text in texts[:3]]
