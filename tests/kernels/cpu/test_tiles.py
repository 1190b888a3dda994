"""The AMX path on any processor: what it runs is compiled for AMX, and a signal handler does what the processor cannot.

So the instructions are the real ones, with the shapes of their tiles and where compilers put them among stores. The
handler (tile_trap.cpp) follows the manual, not a processor. What can be wrong about that path is blocking and
addressing: 32 rows at a time and what is left of them, blocks of k, rows per pass over the weight, pieces of keys and
values. The tests are those of the other paths.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chairlift.kernels.cpu import library
from chairlift.kernels.grouped import GroupKind
from tests.equivalence.cases import longest
from tests.equivalence.test_bfloat16 import MOST_ERROR, Truth, errors, ties
from tests.equivalence.test_determinism import Alone, draw_case
from tests.equivalence.test_determinism import check as check_determinism
from tests.kernels.cpu import test_attention as attention_tests
from tests.kernels.cpu import test_codes, test_experts, test_gemm, test_head
from tests.kernels.cpu.approximate import assert_near
from tests.kernels.cpu.bit_cases import CASES, digest_of, read_record
from tests.kernels.cpu.emulated_tiles import emulated_tiles
from tests.kernels.cpu.one_op import Machine, counts, equal_bits, normal
from tests.models.tiny import FAMILIES
from tests.sweep import sweep

pytestmark = pytest.mark.nightly

FEW = Machine("amx", torch.bfloat16, 1)
MANY = Machine("amx", torch.bfloat16, 2)


@pytest.fixture(scope="module", autouse=True)
def amx_anywhere(native_library: library.Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels in use are those of one path, compiled here."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the AMX path with")
    with emulated_tiles(tmp_path_factory.mktemp("amx")):
        yield


def few_and_many(seed: int) -> Machine:
    return MANY if seed % 2 else FEW


@counts(30)
def test_products_of_whole_numbers_are_exact(count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: test_gemm.check_exact_product(few_and_many(seed), seed))


@counts(20)
def test_products_are_near_and_rows_are_independent(count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: test_gemm.check_product(few_and_many(seed), seed))


@counts(15)
def test_gated_products_are_near_their_definition(count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: test_gemm.check_gated(few_and_many(seed), seed))


@counts(10)
def test_heads_are_near_their_definition(count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: test_gemm.check_heads(few_and_many(seed), seed))


@counts(10)
def test_the_output_head_chooses_the_lowest_best_id_row_by_row(count: int, request: pytest.FixtureRequest) -> None:
    def check(seed: int) -> None:
        test_head.check_ties(few_and_many(seed), seed)
        test_head.check_rows(few_and_many(seed), seed)

    sweep(request, count, check)


@pytest.mark.parametrize("int8_kv", [False, True], ids=["plain", "int8"])
@counts(10)
def test_attention_is_near_its_definition(count: int, int8_kv: bool, request: pytest.FixtureRequest) -> None:
    def check(seed: int) -> None:
        rng, machine = random.Random(seed), few_and_many(seed)._replace(int8_kv=int8_kv)
        attention_tests.check(machine, attention_tests.Case.draw(rng, torch.bfloat16), rng)

    sweep(request, count, check)


@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 7, 16, 17, 33])
def test_attention_is_right_at_edges_of_tiles(head_dim: int, group: int) -> None:
    rng = random.Random(head_dim * 100 + group)
    case = attention_tests.Case.make(rng, torch.bfloat16, [(1, 300), (4, 37), (1, 16), (1, 1)], 2, group, head_dim)
    for int8_kv in (False, True):
        attention_tests.check(MANY._replace(int8_kv=int8_kv), case, rng)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 49, 65, 255, 256, 257, 511, 512, 513, 600])
def test_products_are_right_at_edges_of_row_blocks(rows: int) -> None:
    rng = random.Random(rows)
    for k, n in ((32, 300), (512, 33), (544, 33)):
        product = test_gemm.Product(normal(rng, 600, k).bfloat16(), normal(rng, n, k).bfloat16())
        expected = product.expected().rounded(torch.bfloat16)[:rows]
        found = product.compute(MANY, rng, slice(0, rows))
        assert_near(found, expected, f"{rows} rows of {k}")
        assert equal_bits(product.compute(FEW, rng, slice(rows - 1, rows)), found[-1:])


@pytest.mark.parametrize("k", [511, 512, 513, 1024, 1025, 4100])
def test_products_are_right_at_edges_of_k_blocks(k: int) -> None:
    rng = random.Random(k)
    product = test_gemm.Product(normal(rng, 20, k).bfloat16(), normal(rng, 70, k).bfloat16())
    assert_near(product.compute(MANY, rng), product.expected().rounded(torch.bfloat16), f"k = {k}")


@pytest.mark.parametrize("kind", test_codes.KINDS[::3])
def test_products_of_codes_have_equal_bits_at_any_number_of_rows(kind: GroupKind) -> None:
    test_codes.check_edges(MANY, kind)


def test_broken_rows_stay_among_themselves() -> None:
    test_gemm.test_broken_rows_stay_among_themselves(MANY)
    for row in range(3):
        for int8_kv in (False, True):
            attention_tests.test_a_broken_sequence_stays_alone(row, MANY._replace(int8_kv=int8_kv))


@pytest.mark.nightly
@counts(8)
def test_whole_models_say_the_same_alone_and_in_any_batch(
    count: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    alone = Alone(tmp_path)

    def check(seed: int) -> None:
        case = draw_case(seed)
        # Float32 has no tiles, and long prompts take long without them.
        if case.dtype == "bfloat16" and longest(case.jobs) < 150:
            check_determinism(alone, "amx", seed)

    sweep(request, count, check)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "qwen3" else pytest.mark.nightly) for name in FAMILIES]
)
def test_a_whole_model_is_as_exact_as_transformers(family: str, tmp_path: Path) -> None:
    truth = Truth.of(tmp_path, family)
    ours, theirs = errors(truth, "amx")
    assert 0 < ours <= MOST_ERROR * theirs
    assert ties(truth, "amx") <= len(truth.jobs) // 4


def test_experts_are_right_at_any_size_and_in_company() -> None:
    for seed in range(4):
        test_experts.test_experts_are_near_their_definition(seed, torch.bfloat16, "amx")
    test_experts.test_bits_depend_on_the_row_alone(None, torch.bfloat16, "amx")


def test_bits_are_those_of_the_record() -> None:
    recorded = read_record()["digests"]
    changed = [case for case in CASES if digest_of(case, "amx") != recorded[case].get("amx")]
    assert not changed, f"the amx kernels compute other bits than recorded: {', '.join(changed)}"
