"""Main program of an engine process that shares the processors with other engines; see :mod:`.shared`."""

from __future__ import annotations

import sys

from chairlift.engine.core import EngineCore
from chairlift.engine.info import EngineInfo
from chairlift.engine.process import engine_process
from chairlift.fleet.models.turnstile.shared import SharedTurns

__all__ = ["main", "predicted_seconds"]


def main() -> None:
    """Run the engine. The arguments after those of every engine process are its slot and the inherited files."""
    slot, memory, *bells = map(int, sys.argv[4:])

    def gate(core: EngineCore, info: EngineInfo) -> SharedTurns:
        return SharedTurns(slot, memory, bells, threads=info.threads, predict=lambda: predicted_seconds(core))

    engine_process.main(gate)


def predicted_seconds(core: EngineCore) -> float:
    """Seconds that the next step takes according to the cost model."""
    batch = core.scheduler.batch
    tokens = batch.num_prefill_tokens(batch.token_budget)
    step = batch.features(len(batch.running))
    return core.costs.model.step_seconds(
        step._replace(prefill_tokens=tokens, prefill_context=tokens * (tokens + 1) / 2)
    )
