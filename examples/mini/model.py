"""File 5 of 8. A Llama in numpy that runs a flat batch, with attention over the blocks of the KV cache.

Read ``forward`` first. It never asks which request a token belongs to, except in ``_attend``. All matrix products are
over the tokens of all requests together: the weights are read from memory once per step, for all of them. This is why
batching is worth its trouble: the time of a decode step is mostly the time to read the weights.

The engine's versions are ``chairlift/models/families/llama.py`` (what the layers are) and ``chairlift/kernels/`` (how
they are computed, in C++ and Triton).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from step_batch import StepBatch

__all__ = ["LlamaModel", "read_safetensors"]

_Floats = npt.NDArray[np.float32]


def read_safetensors(path: Path) -> dict[str, _Floats]:
    """All tensors of a file, in float32.

    The format: 8 bytes with the length of the header, the header in JSON (name -> dtype, shape, place), then the bytes
    of the tensors. A bfloat16 is the upper half of a float32, and numpy has no such type.
    """
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors: dict[str, _Floats] = {}
    for name, entry in json.loads(data[8:begin]).items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        raw = data[begin + first : begin + end]
        if entry["dtype"] == "BF16":
            flat = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] in ("F16", "F32"):
            flat = np.frombuffer(raw, {"F16": "<f2", "F32": "<f4"}[entry["dtype"]]).astype(np.float32)
        else:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}; this reader knows BF16, F16 and F32")
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


class LlamaModel:
    """A model of Hugging Face's ``llama`` type from a directory, and its KV cache of ``num_blocks`` blocks."""

    def __init__(self, model_dir: Path, num_blocks: int, block_size: int) -> None:
        config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        plain = rope.get("rope_type", "default") == "default" and not config.get("attention_bias")
        if config["model_type"] != "llama" or not plain or config.get("mlp_bias"):
            raise ValueError(f"{model_dir} is not a plain Llama (no scaled rotation, no biases); try the engine itself")
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self.eps: float = config["rms_norm_eps"]
        self.max_model_len: int = config["max_position_embeddings"]
        self.weights: dict[str, _Floats] = {}
        for path in sorted(model_dir.glob("*.safetensors")):
            self.weights |= read_safetensors(path)
        if config.get("tie_word_embeddings"):
            self.weights["lm_head.weight"] = self.weights["model.embed_tokens.weight"]
        theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / self.head_dim
        self.inverse_frequencies = (1.0 / theta**exponents).astype(np.float32)
        self.block_size = block_size
        # A position of the cache is block * block_size + offset, so that a block is a run of block_size rows.
        shape = (self.num_layers, num_blocks * block_size, self.num_kv_heads, self.head_dim)
        self.keys = np.zeros(shape, dtype=np.float32)
        self.values = np.zeros(shape, dtype=np.float32)

    def forward(self, batch: StepBatch) -> _Floats:
        """Compute a step: write the KV of its T tokens, and return their hidden states [T, hidden_size]."""
        weights = self.weights
        hidden = weights["model.embed_tokens.weight"][batch.token_ids]
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}."
            x = self._norm(hidden, name + "input_layernorm.weight")
            q = self._heads(x @ weights[name + "self_attn.q_proj.weight"].T)
            k = self._heads(x @ weights[name + "self_attn.k_proj.weight"].T)
            v = self._heads(x @ weights[name + "self_attn.v_proj.weight"].T)
            self.keys[layer][batch.slot_mapping] = self._rotate(k, batch)
            self.values[layer][batch.slot_mapping] = v
            attended = self._attend(layer, self._rotate(q, batch), batch)
            hidden = hidden + attended @ weights[name + "self_attn.o_proj.weight"].T
            x = self._norm(hidden, name + "post_attention_layernorm.weight")
            gate = x @ weights[name + "mlp.gate_proj.weight"].T
            up = x @ weights[name + "mlp.up_proj.weight"].T
            hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ weights[name + "mlp.down_proj.weight"].T
        return hidden

    def compute_logits(self, hidden: _Floats, batch: StepBatch) -> _Floats:
        """Scores of all tokens of the vocabulary as the next one: [P, vocab_size]. Only sample positions need them."""
        last = self._norm(hidden[batch.sample_tokens], "model.norm.weight")
        return last @ self.weights["lm_head.weight"].T

    def _attend(self, layer: int, q: _Floats, batch: StepBatch) -> _Floats:
        """Paged attention. Each row reads the KV of its own sequence, through its block table.

        ``q`` is [T, num_heads, head_dim]; returns [T, num_heads * head_dim].
        """
        out = np.empty((len(q), self.num_heads * self.head_dim), dtype=np.float32)
        offsets = np.arange(self.block_size)
        for row, length in enumerate(batch.seq_lens):
            first, end = batch.cu_seqlens[row], batch.cu_seqlens[row + 1]
            num_blocks = -(-length // self.block_size)
            places = (batch.block_tables[row, :num_blocks, None] * self.block_size + offsets).reshape(-1)[:length]
            k = self._for_each_head(self.keys[layer][places])
            v = self._for_each_head(self.values[layer][places])
            scores = np.einsum("thd,lhd->htl", q[first:end], k) / np.float32(math.sqrt(self.head_dim))
            future = np.arange(length) > batch.positions[first:end, None]
            scores = np.where(future, np.float32(-np.inf), scores)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            probabilities = scores / scores.sum(axis=-1, keepdims=True)
            out[first:end] = np.einsum("htl,lhd->thd", probabilities, v).reshape(end - first, -1)
        return out

    def _for_each_head(self, kv: _Floats) -> _Floats:
        """Repeat the KV heads: several query heads share one (grouped-query attention)."""
        return np.repeat(kv, self.num_heads // self.num_kv_heads, axis=1)

    def _heads(self, x: _Floats) -> _Floats:
        return x.reshape(len(x), -1, self.head_dim)

    def _norm(self, x: _Floats, name: str) -> _Floats:
        """RMSNorm: scale each vector to the length that its weights give it."""
        length: _Floats = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.eps))
        return x / length * self.weights[name]

    def _rotate(self, x: _Floats, batch: StepBatch) -> _Floats:
        """Rotary position embedding: turn the pairs (i, i + head_dim / 2) by angles that grow with the position."""
        angles = batch.positions.astype(np.float32)[:, None] * self.inverse_frequencies
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        left, right = np.split(x, 2, axis=-1)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
