"""The policies that the laboratory compares: the engine's own, controls, the catalogue's, and any class.

Controls bound what an order can win. ``random`` draws the order, and ``oracle-srpt`` knows the length of each answer:
an idea that does no better than the first has no merit on that traffic, and none that only orders can beat the second
by much. ``fcfs-targets`` is the default order with what the engine itself does for a target (it makes prompt chunks
smaller where they would slow down answers): an idea that knows targets must beat this, not only the plain default.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from chairlift.base.plugins import is_plugin
from chairlift.core.request import Request
from chairlift.core.scheduler.policy import FirstComeFirstServed
from chairlift.errors import ConfigError

__all__ = ["BASELINE", "CONTROL", "LabPolicy", "OracleShortest", "RandomOrder", "chosen_policies", "known_policies"]

BASELINE: Final = "fcfs"
"""The default of the engine: every ratio is taken against it."""
CONTROL: Final = "fcfs-targets"
"""The default that is told the targets: what an order adds is its ratio to this row."""
_CATALOG: Final = "chairlift.core.plugins.catalog"
_HERE: Final = "chairlift_lab.laboratory.policies"


class RandomOrder(FirstComeFirstServed):
    """A control: the order of the waiting requests is drawn. It is the same in each run."""

    name = "random"

    def order(self, request: Request) -> tuple[float, ...]:
        return (random.Random(request.request_id).random(), request.sequence)


class OracleShortest(FirstComeFirstServed):
    """A control: the request with the fewest tokens left to compute goes first (SRPT), by its true answer length.

    In a replay the limit of a request is the length of its answer, so the policy knows what no server knows.
    """

    name = "oracle-srpt"

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.max_total_tokens, request.sequence)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LabPolicy:
    """One idea to compare: settings of the engine under a name, with its source and what its authors claim."""

    name: str
    settings: Mapping[str, Any]
    source: str = ""
    claim: str = ""
    simulated_only: bool = False
    """Whether the idea needs what no engine here can do, so that it is never measured."""

    @property
    def digest(self) -> str:
        """Digest of the code that decides, so that results of another version are not taken for its own."""
        found = hashlib.sha256(repr(sorted(self.settings.items())).encode())
        for value in self.settings.values():
            if is_plugin(value) and (path := _file_of(value.partition(":")[0])) is not None:
                found.update(path.read_bytes())
                data = path.with_suffix(".json")  # such as learned weights
                if data.is_file():
                    found.update(data.read_bytes())
        return found.hexdigest()[:10]


def _file_of(module: str) -> Path | None:
    if "" not in sys.path:
        sys.path.append("")  # as for every plugin: the current directory counts
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


_OWN: Final = (
    LabPolicy(name=BASELINE, settings={"scheduling_policy": "fcfs"}, source="the default"),
    LabPolicy(name="priority", settings={"scheduling_policy": "priority"}, source="the engine's second policy"),
    LabPolicy(
        name=CONTROL,
        settings={"scheduling_policy": "chairlift.core.scheduler.policy:FirstComeFirstServed"},
        source="control: fcfs that is told the targets, so that the engine paces prompts for TPOT",
    ),
    LabPolicy(
        name="lease",
        settings={"cache_eviction": "lease"},
        source="our own: a conversation keeps its blocks while its tool runs, as in Continuum, but bounded",
    ),
    LabPolicy(
        name="t-lru",
        settings={"cache_eviction": "tlru"},
        source="T-LRU, arXiv 2510.15152 (abstract)",
        claim="TTFT p90 -27.5 %, p95 -23.9 % against LRU on WildChat conversations",
    ),
    LabPolicy(
        name="continuum",
        settings={"cache_eviction": "chairlift.core.kv_cache.eviction.continuum:Continuum"},
        source="Continuum, arXiv 2511.02230 (abstract; rule of its released code)",
        claim="time of an agent's job up to 8 times shorter (SWE-Bench, BFCL)",
    ),
    LabPolicy(
        name="prefill_first",
        settings={"prefill_mode": "prefill_first"},
        source="vLLM's first scheduler, and SGLang: prompts get steps of their own, before decodes",
    ),
    LabPolicy(
        name="decode_first",
        settings={"prefill_mode": "decode_first"},
        source="FasterTransformer's order: prompts only while fewer than half of the rows decode",
    ),
    LabPolicy(
        name="separate",
        settings={"prefill_mode": "separate"},
        source="Text Generation Inference: steps of prompts and steps of decodes take turns",
    ),
    LabPolicy(
        name="prefill_auto",
        settings={"prefill_mode": "auto"},
        source="our own: mixed, prefill_first or separate, by the predicted time of a step",
    ),
    LabPolicy(
        name="static",
        settings={"batching": "static"},
        source="FasterTransformer: a batch runs until its last row ends",
    ),
    LabPolicy(
        name="dynamic",
        settings={"batching": "dynamic"},
        source="Triton's dynamic batcher: nobody joins a running batch",
    ),
    LabPolicy(
        name="governor_rules",
        settings={"governor": "rules"},
        source="our own: rows, budget and watermark follow the traffic by rules",
    ),
    LabPolicy(
        name="governor_learned",
        settings={"governor": "chairlift.core.plugins.learned_governor:LearnedGovernor"},
        source="our own: the same three settings by a policy that was learned in the simulator",
    ),
    LabPolicy(name="random", settings={"scheduling_policy": f"{_HERE}:RandomOrder"}, source="control"),
    LabPolicy(name="oracle-srpt", settings={"scheduling_policy": f"{_HERE}:OracleShortest"}, source="control"),
)


def known_policies() -> dict[str, LabPolicy]:
    """Name -> policy: the engine's own, the controls, and the ideas of the catalogue."""
    known = {each.name: each for each in _OWN}
    for name, idea in _ideas().items():
        known[name] = LabPolicy(
            name=name,
            settings=idea.settings,
            source=idea.source,
            claim=idea.claim,
            simulated_only=idea.simulated_only,
        )
    return known


def _ideas() -> Mapping[str, Any]:
    if importlib.util.find_spec(_CATALOG) is None:
        return {}
    ideas: Mapping[str, Any] = importlib.import_module(_CATALOG).IDEAS
    return ideas


def chosen_policies(text: str) -> list[LabPolicy]:
    """The policies of ``all``, or of a list of names and ``module:Class`` paths. The baseline is always the first.

    Raises ConfigError for an unknown name.
    """
    known = known_policies()
    names = list(known) if text == "all" else [part.strip() for part in text.split(",") if part.strip()]
    chosen = {BASELINE: known[BASELINE]}
    for name in names:
        if name in known:
            chosen[name] = known[name]
        elif is_plugin(name):
            chosen[name] = LabPolicy(name=name, settings={"scheduling_policy": name}, source="your own")
        else:
            raise ConfigError(f"policies must be all, module:Class or some of {', '.join(known)}; got {name!r}")
    return list(chosen.values())
