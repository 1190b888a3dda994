"""Figures of ``bench serve`` equal those of a witness between client and server."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from chairlift.cli.main import main
from tests.e2e.server_process import ServerProcess
from tests.lab.bench.witness import witnessing

pytestmark = pytest.mark.full

AGREED = 0.03


def disagreement(tmp_path: Path, model: str, *flags: str) -> tuple[float, float, int]:
    """How far client and witness are apart on TTFT and TPOT, median over the requests; and how many there were."""
    out = tmp_path / "serve.json"
    with ServerProcess(model, "--max-num-seqs", "4") as server, witnessing(server.port) as witness:
        command = ["bench", "serve", "--url", witness.url, "--ignore-eos", "--json", str(out), *flags]
        assert main([*command, "--num-warmups", "2"]) == 0
        seen = witness.sightings()
    record = json.loads(out.read_text())
    seen = [each for each in seen if each.request.startswith(b"POST ")]  # metrics are read before and after
    seen = sorted(seen[-record["num_prompts"] :], key=lambda each: each.lengths)
    said = sorted(zip(record["input_lens"], record["output_lens"], range(len(seen)), strict=True))
    ttfts, tpots = [], []
    for (read, asked, index), sighting in zip(said, seen, strict=True):  # nearly all pairs of lengths are different
        assert sighting.lengths == (read, asked)
        ttfts.append(abs(record["ttfts"][index] / sighting.ttft - 1))
        tpots.append(abs(sum(record["itls"][index]) / (asked - 1) / sighting.tpot - 1))
    return statistics.median(ttfts), statistics.median(tpots), len(seen)


def test_an_independent_witness_agrees(tmp_path: Path) -> None:
    flags = ("--input-len", "uniform:16:64", "--output-len", "uniform:8:16", "--request-rate", "14")
    ttft, tpot, count = disagreement(tmp_path, "hashlm:30ms", "--num-prompts", "20", *flags)
    assert count == 20
    assert ttft < AGREED
    assert tpot < AGREED


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "load"),
    [
        ("hashlm:20ms", "--request-rate=4"),
        ("hashlm:20ms", "--request-rate=30"),
        ("hashlm:50ms", "--request-rate=1"),  # nobody waits for a place: 3 % are two milliseconds
        ("hashlm:50ms", "--request-rate=4"),
        ("hashlm:50ms", "--request-rate=30"),
        # This one is as fast as the machine. Alone, its first token comes after a few milliseconds, and 3 % of that is
        # less than waking up both ends of a connection takes. With more users than places a wait is many steps long.
        ("bundled", "--max-concurrency=16"),
        ("bundled", "--max-concurrency=32"),
    ],
)
def test_a_witness_agrees_at_every_load(tmp_path: Path, model: str, load: str) -> None:
    flags = ("--input-len", "uniform:400:900", "--output-len", "uniform:16:64", load)
    ttft, tpot, count = disagreement(tmp_path, model, "--num-prompts", "64", *flags)
    assert count == 64
    assert ttft < AGREED
    assert tpot < AGREED
