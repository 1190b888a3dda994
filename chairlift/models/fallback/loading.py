"""Loads the weights of a directory into a model of transformers.

transformers builds the model without allocating its weights, and maps stored tensors to parameters. One parameter may
come from several tensors: experts are often stored one by one. Each tensor is read from memory-mapped files when
transformers asks for it, and its pages are released afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.cpu.packing import by_slices
from chairlift.kernels.grouped import dequantized
from chairlift.models.approximations import holds_exactly
from chairlift.models.fallback.config import TransformersConfig, hf_config
from chairlift.models.fallback.model import ATTENTION, TransformersLM, register_attention
from chairlift.models.fallback.packed import pack_linears
from chairlift.models.fallback.probe import Comparison, compare_with_eager, probe_layers
from chairlift.models.formats.stored_rows import MOST_NUMBERS, StoredRows
from chairlift.models.loader import open_tensors

__all__ = ["check_stored_weights", "count_parameters", "load_transformers_model", "quiet"]

_log = logging.getLogger(__name__)

_DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")

Progress = Callable[[str, float], None]


@dataclasses.dataclass(slots=True)
class _Stored:
    """A tensor of a checkpoint, read when transformers asks for it as ``stored[...]``."""

    name: str
    source: Any
    dtype: torch.dtype
    report: Callable[[int], None]

    def __getitem__(self, _: Any) -> Tensor:
        tensor = self._read()
        self.report(tensor.numel())
        return tensor

    def _read(self) -> Tensor:
        if isinstance(self.source, StoredRows) and self.source.stacked:  # MXFP4 experts have three dimensions
            return self.source.get_tensor(self.name).to(self.dtype)
        if isinstance(self.source, StoredRows):
            return torch.cat([dequantized(rows).to(self.dtype) for rows in _row_pieces(self.source)])
        try:
            mapped: Tensor = self.source.get_tensor(self.name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelLoadError(f"cannot read tensor {self.name}: {error}; download the model again") from None
        if mapped.dtype not in _DTYPES:
            raise ModelLoadError(
                f"tensor {self.name} is stored as {str(mapped.dtype).removeprefix('torch.')}, and quantization_config"
                " in config.json does not say how to read it (docs/quantization.md lists the supported formats); use"
                " the original model in bfloat16, float16 or float32"
            )
        target = torch.empty(mapped.shape, dtype=mapped.dtype)  # the stored dtype, because some parameters stay float32
        if mapped.dim():
            by_slices(mapped, lambda at, rows: target[at : at + len(rows)].copy_(rows), mapped=True)
        else:
            target.copy_(mapped)
        return target


def _row_pieces(source: StoredRows) -> Iterator[Any]:
    rows, width = source.get_shape()
    count = max(MOST_NUMBERS // max(width, 1), 1)
    for first in range(0, rows, count):
        yield source[first : first + count]


def load_transformers_model(
    model_dir: Path,
    config: TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> TransformersLM:
    """Build transformers' class for ``config`` with the weights in ``model_dir``, and compare its results with those of
    its own eager attention.

    :func:`~chairlift.models.fallback.probe.compare_with_eager` does the comparison, and its time is logged.
    ``progress`` is called with a label and the completed fraction (0 to 1). Raises
    :class:`~chairlift.errors.ModelLoadError` when weights are missing, damaged, surplus, misshapen or pickled, and when
    the model cannot be served.
    """
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(model_dir, None, stack)
        tensors = _without_further(_text_tensors(tensors) if config.inner else tensors, config)
        hf = _build(model_dir, config, dtype, tensors, progress)
        rounds = not all(holds_exactly(dtype, tensors[name].get_slice(name).get_dtype()) for name in tensors)
    hf.to(device).requires_grad_(False)
    where = f"{model_dir}: model_type {config.model_type!r} through transformers"
    try:
        layers = probe_layers(hf, config.max_model_len)
        added = pack_linears(hf) if device.type == "cpu" else 0
        model = TransformersLM(config, hf, layers, added).eval()
        model.rounds_floats = rounds
        found = compare_with_eager(model)
    except ModelLoadError as error:
        raise ModelLoadError(f"{where}: {error}") from None
    _log.info("%s", _describe(where, found))
    return model


def _text_name(name: str) -> str | None:
    """Name that a tensor of a larger model has in a checkpoint of its text model alone; None for the other parts, such
    as image encoders."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    return name if name.startswith("lm_head.") else None


def _text_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the text model, by their stored names."""
    return {name: source for name, source in tensors.items() if _text_name(name)}


def _without_further(tensors: Mapping[str, Any], config: TransformersConfig) -> dict[str, Any]:
    """The tensors without those of the ``num_nextn_predict_layers`` layers behind the last one, which predict further
    tokens (DeepSeek V3's MTP). transformers' classes do not have them."""
    ahead = config.raw.get("num_nextn_predict_layers")
    last = config.num_hidden_layers + (ahead if isinstance(ahead, int) else 0)

    def kept(name: str) -> bool:
        found = _LAYER.match((_text_name(name) or name) if config.inner else name)
        return found is None or not config.num_hidden_layers <= int(found[1]) < last

    return {name: source for name, source in tensors.items() if kept(name)}


def _describe(where: str, found: Comparison) -> str:
    return (
        f"{where}: logits differ by {found.difference:.2g} of their spread from eager attention's (rounding explains"
        f" {found.tolerance:.2g}); the comparison took {found.seconds:.2f} s"
    )


def _build(
    model_dir: Path,
    config: TransformersConfig,
    dtype: torch.dtype,
    tensors: Mapping[str, Any],
    progress: Progress | None,
) -> Any:
    """transformers' model in memory, with every parameter read from the checkpoint."""
    import transformers

    register_attention()
    done = 0
    lock = threading.Lock()
    total = max(sum(_numel(name, source) for name, source in tensors.items()), 1)

    def report(count: int) -> None:
        nonlocal done
        with lock:  # transformers reads on several threads
            done += count
            if progress is not None:
                progress("loading weights", done / total)

    stored = {
        (_text_name(name) or name) if config.inner else name: _Stored(name, source, dtype, report)
        for name, source in tensors.items()
    }
    try:
        with quiet():
            hf, info = getattr(transformers, config.architecture).from_pretrained(
                None,
                config=hf_config(config),
                state_dict=stored,
                dtype=dtype,
                attn_implementation=ATTENTION,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # mismatches are reported and refused below
                output_loading_info=True,
            )
    except (KeyError, RuntimeError, ValueError) as error:  # a name it does not know, or no memory for its parameters
        if isinstance(error, (ModelLoadError, torch.OutOfMemoryError)):
            raise
        reason = " ".join(str(error).split())[:300]
        native = f"{config.lacking}; " if config.lacking else ""
        raise ModelLoadError(f"{model_dir}: {native}transformers cannot load the model ({reason})") from None
    problems = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "of another shape": sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]),
    }
    listed = [f"{len(names)} {kind} ({', '.join(names[:3])})" for kind, names in problems.items() if names]
    if listed or info["error_msgs"]:
        raise ModelLoadError(
            f"{model_dir}: the weights do not fit config.json: tensors {' and '.join(listed or info['error_msgs'])};"
            " check that config.json and the weights belong together"
        )
    return hf


def count_parameters(config: TransformersConfig) -> int:
    """Number of parameters. A tied head is counted once."""
    import transformers

    with torch.device("meta"):
        hf = getattr(transformers, config.architecture)(hf_config(config))
    return sum(parameter.numel() for parameter in hf.parameters())


def _numel(name: str, source: Any) -> int:
    shape = source.get_shape() if isinstance(source, StoredRows) else source.get_slice(name).get_shape()
    return int(torch.Size(shape).numel())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and reports. Chairlift's own error messages contain the same information."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    level = hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if shown:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def check_stored_weights(model_dir: Path, dtype: torch.dtype) -> None:
    """Read all tensors of a directory. Raises :class:`~chairlift.errors.ModelLoadError` unless every number is finite,
    also after rounding to ``dtype``."""
    with contextlib.ExitStack() as stack:
        for name, source in open_tensors(model_dir, None, stack).items():
            tensor = _Stored(name, source, dtype, lambda count: None)[...]
            if tensor.numel() and not torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all():
                raise ModelLoadError(
                    f"{model_dir}: tensor {name} has NaN or infinity, or numbers too large for"
                    f" {str(dtype).removeprefix('torch.')}; train, convert or download the weights again"
                )
