"""``chairlift embed`` and ``chairlift check`` of models for embeddings and classes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from chairlift import LLM
from chairlift.cli.main import main
from tests.models.pooled import pooled_model, sentence_files, write_tokenizer


def test_embeddings_are_printed_and_models_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, _ = pooled_model(tmp_path, "bert")
    write_tokenizer(where)
    sentence_files(where)
    expected = [each.outputs.embedding for each in LLM(where, threads=1).embed(["a b", "c", "lift"])]
    monkeypatch.setattr("sys.stdin", io.StringIO("lift\n"))
    assert main(["embed", "--model", str(where), "--threads", "1", "a b", "c", "-"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["embedding"] for line in lines] == expected and lines[0]["num_tokens"] == 5
    assert main(["check", str(where), "--threads", "1"]) == 0
    report = capsys.readouterr().out
    assert "embeddings of 64 numbers, of length 1, from MEAN" in report and "no KV cache" in report
    assert main(["generate", "--model", str(where), "--threads", "1", "Hi"]) != 0
    assert "needs a model that generates texts" in capsys.readouterr().err


def test_a_classifier_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, _ = pooled_model(tmp_path, "modernbert", labels=2)
    assert main(["check", str(where), "--threads", "1", "--skip-tokenizer-init"]) == 0
    assert "classes ('LABEL_0', 'LABEL_1'), from CLS" in capsys.readouterr().out
