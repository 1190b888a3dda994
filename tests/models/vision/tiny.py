"""A tiny random SmolVLM with its files, random images, and transformers' outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from chairlift.text.tokenizer.byte_level import byte_tokenizer
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = [
    "GEMMA_ROWS",
    "GEMMA_SIZE",
    "LLAVA_ROWS",
    "LLAVA_SIZE",
    "ROWS",
    "SIZE",
    "SQUARE",
    "TEMPLATE",
    "GemmaReference",
    "InternReference",
    "LlavaReference",
    "MistralReference",
    "QwenReference",
    "Reference",
    "picture",
    "tiny_gemma",
    "tiny_intern",
    "tiny_llava",
    "tiny_mistral",
    "tiny_qwen",
    "tiny_vlm",
]

SIZE, ROWS = 32, 4
"""SIZE: side of a tile in pixels. ROWS: number of prompt positions of a tile."""
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


SQUARE = 8
"""Side in pixels of a square of patches, which the encoder turns into one row in Qwen's models."""
_QWEN_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_QWEN_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['content'] is string %}"
    "{{message['content']}}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{'<|vision_start|><|image_pad|><|vision_end|>'}}{% else %}{{part['text']}}{% endif %}{% endfor %}{% endif %}"
    "{{'<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
_QWEN_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.6, 0.4],
    "patch_size": SQUARE // 2,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 2 * SQUARE**2, "longest_edge": 40 * SQUARE**2},
}


_QWEN_NETS = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
}
_QWEN_EXPERTS = {
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 72,
}
_QWEN_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {"window_size": 2 * SQUARE, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5": {"num_position_embeddings": 36},
}
"""Family -> fields of the config of its tiny image encoder."""


def tiny_tokenizer() -> Tokenizer:
    return byte_tokenizer(_SPECIAL, eos="<end_of_utterance>", chat_template=TEMPLATE)


def qwen_tokenizer() -> Tokenizer:
    return byte_tokenizer(_QWEN_SPECIAL, eos="<|im_end|>", chat_template=_QWEN_TEMPLATE)


VISION_FAMILIES = (
    *("idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("llava", "gemma3", "mistral3", "internvl"),
)
"""Families that the functions of this module can create."""


def tiny_vlm(folder: Path, family: str = "smolvlm", **preprocessor: Any) -> Path:
    """Write a random model of the family with a byte tokenizer. ``preprocessor`` are fields of its preprocessor
    settings."""
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
    _write(folder, config, {**_PREPROCESSOR, **preprocessor}, tiny_tokenizer(), TEMPLATE)
    return folder


def tiny_qwen(folder: Path, family: str = "qwen3_vl", **preprocessor: Any) -> Path:
    """Write a random model of one of Qwen's families with a byte tokenizer; see :func:`tiny_vlm`."""
    nets = family.startswith("qwen3_5")
    sections = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25} if nets else {"mrope_section": [2, 3, 3]}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **sections}
    text = {
        "vocab_size": 256 + len(_QWEN_SPECIAL),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 257,
        **({"head_dim": 16} if family.startswith("qwen3_vl") else _QWEN_NETS if nets else {}),
        **(_QWEN_EXPERTS if family.endswith("_moe") else {}),
    }
    vision: dict[str, Any] = {
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 3,
        "patch_size": SQUARE // 2,
        "out_hidden_size": 64,
        **_QWEN_VISION[family.removesuffix("_moe")],
    }
    marker = 256 + _QWEN_SPECIAL.index("<|image_pad|>")
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, image_token_id=marker)
    _write(folder, config, {**_QWEN_PREPROCESSOR, **preprocessor}, qwen_tokenizer(), _QWEN_TEMPLATE)
    return folder


LLAVA_SIZE, LLAVA_ROWS = 24, 9
"""LLAVA_SIZE: side in pixels of an image of the tiny LLaVA. LLAVA_ROWS: number of patches in such an image."""
_LLAVA_SPECIAL = ("<s>", "</s>", "<image>")
_LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper + ': ' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>'"
    " }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_LLAVA_PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "do_center_crop": True,
    "crop_size": {"height": LLAVA_SIZE, "width": LLAVA_SIZE},
    "size": {"shortest_edge": LLAVA_SIZE},
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.6, 0.4],
    "resample": 3,
}


def llava_tokenizer() -> Tokenizer:
    return byte_tokenizer(_LLAVA_SPECIAL, eos="</s>", chat_template=_LLAVA_TEMPLATE)


def tiny_llava(folder: Path, preprocessor: dict[str, Any] | None = None, **more: Any) -> Path:
    """Write a random LLaVA with a byte tokenizer; ``more`` are fields of its ``config.json``. See :func:`tiny_vlm`."""
    text = {
        "model_type": "llama",
        "vocab_size": 256 + len(_LLAVA_SPECIAL),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "eos_token_id": 257,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": LLAVA_SIZE,
        "patch_size": 8,
    }
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=258, **more)
    _write(folder, config, {**_LLAVA_PREPROCESSOR, **(preprocessor or {})}, llava_tokenizer(), _LLAVA_TEMPLATE)
    return folder


GEMMA_SIZE, GEMMA_ROWS = 24, 9
"""GEMMA_SIZE: side in pixels of an image of the tiny Gemma 3. GEMMA_ROWS: number of prompt positions of such an image.
"""
_GEMMA_SPECIAL = ("<bos>", "<eos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<turn>", "</turn>")
_GEMMA_TEMPLATE = (
    "{% for message in messages %}{{ '<turn>' + message['role'] + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<start_of_image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '</turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
_GEMMA_PREPROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": GEMMA_SIZE, "width": GEMMA_SIZE},
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.6, 0.4],
    "resample": 2,
}


def gemma_tokenizer() -> Tokenizer:
    return byte_tokenizer(_GEMMA_SPECIAL, eos="<eos>", chat_template=_GEMMA_TEMPLATE)


def tiny_gemma(folder: Path, **preprocessor: Any) -> Path:
    """Write a random Gemma 3 with a byte tokenizer; its windows are shorter than an image. See :func:`tiny_vlm`."""
    text = {
        "model_type": "gemma3_text",
        "vocab_size": 256 + len(_GEMMA_SPECIAL),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 512,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "pad_token_id": None,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": GEMMA_SIZE,
        "patch_size": 4,
        "vision_use_head": False,
    }
    ids = {"boi_token_index": 258, "eoi_token_index": 259, "image_token_index": 260, "mm_tokens_per_image": GEMMA_ROWS}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, eos_token_id=257, **ids)
    _write(folder, config, {**_GEMMA_PREPROCESSOR, **preprocessor}, gemma_tokenizer(), _GEMMA_TEMPLATE)
    return folder


_MISTRAL_SPECIAL = ("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
_MISTRAL_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}{{ '[INST]' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '[IMG]' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '[/INST]' }}{% endfor %}"
)
_MISTRAL_PREPROCESSOR = {
    "image_processor_type": "PixtralImageProcessor",
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.6, 0.4],
    "patch_size": {"height": SQUARE, "width": SQUARE},
    "resample": 3,
    "size": {"longest_edge": 7 * SQUARE},
}


def mistral_tokenizer() -> Tokenizer:
    return byte_tokenizer(_MISTRAL_SPECIAL, eos="</s>", chat_template=_MISTRAL_TEMPLATE)


def tiny_mistral(
    folder: Path,
    text_type: str = "mistral",
    preprocessor: dict[str, Any] | None = None,
    *,
    layers: int = 2,
    **more: Any,
) -> Path:
    """Write a random Mistral 3 with a byte tokenizer. ``layers`` is the number of layers of its encoder, and ``more``
    are fields of its ``config.json``. See :func:`tiny_vlm`."""
    text = {
        "model_type": text_type,
        "vocab_size": 256 + len(_MISTRAL_SPECIAL),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "sliding_window": None,
        "pad_token_id": None,
        "eos_token_id": 257,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": layers,
        "num_attention_heads": 3,
        "image_size": 7 * SQUARE,
        "patch_size": SQUARE // 2,
        "hidden_act": "silu",
    }
    marker = 256 + _MISTRAL_SPECIAL.index("[IMG]")
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=vision, image_token_index=marker, **more)
    _write(folder, config, {**_MISTRAL_PREPROCESSOR, **(preprocessor or {})}, mistral_tokenizer(), _MISTRAL_TEMPLATE)
    return folder


_INTERN_SPECIAL = ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>")
_INTERN_TEMPLATE = _QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n")
_INTERN_PREPROCESSOR = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "crop_to_patches": False,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.6, 0.4],
    "max_patches": 4,
    "min_patches": 1,
    "resample": 3,
    "size": {"height": LLAVA_SIZE, "width": LLAVA_SIZE},
}
INTERN_ROWS = 9
"""Number of prompt positions of a tile of the tiny InternVL."""


def intern_tokenizer() -> Tokenizer:
    return byte_tokenizer(_INTERN_SPECIAL, eos="<|im_end|>", chat_template=_INTERN_TEMPLATE)


def tiny_intern(folder: Path, text_type: str = "qwen2", vision: dict[str, Any] | None = None, **more: Any) -> Path:
    """Write a random InternVL with a byte tokenizer. ``vision`` are fields of its encoder's config, and ``more`` of the
    whole config. See :func:`tiny_vlm`."""
    text = {
        "model_type": text_type,
        "vocab_size": 256 + len(_INTERN_SPECIAL),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 257,
    }
    usual = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": [LLAVA_SIZE] * 2,
        "patch_size": [4, 4],
        "attention_bias": True,
        **(vision or {}),
    }
    marker = 256 + _INTERN_SPECIAL.index("<IMG_CONTEXT>")
    known = {"image_token_id": marker, "image_seq_length": INTERN_ROWS, "tie_word_embeddings": False}
    config = AutoConfig.for_model("internvl", text_config=text, vision_config=usual, **{**known, **more})
    _write(folder, config, _INTERN_PREPROCESSOR, intern_tokenizer(), _INTERN_TEMPLATE)
    return folder


def _write(folder: Path, config: Any, preprocessor: dict[str, Any], tokenizer: Tokenizer, template: str) -> None:
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * values if "norm" in name and name.endswith("weight") else 0.25 * values)
        # transformers would take a placeholder in an answer for an image. A logit of 0 keeps it out of greedy answers.
        model.get_output_embeddings().weight[config.image_token_id] = 0
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.decode([257])}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))


def picture(seed: int, width: int = 40, height: int = 24) -> Image.Image:
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


class Reference:
    """transformers' own processor and model, loaded from a model directory."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.images = SmolVLMImageProcessorPil.from_pretrained(folder)
        self.tokenizer = tiny_tokenizer()

    def text_of(self, *parts: str | Image.Image) -> str:
        """Text of a question that consists of ``parts``, rendered by the chat template."""
        head = ":" if not isinstance(parts[0], str) else ": "
        inner = "".join(each if isinstance(each, str) else "<image>" for each in parts)
        return f"<|im_start|>User{head}{inner}<end_of_utterance>\nAssistant:"

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        """Token ids of a text that contains ``<image>``, and the pixels of the images."""
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

    def known(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the model for ``inputs`` after generated token ids were appended to them."""
        return inputs

    def answer(self, text: str, images: list[Image.Image], count: int) -> tuple[list[int], list[int], list[float]]:
        """(prompt token ids, greedy output tokens, their log-probabilities)."""
        given = self.inputs(text, images)
        prompt, tokens, logprobs = given["input_ids"][0].tolist(), list[int](), list[float]()
        for _ in range(count):
            with torch.no_grad():
                known = self.known({**given, "input_ids": torch.tensor([[*prompt, *tokens]])})
                last = self.model(**known, use_cache=False).logits[0, -1].log_softmax(-1)
            tokens.append(int(last.argmax()))
            logprobs.append(float(last.max()))
        return prompt, tokens, logprobs


class QwenReference(Reference):
    """transformers' processing and model for Qwen2.5-VL and Qwen3-VL."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.tokenizer = qwen_tokenizer()

    def text_of(self, *parts: str | Image.Image) -> str:
        marker = "<|vision_start|><|image_pad|><|vision_end|>"
        inner = "".join(each if isinstance(each, str) else marker for each in parts)
        return f"<|im_start|>user\n{inner}<|im_end|>\n<|im_start|>assistant\n"

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        """Token ids of a text that contains ``<|image_pad|>``, and the pixels of the images."""
        if not images:
            return {"input_ids": torch.tensor([self.tokenizer.encode(text, False)])}
        batch = self.images(images, return_tensors="pt")
        head, *rest = text.split("<|image_pad|>")
        for (_, rows, columns), part in zip(batch["image_grid_thw"].tolist(), rest, strict=True):
            head += "<|image_pad|>" * (rows * columns // 4) + part
        return {"input_ids": torch.tensor([self.tokenizer.encode(head, False)]), **batch}

    def known(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if "pixel_values" not in inputs:
            return inputs
        types = (inputs["input_ids"] == self.model.config.image_token_id).int()
        return {**inputs, "mm_token_type_ids": types}


class LlavaReference(Reference):
    """transformers' processing and model for LLaVA."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.images = CLIPImageProcessorPil.from_pretrained(folder)
        self.tokenizer = llava_tokenizer()

    def text_of(self, *parts: str | Image.Image) -> str:
        inner = "".join(each if isinstance(each, str) else "<image>" for each in parts)
        return f"USER: {inner} ASSISTANT:"

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        """Token ids of a text that contains ``<image>``, and the pixels of the images."""
        rows = LLAVA_ROWS + (self.model.config.vision_feature_select_strategy == "full")
        ids = torch.tensor([self.tokenizer.encode(text.replace("<image>", "<image>" * rows), False)])
        return {"input_ids": ids, **(self.images(images, return_tensors="pt") if images else {})}


class GemmaReference(Reference):
    """transformers' processing and model for Gemma 3."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.images = Gemma3ImageProcessorPil.from_pretrained(folder)
        self.tokenizer = gemma_tokenizer()

    def text_of(self, *parts: str | Image.Image) -> str:
        inner = "".join(each if isinstance(each, str) else "<start_of_image>" for each in parts)
        return f"<turn>user\n{inner}</turn>\n<turn>model\n"

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        """Token ids of a text that contains ``<start_of_image>``, and the pixels of the images."""
        framed = f"\n\n<start_of_image>{'<image_soft_token>' * GEMMA_ROWS}<end_of_image>\n\n"
        ids = torch.tensor([self.tokenizer.encode(text.replace("<start_of_image>", framed), False)])
        if not images:
            return {"input_ids": ids}
        return {"input_ids": ids, "pixel_values": self.images(images, return_tensors="pt")["pixel_values"]}

    def known(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "token_type_ids": (inputs["input_ids"] == self.model.config.image_token_id).int()}


class MistralReference(Reference):
    """transformers' processing and model for Mistral 3."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.images = PixtralImageProcessorPil.from_pretrained(folder)
        self.tokenizer = mistral_tokenizer()

    def text_of(self, *parts: str | Image.Image) -> str:
        inner = "".join(each if isinstance(each, str) else "[IMG]" for each in parts)
        return f"<s>[INST]{inner}[/INST]"

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        """Token ids of a text that contains ``[IMG]``, and the pixels of the images."""
        if not images:
            return {"input_ids": torch.tensor([self.tokenizer.encode(text, False)])}
        batch = self.images(images, return_tensors="pt")
        head, *rest = text.split("[IMG]")
        for (height, width), part in zip(batch["image_sizes"].tolist(), rest, strict=True):
            lines = ["[IMG]" * (width // SQUARE)] * (height // SQUARE)
            head += "[IMG_BREAK]".join(lines) + "[IMG_END]" + part
        return {"input_ids": torch.tensor([self.tokenizer.encode(head, False)]), **batch}


class InternReference(Reference):
    """transformers' processing and model for InternVL."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.images = GotOcr2ImageProcessorPil.from_pretrained(folder, crop_to_patches=True)
        self.tokenizer = intern_tokenizer()

    def text_of(self, *parts: str | Image.Image) -> str:
        inner = "".join(each if isinstance(each, str) else "<IMG_CONTEXT>\n" for each in parts)
        return f"<|im_start|>user\n{inner}<|im_end|>\n<|im_start|>assistant\n"

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        """Token ids of a text that contains ``<IMG_CONTEXT>``, and the pixels of the images."""
        if not images:
            return {"input_ids": torch.tensor([self.tokenizer.encode(text, False)])}
        batch = self.images(images, return_tensors="pt")
        head, *rest = text.split("<IMG_CONTEXT>")
        for count, part in zip(batch["num_patches"].tolist(), rest, strict=True):
            head += f"<img>{'<IMG_CONTEXT>' * INTERN_ROWS * count}</img>{part}"
        ids = torch.tensor([self.tokenizer.encode(head, False)])
        return {"input_ids": ids, "pixel_values": batch["pixel_values"]}
