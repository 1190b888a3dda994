"""Runs ik_llama.cpp, a fork of llama.cpp, as a child of ``table.py``, inside the environment that
``setup_ik_llama_cpp.sh`` creates.

    ENV/bin/python benchmarks/peers/run_ik_llama_cpp.py --model FILE.gguf

The loop is that of ``run_llama_cpp.py``, and so are the files. As the fork advises for CPUs, weights are rearranged at
load (``-rtr``), and flash attention is on for a single request. With several requests it is off: the flash attention of
version 0.1.5 aborts (``GGML_ASSERT(S > 0)``) in the warm-up, whose batch has tokens of three requests. Presumably all
keys of a part of the common KV cache are then masked. The package has no sources; its library is compiled for AVX2.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protocol import Place, Requests, kv_bytes_per_token, serve
from run_llama_cpp import Engine, converted


def command(place: Place, bits: int) -> list[str]:
    """The files are converted in the environment of llama.cpp, which must be beside this one."""
    config = json.loads((place.model / "config.json").read_text())
    tokens = max(place.rows * place.longest, (2 << 30) // kv_bytes_per_token(config))
    beside = Place(place.environment.with_name("llama_cpp"), place.model, place.work)
    words = [place.python, __file__, "--model", str(converted(beside, bits)), "--rows", str(place.rows)]
    return [*words, "--kv-tokens", str(tokens)]


class Fork:
    """The fork's functions under the names that llama.cpp has for them today."""

    LLAMA_FLASH_ATTN_TYPE_ENABLED = 1
    GGML_TYPE_F16 = 1

    def __init__(self, binding: Any, flash_attention: bool) -> None:
        self._binding = binding
        self._flash_attention = flash_attention
        library = binding._lib
        library.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
        library.llama_get_logits.argtypes = [ctypes.c_void_p]
        library.llama_kv_cache_seq_rm.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 3]
        library.llama_print_system_info.restype = ctypes.c_char_p
        self.llama_get_logits = library.llama_get_logits
        self.llama_memory_seq_rm = library.llama_kv_cache_seq_rm
        self.llama_print_system_info = library.llama_print_system_info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._binding, name)

    def llama_model_default_params(self) -> Any:
        params = self._binding.llama_model_default_params()
        params.repack_tensors = True
        params.use_mmap = False
        return params

    def llama_context_default_params(self) -> Any:
        params = self._binding.llama_context_default_params()
        params.flash_attn = self._flash_attention
        return params

    def llama_get_memory(self, context: int) -> int:
        """The context, because the fork's functions of the cache take it."""
        return context


def load(args: argparse.Namespace) -> tuple[Callable[[Requests], Sequence[int]], dict[str, Any]]:
    import importlib.metadata

    from ik_llama_cpp import _ctypes_api

    flash_attention = args.rows == 1
    fork = Fork(_ctypes_api, flash_attention)
    engine = Engine(fork, args)
    names = ("kv_tokens", "rows", "batch", "ubatch", "threads")
    about = {
        "version": f"{importlib.metadata.version('ik-llama-cpp-python')} (binding)",
        "system": fork.llama_print_system_info().decode(),
        "settings": {name: getattr(args, name) for name in names}
        | {"repacked": True, "flash_attention": flash_attention},
    }
    return engine.answer, about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kv-tokens", type=int, default=131_072, help="tokens in the KV cache")
    parser.add_argument("--rows", type=int, default=64, help="requests at a time")
    parser.add_argument("--batch", type=int, default=2048, help="tokens per step")
    parser.add_argument("--ubatch", type=int, default=512, help="tokens that are computed together")
    parser.set_defaults(unified=True, kv_type="f16")
    args = parser.parse_args()
    serve(lambda: load(args))


if __name__ == "__main__":
    main()
