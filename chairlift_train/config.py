"""Settings of a training run, read from a YAML file and ``--set``, and checked. Unknown keys are errors.

Uses the standard library. PyYAML is imported when a file is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from chairlift.errors import ConfigError

__all__ = [
    "CheckpointSettings",
    "DataSettings",
    "DriftSettings",
    "HeadsSettings",
    "LoraAdapter",
    "LoraSettings",
    "ModelSettings",
    "PackingSettings",
    "TrainConfig",
    "TrainerConfig",
]

_Settings = TypeVar("_Settings")


def _positive(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model to train: an existing model (``path``), or a new model with random weights (``config``)."""

    path: str | None = None
    """Directory of a Hugging Face model."""
    config: str | Mapping[str, Any] | None = None
    """``config.json`` of a new model: a path, or its content."""
    generation_config: Mapping[str, Any] | None = None
    """Content of ``generation_config.json`` for checkpoints (default: the file in ``path``, if any)."""
    tokenizer: str | None = None
    """Directory of the tokenizer for texts, copied into checkpoints (default: ``path``)."""
    impl: Literal["auto", "native", "transformers"] = "auto"
    """Implementation of the layers. ``native``: Chairlift's, for the model families in docs/models.md.
    ``transformers``: for any other causal language model, if packed sequences do not affect each other. ``auto``:
    native if the family is supported."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the weights for serving in a checkpoint. The checkpoint also contains the trainer's weights in float32.
    An adapter is written in float32."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.config is None):
            raise ConfigError("give either path (a model to go on with) or config (a fresh one), and not both")

    @property
    def tokenizer_dir(self) -> Path | None:
        given = self.tokenizer or self.path
        return None if given is None else Path(given)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """Settings of one of several adapters that are trained together. A setting that is None has the value in the
    section ``lora``."""

    r: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    rslora: bool | None = None
    dropout: float | None = None


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STATE_NAME = "training"
"""Name of the directory in a checkpoint that holds the state of the run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """One or several low-rank adapters that are trained while the model does not change (LoRA; Hu et al., 2021).

    The names of the settings are those of PEFT.
    """

    r: int = 16
    """Rank of the adapter's matrices."""
    alpha: float = 32.0
    """Scale: the output of the adapter is multiplied by ``alpha / r``."""
    targets: tuple[str, ...] = ("all-linear",)
    """Layers that get an adapter: the last part of a layer's name in transformers, such as ``q_proj`` or ``lm_head``;
    or ``all-linear``, which excludes the output head."""
    rslora: bool = False
    """Multiply the output by ``alpha / sqrt(r)`` instead of ``alpha / r`` (rsLoRA; Kalajdzievski, 2023)."""
    dropout: float = 0.0
    """Fraction of the inputs of each adapted layer that is set to 0 in training."""
    adapters: Mapping[str, LoraAdapter] | None = None
    """Name -> settings of several adapters that are trained together. A record names its adapter in its field
    ``adapter``. Without this field, the name of its source in ``data.files`` is the name of the adapter."""

    def __post_init__(self) -> None:
        if not 1 <= self.r <= 1024:
            raise ConfigError(f"r must be 1 to 1024, got {self.r}")
        if self.alpha <= 0:
            raise ConfigError(f"alpha must be above 0, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if not self.targets:
            raise ConfigError("targets is empty, so there would be nothing to train; leave it out for all-linear")
        if self.adapters is not None and not self.adapters:
            raise ConfigError("adapters is empty; name the adapters to train, or leave it out to train one")
        for name in self.adapters or {}:
            if not _ADAPTER_NAME.fullmatch(name) or name.lower() == _STATE_NAME:
                raise ConfigError(
                    f"adapters has the name {name[:120]!r}; a name is also a directory's, so it has at most 100"
                    f" letters, digits and ._-, begins with a letter or digit, and is not {_STATE_NAME!r}"
                )
            try:
                self.of(name)
            except ConfigError as error:
                raise ConfigError(f"adapters.{name}: {error}") from None
        folded: dict[str, str] = {}
        for name in self.adapters or {}:
            if (other := folded.setdefault(name.lower(), name)) != name:
                raise ConfigError(
                    f"adapters has {other} and {name}, which are one directory on some systems; rename one"
                )

    def of(self, name: str) -> LoraSettings:
        """Complete settings of one of ``adapters``, as if it were the only adapter."""
        given = {
            field.name: value
            for field in dataclasses.fields(LoraAdapter)
            if (value := getattr((self.adapters or {})[name], field.name)) is not None
        }
        return dataclasses.replace(self, adapters=None, **given)

    @property
    def by_name(self) -> Mapping[str, LoraSettings]:
        """Name -> complete settings of each of ``adapters``. Empty if a single adapter without a name is trained."""
        return {name: self.of(name) for name in self.adapters or {}}


_OF_MEDUSA = ("num_heads", "num_layers")
"""Settings of draft heads that only ``medusa`` has."""
_OF_EAGLE3 = ("num_steps", "taps", "intermediate_size", "draft_vocab_size", "targets")
"""Settings of draft heads that only ``eagle3`` has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadsSettings:
    """Settings of draft heads (docs/speculation.md). The heads are trained; the model does not change."""

    method: Literal["medusa", "eagle3", "eagle"] = "medusa"
    """Kind of draft heads: ``medusa`` (Cai et al., 2024), or ``eagle3``, a drafting layer (Li et al., 2025). ``eagle``
    means ``eagle3``."""
    num_heads: int = 4
    """Number of Medusa heads. Each head predicts the token one position further ahead than the head before."""
    num_layers: int = 1
    """Number of residual blocks in each Medusa head."""
    num_steps: int = 4
    """Number of steps that ``eagle3`` is unrolled in training: drafts of a row, each made from the one before."""
    taps: tuple[int, ...] | None = None
    """Layers of the model before which ``eagle3`` reads hidden states. None: 2, L / 2 and L - 3 of L layers; in models
    of fewer than 8 layers the first, the middle and the last."""
    intermediate_size: int | None = None
    """Inner width of the MLP of ``eagle3`` (default: the model's)."""
    draft_vocab_size: int | None = None
    """Number of tokens that ``eagle3`` can draft: the most frequent targets in ``data.files``. None: all tokens."""
    targets: Literal["tokens", "distribution"] = "tokens"
    """What ``eagle3`` learns: the ``tokens`` of the text, or the model's probability ``distribution`` at their
    positions, which costs one more output head per step."""
    own_output_heads: bool = False
    """Whether each draft head has its own output head, which is trained and begins as a copy of the model's output head
    (vocabulary size x hidden size). If False, all heads use the model's output head. ``draft_vocab_size`` needs an
    output head of its own, so it implies True."""
    decay: float = 0.8
    """Weight of a head's loss, divided by the weight of the previous head's loss. The same for steps of ``eagle3``."""

    def __post_init__(self) -> None:
        if self.method == "eagle":
            object.__setattr__(self, "method", "eagle3")
        for name in ("num_heads", "num_layers", "num_steps"):
            if not 1 <= getattr(self, name) <= 64:
                raise ConfigError(f"{name} must be 1 to 64, got {getattr(self, name)}")
        _positive(self, "intermediate_size", "draft_vocab_size")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay must be above 0 and at most 1, got {self.decay}")
        others = _OF_EAGLE3 if self.method == "medusa" else _OF_MEDUSA
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        if wrong := [name for name in others if getattr(self, name) != defaults[name]]:
            raise ConfigError(f"{', '.join(wrong)} is not a setting of method {self.method}; leave it out")

    @property
    def has_own_output(self) -> bool:
        """Whether each draft head trains an output head."""
        return self.own_output_heads or self.draft_vocab_size is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Training data: ``files``, or a custom ``source``."""

    files: tuple[str, ...] | Mapping[str, tuple[str, ...]] = ()
    """Files of records (:class:`~chairlift_train.sources.Encoder`): JSON lines, JSON arrays (both also as ``.gz`` or
    ``.zst``), Parquet files, patterns (``data/*.jsonl``), and directories of Hugging Face datasets. Either one list, or
    name -> list of files for several sources that are mixed (see ``weights``)."""
    weights: Mapping[str, float] | None = None
    """Name of a source in ``files`` -> relative number of sequences from it (default: equal)."""
    source: str | None = None
    """``module:Class`` of a custom source: an iterable class with ``state_dict`` and ``load_state_dict``."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments for the class ``source``."""
    eval_files: tuple[str, ...] | Mapping[str, tuple[str, ...]] = ()
    """Files of records for evaluation, in the form of ``files``. They are not trained on. At every checkpoint, the loss
    on each source is computed, and the checkpoint with the lowest loss is kept in addition to the newest ones. An
    invalid record is an error."""
    text_field: str = "text"
    """Name of the field with the text in records of plain text."""
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name of a field in the files -> name of a field that :class:`~chairlift_train.encoder.Encoder` knows, such as
    ``{question: prompt, answer: completion}``."""
    chat_template: str | None = None
    """File with a chat template for training (default: the tokenizer's). Checkpoints contain the tokenizer's
    template."""
    answers: Literal["auto", "together", "apart"] = "auto"
    """How a chat with several answers is divided into examples; see :data:`~chairlift_train.chats.Answers`."""
    train_on: Literal["answers", "all"] = "answers"
    """Targets in chats and in prompt-completion pairs: only the ``answers``, or ``all`` tokens. In plain text all
    tokens are targets."""
    add_eos: bool = True
    """Whether to add the tokenizer's end token to plain texts and completions."""
    shuffle: bool = True
    """Whether each epoch has a new random order, from the seed of the run. Needs ``access: random``."""
    epochs: int | None = None
    """Number of times that the files are read (default: until all steps are done)."""
    access: Literal["random", "stream", "follow"] = "random"
    """``random``: any order. ``stream``: read JSON lines once, without an index. ``follow``: as ``stream``, then wait
    for lines that are appended to the last file."""
    on_error: Literal["stop", "skip"] = "stop"
    """``stop``: an invalid record, or a record that does not fit into a pack, ends the run. ``skip``: the record is
    skipped and counted."""

    def __post_init__(self) -> None:
        _positive(self, "epochs")
        if bool(self.files) == (self.source is not None):
            raise ConfigError("give either files or source (module:Class), and not both")
        if self.source is not None and ":" not in self.source:
            raise ConfigError(f"source must be module:Class, such as my_data:Chats, got {self.source!r}")
        if self.options and self.source is None:
            raise ConfigError("options are the arguments of a source (module:Class); files have none")
        if self.access != "random" and (self.shuffle or self.epochs not in (None, 1)):
            raise ConfigError(f"access {self.access} reads once, in order: set shuffle to false, and no epochs")
        if self.weights is not None and (set(self.weights) != set(self.by_name) or min(self.weights.values()) <= 0):
            raise ConfigError(
                f"weights must give every source in files a number above 0: files has {', '.join(self.by_name)}, "
                f"weights has {dict(self.weights)}"
            )
        if self.access == "follow" and len(self.by_name) > 1:
            raise ConfigError(f"access follow waits for one source, but files has {len(self.by_name)}; give one list")
        if empty := [name for name, files in self.by_name.items() if not files and self.source is None]:
            raise ConfigError(f"files: {empty[0]} has no file; give it one, or leave it out")
        if empty := [name for name, files in self.eval_by_name.items() if not files]:
            raise ConfigError(f"eval_files: {empty[0]} has no file; give it one, or leave it out")

    @property
    def by_name(self) -> Mapping[str, tuple[str, ...]]:
        """Name of a source -> its files. A single source without a name is called ``data``."""
        return self.files if isinstance(self.files, Mapping) else {"data": self.files}

    @property
    def eval_by_name(self) -> Mapping[str, tuple[str, ...]]:
        """Name of a source of evaluation data -> its files. A single source without a name is called ``eval``."""
        if isinstance(self.eval_files, Mapping):
            return self.eval_files
        return {"eval": self.eval_files} if self.eval_files else {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DriftSettings:
    """Mixing of sources, and replay of old data after a source changed (:class:`~chairlift_train.drift.DriftSampler`).

    Changes can be detected only in sources that are not shuffled.
    """

    weights: Mapping[str, float] | None = None
    """Name of a source in ``data.files`` -> relative number of sequences from it (default: ``data.weights``)."""
    mixing: Literal["declared", "bandit"] = "declared"
    """``declared`` mixes sources by ``weights``; ``bandit`` prefers sources with a high loss."""
    replay: float = 0.1
    """Fraction of replayed old sequences after a source has changed."""
    reservoir: int = 10_000
    """Number of sequences that are stored for replay. Every checkpoint contains them."""
    detector: Literal["adwin", "page_hinkley"] = "adwin"
    """Detector of changes; see :mod:`~chairlift_train.detectors`."""
    signal: Literal["loss", "length"] = "loss"
    """Signal in which changes are detected: a rising loss, or the length of sequences."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackingSettings:
    """How sequences are packed: arguments of :class:`~chairlift_train.stream.PackStream`."""

    capacity: int = 4096
    """Maximum number of tokens in a pack. It determines the memory of one forward and backward pass."""
    pool: int = 256
    """Number of pending sequences among which the packer chooses."""
    align: int = 1
    """Sequences are padded so that each begins at a multiple of this number of tokens."""
    max_sequences: int | None = None
    """Maximum number of sequences in a pack. None: no limit."""
    overflow: Literal["error", "split", "truncate", "drop", "own_pack"] = "error"
    """Treatment of a sequence that is longer than ``capacity``; see :class:`~chairlift_train.stream.PackStream`."""
    step: str = "packs:8"
    """Size of one optimiser step, over all ranks: ``tokens:1M``, ``sequences:256`` or ``packs:8``."""
    window: int = 128
    """Number of packs that are balanced together, if ``balance`` is set. It must be a multiple of the number of
    ranks."""
    balance: bool = False
    """Whether to give all ranks packs of similar cost at the same time. The cost includes attention."""

    def __post_init__(self) -> None:
        _positive(self, "capacity", "pool", "align", "max_sequences", "window")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Settings of the optimiser steps."""

    steps: int
    """Number of optimiser steps in the whole schedule."""
    learning_rate: float = 1e-3
    """Highest learning rate of the schedule, after the warm-up."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """How the learning rate falls from its peak. ``cosine`` and ``linear`` end at ``final_fraction`` of the peak.
    ``wsd`` falls only in the last ``decay_steps`` (Hu et al., 2024). ``inverse_sqrt`` falls with the square root of the
    number of steps (Vaswani et al., 2017)."""
    warmup_steps: int = 100
    """Number of steps at the start in which the learning rate rises from 0 to its peak."""
    decay_steps: int | None = None
    """Number of steps at the end in which ``wsd`` lowers the learning rate (default: a fifth of all steps)."""
    final_fraction: float = 0.02
    """Final learning rate as a fraction of the peak. The schedule would reach it in the step after the last step."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices. Norm weights are not decayed (AdamW: Loshchilov and Hutter, 2019)."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay factors of AdamW's running means of the gradient and of its square."""
    max_grad_norm: float | None = 1.0
    """Maximum norm of the gradient. A larger gradient is scaled down to it. null: no clipping."""
    reduce: Literal["token", "sequence", "sqrt", "weights"] = "token"
    """Weighting of the targets; see :class:`~chairlift_train.loss.StepLoss`."""
    label_smoothing: float = 0.0
    """Fraction of the target's probability that is spread over the whole vocabulary (Szegedy et al., 2016)."""
    dropout: float = 0.0
    """Fraction of each layer's attention and MLP outputs that is set to 0 in training (Srivastava et al., 2014)."""
    balance_loss: float = 0.0
    """Factor of the load-balancing loss of models with experts, which is added to the loss of the step; see
    :class:`~chairlift_train.expert_balance.ExpertBalance`. It is 1 when the load is even, so 0.01 is usual. Every pack
    costs one more forward pass, because tokens per expert are counted over the whole step first."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of matrix products. With ``bfloat16``, only the operands of products are rounded (torch.autocast); weights,
    gradients, moments and losses stay in float32."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """Optimiser. ``adamw8bit`` stores the moments in 8 bits. It needs bitsandbytes (``chairlift[adamw8bit]``)."""
    sharding: Literal["none", "fsdp"] = "none"
    """``fsdp`` shards weights, gradients and moments over the processes (FSDP2), and gathers the weights of each layer
    while the layer is computed. With ``none`` every process holds all weights."""
    gradient_checkpointing: bool = False
    """Whether to store only the input of each layer for the backward pass, which computes the layer again. This needs
    less memory and about a third more time."""
    forward: Literal["torch", "exact"] = "torch"
    """What computes the forward pass. ``exact``: a step of the engine's CPU kernels in ``dtype``, so that losses and
    log-probabilities have the bits that the engine serves; see :class:`~chairlift_train.exact.ExactNetwork`. The
    backward pass computes each layer again in float32, as with ``gradient_checkpointing``."""

    def __post_init__(self) -> None:
        if self.forward == "exact":
            self._check_exact()
        if self.steps < 1 or not 0 <= self.warmup_steps <= self.steps:
            raise ConfigError(
                "a trainer needs steps >= 1 and warmup_steps between 0 and steps, "
                f"got steps {self.steps} and warmup_steps {self.warmup_steps}"
            )
        clips = self.max_grad_norm is None or self.max_grad_norm > 0
        if not (self.learning_rate > 0 and clips and self.weight_decay >= 0):
            raise ConfigError(
                "learning_rate and max_grad_norm must be above 0 (max_grad_norm null: no clipping), and weight_decay "
                f"at least 0; got {self.learning_rate}, {self.max_grad_norm} and {self.weight_decay}"
            )
        if self.balance_loss < 0:
            raise ConfigError(f"balance_loss must be at least 0 (0: none), got {self.balance_loss}")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ConfigError(f"decay_steps is for schedule wsd, and this one is {self.schedule}; leave it out")
        if not 0 <= self._decay_steps <= self.steps - self.warmup_steps:
            raise ConfigError(
                f"decay_steps must be between 0 and the {self.steps - self.warmup_steps} steps after warmup_steps, got "
                f"{self._decay_steps}"
            )
        for name in ("dropout", "label_smoothing", "final_fraction"):
            if not 0 <= getattr(self, name) < 1 + (name == "final_fraction"):
                raise ConfigError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must be at least 0 and below 1, got {self.betas}")

    def _check_exact(self) -> None:
        """Raise ConfigError for settings that the engine's forward pass does not allow."""
        wrong = {
            "dropout": self.dropout > 0,
            "balance_loss": self.balance_loss > 0,
            "sharding": self.sharding != "none",
        }
        if any(wrong.values()):
            raise ConfigError(
                f"training.forward exact does not go with {', '.join(name for name in wrong if wrong[name])}; leave one"
                " of them out"
            )

    @property
    def _decay_steps(self) -> int:
        if self.schedule != "wsd":
            return 0
        return min(self.steps // 5, self.steps - self.warmup_steps) if self.decay_steps is None else self.decay_steps

    def rate(self, step: int) -> float:
        """Learning rate of step number ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        if self.schedule == "inverse_sqrt":
            return self.learning_rate * math.sqrt(max(1, self.warmup_steps) / max(1, step, self.warmup_steps))
        if self.schedule == "wsd":
            remaining = min(1.0, (self.steps - step) / self._decay_steps) if self._decay_steps else 1.0
            return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * max(0.0, remaining))
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        fall = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * fall)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """When checkpoints are written. A checkpoint is always written when a run ends or is interrupted."""

    every: int = 100
    """Number of optimiser steps between two checkpoints."""
    keep: int = 3
    """Number of newest checkpoints that are kept. Older checkpoints are removed."""

    def __post_init__(self) -> None:
        _positive(self, "every", "keep")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of a complete training run. Relative paths are relative to the current directory."""

    model: ModelSettings
    data: DataSettings
    training: TrainerConfig
    packing: PackingSettings = PackingSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    lora: LoraSettings | None = None
    """Settings of LoRA adapters to train while the model does not change. None: no adapters."""
    heads: HeadsSettings | None = None
    """Settings of draft heads to train while the model does not change. None: no draft heads."""
    drift: DriftSettings | None = None
    """Detection of changes in sources, and replay; also for a single source. None: no replay; several sources are mixed
    by ``data.weights``."""
    output: str | None = None
    """Directory for the checkpoints."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that computes the model. ``auto``: ``cuda`` if PyTorch finds a GPU, otherwise ``cpu``. Each process on a
    machine uses its own GPU."""
    tensorboard: bool = False
    """Whether to write TensorBoard curves to ``OUTPUT/tensorboard``. Needs ``chairlift[tensorboard]``."""
    seed: int = 0
    """Seed of new weights, of the order of the data, and of dropout."""
    threads: int | None = None
    """Number of CPU threads per process (default: PyTorch's choice). Results with different numbers of threads differ
    by rounding."""

    def __post_init__(self) -> None:
        _positive(self, "threads")
        if self.threads is not None and self.threads > 256:
            raise ConfigError(f"threads must be 1 to 256, got {self.threads}")
        if self.drift is not None and self.drift.weights is not None and self.data.weights is not None:
            raise ConfigError("both data.weights and drift.weights are given; keep one of them")
        if self.lora is not None and self.model.path is None:
            raise ConfigError("lora adapts a model that exists; give model.path, or leave lora out")
        if self.lora is not None and self.lora.adapters is not None and self.training.balance_loss:
            raise ConfigError(
                "training.balance_loss is a product over all tokens, so several adapters cannot share it; set it to 0"
            )
        if self.heads is not None:
            self._check_heads()
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, got {self.seed}")

    def _check_heads(self) -> None:
        if self.model.path is None:
            raise ConfigError("heads draft for a model that exists; give model.path, or leave heads out")
        if self.lora is not None:
            raise ConfigError("both lora and heads are given; train one after the other")
        if self.drift is not None:
            raise ConfigError("drift is found by the model's loss, which heads do not compute; leave drift out")
        if self.training.dropout or self.training.balance_loss:
            raise ConfigError(
                "heads learn from the model as it is served; leave training.dropout and training.balance_loss out"
            )
        counts = self.heads is not None and self.heads.draft_vocab_size is not None
        if counts and (self.data.source or self.data.access != "random"):
            raise ConfigError(
                "heads.draft_vocab_size counts the tokens of data.files before the training, so it needs files and"
                " access: random; leave it out"
            )

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], where: str = "config") -> TrainConfig:
        """Create settings from nested mappings. Raises ConfigError for an unknown key or an invalid value."""
        return _build(cls, raw, where)

    @classmethod
    def from_file(cls, path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
        """Read a YAML or JSON file, then apply overrides of the form ``section.key=value``. Raises ConfigError."""
        import yaml

        try:
            raw = _loader()(path.read_text(encoding="utf-8")).get_single_data()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from None
        raw = {} if raw is None else raw
        for override in overrides:
            name, equals, text = override.partition("=")
            if not equals or not name:
                raise ConfigError(f"--set takes key=value, such as training.steps=500, got {override!r}")
            try:
                value = yaml.safe_load(text)
            except (yaml.YAMLError, ValueError, RecursionError):
                value = text
            _set(raw, name.strip(), value)
        return cls.from_mapping(raw, str(path))


@functools.cache
def _loader() -> Any:
    """YAML's safe loader, which in addition raises ConfigError for a key that occurs twice in one mapping."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_mapping_node(self, anchor: str | None) -> Any:
            node = super().compose_mapping_node(anchor)
            seen: dict[str, int] = {}
            for key, _value in node.value:
                line = key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise ConfigError(
                        f"the key {key.value[:60]!r} is in line {seen[key.value]} and again in line {line}; remove or"
                        " rename one of them"
                    )
                if isinstance(key, yaml.ScalarNode):
                    seen[key.value] = line
            return node

    return Loader


def _set(raw: Any, name: str, value: Any) -> None:
    *sections, key = name.split(".")
    for section in sections:
        raw = raw.setdefault(section, {}) if isinstance(raw, dict) else None
    if not isinstance(raw, dict):
        raise ConfigError(f"--set {name}: there is no section {'.'.join(sections)!r} to set a key in")
    raw[key] = value


def _build(cls: type[_Settings], raw: Any, where: str) -> _Settings:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} must be a mapping of settings, got {type(raw).__name__} {str(raw)[:60]!r}")
    hints = _hints(typing.cast(Any, cls))
    for key in raw:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{where}: unknown key {str(key)[:60]!r}; allowed are {', '.join(hints)}{meant}")
    values = {key: _convert(value, hints[key], f"{where}: {key}") for key, value in raw.items()}
    needed = [
        field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in needed if name not in values]:
        raise ConfigError(f"{where}: {', '.join(missing)} is missing; add it")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Convert ``value`` to the type ``hint``. Raises ConfigError if this is impossible.

    A number can be text, because YAML reads ``1e-3`` as text.
    """
    if hint is Any:
        return value
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        kinds = [arg for arg in args if arg is not type(None)]
        fitting = [kind for kind in kinds if isinstance(value, Mapping) == (typing.get_origin(kind) is Mapping)]
        return _convert(value, (fitting or kinds)[0], where)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} must be one of {', '.join(args)}, got {value!r}")
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        if args[-1] is not Ellipsis and len(items) != len(args):
            raise ConfigError(f"{where} takes {len(args)} values, got {value!r}")
        return tuple(_convert(item, args[0], where) for item in items)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a mapping, got {value!r}")
        return {str(key): _convert(item, args[1], f"{where}.{key}") for key, item in value.items()}
    return _scalar(value, hint, where)


def _scalar(value: Any, hint: type, where: str) -> Any:
    if hint is float and not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
    raise ConfigError(f"{where} must be {kind}, got {value!r:.80}")
