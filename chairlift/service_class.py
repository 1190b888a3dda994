"""Classes of service and their promises. Standard library only.

The three names of OpenAI's ``service_tier`` are built in; ``service_classes`` changes them or adds others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from chairlift.errors import ConfigError

__all__ = ["DEFAULT_CLASS", "ServiceClass", "parse_service_classes", "parse_tenant_weights"]

DEFAULT_CLASS = "default"
_MAX_CLASSES = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """One class. Other requests may use its reserved resources while they are idle; the class takes them back when
    needed."""

    priority: int = 0
    """Priority of requests without one of their own. Lower goes first."""
    min_seqs: int = 0
    """Rows of the batch reserved for the class."""
    min_blocks: int = 0
    """KV blocks reserved for the class, in each cache group."""
    min_step_tokens: int = 0
    """Tokens of each step's budget reserved for prompts of the class."""
    ttft_ms: float | None = None
    """Milliseconds from arrival until the first token is due."""
    tpot_ms: float | None = None
    """Longest time per token after the first, in milliseconds."""
    deadline_ms: float | None = None
    """Milliseconds from arrival until the whole answer is due."""
    retention: int = 0
    """Rank of its blocks in the prefix cache: 0, 1 or 2. A higher rank is evicted later."""


_BUILT_IN = {
    "priority": ServiceClass(priority=-10, retention=2),
    DEFAULT_CLASS: ServiceClass(retention=1),
    "flex": ServiceClass(priority=10),
}
_WHOLE = {"priority": (-(2**31), 2**31 - 1), "min_seqs": (0, 2**16), "min_blocks": (0, 2**31)}
_WHOLE |= {"min_step_tokens": (0, 2**24), "retention": (0, 2)}


def parse_service_classes(value: str | Mapping[str, Any]) -> dict[str, ServiceClass]:
    """Classes from ``{"name": {"priority": -5, "min_seqs": 4, ...}}``, as JSON or as a mapping, and the three built-in
    ones.

    Raises ConfigError for anything else.
    """
    classes = dict(_BUILT_IN)
    known = [field.name for field in dataclasses.fields(ServiceClass)]
    for name, settings in _object("service_classes", value).items():
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 64:
            raise ConfigError(f"a service class needs a name of letters, digits and '_', got {name!r:.80}")
        if name == "auto":  # as a service_tier it means that the server chooses
            raise ConfigError("no service class may be named 'auto': requests could not ask for it; take another name")
        if not isinstance(settings, Mapping):
            raise ConfigError(f"service class {name}: its settings must be an object, got {settings!r:.80}")
        for field, given in settings.items():
            if field not in known:
                raise ConfigError(f"service class {name}: unknown setting {field!r:.80}; known: {', '.join(known)}")
            _check(f"service class {name}: {field}", field, given)
        classes[name] = dataclasses.replace(classes.get(name, ServiceClass()), **settings)
    if len(classes) > _MAX_CLASSES:
        raise ConfigError(f"there may be {_MAX_CLASSES} service classes, got {len(classes)}")
    return classes


def parse_tenant_weights(value: str | Mapping[str, Any]) -> dict[str, float]:
    """Weights from ``{"tenant": 2.0}``, as JSON or as a mapping: shares of tenants that are not 1. Raises
    ConfigError."""
    weights = _object("tenant_weights", value)
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0.001 <= weight <= 1000:
            raise ConfigError(f"tenant_weights: the weight of {name!r:.80} must be from 0.001 to 1000, got {weight!r}")
    return {str(name): float(weight) for name, weight in weights.items()}


def _object(setting: str, value: str | Mapping[str, Any]) -> Mapping[Any, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except ValueError as error:
            raise ConfigError(f"{setting} must be a JSON object: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{setting} must be a JSON object, got {value!r:.80}")
    return value


def _check(what: str, field: str, given: Any) -> None:
    if field in _WHOLE:
        low, high = _WHOLE[field]
        if isinstance(given, bool) or not isinstance(given, int) or not low <= given <= high:
            raise ConfigError(f"{what} must be a whole number from {low} to {high}, got {given!r:.80}")
    elif given is not None and (isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < 1e9):
        raise ConfigError(f"{what} must be a number of milliseconds above 0, got {given!r:.80}")
