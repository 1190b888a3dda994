"""Creates requests and caches with defaults for tests."""

from __future__ import annotations

import zlib
from typing import Any

from chairlift.config import CacheGroup
from chairlift.core.kv_cache.manager import Admission, KVCacheManager
from chairlift.core.request import Request, RequestStatus
from chairlift.core.rows.adapters import AdapterRows
from chairlift.core.rows.images import ImageRows

__all__ = ["BLOCK", "admit", "compute", "manager", "request"]

BLOCK = 4
KINDS = [AdapterRows(), ImageRows()]


def manager(num_blocks: int = 33, *windows: int | None, num_host_blocks: int = 0, **settings: Any) -> KVCacheManager:
    groups = [CacheGroup(num_blocks, window, num_host_blocks) for window in windows or (None,)]
    return KVCacheManager(groups, BLOCK, **{"max_step_tokens": 8, **settings})


def request(name: str, tokens: int | list[int], max_tokens: int = 8, **settings: Any) -> Request:
    """Create a request. ``tokens`` is a prompt or its length. Prompts of requests with different names share no
    token."""
    prompt = [zlib.crc32(f"{name}:{i}".encode()) % 1000 for i in range(tokens)] if isinstance(tokens, int) else tokens
    made = Request(name, prompt, max_tokens=max_tokens, **settings)
    made.kinds = tuple([kind for kind in KINDS if kind.has(made)])  # as the scheduler does
    return made


def admit(kv: KVCacheManager, request: Request, reserve: int | None = None, **settings: Any) -> Admission:
    """Admit a request as the scheduler does. Fails the test when it does not fit."""
    admission = kv.admit(request, len(request.token_ids) if reserve is None else reserve, **settings)
    assert admission is not None
    request.move_to(RequestStatus.RUNNING)
    request.num_computed_tokens = admission.num_computed_tokens
    request.progress_mark = len(request.token_ids)
    return admission


def compute(kv: KVCacheManager, *requests: Request) -> None:
    """For each request: mark its prompt as computed, publish its blocks to the prefix cache, and append a token."""
    for request in requests:
        request.num_computed_tokens = len(request.token_ids)
        kv.publish(request, request.num_computed_tokens)
        request.token_ids.append(0)
