"""Simulation of the real engine under a virtual clock, with faults: one seed is one execution.

A seed makes a :mod:`~chairlift.workbench.sim.world`. The :mod:`~chairlift.workbench.sim.simulator` runs it, checks the
invariants after every step, and compares every answer with HashLM served alone. A world that fails is reduced to the
events it needs (:mod:`~chairlift.workbench.sim.minimise`). The method is FoundationDB's and TigerBeetle's.

For traffic and its times, see :mod:`chairlift.replay`.
"""
