"""Makes the draft heads that the settings of a run ask for, and checks that the model can have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chairlift.errors import ConfigError
from chairlift.models.causal_lm import CausalLM
from chairlift.models.hf_config import NetworkConfig
from chairlift_train.config import HeadsSettings
from chairlift_train.heads.eagle3 import Eagle3Network, check_taps, default_taps, saved_target_ids
from chairlift_train.heads.medusa import MedusaNetwork
from chairlift_train.heads.training import HeadsNetwork
from chairlift_train.heads.vocabulary import frequent_tokens

__all__ = ["check_heads", "make_heads"]


def check_heads(settings: HeadsSettings, network: Any) -> None:
    """Raise ConfigError if heads of these settings cannot be trained for a model with the config ``network``."""
    if not isinstance(network, NetworkConfig):
        raise ConfigError(f"heads are for native models (docs/models.md), and {network.model_type} is of transformers")
    if network.recurrent:
        raise ConfigError("heads are not trained for a model with recurrent states, which a wrong draft would change")
    if settings.method == "medusa":
        return
    check_taps(settings.taps or default_taps(network.num_hidden_layers), network.num_hidden_layers)
    if network.embedding_width is not None:
        raise ConfigError(
            f"eagle3 needs embeddings as wide as the hidden states ({network.hidden_size}), and this model's have"
            f" {network.embedding_width}; use method medusa"
        )
    if (settings.draft_vocab_size or 0) > network.vocab_size:
        raise ConfigError(
            f"heads.draft_vocab_size must be at most the model's {network.vocab_size} tokens, got"
            f" {settings.draft_vocab_size}"
        )


def make_heads(
    model: CausalLM,
    settings: HeadsSettings,
    *,
    base: str = "",
    resume_from: Path | None = None,
    examples: Iterable[Mapping[str, Any]] = (),
) -> HeadsNetwork:
    """Make new heads for a model. New weights come from torch's global generator.

    Args:
        model: The model, in float32. It is frozen.
        settings: Settings that :func:`check_heads` has accepted.
        base: Name of the model, which is written with the heads.
        resume_from: Checkpoint from which the run is resumed. A reduced vocabulary is read from it.
        examples: Training examples, which are counted for a new reduced vocabulary.
    """
    if settings.method == "medusa":
        sizes = {name: getattr(settings, name) for name in ("num_heads", "num_layers", "own_output_heads")}
        return MedusaNetwork(model, **sizes, base=base)
    target_ids = None
    if settings.draft_vocab_size is not None:
        target_ids = None if resume_from is None else saved_target_ids(resume_from)
        if target_ids is None or len(target_ids) != settings.draft_vocab_size:
            target_ids = frequent_tokens(examples, model.config.vocab_size, settings.draft_vocab_size)
    return Eagle3Network(
        model,
        num_steps=settings.num_steps,
        taps=settings.taps or default_taps(model.config.num_hidden_layers),
        intermediate_size=settings.intermediate_size,
        own_output_head=settings.has_own_output,
        target_ids=target_ids,
        distribution=settings.targets == "distribution",
        base=base,
    )
