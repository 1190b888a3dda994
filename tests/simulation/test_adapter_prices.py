"""The simulated machine charges adapters, the engine learns their price, and its forecasts are better for it."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig, LoRAConfig
from chairlift.core.scheduler import forecast
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.engine.adapters import AdapterLoad, Adapters
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.step_log import StepRecord
from chairlift_lab.replay.replay import simulated_core
from tests.simulation.test_replay import STEP, deployment

MACHINE = dataclasses.replace(STEP, adapter_byte_seconds=4e-10)
NUM_ADAPTERS, ADAPTER_BYTES = 12, 20 << 20


class _Held(NamedTuple):
    nbytes: int
    digest: str = ""


class _Memory:
    """Adapters of which only the size matters."""

    def read(self, path: Path, root: Path | None) -> _Held:
        return _Held(ADAPTER_BYTES)

    def put(self, adapter_id: int, adapter: _Held) -> None: ...

    def drop(self, adapter_id: int) -> None: ...


def make_core() -> EngineCore:
    adapters = Adapters(_Memory(), LoRAConfig(enable_lora=True, max_loras=8, max_cpu_loras=NUM_ADAPTERS))
    config = EngineConfig.from_flat({"max_num_seqs": 8, "max_num_batched_tokens": 256})
    core, _ = simulated_core(deployment(MACHINE), config, adapters=adapters)
    for number in range(1, NUM_ADAPTERS + 1):
        adapters.load_now(AdapterLoad(number, str(number), str(number)))
    return core


def add(core: EngineCore, name: str, adapter: int, rng: random.Random) -> None:
    params = SamplingParams(max_tokens=rng.randint(4, 24), temperature=0.0, ignore_eos=True)
    prompt = [rng.randrange(10, 1000) for _ in range(rng.randint(8, 60))]
    core.add(
        PreparedRequest(
            name, None, prompt, params, seed=0, max_tokens=params.max_tokens or 1, arrival_time=core.clock.now(),
            adapter_id=adapter,
        )
    )  # fmt: skip


class _Errors:
    """Subscriber to steps: relative errors of their predictions, made before the engine learnt from them."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.found, self._last_end = core, list[float](), 0.0

    def landed(self, record: StepRecord) -> None:
        seconds = record.end - max(record.start, self._last_end)
        self._last_end = record.end
        self.found.append(abs(self.core.costs.model.step_seconds(record.features) / seconds - 1))


def simulate() -> tuple[float, float]:
    """Mean error of the steps' predictions, and that of the forecast starts of a queue as a share of its length.

    First one adapter is in use, then none, then many at once: a mean over all of them is right for nobody.
    """
    core, rng = make_core(), random.Random(5)
    errors = _Errors(core)
    core.events.subscribe("errors", errors)
    for turn in range(60):
        adapters = [[1], [0], list(range(1, NUM_ADAPTERS + 1))][turn % 3]
        for number in range(5):
            add(core, f"{turn}.{number}", rng.choice(adapters), rng)
        while core.has_work:
            core.step()
    first = len(errors.found) // 3
    mean = sum(errors.found[first:]) / len(errors.found[first:])
    queue = [f"queued{number}" for number in range(60)]
    for number, name in enumerate(queue):
        add(core, name, 1 + number % NUM_ADAPTERS, rng)
    began = core.clock.now()
    seen = {}
    for found in forecast.foresee(core.scheduler, core.costs.wall_seconds, _Exact(), began, {}):  # type: ignore[arg-type]
        seen = {} if found is None else found.starts
    starts: dict[str, float] = {}
    while core.has_work:
        before = set(core.scheduler.running)
        at = core.clock.now()
        core.step()
        starts |= {name: at for name in set(core.scheduler.running) - before if name not in starts}
    late = [name for name in queue if name in starts and starts[name] > began]
    assert len(late) > 40
    off = sum(abs(seen[name] - starts[name]) for name in late) / len(late)
    return mean, off / (max(starts.values()) - began)


class _Exact:
    """Answer lengths that are known, so that only the time of steps is forecast."""

    def expected(self, request: Any) -> int:
        return int(request.max_total_tokens - request.num_prompt_tokens)


def test_forecasts_include_the_time_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    with_price, forecast_with = simulate()
    features = StepRecord.features.fget

    def blind(record: StepRecord) -> StepFeatures:
        return features(record)._replace(adapter_bytes=0.0)

    monkeypatch.setattr(StepRecord, "features", property(blind))
    monkeypatch.setattr(forecast, "_seconds", lambda seconds, out: seconds(
        StepFeatures.of(out.num_decodes, out.context_tokens, out.chunks)))  # fmt: skip
    without, forecast_without = simulate()
    print(f"errors of steps {with_price:.4f} and {without:.4f}, of starts {forecast_with:.4f}, {forecast_without:.4f}")
    assert with_price < without / 4
    assert forecast_with < forecast_without / 2


def test_the_simulated_machine_reads_adapters() -> None:
    """A step with two adapters takes the time of two adapters longer, whoever has how many rows."""

    def seconds(adapters: tuple[int, ...]) -> float:
        core, rng = make_core(), random.Random(3)
        for number, adapter in enumerate(adapters):
            add(core, str(number), adapter, rng)
        core.step()
        return core.clock.now()

    plain = seconds((0, 0, 0))
    price = MACHINE.adapter_byte_seconds * ADAPTER_BYTES
    assert seconds((1, 1, 0)) - plain == pytest.approx(price)
    assert seconds((1, 2, 1)) - plain == pytest.approx(2 * price)
