"""Traffic replayed through the real scheduler and engine core on a virtual clock, with the times of a cost model.

The cost model comes from a table of machines (:mod:`~chairlift.replay.machines`) or from steps of a real one
(:mod:`~chairlift.replay.calibrate`). The server compares recorded traffic with static batches this way.
"""
