"""The kernels compute the bits that are recorded in bits.json.

Equal bits in any company do not say that bits stay as they are. The record does: a change of a kernel that changes
bits must begin a new epoch on purpose, with ``tools/record_bits.py``.
"""

from __future__ import annotations

import pytest
import torch

from chairlift.kernels.cpu.library import ISA_NAMES, supported_isas
from tests.kernels.cpu.bit_cases import CASES, digest_of, numbers, read_record

pytestmark = pytest.mark.usefixtures("native_library")
RECORD = read_record()


@pytest.mark.parametrize("isa", ISA_NAMES)
def test_kernels_compute_the_recorded_bits(isa: str) -> None:
    if isa not in supported_isas():
        pytest.skip(f"this processor or this build cannot run {isa}")
    changed = {case for case in CASES if digest_of(case, isa) != RECORD["digests"].get(case, {}).get(isa)}
    assert not changed, f"{isa} computes other bits than in epoch {RECORD['epoch']}: {sorted(changed)}"


def test_record_has_every_case_and_instruction_set() -> None:
    assert list(RECORD["digests"]) == list(CASES)
    missing = {case for case, digests in RECORD["digests"].items() if list(digests) != list(ISA_NAMES)}
    assert not missing, f"run tools/record_bits.py on processors with the sets that these lack: {sorted(missing)}"


def test_vnni_changes_no_bit() -> None:
    """Sums of integers are exact, so an instruction that adds more of them at once gives the same numbers."""
    assert all(digests["avx512_vnni"] == digests["avx512"] for digests in RECORD["digests"].values())


def test_record_says_why_each_epoch_began() -> None:
    assert [*RECORD["epochs"]] == [str(number) for number in range(1, RECORD["epoch"] + 1)]
    assert all(RECORD["epochs"].values())


def test_inputs_are_the_same_numbers_everywhere() -> None:
    """Written out, so that a change of the inputs is not taken for a change of the kernels."""
    assert numbers(1, 4).tolist() == [0.019134521484375, -0.016292572021484375, -1.22308349609375, 0.1103668212890625]
    assert numbers(2, 2, dtype=torch.bfloat16).tolist() == [-0.12158203125, 0.0135498046875]


@pytest.mark.parametrize("seed", [1, 2])
def test_inputs_make_sums_depend_on_their_order(seed: int) -> None:
    """If sums were exact, the digests would not notice another order."""
    x, weight = numbers(seed, 64, 600).bfloat16().float(), numbers(seed + 1, 64, 600).bfloat16().float()
    terms = x * weight
    forwards, backwards = torch.zeros(64), torch.zeros(64)
    for k in range(600):
        forwards += terms[:, k]
        backwards += terms[:, 599 - k]
    assert (forwards != backwards).float().mean() > 0.5
