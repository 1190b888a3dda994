"""Simulation of the real engine under a virtual clock, with injected faults. Equal seeds give equal executions.

A seed gives a :mod:`~chairlift_lab.sim.world`. The :mod:`~chairlift_lab.sim.simulator` runs the world,
checks the invariants after every step, and compares every answer with the answer that HashLM gives when it runs the
request alone. A failing world is reduced to the events that the failure needs
(:mod:`~chairlift_lab.sim.minimise`).
FoundationDB and TigerBeetle are tested by the same method.

For simulated traffic and its latencies, see :mod:`chairlift_lab.replay`.
"""
