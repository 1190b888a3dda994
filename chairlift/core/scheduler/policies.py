"""Makes the policy from the settings, and loads custom classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, cast

from chairlift.base.service_class import parse_service_classes, parse_tenant_weights
from chairlift.config import SchedulerConfig
from chairlift.core.scheduler.deadlines import EstimateOf
from chairlift.core.scheduler.policy import FCFS, Policy
from chairlift.core.scheduler.precedence import Precedence
from chairlift.errors import ConfigError

__all__ = ["load_plugin", "load_policy", "policy_from_config"]


def policy_from_config(config: SchedulerConfig, estimate: EstimateOf | None = None) -> Policy:
    """A new policy for these settings. Raises ConfigError for a custom class that cannot be used."""
    if config.scheduling_policy == "fcfs":
        return FCFS
    if config.scheduling_policy == "priority":
        return Precedence(
            parse_service_classes(config.service_classes),
            max_running=config.max_running,
            ageing_seconds=config.ageing_seconds,
            tenant_weights=parse_tenant_weights(config.tenant_weights),
            estimate=estimate,
        )
    return load_policy(config.scheduling_policy)


def load_policy(path: str) -> Policy:
    """Create an object of the policy class ``module:Class``. Raises ConfigError if this fails, or if the class lacks a
    member that policies need."""
    members = [name for name in dir(type(FCFS)) if not name.startswith("_")]
    base = "chairlift.core.scheduler.policy.FirstComeFirstServed"
    return cast(Policy, load_plugin("scheduling_policy", path, lambda owner: owner(), members, base))


def load_plugin(setting: str, path: str, make: Callable[[Any], Any], members: list[str], example: str) -> Any:
    """Import the class ``module:Class`` and return ``make(class)``.

    Raises ConfigError if this fails, or if the result lacks one of ``members``.
    """
    module_name, _, class_name = path.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # search the current directory too; the installed command does not by itself
    try:
        plugin = make(getattr(importlib.import_module(module_name), class_name))
    except Exception as error:
        raise ConfigError(f"{setting} {path!r} cannot be made: {type(error).__name__}: {error}") from error
    missing = [name for name in members if not hasattr(plugin, name)]
    if missing:
        raise ConfigError(f"{setting} {path!r} has no {', '.join(missing)}; start from {example}")
    return plugin
