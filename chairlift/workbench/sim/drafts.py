"""Scripted drafts: right, wrong at some place, too many, stale, or with tokens that end an answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from chairlift.request import Request
from chairlift.scheduler.cost_model import StepFeatures
from chairlift.workbench.sim.world import EOS, VOCAB_SIZE

__all__ = ["ScriptedDrafts"]

_KINDS = ("none", "none", "right", "right", "wrong", "partly", "ends", "stale", "many")


class ScriptedDrafts:
    """Drafts for requests with known answers. The drafts at a position depend on the seed alone.

    Args:
        seed: Seed of the world.
        answer_of: Tokens of a request's answer; None if they are unknown.
        vocab_size: Wrong drafts are token ids below it.
        eos: Token that ends an answer.
    """

    def __init__(
        self,
        seed: int,
        answer_of: Callable[[Request], Sequence[int] | None],
        vocab_size: int = VOCAB_SIZE,
        eos: int = EOS,
    ) -> None:
        self._seed, self._answer_of = seed, answer_of
        self._vocab_size, self._eos = vocab_size, eos
        self.num_forgotten = 0
        self.most = 128
        self.only_known = False
        """See :class:`~chairlift.scheduler.drafts.Speculator`."""

    def choose(
        self, rows: Sequence[tuple[Request, int]], step: StepFeatures, budget: int
    ) -> Sequence[tuple[Request, Sequence[int]]]:
        """See :class:`~chairlift.scheduler.drafts.Speculator`; more than may be, which the scheduler must cut."""
        found: list[tuple[Request, Sequence[int]]] = []
        for request, most in rows:
            drafts = self._draft(request, most)
            if drafts:
                found.append((request, drafts))
        return found

    def _draft(self, request: Request, most: int) -> list[int]:
        rng = random.Random(f"{self._seed} {request.request_id} {len(request.token_ids)}")
        kind, count = rng.choice(_KINDS), rng.randint(1, 6)
        answer = self._answer_of(request)
        if kind == "none" or answer is None:
            return []
        begin = request.num_output_tokens - (kind == "stale")
        coming = [*answer[begin:], *(rng.randrange(self._vocab_size) for _ in range(40))]
        drafts = coming[: most + 5 if kind == "many" else count]
        place = rng.randrange(len(drafts))
        if kind == "wrong":
            drafts[0] = (drafts[0] + 1) % self._vocab_size
        elif kind == "partly":
            drafts[place] = (drafts[place] + 1) % self._vocab_size
        elif kind == "ends":
            drafts[place] = rng.choice([self._eos, *request.stop_token_ids])
        return drafts

    def verified(self, request: Request, drafts: Sequence[int], num_accepted: int) -> None:
        """Ignore the result: there is nothing to learn."""

    def forget(self, request: Request) -> None:
        """Ignore the end of a request: there is no state."""
        self.num_forgotten += 1
