"""Seeds: one 64-bit number per answer, made from the request's seed and the answer's index."""

from __future__ import annotations

__all__ = ["sample_seed"]

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def sample_seed(seed: int, sample_index: int) -> int:
    """Hash a request's ``seed`` and the index of one of its ``n`` answers to an unsigned 64-bit seed.

    This function must never change, because "same seed, same text" depends on it. The seed is taken modulo 2**64, so
    negative seeds are allowed. For one request seed, different indices give different results, because both steps are
    bijections. The mixing function is SplitMix64's (Steele, Lea and Flood, OOPSLA 2014).

    Raises:
        ValueError: ``sample_index`` is negative.
    """
    if sample_index < 0:
        raise ValueError(f"sample_index is {sample_index}; it counts the answers of one request from 0")
    stream = _mix((seed + _GOLDEN_GAMMA) & _MASK)
    return _mix((stream + (sample_index + 1) * _GOLDEN_GAMMA) & _MASK)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
