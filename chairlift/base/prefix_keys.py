"""Keys of the full blocks of a prompt: a chain of SHA-256 hashes of everything up to the block's end.

The prefix cache finds blocks by these keys, a store on disk files blocks under them, and the router of a fleet knows by
them what a replica has. Equal secrets give equal keys in every process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from chairlift.base.cache_key import key_material

__all__ = ["SHORT_KEY_BYTES", "TOKEN_BYTES", "block_content", "block_tokens", "chain", "root_content", "sha256"]

TOKEN_BYTES: Final = 8
SHORT_KEY_BYTES: Final = 8
"""Number of leading bytes of a block's key that stand for the key where a wrong guess costs time only."""


def sha256(data: bytes) -> bytes:
    """SHA-256 digest (32 bytes)."""
    return hashlib.sha256(data).digest()


def block_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes: eight bytes per id, in the machine's byte order. Prefix-cache nodes compare and hash these
    bytes."""
    return struct.pack(f"{len(token_ids)}q", *token_ids)


def root_content(salt: str, kinds: Iterable[tuple[str, bytes]], secret: bytes) -> bytes:
    """What distinguishes prompts that share nothing: the salt, and (name, key) of each kind of request that has a key
    for the whole prompt, such as its adapter."""
    parts = [part for name, key in kinds for part in (name.encode(), key)]
    return key_material("prefix", salt, *parts, secret)


def block_content(tokens: bytes, marks: Iterable[tuple[str, bytes]]) -> bytes:
    """Content of a block as bytes: its tokens from :func:`block_tokens`, and (name, marks) of each kind of request that
    has marks in the block, such as its images."""
    return b"".join([tokens, *(key_material(name, "", each) for name, each in marks)])


def chain(root: bytes, contents: Iterable[bytes], hash_function: Callable[[bytes], bytes] = sha256) -> Iterator[bytes]:
    """The key of each block. ``root`` comes from :func:`root_content`, and each of ``contents`` from
    :func:`block_content`."""
    key = hash_function(root)
    for content in contents:
        key = hash_function(key + content)
        yield key
