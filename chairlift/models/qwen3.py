"""Qwen3 (2025): Llama with a norm on each head of q and k, and a head size of its own."""

from __future__ import annotations

from typing import ClassVar

from chairlift.models.causal_lm import CausalLM

__all__ = ["Qwen3ForCausalLM"]


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 (2025): Llama with a norm on each head of q and k, and a head size of its own."""

    model_type: ClassVar[str] = "qwen3"
