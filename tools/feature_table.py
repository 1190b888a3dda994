"""Writes the table of features and backends into docs/features.md.

::

    python tools/feature_table.py

Each cell is the answer of ``choose_backend``, which refuses settings and models when a model is loaded. No GPU is
needed: the checks of Triton's kernels run as for Triton's interpreter. A test compares the table with the page.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.executor.select import choose_backend, choose_pooled_backend
from chairlift.models.hf_config import NetworkConfig, parse_config
from tools.markdown import replaced, table

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "features.md"
BEGIN: Final = "<!-- features, made by tools/feature_table.py -->"
BACKENDS: Final[Mapping[str, str]] = {"native CPU": "avx2", "PyTorch": "torch", "Triton GPU": "triton"}
"""Column -> value of the setting ``kernels``."""
_DRAFTS: Final = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "weights in 16 or 32 bits": {},
    "`--quantization int8`": {"quantization": "int8"},
    "`--quantization int4`": {"quantization": "int4"},
    "`--quantization fp8`": {"quantization": "fp8"},
    "`--kv-cache-dtype int8`": {"kv_cache_dtype": "int8"},
    "`--batch-invariant`": {"batch_invariant": True},
    "`--enable-lora`": {"enable_lora": True},
    "`--speculative-config` with n-grams": _DRAFTS,
}
"""Feature -> settings that switch it on, for a dense model."""
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "attention sinks (gpt-oss)": {"sinks": True},
    "capped scores (Gemma 2)": {"score_cap": 50.0},
}
"""Kind of model -> fields of its configuration."""


def dense() -> NetworkConfig:
    """Configuration of a small dense model that every backend runs."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    return parse_config({"model_type": "llama", "num_attention_heads": 2, "head_dim": 32, **sizes})


@contextmanager
def _interpreter() -> Iterator[None]:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _cell(kernels: str, network: NetworkConfig, settings: Mapping[str, Any], pooled: bool = False) -> str:
    config = EngineConfig.from_flat({"kernels": kernels, **settings})
    choose = choose_pooled_backend if pooled else choose_backend
    try:
        with _interpreter():
            choose(config, network, torch.float32, torch.device("cpu"))
    except ConfigError:
        return "no"
    return "yes"


def feature_table() -> str:
    """Table with a row for each feature and a column for each backend. It needs a processor with AVX2, the compiled
    kernels, and the package triton."""
    rows = []
    for feature, settings in SETTINGS.items():
        rows.append((feature, *(_cell(kernels, dense(), settings) for kernels in BACKENDS.values())))
    for kind, fields in MODELS.items():
        network = dataclasses.replace(dense(), **fields)
        rows.append((kind, *(_cell(kernels, network, {}) for kernels in BACKENDS.values())))
    rows.append(("embeddings and classes", *(_cell(kernels, dense(), {}, True) for kernels in BACKENDS.values())))
    return table(("", *BACKENDS), rows)


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, feature_table()))
