"""The key of everything that is cached across requests.

A cache that several callers share would show through its response times what other callers have sent. So the key of
a cached thing has the caller's salt beside the content. The server makes the salt from the API key and the request's
``cache_salt`` (``chairlift.server.http.auth.salt_for``); in Python it is the request's ``cache_salt``. Callers without
keys and salts share everything.

``tests/architecture/test_caches.py`` lists all caches, and says for each that its key is made here, or why its content
does not depend on callers.
"""

from __future__ import annotations

import hashlib

__all__ = ["cache_key", "key_material"]


def key_material(kind: str, salt: str, *content: bytes) -> bytes:
    """The bytes that :func:`cache_key` hashes. Different arguments never give the same bytes."""
    parts = (kind.encode(), salt.encode(), *content)
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def cache_key(kind: str, salt: str, *content: bytes) -> bytes:
    """Key (32 bytes) of a cached thing. ``kind`` names the cache, ``salt`` the callers that share its entries.

    ``content`` is everything that the cached value is made from: a text or its hash, the adapter, and the model if the
    cache outlives it.
    """
    return hashlib.sha256(key_material(kind, salt, *content)).digest()
