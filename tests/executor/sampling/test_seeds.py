from __future__ import annotations

import subprocess
import sys

import pytest

from chairlift.base import seeds
from chairlift.base.seeds import sample_seed

PINNED = [12035550249420947055, 12935080325729570654, 6332618229526065668, 17099427627622095284]


def test_mixing_function_is_splitmix64() -> None:
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        outputs.append(seeds._mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_seeds_of_answers_have_their_pinned_values() -> None:
    """Changing these changes the text of every seeded request."""
    assert [sample_seed(0, 0), sample_seed(0, 1), sample_seed(42, 0), sample_seed(-1, 3)] == PINNED


def test_every_answer_gets_its_own_seed() -> None:
    found = {sample_seed(seed, index) for seed in range(-50, 50) for index in range(16)}
    assert len(found) == 100 * 16
    assert all(0 <= seed < 2**64 for seed in found)


def test_seed_is_taken_modulo_2_64() -> None:
    assert sample_seed(-5, 2) == sample_seed(2**64 - 5, 2)


def test_negative_index_is_refused() -> None:
    with pytest.raises(ValueError, match="sample_index is -1"):
        sample_seed(0, -1)


def test_seeds_need_no_torch() -> None:
    code = "import sys, chairlift.base.seeds; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
