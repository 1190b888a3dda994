"""Simulation of the real engine under a virtual clock, for two ends.

Faults: one seed is one execution. A seed makes a world (:mod:`~chairlift.sim.world`), the simulator runs it and checks
invariants after every step and every answer against HashLM served alone (:mod:`~chairlift.sim.simulator`), and a world
that fails is reduced to the events it needs (:mod:`~chairlift.sim.minimise`). The method is FoundationDB's and
TigerBeetle's.

Traffic: a trace is replayed with the times that a cost model predicts (:mod:`~chairlift.sim.replay`). The model comes
from a table of machines (:mod:`~chairlift.sim.machines`) or from steps of a real one (:mod:`~chairlift.sim.calibrate`).
"""
