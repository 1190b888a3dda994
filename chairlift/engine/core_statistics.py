"""Statistics of a core."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from chairlift.core.request import Request
from chairlift.core.scheduler.fairness import VirtualTokenCounters
from chairlift.core.scheduler.governor_loop import GovernorLoop
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.cache_statistics import CacheStatistics
from chairlift.engine.clock import Clock
from chairlift.engine.expert_load import ExpertLoad
from chairlift.engine.preparers import Preparers
from chairlift.engine.step_times import CoreTimes
from chairlift.metrics.stats import EngineStats

__all__ = ["CoreStatistics"]

_SHARES_SECONDS: Final = 1.0


class CoreStatistics:
    """Counts what a core's steps computed, and reads what its parts count. ``reserved`` are the classes of service that
    have reserved rows. ``expert_load`` is None for a model that does not count the tokens of its experts.
    ``collective_seconds`` returns the seconds that the executor has waited for other processes of its model."""

    def __init__(
        self,
        scheduler: Scheduler,
        preparers: Preparers,
        times: CoreTimes,
        clock: Clock,
        *,
        governor: GovernorLoop | None,
        expert_load: ExpertLoad | None,
        collective_seconds: Callable[[], float],
        reserved: Iterable[str],
    ) -> None:
        self._scheduler = scheduler
        self._preparers = preparers
        self._times = times
        self._clock = clock
        self._governor = governor
        self._expert_load = expert_load
        self._collective_seconds = collective_seconds
        self._reserved = list(reserved)
        self._counted = EngineStats()
        self._shares_noted = -math.inf
        self._tenant_gap = 0.0
        self._rows_by_class: dict[str, int] = {}
        self._cache = CacheStatistics(scheduler.kv)
        self._of_cache: dict[str, Any] = {}

    def joined(self, request: Request) -> None:
        """Count a request that is in a step for the first time."""
        if request.source is None:
            # Not the prompt alone: a request that continues on this replica looks up its delivered tokens too.
            self._counted.prefix_cache_queries += len(request.token_ids)
            self._counted.prefix_cache_hits += request.num_cached_tokens

    def landed(self, out: SchedulerOutput) -> None:
        """Count a step that has ended."""
        counted = self._counted
        counted.step_tokens = out.num_tokens
        counted.num_computed_tokens += out.num_tokens
        counted.num_recomputed_tokens += out.num_recomputed
        counted.num_swapped_out_blocks += len(out.swap_out)
        counted.num_swapped_in_blocks += len(out.swap_in)

    def read(self) -> EngineStats:
        """Statistics after the newest step. The numbers per class, adapter and tenant, and of the times of blocks, are
        at most one second old."""
        self._note_shares()
        if self._expert_load is not None:
            self._expert_load.read(self._clock.now())
        scheduler = self._scheduler
        kv = self._scheduler.kv
        counts = kv.counts()
        rate = scheduler.preemption_rate
        floor = self._times.floor
        step_tokens = self._counted.step_tokens
        self._counted.step_tokens = 0  # a later frame without a step must not report these tokens again
        return dataclasses.replace(
            self._counted,
            step_tokens=step_tokens,
            **self._of_cache,
            num_running=len(scheduler.running),
            num_waiting=scheduler.batch.num_waiting,
            used_blocks=counts.used,
            cached_blocks=counts.cached,
            free_blocks=counts.free,
            shared_blocks=counts.shared,
            num_prefix_waits=scheduler.batch.in_flight.num_followed,
            num_steps=scheduler.step,
            num_preemptions=scheduler.num_preemptions,
            num_finished_sequences=rate.num_finished,
            num_preempted_sequences=rate.num_preempted,
            preemption_rate=rate.recent(self._clock.now()),
            num_swap_preemptions=scheduler.preemptor.num_swaps,
            num_tail_preemptions=scheduler.preemptor.num_tails,
            num_offloaded_blocks=kv.num_offloaded,
            **self._draft_counts(),
            **self._preparers.counts(),
            num_brought_back_blocks=kv.num_brought_back,
            num_late_dropped=scheduler.num_past_deadline if scheduler.drop_late else 0,
            num_late_downgraded=0 if scheduler.drop_late else scheduler.num_past_deadline,
            rows_by_class=self._rows_by_class,
            tenant_gap=self._tenant_gap,
            running_limit=scheduler.batch.running_limit,
            token_budget=scheduler.batch.token_budget,
            watermark=scheduler.batch.watermark,
            num_governor_decisions=0 if self._governor is None else self._governor.num_decisions,
            collective_seconds=self._collective_seconds(),
            collective_share=None if self._times.collectives is None else self._times.collectives.share,
            floor_share=None if floor is None else floor.share,
            expert_imbalance=[] if self._expert_load is None else self._expert_load.imbalance,
        )

    def _draft_counts(self) -> dict[str, Any]:
        drafts = self._scheduler.drafts
        if drafts is None:
            return {}
        return {
            "num_verified_rows": drafts.num_verified,
            "num_draft_tokens": drafts.num_drafts,
            "num_accepted_tokens": drafts.num_accepted,
            "accepted_at": drafts.accepted_at,
        }

    def _note_shares(self) -> None:
        """Update the statistics of running requests per class of service, adapters in use, the prefix cache, and the
        largest difference in service between tenants. They are not updated in every step, so that steady decoding stays
        cheap."""
        now = self._clock.now()
        running = self._scheduler.running
        if running and now < self._shares_noted + _SHARES_SECONDS:
            return
        self._shares_noted = now if running else -math.inf
        if self._reserved:
            rows = Counter(request.service.service_class for request in running.values())
            self._rows_by_class = {name: rows[name] for name in self._reserved}
        self._preparers.adapters.note_use()
        self._of_cache = self._cache.read()
        counters = getattr(self._scheduler.policy, "counters", None)
        if isinstance(counters, VirtualTokenCounters):
            service = [counters[tenant] for tenant in counters.active()]
            self._tenant_gap = max(service, default=0.0) - min(service, default=0.0)
