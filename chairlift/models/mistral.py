"""Mistral 7B (Jiang et al., 2023): Llama with a sliding window in every layer, or none."""

from __future__ import annotations

from typing import ClassVar

from chairlift.models.causal_lm import CausalLM

__all__ = ["MistralForCausalLM"]


class MistralForCausalLM(CausalLM):
    """Mistral 7B (Jiang et al., 2023): Llama with a sliding window in every layer, or none."""

    model_type: ClassVar[str] = "mistral"
