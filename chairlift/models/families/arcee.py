"""Arcee's foundation models (2025): Llama with relu squared in an MLP without a gate (So et al., 2021)."""

from __future__ import annotations

from chairlift.models.families.llama import LLAMA
from chairlift.models.family import Family

__all__ = ["ARCEE"]

ARCEE = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    models="AFM",
    differences="relu squared, no gate",
    read=LLAMA.read,
    defaults={"eos_token_id": 128001, "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    activations={"relu2": "relu2"},
)
