"""Mistakes in the source of the kernels of recurrent layers: each is compiled, and changes the answers of a model."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.kernels.cpu import library
from chairlift.kernels.cpu.fused_op import FusedOp, OpKind
from chairlift.kernels.cpu.library import supported_isas
from chairlift.kernels.cpu.program import StepProgram
from tests.models.test_families import prompt
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels
from tests.tiers import one_in

pytestmark = needs_kernels

SOURCES = Path(__file__).parents[3] / "csrc" / "cpu"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-mavx2", "-mfma", "-mf16c", "-pthread", "-w"]
KINDS = (OpKind.SHORT_CONV, OpKind.MAMBA_SCAN, OpKind.DELTA_SCAN, OpKind.GATED_NORM)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "conv": ("lfm2", {}),
    "delta": ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3}),
    "mamba": ("mamba2", {"time_step_limit": (0.0, 1.0)}),
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``right`` in a header becomes ``wrong``; ``model`` is the one of MODELS that must notice it."""

    model: str
    header: str
    right: str
    wrong: str


TABLE = "(int64_t(layer.group) * batch.num_rows + row) * batch.table_width"
FADE = "vexp(vmul(step, vset(-rate)))"
DELTA_FADE = "vexp(vmul(vsoftplus(vload(steps)), vset(-fade)))"
MUTANTS = {
    "state not reset": Mutant(
        "mamba", "recurrent.h", "position == 0 ? nullptr : at<T>((position - 1)", "at<T>((position - !!position)"
    ),
    "memory not reset": Mutant(
        "delta", "recurrent.h", "position == 0 ? nullptr : at<T>((position - 1)", "at<T>((position - !!position)"
    ),
    "state of another row": Mutant("mamba", "recurrent.h", TABLE, TABLE.replace("row)", "(row + 1) % batch.num_rows)")),
    "tail of another row": Mutant("conv", "recurrent.h", TABLE, TABLE.replace("row)", "(row + 1) % batch.num_rows)")),
    "tail lost at a border": Mutant(
        "conv", "recurrent.h", "before ? vload(before + int64_t(i) * width + channel) : vset(0.0f)", "vset(0.0f)"
    ),
    "tail without the newest token": Mutant("conv", "recurrent.h", "if (kept > 0) tail[kept - 1] = x;", ""),
    "tail of a later position": Mutant(
        "conv",
        "recurrent.h",
        "(place + 1) % span == 0 ? at<T>(place / span)",
        "(place && place % span == 0) ? at<T>((place - 1) / span)",
    ),
    "state of a later position": Mutant(
        "mamba",
        "recurrent.h",
        "(place + 1) % span == 0 ? at<T>(place / span)",
        "(place && place % span == 0) ? at<T>((place - 1) / span)",
    ),
    "state lost at a border": Mutant(
        "mamba", "scan.h", "first ? last : state.before<float>() ?", "first ? last : false ?"
    ),
    "memory lost at a border": Mutant(
        "delta", "scan.h", "first ? last : state.before<float>() ?", "first ? last : false ?"
    ),
    "state lost within a chunk": Mutant("mamba", "scan.h", "first ? last : state", "state"),
    "no snapshot within a chunk": Mutant("delta", "scan.h", "if (kept && first + t + 1 != all)", "if (false)"),
    "only the last token keeps its state": Mutant("delta", "scan.h", "    from = to;\n", ""),
    "panels side by side": Mutant("mamba", "scan.h", "+ panel) * each", "+ panel) * each / 2"),
    "decay of Mamba-2 in 16 bits": Mutant("mamba", "mamba2.h", FADE, f"vrounded({FADE}, bf16())"),
    "state of Mamba-2 in 16 bits": Mutant(
        "mamba",
        "mamba2.h",
        "vfma(vload(row + v * LANES), kept, vmul(b0, scaled[v]))",
        "vrounded(vfma(vload(row + v * LANES), kept, vmul(b0, scaled[v])), bf16())",
    ),
    "B and C of another group": Mutant("mamba", "mamba2.h", "head / (op.heads / op.kv_heads)", "head % op.kv_heads"),
    "no limit of time steps": Mutant(
        "mamba",
        "mamba2.h",
        "vmin(vset(op.cap), vmax(vset(op.scale), vsoftplus(vload(given))))",
        "vsoftplus(vload(given))",
    ),
    "no direct part": Mutant(
        "mamba", "mamba2.h", "vfma(vset(op.q_norm[head]), x[v], vadd(even[v], odd[v]))", "vadd(even[v], odd[v])"
    ),
    "norm and gate in another order": Mutant(
        "mamba",
        "mamba2.h",
        "const bool first = op.flags & CL_NORM_FIRST",
        "const bool first = !(op.flags & CL_NORM_FIRST)",
    ),
    "decay of a delta net in 16 bits": Mutant("delta", "delta_rule.h", DELTA_FADE, f"vrounded({DELTA_FADE}, bf16())"),
    "memory in 16 bits": Mutant(
        "delta",
        "delta_rule.h",
        "vfma(vload(from + i * W + c * LANES), kept, vmul(k0, change[c]))",
        "vrounded(vfma(vload(from + i * W + c * LANES), kept, vmul(k0, change[c])), bf16())",
    ),
    "answer before the memory fades": Mutant(
        "delta", "delta_rule.h", "vmul(vadd(even[c], odd[c]), kept)", "vadd(even[c], odd[c])"
    ),
    "keys of another head": Mutant(
        "delta", "delta_rule.h", "key = head / (op.heads / op.kv_heads)", "key = head % op.kv_heads"
    ),
    "keys of any length": Mutant("delta", "delta_rule.h", "factor / sqrtf(vsum(sum) + 1e-6f)", "factor"),
}


def compiled(folder: Path, mutant: Mutant | None) -> ctypes.CDLL:
    """The kernels with the mistake, or without one."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the kernels with")
    for header in SOURCES.glob("*.h"):
        text = header.read_text()
        if mutant is not None and header.name == mutant.header:
            assert text.count(mutant.right) == 1, f"{mutant.header} has not once: {mutant.right}"
            text = text.replace(mutant.right, mutant.wrong)
        (folder / header.name).write_text(text)
    source, target = Path(__file__).with_name("recurrent_ops.cpp"), folder / "recurrent.so"
    subprocess.run([compiler, *FLAGS, f"-I{folder}", str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def plant(patch: pytest.MonkeyPatch, kernels: ctypes.CDLL) -> None:
    """Step programs made from now on leave their recurrent operations to ``kernels``."""
    init, call_out = StepProgram.__init__, StepProgram._call_out

    def make(self: StepProgram, *args: Any, **how: Any) -> None:
        init(self, *args, **how)
        for struct, op in zip(self._ops, self.plan.ops, strict=True):
            struct.kind = OpKind.CALL if op.kind in KINDS else struct.kind

    def call(self: StepProgram, op: FusedOp, step: Any) -> None:
        if op.kind not in KINDS:
            return call_out(self, op, step)
        struct = library.OpStruct.from_buffer_copy(self._ops[self.plan.ops.index(op)])
        struct.kind = op.kind
        code = kernels.run_recurrent(ctypes.byref(struct), ctypes.byref(self._program), ctypes.byref(self._batch))
        assert code == 0

    patch.setattr(StepProgram, "__init__", make)
    patch.setattr(StepProgram, "_call_out", call)


PROMPTS = [prompt(35, 1), prompt(35, 1)[:20] + prompt(15, 2), prompt(2, 3), prompt(17, 4)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
SETTINGS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "threads": 1, "num_kv_blocks": 60}


def logprobs(llm: LLM) -> list[float]:
    """Log-probabilities of the tokens of all answers, in order, each with its token id first."""
    found = [answer for output in llm.generate(PROMPTS, PARAMS) for answer in output.outputs]
    return [
        token + each[token].logprob
        for answer in found
        for token, each in zip(answer.token_ids, answer.logprobs or [], strict=True)
    ]


@functools.cache
def expected(model_dir: Path) -> list[float]:
    return logprobs(LLM(model_dir, kernels="torch", enable_prefix_caching=False, **SETTINGS))


def differs(model_dir: Path) -> bool:
    """Whether the native kernels' answers differ, with whole prompts and with chunks of seven tokens, twice each."""
    truth = expected(model_dir)
    for schedule in ({}, {"max_num_batched_tokens": 7}):
        llm = LLM(model_dir, kernels=supported_isas()[0], state_snapshot_interval=16, **SETTINGS, **schedule)
        for _ in range(2):
            if any(abs(a - b) > 1e-4 for a, b in zip(logprobs(llm), truth, strict=True)):
                return True
    return False


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_hf_model(folder, family, **more) for name, (family, more) in MODELS.items()}


def test_the_kernels_are_right_where_mistakes_are_noticed(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_library: library.Library
) -> None:
    plant(monkeypatch, compiled(tmp_path, None))
    assert not any(differs(model_dir) for model_dir in models.values())


@pytest.mark.full
@pytest.mark.planted("test_the_kernels_are_right_where_mistakes_are_noticed")
@pytest.mark.parametrize("name", one_in(12, MUTANTS))
def test_a_mistake_in_the_source_is_noticed(
    name: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_library: library.Library
) -> None:
    mutant = MUTANTS[name]
    truth = expected(models[mutant.model])
    assert truth
    plant(monkeypatch, compiled(tmp_path, mutant))
    assert differs(models[mutant.model])
