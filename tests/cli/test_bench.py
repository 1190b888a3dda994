from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chairlift.kernels.cpu.library import supported_isas
from tests.cli.conftest import Run
from tests.native import needs_kernels

SMALL = (
    "--shapes",
    "64x100,2of8:64x32,smollm-135m",
    "--rows",
    "1,3",
    "--contexts",
    "20",
    "--batches",
    "2",
    "--threads",
    "1",
)


@pytest.mark.full
@needs_kernels
def test_bench_kernels_prints_tables_and_writes_json(chairlift: Run, tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    code, out, err = chairlift("bench", "kernels", "--quick", *SMALL, "--json", path)
    assert (code, err) == (0, [])
    assert max(map(len, out)) <= 100
    for title in ("Matmuls", "Experts", "Attention, decode", "Attention, prefill", "Output head", "limits at the end"):
        assert sum(line.startswith(title) for line in out) == 1
    record = json.loads(path.read_text())
    keys = {"chairlift", "benchmark", "machine", "settings", "limits", "limits_after", "results"}
    assert set(record) == keys
    assert {"cpu", "flags", "processors", "l3_bytes", "isas"} <= set(record["machine"])
    settings = record["settings"]
    assert (settings["threads"], settings["isa"], settings["dtype"]) == (1, supported_isas()[-1], "bfloat16")
    assert settings["rows"] == [1, 3]
    assert {peak["isa"] for peak in record["limits"]["product_operations"]} == set(supported_isas())
    kinds = [each["kind"] for each in record["results"]]
    assert kinds == ["product"] * 2 * 5 + ["experts"] * 2 + ["decode", "prefill"] + ["head"] * 2
    for each in record["results"]:
        for timing in each["timings"].values():
            assert 0 < timing["best"] <= timing["median"] <= timing["worst"]


@needs_kernels
def test_a_path_and_a_dtype_may_be_chosen(chairlift: Run) -> None:
    isa = supported_isas()[0]
    flags = ("--kernels", isa, "--dtype", "float32", "--shapes", "32x32", "--rows", "1", "--threads", "1")
    code, out, err = chairlift("bench", "kernels", "--quick", *flags)
    assert (code, err) == (0, [])
    assert any(line.split(maxsplit=1) == ["kernels", f"{isa} in float32, threads: 1"] for line in out)
    assert not [line for line in out if line.startswith(("Attention", "Output head"))]  # of models only


@pytest.mark.full
def test_bench_offline_compares_with_static_batches(chairlift: Run, model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "offline.json"
    path.write_text("of last time")
    flags = ("--num-prompts", "20", "--baseline", "--threads", "1", "--num-kv-blocks", "100", "--kernels", "torch")
    page = tmp_path / "offline.html"
    code, out, err = chairlift("bench", "offline", model_dir, *flags, "--json", path, "--html", page)
    assert (code, err) == (0, [])
    text = "\n".join(out)
    for words in (
        "static batches of 16",
        "continuous batching, PyTorch in",
        "times the rate",
        "floor          not meas",
    ):
        assert words in text
    assert "<svg" in page.read_text()
    record = json.loads(path.read_text())
    keys = {"chairlift", "benchmark", "machine", "model", "kernels", "settings", "workload", "shortened", "result"}
    assert set(record) == keys | {"baseline", "limits", "floor"}
    assert record["model"] == str(model_dir)
    assert record["kernels"] == "torch"
    assert record["settings"]["scheduler"]["batching"] == "continuous"
    assert record["workload"]["count"] == record["result"]["requests"] == 20
    assert record["shortened"] > 0  # the model has 256 positions
    assert record["floor"] == {"not_measured": "kernels is 'torch'"}
    assert record["result"]["output_tokens"] == record["baseline"]["output_tokens"]
    assert record["baseline"]["held_row_tokens"] > record["result"]["held_row_tokens"] == 0


@needs_kernels
def test_offline_answers_with_the_bundled_model(chairlift: Run, tmp_path: Path) -> None:
    path = tmp_path / "offline.json"
    flags = ("--num-prompts", "3", "--seed", "4", "--threads", "1", "--json", path)
    code, out, err = chairlift("bench", "offline", *flags)
    assert (code, err) == (0, [])
    assert any(line.startswith("of the floor") for line in out)
    record = json.loads(path.read_text())
    assert record["model"] == "bundled"
    assert record["kernels"] == supported_isas()[-1]
    assert record["workload"]["seed"] == 4
    assert record["floor"]["share"] == pytest.approx(record["floor"]["seconds"] / record["result"]["seconds"])
    assert record["baseline"] is None


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "no command is given (for example: chairlift bench kernels)"),
        (["kernel"], "unknown command 'kernel'; did you mean chairlift bench kernels?"),
        (["kernels", "--row", "3"], "unknown flag '--row'; did you mean --rows? See chairlift bench kernels --help"),
        (["kernels", "3"], "unexpected argument '3'"),
        (["kernels", "--rows", "0"], "--rows: must be a whole number from 1 to 65,536, got '0'"),
        (["kernels", "--rows", "4,"], "got ''"),
        (["kernels", "--contexts", "many"], "--contexts: must be a whole number"),
        (["kernels", "--batches", "-1"], "--batches"),
        (["kernels", "--threads", "257"], "--threads: must be a whole number from 1 to 256"),
        (["kernels", "--kernels", "sse"], "invalid choice: 'sse'"),
        (["kernels", "--dtype", "float16"], "invalid choice: 'float16'"),
        (["kernels", "--device", "gpu"], "device must be cpu, cuda or cuda:N, got 'gpu'"),
        (["kernels", "--device", "cuda", "--threads", "2"], "--kernels and --threads are for the CPU"),
        *([] if torch.cuda.is_available() else [(["kernels", "--device", "cuda"], "this torch finds no CUDA device")]),
        (["kernels", "--json", "/nowhere/out.json"], "cannot write /nowhere/out.json"),
        (["offline", "--num-prompts", "0"], "--num-prompts must be from 1 to 1e+06, got 0"),
        (["offline", "--seed", "-1"], "--seed"),
        (["offline", "--max-num-seqs", "0"], "must be a number of slots above 0"),
        (["offline", "/no/such/model"], "'/no/such/model' is not a directory"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(chairlift: Run, argv: list[str], complaint: str) -> None:
    code, out, err = chairlift("bench", *argv)
    assert code == 2
    assert len(err) == 1
    assert err[0].startswith("chairlift: error: ")
    assert complaint in err[0]
    assert not [line for line in out if line.startswith("requests")]


@needs_kernels
@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--shapes", "gpt-5"], "unknown shape 'gpt-5'; give qwen2.5-0.5b"),
        (["--dtype", "fp8"], "dtype is fp8, and weights in fp8 are for GPUs; use --device cuda, or another dtype"),
        (
            ["--dtype", "fp8", "--shapes", "40x64"],
            "40x64: the sizes of products in fp8 must be multiples of 16; give others",
        ),
        (["--shapes", "9of8:32x32"], "unknown shape '9of8:32x32'; give qwen2.5-0.5b"),
        *([] if "amx" in supported_isas() else [(["--kernels", "amx"], "kernels is 'amx', but ")]),
    ],
)
def test_bench_kernels_refuses_products_that_it_cannot_measure(
    chairlift: Run, tmp_path: Path, flags: list[str], complaint: str
) -> None:
    path = tmp_path / "out.json"
    code, out, err = chairlift("bench", "kernels", *flags, "--json", path)
    assert (code, out) == (2, [])
    assert complaint in err[0]
    assert not path.exists()


def test_experts_are_not_measured_on_a_gpu(chairlift: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift_lab.cli.bench._path", lambda *given: "gpu")
    code, out, err = chairlift("bench", "kernels", "--device", "cuda", "--shapes", "2of8:32x32")
    assert (code, out) == (2, [])
    assert "2of8:32x32: there are no GPU kernels for experts to measure (PyTorch computes them); leave it out" in err[0]


def test_a_gpu_without_fp8_is_refused(chairlift: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr("chairlift.executor.backends.triton.backend._why_not_here", lambda *given: "")
    code, out, err = chairlift("bench", "kernels", "--device", "cuda", "--dtype", "fp8")
    assert (code, out) == (2, [])
    assert "there are no kernels to measure: it needs a GPU of compute capability 8.9 or higher" in err[0]


@pytest.mark.full
def test_without_kernels_it_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from chairlift.kernels.cpu import library;"
        f"library.LIBRARY_PATH = Path({str(tmp_path / 'none.so')!r});"
        "from chairlift.cli.main import main; sys.exit(main(['bench', 'kernels', '--quick']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("chairlift: error: there are no kernels to measure: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_plain_install_writes_the_page_with_charts(chairlift: Run, tmp_path: Path) -> None:
    flags = ("--input-len", "8", "--output-len", "2", "--num-prompts", "2", "--html", tmp_path / "page.html")
    code, _, err = chairlift("bench", "offline", "hashlm", *flags)
    assert (code, err) == (0, [])
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == page.count("<figure>") > 1
    assert "<table>" in page
