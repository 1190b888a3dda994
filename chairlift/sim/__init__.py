"""Deterministic simulation: the real engine, scheduler, KV manager and executor under a virtual clock and faults.

One seed is one execution. A seed makes a world (:mod:`~chairlift.sim.world`), the simulator runs it and checks
invariants after every step and every answer against HashLM served alone (:mod:`~chairlift.sim.simulator`), and a world
that fails is reduced to the events it needs (:mod:`~chairlift.sim.minimise`). The method is FoundationDB's and
TigerBeetle's.
"""
