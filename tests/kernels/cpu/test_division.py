"""Programs of several processes: no process reads what another has not written, or overwrites what another may read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.executor.parallel.shares import Share, divide_model
from chairlift.kernels.cpu.division import divide
from chairlift.kernels.cpu.fused_op import FusedOp, OpKind
from chairlift.kernels.cpu.lowering import lower
from chairlift.kernels.cpu.packing import KeptRows, PackedMatrix, PackedWeight
from chairlift.kernels.cpu.placing import LoweringPlan, place
from chairlift.kernels.recording import Recorder, Value
from chairlift.kernels.weights import NATIVE
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.kernels.cpu.models import FAMILIES, tiny_model
from tests.models.tiny import EXPERT_FAMILIES, RECURRENT_FAMILIES
from tests.native import needs_kernels

pytestmark = needs_kernels


def plan_of(model_dir: Path, share: Share) -> LoweringPlan:
    model = load_model(
        model_dir,
        read_config(model_dir),
        "float32",
        weight_format=NATIVE,
        divide=lambda model: divide_model(model, share),
    )
    recorder = Recorder(torch.float32)
    hidden: Any = model(recorder.token_ids, recorder.positions, recorder)
    return lower(recorder.nodes, hidden)


def races(plan: LoweringPlan) -> list[str]:
    """Pairs of operations, in two steps one after the other, that two processes may run at the same time although one
    writes to a shared buffer where the other reads. Of the second input of a product, a process reads its own columns
    only. Layers of experts overwrite and read one more buffer, number -2."""
    found = []
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    for index, op in enumerate([*plan.ops, *plan.ops]):
        if op.kind == OpKind.GATHER:
            written.clear()
            read.clear()
            continue
        for buffer in full_reads(op, plan):
            if buffer in written:
                found.append(f"{index} {op.kind.name} reads buffer {buffer} that {written[buffer]} writes")
            read[buffer] = index
        out = plan.buffer_of.get(op.out, -1)
        if op.kind == OpKind.EXPERTS and divided(op):
            if -2 in read:
                found.append(f"{index} EXPERTS overwrites activations that {read[-2]} reads")
            read[-2] = index
        if out in plan.shared:
            if out in read:
                found.append(f"{index} {op.kind.name} overwrites buffer {out} that {read[out]} reads")
            written[out] = index
    return found


def full_reads(op: FusedOp, plan: LoweringPlan) -> list[int]:
    read = op.inputs[:1] if op.kind == OpKind.LINEAR and divided(op) else op.inputs
    return [plan.buffer_of[value] for value in read if plan.buffer_of.get(value) in plan.shared]


def divided(op: FusedOp) -> bool:
    return isinstance(op.weight, PackedMatrix) and op.weight.kept is not None


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "family",
    [
        *(*FAMILIES, "cohere", "gemma2", "gpt_neox", "falcon_h1", "phi3", "granite"),
        *("mixtral", "qwen2_moe", "granitemoehybrid", "qwen3_next", "nemotron_h"),
    ],
)
def test_a_plan_has_no_races(family: str, rank: int, tmp_path: Path) -> None:
    fields = {**EXPERT_FAMILIES, **RECURRENT_FAMILIES}.get(family, {})
    plan = plan_of(tiny_model(tmp_path, family, **fields), Share(rank, 2))
    assert plan.shared
    assert all(plan.buffer_of[op.out] in plan.shared for op in plan.ops if op.column), "others read its columns"
    assert races(plan) == []


def unplaced(plan: LoweringPlan, without: int) -> LoweringPlan:
    """``plan`` with a buffer for each activation, and without the operation at index ``without``."""
    number = {value: index for index, value in enumerate(plan.buffer_of)}
    shared = {number[value] for value, buffer in plan.buffer_of.items() if buffer in plan.shared}
    return LoweringPlan([op for index, op in enumerate(plan.ops) if index != without], number, [], shared)


@pytest.mark.parametrize("family", [*FAMILIES, "cohere", "gpt_neox", "mixtral", "qwen2_moe", "qwen3_next", "falcon_h1"])
def test_a_plan_has_no_needless_waits(family: str, tmp_path: Path) -> None:
    """Without a wait, a process reads what another may not have written yet. The first wait is for the buffers of the
    step before."""
    fields = {**EXPERT_FAMILIES, **RECURRENT_FAMILIES}.get(family, {})
    plan = plan_of(tiny_model(tmp_path, family, **fields), Share(0, 2))
    _, *waits = [index for index, op in enumerate(plan.ops) if op.kind == OpKind.GATHER]
    assert waits
    assert not races(unplaced(plan, -1))
    assert [index for index in waits if not races(unplaced(plan, index))] == []


def test_a_layer_has_four_waits(tmp_path: Path) -> None:
    plan = plan_of(tiny_model(tmp_path, "qwen3"), Share(1, 2))
    kinds = [op.kind.name for op in plan.ops]
    attention = ["RMS_NORM", "QKV", "ATTENTION", "GATHER", "LINEAR", "GATHER"]
    layer = [*attention, "RMS_NORM", "LINEAR_SILU", "GATHER", "LINEAR", "GATHER"]
    assert kinds == ["GATHER", "EMBED", "ROTARY", *3 * layer, "RMS_NORM"]


def test_processes_have_the_same_operations_and_buffers(tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path, "llama", num_key_value_heads=4, num_attention_heads=8)
    plans = [plan_of(model_dir, Share(rank, 3)) for rank in range(3)]
    for plan in plans[1:]:
        assert [op.kind for op in plan.ops] == [op.kind for op in plans[0].ops]
        assert plan.widths == plans[0].widths
        assert plan.shared == plans[0].shared
    heads = [[op.fields["kv_heads"] for op in plan.ops if op.kind == OpKind.ATTENTION] for plan in plans]
    assert [sum(each) for each in zip(*heads, strict=True)] == [4, 4, 4]
    assert all(each == [1, 1, 1] for each in heads[:2])


def test_the_last_result_is_complete_when_the_program_ends() -> None:
    recorder = Recorder(torch.float32)
    given, out = (Value(recorder, "rows", 64) for _ in range(2))
    weight = PackedWeight(32, 64, torch.float32)
    weight.kept = KeptRows(64, ((32, 64),))
    found = divide([FusedOp(OpKind.LINEAR, out, (given,), {"n": 32, "k": 64}, weight)], [out])
    assert [op.kind for op in found.ops] == [OpKind.GATHER, OpKind.LINEAR, OpKind.GATHER]
    assert found.ops[1].column == 32
    assert found.shared == {out}


def test_experts_meet_before_they_overwrite_activations(tmp_path: Path) -> None:
    """Also if the result of a layer of experts is too narrow to be divided, so that nothing else makes them meet."""
    fields = {**EXPERT_FAMILIES["mixtral"], "hidden_size": 32, "num_key_value_heads": 1}
    plan = plan_of(tiny_model(tmp_path, "mixtral", **fields), Share(0, 2))
    experts = [index for index, op in enumerate(plan.ops) if op.kind == OpKind.EXPERTS]
    gathers = [index for index, op in enumerate(plan.ops) if op.kind == OpKind.GATHER]
    assert len(experts) == 3
    assert all(any(one < at < other for at in gathers) for one, other in itertools.pairwise(experts))
    assert races(plan) == []


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_a_shared_buffer_is_reused_after_the_wait_behind_its_last_reader(adds: bool, waits: bool) -> None:
    recorder = Recorder(torch.float32)
    given, first, normed, second = (Value(recorder, "rows", 64) for _ in range(4))
    gather = FusedOp(OpKind.GATHER, Value(recorder, "nothing", 0), ())
    ops = [gather, FusedOp(OpKind.LINEAR, first, (given,)), gather, FusedOp(OpKind.RMS_NORM, normed, (first,))]
    ops += [gather] if waits else []
    ops += [FusedOp(OpKind.LINEAR, second, (normed, first) if adds else (normed,))]
    plan = place(ops, [second], {first, second})
    assert (plan.buffer_of[first] == plan.buffer_of[second]) == waits
    assert plan.shared == {plan.buffer_of[first], plan.buffer_of[second]}
