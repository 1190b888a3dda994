"""Typical bugs of inference engines, injected one at a time. The simulator must detect each of them.

Each bug is a function that takes ``patch(owner, name, value)``; its name describes the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from chairlift.base.prefix_keys import block_tokens
from chairlift.base.step_batch import SampledTokens, StepBatch
from chairlift.core.kv_cache import prefix_cache
from chairlift.core.kv_cache.block_pool import BlockPool
from chairlift.core.kv_cache.block_tables import BlockTables
from chairlift.core.kv_cache.layout import CacheLayout
from chairlift.core.kv_cache.manager import Admission, KVCacheManager
from chairlift.core.kv_cache.prefix_cache import PrefixCache
from chairlift.core.kv_cache.swap import SwapPool
from chairlift.core.plugins import prefill_modes
from chairlift.core.request import Request, RequestStatus
from chairlift.core.scheduler import preemptor
from chairlift.core.scheduler.admission import WaitingQueue
from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.decode_rows import DecodeRows
from chairlift.core.scheduler.fairness import VirtualTokenCounters
from chairlift.core.scheduler.output import FAILED_ROW, SchedulerOutput
from chairlift.core.scheduler.policy import FirstComeFirstServed, Resource
from chairlift.core.scheduler.precedence import Precedence
from chairlift.core.scheduler.preemptor import Preemptor
from chairlift.core.scheduler.prefill_mode import Turn
from chairlift.core.scheduler.prompt_budget import PromptBudget
from chairlift.core.scheduler.prompt_share import PromptShare
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.step import ScheduledStep
from chairlift.engine.detokenizer import IncrementalDetokenizer
from chairlift.engine.engine import Engine
from chairlift.engine.grammars import Grammars
from chairlift.engine.output_processor import OutputProcessor
from chairlift.engine.step_masks import StepMasks
from chairlift.executor import local
from chairlift.executor.input_batch import InputBatch
from chairlift.executor.local import LocalExecutor
from chairlift.executor.sampling import apart
from chairlift.models import hashlm

Patch = Callable[[Any, str, Any], None]
MUTANTS: dict[str, Callable[[Patch], None]] = {}
PROMISE_MUTANTS: dict[str, tuple[str, Callable[[Patch], None]]] = {}
"""Name of a bug -> (world that detects it, function that injects it). The bugs break service promises of the policy
`priority`."""


def mutant(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[plant.__name__] = plant
    return plant


def promise_mutant(world: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Decorator for a bug that breaks a promise which only the simulated worlds of this name check."""

    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        PROMISE_MUTANTS[plant.__name__] = (world, plant)
        return plant

    return register


@mutant
def abort_leaves_waiting_request_in_queue(patch: Patch) -> None:
    patch(Batch, "remove", _without(Batch.remove, "waiting", "remove"))


@mutant
def prompts_go_in_policy_order_only(patch: Patch) -> None:
    patch(PromptShare, "split", lambda self, budget, reserved: budget)


@mutant
def prompts_go_by_size_only(patch: Patch) -> None:
    patch(PromptShare, "split", lambda self, budget, reserved: 0)


@mutant
def largest_request_goes_first(patch: Patch) -> None:
    patch(WaitingQueue, "size_order", lambda self, r: (*self.policy.standing(r), -r.size, r.sequence))


@mutant
def size_is_what_is_left(patch: Patch) -> None:
    patch(
        WaitingQueue,
        "size_order",
        lambda self, r: (*self.policy.standing(r), r.num_tokens - r.num_computed_tokens, r.sequence),
    )


@mutant
def size_comes_before_priority(patch: Patch) -> None:
    patch(Precedence, "standing", lambda self, request: ())


@mutant
def rest_of_the_size_share_is_lost(patch: Patch) -> None:
    original = PromptBudget._run_smallest

    def run(self: PromptBudget, step: ScheduledStep, budget: int) -> int:
        return original(self, step, min(budget, 1))

    patch(PromptBudget, "_run_smallest", run)


@mutant
def a_row_has_two_chunks_in_a_step(patch: Patch) -> None:
    patch(PromptBudget, "_take_back_chunk", lambda self, request, step: 0)


@mutant
def blocks_freed_twice_after_preemption(patch: Patch) -> None:
    original = BlockTables.free

    def free(self: BlockTables, request: Request, in_flight: int) -> None:
        tables = [list(table) for table in request.block_ids]
        original(self, request, in_flight)
        if request.finish_reason is None:
            request.block_ids = tables
            original(self, request, in_flight)

    patch(BlockTables, "free", free)


@mutant
def block_table_kept_on_preemption(patch: Patch) -> None:
    original = BlockTables.free

    def free(self: BlockTables, request: Request, in_flight: int) -> None:
        if request.finish_reason is not None:
            original(self, request, in_flight)

    patch(BlockTables, "free", free)


@mutant
def request_larger_than_the_cache_admitted(patch: Patch) -> None:
    patch(KVCacheManager, "fits_when_empty", lambda self, num_tokens: True)
    patch(KVCacheManager, "capacity_tokens", property(lambda self: 10_000))


@mutant
def null_block_given_out(patch: Patch) -> None:
    original = BlockPool.__init__

    def init(self: BlockPool, num_blocks: int, *args: Any) -> None:
        original(self, num_blocks, *args)
        self._blank.append(0)

    patch(BlockPool, "__init__", init)


@mutant
def blocks_freed_while_a_step_in_flight_uses_them(patch: Patch) -> None:
    def release(self: BlockTables, group: int, blocks: list[int], in_flight: int) -> None:
        for block in blocks:
            self.pools[group].release(block)

    patch(BlockTables, "_release", release)


@mutant
def row_keeps_the_sampling_settings_of_its_last_owner(patch: Patch) -> None:
    original = InputBatch._join

    def join(self: InputBatch, row: Any) -> None:
        before = stale.get((id(self), row.slot))
        original(self, row)
        stale[(id(self), row.slot)] = self.sampling[row.slot]
        if before is not None:
            self.sampling[row.slot] = before

    stale: dict[tuple[int, int], Any] = {}
    patch(InputBatch, "_join", join)


@mutant
def row_keeps_the_first_block_of_its_last_owner(patch: Patch) -> None:
    original = InputBatch._join

    def join(self: InputBatch, row: Any) -> None:
        before = [int(table[row.slot, 0]) for table in self.block_tables]
        original(self, row)
        for table, block in zip(self.block_tables, before, strict=True):
            table[row.slot, 0] = block or table[row.slot, 0]

    patch(InputBatch, "_join", join)
    patch(InputBatch, "_clear", lambda self, slot: None)


@mutant
def host_block_given_out_while_it_is_brought_back(patch: Patch) -> None:
    patch(SwapPool, "touch", lambda self, group, host, step: None)


@mutant
def copy_of_a_failed_step_kept(patch: Patch) -> None:
    patch(KVCacheManager, "copies_lost", lambda self, step: None)


@mutant
def host_copies_of_untrusted_content_kept(patch: Patch) -> None:
    patch(PrefixCache, "drop_copy", lambda self, group, node: None)


@mutant
def evicted_block_copied_a_step_late(patch: Patch) -> None:
    original = KVCacheManager.scheduled

    def scheduled(self: KVCacheManager, step: int) -> list[tuple[int, int, int]]:
        late = waiting.get(id(self), [])
        waiting[id(self)] = original(self, step)
        return late

    waiting: dict[int, list[tuple[int, int, int]]] = {}
    patch(KVCacheManager, "scheduled", scheduled)


@mutant
def what_is_brought_back_counts_as_there(patch: Patch) -> None:
    original = KVCacheManager.admit

    def admit(self: KVCacheManager, *args: Any, **settings: Any) -> Admission | None:
        admission = original(self, *args, **settings)
        if admission is not None:
            admission.swap_in.clear()
        return admission

    patch(KVCacheManager, "admit", admit)


@mutant
def differences_of_a_failed_step_lost(patch: Patch) -> None:
    original = InputBatch.apply

    def apply(self: InputBatch, out: Any) -> Any:
        self._unapplied.clear()
        return original(self, out)

    patch(InputBatch, "apply", apply)


@mutant
def abort_matches_by_prefix(patch: Patch) -> None:
    original = Engine.abort

    def abort(self: Engine, request_id: str) -> bool:
        found = [name for name in self._outputs.ids() if name.startswith(request_id)]
        return bool([original(self, name) for name in found])

    patch(Engine, "abort", abort)


@mutant
def prefix_cache_ignores_the_salt(patch: Patch) -> None:
    patch(PrefixCache, "_root_key", lambda self, request: b"root")
    root = PrefixCache._root

    def salted(self: PrefixCache, request: Request) -> Any:
        salt, request.cache_salt = request.cache_salt, ""
        try:
            return root(self, request)
        finally:
            request.cache_salt = salt

    walk = PrefixCache.walk

    def unsalted(self: PrefixCache, request: Request, max_blocks: int) -> Any:
        salt, request.cache_salt = request.cache_salt, ""
        try:
            return walk(self, request, max_blocks)
        finally:
            request.cache_salt = salt

    patch(PrefixCache, "_root", salted)
    patch(PrefixCache, "walk", unsalted)


@mutant
def hash_hit_trusted_without_comparing_tokens(patch: Patch) -> None:
    def walk(self: PrefixCache, request: Request, max_blocks: int) -> Any:
        path: list[Any] = []
        node = self._nodes.get(self._root_key(request))
        while node is not None and len(path) < max_blocks:
            start = len(path) * self.block_size
            child = self._nodes.get(
                self._child_key(node, block_tokens(request.token_ids[start : start + self.block_size]))
            )
            if child is None or child.parent is None:
                break
            path.append(child)
            node = child
        return path

    patch(PrefixCache, "walk", walk)


@mutant
def partial_block_cached(patch: Patch) -> None:
    original = PrefixCache.publish

    def publish(self: PrefixCache, request: Request, num_confirmed: int) -> None:
        original(self, request, min(num_confirmed + self.block_size - 1, len(request.block_ids[0]) * self.block_size))

    patch(PrefixCache, "publish", publish)


@mutant
def block_published_before_it_is_computed(patch: Patch) -> None:
    original = Batch.admit

    def admit(self: Batch, request: Request, out: Any) -> bool:
        admitted = original(self, request, out)
        if admitted:
            self.kv.publish(request, len(request.token_ids))
        return admitted

    patch(Batch, "admit", admit)


@mutant
def block_in_use_evicted(patch: Patch) -> None:
    def share(self: BlockPool, block: int) -> None:
        if self.ref_counts[block] == 0:
            self.num_cached -= 1
        self.ref_counts[block] += 1

    patch(BlockPool, "share", share)


@mutant
def shared_block_not_counted(patch: Patch) -> None:
    original = BlockPool.share

    def share(self: BlockPool, block: int) -> None:
        if self.ref_counts[block] == 0:
            original(self, block)

    patch(BlockPool, "share", share)


@mutant
def fork_shares_the_block_it_writes(patch: Patch) -> None:
    original = KVCacheManager.admit

    def admit(self: KVCacheManager, request: Request, *args: Any, **kwargs: Any) -> Admission | None:
        admission = original(self, request, *args, **kwargs)
        return None if admission is None else Admission(admission.num_computed_tokens, [])

    patch(KVCacheManager, "admit", admit)


@mutant
def fork_from_a_source_whose_prompt_is_not_computed(patch: Patch) -> None:
    patch(KVCacheManager, "_can_fork", lambda self, source, forked: source.slot >= 0)


@mutant
def computed_tokens_not_reset_on_preemption(patch: Patch) -> None:
    original = Batch.vacate

    def vacate(self: Batch, request: Request) -> None:
        computed = request.num_computed_tokens
        original(self, request)
        if request.finish_reason is None:
            request.num_computed_tokens = computed

    patch(Batch, "vacate", vacate)


@mutant
def held_back_text_not_flushed(patch: Patch) -> None:
    patch(IncrementalDetokenizer, "finish", lambda self: None)


@mutant
def half_a_character_emitted(patch: Patch) -> None:
    original = IncrementalDetokenizer.update

    def update(self: IncrementalDetokenizer, token_ids: Any, stop_terminated: bool = False) -> str | None:
        stop = original(self, token_ids, stop_terminated)
        return stop if stop is not None or self._ended else self._append(self._decoder.flush())

    patch(IncrementalDetokenizer, "update", update)


@mutant
def late_result_accepted(patch: Patch) -> None:
    def accept(self: Scheduler, flight: Any, tokens: Any) -> list[Request | None]:
        for request, token in zip(flight.sampled, tokens, strict=True):
            if request is not None:
                request.token_ids.append(token)
        return list(flight.sampled)

    patch(Scheduler, "_accept_some", accept)


@mutant
def failed_row_sampled_all_the_same(patch: Patch) -> None:
    original = Batch.__init__

    def init(self: Batch, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        del self.stops[FAILED_ROW]

    patch(Batch, "__init__", init)


@mutant
def blocks_of_a_failed_request_stay_cached(patch: Patch) -> None:
    patch(
        KVCacheManager,
        "forget",
        lambda self, request: self.publish(request, len(request.block_ids[0]) * self.block_size),
    )


@mutant
def other_samples_lost_when_the_first_ends(patch: Patch) -> None:
    def release(self: Batch, request: Request, now: float) -> None:
        request.siblings = []

    patch(Batch, "release_siblings", release)


@mutant
def window_forgets_one_position_too_early(patch: Patch) -> None:
    original = CacheLayout.first_in_reach
    patch(CacheLayout, "first_in_reach", lambda self, group, position: original(self, group, position + 1))


@mutant
def whole_prompt_taken_from_the_cache(patch: Patch) -> None:
    original = PrefixCache.walk
    patch(
        PrefixCache, "walk", lambda self, request, _: original(self, request, len(request.token_ids) // self.block_size)
    )


@mutant
def generated_tokens_lost_on_recompute(patch: Patch) -> None:
    original = Preemptor.preempt

    def preempt(self: Preemptor, request: Request, step: Any) -> None:
        original(self, request, step)
        del request.token_ids[request.num_prompt_tokens :]

    patch(Preemptor, "preempt", preempt)


@mutant
def answer_one_token_too_long(patch: Patch) -> None:
    original = Scheduler.add

    def add(self: Scheduler, request: Request) -> None:
        request.max_total_tokens += 1
        request.limit += 1
        original(self, request)

    patch(Scheduler, "add", add)


@mutant
def end_not_watched_for(patch: Patch) -> None:
    def watch(self: DecodeRows, request: Request, position: int, beats: int) -> None:
        wait = min(-position % self._block_size, request.limit - position)
        request.due_at = self._clock.count + beats + wait
        self._wheel.setdefault(request.due_at, []).append(request)

    patch(DecodeRows, "watch", watch)


@mutant
def waiting_for_a_batch_never_ends(patch: Patch) -> None:
    from chairlift.core.plugins.closed_batches import ClosedBatch

    original = ClosedBatch.places

    def places(self: ClosedBatch, waiting: Any, running: int, free: int, now: float) -> int:
        return 0 if len(waiting) < free else original(self, waiting, running, free, now)

    patch(ClosedBatch, "places", places)


@mutant
def finished_request_reported_twice(patch: Patch) -> None:
    original = OutputProcessor.finish

    def finish(self: OutputProcessor, *args: Any) -> list[Any]:
        outputs = original(self, *args)
        return outputs + outputs

    patch(OutputProcessor, "finish", finish)


@mutant
def collision_taken_for_the_same_content(patch: Patch) -> None:
    original = PrefixCache.publish

    def publish(self: PrefixCache, request: Request, num_confirmed: int) -> None:
        original(self, request, num_confirmed)
        if request.num_published == prefix_cache.NEVER and request.block_ids:
            request.num_published = num_confirmed // self.block_size

    patch(PrefixCache, "publish", publish)


@mutant
def late_request_reported_twice(patch: Patch) -> None:
    original = Precedence.late

    def late(self: Precedence, now: float) -> Iterator[Request]:
        for request in original(self, now):
            yield request
            yield request

    patch(Precedence, "late", late)


@mutant
def lane_lost_when_its_head_is_preempted(patch: Patch) -> None:
    original = WaitingQueue.add

    def add(self: WaitingQueue, request: Request) -> None:
        if request.num_preemptions:
            self._lanes.pop(self.policy.lane(request), None)
        original(self, request)

    patch(WaitingQueue, "add", add)


@mutant
def preempted_request_goes_to_the_back(patch: Patch) -> None:
    original = WaitingQueue.add

    def add(self: WaitingQueue, request: Request) -> None:
        status, request.status = request.status, RequestStatus.WAITING
        sequence, request.sequence = request.sequence, request.sequence + 1000 * (status is not RequestStatus.WAITING)
        original(self, request)
        request.status, request.sequence = status, sequence

    patch(WaitingQueue, "add", add)


@mutant
def prefill_mode_loses_the_decode_rows_of_the_step(patch: Patch) -> None:
    original = Scheduler._run_decodes

    def run_decodes(self: Scheduler, step: Any) -> None:
        original(self, step)
        step.runs_decodes = self.prefill_mode.name == "mixed"

    patch(Scheduler, "_run_decodes", run_decodes)


@mutant
def prefill_mode_never_returns_to_decodes(patch: Patch) -> None:
    patch(prefill_modes.Separate, "turn", lambda self, view: Turn.PREFILL)
    patch(Scheduler, "_run_decodes", _unless_prefill_mode(Scheduler._run_decodes))


@mutant
def put_back_leaks_blocks(patch: Patch) -> None:
    original = Batch.put_back

    def put_back(self: Batch, request: Request) -> None:
        for pool, table in zip(self.kv.pools, request.block_ids, strict=True):
            for block in filter(None, table):
                pool.share(block)
        original(self, request)

    patch(Batch, "put_back", put_back)


@mutant
def mask_of_the_neighbour_applied(patch: Patch) -> None:
    original = LocalExecutor.sample

    def sample(self: LocalExecutor, handle: Any, masks: Any = None) -> Any:
        count = len(handle[1].sample_rows)
        return original(self, handle, masks and {(index + 1) % count: mask for index, mask in masks.items()})

    patch(LocalExecutor, "sample", sample)


@mutant
def mask_of_the_last_sample_position_applied_to_the_whole_row(patch: Patch) -> None:
    original = LocalExecutor.sample

    def sample(self: LocalExecutor, handle: Any, masks: Any = None) -> Any:
        rows = handle[1].sample_rows.tolist()
        lasts = {row: masks.get(index) for index, row in enumerate(rows)} if masks else {}
        spread = {index: lasts[row] for index, row in enumerate(rows) if lasts.get(row) is not None}
        return original(self, handle, spread or None)

    patch(LocalExecutor, "sample", sample)


@mutant
def sample_positions_off_by_one(patch: Patch) -> None:
    """Bug: all sample positions of a row except the last are shifted. (Worlds without drafts would notice a shift of
    the last.)"""
    original = InputBatch._flatten

    def flatten(self: InputBatch, out: SchedulerOutput) -> StepBatch:
        step = original(self, out)
        step.sample_tokens[:-1] -= step.sample_rows[:-1] == step.sample_rows[1:]
        return step

    patch(InputBatch, "_flatten", flatten)


@mutant
def every_sample_position_sees_the_whole_row(patch: Patch) -> None:
    patch(StepBatch, "sample_lengths", property(lambda self: self.seq_lens[self.sample_rows]))


@mutant
def token_of_the_first_sample_position_accepted(patch: Patch) -> None:
    original = Scheduler.update

    def update(self: Scheduler, out: SchedulerOutput, tokens: Any, now: float) -> Any:
        taken, at = list(tokens), out.num_decodes
        for chunk in out.chunks:
            if chunk.samples:
                taken[at + chunk.samples - 1] = taken[at]
            at += chunk.samples
        return original(self, out, taken, now)

    patch(Scheduler, "update", update)


@promise_mutant("displaces")
def protected_work_displaced(patch: Patch) -> None:
    patch(Precedence, "_within", lambda self, request, resource: False)


@promise_mutant("reclaims")
def reservation_ignored_by_the_line(patch: Patch) -> None:
    patch(Precedence, "_claims", lambda self, request, resource: False)


@promise_mutant("reclaims")
def reserved_step_tokens_ignored(patch: Patch) -> None:
    patch(Precedence, "share", FirstComeFirstServed.share)


@promise_mutant("reclaims")
def blocks_of_a_displaced_row_not_counted(patch: Patch) -> None:
    original = KVCacheManager.lacks

    def lacks(self: KVCacheManager, request: Request, reserve: int, watermark: float, leaving: Any = ()) -> bool:
        return original(self, request, reserve, watermark)

    patch(KVCacheManager, "lacks", lacks)


@promise_mutant("ages")
def age_does_not_count(patch: Patch) -> None:
    original = Precedence.rank
    patch(Precedence, "rank", lambda self, head, waited, now: original(self, head, 0.0, now))


@promise_mutant("shares")
def idle_time_saved_up(patch: Patch) -> None:
    def queued(self: VirtualTokenCounters, request: Request) -> None:
        self._waiting.setdefault(request.service.tenant, set()).add(request.request_id)

    patch(VirtualTokenCounters, "queued", queued)


@promise_mutant("shares")
def tenant_with_running_work_counts_as_waiting(patch: Patch) -> None:
    original = VirtualTokenCounters.joined

    def joined(self: VirtualTokenCounters, request: Request) -> None:
        tenant = request.service.tenant
        original(self, request)
        self._waiting.setdefault(tenant, set()).add(request.request_id)

    patch(VirtualTokenCounters, "joined", joined)


@promise_mutant("shares")
def generated_tokens_not_charged(patch: Patch) -> None:
    def settle(self: VirtualTokenCounters, running: Iterable[Request]) -> None:
        for request in running:
            request.num_charged_tokens = max(request.num_charged_tokens, request.num_computed_tokens)

    patch(VirtualTokenCounters, "settle", settle)


@promise_mutant("shares")
def charged_twice_after_preemption(patch: Patch) -> None:
    original = VirtualTokenCounters.joined

    def joined(self: VirtualTokenCounters, request: Request) -> None:
        for _ in range(1 + bool(request.num_preemptions)):
            original(self, request)

    patch(VirtualTokenCounters, "joined", joined)


@mutant
def grammar_does_not_go_back_with_a_dropped_token(patch: Patch) -> None:
    original = Grammars._follow

    def follow(row: Any, drawn: Any) -> bool:
        rewind, row.matcher.rewind = row.matcher.rewind, lambda num_consumed: True
        try:
            return original(row, drawn)
        finally:
            row.matcher.rewind = rewind

    patch(Grammars, "_follow", staticmethod(follow))


@mutant
def answers_of_a_request_share_a_matcher(patch: Patch) -> None:
    original = Grammars._start

    def start(self: Grammars, requests: Any, compiled: Any) -> None:
        original(self, requests, compiled)
        for request in requests:
            self._rows[request.request_id].matcher = self._rows[requests[0].request_id].matcher

    patch(Grammars, "_start", start)


@mutant
def mask_ignores_tokens_in_flight(patch: Patch) -> None:
    patch(StepMasks, "_drawn", lambda self, request: [])


@mutant
def mask_goes_to_the_row_that_was_there_before(patch: Patch) -> None:
    original = Grammars.rows_of

    def rows_of(self: Grammars, out: SchedulerOutput) -> Any:
        if self._decode_rows and out.decode_rows:
            self._decode_rows = out.decode_rows
        return original(self, out)

    patch(Grammars, "rows_of", rows_of)


@mutant
def request_joins_before_its_grammar_is_compiled(patch: Patch) -> None:
    original = Grammars.add

    def add(self: Grammars, requests: Any, grammar: Any) -> None:
        original(self, requests, grammar)
        for request in requests:
            request.is_ready = True

    patch(Grammars, "add", add)


@mutant
def complete_answer_goes_on(patch: Patch) -> None:
    patch(Grammars, "complete", lambda self, rows: [])


@mutant
def grammar_that_fails_is_never_told(patch: Patch) -> None:
    original = Grammars.take_ready
    patch(Grammars, "take_ready", lambda self: (original(self)[0], []))


@mutant
def token_that_the_grammar_refuses_is_delivered(patch: Patch) -> None:
    patch(
        Grammars,
        "landed",
        lambda self, rows, step, tokens: [self._follow(row, [tokens.token_ids[i]]) for i, row in rows],
    )


@mutant
def aborted_request_is_still_compiled_for(patch: Patch) -> None:
    original = Batch.remove

    def remove(self: Batch, request: Request, now: float) -> None:
        kept = self.unready.get(request.request_id)
        original(self, request, now)
        if kept is not None:
            self.unready[request.request_id] = kept

    patch(Batch, "remove", remove)


@promise_mutant("displaces")
def preempted_without_progress(patch: Patch) -> None:
    def may_be_preempted(request: Request, max_preemptions: int, step: int) -> bool:
        return request.finish_reason is None and request.admitted_at_step < step

    patch(preemptor, "may_be_preempted", may_be_preempted)


def _unless_prefill_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Any, *args: Any) -> Any:
        return None if self.prefill_mode.name == "separate" else original(self, *args)

    return called


@mutant
def one_row_without_memory_ends_the_whole_step(patch: Patch) -> None:
    def computed_apart(batch: StepBatch, masks: Any, compute: Callable[..., Any]) -> SampledTokens:
        return compute(batch, masks)

    patch(local, "compute_apart", computed_apart)


@mutant
def one_row_that_cannot_be_sampled_ends_the_whole_step(patch: Patch) -> None:
    patch(hashlm, "sample_rows", lambda batch, masks, sample: sample(slice(None), batch, masks))


@mutant
def parts_of_a_failed_step_take_the_first_masks(patch: Patch) -> None:
    patch(apart, "_shifted", lambda masks, first, end: masks)


@mutant
def parts_of_a_failed_step_take_the_first_sampling_parameters(patch: Patch) -> None:
    original = StepBatch.part

    def part(self: StepBatch, first: int, end: int) -> StepBatch:
        found = original(self, first, end)
        found.sampling = self.sampling[: end - first]
        return found

    patch(StepBatch, "part", part)


@mutant
def saved_kv_of_a_failed_row_is_kept(patch: Patch) -> None:
    patch(Scheduler, "fail_row", lambda self, request_id, step, now: [])


def _without(original: Callable[..., Any], attribute: str, method: str) -> Callable[..., Any]:
    """Make a bug: the method ``original``, in which calls of ``self.<attribute>.<method>()`` do nothing."""

    class _Deaf:
        def __init__(self, part: Any) -> None:
            self._part = part

        def __getattr__(self, name: str) -> Any:
            return (lambda *args: None) if name == method else getattr(self._part, name)

        def __contains__(self, item: Any) -> bool:
            return item in self._part

    def called(self: Any, *args: Any) -> Any:
        part = getattr(self, attribute)
        setattr(self, attribute, _Deaf(part))
        try:
            return original(self, *args)
        finally:
            setattr(self, attribute, part)

    return called


@promise_mutant("owes")
def tenants_wait_for_rows_of_others(patch: Patch) -> None:
    patch(Precedence, "_is_owed", lambda self, request, running: False)


@promise_mutant("ages")
def age_does_not_keep_its_row(patch: Patch) -> None:
    original = Precedence.outranks

    def outranks(self: Precedence, request: Request, running: Request, resource: Resource, now: float) -> bool:
        starving, self._starving = self._starving, set()
        try:
            return original(self, request, running, resource, now)
        finally:
            self._starving = starving

    patch(Precedence, "outranks", outranks)
