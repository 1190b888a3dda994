"""Plans how many recurrent states fit into memory, and at which positions snapshots are taken."""

from __future__ import annotations

import dataclasses

from chairlift.config import ONE_STATE
from chairlift.errors import ConfigError

__all__ = ["StatePlan", "plan_states"]

_PLAIN_INTERVAL = 1024
"""Number of positions between two snapshots in models without K and V. Their cache consists only of states."""
_STATE_SHARE = 2
"""Divisor of the memory that recurrent states of running requests may take if the model also has K and V: at most 1 /
_STATE_SHARE of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class StatePlan:
    """Plan of the blocks for recurrent states. A block has one state of every recurrent layer."""

    nbytes: int
    """Bytes of one block: one state of every recurrent layer."""
    span: int
    """Number of positions between two snapshots; :data:`~chairlift.config.ONE_STATE` means that there are no
    snapshots."""
    num_running: int
    """Number of requests whose states fit into memory, and which may therefore run at once."""
    num_rows: int
    """Number of requests that could run at once if memory were not limited."""
    num_snapshots: int
    """Number of blocks reserved for snapshots of states in the prefix cache."""

    @property
    def has_snapshots(self) -> bool:
        return self.span < ONE_STATE

    @property
    def num_blocks(self) -> int:
        """Number of all blocks, including the null block. A request needs two blocks while it passes the position of a
        snapshot."""
        return 1 + (2 if self.has_snapshots else 1) * self.num_running + self.num_snapshots

    def with_snapshots(self, num_tokens: int, memory_bytes: int, most_tokens: int) -> StatePlan:
        """The same plan with one snapshot per ``span`` positions, for the ``num_tokens`` positions whose K and V fit
        into the cache.

        A model without K and V (``num_tokens`` is 0) gets as many snapshots as fit into memory, at most as many as
        ``most_tokens`` positions need.
        """
        if not self.has_snapshots:
            return self
        if not num_tokens:
            room = memory_bytes // self.nbytes - self.num_blocks
            num_tokens = min(room * self.span, most_tokens)
        return dataclasses.replace(self, num_snapshots=max(1, -(-num_tokens // self.span)))

    def token_bytes(self) -> float:
        """Bytes of snapshots per token: bytes of one snapshot divided by the number of positions between two
        snapshots."""
        return self.nbytes / self.span if self.has_snapshots else 0.0

    def describe(self) -> str:
        """Description of the plan for the user."""
        each = f"{self.nbytes / 2**20:.2f} MiB" if self.nbytes >= 1 << 20 else f"{self.nbytes / 2**10:.1f} KiB"
        room = f"recurrent states: {each} a request, so {self.num_running:,} requests may run at once"
        if self.num_running < self.num_rows:
            room += f" instead of max_num_seqs {self.num_rows:,}; raise kv_cache_memory_bytes for more"
        if not self.has_snapshots:
            return f"{room}; no prefix cache: enable_prefix_caching is off, so no snapshots of states are kept"
        return f"{room}; {self.num_snapshots:,} snapshots for the prefix cache, one every {self.span:,} tokens"


def plan_states(
    nbytes: int,
    *,
    token_bytes: int,
    block_size: int,
    memory_bytes: int,
    rows: int,
    caching: bool,
    interval: int | None,
) -> StatePlan:
    """Divide the memory: decide how many requests may run at once, and the positions of snapshots.

    A state has ``nbytes`` bytes; K and V of a token have ``token_bytes`` (0: the model has no K and V). With
    ``caching``, a snapshot is taken every ``interval`` tokens; None chooses an interval such that snapshots take no
    more memory than K and V. Raises ConfigError for an interval that is not a multiple of ``block_size``, and if not
    even one request fits.
    """
    span = ONE_STATE
    if caching:
        chosen = -(-nbytes // (token_bytes * block_size)) * block_size if token_bytes else _PLAIN_INTERVAL
        span = chosen if interval is None else interval
        if span % block_size or not 0 < span < ONE_STATE:
            raise ConfigError(
                f"state_snapshot_interval must be a multiple of block_size {block_size}, got {span}; round it up"
            )
    states_per_request = 2 if caching else 1
    share = memory_bytes // _STATE_SHARE if token_bytes or caching else memory_bytes
    running = min(rows, (share // nbytes - 1) // states_per_request)
    if running < 1:
        need = (1 + states_per_request) * nbytes * (memory_bytes // max(share, 1) or 1)
        raise ConfigError(
            f"a request keeps a recurrent state of {nbytes:,} bytes, and the cache has {memory_bytes:,} bytes for"
            f" states and all else; raise kv_cache_memory_bytes to at least {need:,}"
        )
    return StatePlan(nbytes, span, running, rows, 0)
