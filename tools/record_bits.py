"""Compares the bits of the CPU kernels with the record, and renews it.

    python tools/record_bits.py                                        compare
    python tools/record_bits.py --epoch 2 --why "k in two slices"      renew

The record is tests/kernels/cpu/bits.json. A case or an instruction set that it does not have yet is added to the
present epoch. Digests that changed are written only with ``--epoch``, one more than the present epoch, and a reason.
An instruction set that this processor cannot run keeps its digests. If their case has changed in a new epoch, they
are removed, and the tests fail until they have been computed. ``--emulate-tiles`` computes the AMX path on a processor
without tiles: it compiles the path with g++, which takes minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chairlift.kernels.cpu.library import ISA_NAMES, supported_isas
from tests.kernels.cpu.bit_cases import CASES, RECORD, Record, digest_of, read_record
from tests.kernels.cpu.emulated_tiles import emulated_tiles

Digests = dict[str, dict[str, str]]
"""Case -> instruction set -> digest."""


def computed(emulate: bool) -> Digests:
    """Digests of all sets that can be computed here, with AMX by emulation if ``emulate``."""
    found: Digests = {case: {isa: digest_of(case, isa) for isa in supported_isas()} for case in CASES}
    if emulate and "amx" not in supported_isas():
        with contextlib.ExitStack() as stack:
            stack.enter_context(emulated_tiles(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
            for case, digests in found.items():
                digests["amx"] = digest_of(case, "amx")
    return found


def changes(recorded: Digests, found: Digests) -> list[str]:
    """Cases of the record that are gone, or whose digest differs for a set that was computed."""
    gone = [case for case in recorded if case not in found]
    return gone + [
        case
        for case, digests in found.items()
        if any(recorded.get(case, {}).get(isa, digest) != digest for isa, digest in digests.items())
    ]


def renewed(record: Record, found: Digests, epoch: int, why: str) -> Record:
    """The record with new digests."""
    changed = set(changes(record["digests"], found))
    digests: Digests = {}
    for case, new in found.items():
        kept = {} if case in changed else record["digests"].get(case, {})
        both = kept | new
        digests[case] = {isa: both[isa] for isa in ISA_NAMES if isa in both}
    epochs = record["epochs"] | ({str(epoch): why} if epoch != record["epoch"] else {})
    return {"epoch": epoch, "epochs": epochs, "digests": digests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epoch", type=int, help="number of the new epoch")
    parser.add_argument("--why", default="", help="why the bits change, in a sentence")
    parser.add_argument("--emulate-tiles", action="store_true", help="compute the AMX path without such a processor")
    args = parser.parse_args()
    if not supported_isas():
        raise SystemExit("the CPU kernels are missing or cannot run here; build them first")
    record = read_record() if RECORD.exists() else {"epoch": 0, "epochs": {}, "digests": {}}
    found = computed(args.emulate_tiles)
    changed = changes(record["digests"], found)
    epoch = args.epoch or record["epoch"]
    if (changed or args.epoch or not record["epoch"]) and (args.epoch != record["epoch"] + 1 or not args.why):
        raise SystemExit(
            f"{len(changed)} cases differ from epoch {record['epoch']}: {', '.join(changed) or 'none'}; if this is on "
            f'purpose, give --epoch {record["epoch"] + 1} --why "..."'
        )
    new = renewed(record, found, epoch, args.why)
    missing = sorted({isa for digests in new["digests"].values() for isa in ISA_NAMES if isa not in digests})
    RECORD.write_text(json.dumps(new, indent=1) + "\n")
    print(
        f"epoch {epoch}: {len(found)} cases, {len(changed)} changed; computed: {', '.join(next(iter(found.values())))}"
    )
    if missing:
        print(f"no digest of some case for {', '.join(missing)}: run this on a machine that can compute it")


if __name__ == "__main__":
    main()
