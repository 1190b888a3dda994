"""The laboratory of batching: policies x traces x machines, run by the simulator and checked on the real engine.

``chairlift lab`` runs it. The package adds no second simulator: a cell is one call of
:func:`~chairlift_lab.replay.replay.serve_trace` on :func:`~chairlift_lab.replay.replay.simulated_core`.
"""
