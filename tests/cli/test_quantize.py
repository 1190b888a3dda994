from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run


def test_the_bundled_model_is_written_in_four_bits(chairlift: Run, tmp_path: Path) -> None:
    code, out, err = chairlift("quantize", "bundled", tmp_path / "out", "--format", "int4-g32")
    assert (code, err) == (0, [])
    assert out[:4] == [
        "model          bundled",
        "format         int4-g32: 4 bits in groups of 32; 16 bits for embedding and head",
        "quantised      14 matrices, 1,966,080 weights, 4.50 bits per weight",
        "               1,966,080 weights are int4 in groups of 32",
    ]
    assert "squared error 0.6" in out[4] and "with scales of each group's largest: 0.9" in out[4]
    assert "1 file of weights, 2.6 MiB" in out[5]
    code, out, _ = chairlift("generate", "--model", tmp_path / "out", "What is a KV cache?", "--max-tokens", "12")
    assert code == 0
    assert "KV cache" in "\n".join(out)


def test_calibration_lowers_the_reported_error(chairlift: Run, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"what is a cache of {word}?"}) + "\n" for word in ("keys", "values")))
    command = ["quantize", "bundled", tmp_path / "out", "--format", "int4-g128", "--calibrate", texts]
    code, out, err = chairlift(*command, "--json")
    assert (code, err) == (0, [])
    record = json.loads("\n".join(out))
    assert record["method"] == "gptq"
    assert record["samples"] == 2
    assert record["output_error"] < record["output_error_of_nearest"]
    assert "fewer than the 1,024 inputs" in record["notes"][0]
    command[2] = tmp_path / "again"
    code, out, _ = chairlift(*command)
    assert code == 0
    assert out[4].startswith("calibration    GPTQ on 2 samples, ")
    assert out[-1].startswith("note           the calibration texts have")


def test_json_reports_the_error_of_rounding(chairlift: Run, tmp_path: Path) -> None:
    code, out, _ = chairlift("quantize", "bundled", tmp_path / "out", "--format", "int8", "--json")
    record = json.loads("\n".join(out))
    assert code == 0
    assert (record["method"], record["matrices"], record["files"]) == ("nearest", 14, ["model.safetensors"])
    assert 0 < record["squared_error"] <= record["squared_error_of_largest"] < 1e-4


@pytest.mark.nightly
def test_the_default_mixes_widths_and_the_model_writes_its_own_texts(chairlift: Run, tmp_path: Path) -> None:
    record = {}
    for name, more in (("nearest", []), ("own", ["--calibrate"])):
        code, out, err = chairlift("quantize", "bundled", tmp_path / name, "--json", *more)
        assert (code, err) == (0, [])
        record[name] = json.loads("\n".join(out))
    assert record["nearest"]["format"] == record["own"]["format"] == "int4"
    assert set(record["own"]["kinds"]) == {"int4 in groups of 32 with minimums", "int8 in groups of 32"}
    assert (record["own"]["samples"], record["own"]["tokens"]) == (32, 32 * 257)
    assert record["own"]["output_error"] < record["own"]["output_error_of_nearest"]
    assert record["own"]["bytes"] == record["nearest"]["bytes"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bundled"], "the following arguments are required: OUT"),
        (["bundled", "OUT", "--format", "int3"], "invalid choice: 'int3'"),
        (["/no/such/model", "OUT", "--format", "int8"], "'/no/such/model' is not a directory"),
        (
            ["bundled", "OUT", "--format", "int8", "--calibrate", "/none.txt"],
            "cannot read --calibrate /none.txt: ",
        ),
        (
            ["bundled", "FULL", "--format", "int8"],
            "exists and is not empty; give a directory",
        ),
        (["bundled", "FULL/file", "--format", "int8"], "is a file; give a directory"),
        (["bundled", "FULL/file/below", "--format", "int8"], "cannot make the directory"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_written(
    chairlift: Run, tmp_path: Path, argv: list[str], message: str
) -> None:
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL/file").touch()
    given = [str(tmp_path / word) if word.startswith(("OUT", "FULL")) else word for word in argv]
    code, out, err = chairlift("quantize", *given)
    assert (code, out) == (2, [])
    assert len(err) == 1
    assert message in err[0]
    assert not (tmp_path / "OUT").exists()
