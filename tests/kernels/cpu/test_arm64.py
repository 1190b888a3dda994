"""The paths of ARM64 compute the bits of the path of AVX2: calls are recorded here and made again in an emulator.

The cross-compiler's objects are those of an ARM64 machine, and qemu computes their instructions as the architecture's
manual says. So what is compared is the code of such a machine, but nothing here says how fast it is. Only NaN may
differ, in its sign and payload.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from chairlift import LoRARequest
from chairlift.kernels.cpu.library import ARM64_ISAS, supported_isas
from chairlift.kernels.grouped import GroupKind
from tests.kernels.cpu import (
    shared_prefixes,
    test_activations,
    test_attention,
    test_codes,
    test_experts,
    test_gemm,
    test_head,
    test_sampling,
)
from tests.kernels.cpu.arm64 import CXX, QEMU, Arm64, cross_compiled
from tests.kernels.cpu.bit_cases import CASES, digest_of, read_record
from tests.kernels.cpu.inner_loops import INNER_LOOPS, inner_loops
from tests.kernels.cpu.one_op import Machine
from tests.kernels.cpu.recorded_calls import recorded
from tests.lora.adapters import random_adapter
from tests.lora.test_product import EXPERTS_LEFT_OUT, PROMPTS, answers, engine
from tests.models.tiny import tiny_hf_model

OBJDUMP = "aarch64-linux-gnu-objdump"
LACKING = [name for name in (CXX, OBJDUMP, QEMU) if shutil.which(name) is None]

pytestmark = [
    pytest.mark.usefixtures("native_library"),
    pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)} (Debian: g++-aarch64-linux-gnu, qemu-user)"),
    pytest.mark.skipif("avx2" not in supported_isas(), reason="the calls are recorded with the AVX2 path"),
]

QUICK = [
    *("matmul silu bf16 40x128x600", "matmul int8-g32 bf16 40x96x700", "matmul int8-g128-min bf16 40x96x700"),
    *("matmul int4-g128-min bf16 40x96x700", "matmul e2m1-g32 f32 40x96x700", "attention chunk bf16 kv-bf16"),
    *("attention chunk f32 kv-int8", "heads bf16 kv-int8", "mamba scan bf16", "experts int4-g32 bf16", "sampling"),
]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Arm64:
    """Without optimisation, which compiles four times as fast and checks the bounds of arrays."""
    return cross_compiled(tmp_path_factory.mktemp("quick"), "debug")


@pytest.fixture(scope="module")
def arm64(tmp_path_factory: pytest.TempPathFactory) -> Arm64:
    return cross_compiled(tmp_path_factory.mktemp("arm64"), "release")


@pytest.mark.full  # compiles the kernels, which takes a minute and a half
def test_a_quick_selection_has_equal_bits(quick: Arm64, tmp_path: Path) -> None:
    with recorded(tmp_path):
        for case in QUICK:
            CASES[case]("avx2")
    quick.check(tmp_path)


@pytest.mark.full  # compiles the kernels, which takes a minute and a half
def test_a_changed_bit_is_found(quick: Arm64, tmp_path: Path) -> None:
    with recorded(tmp_path):
        CASES["rms norm f32 7x100"]("avx2")
    (file,) = tmp_path.glob("*.bin")
    content = bytearray(file.read_bytes())
    content[-9 - 4 * 1000] ^= 1  # the last region that changed is the result; the last eight bytes are the function's
    file.write_bytes(content)
    done = quick.replay(tmp_path, "max")
    assert done.returncode == 1 and "1 of 1 calls differ" in done.stdout, done.stdout


@pytest.mark.full  # compiles the kernels, which takes a minute and a half
def test_a_processor_without_the_instructions_runs_no_path(quick: Arm64, tmp_path: Path) -> None:
    done = quick.replay(tmp_path, "cortex-a53")
    assert done.returncode == 0  # without calls, nothing asks for a path
    with recorded(tmp_path):
        CASES["rms norm f32 7x100"]("avx2")
    done = quick.replay(tmp_path, "cortex-a53")
    assert done.returncode == 2 and "this processor runs no path" in done.stderr


def test_the_record_has_the_bits_of_avx2() -> None:
    for digests in read_record()["digests"].values():
        assert all(digests[path] == digests["avx2"] for path in ARM64_ISAS)


@pytest.mark.nightly
@pytest.mark.parametrize("path", ARM64_ISAS)
def test_inner_loops_use_the_dot_products_and_keep_their_sums_in_registers(path: str, arm64: Arm64) -> None:
    files = [arm64.objects[f"{path}-{name}"] for name in ("products_of_codes", "run_f32", "run_bf16")]
    loops = inner_loops(OBJDUMP, files)
    assert {loop.kind for loop in loops} == set(INNER_LOOPS)
    for loop in loops:
        if loop.kind.startswith("codes") or loop.kind == "MXFP4":
            if path == "neon_i8mm" and loop.rows >= 3:
                even = loop.rows + loop.rows % 2
                assert loop.count("usmmla") == loop.products * even // loop.rows / 32, loop[:3]
            else:
                assert loop.count("sdot") == loop.products / 16, loop[:3]
        else:
            # Codes add each block to float32 sums in memory. Other loops store nothing.
            assert loop.count("st[rp]") == 0, loop[:3]
        assert len(loop.instructions) < loop.products, loop[:3]


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_every_recorded_case_has_equal_bits(case: str, arm64: Arm64, tmp_path: Path) -> None:
    with recorded(tmp_path):
        assert digest_of(case, "avx2") == read_record()["digests"][case]["avx2"]
    arm64.check(tmp_path)


def _machine(seed: int) -> Machine:
    return Machine("avx2", (torch.bfloat16, torch.float32)[seed % 2], 1 + seed // 2 % 2)


def _attention(seed: int) -> None:
    rng, machine = random.Random(seed), _machine(seed)._replace(int8_kv=seed % 3 == 0)
    test_attention.check(machine, test_attention.Case.draw(rng, machine.dtype), rng)


CHECKS: dict[str, Callable[[int], None]] = {
    "exact products": lambda seed: test_gemm.check_exact_product(_machine(seed), seed),
    "products": lambda seed: test_gemm.check_product(_machine(seed), seed),
    "gated products": lambda seed: test_gemm.check_gated(_machine(seed), seed),
    "heads": lambda seed: test_gemm.check_heads(_machine(seed), seed),
    "activations": lambda seed: test_activations.check_product(_machine(seed), seed),
    "gated activations": lambda seed: test_activations.check_gated(_machine(seed), seed),
    "layer norms": lambda seed: test_activations.check_layer_norm(_machine(seed), seed),
    "head rows": lambda seed: test_activations.check_heads(_machine(seed), seed),
    "codes": lambda seed: test_codes.check_product(_machine(seed), seed),
    "output heads": lambda seed: test_head.check_rows(_machine(seed), seed),
    "ties": lambda seed: test_head.check_ties(_machine(seed), seed),
    "attention": _attention,
}
"""Checks of the kernels with random sizes, whose calls are recorded."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHECKS)
def test_calls_of_random_sizes_have_equal_bits(name: str, arm64: Arm64, tmp_path: Path) -> None:
    with recorded(tmp_path):
        for seed in range(8):
            CHECKS[name](seed)
    arm64.check(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_broken_rows_have_equal_bits(dtype: torch.dtype, arm64: Arm64, tmp_path: Path) -> None:
    machine = Machine("avx2", dtype, 2)
    with recorded(tmp_path):
        test_gemm.test_broken_rows_stay_among_themselves(machine)
        for int8_kv in (False, True):
            test_attention.test_a_broken_sequence_stays_alone(1, machine._replace(int8_kv=int8_kv))
    arm64.check(tmp_path)


@pytest.mark.nightly
def test_draws_have_equal_bits(arm64: Arm64, tmp_path: Path) -> None:
    with recorded(tmp_path):
        for vocab in (17, 129, 1000, 4099, 50_257):
            rng = np.random.default_rng(vocab)
            test_sampling.compare([test_sampling.make_case(rng, vocab) for _ in range(8)], "avx2")
    arm64.check(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("int8_kv", [False, True], ids=["plain", "int8"])
def test_shared_keys_have_equal_bits(int8_kv: bool, arm64: Arm64, tmp_path: Path) -> None:
    with recorded(tmp_path):
        for seed in range(6):
            machine, rng = _machine(seed)._replace(int8_kv=int8_kv), random.Random(seed)
            shared_prefixes.check(machine, rng, shared_prefixes.draw_step(rng, machine.dtype))
    arm64.check(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_experts_have_equal_bits(dtype: torch.dtype, arm64: Arm64, tmp_path: Path) -> None:
    with recorded(tmp_path):
        for seed in range(4):
            test_experts.test_experts_are_near_their_definition(seed, dtype, "avx2")
        for kind in (None, GroupKind(4, 32, e2m1=True)):
            test_experts.test_bits_depend_on_the_row_alone(kind, dtype, "avx2")
    arm64.check(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_steps_with_adapters_have_equal_bits(family: str, dtype: str, arm64: Arm64, tmp_path: Path) -> None:
    """Whole models, with one row without an adapter and one with."""
    model_dir, calls = tiny_hf_model(tmp_path / "model", family), tmp_path / "calls"
    calls.mkdir()
    targets = {"target_modules": EXPERTS_LEFT_OUT} if family == "qwen3_moe" else {}
    adapter = LoRARequest("a", 1, random_adapter(model_dir, tmp_path / "a", seed=1, r=5, **targets))
    with recorded(calls):
        answers(engine(model_dir, "avx2", dtype=dtype, threads=2), PROMPTS[:2], [None, adapter], 2)
    arm64.check(calls)
