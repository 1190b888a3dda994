"""Settings -> the scheduler of a core."""

from __future__ import annotations

from typing import Final

from chairlift.config import SchedulerConfig
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.rows.whole import WholeRows
from chairlift.core.scheduler.answer_lengths import AnswerLengths
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.membership import membership_from_name
from chairlift.core.scheduler.policies import policy_from_config
from chairlift.core.scheduler.policy import Policy
from chairlift.core.scheduler.preemption import PreemptionMode
from chairlift.core.scheduler.prefill_mode import prefill_mode_from_name
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.spec_decode.adaptive import speculator_from_config
from chairlift.engine.estimates import estimator_from
from chairlift.engine.preparers import Preparers
from chairlift.errors import ConfigError
from chairlift.executor.executor import Executor

__all__ = ["scheduler_from_config"]

_LOOK_AHEAD: Final = 8
"""Number of further waiting requests to try when the first one does not fit. Each try reads the request's block
table."""
_MAX_TIMES_PASSED: Final = 16
"""Later requests may pass a waiting request at most this often, so that large requests also start."""
_MAX_PREEMPTIONS: Final = 8
"""A request that was preempted this often resumes only when it gets all blocks that it may ever need. So it is not
preempted again."""


def scheduler_from_config(
    config: SchedulerConfig,
    executor: Executor,
    kv: KVCacheManager,
    costs: Costs,
    answer_lengths: AnswerLengths,
    preparers: Preparers,
    *,
    max_model_len: int,
    policy: Policy | None,
) -> Scheduler:
    """The scheduler for these settings. ``policy`` replaces the one from the settings. Raises ConfigError."""
    grammars = preparers.grammars
    grammars.made_ahead = any(group.state_span is not None for group in executor.cache_groups)
    policy = policy or policy_from_config(config, estimator_from(costs, answer_lengths, kv))
    if getattr(policy, "operators", 0) and not getattr(executor, "ends_between_operators", False):
        raise ConfigError(
            f"scheduling_policy {policy.name} ends steps between operators, which only a simulated machine does; use"
            " chairlift sim, or another policy"
        )
    drafting = executor.num_lookahead_steps, grammars, getattr(executor, "drafter", None)
    return Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=policy,
        prefill_mode=prefill_mode_from_name(config.prefill_mode),
        membership=membership_from_name(config.batching, config.batch_wait_ms, config.batch_sizes),
        watermark=config.admission_watermark,
        look_ahead=_LOOK_AHEAD,
        max_times_passed=_MAX_TIMES_PASSED,
        max_preemptions=_MAX_PREEMPTIONS,
        preemption=PreemptionMode(config.preemption_mode, costs),
        costs=costs,
        answer_lengths=answer_lengths,
        policy_share=config.policy_share,
        drop_late=config.late_requests == "drop",
        speculator=speculator_from_config(config, costs, *drafting),
        guide=grammars,
        kinds=[*preparers.kinds(executor), *([] if executor.cache_groups else [WholeRows()])],
        reads_shared_once=getattr(executor, "reads_shared_once", False),
    )
