"""Compares rules for the memory of encoded images: which rows are given up when it is full.

    python benchmarks/image_room.py --json benchmarks/results/image-room.json     # simulated, five minutes

The engine is real, with simulated steps of a modelled machine and an encoder that takes a fixed time per image. The
requests have Poisson arrivals, and more KV than the cache holds, so that requests are preempted. Image memory holds a
few images. The rules:

- ``by cost``: the rule of the engine (chairlift/engine/image_room.py);
- ``keep``: rows that a request must still read are never given up;
- ``drop``: they are given up as soon as an earlier request needs the room.

The script prints the mean and p99 of the latencies, and the number of requests that never ended: with ``keep``,
requests may wait for each other. Latencies of such a run are those of the other requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from chairlift.base.image_spans import ImageSpan, ImageTile
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine import images
from chairlift.engine.clock import Clock, VirtualClock
from chairlift.engine.image_room import HeldRows, rows_to_give_up
from chairlift.engine.input_processor import InputProcessor
from chairlift.models.vision.processor import PlacedImages
from chairlift_lab.replay.machines import Deployment, deploy, shape_from_name
from chairlift_lab.replay.replay import simulated_core

ROW_BYTES = 32 << 10
"""Bytes of an encoded row: four vectors of 2,048 float32 values, as in Qwen3-VL-2B with DeepStack."""
_TEXT, _PLACEHOLDER = 1, 2


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """Load and memory of a simulated engine. Lengths are in tokens, times in seconds."""

    encode: float
    """Time to encode an image."""
    rate: float
    """Requests per second."""
    images: tuple[int, ...] = (1,)
    """Numbers of images of a request, each equally likely."""
    positions: int = 300
    """Number of prompt positions of an image."""
    room: int = 8
    """Number of images whose rows fit in memory."""
    kv_tokens: int = 4_000
    answer: tuple[int, int] = (200, 800)
    """Range of the number of output tokens."""


WORLDS = {
    "slow encoder": World(encode=0.1, rate=2.0),
    "fast encoder": World(encode=0.01, rate=2.0),
    "several images": World(encode=0.05, rate=1.0, images=(1, 2, 4), room=5),
}


class Encoder:
    """Image memory whose encoder takes ``seconds`` per image on the engine's clock, in pieces of 5 ms."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._pieces = clock, max(1, round(seconds / 0.005))
        self._seconds = seconds / self._pieces
        self._keys: set[bytes] = set()

    def encode(self, tile: ImageTile) -> Iterator[None]:
        """Advance the clock piece by piece, then store the tile's key."""
        for _ in range(self._pieces):
            self._clock.wait_until(self._clock.now() + self._seconds)
            yield
        self._keys.add(tile.key)

    def rest(self) -> None:
        """Do nothing: there are no threads."""

    def holds(self, key: bytes) -> bool:
        return key in self._keys

    def nbytes(self, num_rows: int) -> int:
        return num_rows * ROW_BYTES

    def drop(self, key: bytes) -> None:
        self._keys.remove(key)


Rule = Callable[[Iterable[HeldRows], int, float, int, Callable[[int], float]], list[bytes]]


def _keep(
    held: Iterable[HeldRows], lack: int, waited: float, num_requests: int, seconds: Callable[[int], float]
) -> list[bytes]:
    return rows_to_give_up((rows for rows in held if not rows.is_needed), lack, waited, num_requests, seconds)


def _drop(
    held: Iterable[HeldRows], lack: int, waited: float, num_requests: int, seconds: Callable[[int], float]
) -> list[bytes]:
    return rows_to_give_up(held, lack, waited, 0, seconds)


RULES: dict[str, Rule] = {"by cost": rows_to_give_up, "keep": _keep, "drop": _drop}


def run(world: World, deployment: Deployment, count: int, seed: int) -> dict[str, Any]:
    """Serve ``count`` requests of a world. Returns latencies in seconds, and counters."""
    config = EngineConfig.from_flat(
        {
            "num_kv_blocks": world.kv_tokens // 16 + 1,
            "block_size": 16,
            "max_num_seqs": 32,
            "preemption_mode": "recompute",
            "swap_space_bytes": 0,
            "admission_watermark": 0.0,
            "max_model_len": 4096,
        }
    )
    clock = VirtualClock()
    core, limits = simulated_core(deployment, config, clock, images=Encoder(clock, world.encode))
    core.preparers.images.limit = world.room * world.positions * ROW_BYTES
    inputs, rng = InputProcessor(limits, None, core.kv, seed=0), np.random.default_rng(seed)
    arrivals, latencies = dict[str, float](), list[float]()
    times = np.cumsum(rng.exponential(1 / world.rate, count)).tolist()
    numbers, answers = rng.choice(world.images, count).tolist(), rng.integers(*world.answer, count).tolist()
    while core.has_work or len(arrivals) < count:
        while len(arrivals) < count and times[len(arrivals)] <= core.clock.now():
            index = len(arrivals)
            prompt, placed = _prompt(index, numbers[index], world.positions)
            params = SamplingParams(temperature=0.0, max_tokens=answers[index], ignore_eos=True, seed=0)
            core.add(inputs.prepare(str(index), prompt, params, times[index], images=placed))
            arrivals[str(index)] = times[index]
        began = core.clock.now()
        outputs = core.step() if core.has_work else None
        if outputs is not None:
            latencies += [core.clock.now() - arrivals[each.sequence_id] for each in outputs.finished]
        elif not core.num_in_flight and core.clock.now() == began and not core.preparers.images.is_encoding:
            if len(arrivals) == count:
                break  # the requests that are left wait for each other
            core.clock.wait_until(times[len(arrivals)])
    mean, p99 = float(np.mean(latencies)), float(np.percentile(latencies, 99))
    return {
        "mean": mean,
        "p99": p99,
        "unfinished": count - len(latencies),
        "preemptions": core.scheduler.num_preemptions,
        "given_up": core.preparers.images.num_given_up,
        "encoded_again": core.preparers.images.num_reencoded,
    }


def _prompt(index: int, num_images: int, positions: int) -> tuple[list[int], PlacedImages]:
    """Prompt with 20 tokens of text around each of its images, which no other prompt has."""
    prompt, spans = [3 + index] * 20, list[ImageSpan]()
    for number in range(num_images):
        key = hashlib.sha256(f"{index} {number}".encode()).digest()
        spans.append(ImageSpan(len(prompt), positions, key))
        prompt += [_PLACEHOLDER] * positions + [_TEXT] * 20
    return prompt, PlacedImages(tuple(spans), tuple(ImageTile(span.key, b"") for span in spans))


def main() -> None:
    """Read the command line, run all worlds with all rules, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="genoa-9654")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--count", type=int, default=150, help="number of requests")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    deployment = deploy(given.machine, shape_from_name(given.model))
    report: dict[str, Any] = {"machine": given.machine, "model": given.model, "count": given.count}
    names = ("mean", "p99", "unfinished", "preemptions", "given_up", "encoded_again")
    print(f"{'world':16} {'seed':>4} {'rule':8}" + "".join(f"{name:>14}" for name in names))
    for name in given.worlds:
        for seed in range(given.seeds):
            for rule in RULES:
                with patch.object(images, "rows_to_give_up", RULES[rule]):
                    found = run(WORLDS[name], deployment, given.count, seed)
                report[f"{name}, seed {seed}, {rule}"] = found
                shown = "".join(f"{found[each]:14.2f}" if each in names[:2] else f"{found[each]:14}" for each in names)
                print(f"{name:16} {seed:4} {rule:8}{shown}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
