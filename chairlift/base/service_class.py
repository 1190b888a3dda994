"""Classes of service: priority, reserved resources and deadlines. Standard library only.

The three names of OpenAI's ``service_tier`` are built in; the setting ``service_classes`` changes them or adds classes.
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
    """One class of service. Other requests may use the resources reserved for the class while they are idle; a request
    of the class gets them back when it needs them."""

    priority: int = 0
    """Priority of requests that state no priority. Lower values are served first."""
    min_seqs: int = 0
    """Number of rows of the batch reserved for the class."""
    min_blocks: int = 0
    """Number of KV blocks reserved for the class, in each cache group."""
    min_step_tokens: int = 0
    """Number of tokens of each step's budget reserved for prompts of the class."""
    ttft_ms: float | None = None
    """Milliseconds from arrival until the first token is due."""
    tpot_ms: float | None = None
    """Maximum milliseconds per token after the first token."""
    deadline_ms: float | None = None
    """Milliseconds from arrival until the whole answer is due."""
    retention: int = 0
    """Rank of the class's blocks in the prefix cache: 0, 1 or 2. Blocks of a higher rank are evicted later."""


_BUILT_IN = {
    "priority": ServiceClass(priority=-10, retention=2),
    DEFAULT_CLASS: ServiceClass(retention=1),
    "flex": ServiceClass(priority=10),
}
_WHOLE = {"priority": (-(2**31), 2**31 - 1), "min_seqs": (0, 2**16), "min_blocks": (0, 2**31)}
_WHOLE |= {"min_step_tokens": (0, 2**24), "retention": (0, 2)}


def parse_service_classes(value: str | Mapping[str, Any]) -> dict[str, ServiceClass]:
    """Name -> class, from ``{"name": {"priority": -5, "min_seqs": 4, ...}}`` as JSON or as a mapping. The result
    includes the three built-in classes.

    Raises ConfigError for anything else.
    """
    classes = dict(_BUILT_IN)
    known = [field.name for field in dataclasses.fields(ServiceClass)]
    for name, settings in _object("service_classes", value).items():
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 64:
            raise ConfigError(f"a service class needs a name of letters, digits and '_', got {name!r:.80}")
        if name == "auto":  # a request with service_tier "auto" lets the server choose its class
            raise ConfigError("no service class may be named 'auto': requests could not ask for it; take another name")
        if not isinstance(settings, Mapping):
            raise ConfigError(f"service class {name}: its settings must be an object, got {settings!r:.80}")
        for field, value_given in settings.items():
            if field not in known:
                raise ConfigError(f"service class {name}: unknown setting {field!r:.80}; known: {', '.join(known)}")
            _check(f"service class {name}: {field}", field, value_given)
        classes[name] = dataclasses.replace(classes.get(name, ServiceClass()), **settings)
    if len(classes) > _MAX_CLASSES:
        raise ConfigError(f"there may be {_MAX_CLASSES} service classes, got {len(classes)}")
    return classes


def parse_tenant_weights(value: str | Mapping[str, Any]) -> dict[str, float]:
    """Tenant -> weight, from ``{"tenant": 2.0}`` as JSON or as a mapping. A tenant that is not named has weight 1.
    Raises ConfigError."""
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


def _check(what: str, field: str, value: Any) -> None:
    if field in _WHOLE:
        low, high = _WHOLE[field]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{what} must be a whole number from {low} to {high}, got {value!r:.80}")
    elif value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9):
        raise ConfigError(f"{what} must be a number of milliseconds above 0, got {value!r:.80}")
