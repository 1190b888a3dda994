"""The training service of one server: its runs, sessions, samplers and checkpoints, and the work in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Final

from chairlift_train.service.log.records import CheckpointRecord
from chairlift_train.service.runs import TrainingRuns
from chairlift_train.service.samplers import SampleEngine, Samplers
from chairlift_train.service.sessions import Sessions

__all__ = ["TrainingService"]

_log: Final = logging.getLogger(__name__)
_TICK_SECONDS: Final = 2.0


class TrainingService:
    """Everything that the endpoints use. ``model_names`` are the names of the model for clients; ``max_context`` is its
    maximum number of tokens, ``tokenizer_id`` where clients find its tokenizer, ``arch`` its architecture. With
    ``follow``, running samples of the kind ``inflight`` go on with newer weights."""

    def __init__(
        self,
        runs: TrainingRuns,
        engine: SampleEngine,
        *,
        model_names: Sequence[str],
        max_context: int,
        tokenizer_id: str,
        arch: str,
        follow: bool = False,
    ) -> None:
        self.runs = runs
        self.samplers = Samplers(engine, runs.progress, follow=follow)
        runs.publish = self.samplers.publish
        self.sessions = Sessions(runs, self.samplers.forget)
        self.model_names = runs.model_names = tuple(model_names)
        self.max_context = max_context
        self.tokenizer_id = tokenizer_id
        self.arch = arch

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager: take up the runs of the log, and do their work while the block runs. Closes the log at the
        end."""
        tasks = []
        try:
            await self.sessions.restore()
            tasks = [asyncio.create_task(self._work(), name="training"), asyncio.create_task(self._tick())]
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.samplers.close()
            await asyncio.to_thread(self.runs.log.close)

    async def _work(self) -> None:
        self.runs.trouble = "the server takes up its training runs"
        await self.runs.again()
        while True:
            try:
                await self.runs.work()
            except Exception:
                _log.exception("the training service made a mistake; it takes up its runs again")
                await self.runs.again()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                await self.tick()
            except Exception:
                _log.exception("ended training sessions were not cleaned up; they are looked at again")

    async def tick(self) -> None:
        """End what is over: silent sessions, calls that wait for one that never came, expired checkpoints, and results
        that nobody needs."""
        await self.runs.end_gaps()
        await self.sessions.end_silent()
        await self.runs.drop_results()
        await self.runs.measure(len(self.sessions))
        now = self.runs.wall_clock()
        for checkpoint in await self.runs.log(lambda log: log.checkpoints("expires_at <= ?", now)):
            await self.delete_checkpoint(checkpoint)

    async def delete_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Forget a checkpoint, then delete its files. Models and samplers that have loaded it keep their weights."""
        await self.runs.log(lambda log: log.remove_checkpoint(checkpoint))
        directory = self.runs.places.checkpoint(checkpoint.model_id, checkpoint.kind, checkpoint.name)
        await asyncio.to_thread(self.runs.places.remove, directory)
