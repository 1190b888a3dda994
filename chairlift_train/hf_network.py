"""Trains a model of transformers on packed sequences (:func:`patch_hf`), and refuses a model whose sequences affect
each other. transformers supports far more model families than Chairlift's native layers. The layers of transformers run
unchanged. Therefore a test on the model, before the first step, checks that the sequences of a row do not affect each
other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chairlift.errors import ConfigError, ModelLoadError
from chairlift_train.checkpoint import ModelFiles, copy_files
from chairlift_train.isolation import IsolationReport, check_isolation
from chairlift_train.layout import Pack
from chairlift_train.sharding import divide
from chairlift_train.varlen import patch_hf

__all__ = ["TransformersNetwork", "TransformersShape", "load_for_training", "read_shape"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransformersShape:
    """Facts about a model of transformers that are known before its weights are loaded."""

    model_type: str
    architecture: str
    """Name of the model's class in transformers."""
    vocab_size: int
    hidden_size: int
    raw: Mapping[str, Any]
    """Content of ``config.json``."""


def read_shape(raw: Mapping[str, Any], where: str) -> TransformersShape:
    """Read the content of a ``config.json`` with transformers. ``where`` names the file in error messages. Raises
    ModelLoadError if transformers is not installed, rejects the file, or has no causal language model of this type.
    Also raises it if the weights are quantised, or if the model needs code from its own directory, which is never run.
    """
    model_type = raw.get("model_type")
    if importlib.util.find_spec("transformers") is None:
        raise ModelLoadError(
            f"{where}: model_type {model_type!r:.80} has no native implementation, and transformers is not installed;"
            " pip install 'chairlift[hf]'"
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(model_type))
    if not isinstance(model_type, str) or not isinstance(architecture, str):
        raise ModelLoadError(
            f"{where}: model_type {model_type!r:.80} is no causal language model that Chairlift or this version of"
            " transformers knows; use another, or another version of transformers"
        )
    if raw.get("quantization_config"):
        raise ModelLoadError(f"{where}: the weights are quantised, and training needs whole ones; use the original")
    code = (raw.get("auto_map") or {}).get("AutoModelForCausalLM")
    if code is not None and str(code).rpartition(".")[2].lower() != architecture.lower():
        raise ModelLoadError(
            f"{where}: the model needs code from its own directory (auto_map: {code!r:.80}), which is never run; use a"
            " version of the model in a standard format"
        )
    text = _config(model_type, raw, where).get_text_config()
    sizes = {name: getattr(text, name, None) for name in ("vocab_size", "hidden_size")}
    checked = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 0}
    if wrong := sorted(sizes.keys() - checked.keys()):
        raise ModelLoadError(f"{where}: {wrong[0]} is {sizes[wrong[0]]!r:.80}; it must be a number above 0")
    return TransformersShape(model_type=model_type, architecture=architecture, raw=raw, **checked)


def _config(model_type: str, raw: Mapping[str, Any], where: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type].from_dict({key: value for key, value in raw.items() if key != "auto_map"})
    except Exception as error:  # errors of huggingface_hub's validation, or of a class that reads an unexpected value
        reason = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"{where}: transformers does not accept it ({type(error).__name__}: {reason})") from None


def load_for_training(shape: TransformersShape, path: Path | None) -> Any:
    """Load the model in float32 from the directory ``path``. If ``path`` is None, create it with random weights from
    PyTorch's generator. Raises ModelLoadError if weights are missing or have a wrong shape.
    """
    import transformers

    from chairlift.models.fallback.loading import quiet

    made = getattr(transformers, shape.architecture)
    config = _config(shape.model_type, shape.raw, shape.model_type)
    if path is None:
        return made._from_config(config, dtype=torch.float32)
    try:
        with quiet():
            model, info = made.from_pretrained(
                path, config=config, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
            )
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"{path}: transformers cannot load the weights ({reason})") from None
    if missing := sorted(info["missing_keys"]):
        raise ModelLoadError(
            f"{path}: {len(missing)} weights are missing ({', '.join(missing[:3])}); check that config.json and the"
            " weights belong together"
        )
    return model


class TransformersNetwork:
    """A :class:`~chairlift_train.networks.Network` of a causal language model of transformers (5.0 or later).

    :func:`patch_hf` makes its attention work sequence by sequence. If the model cannot be patched, its own attention
    runs and finds the boundaries of sequences in the positions, which restart at 0. In both cases
    :func:`check_isolation` tests that packed sequences do not affect each other. Otherwise ConfigError is raised with
    the report of the test.
    """

    drops = True
    section = "model"

    def __init__(self, model: Any) -> None:
        """Test and wrap ``model``. Its weights are float32, and training changes them in place."""
        self.module: nn.Module = model
        self.model = model
        self.trained: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        taken = inspect.signature(model.forward).parameters
        self._gives_positions = "position_ids" in taken
        self._keeps_rows = "logits_to_keep" in taken
        self._no_cache = {"use_cache": False} if "use_cache" in taken else {}
        self.report, self.is_patched = self._apart()

    def _apart(self) -> tuple[IsolationReport, bool]:
        """Patch the model if its packed sequences are then isolated. Otherwise leave it unpatched, and test it again.
        Returns (report of the test, whether the model is patched). Raises ConfigError if packed sequences affect each
        other in both cases."""
        patch = None
        try:
            patch = patch_hf(self.model)
            report = check_isolation(self.model, forward=self._forward)
        except ConfigError as error:
            refused = f"patch_hf refuses it: {error}"
        else:
            if report:
                return report, True
            refused = str(report)
        if patch is not None:
            patch.remove()
        own = check_isolation(self.model, forward=self._forward)
        if not own:
            raise ConfigError(f"{own}\n  {refused}\nnothing was trained; use another model")
        return own, False

    def _forward(self, batch: Mapping[str, Any], rows: Tensor | None = None) -> Tensor:
        """Logits [R, V] at the positions ``rows`` of a collated pack. None: at all positions."""
        given = {"input_ids": batch["input_ids"], **self._no_cache}
        if self._gives_positions:
            given["position_ids"] = batch["position_ids"]
        if rows is not None and self._keeps_rows:
            given["logits_to_keep"] = rows
        logits: Tensor = self.module(**given).logits[0]
        return logits if rows is None or self._keeps_rows else logits[rows]

    def logits(self, batch: Mapping[str, Tensor], pack: Pack, rows: Tensor) -> Tensor:
        """Logits [R, V] at the positions ``rows`` of a collated pack. If the model has the argument ``logits_to_keep``,
        its output head computes no other rows."""
        return self._forward(batch, rows)

    def branches(self) -> Iterable[nn.Module]:
        """Raises ConfigError, because models of transformers apply dropout themselves, as their config says."""
        raise ConfigError(
            "training.dropout is for native models; a model of transformers drops what its config.json says"
            " (attention_dropout, resid_pdrop, ...): set it there, and training.dropout to 0"
        )

    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers: the first ``ModuleList`` whose length is the config's number of layers."""
        count = self.model.config.get_text_config().num_hidden_layers
        lists = [each for each in self.model.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
        return list(lists[0]) if lists else []

    def divided(self) -> None:
        """Shard the parameters over the ranks."""
        divide(self.module, self.layers())
        self.trained = dict(self.module.named_parameters())

    @contextlib.contextmanager
    def recomputed(self) -> Iterator[None]:
        """Context with the gradient checkpointing of transformers. Raises ConfigError if the model does not support
        it."""
        if not self.model.supports_gradient_checkpointing:
            raise ConfigError(f"{type(self.model).__name__} has no gradient_checkpointing; set it to false")
        name = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"  # until 5.23
        getattr(self.model, f"{name}_checkpointing_enable")({"use_reentrant": False})
        try:
            yield
        finally:
            getattr(self.model, f"{name}_checkpointing_disable")()

    def settings(self) -> None:
        """Returns None, because the whole model is trained."""

    def write(self, directory: Path, files: ModelFiles) -> None:
        """Write the model with ``save_pretrained``. The weights have the dtype of ``files``, and the tokenizer of
        ``files`` is copied."""
        from chairlift.models.fallback.loading import quiet

        cast: dict[int, Tensor] = {}  # a tensor with two names stays one
        tensors = {
            name: cast.setdefault(value.data_ptr(), value.detach().to(files.dtype)) if value.numel() else value
            for name, value in self._stored()
        }
        directory.mkdir(parents=True, exist_ok=True)
        with quiet():
            self.model.save_pretrained(directory, state_dict=tensors)
        for path in directory.glob("*.safetensors"):
            path.chmod(0o644)  # the library writes it for the owner only
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(files.dtype).removeprefix("torch.")
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_files(files, directory)

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for each tensor of a checkpoint. ``state_dict()`` is not used, because it would shard
        gathered weights again."""
        yield from self.module.named_parameters(remove_duplicate=False)
        for prefix, module in self.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}".lstrip("."), buffer

    def __str__(self) -> str:
        how = "patch_hf" if self.is_patched else "its own attention, told by positions"
        return f"{type(self.model).__name__} of transformers, sequences apart by {how} ({max(self.report.alone):.0e})"
