"""Public names of ``chairlift_train``, and the imports that using them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import chairlift_train as train


def test_every_name_is_there_and_no_other() -> None:
    assert sorted(train._LAZY) == sorted(train.__all__)
    assert all(getattr(train, name).__name__ == name for name in train.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Packer'"):
        _ = train.Packer


def test_planning_packs_needs_no_torch() -> None:
    code = (
        "import sys; from chairlift_train import PackCollator, PackStream, pack_indices\n"
        "packs = list(PackStream([[1, 2], [3], [4, 5, 6]], capacity=4))\n"
        "PackCollator().arrays(packs[0])\n"
        "assert sum(pack.num_tokens for pack in packs) == 6 and len(pack_indices([2, 1, 3], 4)) == 2\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-W", "error", "-c", code]).returncode == 0
