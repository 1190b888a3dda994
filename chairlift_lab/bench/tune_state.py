"""State of a tuning (``chairlift tune``). It is saved after every real run, so that an interrupted tuning can
continue."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.base.writing import replacing
from chairlift.errors import ConfigError
from chairlift_lab.bench.verdict import RunSample
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.replay import RequestTiming, ServedTrace
from chairlift_lab.replay.served import kept_up

__all__ = ["FIRST_LOOK", "Setting", "State", "StoredFigures", "Trial", "keeping_up"]

_FORMAT: Final = 4
FIRST_LOOK: Final = -1
"""Round number of real runs that only select candidates, and are not compared round by round."""
_SAMPLES: Final = 400
"""Maximum number of latencies that are stored for a run. They are evenly spaced in the sorted list of all latencies."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Values of the settings that are searched. The names are those of EngineConfig."""

    batching: str
    max_num_seqs: int
    max_num_batched_tokens: int
    admission_watermark: float
    prefill_mode: str
    preemption_mode: str
    cache_eviction: str = "auto"
    drafts: bool = True
    """Whether the engine drafts tokens if the user gave ``speculative_config``. False turns drafts off."""

    def flat(self) -> dict[str, Any]:
        """Name -> value, as keyword arguments of EngineConfig."""
        fields = dataclasses.asdict(self)
        if not fields.pop("drafts"):
            fields["speculative_config"] = ""
        if self.batching != "continuous":  # settings that a static or dynamic batch does not use
            del fields["prefill_mode"], fields["preemption_mode"]
        return fields

    def describe(self) -> str:
        """Short text for reports that lists the settings."""
        off = "" if self.drafts else ", no drafts"
        if self.batching != "continuous":
            return f"{self.batching}, {self.max_num_seqs} slots{off}"
        words = f"{self.max_num_seqs} slots, {self.max_num_batched_tokens:,} tokens"
        words += "" if self.prefill_mode == "mixed" else f", {self.prefill_mode}"
        words += "" if self.preemption_mode == "auto" else f", preemption {self.preemption_mode}"
        words += "" if self.cache_eviction == "auto" else f", eviction {self.cache_eviction}"
        return words + off + ("" if self.admission_watermark == 0.01 else f", {self.admission_watermark:.0%} kept free")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFigures:
    """Results of serving the traffic once. Times are in seconds."""

    requests: int
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    e2el_p50: float
    e2el_p99: float
    preemption_rate: float
    goodput: float | None
    """Fraction of the requests that met their latency targets. None if there are no targets."""
    mean_rows: float
    keeping: float = 1.0
    """Number of ended requests divided by the number of arrived requests, in the second half of the arrivals. Below 1
    the backlog grows. 1.0 if all requests arrive at once or come from a closed loop."""
    accepted_length: float | None = None
    """Mean number of tokens that a row with drafts yielded in a step. None if there were no drafts."""

    @classmethod
    def of(cls, served: ServedTrace, keeping: float = 1.0) -> StoredFigures:
        """Results of a served trace, simulated or real."""
        return cls(
            requests=served.requests,
            seconds=served.seconds,
            requests_per_second=served.requests_per_second,
            output_tokens_per_second=served.output_tokens_per_second,
            ttft_p50=served.ttft.p50,
            ttft_p99=served.ttft.p99,
            tpot_p50=served.tpot.p50,
            tpot_p99=served.tpot.p99,
            e2el_p50=served.e2e.p50,
            e2el_p99=served.e2e.p99,
            preemption_rate=served.preemption_rate,
            goodput=served.goodput,
            mean_rows=served.mean_rows,
            keeping=keeping,
        )

    @classmethod
    def together(cls, passes: Sequence[StoredFigures]) -> StoredFigures:
        """Results of one run in which the traffic was served several times. Rates are those of the whole run, other
        results are medians over the passes."""
        if len(passes) == 1:
            return passes[0]
        seconds = sum(each.seconds for each in passes)
        requests = sum(each.requests for each in passes)
        tokens = sum(each.output_tokens_per_second * each.seconds for each in passes)
        return dataclasses.replace(
            cls.medians(passes),
            requests=requests,
            seconds=seconds,
            requests_per_second=requests / seconds,
            output_tokens_per_second=tokens / seconds,
        )

    @classmethod
    def medians(cls, runs: Sequence[StoredFigures]) -> StoredFigures:
        """Median of each result over several runs. None if a run does not have it."""
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            values = [getattr(run, field.name) for run in runs]
            fields[field.name] = None if None in values else statistics.median(values)
        return cls(**fields)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of one run, simulated or real, with one setting."""

    setting: Setting
    rate: float | None
    """Request rate per second. None: all requests arrive at once, or the users of a closed loop send them."""
    count: int
    """Number of requests: the run serves the first ``count`` requests of the traffic."""
    round: int | None
    """Number of the round. Real runs of one round are compared with each other. Single real runs have round 0, and runs
    that only select candidates have :data:`FIRST_LOOK`. None: a simulation."""
    figures: StoredFigures
    latencies: list[float] = dataclasses.field(default_factory=list)
    """Latencies of whole requests in a real run, in seconds, ascending. If there are many, only a sample is stored."""
    busy: float = 0.0
    """Share of the machine that other programs used during a real run."""

    def sample(self, field: str) -> RunSample:
        """The result ``field`` of :class:`StoredFigures`, with the circumstances of the run."""
        return RunSample(getattr(self.figures, field), self.figures.seconds, self.busy)

    @property
    def beside(self) -> bool:
        """Whether the run belongs to a round in which several settings were compared, with all requests at once."""
        return self.round is not None and self.round >= 0 and self.rate is None

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.setting, self.rate, self.count, self.round)


def keeping_up(timings: Iterable[RequestTiming], end: float) -> float:
    """:func:`~chairlift_lab.replay.served.kept_up` of a run. ``end`` is used as the end time of a request that did not
    end."""
    return kept_up([(timing.request.arrival, timing.last if timing.ended else end) for timing in timings])


def kept_latencies(timings: Iterable[RequestTiming]) -> list[float]:
    """Times from arrival to the last token in seconds, ascending. If there are more than 400, a sample of 400 that is
    evenly spaced by rank."""
    values = sorted(timing.last - timing.request.arrival for timing in timings if timing.ended)
    if len(values) <= _SAMPLES:
        return values
    return [values[round(index * (len(values) - 1) / (_SAMPLES - 1))] for index in range(_SAMPLES)]


class State:
    """All runs of a tuning, stored in one file. ``inputs`` describe the traffic and the fixed settings."""

    def __init__(self, path: Path, inputs: Mapping[str, Any]) -> None:
        """Read the file if it exists, to continue that tuning.

        Raises ConfigError when the file has other ``inputs``, or is not a file of ``chairlift tune``.
        """
        self.path = path
        self.inputs = dict(inputs)
        self.deployment: Deployment | None = None
        self.fit_error: float | None = None
        """Median relative error of the cost model on real steps of this traffic. None: not known yet."""
        self.report: dict[str, Any] = {}
        """Conclusions of the tuning, stored for readers of the file. They are not read back."""
        self.trials: dict[tuple[Any, ...], Trial] = {}
        self.resumed = path.exists()
        if self.resumed:
            self._read()

    def __iter__(self) -> Iterator[Trial]:
        return iter(self.trials.values())

    def find(self, setting: Setting, rate: float | None, count: int, round_: int | None) -> Trial | None:
        """The run with these parameters, or None if there is no such run yet."""
        return self.trials.get((setting, rate, count, round_))

    def add(self, trial: Trial) -> None:
        """Add a run. After a real run, the file is saved."""
        self.trials[trial.key] = trial
        if trial.round is not None:
            self.save()

    def drop_round(self, count: int, round_: int) -> None:
        """Remove the real runs of an interrupted round, because runs that are compared must be made close in time."""
        for key in [key for key in self.trials if key[1:] == (None, count, round_)]:
            del self.trials[key]

    def save(self) -> None:
        """Write the file atomically. Raises ConfigError when the file cannot be written."""
        record = {
            "format": _FORMAT,
            "inputs": self.inputs,
            "report": self.report,
            "deployment": None if self.deployment is None else self.deployment.to_dict(),
            "fit_error": self.fit_error,
            "trials": [dataclasses.asdict(trial) for trial in self],
        }
        try:
            with replacing(self.path) as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}; give another --output") from None

    def _read(self) -> None:
        way_out = f"give another --output, or remove {self.path}"
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            inputs = dict(record["inputs"])
            trials = record["trials"]
            deployment = record["deployment"]
            known = record["format"] == _FORMAT
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}; {way_out}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"{self.path} is not what chairlift tune wrote; {way_out}") from None
        if not known:
            raise ConfigError(f"{self.path} was written by another version of chairlift; {way_out}")
        mine = json.loads(json.dumps(self.inputs))
        for name in [*mine, *inputs]:
            if inputs.get(name) != mine.get(name):
                was, now = (_shown(each.get(name)) for each in (inputs, mine))
                raise ConfigError(
                    f"{self.path} holds results for another question: {name} was {was} and is {now} now; {way_out}"
                )
        try:
            for fields in trials:
                parts = {"setting": Setting(**fields["setting"]), "figures": StoredFigures(**fields["figures"])}
                trial = Trial(**(fields | parts))
                self.trials[trial.key] = trial
            self.deployment = None if deployment is None else Deployment.from_dict(deployment)
            fit_error = record.get("fit_error")
            self.fit_error = None if fit_error is None else float(fit_error)
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError):
            raise ConfigError(f"{self.path} is damaged; {way_out}") from None


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
