from __future__ import annotations

import dataclasses

from chairlift.kernels.roof import Roof
from chairlift_lab.bench.kernel_report import doubts, limits_record, limits_table
from chairlift_lab.bench.limits import Limits, Peak, Rate
from chairlift_lab.bench.machine import HostMachine, machine_facts
from chairlift_lab.bench.report import Facts, Table, Text, text

MACHINE = HostMachine("AMD EPYC", ("avx2",) * 13, 64, 32 << 20, 1 << 34, "Linux 6, Python 3.11", ("avx2",), 0.02)
LIMITS = Limits(
    1 << 28,
    {1: Rate(2.5e10, 2e10), 64: Rate(4e11, 3.94e11)},
    (Peak("avx512_bf16", "bf16", 64, Rate(3.2e13, 3e13)), Peak("amx", "int8", 64, Rate(3e14, 2e14))),
)


def test_columns_of_a_table_are_aligned() -> None:
    table = Table(["name", "us"], [["a", "1.5"], ["longer", "1,000.0"]], "Times")
    assert list(text(Facts({"cpu": "two\ncores"}), table, Text("all"))) == [
        "cpu            two",
        "               cores",
        "",
        "Times",
        "name         us",
        "a           1.5",
        "longer  1,000.0",
        "",
        "all",
    ]


def test_limits_are_printed_and_recorded() -> None:
    record = limits_record(LIMITS)
    lines = list(text(limits_table(record)))
    assert lines[0].split() == ["limit", "threads", "best", "median"]
    assert lines[2].split()[-3:] == ["64", "400.0", "394.0"]
    assert lines[3].split() == ["avx512_bf16", "bf16", "products,", "TFLOP/s", "64", "32.00", "30.00"]
    assert lines[4].split()[2:] == ["products,", "TOP/s", "64", "300.00", "200.00"]
    assert max(len(line) for line in [*lines, *text(Facts(machine_facts(dataclasses.asdict(MACHINE))))]) <= 130
    assert record["read_bytes"][1] == {"threads": 64, "best": 4e11, "median": 3.94e11}
    assert record["product_operations"][0] == {
        "isa": "avx512_bf16",
        "product": "bf16",
        "threads": 64,
        "best": 3.2e13,
        "median": 3e13,
    }


def test_a_machine_that_was_not_idle_is_doubted() -> None:
    roof = Roof(1e10, 1e12)
    busy = dataclasses.replace(MACHINE, busy=0.3)
    for followed in (False, True):
        assert len(list(doubts(MACHINE, roof, Roof(0.95e10, 1.05e12), followed=followed))) == 1
        for change in (Roof(0.8e10, 1e12), Roof(1.2e10, 1e12), Roof(1e10, 0.8e12)):
            said = " ".join(doubts(MACHINE, roof, change, followed=followed))
            follows = followed and change.peak == roof.peak
            assert ("not reliable" in said) != follows
            assert ("shares refer to the limit at their time" in said) == follows
        assert "30% busy" in " ".join(doubts(busy, roof, roof, followed=followed))
