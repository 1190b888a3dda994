"""Measures the gain of speculative decoding, and its cost when drafts are useless. Runs with and without drafts take
turns in one process.

    python benchmarks/speculation.py scripted MODEL [--rows 1 4 16] [--acceptance 0.8] [--fixed 1 2 4 8]
    python benchmarks/speculation.py useless MODEL [--rows 64] [--rounds 10]
    python benchmarks/speculation.py texts MODEL [--rows 1 4 16 64] [--fixed 1 2 4 8]
    python benchmarks/speculation.py heads [MODEL] [--rows 1 4 16 64] [--heads DIR | --eagle3 DIR] [--fixed 1 2 3]

``scripted``: drafts that cost no time to propose, each correct with a given probability; the number of drafts is fixed,
or chosen by the engine. ``useless``: n-gram drafts at a temperature above 0, for outputs without repetitions.
``texts``: n-gram drafts for outputs that repeat much of their prompts (editing, extraction). ``heads``: drafts of the
bundled model's own Medusa heads, of those in ``--heads DIR``, or of the layer in ``--eagle3 DIR``, for questions about
the user guide in wordings that the bundled model was not trained on.

Results are output tokens per second with drafts divided by those without, pair by pair: the median ratio, and the 95 %
interval of the mean (Student's t, of logarithms). The script fails if outputs differ.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams
from chairlift.core.request import Request
from chairlift.core.scheduler.drafts import Drafts
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator
from chairlift.core.spec_decode.ngram import NgramProposer

T_95 = [math.nan, 12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23]
"""Quantile of Student's t for 95 %, by degrees of freedom."""
NOTE = (
    "The cable car leaves the lower station at 8:15. Tickets cost 24 francs for adults and 12 francs for children. "
    "The ride takes nine minutes. At the upper station there is a restaurant with a terrace, and a path to the lake."
)
TEXTS = [
    f"Copy this text exactly, but write 'gondola' instead of 'cable car':\n\n{NOTE}",
    f"Correct nothing. Repeat the following text word for word:\n\n{NOTE}",
    f"List every sentence of this text that has a number in it, word for word:\n\n{NOTE}",
    "Add a comment to this function and print all of it again:\n\ndef area(width, height):\n"
    "    result = width * height\n    if result < 0:\n        raise ValueError('negative area')\n    return result\n",
    'Write this as JSON with the keys "name", "city" and "phone", one object for each line:\n\n'
    "Anna Berger, Chur, 081 555 10 10\nBeat Caluori, Davos, 081 555 20 20\nClara Derungs, Arosa, 081 555 30 30\n",
]


class Scripted:
    """Proposes drafts from known outputs, and changes each draft with a given probability. An output is found by its
    prompt; all prompts are different.

    See :class:`~chairlift.core.spec_decode.adaptive.Proposer`.
    """

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]], acceptance: float) -> None:
        self._answers, self._acceptance = answers, acceptance
        self._rng = random.Random(0)

    def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """The next tokens of each request's known output, some of them changed."""
        found = []
        for request, most in rows:
            answer = self._answers.get(tuple(request.token_ids[: request.num_prompt_tokens]), ())
            coming = answer[request.num_output_tokens : request.num_output_tokens + most]
            found.append([token if self._rng.random() < self._acceptance else (token + 1) % 3000 for token in coming])
        return found

    def seconds(self, num_rows: int) -> float:
        """Estimated seconds to propose drafts: 0, because the outputs are known in advance."""
        return 0.0

    def forget(self, request: Request) -> None:
        """Do nothing, because no state is kept per request."""


class Timed(AdaptiveSpeculator):
    """Speculator that measures the seconds of its choices. Their share of a run's time varies less between runs than
    the run's own time does."""

    spent = 0.0

    def choose(self, rows: Any, step: Any, budget: int) -> Any:
        """As in the base class."""
        begin = time.perf_counter()
        try:
            return super().choose(rows, step, budget)
        finally:
            self.spent += time.perf_counter() - begin


class Fixed(AdaptiveSpeculator):
    """Speculator that always computes a fixed number of drafts, regardless of their cost."""

    def choose(self, rows: Any, step: Any, budget: int) -> Any:
        """Propose the fixed number of drafts for every row, or fewer if the row's limit is lower."""
        proposals = self._proposer.propose([(request, min(most, self.most)) for request, most in rows])  # type: ignore[union-attr]
        return [(request, drafts) for (request, _), drafts in zip(rows, proposals, strict=True) if drafts]


Make = Callable[[], AdaptiveSpeculator]


def timed(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, make: Make | None
) -> tuple[float, list[list[int]], dict[str, Any]]:
    """(output tokens per second, outputs, counts of proposed and accepted drafts). ``make`` returns the proposer; None
    runs without drafts."""
    scheduler, speculator = llm.engine.scheduler, None if make is None else make()
    if speculator is not None:
        speculator.reach = speculator.most  # the times of steps are known from the runs before
    scheduler.drafts = None if speculator is None else Drafts(scheduler.batch, speculator)
    drafter = getattr(speculator, "_proposer", None)
    llm.engine.core.executor.drafter = drafter if hasattr(drafter, "saw") else None  # type: ignore[attr-defined]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    drafts = scheduler.drafts
    told = (
        {"drafts": 0, "accepted": 0}
        if drafts is None
        else {"drafts": drafts.num_drafts, "accepted": drafts.num_accepted}
    )
    if drafts is not None and drafts.num_verified:
        told["accepted_length"] = round(1 + drafts.num_accepted / drafts.num_verified, 2)
    return sum(map(len, answers)) / seconds, answers, told


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the mean ratio."""
    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < 2:
        return ratios[0], ratios[0]
    half = T_95[min(len(logs) - 1, len(T_95) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(statistics.fmean(logs) - half), math.exp(statistics.fmean(logs) + half)


def pairs(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, sides: dict[str, Make], rounds: int, **about: Any
) -> list[dict[str, Any]]:
    """Measure each side against no drafts in interleaved rounds. Returns one record per side."""
    ratios: dict[str, list[float]] = {name: [] for name in sides}
    told: dict[str, dict[str, Any]] = {}
    plain: list[float] = []
    for number in range(rounds):
        order = [None, *sides] if number % 2 == 0 else [*reversed(sides), None]
        rates: dict[str | None, float] = {}
        answers: list[list[list[int]]] = []
        for name in order:
            rates[name], answer, counts = timed(llm, prompts, params, None if name is None else sides[name])
            answers.append(answer)
            if name is not None:
                told[name] = counts
        if any(answer != answers[0] for answer in answers):
            raise SystemExit("outputs with and without drafts differ")
        plain.append(rates[None])
        for name in sides:
            ratios[name].append(rates[name] / rates[None])
    records = []
    for name, found in ratios.items():
        low, high = interval(found)
        records.append(
            {
                **about,
                "rows": len(prompts),
                "drafts_by": name,
                "ratio": round(statistics.median(found), 3),
                "interval": [round(low, 3), round(high, 3)],
                "ratios": [round(ratio, 3) for ratio in found],
                "without": round(statistics.median(plain), 1),
                **told[name],
            }
        )
        ratio, slots = records[-1]["ratio"], about.get("slots", len(prompts))
        print(f"{slots} rows, {name}: {ratio:.2f} ({low:.2f} to {high:.2f}), {told[name]}", flush=True)
    return records


def scripted(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Scripted drafts with a given probability of being correct: fixed numbers of drafts, and the number that the
    engine chooses."""
    llm = LLM(args.model, skip_tokenizer_init=True, max_num_seqs=64, num_kv_blocks=1024, enable_prefix_caching=False)
    seconds, records, rng = llm.engine.core.costs.decode_seconds, [], random.Random(1)
    for rows in args.rows:
        prompts = [[rng.randrange(100, 3000) for _ in range(24)] for _ in range(rows)]
        params = SamplingParams(temperature=0.0, max_tokens=max(16, args.tokens // max(1, rows // 4)), ignore_eos=True)
        _, answers, _ = timed(llm, prompts, params, None)
        known = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
        source = Scripted(known, args.acceptance)
        sides: dict[str, Make] = {"chosen": lambda source=source: AdaptiveSpeculator(seconds, 16, source)}
        for most in args.fixed:
            sides[f"{most} fixed"] = lambda most=most, source=source: Fixed(seconds, most, source)
        timed(llm, prompts, params, sides["chosen"])  # what steps of many rows cost is learnt here
        records += pairs(llm, prompts, params, sides, args.rounds, acceptance=args.acceptance)
    return records


def useless(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure n-gram drafts where they are useless: outputs of random weights at a temperature above 0 have no
    repetitions."""
    llm = LLM(args.model, skip_tokenizer_init=True, max_num_seqs=64, num_kv_blocks=1024, enable_prefix_caching=False)
    seconds, records, rng = llm.engine.core.costs.decode_seconds, [], random.Random(2)
    for rows in args.rows:
        prompts = [[rng.randrange(100, 3000) for _ in range(32)] for _ in range(rows)]
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=args.tokens, ignore_eos=True)
        # One speculator for all runs, as in a server: it learns that looking for drafts does not pay.
        speculator = Timed(seconds, 8, NgramProposer(3), look_clock=time.perf_counter)
        sides: dict[str, Make] = {"ngram": lambda speculator=speculator: speculator}
        for _ in range(8):
            timed(llm, prompts, params, sides["ngram"])
        speculator.spent = 0.0
        begin = time.perf_counter()
        for _ in range(args.rounds):
            timed(llm, prompts, params, sides["ngram"])
        share = speculator.spent / (time.perf_counter() - begin)
        print(f"{rows} rows: choosing took {100 * share:.2f} % of the time", flush=True)
        records += pairs(llm, prompts, params, sides, args.rounds, choosing=round(share, 5))
    return records


def texts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """n-gram drafts for outputs that repeat much of their prompts. Four requests per row run one after another, because
    the time of a batch whose rows all begin together is that of the row with the fewest accepted drafts."""
    records = []
    for rows in args.rows:
        llm = LLM(args.model, max_num_seqs=rows, num_kv_blocks=2048, enable_prefix_caching=False)
        seconds = llm.engine.core.costs.decode_seconds
        numbers = range(4 * rows)
        asked = [[{"role": "user", "content": TEXTS[i % len(TEXTS)] + "\n" * (i // len(TEXTS))}] for i in numbers]
        prompts = [llm.encode_chat(each) for each in asked]
        params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
        sides: dict[str, Make] = {
            "ngram": lambda seconds=seconds: AdaptiveSpeculator(
                seconds, 8, NgramProposer(3), look_clock=time.perf_counter
            )
        }
        for most in args.fixed:
            sides[f"{most} fixed"] = lambda most=most, seconds=seconds: Fixed(seconds, most, NgramProposer(3))
        _, answers, _ = timed(llm, prompts, params, sides["ngram"])
        if args.write is not None:
            requests = [(prompt, len(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
            args.write.write_text(json.dumps(requests))
        records += pairs(llm, prompts, params, sides, args.rounds, slots=rows)
    return records


def heads(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Medusa heads or a layer of EAGLE-3, for wordings of the guide that were held back from training."""
    from tools.guide import read_guide

    asked = {"method": "medusa"} if args.heads is None else {"method": "medusa", "model": args.heads}
    asked = asked if args.eagle3 is None else {"method": "eagle3", "model": args.eagle3}
    questions, records = [text for entry in read_guide() for text in entry.held_back], []
    random.Random(3).shuffle(questions)
    params = SamplingParams(temperature=args.temperature, seed=7, max_tokens=args.tokens)
    for rows in args.rows:
        shape: dict[str, Any] = {"max_num_seqs": rows, "num_kv_blocks": 2048, "enable_prefix_caching": False}
        llm = LLM(args.model, speculative_config=asked, **shape)
        count = max(2 * rows, args.requests)
        prompts = [llm.encode_chat([{"role": "user", "content": text}]) for text in questions[:count]]
        sides = _sides_of_heads(llm, args.fixed)
        for make in (sides["heads"], None):
            timed(llm, prompts, params, make)
        records += pairs(llm, prompts, params, sides, args.rounds, slots=rows)
    return records


def _sides_of_heads(llm: LLM, fixed: Sequence[int]) -> dict[str, Make]:
    """Name of a setting -> function that makes its speculator. The settings are a number of drafts that the engine
    chooses, and fixed numbers."""
    core = llm.engine.core
    seconds, drafter, drafts = core.costs.decode_seconds, core.executor.drafter, core.scheduler.drafts  # type: ignore[attr-defined]
    sides: dict[str, Make] = {"heads": lambda: AdaptiveSpeculator(seconds, drafts.speculator.most, drafter)}
    for number in fixed:
        sides[f"{number} fixed"] = lambda number=number: Fixed(seconds, number, drafter)
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("scripted", "useless", "texts", "heads"))
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--requests", type=int, default=32, help="of heads: fewest requests of a run")
    parser.add_argument("--temperature", type=float, default=0.0, help="of heads")
    parser.add_argument("--heads", help="of heads: directory of other heads than the model's own")
    parser.add_argument("--eagle3", help="of heads: directory of a layer of EAGLE-3")
    parser.add_argument("--fixed", type=int, nargs="*", default=[])
    parser.add_argument("--write", type=Path, help="of texts: save the last --rows requests for peers/compare.py")
    parser.add_argument("--json", type=Path, help="append the records to a file")
    args = parser.parse_args()
    records = [{"what": args.what, "model": args.model, **each} for each in globals()[args.what](args)]
    if args.json is not None:
        before = json.loads(args.json.read_text()) if args.json.exists() else []
        args.json.write_text(json.dumps([*before, *records], indent=1) + "\n")


if __name__ == "__main__":
    main()
