"""Any order of admissions, growth, publishing, forks, failures and steps in flight keeps the books balanced."""

from __future__ import annotations

import hashlib
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.request import Request, RequestStatus
from tests.core.kv_cache.make import BLOCK, manager, request

_WINDOWS: list[tuple[int | None, ...]] = [(None,), (5,), (None, 3), (None, 9, 1)]
_STEP = 6


def _weak(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:1]


class KVCacheMachine(RuleBasedStateMachine):
    """Drives the manager as a scheduler would, one step in flight at most, and remembers what each block holds."""

    kv: KVCacheManager

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Request] = []
        self.step = 0
        self.done = 0
        self.names = 0
        self.content: list[dict[int, tuple[Any, ...]]] = []

    @initialize(
        windows=st.sampled_from(_WINDOWS),
        num_blocks=st.integers(6, 24),
        caching=st.booleans(),
        weak=st.booleans(),
    )
    def start(self, windows: tuple[int | None, ...], num_blocks: int, caching: bool, weak: bool) -> None:
        seam: dict[str, Any] = {"hash_function": _weak} if weak else {}
        self.kv = manager(num_blocks, *windows, max_step_tokens=_STEP, enable_prefix_caching=caching, **seam)
        self.content = [{} for _ in windows]

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, 20),
        tail=st.integers(0, 3),
        salt=st.sampled_from(["", "a"]),
        watermark=st.sampled_from([0.0, 0.2]),
        share=st.booleans(),
    )
    def admit(self, stem: int, length: int, tail: int, salt: str, watermark: float, share: bool) -> None:
        self._admit(request(self._name(), [stem] * length + [9] * tail, 20, cache_salt=salt), watermark, share)

    @precondition(lambda self: self.running)
    @rule(pick=st.randoms(use_true_random=False))
    def fork(self, pick: Any) -> None:
        source = pick.choice(self.running)
        prompt = source.token_ids[: source.num_prompt_tokens]
        self._admit(request(self._name(), prompt, 20, cache_salt=source.cache_salt, source=source), 0.0, True)

    def _admit(self, one: Request, watermark: float, share: bool) -> None:
        before = self.kv.counts()
        admission = self.kv.admit(one, len(one.token_ids), watermark, share=share)
        if admission is None:
            assert self.kv.counts() == before
            return
        known = admission.num_computed_tokens
        assert known < len(one.token_ids)
        for group, source, target in admission.copies:
            self.content[group][target] = self.content[group][source]
        one.move_to(RequestStatus.RUNNING)
        one.num_computed_tokens, one.progress_mark = known, len(one.token_ids)
        self.running.append(one)
        for group in range(len(self.kv.layout.groups)):
            first = self.kv.layout.first_in_reach(group, known)
            for index in range(first, -(-known // BLOCK)):
                block = one.block_ids[group][index]
                end = min(known, (index + 1) * BLOCK)
                assert self.content[group][block][: end + 1] == (one.cache_salt, *one.token_ids[:end])

    @precondition(lambda self: self.running and self.step == self.done)
    @rule(pick=st.randoms(use_true_random=False), count=st.integers(1, _STEP))
    def compute(self, pick: Any, count: int) -> None:
        """Launch a step that computes some tokens of one request, writing their blocks."""
        one = pick.choice(self.running)
        end = min(one.num_computed_tokens + count, len(one.token_ids))
        if end == one.num_computed_tokens or len(one.token_ids) >= one.max_total_tokens:
            return
        if self.kv.tables.extend(one, end, self.step) is None:
            return
        self.step += 1
        for group in range(len(self.kv.layout.groups)):
            for index in range(one.num_computed_tokens // BLOCK, -(-end // BLOCK)):
                upto = min(end, (index + 1) * BLOCK)
                self.content[group][one.block_ids[group][index]] = (one.cache_salt, *one.token_ids[:upto])
        one.num_computed_tokens = end

    @precondition(lambda self: self.step > self.done)
    @rule()
    def land(self) -> None:
        self.done = self.step
        self.kv.step_done(self.step)
        for one in self.running:
            self.kv.publish(one, one.num_computed_tokens)
            if one.num_computed_tokens == len(one.token_ids):
                one.token_ids.append(len(one.token_ids) % 3)

    @precondition(lambda self: self.running)
    @rule(pick=st.randoms(use_true_random=False), failed=st.booleans())
    def leave(self, pick: Any, failed: bool) -> None:
        one = pick.choice(self.running)
        self.running.remove(one)
        if failed:
            self.kv.forget(one)
        self.kv.tables.free(one, self.step)
        one.num_computed_tokens = 0
        one.move_to(RequestStatus.FINISHED)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_invariants(self.running)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for one in self.running:
                self.kv.tables.free(one, self.step)
            self.kv.step_done(self.step)
            self.kv.check_invariants([])
            assert self.kv.counts().used == 0

    def _name(self) -> str:
        self.names += 1
        return f"r{self.names}"


TestKVCache = KVCacheMachine.TestCase
TestKVCache.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
