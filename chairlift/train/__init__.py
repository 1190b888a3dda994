"""The training half: variable-length sequences packed into flat batches, through the same models that serve.

Packing is continuous batching without a cache. :mod:`~chairlift.train.pack` decides which sequences share a batch
(standard library only); :mod:`~chairlift.train.trainer` runs them through a model and takes optimiser steps.
"""

from __future__ import annotations

from chairlift.train.pack import Pack, pack_sequences

__all__ = ["Pack", "pack_sequences"]
