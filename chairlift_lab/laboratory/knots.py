"""Public traces as knots: quantiles of lengths with their rank correlation, arrivals, sessions, reuse and gaps.

A trace file is never part of the repository; its knots are, as one JSON file per trace with source and licence.
:meth:`TraceKnots.draw` makes requests from them. Equal knots, rates and seeds give equal requests on any machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import ConfigError
from chairlift_lab.laboratory.quantiles import Quantiles, related_shares
from chairlift_lab.replay.traced_request import TracedRequest
from chairlift_lab.workload.arrivals import Gamma

__all__ = ["BUNDLED", "SessionKnots", "TraceKnots", "bundled_knots", "read_knots"]

BUNDLED: Final = Path(__file__).parent / "traces"
"""Folder of the knots that come with Chairlift."""
_MORE: Final = 1.6
"""More requests are drawn than asked for, and a run from their middle is taken, so that a trace begins and ends with
sessions under way."""
_BEFORE: Final = 0.35
_LENGTHS, _TURNS, _GAPS, _TENANTS, _HINTS = range(2, 7)
"""Numbers of the random streams. Arrivals have number 1."""
_PREDICTION_ERROR: Final = 0.7
"""Standard deviation of the logarithm of (predicted / true answer length). For answers like those of chats, the rank
correlation (Kendall's) of predicted and true lengths is then about 0.6, as with published predictors."""
_TOOLS: Final = 3
_OTHER_TOOL: Final = 0.2
"""Fraction of the calls whose tool says nothing about its time. Otherwise tool 0 is fast and tool 2 is slow."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionKnots:
    """Requests that are turns of a session: each prompt repeats the text so far, and adds new tokens."""

    turns: Quantiles
    """Number of turns of a session."""
    fresh: Quantiles
    """Number of new tokens in the prompt of a later turn, beyond the earlier prompts and answers."""
    gap_seconds: Quantiles
    """Seconds from one turn to the next: the time of a tool or of a reader."""
    keeps_gaps: bool
    """Whether gaps stay as they are when the rate changes, as those of tools do. Otherwise the time of the whole trace
    is stretched, gaps included."""
    most_tokens: int
    """Maximum length of a session in tokens. A session ends before the turn that would exceed it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceKnots:
    """Statistics of a public trace, from which similar requests are drawn."""

    name: str
    title: str
    source: str
    licence: str
    basis: str
    """How the knots were found: computed from the file, or from published figures, with what was assumed."""
    rate: float
    """Requests per second of the trace."""
    burstiness: float
    """Standard deviation of the gaps between arrivals (between session starts, if there are sessions), divided by their
    mean, within runs of 100 gaps. Gaps are drawn from a gamma distribution."""
    prompt: Quantiles
    """Tokens of a prompt; with sessions, of the first prompt of a session."""
    output: Quantiles
    correlation: float
    """Rank correlation of prompt and answer (with sessions: of new tokens and answer)."""
    sessions: SessionKnots | None = None
    shared_tokens: int = 0
    """Number of tokens with which all prompts begin, such as a system prompt: a multiple of ``block``."""
    repeated: float = 0.0
    """Fraction of the prompt tokens that repeat the beginning of an earlier prompt, in the trace itself. It is only
    compared with what is drawn."""
    block: int = 64
    """Number of prompt tokens that one prefix id covers."""
    tenants: int = 8
    """Number of tenants. No public trace names them, so each session is given one: tenant k in proportion to 1/k."""

    @property
    def computed(self) -> bool:
        """Whether the knots were computed from the trace itself."""
        return self.basis.startswith("computed")

    def draw(self, count: int, rate: float | None = None, seed: int = 0) -> list[TracedRequest]:
        """Draw ``count`` requests in order of arrival; the first arrives at 0. ``rate``: requests per second; None: the
        rate of the trace."""
        rate = self.rate if rate is None else rate
        many = math.ceil(count * _MORE) if self.sessions is None else math.ceil(count * _MORE) + 200
        drawn = sorted(self._sessions(many, rate, seed), key=lambda request: request.arrival)
        first = int((len(drawn) - count) * _BEFORE) if self.sessions is not None else 0
        chosen = drawn[first : first + count]
        origin = chosen[0].arrival
        return [dataclasses.replace(request, arrival=request.arrival - origin) for request in chosen]

    def _sessions(self, count: int, rate: float, seed: int) -> Iterator[TracedRequest]:
        rng = np.random.default_rng([seed, _LENGTHS])
        of_prompt, of_output = related_shares(rng, count, self.correlation)
        turns, gaps = self._turns(count, rate, seed)
        starts = Gamma(rate / float(np.mean(turns)), 1 / max(self.burstiness, 1e-3) ** 2).times(count, seed)
        outputs = _tokens(self.output.at(of_output))
        prompts = _tokens(self.prompt.at(of_prompt))
        later = prompts if self.sessions is None else _tokens(self.sessions.fresh.at(of_prompt))
        tenants = self._tenants(count, seed)
        predicted, tools = self._hints(outputs, gaps, seed)
        next_id = self.shared_tokens // self.block
        index = session = 0
        while index < count:
            time = starts[session]
            text = 0
            ids = 0
            for turn in range(int(turns[session])):
                if index >= count:
                    return
                prompt = text + later[index] if turn else max(prompts[index], self.shared_tokens + 1)
                if turn and prompt + outputs[index] > self._most:
                    break
                ids = -(-prompt // self.block)
                request = self._request(session, turn, time, prompt, outputs[index], next_id, tenants[session])
                yield dataclasses.replace(request, predicted_tokens=predicted[index], tool=tools[index])
                text = prompt + outputs[index]
                time += float(gaps[index])
                index += 1
            next_id += ids
            session += 1

    @property
    def _most(self) -> int:
        return 1 << 24 if self.sessions is None else self.sessions.most_tokens

    def _request(
        self, session: int, turn: int, time: float, prompt: int, output: int, next_id: int, tenant: str
    ) -> TracedRequest:
        fields: dict[str, Any] = {}
        common = self.shared_tokens // self.block
        if self.sessions is not None:
            fields = {"session": str(session), "turn": turn}
        if self.sessions is not None or common:
            own = range(next_id, next_id + max(0, -(-prompt // self.block) - common)) if self.sessions else range(0)
            fields["prefix_ids"] = (*range(common), *own)
        return TracedRequest(
            arrival=time,
            prompt_tokens=prompt,
            output_tokens=output,
            prefix_block=self.block,
            tenant=tenant,
            **fields,
        )

    def _turns(self, count: int, rate: float, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(number of turns of each session, seconds after each request to the next turn)."""
        if self.sessions is None:
            return np.ones(count), np.zeros(count)
        turns = self.sessions.turns.at(np.random.default_rng([seed, _TURNS]).random(count))
        gaps = self.sessions.gap_seconds.at(np.random.default_rng([seed, _GAPS]).random(count))
        return np.maximum(1, np.rint(turns)), gaps if self.sessions.keeps_gaps else gaps * (self.rate / rate)

    def _hints(self, outputs: list[int], gaps: NDArray[np.float64], seed: int) -> tuple[list[int], list[str]]:
        """(predicted answer length, name of the tool that is called after the answer) of each request."""
        rng = np.random.default_rng([seed, _HINTS])
        factors = np.exp(_PREDICTION_ERROR * rng.standard_normal(len(outputs)))
        predicted = _tokens(np.minimum(np.array(outputs) * factors, 1 << 20))
        if self.sessions is None or not self.sessions.keeps_gaps:
            return predicted, [""] * len(outputs)
        ranks = np.argsort(np.argsort(gaps)) * _TOOLS // len(gaps)
        other = rng.random(len(gaps)) < _OTHER_TOOL
        tools = np.where(other, rng.integers(0, _TOOLS, len(gaps)), ranks)
        return predicted, [f"tool-{int(tool)}" for tool in tools]

    def _tenants(self, count: int, seed: int) -> list[str]:
        weights = 1 / np.arange(1, self.tenants + 1)
        drawn = np.random.default_rng([seed, _TENANTS]).choice(self.tenants, count, p=weights / weights.sum())
        return [f"tenant-{int(each) + 1}" for each in drawn]

    def to_dict(self) -> dict[str, Any]:
        """The knots as data for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("prompt", "output"):
            fields[name] = fields[name].points
        if self.sessions is not None:
            own = {field.name: getattr(self.sessions, field.name) for field in dataclasses.fields(self.sessions)}
            fields["sessions"] = {
                name: value.points if isinstance(value, Quantiles) else value for name, value in own.items()
            }
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TraceKnots:
        """Knots from the data of :meth:`to_dict`. Raises ConfigError for other data."""
        try:
            given = dict(fields)
            for name in ("prompt", "output"):
                given[name] = _quantiles(given[name])
            if given.get("sessions") is not None:
                own = dict(given["sessions"])
                for name in ("turns", "fresh", "gap_seconds"):
                    own[name] = _quantiles(own[name])
                given["sessions"] = SessionKnots(**own)
            knots = cls(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"these are not the knots of a trace: {error}; chairlift lab knots writes them") from None
        if not (0 < knots.rate < 1e6 and 0 < knots.burstiness < 100 and -1 <= knots.correlation <= 1):
            raise ConfigError(
                "knots need a rate and a burstiness above 0 and a correlation from -1 to 1, got"
                f" {knots.rate}, {knots.burstiness} and {knots.correlation}"
            )
        if knots.block < 16 or knots.shared_tokens % knots.block or not 1 <= knots.tenants <= 1000:
            raise ConfigError(
                "knots need a block of at least 16, shared_tokens that are a multiple of it and 1 to 1,000 tenants, got"
                f" {knots.block}, {knots.shared_tokens} and {knots.tenants}"
            )
        return knots


def _quantiles(pairs: Any) -> Quantiles:
    return Quantiles(tuple((float(share), float(value)) for share, value in pairs))


def _tokens(values: NDArray[np.float64]) -> list[int]:
    return [max(1, int(value)) for value in np.rint(values)]


def read_knots(path: Path) -> TraceKnots:
    """Read a file of knots. Raises ConfigError if it cannot be read or is none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the knots {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not valid JSON; chairlift lab knots writes the knots of a trace") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} has no knots; chairlift lab knots writes the knots of a trace")
    return TraceKnots.from_dict(fields)


def bundled_knots() -> dict[str, TraceKnots]:
    """Name -> knots, of all traces that come with Chairlift."""
    knots = [read_knots(path) for path in sorted(BUNDLED.glob("*.json"))]
    return {each.name: each for each in knots}
