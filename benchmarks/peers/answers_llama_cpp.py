"""Computes greedy answers with llama.cpp, as a child of ``llama_cpp_answers.py``, inside the environment that
``setup_llama_cpp.sh`` creates.

    echo '{"prompts": [[1, 2, 3]], "tokens": 8}' | ENV/bin/python benchmarks/peers/answers_llama_cpp.py FILE.gguf

Each prompt has a context of its own and is computed in one batch. The KV cache has 16 bits, or 32 with ``--kv-type
f32``. Standard output has one JSON object: for each prompt the tokens, and at each of them the difference between the
two largest logits.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from protocol import restart_with

KV_TYPES = {"f16": "GGML_TYPE_F16", "f32": "GGML_TYPE_F32"}


class Model:
    """A GGUF file in llama.cpp."""

    def __init__(self, llama: Any, path: Path, kv_type: str, threads: int) -> None:
        """Load the model. Raises SystemExit when it cannot be loaded."""
        self._llama = llama
        self._threads = threads
        self._kv_type = getattr(llama, KV_TYPES[kv_type])
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))

    def answer(self, prompt: list[int], count: int) -> dict[str, Any]:
        """``count`` greedy tokens after ``prompt``, and the margin of each: the largest logit minus the second."""
        llama = self._llama
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = len(prompt) + count
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = self._kv_type
        context = llama.llama_init_from_model(self._model, params)
        if not context:
            raise SystemExit("llama.cpp cannot make a context")
        tokens: list[int] = []
        margins: list[float] = []
        given = prompt
        while len(tokens) < count:
            array = (llama.llama_token * len(given))(*given)
            code = llama.llama_decode(context, llama.llama_batch_get_one(array, len(given)))
            if code:
                raise SystemExit(f"llama_decode failed with {code}")
            pointer = ctypes.cast(llama.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float))
            logits = np.ctypeslib.as_array(pointer, shape=(self._vocabulary,))
            second, first = np.argpartition(logits, -2)[-2:][np.argsort(np.partition(logits, -2)[-2:])]
            tokens.append(int(first))
            margins.append(float(logits[first] - logits[second]))
            given = [int(first)]
        llama.llama_free(context)
        return {"tokens": tokens, "margins": margins}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the GGUF file")
    parser.add_argument("--kv-type", choices=sorted(KV_TYPES), default="f16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    restart_with({"LLAMA_CPP_LIB_PATH": str(Path(sys.prefix) / "build" / "bin")})
    import llama_cpp

    asked = json.load(sys.stdin)
    model = Model(llama_cpp, args.model, args.kv_type, args.threads)
    answers = [model.answer(prompt, asked["tokens"]) for prompt in asked["prompts"]]
    json.dump({"version": llama_cpp.__version__, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
