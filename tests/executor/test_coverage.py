"""The table of what runs where says what the backends do, and docs/gpu.md holds it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from chairlift.cli import check
from chairlift.executor.backends.native.backend import NativeBackend
from chairlift.executor.backends.triton.backend import TritonBackend
from chairlift.executor.coverage import ROUNDINGS, markdown, operation_rows, rows_of_model, weight_rows
from chairlift.kernels import ops
from chairlift.kernels.recording import Op
from chairlift.kernels.weights import QUANTIZED
from chairlift.models.hf_config import NetworkConfig, parse_config
from chairlift.models.model_files import read_config
from tests.models.tiny import tiny_hf_model

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def llama(**fields: object) -> NetworkConfig:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    return dataclasses.replace(parse_config({"model_type": "llama", "num_attention_heads": 2, **sizes}), **fields)


def test_the_page_holds_the_tables() -> None:
    """To replace them: python -c 'from chairlift.executor.coverage import markdown; print(markdown())'"""
    assert markdown() in PAGE.read_text()


def test_each_operation_has_a_row() -> None:
    names = [row[0] for row in operation_rows()]
    assert len(names) == len(set(names))
    for op in (each for each in vars(ops).values() if isinstance(each, Op)):
        assert op.name in names or op.name.endswith("_linear")


def test_rows_follow_the_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that a backend gains or loses, and a model that it no longer runs, change the table."""
    before = {name: rest for name, *rest in operation_rows()}
    assert before["rms_norm"] == ["kernel", "kernel"] and before["experts"] == ["kernel", "kernel"]
    assert before["columns"] == ["kernel, with a neighbour", "PyTorch"]
    monkeypatch.setattr(TritonBackend, "operations", lambda: {ops.soft_cap: "kernel"})
    monkeypatch.setattr(NativeBackend, "lacks", lambda network: "no sinks" if network.sinks else "")
    after = {name: rest for name, *rest in operation_rows()}
    assert after["rms_norm"] == after["experts"] == ["kernel", "PyTorch"]
    assert after["soft_cap"][1] == "kernel" != before["soft_cap"][1]
    assert after["attention with sinks"][0] == "PyTorch, the whole model" != before["attention with sinks"][0]


def test_a_setting_that_a_backend_lacks_is_refused_in_the_table() -> None:
    rows = {name: rest for name, *rest in weight_rows()}
    assert rows["`--quantization fp8`"] == ["refused", "kernel", "refused"]
    assert rows["`--quantization int4`"] == ["kernel", "kernel", "refused"]
    assert set(ROUNDINGS) == set(QUANTIZED)
    assert rows["MXFP4"] == ["kernel, codes", "kernel, codes", "as floats"]


def test_a_model_has_the_rows_of_its_operations(tmp_path: Path) -> None:
    names = {name: rest for name, *rest in rows_of_model(read_config(tiny_hf_model(tmp_path, "llama")))}
    assert names.keys() >= {"linear", "attention", "rms_norm", "silu_and_mul", "add"} and "experts" not in names
    assert all(rest == ["kernel", "kernel"] for rest in names.values())
    sinks = rows_of_model(llama(sinks=True))
    assert TritonBackend.lacks(llama(sinks=True)) == "" or all(gpu.startswith("PyTorch, the") for *_, gpu in sinks)


def test_check_names_operations_by_who_computes_them(tmp_path: Path) -> None:
    lines = list(check._coverage(read_config(tiny_hf_model(tmp_path, "gpt2"))))
    assert {label for label, _ in lines} == {"operations", "formats", "adapters"}
    assert any(line.startswith("CPU: kernel; GPU: kernel: low-rank") for label, line in lines if label == "adapters")
    shown = [line for label, line in lines if label == "operations"]
    assert any(line.startswith("CPU: kernel; GPU: PyTorch: ") and "layer_norm" in line for line in shown)
    assert any("refused" in line and "--quantization fp8" in line for _, line in lines)
