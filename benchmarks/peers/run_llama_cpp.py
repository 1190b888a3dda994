"""Runs llama.cpp as a child of ``compare.py`` or ``table.py``, inside the environment
that ``setup_llama_cpp.sh`` creates.

    ENV/bin/python benchmarks/peers/to_gguf.py --model DIR --out FILE.gguf
    ENV/bin/python benchmarks/peers/run_llama_cpp.py --model FILE.gguf

The script uses llama.cpp as a library and repeats the loop of its server: every step decodes one token of each running
request and fills the rest of the batch with prompts. The KV cache has 16 bits; decoding is greedy; there is no prefix
caching. It is compiled for this processor, flash attention is on, each request has a part of the KV cache of its own
(attention over one common cache would also read the tokens of other requests), and a batch has 2,048 tokens, computed
in pieces of 512. The files are bf16, Q8_0 and Q4_0: of the 4-bit types, Q4_0 is the one whose weights are rearranged
for the vector instructions of this processor.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from protocol import Place, Requests, kv_bytes_per_token, made, restart_with, serve

FILES = {8: "LLAMA_FTYPE_MOSTLY_Q8_0", 4: "LLAMA_FTYPE_MOSTLY_Q4_0"}
"""Bits -> llama.cpp's name of the type of a file."""
QUANTIZE = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, sys.argv[1])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[2].encode(), sys.argv[3].encode(), params))
"""
KV_TYPES = {"f16": "GGML_TYPE_F16", "bf16": "GGML_TYPE_BF16"}


def converted(place: Place, bits: int) -> Path:
    """The model as a GGUF file, converted once with the tools of the environment of llama.cpp."""
    source, log = place.work / f"{place.model.name}-bf16.gguf", place.work / "convert.log"
    script = str(Path(__file__).with_name("to_gguf.py"))
    made(source, [place.python, script, "--model", str(place.model), "--out", str(source)], log)
    if bits == 16:
        return source
    target = place.work / f"{place.model.name}-{bits}.gguf"
    words = [place.python, "-c", QUANTIZE, FILES[bits], str(source), str(target)]
    return made(target, words, log, LLAMA_CPP_LIB_PATH=str(place.environment / "build" / "bin"))


def command(place: Place, bits: int) -> list[str]:
    config = json.loads((place.model / "config.json").read_text())
    tokens = max(place.rows * place.longest, (2 << 30) // kv_bytes_per_token(config))
    words = [place.python, __file__, "--model", str(converted(place, bits)), "--rows", str(place.rows)]
    return [*words, "--kv-tokens", str(tokens)]


@dataclasses.dataclass
class Running:
    """One running request, which occupies a row of the batch."""

    request: int
    prompt: list[int]
    left: int
    """Number of tokens still to generate."""
    position: int = 0
    token: int = -1
    """The token that was generated last."""


class Engine:
    """Continuous batching with ``llama_decode``."""

    def __init__(self, llama: Any, args: argparse.Namespace) -> None:
        """Load the model. Raises SystemExit when the model or its cache cannot be created."""
        self.llama, self.rows, self.budget = llama, args.rows, args.batch
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(str(args.model).encode(), llama.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {args.model}")
        params = llama.llama_context_default_params()
        params.n_ctx = self.room = args.kv_tokens
        params.n_seq_max, params.kv_unified = args.rows, args.unified
        params.n_batch, params.n_ubatch = args.batch, min(args.batch, args.ubatch)
        params.n_threads = params.n_threads_batch = args.threads
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = getattr(llama, KV_TYPES[args.kv_type])
        self.context = llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp cannot make a context with these settings")
        self.row_room = self.room if args.unified else self.room // args.rows
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.memory = llama.llama_get_memory(self.context)
        self.batch = llama.llama_batch_init(args.batch, 0, 1)

    def answer(self, requests: Requests) -> list[int]:
        longest = max(len(prompt) + count for prompt, count in requests)
        if longest > self.row_room:
            raise SystemExit(f"a request has {longest} tokens and a row room for {self.row_room}; give fewer --rows")
        waiting = collections.deque(Running(i, prompt, count) for i, (prompt, count) in enumerate(requests))
        free, rows, produced = list(range(self.rows)), dict[int, Running](), [0] * len(requests)
        used = 0
        while waiting or rows:
            while waiting and free and used + self._needs(waiting[0]) <= self.room:
                used += self._needs(waiting[0])
                rows[free.pop()] = waiting.popleft()
            for row, token in self._step(rows):
                state = rows[row]
                state.token, state.left = token, state.left - 1
                produced[state.request] += 1
                if state.left == 0:
                    self.llama.llama_memory_seq_rm(self.memory, row, -1, -1)
                    used -= len(state.prompt) + produced[state.request]
                    free.append(row)
                    del rows[row]
        return produced

    @staticmethod
    def _needs(state: Running) -> int:
        return len(state.prompt) + state.left

    def _step(self, rows: dict[int, Running]) -> list[tuple[int, int]]:
        """Run one step. Returns (row, token) for each row with a new token."""
        self.batch.n_tokens = 0
        sampled = []
        for row, state in rows.items():
            if state.position >= len(state.prompt):
                self._add(row, state, state.token, wanted=True)
                sampled.append(row)
        for row, state in rows.items():
            while state.position < len(state.prompt) and self.batch.n_tokens < self.budget:
                last = state.position + 1 == len(state.prompt)
                self._add(row, state, state.prompt[state.position], wanted=last)
                if last:
                    sampled.append(row)
        code = self.llama.llama_decode(self.context, self.batch)
        if code:
            raise SystemExit(f"llama_decode failed with {code}")
        if not sampled:
            return []
        logits = ctypes.cast(self.llama.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
        table = np.ctypeslib.as_array(logits, shape=(len(sampled), self.vocabulary))
        return list(zip(sampled, table.argmax(axis=1).tolist(), strict=True))

    def _add(self, row: int, state: Running, token: int, *, wanted: bool) -> None:
        batch, place = self.batch, self.batch.n_tokens
        batch.token[place], batch.pos[place] = token, state.position
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
        batch.logits[place] = wanted
        batch.n_tokens = place + 1
        state.position += 1


def load(args: argparse.Namespace) -> tuple[Callable[[Requests], Sequence[int]], dict[str, Any]]:
    import llama_cpp

    engine = Engine(llama_cpp, args)
    names = ("kv_tokens", "rows", "batch", "ubatch", "threads", "unified", "kv_type")
    about = {
        "version": f"{llama_cpp.__version__} (binding)",
        "system": llama_cpp.llama_print_system_info().decode(),
        "settings": {name: getattr(args, name) for name in names},
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
    parser.add_argument(
        "--unified", action="store_true", help="one KV cache for all rows instead of an equal part for each"
    )
    parser.add_argument("--kv-type", choices=sorted(KV_TYPES), default="f16")
    args = parser.parse_args()
    if args.rows > args.batch:
        parser.error(f"--batch must be at least --rows, got {args.batch} and {args.rows}")
    restart_with({"LLAMA_CPP_LIB_PATH": str(Path(sys.prefix) / "build" / "bin")})
    serve(lambda: load(args))


if __name__ == "__main__":
    main()
