"""A made-up drafter, which drafts the tokens of a file. It is registered by a test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from chairlift.base.step_batch import StepBatch
from chairlift.core.request import Request
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.spec_decode.upkeep import Upkeep
from chairlift.executor.drafters.runner import DraftRunner
from chairlift.executor.drafters.source import DraftSource, Served


class Parrot:
    """Drafts the tokens of one known sequence, whatever the request is."""

    def __init__(self, runner: DraftRunner, tokens: Sequence[int], most: int) -> None:
        self.runner, self.most = runner, most
        self.upkeep = Upkeep()
        self.sleeps = False
        self.num_seen = 0
        self._tokens = list(tokens)

    def follow(self, out: SchedulerOutput, batch: StepBatch) -> None:
        pass

    def saw(self, hidden: Tensor, batch: StepBatch, token_ids: Sequence[int]) -> None:
        self.num_seen += len(self.runner.sample_places(batch))

    def seconds(self, num_rows: int) -> float:
        return 0.0

    def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        return [self._tokens[len(request.token_ids) :][:most] for request, most in rows]

    def forget(self, request: Request) -> None:
        pass


def load_drafts(folder: Path, served: Served) -> DraftSource:
    tokens = json.loads((folder / "tokens.json").read_text())

    def make(runner: DraftRunner, **sizes: int) -> Parrot:
        return Parrot(runner, tokens, served.most)

    return DraftSource(make=make)
