from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

from chairlift.fleet.node import addresses_of, is_open
from chairlift_train.parallel import _local_store, _on_loopback
from tests.free_port import free_port

ENDS: Final = """
import os, torch
from chairlift_train.parallel import process_group, sum_gradients

def threads():
    return {open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")}

with process_group():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    sum_gradients(list(model.parameters()))
    torch.optim.AdamW(model.parameters()).step()
    within = threads()
print(sum("gloo" in name for name in within) > 0, sum("gloo" in name for name in threads()))
"""


@pytest.mark.full
def test_nothing_is_left_of_a_process_group() -> None:
    where = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    where["MASTER_PORT"] = str(free_port())
    both = [
        subprocess.Popen([sys.executable, "-c", ENDS], env=where | {"RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    assert [process.communicate(timeout=300)[0].split() for process in both] == [["True", "0"]] * 2


LISTENS: Final = """
import os
from torch import distributed
from chairlift.fleet.node import addresses_of
from chairlift_train.parallel import process_group
with process_group():
    print(*addresses_of(os.getpid()))
    distributed.barrier()
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="/proc needs Linux")
def test_processes_on_one_machine_listen_on_the_loopback_address_only() -> None:
    """The store obeys everybody who can reach it."""
    store = _local_store(2)
    own = [address for address in addresses_of(os.getpid()) if address.endswith(f":{store.port}")]
    assert own == [f"127.0.0.1:{store.port}"]
    where = _on_loopback() | os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    where |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    both = [
        subprocess.Popen([sys.executable, "-c", LISTENS], env=where | {"RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    for process in both:
        addresses = process.communicate(timeout=300)[0].split()
        assert addresses and not list(filter(is_open, addresses))
