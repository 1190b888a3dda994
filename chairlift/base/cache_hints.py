"""What a client asks of the prefix cache: leases for parts of its prompt, and the session of the request.

Standard library only.
"""

from __future__ import annotations

import dataclasses
from typing import Final

__all__ = ["LONGEST_LEASE", "MOST_LEASES", "NO_HINTS", "CacheHints"]

MOST_LEASES: Final = 4
"""Maximum number of leases of one request, as many as Anthropic's and OpenAI's APIs have breakpoints."""
LONGEST_LEASE: Final = 3600.0
"""Maximum length of a lease in seconds: the longer time to live of Anthropic's caches."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheHints:
    """Hints of one request. They change neither the answer nor who may share its blocks."""

    session: str = ""
    """Name of the conversation that the request belongs to; empty if unknown."""
    leases: tuple[tuple[int, float], ...] = ()
    """(number of leading tokens of the prompt whose blocks are to be kept, seconds after their last use), at most
    :data:`MOST_LEASES`."""
    payer: str = ""
    """Tenant whose part of the budget the leases take. Empty: the common part of all callers that nobody vouches
    for."""


NO_HINTS: Final = CacheHints()
