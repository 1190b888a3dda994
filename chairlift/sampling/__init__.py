"""Logits to tokens, without state: the same request draws the same tokens alone and in any batch.

Importing this package does not import torch; the parts that need it are imported by name::

    seeds     one 64-bit seed per answer (standard library only)
    gumbel    counter-based Gumbel noise and the arg max over noisy scores
    logits    one function per transform (bias, masks, penalties, temperature, min-p, top-k, top-p)
    logprobs  log-probabilities of the raw logits
    row       what the sampler must know of one answer (no torch)
    failures  why a row has no token, in words (no torch)
    sampler   the order of all that, for a batch of rows
"""

from __future__ import annotations

from chairlift.sampling.seeds import sample_seed

__all__ = ["sample_seed"]
