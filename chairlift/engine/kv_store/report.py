"""What a store of KV blocks says of itself, as plain data that other processes can use."""

from __future__ import annotations

import dataclasses

__all__ = ["StoreNews", "StoreReport"]


@dataclasses.dataclass(frozen=True, slots=True)
class StoreNews:
    """Blocks that an engine can load from now on, or no longer."""

    added: bytes
    """Short keys of these blocks, one after another. The next field: of blocks that cannot be loaded any more."""
    removed: bytes
    token_seconds: float
    """Measured seconds that a load takes per token."""


@dataclasses.dataclass(slots=True, kw_only=True)
class StoreReport:
    """State of an engine's store. Counters start at 0 when the engine starts."""

    state: str
    """``off``, ``opening`` while the model's files are read, ``failed`` if it could not be opened, ``read_only``,
    ``stopped`` if nothing is written any more, or ``open``."""
    why: str = ""
    """Why nothing is written any more; empty while blocks are written."""
    directory: str = ""
    namespace: str = ""
    """Digest of everything that decides the bits of a block besides its tokens."""
    writer: int = -1
    """Number of the files that this engine writes; -1 if it only reads."""
    blocks: int = 0
    """Number of blocks that can be found, also in the files of other engines."""
    own_blocks: int = 0
    """Number of blocks in this engine's files. The next field: the most that they hold."""
    most_own_blocks: int = 0
    namespaces: dict[str, int] = dataclasses.field(default_factory=dict)
    """Name of each namespace in the directory -> bytes of its files."""
    queued_bytes: int = 0
    """Number of bytes that wait to be written. The next fields: bytes that were written, and read."""
    written_bytes: int = 0
    read_bytes: int = 0
    read_bytes_per_second: float = 0.0
    """Measured speed of reading, with verification."""
    loads: int = 0
    """Number of requests whose blocks were loaded. The next field: requests that computed them after all, because that
    was faster."""
    given_up: int = 0
    loaded_tokens: int = 0
    """Number of prompt tokens whose KV was loaded."""
    rejected: dict[str, int] = dataclasses.field(default_factory=dict)
    """Reason -> number of blocks that were not written, or not used after they were read."""
