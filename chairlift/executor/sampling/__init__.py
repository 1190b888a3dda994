"""From logits to tokens, without state: a request draws the same tokens in any batch.

Importing this package does not import torch. Modules that need torch are imported by name::

    seeds     one 64-bit seed per answer (standard library only)
    gumbel    counter-based Gumbel noise and the arg max over noisy scores
    logits    one function per transform (bias, masks, penalties, temperature, min-p, top-k, top-p)
    logprobs  log-probabilities of the raw logits
    row       sampling parameters of one answer (no torch)
    failures  reasons why a row has no token (no torch)
    sampler   applies all of these to a batch of rows, in order
"""

from __future__ import annotations

from chairlift.base.seeds import sample_seed

__all__ = ["sample_seed"]
