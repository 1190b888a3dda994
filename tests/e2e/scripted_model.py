"""A model directory whose model generates a given text: a real Llama whose output depends only on the last token.

Attention and MLP are zero, the embedding is the identity, and the head maps each token to its successor. It replaces a
trained model when a test needs a meaningful output, such as JSON.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

__all__ = ["write_scripted_model"]

_SPECIAL = ("<|first|>", "<|again|>", "<|end|>", "<|turn|>")
_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }} {{ message.content }}{% endfor %}"
    "{{ '<|again|>' if messages | selectattr('role', 'equalto', 'assistant') | list else '<|first|>' }}"
)
_HEAD_DIM, _NUM_KV_HEADS = 32, 2


def write_scripted_model(folder: Path, first: Sequence[str], again: Sequence[str], template: str | None = None) -> Path:
    """Write a model that generates ``first`` in the first turn of a conversation, and ``again`` in later turns.

    Both are lists of pieces, one token each. No piece may occur twice. ``template`` is the chat template; None: one
    without tools. It ends with the special token that the model continues, ``<|first|>`` or ``<|again|>``.
    """
    pieces = [*first, *again]
    if len(set(pieces)) < len(pieces):
        raise ValueError("a piece comes twice; the model could not know which follows it")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIAL))
    backend.add_tokens(pieces)
    chains = [["<|first|>", *first, "<|end|>"], ["<|again|>", *again, "<|end|>"]]
    ids = [[backend.token_to_id(token) for token in chain] for chain in chains]
    follows = {token: following for chain in ids for token, following in itertools.pairwise(chain)}

    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": _TEMPLATE if template is None else template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    _write_weights(folder, backend.get_vocab_size(), follows, backend.token_to_id("<|end|>"))
    return folder


def _write_weights(folder: Path, vocab_size: int, follows: dict[int, int], end: int) -> None:
    size = -(-vocab_size // (2 * _HEAD_DIM)) * 2 * _HEAD_DIM
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": size,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": size // _HEAD_DIM,
        "num_key_value_heads": _NUM_KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "eos_token_id": end,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    head = torch.zeros(vocab_size, size)
    for token, following in follows.items():
        head[following, token] = 1.0
    layer, kv = "model.layers.0", _NUM_KV_HEADS * _HEAD_DIM
    weights = {
        "model.embed_tokens.weight": torch.eye(vocab_size, size),
        f"{layer}.input_layernorm.weight": torch.ones(size),
        f"{layer}.self_attn.q_proj.weight": torch.zeros(size, size),
        f"{layer}.self_attn.k_proj.weight": torch.zeros(kv, size),
        f"{layer}.self_attn.v_proj.weight": torch.zeros(kv, size),
        f"{layer}.self_attn.o_proj.weight": torch.zeros(size, size),
        f"{layer}.post_attention_layernorm.weight": torch.ones(size),
        f"{layer}.mlp.gate_proj.weight": torch.zeros(64, size),
        f"{layer}.mlp.up_proj.weight": torch.zeros(64, size),
        f"{layer}.mlp.down_proj.weight": torch.zeros(size, 64),
        "model.norm.weight": torch.ones(size),
        "lm_head.weight": head,
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
