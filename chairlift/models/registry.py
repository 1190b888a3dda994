"""Which class implements which Hugging Face ``model_type``."""

from __future__ import annotations

from chairlift.errors import ModelLoadError
from chairlift.models.causal_lm import CausalLM
from chairlift.models.llama import LlamaForCausalLM
from chairlift.models.mistral import MistralForCausalLM
from chairlift.models.qwen2 import Qwen2ForCausalLM
from chairlift.models.qwen3 import Qwen3ForCausalLM

__all__ = ["MODEL_CLASSES", "model_class"]

MODEL_CLASSES: dict[str, type[CausalLM]] = {
    cls.model_type: cls for cls in (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
}


def model_class(model_type: str) -> type[CausalLM]:
    """The class for a ``model_type``; :class:`~chairlift.errors.ModelLoadError` lists what there is."""
    try:
        return MODEL_CLASSES[model_type]
    except KeyError:
        supported = ", ".join(sorted(MODEL_CLASSES))
        raise ModelLoadError(f"model_type {model_type[:80]!r} is not supported; supported: {supported}") from None
