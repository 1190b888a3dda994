"""Random events at a staleness gate, and an independent count for comparison."""

from __future__ import annotations

import random

from chairlift_train.staleness import GateStats, StalenessGate, StalenessPolicy

POLICIES: tuple[StalenessPolicy, ...] = ("drop", "wait", "reweight", "lr_scale")


class World:
    """Rollouts of random lengths, a trainer that takes each complete batch, and random events."""

    def __init__(self, gate: StalenessGate, seed: int) -> None:
        self.gate = gate
        self.random = random.Random(seed)
        self.version = 0
        self.running: dict[int, list[int]] = {}  # ticket -> tokens left, total tokens, version of its first token
        self.ended: dict[int, int] = {}  # ticket -> version of its first token
        self.consumed = self.dropped = self.cancelled = 0
        self.lengths: list[int] = []

    def run(self, num_events: int) -> GateStats:
        for _ in range(num_events):
            event = self.random.random()
            if event < 0.5:
                self.generate()
            elif event < 0.75:
                self.admit(self.random.choice((1, 1, 2, 5)))
            elif event < 0.76 and self.running:
                ticket = self.random.choice(sorted(self.running))
                del self.running[ticket]
                self.gate.cancel(ticket)
                self.cancelled += 1
            else:
                self.train()
            self.check()
        return self.gate.stats()

    def admit(self, n: int) -> None:
        outstanding = len(self.running) + len(self.ended)
        room = (self.gate.bound + self.version + 1) * self.gate.batch - self.consumed - outstanding
        tickets = self.gate.admit(n)
        assert len(tickets) == (n if n <= room else 0), "the capacity rule"
        for ticket in tickets:
            assert ticket not in self.running and ticket not in self.ended
            length = min(400, int(self.random.lognormvariate(2.5, 1.0)) + 1)
            self.running[ticket] = [length, length, self.version]

    def generate(self) -> None:
        """Generate one or several tokens for every rollout."""
        count = self.random.randint(1, 8)
        for ticket, row in list(self.running.items()):
            row[0] -= count
            if row[0] <= 0:
                del self.running[ticket]
                kept = self.gate.tag(ticket, row[2], f"sample {ticket}", length=row[1])
                assert kept == (self.version - row[2] <= self.gate.bound)
                self.ended[ticket] = row[2]
                self.lengths.append(row[1])
                self.drop_old()

    def train(self) -> None:
        selection = self.gate.select()
        if not selection:
            assert self.gate.policy == "wait" or len(self.ended) < self.gate.batch, "it could have trained"
            return
        assert len(selection.rollouts) == self.gate.batch
        born = [self.ended.pop(rollout.ticket) for rollout in selection.rollouts]
        staleness = tuple(self.version - version for version in born)
        assert selection.staleness == staleness
        assert max(staleness) <= self.gate.bound, "older than the bound"
        assert min(self.ended.values(), default=10**9) >= max(born), "the oldest go first"
        assert selection.samples == [f"sample {rollout.ticket}" for rollout in selection.rollouts]
        if self.random.random() < 0.1:  # the step fails
            self.gate.put_back(selection)
            self.ended |= {each.ticket: version for each, version in zip(selection.rollouts, born, strict=True)}
            return
        self.consumed += len(born)
        self.gate.publish()
        self.version += 1
        self.drop_old()

    def drop_old(self) -> None:
        old = [ticket for ticket, version in self.ended.items() if self.version - version > self.gate.bound]
        for ticket in old:
            del self.ended[ticket]
        self.dropped += len(old)
        assert not old or self.gate.policy != "wait", "wait has dropped a sample"

    def check(self) -> None:
        stats = self.gate.stats()
        assert (stats.running, stats.waiting) == (len(self.running), len(self.ended))
        assert (stats.consumed, stats.dropped, stats.cancelled) == (self.consumed, self.dropped, self.cancelled)
        assert stats.produced == len(self.lengths) == stats.consumed + stats.waiting + stats.dropped


def explore(policy: StalenessPolicy, seed: int, num_events: int, gate: type[StalenessGate] = StalenessGate) -> World:
    chosen = random.Random(seed)
    world = World(gate(chosen.choice((0, 1, 1, 2, 2, 4, 8)), chosen.choice((1, 2, 4, 8, 16)), policy), seed)
    world.run(num_events)
    return world


def steady(policy: StalenessPolicy, bound: int, num_events: int = 20_000) -> GateStats:
    return World(StalenessGate(bound, 16, policy), 0).run(num_events)
