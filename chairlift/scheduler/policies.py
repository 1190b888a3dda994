"""From settings to a policy."""

from __future__ import annotations

import importlib
import sys
from typing import Any, cast

from chairlift.config import SchedulerConfig
from chairlift.errors import ConfigError
from chairlift.scheduler.deadlines import OutlookOf
from chairlift.scheduler.policy import FCFS, Policy
from chairlift.scheduler.precedence import Precedence
from chairlift.scheduler.shadow import ShadowPolicy
from chairlift.service_class import parse_service_classes, parse_tenant_weights

__all__ = ["load_policy", "policy_from_config"]


def policy_from_config(config: SchedulerConfig, outlook: OutlookOf | None = None) -> Policy:
    """A fresh policy. Raises ConfigError for a class of one's own that cannot be used."""
    policy = _policy_from(config, "scheduling_policy", outlook)
    if not config.shadow_policy:
        return policy
    return cast(Policy, ShadowPolicy(policy, _policy_from(config, "shadow_policy", outlook)))


def _policy_from(config: SchedulerConfig, setting: str, outlook: OutlookOf | None) -> Policy:
    name: str = getattr(config, setting)
    if name == "fcfs":
        return FCFS
    if name == "priority":
        return Precedence(
            parse_service_classes(config.service_classes),
            max_running=config.most_running,
            ageing_seconds=config.ageing_seconds,
            tenant_weights=parse_tenant_weights(config.tenant_weights),
            outlook=outlook,
        )
    return load_policy(name, setting)


def load_policy(path: str, setting: str = "scheduling_policy") -> Policy:
    """``module:Class``, imported and made without arguments. Raises ConfigError naming what is missing."""
    module_name, _, class_name = path.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # neither the installed command nor the engine's process looks where it runs
    try:
        owner: Any = getattr(importlib.import_module(module_name), class_name)
        policy = owner()
    except Exception as error:
        raise ConfigError(f"{setting} {path!r} cannot be made: {type(error).__name__}: {error}") from error
    missing = [name for name in _members() if not hasattr(policy, name)]
    if missing:
        raise ConfigError(
            f"{setting} {path!r} has no {', '.join(missing)}; start from"
            " chairlift.scheduler.policy.FirstComeFirstServed"
        )
    return cast(Policy, policy)


def _members() -> list[str]:
    return [name for name in dir(type(FCFS)) if not name.startswith("_")]
