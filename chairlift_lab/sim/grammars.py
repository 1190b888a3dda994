"""Scripted grammars for simulations, which need no grammar library.

Given the tokens of an answer so far, a script says which token ids may follow, and whether the answer may or must end.
Compiling a script takes a number of steps, or fails. Some scripts fail later, at a chosen token.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.base.sampling_row import SamplingRow
from chairlift.base.step_batch import mask_bits
from chairlift.base.structured_outputs import CANNOT_BE_FOLLOWED, Grammar
from chairlift.engine.grammars import Grammars, SamplePlace
from chairlift.engine.mask_limits import MaskLedger, MaskLimits
from chairlift.engine.mask_work import Filling, Mask, MaskJob, MaskPlace, MaskWork, fill, masks_of
from chairlift.errors import InvariantError, RequestError
from chairlift.models.hashlm import reference_tokens
from chairlift.text.grammar.compiler import Compiled
from chairlift_lab.sim.world import EOS, VOCAB_SIZE

__all__ = ["GrammarScript", "LateMasks", "ScriptedGrammars", "scripted_tokens"]


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarScript:
    """A scripted grammar: the seed of its rules, and how compiling or following it fails."""

    seed: int
    delay: int = 0
    """Number of steps until the grammar is compiled."""
    outcome: str = "good"
    """``good``: no failure. ``refused``: the grammar does not compile. ``lost``: the compiler crashes. ``empty``: no
    token id is allowed at index ``at`` of the answer. ``broken``: the matcher refuses the allowed token at ``at``."""
    at: int = 0

    @property
    def text(self) -> str:
        """The script as text, used as the regular expression of a request. :meth:`of` parses this text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, grammar: Grammar) -> GrammarScript:
        return cls(**json.loads(grammar.text))

    def _rng(self, tokens: Sequence[int]) -> random.Random:
        return random.Random(f"{self.seed}:{list(tokens)}")

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether an answer that follows the script must end after ``tokens``."""
        return bool(tokens) and self._rng(tokens).random() < 0.08

    def allowed(self, tokens: Sequence[int], stop_token_ids: Sequence[int]) -> list[int]:
        """Token ids that may follow ``tokens``, ascending."""
        if self.outcome == "empty" and len(tokens) == self.at:
            return []
        rng = self._rng(tokens)
        rng.random()
        some = set(rng.sample(range(EOS), rng.choice([1, 2, 5, 12])))
        return sorted(some | ({EOS, *stop_token_ids} if rng.random() < 0.2 else set()))


class _Matcher:
    def __init__(self, script: GrammarScript, stop_token_ids: Sequence[int]) -> None:
        self.error = ""
        self._script = script
        self._stops = stop_token_ids
        self._tokens: list[int] = []

    @property
    def num_consumed(self) -> int:
        return len(self._tokens)

    @property
    def stopped(self) -> bool:
        return self._script.complete(self._tokens)

    def consume(self, token_id: int) -> bool:
        if self.error:
            return False
        broken = self._script.outcome == "broken" and len(self._tokens) == self._script.at
        if broken or token_id not in self._script.allowed(self._tokens, self._stops):
            self.error = f"{CANNOT_BE_FOLLOWED}token {token_id} is refused"
            return False
        self._tokens.append(token_id)
        return True

    def rewind(self, num_consumed: int) -> bool:
        if self.error:
            return False
        del self._tokens[num_consumed:]
        return True

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        if self.error:
            return 0
        begin = self.num_consumed
        count = 0
        for token_id in token_ids:
            if not self.consume(token_id):
                break
            count += 1
        self.error = ""
        self.rewind(begin)
        return count

    def forced(self, limit: int) -> Sequence[int]:
        allowed = self._script.allowed(self._tokens, self._stops)
        return allowed if limit and len(allowed) == 1 else ()

    def mask(self) -> npt.NDArray[np.uint32]:
        return mask_bits(self._script.allowed(self._tokens, self._stops), VOCAB_SIZE)


@dataclasses.dataclass(frozen=True, slots=True)
class _Script:
    script: GrammarScript

    def matcher(self, stop_token_ids: Sequence[int] = ()) -> Any:
        return _Matcher(self.script, stop_token_ids)


class ScriptedCompiler:
    """Implements the interface of :class:`~chairlift.text.grammar.compiler.Compiler` for scripted grammars."""

    def compile(self, grammar: Grammar) -> Compiled:
        script = GrammarScript.of(grammar)
        if script.outcome == "refused":
            raise RequestError(f"{CANNOT_BE_FOLLOWED}injected: it does not compile")
        if script.outcome == "lost":
            raise OSError("injected: the compiler died")
        return _Script(script)


class LateMasks(MaskWork):
    """Makes masks in simulated time. Some masks are late by a number of steps, at random. Such a mask takes about
    ``seconds``; the others take no time."""

    def __init__(self, seed: int, probability: float, most: int, seconds: float = 0.0) -> None:
        super().__init__(beside=False)
        self._rng = random.Random(seed)
        self._probability = probability
        self._most = most
        self._prices = random.Random(seed ^ 0x11E5)
        self._seconds = seconds
        self._tick = self.num_late = 0
        self._jobs: list[tuple[int, MaskJob]] = []
        self.charged: Callable[[MaskPlace, float], None] = lambda place, seconds: None
        """Called when a late mask was made and its time was charged."""

    def draws(self) -> bool:
        """Whether the next mask is late."""
        return self._rng.random() < self._probability

    def begin(self, places: Sequence[MaskPlace]) -> Filling:
        return _LateFilling(places, self)

    def later(self, job: MaskJob) -> None:
        self.num_late += 1
        self._jobs.append((self._tick + self._rng.randint(0, self._most), job))

    def tick(self) -> None:
        """Advance the simulated time by one step, and make the masks that are due."""
        self._tick += 1
        for due in [each for each in self._jobs if each[0] <= self._tick]:
            self._jobs.remove(due)
            job = due[1]
            if job.is_dropped:
                continue
            if job.place.matcher.num_consumed != job.at:
                raise InvariantError("the matcher of an answer was used while its mask was made")
            seconds = self._seconds * self._prices.uniform(0.5, 1.5)
            fill(job, seconds)
            self.charged(job.place, seconds)
            self.done.append(job)


class _LateFilling(Filling):
    def __init__(self, places: Sequence[MaskPlace], work: LateMasks) -> None:
        super().__init__(places, work)
        self._late_masks = work

    def result(self, bound: float | None) -> tuple[dict[int, Mask], list[MaskJob]]:
        late = [] if bound is None else [job for job in self._jobs if self._late_masks.draws()]
        in_time = [job for job in self._jobs if job not in late]
        for job in in_time:
            fill(job, 0.0)
        for job in late:
            self._work.later(job)
        return masks_of(in_time), late


class ScriptedGrammars(Grammars):
    """Compiles scripts, and makes late masks, in simulated time. The simulator calls :meth:`tick` once per step.

    ``late``: (seed, probability that a mask is late, maximum number of steps until a late mask is made); None: no mask
    is late. ``seconds`` is the processor time of a late mask, and ``limits`` are the limits on this time.
    """

    def __init__(
        self, late: tuple[int, float, int] | None = None, seconds: float = 0.0, limits: MaskLimits | None = None
    ) -> None:
        self._late = None if late is None else LateMasks(*late, seconds)
        ledger = MaskLedger(limits, lambda: 0.0)
        super().__init__(ScriptedCompiler(), self._later, masks=self._late or MaskWork(beside=False), ledger=ledger)
        self._waiting: list[tuple[int, Callable[[], Compiled], Future[Compiled]]] = []
        self._delay = 0
        self._tick = 0

    def check(self, grammar: Grammar, salt: str = "") -> None:
        """Accept every grammar without compiling it; :meth:`tick` compiles it later."""

    def add(self, requests: Any, grammar: Grammar) -> None:
        self._delay = GrammarScript.of(grammar).delay
        super().add(requests, grammar)

    def tick(self) -> None:
        """Advance the simulated time by one step, and compile the grammars whose delay has passed."""
        self._tick += 1
        if self._late is not None:
            self._late.tick()
        for due in [each for each in self._waiting if each[0] <= self._tick]:
            self._waiting.remove(due)
            _, work, future = due
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    @property
    def num_late(self) -> int:
        """Number of masks that were late so far."""
        return 0 if self._late is None else self._late.num_late

    def slow(self, rows: Sequence[SamplePlace], seconds: float) -> list[SamplePlace]:
        """Rows that leave the later steps until their next mask is made: some of them, at random."""
        return [] if self._late is None else [place for place in rows if self._late.draws()]

    def _later(self, work: Callable[[], Compiled]) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        self._waiting.append((self._tick + self._delay, work, future))
        return future


def scripted_tokens(
    script: GrammarScript, args: dict[str, Any], row: SamplingRow, windows: Sequence[int | None], stops: set[int]
) -> tuple[list[int], str]:
    """Compute the answer of a request that follows ``script`` and is the only request. Returns (tokens, ending).

    The ending is ``length``, ``stop`` (a stop token), ``complete`` (the script ends the answer) or ``error``.
    """
    tokens: list[int] = []
    if script.outcome in ("refused", "lost"):
        return tokens, "error"
    while len(tokens) < args["max_tokens"]:
        allowed = script.allowed(tokens, sorted(stops))
        if not allowed:
            return tokens, "error"
        settings = (row, windows, VOCAB_SIZE, 1, lambda _, allowed=allowed: allowed)
        token = reference_tokens([*args["prompt"], *tokens], *settings)[0]
        if token in stops:
            return [*tokens, token], "stop"
        if script.outcome == "broken" and len(tokens) == script.at:
            return tokens, "error"
        tokens.append(token)
        if script.complete(tokens):
            return tokens, "complete"
    return tokens, "length"
