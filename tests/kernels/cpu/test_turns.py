"""Work handed out to threads: every number once, whoever is late, and half of a share to its own thread."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.cpu.emulated_tiles import SOURCES

PROGRAM = r"""
#include <stdio.h>
#include <unistd.h>
#include <memory>
#include <vector>
#include "pool.h"

// What the threads of one run share. Threads of a number that the round picks are late.
struct Rounds {
  cl_pool& pool;
  std::unique_ptr<std::atomic<int>[]> given{new std::atomic<int>[64]()};
  std::atomic<int> wrong{0};
};

static void many_rounds(void* argument, int thread) {
  Rounds& all = *static_cast<Rounds*>(argument);
  for (int round = 0; round < 600; round++) {
    const int items = round * 7 % 41;
    if (round % 5 == thread) usleep(50);
    Turns turns(all.pool, thread, items, round % 2 ? Turns::SPREAD : Turns::CONTIGUOUS);
    const bool alone = all.pool.num_threads() == 1;
    for (;;) {
      const int64_t next = turns.peek(), item = turns.take();
      if (alone && next != item) all.wrong++;
      if (item == items) break;
      all.given[item]++;
    }
    all.pool.barrier(thread);
    if (thread == 0)
      for (int item = 0; item < 64; item++)
        if (all.given[item].exchange(0) != (item < items)) all.wrong++;
    all.pool.barrier(thread);
  }
}

// Thread 1 does not return from its first number until thread 0 has done all that it may. Prints how many each did.
struct Late {
  cl_pool pool{2, false};
  std::atomic<int> done[2] = {};
  std::atomic<bool> over{false};
};

static void late(void* argument, int thread) {
  Late& all = *static_cast<Late*>(argument);
  Turns turns(all.pool, thread, 40, Turns::CONTIGUOUS);
  const int64_t first = turns.take();
  for (int64_t item = first; item < 40; item = turns.take()) {
    all.done[thread]++;
    if (item != first) continue;
    for (int look = 0; look < 10000 && !(thread == 0 ? all.done[1] > 0 : all.over.load()); look++) usleep(1000);
  }
  if (thread == 0) all.over = true;
}

int main() {
  for (int threads : {1, 2, 3, 8}) {
    cl_pool pool(threads, false);
    Rounds all{pool};
    pool.run(many_rounds, &all);
    pool.run(many_rounds, &all);
    printf("%d\n", all.wrong.load());
  }
  Late two;
  two.pool.run(late, &two);
  printf("%d %d\n", two.done[0].load(), two.done[1].load());
  cl_pool three(3, false);
  Turns turns(three, 0, 30, Turns::CONTIGUOUS);
  for (int item : {0, 4, 9, 10, 29}) printf("%ld ", long(turns.left(item)));
}
"""


@pytest.fixture(scope="module", params=[(), ("-DCL_ANY_SYSTEM",)], ids=["linux", "any system"])
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Output of the program, with the functions of system/linux.h and with those for other systems."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the threads with")
    folder: Path = tmp_path_factory.mktemp("turns")
    (folder / "turns.cpp").write_text(PROGRAM)
    command = [compiler, "-std=c++17", "-O2", "-pthread", f"-I{SOURCES}", str(folder / "turns.cpp")]
    command += [*request.param, *(str(SOURCES / f"{name}.cpp") for name in ("pool", "memory", "system"))]
    command += ["-o", str(folder / "turns")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    program = [str(folder / "turns")]
    return subprocess.run(program, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()


def test_every_number_is_given_once_in_every_round(printed: list[str]) -> None:
    assert printed[:4] == ["0"] * 4


def test_work_left_by_a_late_thread_goes_to_the_other_except_its_own_part(printed: list[str]) -> None:
    """A half of its half is its own, of which it has one."""
    assert printed[4] == "30 10"


def test_a_thread_judges_the_remaining_work_by_its_own_share(printed: list[str]) -> None:
    assert printed[5].split() == ["30", "18", "3", "30", "3"]
