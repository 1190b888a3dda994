"""The keys by which the router of a fleet knows what its replicas have of a prompt: those of their prefix caches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from chairlift.base.image_spans import marks
from chairlift.config import CacheConfig
from chairlift.core.rows.adapters import adapter_key
from chairlift.engine.info import EngineInfo
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.kv_store.disk import OsDisk
from chairlift.engine.kv_store.files import read_secret
from chairlift.errors import ConfigError
from chairlift.fleet.routing import prefix_keys

__all__ = ["PromptKeys"]


class PromptKeys:
    """Makes the prefix keys of requests. ``digests`` maps the id of an adapter to the digest of its content.

    With a store, the keys have the secret of its directory, so they are the same in all processes that use it. A
    directory that only the replicas can reach has other keys. Then nobody expects loads from it, and all else is as
    before.
    """

    def __init__(self, cache: CacheConfig, digests: Mapping[int, str]) -> None:
        self._enabled = cache.enable_prefix_caching
        self._directory = cache.kv_store
        self._digests = digests
        self._secret = os.urandom(16)
        self._block_size = cache.block_size

    def opened(self, info: EngineInfo) -> None:
        """Note the facts of a replica that has just started, so that it has made the directory of its store."""
        self._block_size = info.block_size
        directory = self._directory
        if directory is None or not Path(directory).is_dir():
            return
        self._directory = None
        try:
            self._secret = read_secret(OsDisk(directory), read_only=True)
        except ConfigError:  # the replicas have said why
            return

    def of(self, request: PreparedRequest) -> list[int]:
        """Keys of the request's known tokens; none if the replicas share no prefixes."""
        if not self._enabled:
            return []
        spans = request.image_spans
        number = request.adapter_id
        return prefix_keys(
            [*request.prompt_token_ids, *request.answer_token_ids],
            request.cache_salt,
            adapter_key(number, self._digests.get(number, "")) if number else b"",
            secret=self._secret,
            block_size=self._block_size,
            marks=(lambda start, end: marks(spans, start, end)) if spans else None,
        )
