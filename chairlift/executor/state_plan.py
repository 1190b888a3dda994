"""How many recurrent states there is memory for, and at which positions snapshots of them are kept."""

from __future__ import annotations

import dataclasses

from chairlift.config import ONE_STATE
from chairlift.errors import ConfigError

__all__ = ["StatePlan", "plan_states"]

_PLAIN_INTERVAL = 1024
"""Positions between two snapshots in models without K and V, whose snapshots are the whole cache."""
_STATE_SHARE = 2
"""Running requests take at most 1 / this of the memory for their states where K and V need the rest."""


@dataclasses.dataclass(frozen=True, slots=True)
class StatePlan:
    """Blocks of a group of recurrent states, each with one state of every recurrent layer."""

    nbytes: int
    """Bytes of a block."""
    span: int
    """Positions between two snapshots; :data:`~chairlift.config.ONE_STATE`: there are none."""
    num_running: int
    """Requests that may run at once."""
    num_rows: int
    """Requests that might run at once if memory were no matter."""
    num_snapshots: int
    """Blocks for snapshots of the prefix cache."""

    @property
    def has_snapshots(self) -> bool:
        return self.span < ONE_STATE

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included. A request that crosses a snapshot's position holds two."""
        return 1 + (2 if self.has_snapshots else 1) * self.num_running + self.num_snapshots

    def with_snapshots(self, num_tokens: int, memory_bytes: int, most_tokens: int) -> StatePlan:
        """The same plan with a snapshot for every ``span`` of the ``num_tokens`` positions of which K and V are kept.

        Models without K and V (0 positions) have as many snapshots as memory allows and ``most_tokens`` need.
        """
        if not self.has_snapshots:
            return self
        if not num_tokens:
            room = memory_bytes // self.nbytes - self.num_blocks
            num_tokens = min(room * self.span, most_tokens)
        return dataclasses.replace(self, num_snapshots=max(1, -(-num_tokens // self.span)))

    def token_bytes(self) -> float:
        """Bytes of snapshots per position of the cache."""
        return self.nbytes / self.span if self.has_snapshots else 0.0

    def describe(self) -> str:
        """The plan in plain words."""
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
    """Divide memory between states of running requests and the rest.

    A state has ``nbytes``, K and V of a token ``token_bytes`` (0: the model has none). With ``caching`` there is a
    snapshot every ``interval`` tokens; None chooses it such that snapshots take no more than K and V. Raises
    ConfigError for an interval that is no multiple of ``block_size``, and if not even one request fits.
    """
    span = ONE_STATE
    if caching:
        chosen = -(-nbytes // (token_bytes * block_size)) * block_size if token_bytes else _PLAIN_INTERVAL
        span = chosen if interval is None else interval
        if span % block_size or not 0 < span < ONE_STATE:
            raise ConfigError(
                f"state_snapshot_interval must be a multiple of block_size {block_size}, got {span}; round it up"
            )
    held = 2 if caching else 1
    share = memory_bytes // _STATE_SHARE if token_bytes or caching else memory_bytes
    running = min(rows, (share // nbytes - 1) // held)
    if running < 1:
        need = (1 + held) * nbytes * (memory_bytes // max(share, 1) or 1)
        raise ConfigError(
            f"a request keeps a recurrent state of {nbytes:,} bytes, and the cache has {memory_bytes:,} bytes for"
            f" states and all else; raise kv_cache_memory_bytes to at least {need:,}"
        )
    return StatePlan(nbytes, span, running, rows, 0)
