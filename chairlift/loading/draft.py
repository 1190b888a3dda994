"""Loads the small model, the layer or the heads that make drafts, and checks that they fit the served model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from chairlift.config import BUNDLED_MODEL, EngineConfig
from chairlift.errors import ConfigError, InvariantError
from chairlift.executor.backends.backend import Backend
from chairlift.executor.backends.native.native_runner import NativeModelRunner
from chairlift.executor.drafters.draft_model import DraftModel
from chairlift.executor.drafters.eagle3 import Eagle3Drafter
from chairlift.executor.drafters.medusa import MedusaHead, MedusaHeads, load_medusa
from chairlift.executor.local import Drafter, ModelRunner
from chairlift.models.causal_lm import CausalLM
from chairlift.models.context import LayerCache, LayerState
from chairlift.models.eagle3 import Eagle3, load_eagle3
from chairlift.models.fallback.config import TransformersConfig
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.loader import Progress, load_model, resolve_model_dir
from chairlift.models.model_files import read_network

__all__ = ["LoadedDraftModel", "load_draft_model"]

_SETTING = "speculative_config: the draft model"


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """The loaded source of drafts: a small model, a layer (EAGLE-3), or heads (Medusa)."""

    model: CausalLM | Eagle3 | None
    """The small model or the layer that makes drafts; None if heads make them."""
    most: int
    """Maximum number of drafts for a row in one step."""
    max_positions: int = 0
    """Maximum sequence length of the small model, in tokens."""
    heads: Sequence[MedusaHead] = ()

    @property
    def kv_cache_spec(self) -> list[LayerCache | LayerState]:
        """Cache layers of the small model or the layer; they are added to the cache of the served model."""
        return [] if self.model is None else self.model.kv_cache_spec()

    def drafter(self, runner: ModelRunner, **sizes: Any) -> Drafter:
        """The drafter that works with the runner of the served model. ``sizes`` are the size arguments of
        :class:`DraftModel`."""
        if not isinstance(runner, NativeModelRunner):
            raise InvariantError(f"{type(runner).__name__} runs no draft model")
        if isinstance(self.model, Eagle3):
            return Eagle3Drafter(self.model, runner, most=self.most, **sizes)
        if runner.draft is None:
            return MedusaHeads(self.heads[: self.most], runner, sizes["num_slots"])
        return DraftModel(runner.draft, most=self.most, max_positions=self.max_positions, **sizes)


def load_draft_model(
    config: EngineConfig,
    model_dir: Path,
    network: NetworkConfig | TransformersConfig,
    dtype: torch.dtype,
    backend: Backend,
    progress: Progress | None = None,
) -> LoadedDraftModel | None:
    """Load what ``speculative_config`` names: a small model, a layer or heads. None if it names none, or if steps take
    no drafts.

    ``model_dir``, ``network``, ``dtype`` and ``backend`` are those of the served model. Raises ConfigError for a model
    that cannot draft for the served model, and ModelLoadError for files that cannot be read.
    """
    speculation = config.scheduler.speculation
    if speculation is None or speculation.method == "ngram" or not config.scheduler.takes_drafts(0):
        return None
    if not backend.abilities.draft_models:
        raise ConfigError(
            f"speculative_config: {speculation.method} runs on the native CPU kernels, and {backend.kernels} runs this"
            " model; use method ngram"
        )
    name = speculation.model
    small_dir = resolve_model_dir(name) if name else _heads_of(config.model.model, model_dir, speculation.method)
    most = speculation.num_speculative_tokens
    if speculation.method in ("medusa", "eagle3"):
        if not isinstance(network, NetworkConfig):
            raise ConfigError(
                f"speculative_config: {speculation.method} needs a model with a native family; use method ngram"
            )
        if speculation.method == "medusa":
            heads = load_medusa(small_dir, network.vocab_size, network.hidden_size, dtype)
            return LoadedDraftModel(None, most, heads=heads)
        layer = load_eagle3(small_dir, network, dtype)
        if reason := backend.why_not(layer.config.layer, dtype, torch.device("cpu"), config.cache.block_size):
            raise ConfigError(f"{_SETTING} {name!r:.200} cannot be run by the native kernels: {reason}")
        return LoadedDraftModel(layer, most)
    small = read_network(small_dir, "native")
    if not isinstance(small, NetworkConfig):
        raise ConfigError(f"{_SETTING} {speculation.model!r:.200} has no native family; use another")
    if small.vocab_size != network.vocab_size:
        raise ConfigError(
            f"{_SETTING} {speculation.model!r:.200} has {small.vocab_size} tokens, and the model {network.vocab_size};"
            " use a small model of the same series"
        )
    _check_tokenizers(model_dir, small_dir, speculation.model)
    if reason := backend.why_not(small, dtype, torch.device("cpu"), config.cache.block_size):
        raise ConfigError(f"{_SETTING} {speculation.model!r:.200} cannot be run by the native kernels: {reason}")
    length = min(config.model.max_model_len or small.max_model_len, small.max_model_len)
    small = small.for_length(length)
    model = load_model(small_dir, small, dtype, "cpu", progress, weight_format=backend.weight_format(None))
    if any(isinstance(layer, LayerState) for layer in model.kv_cache_spec()):
        raise ConfigError(
            f"{_SETTING} {speculation.model!r:.200} has recurrent states, which cannot go back; use another"
        )
    return LoadedDraftModel(model, most, length)


def _heads_of(model: str, model_dir: Path, method: str) -> Path:
    """Directory of the Medusa heads or the EAGLE-3 layer that comes with ``model``, for settings that name none. Raises
    ConfigError for a model without them."""
    if model == BUNDLED_MODEL and (model_dir / method).is_dir():
        return model_dir / method
    what = "heads" if method == "medusa" else "layer"
    raise ConfigError(
        f"speculative_config: {method} needs model, the directory or name of the {what}; only the bundled model comes"
        " with heads and a layer (docs/speculation.md says how to train them)"
    )


def _check_tokenizers(model_dir: Path, small_dir: Path, name: str) -> None:
    """Raise ConfigError if both directories have a tokenizer, and the two give different ids to a token. Drafts with
    wrong ids would almost never be accepted."""
    files = [directory / "tokenizer.json" for directory in (model_dir, small_dir)]
    if not all(file.exists() for file in files):
        return
    texts = [file.read_bytes() for file in files]
    if texts[0] == texts[1]:
        return
    own, other = (Tokenizer.from_str(text.decode()).get_vocab(with_added_tokens=True) for text in texts)
    different = sorted(token for token in own.keys() & other.keys() if own[token] != other[token])
    if different or not own.keys() & other.keys():
        found = f"{different[0]!r:.40} is another id there" if different else "no token is in both"
        raise ConfigError(f"{_SETTING} {name!r:.200} has another tokenizer ({found}); use a model of the same series")
