"""Scripted draft tokens for simulations: right, wrong, too many, out of date, or with tokens that end an answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from chairlift.core.request import Request
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.spec_decode.suffix import SuffixProposer
from chairlift_lab.sim.world import EOS, VOCAB_SIZE

__all__ = ["ScriptedDrafts", "SuffixDrafts"]

_KINDS = ("none", "none", "right", "right", "wrong", "partly", "ends", "stale", "many")


class ScriptedDrafts:
    """Drafts tokens for requests whose answers are known in advance.

    The drafts depend only on the seed, the request's id and the length of its sequence.

    Args:
        seed: Seed of the world.
        answer_of: Function from a request to the tokens of its answer, or to None if they are unknown.
        vocab_size: Number of token ids. Wrong drafts are drawn from them.
        eos: Id of the token that ends an answer.
    """

    def __init__(
        self,
        seed: int,
        answer_of: Callable[[Request], Sequence[int] | None],
        vocab_size: int = VOCAB_SIZE,
        eos: int = EOS,
    ) -> None:
        self._seed = seed
        self._answer_of = answer_of
        self._vocab_size = vocab_size
        self._eos = eos
        self.num_forgotten = 0
        self.most = 128
        self.drafting_seconds = 0.0
        self.measures = False
        self.only_known = False
        """Whether drafts come only from a request's ``prediction`` or grammar. Scripted drafts do not."""

    def rests(self, num_rows: int) -> bool:
        """False: scripted drafts are made for every step."""
        return False

    def choose(
        self, rows: Sequence[tuple[Request, int]], step: StepFeatures, budget: int
    ) -> Sequence[tuple[Request, Sequence[int]]]:
        """Draft tokens as :class:`~chairlift.core.scheduler.drafts.Speculator` does, but sometimes more than allowed:
        the scheduler must drop the rest."""
        found: list[tuple[Request, Sequence[int]]] = []
        for request, limit in rows:
            drafts = self._draft(request, limit)
            if drafts:
                found.append((request, drafts))
        return found

    def _draft(self, request: Request, limit: int) -> list[int]:
        rng = random.Random(f"{self._seed} {request.request_id} {len(request.token_ids)}")
        kind = rng.choice(_KINDS)
        count = rng.randint(1, 6)
        answer = self._answer_of(request)
        if kind == "none" or answer is None:
            return []
        begin = request.num_output_tokens - (kind == "stale")
        coming = [*answer[begin:], *(rng.randrange(self._vocab_size) for _ in range(40))]
        drafts = coming[: limit + 5 if kind == "many" else count]
        index = rng.randrange(len(drafts))
        if kind == "wrong":
            drafts[0] = (drafts[0] + 1) % self._vocab_size
        elif kind == "partly":
            drafts[index] = (drafts[index] + 1) % self._vocab_size
        elif kind == "ends":
            drafts[index] = rng.choice([self._eos, *request.stop_token_ids])
        return drafts

    def verified(self, request: Request, drafts: Sequence[int], num_accepted: int) -> None:
        """Ignore the number of accepted drafts, because scripted drafts do not adapt."""

    def forget(self, request: Request) -> None:
        """Count that a request has ended. There is no state to drop."""
        self.num_forgotten += 1


class SuffixDrafts(ScriptedDrafts):
    """Drafts of the real proposer of suffixes. Before the first drafts of a request, the proposer gets an earlier
    answer: the request's own coming answer with a few other tokens. So drafts are right up to these tokens. The
    arguments are those of :class:`ScriptedDrafts`."""

    def __init__(
        self,
        seed: int,
        answer_of: Callable[[Request], Sequence[int] | None],
        vocab_size: int = VOCAB_SIZE,
        eos: int = EOS,
    ) -> None:
        super().__init__(seed, answer_of, vocab_size, eos)
        rng = random.Random(f"{seed} suffixes")
        self.proposer = SuffixProposer(rng.randint(1, 3), 24, rng.choice((1.0, 4.0)), 0.1, rng.choice((2, 50)))
        self._told: set[str] = set()

    def _draft(self, request: Request, limit: int) -> list[int]:
        if request.request_id not in self._told:
            self._tell(request)
        return list(self.proposer.propose([(request, limit)])[0])

    def _tell(self, request: Request) -> None:
        answer = self._answer_of(request)
        if answer is None:
            return
        self._told.add(request.request_id)
        rng = random.Random(f"{self._seed} {request.request_id}")
        tokens = list(answer)
        for _ in range(rng.randint(0, 2)):
            tokens[rng.randrange(len(tokens))] = rng.randrange(self._vocab_size)
        earlier = Request(
            f"{request.request_id} earlier",
            list(request.token_ids[:1]),
            max_tokens=1,
            cache_salt=request.cache_salt,
            adapter_id=request.adapter_id,
        )
        earlier.token_ids.extend(tokens)
        self.proposer.forget(earlier)

    def forget(self, request: Request) -> None:
        """Let the proposer keep the answer of a request that has ended."""
        super().forget(request)
        self.proposer.forget(request)
