"""One thread for most tests: torch's thread barriers are slow where other programs compete for the cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(one_thread: None) -> None:
    """Two, where the question is whether splitting work over threads changes a bit."""
    torch.set_num_threads(2)
