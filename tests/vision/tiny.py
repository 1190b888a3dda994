"""A tiny random SmolVLM with its files, images, and transformers' answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from chairlift.tokenizer.byte_level import byte_tokenizer
from chairlift.tokenizer.tokenizer import Tokenizer

__all__ = ["ROWS", "SIZE", "TEMPLATE", "Reference", "picture", "tiny_vlm"]

SIZE, ROWS = 32, 4
"""Pixels of a side of a tile, and prompt positions of a tile."""
_GRID = 3
_SPECIAL = (
    *("<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, _GRID + 1) for column in range(1, _GRID + 1)),
)
_VOCAB = 256 + len(_SPECIAL)
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] =="
    " 'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text'"
    " %}{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_PREPROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor",
    "do_image_splitting": True,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.6, 0.4],
    "max_image_size": {"longest_edge": SIZE},
    "resample": 1,
    "size": {"longest_edge": 2 * SIZE},
}


def tiny_tokenizer() -> Tokenizer:
    return byte_tokenizer(_SPECIAL, eos="<end_of_utterance>", chat_template=TEMPLATE)


VISION_FAMILIES = ("idefics3", "smolvlm")
"""Families that :func:`tiny_vlm` makes."""


def tiny_vlm(folder: Path, family: str = "smolvlm", **preprocessor: Any) -> Path:
    """Write a random model of the family with a tokenizer of bytes. ``preprocessor`` are fields of its settings."""
    marker = 256 + _SPECIAL.index("<image>")
    text = {
        "model_type": "llama",
        "vocab_size": _VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "pad_token_id": None,
        "eos_token_id": 257,
    }
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": SIZE,
        "patch_size": 8,
    }
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=vision, image_token_id=marker, scale_factor=2, pad_token_id=0
    )
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * values if "norm" in name and name.endswith("weight") else 0.25 * values)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**_PREPROCESSOR, **preprocessor}))
    tokenizer = tiny_tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end_of_utterance>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


def picture(seed: int, width: int = 40, height: int = 24) -> Image.Image:
    """An image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


class Reference:
    """transformers' own processing and model for a directory."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.images = SmolVLMImageProcessorPil.from_pretrained(folder)
        self.tokenizer = tiny_tokenizer()

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        """Token ids of a text with ``<image>`` in it, and pixels."""
        if not images:
            return {"input_ids": torch.tensor([self.tokenizer.encode(text, False)])}
        batch = self.images([images], return_row_col_info=True, return_tensors="pt")
        head, *rest = text.split("<image>")
        for rows, columns, part in zip(batch["rows"][0], batch["cols"][0], rest, strict=True):
            marks = "<fake_token_around_image>", "<image>", "<global-img>"
            head += get_image_prompt_string(rows, columns, ROWS, *marks) + part
        return {
            "input_ids": torch.tensor([self.tokenizer.encode(head, False)]),
            "pixel_values": batch["pixel_values"],
            "pixel_attention_mask": batch["pixel_attention_mask"],
        }

    def answer(self, text: str, images: list[Image.Image], count: int) -> tuple[list[int], list[int], list[float]]:
        """Prompt, greedy tokens, and their log-probabilities."""
        given = self.inputs(text, images)
        prompt, tokens, logprobs = given["input_ids"][0].tolist(), list[int](), list[float]()
        for _ in range(count):
            with torch.no_grad():
                known = {**given, "input_ids": torch.tensor([[*prompt, *tokens]])}
                last = self.model(**known, use_cache=False).logits[0, -1].log_softmax(-1)
            tokens.append(int(last.argmax()))
            logprobs.append(float(last.max()))
        return prompt, tokens, logprobs
