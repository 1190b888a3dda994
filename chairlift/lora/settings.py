"""Reads an adapter's ``adapter_config.json`` (PEFT's LoraConfig), and refuses unsupported settings."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from chairlift.errors import ModelLoadError
from chairlift.models.hf_config import read_json

__all__ = ["CONFIG_NAME", "AdapterSettings", "read_settings"]

CONFIG_NAME: Final = "adapter_config.json"

_MOST_RANK: Final = 2**16
_MOST_PATTERNS: Final = 10_000
_INITS: Final = (True, False, "true", "false", "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that do not change the base model's weights."""
_REFUSED: Final = {
    "layer_replication": "layers are not repeated",
    "use_qalora": "QA-LoRA pools the inputs",
    "use_bdlora": "BD-LoRA has matrices of blocks",
    "alora_invocation_tokens": "an activated adapter begins in the middle of a prompt",
    "arrow_config": "adapters are not routed",
    "kasa_config": "KaSA has singular values of its own",
    "velora_config": "VeLoRA is not known",
    "monteclora_config": "MonteCLoRA draws its weights",
    "megatron_config": "layers of Megatron are not known",
}
"""Key that would change the computation -> reason why it is refused, unless its value is empty, false or null."""
_HARMLESS: Final = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out"),
    *("bias", "use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern"),
    *("alpha_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("qalora_group_size", "runtime_config", "use_dora", "lora_bias", "modules_to_save", "target_parameters"),
    *("trainable_token_indices", "ensure_weight_tying"),
}
"""Keys that this module reads, or that only describe the adapter's origin. The layers of an adapter follow from its
tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Settings from which the rank and the scale of each low-rank part follow."""

    rank: int
    alpha: float | None
    """None: every scale is 1."""
    rslora: bool
    rank_pattern: Mapping[str, int]
    """Regular expression of module names -> their rank. The first expression that matches applies."""
    alpha_pattern: Mapping[str, float]
    transposed: bool
    """Value of ``fan_in_fan_out``: the base model's weights are stored as [in, out]."""
    dora: bool
    """Value of ``use_dora``: every pair of matrices has a vector of magnitudes."""
    added_bias: bool
    """Value of ``lora_bias``: every matrix B has a bias."""
    parameters: tuple[str, ...]
    """Value of ``target_parameters``: names of parameters with the weights of all experts, or the ends of such
    names."""
    saved: tuple[str, ...]
    """Value of ``modules_to_save``: names of modules that the adapter replaces, or the ends of such names."""
    tokens: Mapping[str, tuple[int, ...]]
    """Name of an embedding, or the end of such a name -> tokens whose embeddings the adapter replaces. An empty name
    means any embedding."""
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Name of a module -> its rank, for adapters whose tensors alone say it. Patterns do not apply to these modules."""

    def rank_of(self, module: str) -> int:
        """Rank of the matrices for ``module``, a module name in the base model."""
        return self.ranks.get(module) or int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Factor by which the low-rank term of ``module`` is multiplied: alpha / r, or alpha / sqrt(r) with rsLoRA
        (Kalajdzievski, 2023)."""
        if self.alpha is None:
            return 1.0
        rank = self.rank_of(module)
        alpha = _matching(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def saves(self, module: str) -> bool:
        """Whether ``modules_to_save`` has the module ``module``."""
        return any(module == name or module.endswith(f".{name}") for name in self.saved)

    def token_ids(self, module: str) -> tuple[int, ...]:
        """Tokens whose embeddings in ``module`` the adapter replaces. With an empty name: those of any module."""
        for name, token_ids in self.tokens.items():
            if not name or not module or module == name or module.endswith(f".{name}"):
                return token_ids
        return ()


def read_settings(path: Path) -> AdapterSettings:
    """Read ``adapter_config.json``. Raises ModelLoadError for a damaged file, an adapter that is not LoRA, and
    unsupported settings."""
    raw = read_json(path)
    _refuse(raw, path)
    patterns: dict[str, dict[str, float]] = {}
    for key in ("rank_pattern", "alpha_pattern"):
        given = raw.get(key) or {}
        if not isinstance(given, dict) or len(given) > _MOST_PATTERNS:
            _fail(path, f"{key} must map module names to numbers, at most {_MOST_PATTERNS:,} of them")
        patterns[key] = {
            _pattern(path, key, name): _number(path, f"{key}[{name!r:.80}]", each) for name, each in given.items()
        }
    ranks = {name: _rank(path, "rank_pattern", each) for name, each in patterns["rank_pattern"].items()}
    return AdapterSettings(
        rank=_rank(path, "r", _number(path, "r", raw.get("r", 8))),
        alpha=_number(path, "lora_alpha", raw.get("lora_alpha", 8)),
        rslora=_flag(path, raw, "use_rslora"),
        rank_pattern=ranks,
        alpha_pattern=patterns["alpha_pattern"],
        transposed=_flag(path, raw, "fan_in_fan_out"),
        dora=_flag(path, raw, "use_dora"),
        added_bias=_flag(path, raw, "lora_bias"),
        parameters=_names(path, raw, "target_parameters"),
        saved=_names(path, raw, "modules_to_save"),
        tokens=_tokens(path, raw.get("trainable_token_indices") or []),
    )


def _names(path: Path, raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = raw.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        _fail(path, f"{key} must be a list of names, got {names!r:.80}")
    return tuple(names)


def _tokens(path: Path, given: Any) -> dict[str, tuple[int, ...]]:
    """``trainable_token_indices``: a list of token ids, or a mapping from an embedding's name to such a list."""
    lists = given if isinstance(given, dict) else {"": given} if given else {}
    for name, ids in lists.items():
        numbers = isinstance(ids, list) and all(isinstance(each, int) and each >= 0 for each in ids)
        if not isinstance(name, str) or not numbers or len(set(ids)) < len(ids):
            _fail(path, f"trainable_token_indices must have lists of different token ids, got {given!r:.80}")
    return {name: tuple(ids) for name, ids in lists.items()}


def _refuse(raw: Mapping[str, Any], path: Path) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        _fail(path, f"peft_type must be LORA, got {kind!r:.80}; other kinds of adapters are not served")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        _fail(
            path,
            f"task_type must be CAUSAL_LM or null, got {raw['task_type']!r:.80}; models for classes or embeddings take"
            " no adapters: merge the adapter into its model (PEFT's merge_and_unload) and serve the result",
        )
    for key, value in raw.items():
        if key in _REFUSED and value:
            _fail(path, f"{key} is {value!r:.80}, and {_REFUSED[key]}; train the adapter without it")
        if key not in _REFUSED and key not in _HARMLESS and value:
            _fail(path, f"{key} is {value!r:.80}, a setting that is not known here; train the adapter without it")
    if raw.get("bias", "none") not in ("none", "all", "lora_only"):
        _fail(path, f"bias must be 'none', 'all' or 'lora_only', got {raw['bias']!r:.80}")
    if raw.get("use_dora") and raw.get("lora_bias"):
        _fail(path, "use_dora and lora_bias are both true, and such biases are not computed; train without lora_bias")
    init = raw.get("init_lora_weights", True)
    if isinstance(init, (dict, list)) or init not in _INITS:
        _fail(
            path,
            f"init_lora_weights is {init!r:.80}, which changes the base weights too; convert the adapter with PEFT's"
            " save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )


def _matching(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Value of the first pattern that matches ``module``, by PEFT's rules; ``default`` if none matches."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


_QUANTIFIERS: Final = "*+?"
_MOST_QUANTIFIERS: Final = 6
_PATTERN_SIGNS: Final = r"[\w.|^$*+?\\\[\](),:-]*"


def _pattern(path: Path, key: str, name: Any) -> str:
    """The regular expression ``name``, after a check that matching it takes little time: it is short, has few
    quantifiers, none of them behind a group except ``?``, and only groups ``(...)`` and ``(?:...)``."""
    plain = isinstance(name, str) and len(name) <= 256 and bool(re.fullmatch(_PATTERN_SIGNS, name))
    if plain:
        repeated = re.search(r"(?<!\\)\)[*+]|\(\?(?!:)|\\[1-9]", name)
        quantifiers = sum(map(name.replace("(?:", "(").count, _QUANTIFIERS))
        plain = not repeated and quantifiers <= _MOST_QUANTIFIERS
    try:
        if plain:
            re.compile(name)
            return str(name)
    except re.error:
        pass
    _fail(
        path,
        f"{key} has {name!r:.80}, which must be a module's name, or a regular expression of such names with at most"
        f" {_MOST_QUANTIFIERS} of {' '.join(_QUANTIFIERS)} and without repeated groups",
    )


def _number(path: Path, key: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or abs(value) > 1e9:
        _fail(path, f"{key} must be a number, got {value!r:.80}")
    return float(value)


def _rank(path: Path, key: str, value: float) -> int:
    if value != int(value) or not 1 <= value <= _MOST_RANK:
        _fail(path, f"{key} must be a whole number from 1 to {_MOST_RANK:,}, got {value:g}")
    return int(value)


def _flag(path: Path, raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key) or False
    if not isinstance(value, bool):
        _fail(path, f"{key} must be true or false, got {value!r:.80}")
    return value


def _fail(path: Path, problem: str) -> NoReturn:
    raise ModelLoadError(f"{path}: {problem}")
