"""The inner loops of the kernels in their machine code: ``python -m tests.kernels.cpu.inner_loops OBJDUMP OBJECT...``
prints how many instructions each needs per multiply-add.

A loop is what lies between a jump backwards and its target. Of the loops of a function that have as many multiply-add
instructions as one pass needs, the inner loop is the shortest.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["INNER_LOOPS", "InnerLoop", "inner_loops"]


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


class Kind(NamedTuple):
    """A kind of inner loop. ``function`` matches the name of its function, with groups for rows and groups of columns.
    ``products`` is the number of multiply-adds of one pass, per row and group of sixteen columns, and ``names`` are the
    instructions that compute them, on ARM64 and with AVX2."""

    function: str
    products: int
    names: tuple[str, ...]


_FLOATS, _BYTES, _PAIRS = ("fmla", "vfmadd231ps"), ("sdot", "usmmla", "vpmaddubsw"), ("sdot", "usmmla", "vpmaddwd")
_CODES = r"(?:code_product_of|product_of_row_pairs)<\w+::Code<%d, \(\w+::Meaning\)%d>, (\d+)(?:, (\d+))?>"
INNER_LOOPS = {
    "float32": Kind(r"product_of<float, float, (\d+), (\d+), \(\w+::Layout\)0, ", 16, _FLOATS),
    "bf16": Kind(r"product_of<\w+::bf16, \w+::bf16, (\d+), (\d+), \(\w+::Layout\)0, ", 32, _FLOATS),
    "codes of 8 bits": Kind(_CODES % (8, 0), 512, _PAIRS),
    "codes of 4 bits": Kind(_CODES % (4, 0), 512, _BYTES),
    "MXFP4": Kind(_CODES % (4, 2), 512, _BYTES),
    "8-bit KV": Kind(r"product_of_codes<(\d+), \w+, .*::score_codes<", 64, ("smlal", "smlal2", "vpmaddwd")),
}

PRODUCTS = {
    "fmla": 4,
    "sdot": 16,
    "smlal": 4,
    "smlal2": 4,
    "usmmla": 32,
    "vfmadd231ps": 8,
    "vpmaddubsw": 32,
    "vpmaddwd": 16,
}
"""Name of a multiply-add instruction -> number of multiply-adds."""


class InnerLoop(NamedTuple):
    kind: str
    rows: int
    groups: int
    instructions: tuple[Instruction, ...]

    @property
    def products(self) -> int:
        """Number of multiply-adds of one pass."""
        return INNER_LOOPS[self.kind].products * self.rows * self.groups

    def count(self, name: str) -> int:
        """Number of instructions whose name matches."""
        return sum(re.fullmatch(name, each.name) is not None for each in self.instructions)


def inner_loops(objdump: str, objects: Sequence[Path]) -> list[InnerLoop]:
    """The inner loops of the kinds in :data:`INNER_LOOPS`, sorted by kind, groups and rows."""
    found: dict[tuple[str, int, int], InnerLoop] = {}
    for path in objects:
        for name, instructions in _functions(objdump, path):
            for kind, what in INNER_LOOPS.items():
                if match := re.search(what.function, name):
                    rows, groups = (int(each or 1) for each in (*match.groups(), "1")[:2])
                    multiplied = rows + rows % 2 if "row_pairs" in name else rows  # an odd row is multiplied twice
                    if loop := _inner(instructions, what.products * multiplied * groups, what.names):
                        found.setdefault((kind, groups, rows), InnerLoop(kind, rows, groups, loop))
    return [found[key] for key in sorted(found, key=lambda key: (list(INNER_LOOPS).index(key[0]), *key[1:]))]


def _functions(objdump: str, path: Path) -> Iterator[tuple[str, list[Instruction]]]:
    command = [objdump, "-dC", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for block in text.split("\n\n"):
        title = re.search(r"^[0-9a-f]+ <(.*)>:$", block, re.MULTILINE)
        if title and "product_of" in title[1]:
            lines = re.findall(r"^\s+([0-9a-f]+):\s+(\S+)[ \t]*(.*)$", block, re.MULTILINE)
            yield title[1], [Instruction(int(address, 16), name, rest) for address, name, rest in lines]


def _inner(instructions: list[Instruction], products: int, names: Sequence[str]) -> tuple[Instruction, ...]:
    places = {each.address: i for i, each in enumerate(instructions)}
    loops = []
    for i, (address, name, operands) in enumerate(instructions):
        target = re.search(r"\b([0-9a-f]+) <", operands)
        if target and re.match(r"b$|b\.|cb|tb|j", name) and int(target[1], 16) <= address:
            loop = instructions[places.get(int(target[1], 16), i) : i + 1]
            if sum(PRODUCTS[each.name] for each in loop if each.name in names) == products:
                loops.append(tuple(each for each in loop if each.name != "nop"))
    return min(loops, key=len, default=())


def main() -> None:
    objdump, *objects = sys.argv[1:]
    for loop in inner_loops(objdump, [Path(each) for each in objects]):
        per = len(loop.instructions) / loop.products
        size = f"{loop.rows} rows, {16 * loop.groups} columns"
        print(f"{loop.kind:16} {size:19} {len(loop.instructions):4} instructions, {per:.3f} per multiply-add")


if __name__ == "__main__":
    main()
