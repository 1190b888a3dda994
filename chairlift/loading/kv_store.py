"""Opens the store of KV blocks that belongs to a loaded model.

The name of the store's namespace is a digest of everything that decides the bits of a block besides its tokens. The
weights count with their whole content: a sample would miss a changed tensor. Their digest is computed in a thread, once
per file, and until it is known nothing is found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.engine.info import EngineInfo
from chairlift.engine.kv_store.disk import Disk, OsDisk
from chairlift.engine.kv_store.files import StoreFiles, read_secret
from chairlift.engine.kv_store.store import KVStore
from chairlift.errors import ConfigError
from chairlift.executor.executor import Executor
from chairlift.models.formats.gguf.files import encoders_beside, parts_of
from chairlift.version import __version__

__all__ = ["StoreOpening", "about_blocks", "open_store"]

_log = logging.getLogger(__name__)

_FORMAT: Final = 1
"""Number of the files' format. Files of another format are never read."""
_PREPARED_BYTES: Final = 512 << 20
"""Bytes of the KV cache whose memory is allocated when the store has been opened. Otherwise the first loads wait for
the system to clear it: 30 to 80 ms per 44 MiB on a machine with huge pages."""
_KNOWN_DIGESTS: Final = "digests.json"
_SUFFIXES: Final = {".json", ".safetensors", ".gguf", ".bin", ".model", ".npz", ".py"}
_WITHOUT_EFFECT: Final = {"model", "revision", "tokenizer", "skip_tokenizer_init", "plain_text_messages", "threads"}
_WITHOUT_EFFECT_TOO: Final = {"generation_config", "runner", "seed", "cuda_graphs", "logprobs_mode"}
"""Settings of the model that do not change the KV of given tokens."""


def open_store(config: EngineConfig, executor: Executor, info: EngineInfo) -> StoreOpening | None:
    """Begin to open the store of ``config.cache.kv_store``; None if no store is wanted. Raises ConfigError if the
    directory cannot be used, or if the model's blocks cannot be stored."""
    cache = config.cache
    if cache.kv_store is None:
        return None
    if getattr(executor, "drafter", None) is not None:
        raise ConfigError(
            f"kv_store cannot keep the KV of speculative_config method {info.speculative_method}, whose layers have"
            " blocks of their own; use method ngram, or leave one of the two out"
        )
    blocks = getattr(executor, "blocks", None)
    if blocks is None:
        raise ConfigError(f"kv_store is for CPUs, and device is {config.model.device}; leave kv_store out")
    if info.model_dir and not Path(info.model_dir).exists():
        raise ConfigError(f"kv_store needs the model's files, and {info.model_dir!r} is gone")
    read_only = cache.kv_store_mode == "ro"
    disk = OsDisk(cache.kv_store)
    secret = read_secret(disk, read_only)
    least = 2 * (sum(executor.block_bytes) + 4096)
    if cache.kv_store_bytes < least:
        raise ConfigError(
            f"kv_store_bytes is {cache.kv_store_bytes:,}, and this model needs at least {least:,}; raise it"
        )
    about = about_blocks(config, executor, info)
    files: dict[str, Any] = {
        "block_size": executor.block_size,
        "block_bytes": executor.block_bytes,
        "spans": [group.state_span or executor.block_size for group in executor.cache_groups],
        "nbytes": cache.kv_store_bytes,
        "read_only": read_only,
    }
    paths = model_files(info.model_dir, config.model.mmproj)
    prepare = functools.partial(blocks.prepare, _PREPARED_BYTES)
    return StoreOpening(cache.kv_store, disk, secret, about, paths, files, cache.kv_store_write_rate, prepare)


def about_blocks(config: EngineConfig, executor: Executor, info: EngineInfo) -> dict[str, object]:
    """Everything that decides the bits of a block, besides its tokens and the content of the model's files."""
    model = dataclasses.asdict(config.model)
    native = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "neon", "neon_i8mm")
    threads = {} if info.kernels in native else {"threads": info.threads}
    return {
        "format": _FORMAT,
        "version": __version__,
        "kernels": info.kernels,
        "library": _library_digest(info.kernels),
        **threads,
        "model_impl": info.model_impl,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "approximations": list(info.approximations),
        "kv_cache_dtype": info.kv_cache_dtype or info.dtype,
        "block_size": executor.block_size,
        "block_bytes": list(executor.block_bytes),
        "groups": [[group.window, group.state_span] for group in executor.cache_groups],
        "max_model_len": info.max_model_len,
        "settings": {k: v for k, v in model.items() if k not in _WITHOUT_EFFECT | _WITHOUT_EFFECT_TOO},
        "name": "" if info.model_dir else config.model.model,
    }


def _library_digest(kernels: str) -> str:
    """Digest of the code that computes: that of the sources and flags of the compiled kernels if the build has noted
    it, else that of their file; or the version of PyTorch."""
    if kernels == "torch":
        import torch

        return f"torch {torch.__version__}"
    from chairlift.kernels.cpu.library import LIBRARY_PATH

    try:
        digest = hashlib.sha256(LIBRARY_PATH.read_bytes()).hexdigest()
    except OSError:
        return ""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads(LIBRARY_PATH.with_suffix(".json").read_text())
        if noted["library"] == digest:  # it is of this file
            return str(noted["origin"])
    return digest


class StoreOpening:
    """A store that is being opened: call it for the store, which is None until the model's files have been read.
    ``prepare`` makes room for the first loads; it is called after the store is open."""

    def __init__(
        self,
        directory: str,
        disk: Disk,
        secret: bytes,
        about: Mapping[str, object],
        paths: Mapping[str, Path],
        files: dict[str, Any],
        write_rate: float,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.secret = secret
        """Secret of the prefix cache, with which keys are the same in every process that uses the directory."""
        self.directory = directory
        self.failed = False
        """Whether it could not be opened."""
        self._disk = disk
        self._about = dict(about)
        self._paths = paths
        self._files = files
        self._write_rate = write_rate
        self._prepare = prepare
        self._store: KVStore | None = None
        self._thread = threading.Thread(target=self._open, name="kv-store-opening", daemon=True)
        self._thread.start()

    def __call__(self) -> KVStore | None:
        return self._store

    def wait(self) -> KVStore | None:
        """The store, after it has been opened; None if it could not be."""
        self._thread.join()
        return self._store

    def _open(self) -> None:
        try:
            self._about["files"] = digests_of(self._disk, self._paths)
            text = json.dumps(self._about, sort_keys=True)
            namespace = hashlib.sha256(text.encode()).hexdigest()[:32]
            files = StoreFiles(self._disk, namespace, self._about, **self._files)
            self._store = KVStore(files, self._write_rate)
        except (ConfigError, OSError) as error:
            self.failed = True
            _log.warning("kv_store is not used: %s", error)
            return
        self._prepare()


def model_files(model_dir: str, mmproj: str) -> dict[str, Path]:
    """Name -> path, for all files that decide the KV of a model: those in its directory, or the parts of a GGUF model
    and its image encoders: those beside it, and the file that the setting ``mmproj`` names."""
    where = Path(model_dir)
    if not model_dir:
        return {}
    if not model_dir.endswith(".gguf"):
        paths = [path for path in sorted(where.rglob("*")) if path.suffix in _SUFFIXES and path.is_file()]
        return {os.path.relpath(path, where): path for path in paths}
    named = Path(mmproj).expanduser()
    paths = [*parts_of(where), *encoders_beside(where), *([named] if named.is_file() else [])]
    return {os.path.relpath(path, where.parent): path for path in paths}


def digests_of(disk: Disk, paths: Mapping[str, Path]) -> dict[str, str]:
    """Name of each of the files -> SHA-256 of its whole content. Digests of files that have not changed since they were
    computed come from the store. Raises OSError."""
    known = _known_digests(disk)
    found: dict[str, str] = {}
    fresh: dict[str, str] = {}
    for own, path in paths.items():
        state = path.stat()
        name = f"{state.st_dev}:{state.st_ino}:{state.st_size}:{state.st_mtime_ns}:{state.st_ctime_ns}"
        if name not in known:
            with path.open("rb") as file:
                known[name] = hashlib.file_digest(file, "sha256").hexdigest()
        fresh[name] = known[name]
        found[own] = known[name]
    if fresh:
        with contextlib.suppress(OSError):
            _keep_digests(disk, known)
    return found


def _known_digests(disk: Disk) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        size = disk.sizes().get(_KNOWN_DIGESTS, 0)
        file = disk.open(_KNOWN_DIGESTS)
        read = json.loads(file.read(0, size))
        file.close()
        return {str(name): str(value) for name, value in read.items()}
    return {}


def _keep_digests(disk: Disk, known: Mapping[str, str]) -> None:
    text = json.dumps(dict(list(known.items())[-1000:])).encode()
    file = disk.open(_KNOWN_DIGESTS, len(text))
    file.write(0, text)
    file.close()
