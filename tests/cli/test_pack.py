from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.train.test_exports import ITEMS, indexed, nemo_rows, packs, sequences


def write_lengths(path: Path, lengths: list[int]) -> Path:
    path.write_text("".join(json.dumps({"n": length}) + "\n" for length in lengths))
    return path


def test_figures_of_a_file_that_can_be_checked_by_hand(chairlift: Run, tmp_path: Path) -> None:
    # 60 + 40 and 70 + 30 fill two packs; next-fit opens four, and padding makes all of them 70 long.
    file = write_lengths(tmp_path / "a.jsonl", [60, 70, 40, 30])
    packs = tmp_path / "packs.jsonl"
    flags = ("--length-field", "n", "--capacity", "100")
    code, out, err = chairlift("pack", file, *flags, "--json", "--output", packs)
    assert (code, err) == (0, [])
    found = json.loads(out[0])
    assert (found["sequences"], found["tokens"], found["packs"]) == (4, 200, 2)
    assert (found["waste"], found["excess"]) == (0.0, 0.0)
    assert found["next_fit_packs"] == 3
    assert found["waste_of"] == {"padding": pytest.approx(1 - 200 / 280), "next_fit": pytest.approx(1 / 3)}
    assert found["lengths"] == [[16, 31, 1], [32, 63, 2], [64, 70, 1]]
    assert found["fills"][-1] == [1.0, 2]
    written = [json.loads(line) for line in packs.read_text().splitlines()]
    assert sorted(i for pack in written for i in pack["ids"]) == [0, 1, 2, 3]
    assert all(sum(pack["lengths"]) == 100 for pack in written)
    code, out, _ = chairlift("pack", file, *flags)
    assert code == 0
    assert out[0] == "sequences     4 of 50.0 tokens on average"
    assert out[4] == "waste         0.000%, 0.000% more packs than the lower bound"
    assert "next-fit needs 3 packs and wastes 33.3%" in out[8]
    assert out[out.index("length") + 2] == f"        32-63 {'#' * 40} 2"
    assert out[-1] == f"         full {'#' * 40} 2"


def test_tokens_that_fill_up_alignment_count_as_waste(chairlift: Run, tmp_path: Path) -> None:
    # 3 and 1 tokens take 4 places each: 16 sequences fill 4 packs of 16 places, in which 32 tokens lie.
    file = write_lengths(tmp_path / "a.jsonl", [3, 1] * 8)
    flags = ("pack", file, "--length-field", "n", "--capacity", "16", "--align", "4", "--json")
    found = json.loads(chairlift(*flags)[1][0])
    assert (found["sequences"], found["tokens"], found["packs"], found["excess"]) == (16, 32, 4, 0.0)
    assert (found["waste"], found["waste_of"]) == (0.5, {"padding": 0.5, "next_fit": 0.5})
    assert found["lengths"] == [[1, 1, 8], [2, 3, 8]]
    assert found["fills"] == [[0.0, 0], [0.5, 4], *([least, 0] for least in (0.8, 0.9, 0.95, 0.99, 1.0))]


def test_packs_of_half_a_file_replace_nothing(chairlift: Run, tmp_path: Path) -> None:
    file, packs = write_lengths(tmp_path / "a.jsonl", [3] * 9000), tmp_path / "packs.jsonl"
    flags = ("pack", file, "--length-field", "n", "--capacity", "16", "--output", packs)
    assert chairlift(*flags)[0] == 0
    before = packs.read_text()
    file.write_text(file.read_text() + "no record\n")
    assert chairlift(*flags)[0] == 2
    assert packs.read_text() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.jsonl", "packs.jsonl"]


def test_sequences_that_are_too_long_are_counted_by_policy(chairlift: Run, tmp_path: Path) -> None:
    file = write_lengths(tmp_path / "a.jsonl", [250, 10])
    flags = ("pack", file, "--length-field", "n", "--capacity", "100")
    for policy, tokens, word in (
        ("split", 260, "split"),
        ("truncate", 110, "truncated, 150 tokens cut"),
        ("drop", 10, "dropped"),
    ):
        out = chairlift(*flags, "--overflow", policy)[1]
        assert out[1] == f"tokens        {tokens}"
        assert out[2] == f"too long      1 {word}"
    code, _, err = chairlift(*flags, "--overflow", "error")
    assert code == 2
    assert "has 250 tokens, but a pack takes 100" in err[0]


def test_texts_need_a_tokenizer(chairlift: Run, model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one two three"}\n' * 10)
    assert chairlift("pack", file, "--tokenizer", model_dir)[1][0].startswith("sequences     10 of ")
    code, out, err = chairlift("pack", file)
    assert (code, out) == (2, [])
    assert f"{file}, line 1: a record with text needs a tokenizer" in err[0]
    code, _, err = chairlift("pack", file, "--length-field", "text")
    assert "text must be a number of tokens, from 1 to 100,000,000, got 'one two three'" in err[0]
    assert chairlift("pack", file, "--length-field", "text", "--capacity", "0")[0] == 2
    file.write_text('{"n": 1000000000000}')
    code, _, err = chairlift("pack", file, "--length-field", "n")
    assert code == 2
    assert "n must be a number of tokens, from 1 to 100,000,000, got '1000000000000'" in err[0]
    assert chairlift("pack", tmp_path / "none.jsonl")[0] == 2


def test_records_that_cannot_be_used_stop_it_or_are_counted(chairlift: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"input_ids": [1, 2]}\n{"input_ids": [3,\n{"input_ids": [4, 5]}\n')
    code, out, err = chairlift("pack", file)
    assert (code, out) == (2, [])
    assert f"{file}, line 2: not JSON" in err[0]
    code, out, err = chairlift("pack", file, "--on-error", "skip", "--json")
    assert code == 0
    assert (json.loads(out[0])["sequences"], json.loads(out[0])["skipped"]) == (2, 1)
    assert err == [f"1 record of {file} could not be used and were skipped ({file}, line 2)"]


def test_the_file_that_is_read_is_not_written(chairlift: Run, tmp_path: Path) -> None:
    file = write_lengths(tmp_path / "a.jsonl", [60, 70])
    (tmp_path / "b.jsonl").symlink_to(file)
    before = file.read_bytes()
    code, _, err = chairlift("pack", file, "--length-field", "n", "--output", tmp_path / "b.jsonl")
    assert (code, file.read_bytes()) == (2, before)
    assert "is the file that is read" in err[0]


def test_the_command_writes_what_is_learnt(chairlift: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    flags = ("pack", path, "--capacity", "32", "--pool", "8")
    code, out, err = chairlift(*flags, "--to", "megatron", "--output", tmp_path / "set")
    assert (code, err) == (0, []), out
    assert [[part.tolist() for part in document] for document in indexed(tmp_path / "set")] == sequences(packs())
    assert chairlift(*flags, "--to", "nemo", "--output", tmp_path / "set.npy")[0] == 0
    assert [row["input_ids"] for row in nemo_rows(tmp_path / "set.npy")] == [p.tokens.tolist() for p in packs()]
    for more, message in (
        (("--to", "trl"), "--to trl writes files: name them with --output"),
        (("--to", "nemo", "--output", "x.npy", "--align", "8"), "--align 8 would write padding"),
        (("--to", "nemo", "--output", "x.npy", "--length-field", "n"), "--length-field reads no tokens"),
        (("--to", "trl", "--output", str(path)), "is the file that is read, and would be lost"),
        (("--output", str(tmp_path / "none" / "p.jsonl")), "none does not exist; make it first"),
    ):
        code, _, err = chairlift(*flags, *more)
        assert code == 2 and message in err[0], err


@pytest.mark.parametrize(("to", "name"), [("megatron", "set"), ("nemo", "set.npy"), ("trl", "set.jsonl")])
def test_a_token_that_the_model_lacks_is_found_before_it_is_written(
    chairlift: Run, model_dir: Path, tmp_path: Path, to: str, name: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"input_ids": [1, 2]}\n{"input_ids": [3, 99999999]}\n')
    flags = ("--tokenizer", model_dir, "--capacity", "32", "--to", to, "--output", tmp_path / name)
    code, _, err = chairlift("pack", file, *flags)
    assert code == 2 and f"{file}, line 2: it has the token id 99999999, but the model knows" in err[0], err
    assert list(tmp_path.iterdir()) == [file]
