from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from chairlift.base.outputs import CompletionOutput, Logprob, RequestOutput
from chairlift.base.step_batch import StepBatch
from chairlift.cli import check, compare
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.errors import ModelLoadError
from chairlift.executor.local import LocalExecutor
from chairlift.kernels.cpu.library import best_isa, supported_isas
from tests.cli.conftest import Run
from tests.models.pooled import pooled_model
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels

ISA = (supported_isas() or ("none",))[0]


def test_a_good_model_gets_a_report(chairlift: Run, model_dir: Path) -> None:
    code, out, err = chairlift("check", model_dir, "--num-kv-blocks", "673", "--dtype", "float32")
    assert (code, err) == (0, [])
    report = dict(re.split(r"\s{2,}|(?<=template) |(?<=token) ", line, maxsplit=1) for line in out)
    assert report["model"] == str(model_dir)
    hidden, inner, layers, vocab = 64, 96, 3, 426
    attention = hidden * hidden * 2 + hidden * 32 * 2
    expected = 2 * vocab * hidden + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden
    assert report["parameters"].startswith(f"{expected:,} in float32")
    assert report["KV per token"] == f"{layers * 2 * 2 * 16 * 4:,} bytes in float32"
    assert report["context"] == "256 tokens"
    assert report["kernels"].startswith(f"{best_isa() or 'PyTorch'} in float32")
    assert report["chat template"] == "yes"
    assert "room for about 42 chats of 256 tokens at once" in report["memory"]
    assert report["weights"] == "all numbers are finite"
    assert re.fullmatch(r"prompts [\d,]+ tokens/s, one answer [\d,]+ .*8 together [\d,]+ .*now", report["speed"])
    assert "same 8 greedy tokens alone and in a batch" in report["self-test"]


def test_the_blocks_of_a_store_are_counted_and_verified(chairlift: Run, model_dir: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    flags = "--kv-store", store, "--kv-store-bytes", "4MB"
    code, _, _ = chairlift("generate", "What is a KV cache? " * 4, "--model", model_dir, "--max-tokens", 1, *flags)
    assert code == 0
    code, out, _ = chairlift("check", model_dir, *flags)
    (line,) = (line for line in out if line.startswith("kv store"))
    found = re.fullmatch(r"kv store +([\d,]+) blocks of this model, [\d.]+ MiB; all are whole", line)
    assert code == 0 and found is not None and int(found[1]) > 0
    (blocks,) = store.glob("*/blocks-0-0")
    blocks.write_bytes(bytes(blocks.stat().st_size))
    code, out, _ = chairlift("check", model_dir, *flags)
    assert code == 0
    assert any(line.endswith("are damaged, and will be computed again") for line in out)


@needs_kernels
def test_the_report_has_the_memory_of_each_process(chairlift: Run, model_dir: Path) -> None:
    code, out, _ = chairlift("check", model_dir, "--tensor-parallel-size", 2, "--threads", 2)
    assert code == 0
    lines = [line for line in out if line.startswith("process ")]
    assert [line.split(maxsplit=2)[1] for line in lines] == ["0", "1"]
    form = r"[\d,]+ MiB of weights and [\d,]+ MiB of cache on memory node \d+( of [\d,]+ MiB)?; processors .*, 1 thread"
    assert all(re.fullmatch(form, line.split(maxsplit=2)[2]) for line in lines)


@needs_kernels
def test_the_report_says_how_much_memory_8_bits_save(chairlift: Run, model_dir: Path) -> None:
    code, out, _ = chairlift("check", model_dir, "--num-kv-blocks", "673", "--kv-cache-dtype", "int8")
    report = dict(line.split(maxsplit=1) for line in out)
    heads = 3 * 2 * 2  # layers, heads, K and V
    assert code == 0
    assert report["KV"] == f"per token   {heads * 24:,} bytes in int8 instead of {heads * 64:,} in float32"
    assert "10,752 tokens in blocks of 16, 2.7 times as many per GiB as in float32" in report["memory"]
    assert "same 8 greedy tokens alone and in a batch" in report["self-test"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--kernels", "torch"], "PyTorch in float32: kernels is 'torch'"),
        (["--block-size", "8", "--dtype", "bfloat16"], "PyTorch in bfloat16: "),
        pytest.param(["--kernels", ISA, "--threads", "1"], f"{ISA} in float32, 1 thread", marks=needs_kernels),
    ],
)
def test_the_report_names_the_kernels_that_run_the_model(
    chairlift: Run, model_dir: Path, flags: list[str], line: str
) -> None:
    code, out, _ = chairlift("check", model_dir, "--num-kv-blocks", "64", *flags)
    assert code == 0
    [kernels] = [each for each in out if each.startswith("kernels")]
    assert kernels.split(maxsplit=1)[1].startswith(line)


def test_the_report_says_how_answers_differ_from_transformers(chairlift: Run, model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, model := tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text(json.dumps({"forced_eos_token_id": 1}))
    code, out, err = chairlift("check", model, "--num-kv-blocks", "64", "--max-model-len", "500")
    assert code == 0
    notes = [line.split(maxsplit=1)[1] for line in out if line.startswith("note")]
    assert len(notes) == 2 and "'dynamic'" in notes[0] and "not applied: forced_eos_token_id 1" in notes[1]
    assert all(note in "\n".join(err) for note in notes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes(chairlift: Run, model_dir: Path, dtype: str) -> None:
    code, out, err = chairlift("check", model_dir, "--dtype", dtype, "--num-kv-blocks", "64")
    assert code == 0
    assert ["PyTorch runs this model" in line for line in err] == [True] * (dtype == "float16")
    assert f"in {dtype}" in "\n".join(out)


def test_weights_that_are_not_finite_are_found(chairlift: Run, model_dir: Path, tmp_path: Path) -> None:
    """In the row of a token that no prompt of the self-test has."""
    shutil.copytree(model_dir, broken := tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.embed_tokens.weight"][-1, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    code, _, err = chairlift("check", broken, "--num-kv-blocks", "64")
    assert code == 2
    assert "tensor model.embed_tokens.weight has NaN or infinity" in "\n".join(err)


def test_a_broken_chat_template_is_found(chairlift: Run, model_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    (broken / "chat_template.jinja").write_text("{% for %}")
    code, _, err = chairlift("check", broken, "--num-kv-blocks", "64")
    assert code == 2
    warning, error = err
    assert "warning: prompts work, but chats will be refused" in warning
    assert "error: the chat template is invalid at line 1" in error


def test_an_empty_name_is_not_the_bundled_model(chairlift: Run) -> None:
    code, out, err = chairlift("check", "")
    assert (code, out) == (2, [])
    assert "'' is not a directory" in err[0]


def test_a_batch_that_changes_answers_is_found(
    chairlift: Run, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = LocalExecutor.execute

    def wrong(self: LocalExecutor, out: SchedulerOutput) -> tuple[torch.Tensor, StepBatch]:
        hidden, batch = execute(self, out)
        if len(hidden) > 1:
            hidden.copy_(hidden.flip(-1))
        return hidden, batch

    monkeypatch.setattr(LocalExecutor, "execute", wrong)
    code, _, err = chairlift("check", model_dir, "--num-kv-blocks", "64")
    assert code == 2
    assert len(err) == 1
    assert "self-test: the answer to" in err[0]


class Undecided:
    """A model that finds two tokens nearly equally likely, and takes the other one where prompts come together."""

    tokenizer, max_model_len = None, 64

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        tokens = [0] * 7 + [1 if len(prompts) > 1 else 2]
        logprobs = [{0: Logprob(-0.1)}] * 7 + [{1: Logprob(-0.75), 2: Logprob(-0.7)}]
        answers = [CompletionOutput(0, "", tokens, logprobs=logprobs)]
        return [RequestOutput("", None, prompt, answers, True) for prompt in prompts]


def test_only_what_is_nearly_equally_likely_may_change_places() -> None:
    said = check._self_test(cast(LLM, Undecided()), 9, tie=0.1)
    assert said == "4 prompts give the same 8 greedy tokens alone and in a batch, but for near ties in 4"
    with pytest.raises(ModelLoadError, match="'The' differs at token 8 between running alone and in a batch"):
        check._self_test(cast(LLM, Undecided()), 9, tie=0.01)


def test_a_model_is_compared_with_transformers(chairlift: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--compare", "transformers", "--dtype", "float32", "--skip-tokenizer-init")
    for model in (tiny_hf_model(tmp_path, "llama"), pooled_model(tmp_path, "bert")[0]):
        code, out, err = chairlift("check", model, *flags)
        assert code == 0, err
        assert any(line.startswith("compare        equals transformers: ") for line in out)
    monkeypatch.setattr(compare, "_MOST", {"float32": 0.0})
    code, _, err = chairlift("check", tmp_path / "llama-0", *flags, "--num-kv-blocks", "64")
    assert code == 2 and "differ from those of transformers by" in "".join(err)
