"""Makes the policy from the settings."""

from __future__ import annotations

import inspect
from typing import Any, cast

from chairlift.base.plugins import load_plugin
from chairlift.base.service_class import parse_service_classes, parse_tenant_weights
from chairlift.config import SchedulerConfig
from chairlift.core.scheduler.deadlines import EstimateOf
from chairlift.core.scheduler.policy import FCFS, Policy
from chairlift.core.scheduler.precedence import Precedence
from chairlift.core.scheduler.view import View

__all__ = ["load_policy", "policy_from_config"]


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
    """Create an object of the policy class ``module:Class``. Its constructor gets a view if it has a parameter
    ``view``. Raises ConfigError if this fails, or if the class lacks a member that policies need."""
    members = [name for name in dir(type(FCFS)) if not name.startswith("_")]
    base = "chairlift.core.scheduler.policy.FirstComeFirstServed"
    return cast(Policy, load_plugin("scheduling_policy", path, _made, members, base))


def _made(owner: Any) -> Any:
    return owner(view=View()) if "view" in inspect.signature(owner).parameters else owner()
