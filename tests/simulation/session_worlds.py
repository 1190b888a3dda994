"""Simulated worlds of agents: conversations that pause while a tool runs, beside floods of other prompts.

One seed is one execution. Several tenants share a cache that is too small for all of them. Pauses are short, long or
endless, and the clock may jump. Clients ask for leases of parts of their prompts, some of them for all of it. The model
is HashLM, so one wrong block changes an answer. After each step the world checks what is promised of leases: no more
than the budget, none that nobody asked for, no request waits because of them, blocks are evicted in the stated order,
and a tenant within its share loses nothing to others.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

from chairlift.base.cache_hints import NO_HINTS, CacheHints
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.seeds import sample_seed
from chairlift.config import CacheConfig, CacheGroup, SchedulerConfig
from chairlift.core.kv_cache.block_pool import BlockPool
from chairlift.core.kv_cache.eviction.asked import ASKED_LEVEL
from chairlift.core.kv_cache.eviction.gaps import MOST_SECONDS
from chairlift.core.kv_cache.eviction.lease import LeaseRule
from chairlift.core.kv_cache.eviction.leases import BUDGET, Lease, LeaseOrder
from chairlift.core.kv_cache.eviction.turns import EndedTurn
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.request import Request
from chairlift.engine.clock import VirtualClock
from chairlift.engine.engine import Engine
from chairlift.engine.input_processor import ModelLimits
from chairlift.engine.kv_store.files import StoreFiles
from chairlift.engine.kv_store.store import KVStore
from chairlift.executor.local import LocalExecutor
from chairlift.models.hashlm import STATE, HashLM, reference_tokens
from tests.engine.kv_store.fake_disk import FakeDisk, Faults

__all__ = ["Wrong", "run_beside", "run_world"]

_VOCAB = 17
_LENGTH = 96
_STEP_SECONDS = 0.05
_TOOLS = ("search", "run_tests", "read")


class Wrong(AssertionError):
    """An answer is wrong, or what is promised of leases does not hold."""


@dataclasses.dataclass(slots=True, eq=False)
class _Agent:
    """A conversation. It waits for its answer, or for its tool until ``next_at``."""

    tenant: str
    salt: str
    tokens: list[int]
    turns_left: int
    next_at: float
    tools: tuple[str, ...] = ()
    ended_at: float | None = None
    """Time at which the tool began; None while no tool runs."""


class _World:
    def __init__(self, seed: int, eviction: str) -> None:
        self.seed = seed
        self.beside = random.Random(~seed)
        """What worlds with a store draw in addition."""
        self.rng = rng = random.Random(seed)
        self.clock = VirtualClock(1.0)
        self.seen: collections.Counter[str] = collections.Counter()
        self.block_size = rng.choice((1, 2, 4))
        self.windows = rng.choice(((None,), (None,), (None,), (None, 7), (9,), (None, STATE)))
        num_blocks = 1 + -(-_LENGTH // self.block_size) + rng.randrange(120 // self.block_size)
        groups = [
            CacheGroup(num_blocks, None, 0, 2 * self.block_size) if w == STATE else CacheGroup(num_blocks, w)
            for w in self.windows
        ]
        model = HashLM(groups, self.block_size, _VOCAB, _LENGTH)
        executor = LocalExecutor(model, num_slots=6, max_model_len=_LENGTH, block_size=self.block_size)
        self.weights = rng.choice(({}, {}, {"a": 3.0, "flood": 0.5}))
        settings: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": rng.choice((8, 24))}
        if rng.random() < 0.5:
            settings |= {"scheduling_policy": "priority", "tenant_weights": json.dumps(self.weights)}
        else:
            self.weights = {}
        scheduler = SchedulerConfig(**settings)
        self.engine = Engine(
            executor,
            ModelLimits(_VOCAB, _LENGTH, (), scheduler.promises),
            scheduler,
            cache=CacheConfig(cache_eviction=eviction),
            clock=self.clock,
            cache_secret=b"world",
            kv_store=self._open(executor),
        )
        self.engine.core.costs.model.prefill_seconds = lambda num, begin=0: num / 20  # type: ignore[method-assign]
        rule = self.engine.kv.eviction
        if self.store is not None:
            rule.prices.load_seconds = lambda num_tokens: num_tokens / 400
        self.rule = rule if isinstance(rule, LeaseRule) else LeaseRule()
        self.flooding = random.Random(2 * seed + 1)
        """What draws the flood, which is the same beside any rule of eviction."""
        self.flood_seconds: dict[int, float] = {}
        """Number of a prompt of the flood -> seconds that it took."""
        self.tenants = rng.choice((("",), ("a", "b"), ("a", "b", "c")))
        # Without salts, tenants share blocks, and a tenant may lose the lease of a block that others need, too.
        self.is_plain = self.windows == (None,) and len(self.tenants) == 1
        self.leased: dict[int, tuple[str, set[bytes]]] = {}
        """Number of a turn that got a lease -> (its tenant, keys of its nodes)."""
        self.asked: dict[str, tuple[list[int], SamplingParams, int, float]] = {}
        self.sent: list[tuple[float, tuple[list[int], int, str, str, CacheHints]]] = []
        """(time, arguments of :meth:`ask`) of each request, oldest first."""
        self.tools: dict[str, tuple[str, ...]] = {}
        """Id of each request whose answer called tools -> these tools."""
        self.is_again = False
        """Whether the requests are those of another world."""
        self.agents_by_request: dict[str, _Agent] = {}
        self.hints = rng.choice((0.0, 0.3, 1.0))
        """Share of the turns whose client asks for leases."""
        self.asked_leases: dict[bytes, dict[str, float]] = {}
        """Key of a block -> payer -> longest lease in seconds that it has asked for."""
        self.fetching = False
        if rule is self.rule:
            for order, pool in zip(rule.orders, self.engine.kv.pools, strict=True):
                self._watch(order, pool)
            self._watch_rule()
            self._watch_fetches()
        self.jumps = rng.random() < 0.3
        self.agents: list[_Agent] = []
        self.flood: dict[str, int] = {}
        """Id of each request that belongs to no conversation -> its number."""
        self.number = 0

    def _open(self, executor: LocalExecutor) -> Callable[[], KVStore] | None:
        """A store, in some of the worlds. In these, the pause depends on the tool, and loading takes time."""
        self.store: KVStore | None = None
        if self.beside.random() < 0.6:
            return None
        spans = [group.state_span or self.block_size for group in executor.cache_groups]
        sizes: dict[str, Any] = {"block_size": self.block_size, "block_bytes": executor.block_bytes, "spans": spans}
        files = StoreFiles(FakeDisk(self.beside, Faults()), "model", {}, nbytes=400_000, **sizes)
        rate = self.beside.choice((500.0, 1e9))
        store = KVStore(files, rate, self.clock.now, unix_time=self.clock.now, threaded=False)
        self.store = store
        return lambda: store

    # -- watching ------------------------------------------------------------------------------------------------------

    def _watch(self, order: LeaseOrder, pool: BlockPool) -> None:
        pop, shorten = order.pop, order._shorten

        def watched_pop() -> int:
            now = self.engine.scheduler.batch.now
            waiting = list(order)
            leases = {block: order._leases[block] for block in waiting if block in order._leases}
            over = {block for block, lease in leases.items() if lease.until <= now}
            over |= set(order._expired)
            plain = [block for block in waiting if block not in leases]
            block = pop()
            if self.fetching and block in leases and block not in over:
                self.fail(f"block {block} lost its lease to a fetch")
            if over:
                right = block in over
            elif plain:
                right = block in plain
                self.seen["spared"] += bool(leases)
            else:
                right = leases[block].queue == min(lease.queue for lease in leases.values())
                self.seen["leased evicted"] += 1
            if not right:
                self.fail(f"block {block} was evicted before {over or plain or waiting}")
            if self.is_plain:  # two requests may have computed a block at once, so a child's parent may be another one
                held = [child for child, lease in leases.items() if lease.level == ASKED_LEVEL and child != block]
                children = [child for child in held if _parent(pool, child) is pool.nodes[block]]
                if children and not over:
                    self.fail(f"blocks {children} are leased, but block {block} before them was evicted")
            self.seen["expired"] += bool(over)
            return block

        def watched_shorten() -> None:
            before = order.held_by()
            shorten()
            after = order.held_by()
            losers = [tenant for tenant, count in before.items() if after.get(tenant, 0) < count]
            shares = {tenant: count / self.weights.get(tenant, 1.0) for tenant, count in before.items()}
            if any(shares[loser] < max(shares.values()) for loser in losers):
                self.fail(f"{losers} lost leases, but the shares are {shares}")
            self.seen["shortened"] += len(before) > 1

        order.pop, order._shorten = watched_pop, watched_shorten  # type: ignore[method-assign]

    def _watch_fetches(self) -> None:
        pauses = self.engine.core.preparers.kv_pauses
        fetched = pauses._fetched

        def watched(*args: Any) -> bool:
            for order in self.rule.orders:
                order._expire()  # else those that end now would seem to end because of the fetch
            leased = [order.num_leased for order in self.rule.orders]
            self.fetching = True
            done = fetched(*args)
            self.fetching = False
            if any(order.num_leased < before for order, before in zip(self.rule.orders, leased, strict=True)):
                self.fail("a fetch ended leases")
            return done

        pauses._fetched = watched  # type: ignore[method-assign]

    def _watch_rule(self) -> None:
        lease, release = self.rule._lease, self.rule._release_branch

        def watched_release(turn: EndedTurn, kept: set[int]) -> None:
            def others() -> list[dict[int, object]]:
                every = [order._leases.items() for order in self.rule.orders]
                return [{block: lease for block, lease in each if lease.turn != turn.number} for each in every]

            before = others()
            release(turn, kept)
            if others() != before:
                self.fail(f"the end of {turn} ended leases of other turns")
            node = turn.node
            while node.parent is not None and (id(node) in kept or node.num_children <= (node is not turn.node)):
                self.seen["branches"] += id(node) not in kept
                for order, block in zip(self.rule.orders, node.blocks, strict=True):
                    if block is not None and (found := order._leases.get(block)) and found.turn == turn.number:
                        self.fail(f"block {block} of {turn} is still leased, but no turn goes on with it")
                node = node.parent

        self.rule._release_branch = watched_release  # type: ignore[method-assign]

        def watched(turn: EndedTurn, until: float, expected: float) -> None:
            keys = set()
            node = turn.node
            while node.parent is not None:
                keys.add(node.key)
                node = node.parent
            self.leased[turn.number] = turn.tenant, keys
            if until > max(turn.ended_at, self.clock.now()) + MOST_SECONDS:
                self.fail(f"a lease ends {until - turn.ended_at:.1f} s after its turn")
            agent = self.agents_by_request.get(turn.request_id)
            if agent is None or turn.tenant != agent.tenant:
                self.fail(f"{turn} got a lease, but is a turn of {agent}")
            self.seen["leases"] += 1
            lease(turn, until, expected)

        self.rule._lease = watched  # type: ignore[method-assign]

    def fail(self, why: str) -> None:
        raise Wrong(f"seed {self.seed}: {why}")

    def check(self) -> None:
        try:
            self.engine.check_invariants()
        except Exception as error:
            raise Wrong(f"seed {self.seed}: {error}") from error
        for order, pool in zip(self.rule.orders, self.engine.kv.pools, strict=bool(self.rule.orders)):
            unused = [block for block in range(1, pool.num_blocks) if not pool.ref_counts[block]]
            leases = {block: lease for block, lease in order._leases.items() if block in set(order)}
            if len(leases) > pool.capacity * BUDGET:
                self.fail(f"{len(leases)} of {pool.capacity} blocks are leased and unused")
            if pool.num_free != len(unused):
                self.fail(f"{len(unused)} blocks are unused, but only {pool.num_free} can be allocated")
            for block, lease in order._leases.items():
                node = pool.nodes[block]
                self._check_asked(node, lease)
                tenant, keys = self.leased.get(lease.turn, (lease.tenant, set()))
                if node is None or lease.tenant != tenant or (lease.turn and node.key not in keys):
                    self.fail(f"block {block} has {lease}, but is no block of this turn")

    def _check_asked(self, node: Any, lease: Lease) -> None:
        """Check that a client has asked for this lease, and that it ends so long after its last use."""
        if not lease.seconds:
            return
        asked = {} if node is None else self.asked_leases.get(node.key, {})
        if lease.seconds > max(asked.values(), default=0.0) or lease.level != ASKED_LEVEL:
            self.fail(f"a block has {lease}, but {asked} was asked for it")
        if lease.turn or any(node.key in keys for _, keys in self.leased.values()):  # a turn may have made it longer
            return
        if asked.get(lease.tenant, 0.0) < lease.seconds:
            self.fail(f"a block has {lease}, but {asked} was asked for it")
        if not self.jumps and lease.until > self.clock.now() + lease.seconds:
            self.fail(f"{lease} ends later than after a use that is now")
        self.seen["asked"] += 1

    def hold(self, tokens: list[int], salt: str) -> CacheHints:
        """Leases for some parts of a prompt, the longest first. Some clients ask for all of it for an hour."""
        rng = self.rng
        if rng.random() >= self.hints:
            return NO_HINTS
        ends = sorted({rng.randrange(1, len(tokens) + 1) for _ in range(rng.randrange(1, 4))})
        seconds = sorted((rng.choice((0.5, 2.0, 300.0, 3600.0)) for _ in ends), reverse=True)
        if rng.random() < 0.3:
            ends, seconds = [len(tokens)], [3600.0]
        payer = rng.choice(self.tenants)
        request = Request("look", tokens, max_tokens=1, cache_salt=salt)
        cache = self.engine.kv.prefix_cache
        assert cache is not None
        for index, key in enumerate(cache.keys(request, ends[-1] // self.block_size)):
            last = (index + 1) * self.block_size
            longest = max(each for end, each in zip(ends, seconds, strict=True) if last <= end)
            known = self.asked_leases.setdefault(key, {})
            known[payer] = max(known.get(payer, 0.0), longest)
        return CacheHints(leases=tuple(zip(ends, seconds, strict=True)), payer=payer)

    # -- requests ------------------------------------------------------------------------------------------------------

    def ask(self, tokens: list[int], num_tokens: int, tenant: str, salt: str, hints: CacheHints = NO_HINTS) -> str:
        self.number += 1
        name = f"r{self.number}"
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=self.number, temperature=0.0)
        whose: dict[str, Any] = {"cache_salt": salt, "tenant": tenant, "hints": hints}
        self.engine.add_request(tokens, params, request_id=name, stream=False, **whose)
        self.asked[name] = tokens, params, int.from_bytes(salt.encode()[:8], "little"), self.clock.now()
        self.sent.append((self.clock.now(), (tokens, num_tokens, tenant, salt, hints)))
        return name

    def turn(self, agent: _Agent) -> None:
        """Send the next turn of an agent."""
        rng = self.rng
        agent.tokens = agent.tokens + [rng.randrange(_VOCAB) for _ in range(rng.randrange(1, 8))]
        if rng.random() < 0.15 and agent.ended_at is not None:  # as a template that drops earlier reasoning
            cut = rng.randrange(len(agent.tokens) // 2, len(agent.tokens))
            agent.tokens = agent.tokens[:cut]
        num_tokens = rng.randrange(1, 6)
        if len(agent.tokens) + num_tokens > _LENGTH:
            agent.turns_left = 0
            return
        before = self.rule.num_returns
        hints = self.hold(agent.tokens, agent.salt)
        name = self.ask(agent.tokens, num_tokens, agent.tenant, agent.salt, hints)
        before_it = self.rule.turns._continued.get(name)
        own = before_it is not None and self.agents_by_request.get(before_it.request_id) is agent
        if self.rule.num_returns > before and own and agent.ended_at is not None and not self.jumps:
            gap = self.clock.now() - agent.ended_at
            self.seen["own"] += 1
            seen = self.rule.gaps.of(agent.tenant, agent.tools)
            if agent.tools and not any(abs(each - gap) < 3 * _STEP_SECONDS for each in seen):
                self.fail(f"{agent} paused for {gap} s, but the pauses are {seen}")
        self.agents_by_request[name] = agent
        agent.turns_left -= 1
        agent.next_at = float("inf")
        agent.ended_at = None

    def answered(self, output: Any) -> None:
        tokens, params, tag, asked_at = self.asked.pop(output.request_id)
        answer = list(output.outputs[0].token_ids)
        row = SamplingRow(params, sample_seed(params.seed or 0, 0), len(tokens), tag=tag)
        expected = reference_tokens(tokens, row, self.windows, _VOCAB, params.max_tokens or 0)
        if answer != expected:
            self.fail(f"{output.request_id} got {answer}, alone it gets {expected}")
        self.seen["answers"] += 1
        if output.request_id in self.flood:
            self.flood_seconds[self.flood[output.request_id]] = self.clock.now() - asked_at
        agent = self.agents_by_request.get(output.request_id)
        if self.is_again:
            self.engine.core.paused(output.request_id, self.tools.get(output.request_id, ()))
        elif agent is not None:
            self._go_on(agent, output.request_id, tokens + answer)

    def _go_on(self, agent: _Agent, name: str, tokens: list[int]) -> None:
        """Choose what an agent does after an answer."""
        agent.tokens = tokens
        rng = self.rng
        agent.tools = ()
        agent.ended_at = now = self.clock.now()
        seconds = rng.choice((0.1, 0.5, 0.5, 2.0, 20.0, 400.0)) * rng.uniform(0.8, 1.2)
        agent.next_at = now + seconds
        if rng.random() < 0.85:
            agent.tools = tuple(rng.sample(_TOOLS, rng.choice((1, 1, 1, 2))))
            self.tools[name] = agent.tools
            self.engine.core.paused(name, agent.tools)
            if self.store is not None:
                agent.next_at = now + (0.4, 2.4, 2.8)[_TOOLS.index(agent.tools[0])] * self.beside.uniform(0.9, 1.6)
            self.seen["pauses"] += 1
        if rng.random() < 0.1 and len(self.agents) < 16:  # another one goes on from here
            copy = dataclasses.replace(agent, tools=(), ended_at=None, turns_left=rng.randrange(1, 4))
            copy.next_at = now + rng.random()
            self.agents.append(copy)


def _parent(pool: BlockPool, block: int) -> PrefixNode | None:
    node = pool.nodes[block]
    return None if node is None else node.parent


def run_world(seed: int) -> collections.Counter[str]:
    """Run a world, and return what happened in it. Raises :class:`Wrong`."""
    return _run(_World(seed, "lease")).seen


def run_beside(seed: int) -> tuple[list[float], list[float]]:
    """Seconds of each prompt of a flood, (with leases, with the least recently used block evicted first). Both worlds
    have the same requests at the same times, and no clock jumps. (If each turn began after the answer before it, agents
    that are answered sooner would ask more, and the flood would wait for that.)"""
    lru, leases = _World(seed, "lru"), _World(seed, "lease")
    lru.jumps = leases.jumps = False
    _run(lru)
    _run_again(leases, lru)
    found = [[seconds for _, seconds in sorted(world.flood_seconds.items())] for world in (leases, lru)]
    return found[0], found[1]


def _run_again(world: _World, before: _World) -> None:
    """Send the requests of another world at the same times."""
    world.is_again = True
    for name in ("tools", "flood", "agents_by_request", "asked_leases"):
        setattr(world, name, getattr(before, name))
    waiting = collections.deque(before.sent)
    while waiting or world.engine.has_unfinished:
        world.clock.advance(_STEP_SECONDS)
        while waiting and waiting[0][0] <= world.clock.now():
            world.ask(*waiting.popleft()[1])
        _step(world)


def _run(world: _World) -> _World:
    rng = world.rng
    system = [rng.randrange(_VOCAB) for _ in range(rng.randrange(12))]
    agents = world.agents
    agents += [
        _Agent(
            rng.choice(world.tenants),
            rng.choice(("", "", "salt")),
            system + [rng.randrange(_VOCAB) for _ in range(rng.randrange(4, 24))],
            rng.randrange(1, 6),
            world.clock.now() + rng.random() * 3,
        )
        for _ in range(rng.randrange(1, 9))
    ]
    flood = rng.choice((0.0, 0.1, 0.3))
    flood += 0.3 * (world.store is not None)
    for _ in range(400):
        world.clock.advance(_STEP_SECONDS)
        if world.jumps and rng.random() < 0.02:
            world.clock.advance(rng.choice((1.0, 30.0, 1000.0, -0.5)))
            world.seen["jumps"] += 1
        now = world.clock.now()
        for agent in list(agents):
            if agent.turns_left and agent.next_at <= now:
                world.turn(agent)
        if world.flooding.random() < flood:
            length = world.flooding.randrange(4, 40)
            tokens = [world.flooding.randrange(_VOCAB) for _ in range(length)]
            name = world.ask(tokens, world.flooding.randrange(1, 4), "flood", "")
            world.flood[name] = len(world.flood)
            world.seen["flood"] += 1
        _step(world)
        if not world.asked and not flood:
            soonest = min((agent.next_at for agent in agents if agent.turns_left), default=None)
            if soonest is None:
                break
            world.clock.advance(max(0.0, soonest - world.clock.now()))
    for _ in range(3_000):
        if not world.engine.has_unfinished:
            break
        world.clock.advance(_STEP_SECONDS)
        _step(world)
    else:
        world.fail(f"requests {sorted(world.asked)} never end")
    world.seen["kept"] += world.rule.found["kept"]
    world.seen["returned"] += world.rule.num_returns
    world.seen["fetched"] += world.rule.num_fetched
    world.seen["fetches used"] += world.rule.num_fetched_used
    return world


def _step(world: _World) -> None:
    for output in world.engine.step():
        if output.finished:
            world.answered(output)
    while world.store is not None and world.beside.random() < 0.8 and world.store.work():
        pass
    world.check()
