"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases on q, k and v."""

from __future__ import annotations

from typing import ClassVar

from chairlift.models.causal_lm import CausalLM

__all__ = ["Qwen2ForCausalLM"]


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases on q, k and v."""

    model_type: ClassVar[str] = "qwen2"
