"""Replays traffic through the real scheduler and engine core on a virtual clock, with step times from a cost model.

The cost model comes from a table of machines (:mod:`~chairlift_lab.replay.machines`), or is fitted to steps of a real
machine (:mod:`~chairlift_lab.replay.calibrate`). The server uses a replay to compare recorded traffic with static
batches.
"""
