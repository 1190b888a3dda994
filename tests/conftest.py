"""Settings for all tests: how many seeds each test tries, one thread, and no time limit for generated examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import network_guard

network_guard.install()

# Other processes may use the machine, so the duration of an example says nothing.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=None, help="simulation seeds to run (500; nightly: 100,000)")
    parser.addoption("--first-seed", type=int, default=0, help="the first of them")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread in this process and in child processes, because for tiny matrices several threads lose more time
    by waiting for each other than they save."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
