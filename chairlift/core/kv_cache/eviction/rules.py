"""Makes the rule of eviction from its name."""

from __future__ import annotations

from typing import Final, cast

from chairlift.base.plugin_names import plugin_path
from chairlift.base.plugins import load_plugin
from chairlift.base.service_class import parse_service_classes
from chairlift.config import CacheConfig, SchedulerConfig
from chairlift.core.kv_cache.eviction.asked import AskedRule
from chairlift.core.kv_cache.eviction.lease import LeaseRule
from chairlift.core.kv_cache.eviction.lru import LRU
from chairlift.core.kv_cache.eviction.rule import EvictionRule

__all__ = ["eviction_from_config", "eviction_from_name"]

_RULES: Final = {rule.name: rule for rule in (LRU, AskedRule, LeaseRule)}


def eviction_from_config(cache: CacheConfig, scheduler: SchedulerConfig) -> EvictionRule:
    """A new rule for these settings. Raises ConfigError for a custom class that cannot be used."""
    name = cache.cache_eviction
    if name == "auto":
        classes = {} if scheduler.scheduling_policy == "fcfs" else parse_service_classes(scheduler.service_classes)
        name = LeaseRule.name if any(each.retention for each in classes.values()) else AskedRule.name
    return eviction_from_name(name)


def eviction_from_name(name: str) -> EvictionRule:
    """A new rule: ``lru``, ``asked``, ``lease``, a named plugin (``tlru``) or ``module:Class``. Raises ConfigError for
    a custom class that cannot be used."""
    if name in _RULES:
        return _RULES[name]()
    path = plugin_path("cache_eviction", name)
    members = [member for member in dir(LRU()) if not member.startswith("_")]
    base = "chairlift.core.kv_cache.eviction.lru.LRU"
    return cast(EvictionRule, load_plugin("cache_eviction", path, lambda owner: owner(), members, base))
