"""Runs a simulated world through the real engine, and checks the engine's invariants and outputs after every step."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from chairlift.base.lora_request import LoRARequest
from chairlift.base.outputs import CompletionOutput, FinishReason, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.step_batch import Masks, SampledTokens, StepBatch
from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.config import CacheGroup, SchedulerConfig
from chairlift.core.kv_cache.eviction.rules import eviction_from_name
from chairlift.core.kv_cache.layout import CacheLayout
from chairlift.core.kv_cache.manager import Admission, KVCacheManager, NewBlocks
from chairlift.core.request import Request
from chairlift.core.scheduler.drafts import Drafts
from chairlift.core.scheduler.output import NewRow, SchedulerOutput
from chairlift.core.scheduler.policies import policy_from_config
from chairlift.core.scheduler.policy import Policy
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.causes import CAUSES
from chairlift.engine.clock import VirtualClock
from chairlift.engine.engine import Engine
from chairlift.engine.input_processor import ModelLimits
from chairlift.engine.mask_limits import MaskLimits
from chairlift.errors import ChairliftError, InvariantError, PromptTooLongError, RequestError
from chairlift.executor.input_batch import InputBatch
from chairlift.executor.local import LocalExecutor
from chairlift.models.hashlm import STATE, HashLM
from chairlift_lab.sim.adapters import AdapterFiles, ScriptedAdapters, content_tag, request_for
from chairlift_lab.sim.drafts import ScriptedDrafts, SuffixDrafts
from chairlift_lab.sim.grammars import GrammarScript, LateMasks, ScriptedGrammars
from chairlift_lab.sim.images import TILE_BYTES, ScriptedEncoder, ScriptedImages, markers_of
from chairlift_lab.sim.mask_watch import MaskWatch
from chairlift_lab.sim.oracle import Expected, byte_tokenizer, expected_answer
from chairlift_lab.sim.policy_watch import PolicyWatch, Violation
from chairlift_lab.sim.scripts import Scripts
from chairlift_lab.sim.share_watch import ShareWatch
from chairlift_lab.sim.world import EOS, VOCAB_SIZE, Event, World

__all__ = ["Simulation", "Violation", "run_world"]

_STEP_SECONDS = 0.01


class _Faults:
    """Faults to inject in the current step. ``active`` maps the kind of a fault to the number of its target."""

    def __init__(self) -> None:
        self.active: dict[str, int] = {}
        self.starving: int | None = None
        """Row for which there is no memory in this step; None before the step's first allocation has failed."""

    def begin(self) -> None:
        """End the faults of the last step."""
        self.active.clear()
        self.starving = None

    def on(self, kind: str) -> bool:
        return kind in self.active


class _FaultyCache(KVCacheManager):
    """A KV cache manager that refuses to allocate blocks while a fault is active."""

    def __init__(self, faults: _Faults, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.faults = faults
        self.refused: set[str] = set()
        """Ids of requests that were refused blocks since the last step."""
        self._extend, self.tables.extend = self.tables.extend, self.extend  # type: ignore[method-assign]

    def admit(self, request: Request, *args: Any, **kwargs: Any) -> Admission | None:
        admission = None if self.faults.on("refuse_admission") else super().admit(request, *args, **kwargs)
        if admission is None:
            self.refused.add(request.request_id)
        return admission

    def extend(self, request: Request, num_tokens: int, in_flight: int) -> list[NewBlocks] | None:
        grown = None if self.faults.on("refuse_growth") else self._extend(request, num_tokens, in_flight)
        if grown is None:
            self.refused.add(request.request_id)
        return grown


class _FaultyModel(HashLM):
    """A HashLM in which a fault makes a whole step or one row fail."""

    faults: _Faults
    max_step_adapters = 0
    """Largest number of different adapters in any step so far."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.images: ScriptedEncoder | None = None
        self.missing_tiles: set[bytes] = set()
        """Keys of tiles whose rows a step needed and that were not in memory."""
        self.missing_adapters: set[int] = set()
        """Numbers of adapters that a step needed although they were not in memory."""
        self.owner_of: Callable[[int], str] = str
        """Function that returns the id of the request in a row."""
        self.starved: set[str] = set()
        """Ids of the requests that a step had no memory for."""

    def move_blocks(self, batch: StepBatch) -> None:
        if self.faults.on("break_moves"):
            super().move_blocks(dataclasses.replace(batch, copies=[], swap_in=[]))
            raise OSError("injected: the blocks could not be moved")
        super().move_blocks(batch)

    def forward(self, batch: StepBatch) -> list[int]:
        if self.faults.on("raise"):
            raise RuntimeError("injected: the forward pass failed")
        if batch.adapters is not None:
            needed = set(batch.adapters.tolist()) - {0}
            self.max_step_adapters = max(self.max_step_adapters, len(needed))
            self.missing_adapters |= needed - set(self.adapter_tags)
        self.missing_tiles |= {key for _, _, key, _ in batch.image_rows if key not in self.image_tags}
        self._starve("starve_forward", batch.slots.tolist())
        return super().forward(batch)

    def draw(self, hidden: list[int], batch: StepBatch, masks: Masks | None) -> SampledTokens:
        self._starve("starve_sampling", batch.sample_slots.tolist())
        return super().draw(hidden, batch, masks)

    def _starve(self, kind: str, slots: list[int]) -> None:
        """Raise MemoryError if the fault is active and the row that it concerns is among ``slots``. The first call of a
        step chooses the row."""
        if not self.faults.on(kind) or not slots:
            return
        if self.faults.starving is None:
            self.faults.starving = slots[self.faults.active[kind] % len(slots)]
            self.starved.add(self.owner_of(self.faults.starving))
        if self.faults.starving in slots:
            raise MemoryError("injected: there is no memory for a row")

    def sample(self, hidden: list[int], batch: StepBatch, masks: Masks | None = None) -> SampledTokens:
        tokens = super().sample(hidden, batch, masks)
        if self.faults.on("nan") and tokens.token_ids:
            row = self.faults.active["nan"] % len(tokens.token_ids)
            tokens.token_ids[row] = -1
            tokens.errors[row] = "injected: the logits are not finite"
        return tokens


class _FaultyRows(InputBatch):
    """An input batch in which a fault raises an error: before the update of the rows, during it, or while the step's
    arrays are filled."""

    faults: _Faults

    def take(self, out: SchedulerOutput) -> None:
        self._fail_at(1)
        super().take(out)

    def _join(self, row: NewRow) -> None:
        super()._join(row)
        self._fail_at(2)

    def _flatten(self, out: SchedulerOutput) -> StepBatch:
        self._fail_at(3)
        return super()._flatten(out)

    def _fail_at(self, stage: int) -> None:
        if self.faults.active.get("raise", 0) % 4 == stage:
            raise MemoryError("injected: the step failed")


class _WatchedExecutor(LocalExecutor):
    """A local executor that records which KV blocks the steps in flight read and write."""

    ends_between_operators = True  # no times are checked, so steps that end as a whole do

    def __init__(self, runner: _FaultyModel, *, num_slots: int, max_model_len: int, block_size: int) -> None:
        super().__init__(runner, num_slots=num_slots, max_model_len=max_model_len, block_size=block_size)
        self._layout = CacheLayout(runner.cache_groups, block_size, max_model_len)
        spans = [group.state_span for group in runner.cache_groups]
        self._input = _FaultyRows(num_slots, max_model_len, block_size, len(spans), spans)
        self._input.faults = runner.faults
        self.in_flight: deque[list[set[int]]] = deque()
        self.num_copies = 0

    def execute(self, out: SchedulerOutput) -> Any:
        self.num_copies += len(out.copies)
        self.in_flight.append([set() for _ in self.cache_groups])
        hidden, batch = super().execute(out)
        self.in_flight[-1] = [self._blocks(batch, group) for group in range(len(self.cache_groups))]
        return hidden, batch

    def _blocks(self, batch: StepBatch, group: int) -> set[int]:
        used = set()
        kind = self._layout.kinds[group]
        for row, end in enumerate(batch.seq_lens.tolist()):
            begin = end - int(batch.cu_seqlens[row + 1] - batch.cu_seqlens[row])
            used |= set(batch.block_tables[group][row, kind.first_in_reach(begin) : kind.num_entries(end)].tolist())
        return used


@dataclasses.dataclass(slots=True)
class _Submitted:
    """A request whose outputs the simulator still expects."""

    args: dict[str, Any]
    expected: list[Expected]
    seen: list[int]
    """One entry per answer of the request: number of tokens that the engine has reported so far."""


class Simulation:
    """One execution of a world. ``policy``, if given, replaces the scheduling policy of the world.

    ``trace`` is a hash over every step and output: equal traces show that two executions were equal.
    """

    def __init__(self, world: World, policy: Policy | None = None) -> None:
        self.world = world
        self.clock = VirtualClock()
        self.faults = _Faults()
        groups = [_cache_group(world, window) for window in world.windows]
        config = SchedulerConfig(**world.scheduler)
        self.policy = PolicyWatch(policy or policy_from_config(config))
        self.model = _FaultyModel(groups, world.block_size, VOCAB_SIZE, world.max_model_len)
        self.model.faults = self.faults
        self.files = AdapterFiles()
        self.model.adapter_tags = self.files.tags
        if world.images is not None:
            self.model.images = ScriptedEncoder(self.clock, *world.images[:2])
            self.model.image_tags = self.model.images.tags
        kv = _FaultyCache(
            self.faults,
            groups,
            world.block_size,
            max_step_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=world.enable_prefix_caching,
            prefix_offload=world.prefix_offload,
            hash_function=_weak_hash(world.hash_bits),
            eviction=eviction_from_name(world.cache_eviction),
        )
        self.executor = _WatchedExecutor(
            self.model,
            num_slots=config.max_num_seqs,
            max_model_len=world.max_model_len,
            block_size=world.block_size,
        )
        self.engine = Engine(
            self.executor,
            ModelLimits(VOCAB_SIZE, world.max_model_len, (EOS,), config.promises),
            config,
            tokenizer=byte_tokenizer() if world.with_text else None,
            clock=self.clock,
            policy=self.policy,
            kv=kv,
            seed=world.seed,
            grammars=_grammars(world),
            adapters=None if world.adapters is None else ScriptedAdapters(self.files, *world.adapters),
            images=None if world.images is None else ScriptedImages(world.images[3]),
        )
        self._versions: Counter[int] = Counter()
        """Number of an adapter -> number of times that the adapter was replaced by files at a new path."""
        self.num_adapted = self.num_reloads = 0
        self.model.owner_of = self._owner_of
        self._set_bounds()
        # An image that must be computed in one step may take tokens from either part of the prompt budget. The bounds
        # of ShareWatch then do not hold.
        self._whole_images = world.images is not None and world.images[3]
        self.share = None if policy or self._whole_images else _share_watch(self.engine.scheduler, config)
        """Checks how long prompts wait. None with a policy of the caller, because the order in which it schedules
        requests is not known; None with images that must be computed in one step, and with static batches."""
        self._watch_joins(kv)
        self.scripts = Scripts(self.engine.core, world.windows) if world.scripted else None
        if world.drafts:
            scheduler = self.engine.scheduler
            maker = SuffixDrafts if world.seed % 20 == 16 else ScriptedDrafts
            drafts = maker(world.seed, self._answer_of)
            scheduler.drafts = Drafts(scheduler.batch, drafts, self.engine.core.preparers.grammars)
        self.mask_watch = self._watch_masks()
        self._begin_counts()

    def _begin_counts(self) -> None:
        """Initialise all counters and records before the first step."""
        self.num_reserved = 0
        """Number of requests that joined in a reserved row."""
        self.pending: dict[str, _Submitted] = {}
        self.ended: set[str] = set()
        self.num_steps = 0
        self.num_cached_tokens = self.num_failed = self.num_passed = self.num_dropped = self.num_limits = 0
        """Counts that tests read to check that the simulated worlds exercise caching, failures, drops and changed
        limits."""
        self.num_limited = 0
        """Number of answers that ended by a limit on the time of masks."""
        self._trace = hashlib.sha256()
        self._records = 0
        self._budgets: dict[int, int] = {}
        """Number of a step in flight -> maximum number of tokens that the step may compute."""

    def _watch_masks(self) -> MaskWatch | None:
        """Watch the limits on the time of masks, in worlds in which masks take time."""
        if self.world.mask_limits is None:
            return None
        grammars = self.engine.core.preparers.grammars
        scheduler = self.engine.scheduler
        watch = MaskWatch(
            grammars.ledger.limits, lambda name: any(each.partition("#")[0] == name for each in scheduler.requests)
        )
        if isinstance(grammars.masks, LateMasks):
            grammars.masks.charged = watch.charged
        return watch

    def _owner_of(self, slot: int) -> str:
        """Id of the request in a row."""
        return next(name for name, request in self.engine.scheduler.running.items() if request.slot == slot)

    def _answer_of(self, request: Request) -> list[int] | None:
        """Tokens that the request must generate; None for a request that has ended."""
        name, _, index = request.request_id.partition("#")
        submitted = self.pending.get(name)
        return None if submitted is None else submitted.expected[int(index or 0)].token_ids

    @property
    def num_copies(self) -> int:
        """Number of KV blocks that the engine copied because a request was forked."""
        return self.executor.num_copies

    @property
    def trace(self) -> str:
        return self._trace.hexdigest()

    def _set_bounds(self) -> None:
        scheduler = self.engine.scheduler
        bounds = self.world.bounds
        scheduler.waiting.look_ahead = bounds["look_ahead"]
        scheduler.waiting.max_times_passed = bounds["max_times_passed"]
        scheduler.batch.max_preemptions = min(
            scheduler.batch.max_preemptions, bounds["max_preemptions"]
        )  # 0: no request is preempted
        if self.world.images is not None:
            images = self.engine.core.preparers.images
            most = self.world.max_tiles
            images.kept_bytes = self.world.images[2]
            images.limit = None if most is None else most * TILE_BYTES

    def _watch_joins(self, kv: _FaultyCache) -> None:
        """Wrap ``Scheduler.schedule``: after each call, check how long the prompts have waited."""
        scheduler = self.engine.scheduler
        schedule = scheduler.schedule

        def watched(now: float) -> SchedulerOutput:
            kv.refused.clear()
            out = schedule(now)
            self.num_reserved += sum(row.request_id in scheduler.batch.reserve for row in out.joined)
            self._check_image_tokens(out)
            if not out.num_tokens and scheduler.decodes.count:
                raise Violation(
                    f"step {self.num_steps}: {scheduler.decodes.count} rows are ready, but none is computed"
                )
            if self.share is not None and out.num_tokens:
                self.share.step(out, kv.refused)
            return out

        scheduler.schedule = watched  # type: ignore[method-assign]

    def _check_image_tokens(self, out: SchedulerOutput) -> None:
        """Check that a step with decode rows has at most the permitted prompt tokens of images."""
        scheduler = self.engine.scheduler
        if self.world.images is None or self._whole_images or not out.num_decodes:
            return
        named = ((scheduler.requests[name], chunk) for name, chunk in zip(out.chunk_ids, out.chunks, strict=True))
        tokens = sum(
            chunk.num_tokens for request, chunk in named if request.images and chunk.start < request.images[-1].end
        )
        most = self.engine.core.preparers.image_rows.tokens
        if tokens > most:
            raise Violation(f"step {out.step} has {tokens} tokens of images, but may have {most}")

    def run(self) -> None:
        """Run all events with their faults, then run on without faults until every request has ended.

        Raises Violation at the first check that fails.
        """
        log = logging.getLogger("chairlift")
        level = log.level
        log.setLevel(logging.CRITICAL)  # the engine logs each injected failure as an error
        try:
            self._run()
        finally:
            log.setLevel(level)

    def _run(self) -> None:
        events = list(self.world.events)
        tick = 0
        while events:
            self.faults.begin()
            while events and events[0].at <= tick:
                self._apply(events.pop(0))
            self._step()
            tick += 1
        self.faults.begin()
        # Each step computes at least one token, and each token is computed at most once per preemption.
        work = sum(len(s.args["prompt"]) + s.args["max_tokens"] for s in self.pending.values() for _ in s.expected)
        bound = 50 + 2 * work * (self.world.bounds["max_preemptions"] + 2)
        tiles = sum(len(submitted.args.get("images", ())) for submitted in self.pending.values())
        bound += 20 * tiles * (self.world.bounds["max_preemptions"] + 2)
        if self.world.late_masks is not None:
            bound *= 2 * (self.world.late_masks[1] + 2)
        while self.engine.has_unfinished and bound:
            self._step()
            bound -= 1
        if self.engine.has_unfinished or self.pending:
            raise Violation(f"requests {sorted(self.pending)} do not come to an end")
        self._check_drained()

    def _apply(self, event: Event) -> None:
        name = f"r{event.target}"
        if event.kind == "arrive":
            self._arrive(name, event.args)
        elif event.kind == "abort":
            known = name in self.pending
            if self.engine.abort(name) != known:
                raise Violation(f"abort({name}) contradicts what is pending")
            if known:
                self.ended.add(name)
                del self.pending[name]
        elif event.kind == "preempt":
            running = sorted(self.engine.scheduler.running)
            if running:
                self.engine.scheduler.preempt(running[event.target % len(running)])
        elif event.kind == "duplicate":
            if name in self.pending:
                self._refused(name)
        elif event.kind == "evict":
            self._evict(event.target)
        elif event.kind == "limits":
            scheduler = self.engine.scheduler
            args = event.args
            scheduler.batch.running_limit = args["running"]
            scheduler.batch.token_budget = args["tokens"]
            scheduler.batch.watermark = args["watermark"]
            self.num_limits += 1
        elif event.kind in ("reload", "unload", "rewrite"):
            self._change_adapter(event.kind, event.target)
        elif event.kind == "set_back":
            self.clock.advance(-0.1 * event.target)
        elif event.kind == "stall":
            self.clock.advance(3600.0 * event.target)
        else:
            self.faults.active[event.kind] = event.target

    def _path_of(self, number: int) -> str:
        return f"a{number}-{self._versions[number]}"

    def _change_adapter(self, kind: str, number: int) -> None:
        """Change an adapter: ``reload`` loads other files from a new path, ``rewrite`` replaces the files at the same
        path, ``unload`` only removes the adapter."""
        if kind != "rewrite" and not self.engine.remove_lora(number):
            return
        self.num_reloads += kind == "reload"
        if kind == "reload":
            self._versions[number] += 1
        if kind == "rewrite" and self._path_of(number) in self.files.contents:
            self.files.write(self._path_of(number))
            if self.engine.remove_lora(number):  # so that the engine reads the new files
                self.num_reloads += 1

    def _adapter_for(self, args: dict[str, Any]) -> LoRARequest | None:
        """Adapter of an arriving request, or None. Adds the adapter's effect on the tokens to ``args``."""
        number = args.get("adapter", 0)
        if not number or self.world.adapters is None:
            return None
        path = self._path_of(number)
        if path not in self.files.contents:
            self.files.write(path)
        args["adapter_tag"] = content_tag(self.files.contents[path])
        self.num_adapted += 1
        return request_for(number, path)

    def _refused(self, name: str) -> None:
        try:
            self.engine.add_request([1], SamplingParams(), request_id=name)
        except RequestError:
            return
        raise Violation(f"a second request with the id {name} was accepted")

    def _arrive(self, name: str, args: dict[str, Any]) -> None:
        params = SamplingParams(
            n=args["n"],
            temperature=args["temperature"],
            seed=args["seed"],
            presence_penalty=args["presence_penalty"],
            max_tokens=args["max_tokens"],
            ignore_eos=args["ignore_eos"],
            stop_token_ids=args["stop_token_ids"],
            stop=args.get("stop"),
            include_stop_str_in_output=args.get("include_stop_str_in_output", False),
            priority=args.get("priority"),
            service_tier=args.get("service_tier"),
            ttft_ms=args.get("ttft_ms"),
            deadline_ms=args.get("deadline_ms"),
            structured_outputs=_structured_outputs(args),
        )
        need = len(args["prompt"]) + args["max_tokens"] - 1
        args = dict(args)
        adapter = self._adapter_for(args)
        fits = self.engine.kv.fits_when_empty(need)
        known = set(self.engine.scheduler.requests.values())
        try:
            self.engine.add_request(
                markers_of(args) if args.get("images") else args["prompt"],
                params,
                request_id=name,
                stream=args["stream"],
                cache_salt=args["salt"],
                tenant=args.get("tenant", ""),
                lora_request=adapter,
            )
        except PromptTooLongError:
            if fits and need <= self.engine.kv.capacity_tokens:
                raise Violation(f"{name} needs {need} positions, which fit, but was refused") from None
            self.ended.add(name)
            return
        if not fits:
            raise Violation(f"{name} needs {need} positions, which can never fit, but was admitted")
        if self.scripts is not None:
            for request in [each for each in self.engine.scheduler.requests.values() if each not in known]:
                self.scripts.follow(request, args)
        windows = self.world.windows
        with_text = self.world.with_text
        expected = [expected_answer(args, params, index, windows, with_text) for index in range(params.n)]
        self.pending[name] = _Submitted(args, expected, [0] * params.n)

    def _evict(self, count: int) -> None:
        """Remove up to ``count`` unused blocks of each pool from the prefix cache, as a lack of memory would."""
        cache = self.engine.kv.prefix_cache
        for group, pool in enumerate(self.engine.kv.pools):
            for block in [b for b in range(1, pool.num_blocks) if pool.nodes[b] and not pool.ref_counts[b]][:count]:
                node = pool.nodes[block]
                pool.detach(block)
                if cache is not None and node is not None:
                    cache.evicted(group, node)

    def _step(self) -> None:
        self.num_steps += 1
        scheduler = self.engine.scheduler
        grammars = self.engine.core.preparers.grammars
        adapters = self.engine.core.preparers.adapters
        if isinstance(adapters, ScriptedAdapters):
            adapters.tick()
        stuck = {
            name: request.num_preemptions
            for name, request in scheduler.running.items()
            if request.num_preemptions and len(request.token_ids) <= request.progress_mark
        }
        max_running = max(len(scheduler.running), scheduler.batch.running_limit)
        last_step = scheduler.step
        budget = max(max_running, scheduler.batch.token_budget)
        try:
            if isinstance(grammars, ScriptedGrammars):
                grammars.tick()
            outputs = self.engine.step()
            self.engine.check_invariants()
            adapters.check_invariants()
            self.engine.core.preparers.images.check_invariants(scheduler.requests.values())
            self.policy.check(scheduler.waiting, scheduler.batch.now)
            for name, count in [] if self.faults.active else stuck.items():
                if name in scheduler.requests and scheduler.requests[name].num_preemptions > count:
                    raise InvariantError(f"{name} was preempted again without a token in between")
        except (InvariantError, ArithmeticError, LookupError, TypeError, ValueError, ChairliftError) as error:
            raise Violation(f"step {self.num_steps}: {type(error).__name__}: {error}") from error
        if len(scheduler.running) > max_running:
            raise Violation(
                f"step {self.num_steps}: {len(scheduler.running)} requests run, but at most {max_running} may run"
            )
        if scheduler.step > last_step:
            self._budgets[scheduler.step] = budget
        self.clock.advance(_STEP_SECONDS)
        self.num_passed += sum(request.times_passed > 0 for request in self.engine.scheduler.waiting)
        self._check_in_flight()
        self._check_adapters()
        self._check_records()
        for output in outputs:
            self._check_output(output)

    def _check_adapters(self) -> None:
        """Check that a step has no more adapters than allowed, and that all of them are in memory."""
        allowed = self.world.adapters[0] if self.world.adapters else 0
        if self.model.max_step_adapters > allowed:
            raise Violation(
                f"step {self.num_steps} had {self.model.max_step_adapters} adapters, but at most {allowed} are allowed"
            )
        if self.model.missing_adapters:
            raise Violation(f"step {self.num_steps}: adapters {self.model.missing_adapters} were not in memory")
        encoder = self.model.images
        most = self.world.max_tiles
        if encoder is not None and encoder.flaws:
            raise Violation(f"step {self.num_steps}: {encoder.flaws[0]}")
        if encoder is not None and most is not None and encoder.most > most:
            raise Violation(f"step {self.num_steps}: rows of {encoder.most} tiles in memory, but {most} fit")
        if self.model.missing_tiles:
            raise Violation(f"step {self.num_steps}: {len(self.model.missing_tiles)} tiles were not in memory")

    def _check_in_flight(self) -> None:
        """Check that no block of a step in flight is free."""
        flights = self.executor.in_flight
        while len(flights) > self.engine.num_in_flight:
            flights.popleft()
        for blocks in flights:
            for pool, used in zip(self.engine.kv.pools, blocks, strict=True):
                free = [block for block in used if not pool.ref_counts[block]]
                if free:
                    raise Violation(f"step {self.num_steps}: blocks {free} are free, but a step in flight uses them")

    def _check_records(self) -> None:
        log = self.engine.step_log
        scheduler = self.world.scheduler
        for record in [record for record in log if record.step > self._records]:
            self._records = record.step
            rows = record.rows
            budget = self._budgets.pop(record.step)
            most = scheduler["max_num_batched_tokens"]
            if self._whole_images:
                budget = most  # an image that must be computed in one step may exceed a lowered budget
            if record.num_tokens > min(budget, most):
                raise Violation(f"step {record.step} computed {record.num_tokens} tokens, above its budget")
            if len(rows) > scheduler["max_num_seqs"] or len({row.request_id for row in rows}) != len(rows):
                raise Violation(f"step {record.step} has too many rows, or two rows of one request: {rows}")
            if sum(row.num_tokens for row in rows) != record.num_tokens or len({row.slot for row in rows}) != len(rows):
                raise Violation(f"step {record.step}: rows share a slot or their tokens do not add up: {rows}")
            whole = sum(pool.capacity for pool in self.engine.kv.pools)
            if record.blocks.free + record.blocks.used + record.blocks.cached != whole:
                raise Violation(f"step {record.step}: {record.blocks} are not all {whole} blocks")
            self._trace.update(repr((record.step, rows, record.num_tokens, record.blocks, record.preempted)).encode())

    def _check_output(self, output: RequestOutput) -> None:
        submitted = self.pending.get(output.request_id)
        if submitted is None:
            raise Violation(f"{output.request_id} has ended or is unknown, but there is an output")
        if output.num_cached_tokens >= len(submitted.args["prompt"]):
            raise Violation(f"{output.request_id}: {output.num_cached_tokens} prompt tokens cannot all be cached")
        for answer, expected in zip(output.outputs, submitted.expected, strict=True):
            self._check_answer(output.request_id, answer, expected, submitted)
        self._trace.update(repr(output).encode())
        if output.finished:
            self.num_cached_tokens += output.num_cached_tokens
            self.num_dropped += any(answer.finish_reason is FinishReason.DEADLINE for answer in output.outputs)
            self.num_failed += any(answer.finish_reason is FinishReason.ERROR for answer in output.outputs)
            failed = {FinishReason.ERROR, FinishReason.DEADLINE} & {answer.finish_reason for answer in output.outputs}
            if output.error and not failed:
                raise Violation(f"{output.request_id} succeeded, but its output has an error: {output.error}")
            if any(answer.finish_reason is None for answer in output.outputs):
                raise Violation(f"{output.request_id} is finished, but one of its answers is not")
            if not any(event.kind == "set_back" for event in self.world.events):  # then times mean nothing
                self._check_causes(output)
            self.ended.add(output.request_id)
            del self.pending[output.request_id]

    def _check_causes(self, output: RequestOutput) -> None:
        """Check that the seconds per cause of an ended request add up to its total time."""
        metrics = output.metrics
        if metrics is None or metrics.causes is None or metrics.finished_time is None:
            raise Violation(f"{output.request_id} has ended, but its output does not say how its time was spent")
        unknown = set(metrics.causes) - set(CAUSES)
        spent = metrics.finished_time - metrics.arrival_time
        if unknown or min(metrics.causes.values()) < 0 or abs(sum(metrics.causes.values()) - spent) > 1e-6:
            raise Violation(f"{output.request_id} took {spent} s, but was charged {metrics.causes}")
        away = metrics.preempted_during
        bounds = [metrics.arrival_time, *(moment for span in away for moment in span), metrics.finished_time]
        seconds = sum(end - start for start, end in away)
        if bounds != sorted(bounds) or (len(away) < 8 and abs(seconds - metrics.causes.get("preempted", 0.0)) > 1e-6):
            raise Violation(f"{output.request_id} was preempted during {away}, but was charged {metrics.causes}")

    def _check_answer(self, name: str, answer: CompletionOutput, expected: Expected, submitted: _Submitted) -> None:
        where = f"{name}, answer {answer.index}"
        given = answer.token_ids
        if given != expected.token_ids[: len(given)]:
            raise Violation(f"{where}: tokens {given} instead of {expected.token_ids}")
        if len(given) < submitted.seen[answer.index]:
            raise Violation(f"{where}: {len(given)} tokens after {submitted.seen[answer.index]}")
        submitted.seen[answer.index] = len(given)
        limited = self.mask_watch is not None and name in self.mask_watch.over
        if self.mask_watch is not None and self.mask_watch.goes_on(f"{name}#{answer.index}", len(given)):
            raise Violation(f"{where}: goes on, although its masks have reached their limit")
        if answer.finish_reason is FinishReason.ERROR and limited:
            self.num_limited += 1
            return
        if answer.finish_reason is FinishReason.ERROR:
            broken = any(event.kind in ("nan", "raise", "break_moves") for event in self.world.events)
            if (
                self.world.grammars
                and not broken
                and (given, FinishReason.ERROR)
                != (
                    expected.token_ids,
                    expected.finish_reason,
                )
            ):
                raise Violation(f"{where}: failed after {given}, and not {expected}")
            starves = any(event.kind.startswith("starve") for event in self.world.events)
            if starves and not broken and not _is_one_of(name, answer.index, self.model.starved):
                raise Violation(f"{where}: failed, but there was memory for it; only {self.model.starved} had none")
            rewritten = any(event.kind == "rewrite" for event in self.world.events)
            explained = (
                broken or starves or rewritten or self.world.grammars or expected.finish_reason is FinishReason.ERROR
            )
            if (self.world.adapters or self.world.images) and not explained:
                raise Violation(f"{where}: failed after {given}, and not {expected}")
            return
        if answer.finish_reason is FinishReason.DEADLINE:
            if self.world.scheduler.get("late_requests") != "drop" or not _has_deadline(submitted.args):
                raise Violation(f"{where}: dropped for a deadline it does not have")
            return
        if answer.finish_reason is None:
            if not expected.text.startswith(answer.text):
                raise Violation(f"{where}: text {answer.text!r} is not how {expected.text!r} begins")
        elif (given, answer.text, answer.finish_reason, answer.stop_reason) != dataclasses.astuple(expected):
            raise Violation(f"{where}: {answer} instead of {expected}")

    def _check_drained(self) -> None:
        """Check that no part of the engine keeps a request or a block after all requests have ended."""
        kv = self.engine.kv
        scheduler = self.engine.scheduler
        self.policy.check_drained()
        if scheduler.has_unfinished or scheduler.running or len(scheduler.waiting):
            raise Violation("the scheduler still has requests after all of them ended")
        if len(self.engine.core.preparers.grammars) or scheduler.batch.unready:
            raise Violation("grammars are still followed after all requests ended")
        self.engine.core.preparers.images.check_invariants([])
        if self.engine.core.preparers.adapters.num_users:
            raise Violation("adapters still have requests after all of them ended")
        if len(self.engine.core.causes):
            raise Violation(f"{len(self.engine.core.causes)} requests have ended, but their time is still counted")
        if scheduler.num_preemptions and (scheduler.batch.preemption.never or scheduler.membership.held):
            raise Violation(f"{scheduler.num_preemptions} requests were preempted, but preemption is off")
        if kv.counts().used or kv.tables.held_blocks:
            raise Violation(f"{kv.counts().used} blocks are still in use after all requests ended")


def run_world(world: World, policy: Policy | None = None) -> Simulation:
    """Run a world to its end. Raises Violation at the first check that fails."""
    simulation = Simulation(world, policy)
    simulation.run()
    return simulation


def _share_watch(scheduler: Scheduler, config: SchedulerConfig) -> ShareWatch | None:
    if scheduler.membership.closed:
        return None
    reserving = {name for name, each in (config.promises or {}).items() if each.min_step_tokens}
    return ShareWatch(scheduler, config.policy_share, config.max_num_batched_tokens, reserving)


def _grammars(world: World) -> ScriptedGrammars | None:
    if not world.grammars:
        return None
    late = world.late_masks and (world.seed, *world.late_masks)
    if world.mask_limits is None:
        return ScriptedGrammars(late)
    seconds, request_seconds, tenant_seconds = world.mask_limits
    return ScriptedGrammars(late, seconds, MaskLimits(0.0, request_seconds, tenant_seconds / 60))


def _cache_group(world: World, window: int | None) -> CacheGroup:
    if window == STATE:
        return CacheGroup(world.num_blocks, None, world.num_host_blocks, world.state_span)
    return CacheGroup(world.num_blocks, window, world.num_host_blocks)


def _structured_outputs(args: dict[str, Any]) -> StructuredOutputsParams | None:
    script = args.get("grammar")
    return None if script is None else StructuredOutputsParams(regex=GrammarScript(**script).text)


def _is_one_of(name: str, index: int, sequence_ids: set[str]) -> bool:
    """Whether answer ``index`` of request ``name`` is one of the sequences."""
    return not sequence_ids.isdisjoint((name, f"{name}#{index}"))


def _has_deadline(args: dict[str, Any]) -> bool:
    return bool(args["ttft_ms"] or args["deadline_ms"] or args["service_tier"] == "chat")


def _weak_hash(bits: int | None) -> Any:
    if bits is None:
        return None
    return lambda data: bytes([hashlib.sha256(data).digest()[0] % (1 << bits)])
