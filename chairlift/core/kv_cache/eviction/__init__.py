"""Rules that say which block of the prefix cache is evicted next. The pools and the tables know only the interface in
:mod:`~chairlift.core.kv_cache.eviction.rule`."""
