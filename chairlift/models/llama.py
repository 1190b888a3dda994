"""Llama 1 to 3.2 and what shares their architecture (Touvron et al., 2023)."""

from __future__ import annotations

from typing import ClassVar

from chairlift.models.causal_lm import CausalLM

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(CausalLM):
    """Llama 1 to 3.2 and what shares their architecture (Touvron et al., 2023)."""

    model_type: ClassVar[str] = "llama"
