"""Checkpoints that many people use. ``tools/model_table.py`` makes a table of them in ``docs/models.md``.

The lists were chosen in November 2026 from public knowledge of downloads and talk. They are not a ranking.
"""

from __future__ import annotations

from chairlift.models.fallback.families import ALIASES, ALLOWED, INSIDE, REASONS, REFUSED
from chairlift.models.pooling import ENCODERS
from chairlift.models.registry import FAMILIES

__all__ = ["POPULAR_EMBEDDERS", "POPULAR_EYES", "POPULAR_TEXTS", "runs", "sees"]

POPULAR_TEXTS: dict[str, tuple[str, ...]] = {
    "bailing_moe": ("Ling-mini-2.0",),
    "bloom": ("bloom-560m",),
    "cohere": ("aya-expanse-8b",),
    "deepseek_v3": ("DeepSeek-R1",),
    "deepseek_v32": ("DeepSeek-V3.2",),
    "exaone": ("EXAONE-3.5-2.4B-Instruct",),
    "falcon": ("falcon-7b-instruct",),
    "gemma2": ("gemma-2-2b-it",),
    "gemma3": ("gemma-3-4b-it",),
    "gemma3_text": ("gemma-3-1b-it",),
    "gemma3n": ("gemma-3n-E2B-it",),
    "gemma4": ("Gemma 4",),
    "glm4_moe": ("GLM-4.5-Air",),
    "glm_moe_dsa": ("GLM-5",),
    "gpt2": ("gpt2",),
    "gpt_neo": ("gpt-neo-125m",),
    "gpt_neox": ("pythia-160m",),
    "gpt_oss": ("gpt-oss-20b",),
    "granitemoehybrid": ("granite-4.0-h-tiny",),
    "kimi_k2": ("Kimi-K2-Instruct",),
    "lfm2": ("LFM2-1.2B",),
    "lfm2_moe": ("LFM2-8B-A1B",),
    "llama": ("Llama-3.1-8B-Instruct", "Llama-3.2-1B-Instruct", "TinyLlama-1.1B-Chat-v1.0"),
    "llama4": ("Llama-4-Scout-17B-16E-Instruct",),
    "minimax_m2": ("MiniMax-M2",),
    "mistral": ("Mistral-7B-Instruct-v0.3",),
    "mistral3": ("Mistral-Small-3.2-24B-Instruct-2506",),
    "nemotron_h": ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",),
    "opt": ("opt-125m",),
    "phi3": ("phi-4", "Phi-3.5-mini-instruct"),
    "qwen2": ("Qwen2.5-7B-Instruct", "DeepSeek-R1-Distill-Qwen-1.5B"),
    "qwen3": ("Qwen3-0.6B",),
    "qwen3_5": ("Qwen3.5-27B",),
    "qwen3_moe": ("Qwen3-30B-A3B-Instruct-2507",),
    "qwen3_next": ("Qwen3-Next-80B-A3B-Instruct",),
    "smollm3": ("SmolLM3-3B",),
}
"""``model_type`` -> 40 checkpoints that generate text."""
POPULAR_EMBEDDERS: dict[str, tuple[str, ...]] = {
    "bert": ("all-MiniLM-L6-v2", "bge-small-en-v1.5", "mxbai-embed-large-v1"),
    "gemma3_text": ("embeddinggemma-300m",),
    "mpnet": ("all-mpnet-base-v2",),
    "new": ("gte-multilingual-base",),
    "nomic_bert": ("nomic-embed-text-v1.5",),
    "qwen3": ("Qwen3-Embedding-0.6B",),
    "xlm-roberta": ("bge-m3", "multilingual-e5-large"),
}
"""``model_type`` -> 10 checkpoints that compute embeddings."""
POPULAR_EYES: dict[str, tuple[str, ...]] = {
    "gemma3": ("gemma-3-12b-it",),
    "gemma4": ("Gemma 4",),
    "internvl": ("InternVL3-8B-hf",),
    "llava": ("llava-1.5-7b-hf",),
    "mllama": ("Llama-3.2-11B-Vision-Instruct",),
    "qwen2_5_vl": ("Qwen2.5-VL-7B-Instruct",),
    "qwen2_vl": ("Qwen2-VL-7B-Instruct",),
    "qwen3_5": ("Qwen3.5-9B",),
    "qwen3_vl": ("Qwen3-VL-8B-Instruct",),
    "smolvlm": ("SmolVLM2-2.2B-Instruct",),
}
"""``model_type`` -> 10 checkpoints that read images."""
_NOTES = {
    "Llama-4-Scout-17B-16E-Instruct": "through transformers, texts of up to 8,191 tokens",
    "Phi-3.5-mini-instruct": "native; texts of up to 4,096 tokens, or prompts that are longer",
}
"""Checkpoint -> what replaces the usual text."""


def runs(model_type: str, name: str) -> str:
    """How a checkpoint runs: natively, through transformers, or not, with the reason.

    Raises KeyError for a family that is neither served nor refused by name.
    """
    if name in _NOTES:
        return _NOTES[name]
    if model_type in FAMILIES or model_type in ENCODERS:
        return "native"
    if model_type in ALLOWED or model_type in ALIASES:
        return "through transformers"
    return "through transformers, texts only" if model_type in INSIDE else f"no: {REASONS[REFUSED[model_type]]}"


def sees(model_type: str) -> str:
    """How a family reads images: natively, or not, with the reason.

    Raises KeyError for a family that is neither served nor refused by name.
    """
    if model_type in FAMILIES:
        return "native" if FAMILIES[model_type].sees_images else "no: texts only"
    return "no: texts only, through transformers" if model_type in INSIDE else f"no: {REASONS[REFUSED[model_type]]}"
