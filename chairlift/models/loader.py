"""Loads a model into memory, from a name or a directory.

A model directory is untrusted data. Only JSON and safetensors are read; pickle files are refused; code in the directory
is never imported; file names in the index cannot point outside the directory. Tensors are memory-mapped and copied
directly to their final memory, a few megabytes at a time. The file's pages are released after each copy, so loading
needs little more memory than the model itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chairlift.base import mistaken_models
from chairlift.errors import EngineDeadError, ModelLoadError
from chairlift.kernels.cpu.packing import by_slices
from chairlift.kernels.grouped import GroupedRows, GroupKind, dequantized
from chairlift.kernels.weights import ONEDNN, PLAIN, WeightFormat
from chairlift.models.approximations import holds_exactly
from chairlift.models.causal_lm import CausalLM
from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.fallback.config import TransformersConfig
from chairlift.models.formats.checkpoint import CheckpointPart, checkpoint_layout
from chairlift.models.formats.gguf.choice import choose_gguf
from chairlift.models.formats.gguf.files import find_gguf, is_gguf
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_pooled import gguf_pooled_parts
from chairlift.models.formats.gguf_tensors import GGUFTensors
from chairlift.models.formats.quantized_checkpoints import with_whole_weights
from chairlift.models.formats.stored_names import Renamed, with_usual_names
from chairlift.models.formats.stored_rows import MOST_NUMBERS, StoredRows
from chairlift.models.hf_config import NetworkConfig, read_json
from chairlift.models.hub import INDEX_NAME, SINGLE_NAME, WEIGHT_FILE, download_model, parse_hub_id
from chairlift.models.layers.linear import Matrix
from chairlift.models.pooled_layout import SCORES, pooled_layout
from chairlift.models.pooled_network import PooledNetwork
from chairlift.models.pooling import PooledConfig
from chairlift.models.registry import FAMILIES

__all__ = [
    "Checkpoint",
    "check_pooled_weights",
    "check_weights",
    "load_model",
    "load_pooled",
    "open_checkpoint",
    "open_safetensors",
    "open_tensors",
    "replace_weights",
    "resolve_dtype",
    "resolve_model_dir",
    "write_parts",
]

_log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
Surplus: TypeAlias = Literal["warn", "ignore", "refuse"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED_DTYPES = {"F64", "F32", "F16", "BF16"}
_STORED_AS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_PIECE_BYTES = 64 << 20
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
"""Names of the output head and of the embedding in this package. A checkpoint may have another name for the
embedding."""
_HQQ_FILE = "qmodel.pt"
"""File in which the library HQQ stores weights; the directory's config.json does not say so."""
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def resolve_model_dir(name_or_path: str | Path, revision: str | None = None) -> Path:
    """Directory of a model, or its GGUF file. A local path is returned unchanged; a model named by a Hub id is
    downloaded if needed. ``:Q4_K_M`` after a directory or a Hub id selects a GGUF file.

    Only the files that are read are downloaded, never pickled ones. Raises :class:`~chairlift.errors.ModelLoadError`
    when ``name_or_path`` is neither a local model nor available from the Hub or its local cache.
    """
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if name and path.exists() and (model := find_gguf(path)) is not None:
        return model
    if name and path.is_dir():
        return path
    before, _, quantization = name.rpartition(":")
    folder = Path(before).expanduser()
    if before and folder.is_dir():
        return folder / choose_gguf([file.name for file in folder.glob("*.gguf")], quantization, before)[0]
    found = None if path.exists() else parse_hub_id(name)
    if found is None:
        raise ModelLoadError(mistaken_models.of_name(name))
    return download_model(found[0], revision, found[1])


def resolve_dtype(config: NetworkConfig | EncoderConfig | TransformersConfig, dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype for a name, a dtype, or ``"auto"``. ``"auto"`` means the config's dtype, or float32 if it has
    none."""
    if isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
    else:
        name = (config.dtype or "float32") if dtype == "auto" else dtype
    if name not in _DTYPES:
        raise ModelLoadError(f"dtype {name!r} is not supported; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_model(
    model_dir: Path,
    config: NetworkConfig,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    *,
    weight_format: WeightFormat = ONEDNN,
    divide: Callable[[CausalLM], None] | None = None,
) -> CausalLM:
    """Build the model of ``config`` with the weights in ``model_dir``, ready for inference (no gradients).

    ``progress`` is called with a label and the completed fraction (0 to 1). Linear weights are converted to
    ``weight_format`` while they are loaded; a model for training or saving needs PLAIN. ``divide`` is called before
    the weights are allocated, if several processes share the model: it sets which outputs of the layers this process
    keeps. Raises :class:`~chairlift.errors.ModelLoadError` when weights are missing, damaged, misshapen or pickled, or
    when a layer of the model has surplus tensors. Raises :class:`~chairlift.errors.ConfigError` when the format is not
    possible; see :meth:`~chairlift.kernels.weights.WeightFormat.fitting`.
    """
    torch_dtype = resolve_dtype(config, dtype)
    device = torch.device(device)
    weight_format = weight_format.fitting(torch_dtype, device)
    with torch.device("meta"):
        model = CausalLM(config)
    if divide is not None:
        divide(model)
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(model_dir, config, stack)
        parts = _checked_parts(tensors, model, model_dir)
        model.lay_out(weight_format, torch_dtype, device, _kinds(tensors, parts))
        report = progress or _tell_nobody
        _write(model, parts, tensors, lambda share: report("loading weights", share))
    return model.eval().requires_grad_(False)


def load_pooled(
    model_dir: Path,
    config: PooledConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    *,
    weight_format: WeightFormat,
) -> PooledNetwork:
    """Build a model for embeddings or classes; see :func:`load_model`."""
    weight_format = weight_format.fitting(dtype, device)
    with torch.device("meta"):
        model = PooledNetwork(config)
    with contextlib.ExitStack() as stack:
        tensors, parts = _pooled_parts(model, model_dir, stack)
        model.lay_out(weight_format, dtype, device, _kinds(tensors, parts))
        report = progress or _tell_nobody
        _write(model, parts, tensors, lambda share: report("loading weights", share))
    return model.eval().requires_grad_(False)


def check_pooled_weights(model_dir: Path, config: PooledConfig, dtype: torch.dtype) -> None:
    """Read all weights of a model for embeddings or classes; see :func:`check_weights`."""
    with torch.device("meta"):
        model = PooledNetwork(config)
    with contextlib.ExitStack() as stack:
        tensors, parts = _pooled_parts(model, model_dir, stack, "ignore")
        _check_finite(tensors, parts, dtype, model_dir, _tell_nobody)


def _pooled_parts(
    model: PooledNetwork, model_dir: Path, stack: contextlib.ExitStack, surplus: Surplus = "warn"
) -> tuple[Mapping[str, Any], list[CheckpointPart]]:
    if is_gguf(model_dir):
        found, parts, unread = gguf_pooled_parts(model, GGUFModel(model_dir))
        _compare_parts(found, parts, model_dir, lambda name: _is_ignored(unread, name), surplus)
        return found, parts
    tensors = with_whole_weights(open_safetensors(model_dir, stack), model_dir)
    for folder in (each.folder for each in model.config.dense):  # linear layers after the pooling
        inner = open_safetensors(model_dir / folder, stack)
        tensors = {**tensors, **{f"{folder}/{name}": Renamed(file, name) for name, file in inner.items()}}
    if model.config.answers:
        tensors = {**tensors, SCORES: _InMemory(_rows_of_head(tensors, model, model_dir))}
    layout = pooled_layout(model, tensors)
    _compare_parts(tensors, layout.parts, model_dir, lambda name: _is_ignored(layout.ignored, name), surplus)
    if isinstance(model.config.network, NetworkConfig):
        _refuse_mixed(tensors, layout.parts, model.config.network, model_dir)
    return tensors, layout.parts


def _rows_of_head(tensors: Mapping[str, Any], model: PooledNetwork, model_dir: Path) -> Tensor:
    """Rows of the output head that form the classifier. If the head is tied to the embedding, they are rows of the
    embedding."""
    network = model.config.network
    embedding = next(part.name for part in pooled_layout(model, tensors).parts if part.parameter == _EMBEDDING)
    tied = isinstance(network, NetworkConfig) and network.tie_word_embeddings
    name = _HEAD if _HEAD in tensors and not tied else embedding
    if name not in tensors or (name == embedding and not tied):
        raise ModelLoadError(f"{model_dir}: tensor {_HEAD if not tied else embedding} is missing; download it again")
    rows = tensors[name].get_slice(name)
    return torch.cat([dequantized(rows[answer : answer + 1]) for answer in model.config.answers])


def check_weights(model_dir: Path, config: NetworkConfig, dtype: torch.dtype) -> None:
    """Read all weights of ``config`` in a directory. Raises :class:`~chairlift.errors.ModelLoadError` unless every
    number is finite, also after rounding to ``dtype``."""
    with torch.device("meta"):
        model = CausalLM(config)
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(model_dir, config, stack)
        parts = _checked_parts(tensors, model, model_dir, "ignore")
        _check_finite(tensors, parts, dtype, model_dir, _tell_nobody)


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """Stored tensors of a model. Their names, shapes and dtypes have been checked, but no tensor is in memory yet."""

    model: CausalLM
    """The model without weights in memory (on torch's meta device)."""
    parts: list[CheckpointPart]
    """Checkpoint tensors by Hugging Face's names, in the order of ``model.named_parameters()``."""
    _tensors: Mapping[str, Any]
    _stored: Mapping[CheckpointPart, list[CheckpointPart]]
    """Part whose tensor has Hugging Face's name -> the tensors of the files that have these rows, and possibly
    others."""

    def kind(self, part: CheckpointPart) -> GroupKind | None:
        """Kind of integer groups in which the checkpoint stores this part; None if it stores floats."""
        stored = self._tensors[self._stored[part][0].name]
        return stored.kind if isinstance(stored, StoredRows) else None

    def pieces(self, part: CheckpointPart) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of each piece, in the order of Hugging Face's checkpoints and in the stored float dtype, or
        float32 for stored integers.

        A piece has at most :data:`~chairlift.models.formats.stored_rows.MOST_NUMBERS` elements, or a single row, or, of
        q and k whose rows are reordered, whole heads. Reading the next piece releases the previous piece's pages of the
        file.
        """
        if not part.order:
            yield from self._pieces_in_our_order(part)
            return
        held: list[Tensor] = []
        start = 0
        for first, rows in self._pieces_in_our_order(part):
            held.append(rows)
            end = first + len(rows)
            whole = end if end == part.shape[0] else end - end % len(part.order)
            if whole == start:
                continue
            gathered = torch.cat(held)
            yield start, part.in_stored_order(start, gathered[: whole - start])
            held = [gathered[whole - start :]]
            start = whole

    def _pieces_in_our_order(self, part: CheckpointPart) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of each piece, with the rows as the model's parameter has them."""
        count = max(MOST_NUMBERS // math.prod(part.shape[1:]), 1)
        for stored, start, rows in _pieces(self._tensors, self._stored[part]):
            mapped = _is_mapped(self._tensors, stored)
            skipped = max(part.start - start, 0)
            end = min(part.start + part.shape[0] - start, len(rows))
            for first in range(skipped, end, count):
                some = rows[first : min(first + count, end)]
                yield start - part.start + first, some.dequantize() if isinstance(some, GroupedRows) else some
                if isinstance(some, Tensor):
                    by_slices(some, lambda *_: None, mapped=mapped)


@contextlib.contextmanager
def open_checkpoint(model_dir: Path, config: NetworkConfig) -> Iterator[Checkpoint]:
    """Open the weights of a directory or a GGUF file, to be read piece by piece.

    Raises :class:`~chairlift.errors.ModelLoadError` when weights are missing, misshapen or pickled, or when a layer of
    the model has surplus tensors.
    """
    with torch.device("meta"):
        model = CausalLM(config)
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(model_dir, config, stack)
        parts = checkpoint_layout(model)
        by_parameter: dict[str, list[CheckpointPart]] = {}
        for each in _checked_parts(tensors, model, model_dir):
            by_parameter.setdefault(each.parameter, []).append(each)
        stored = {part: [each for each in by_parameter[part.parameter] if _overlap(each, part)] for part in parts}
        yield Checkpoint(model, parts, tensors, stored)


def _overlap(stored: CheckpointPart, part: CheckpointPart) -> bool:
    """Whether a tensor of the file fills rows of ``part``, which has Hugging Face's name."""
    return stored.start < part.start + part.shape[0] and part.start < stored.start + stored.shape[0]


def replace_weights(
    model: CausalLM,
    source: str | Path | Mapping[str, Any],
    progress: Progress | None = None,
    *,
    writes: bool = True,
) -> None:
    """Write new weights into a loaded model in place, whatever their formats.

    ``source`` is a directory with safetensors, a GGUF file, or a mapping from Hugging Face's names to tensors of any
    float dtype on any device, or to matrices as :class:`~chairlift.kernels.grouped.GroupedRows`. A tied output head is
    optional. ``progress`` is that of :func:`load_model`. Packed weights, fp8 weights, their biases and plain parameters
    keep their memory addresses; only oneDNN's weights move, because they are packed again. All names, shapes, dtypes
    and values are checked before anything is written, so after :class:`~chairlift.errors.ModelLoadError` the model is
    unchanged. A later error, in reading a file, raises :class:`~chairlift.errors.EngineDeadError`. Unless ``writes``,
    the weights are only checked.
    """
    with torch.device("meta"):
        blank = type(model)(model.config)  # a packed model no longer has the names and shapes
    tensors = dict[str, Any]()
    with contextlib.ExitStack() as stack:
        if isinstance(source, Mapping):
            where = Path("the given weights")
            tensors = {name: _in_memory(name, value) for name, value in source.items()}
        else:
            try:
                where = Path(source)
            except TypeError:
                given = type(source).__name__
                raise ModelLoadError(f"weights come from a directory or a mapping of tensors, got {given}") from None
            try:
                where = find_gguf(where) or where
                if not where.is_dir() and not is_gguf(where):
                    raise ModelLoadError(f"{str(source)!r} is not a directory; give one that holds *.safetensors")
                tensors = open_tensors(where, model.config, stack)
            except OSError as error:
                message = f"cannot read {str(source)!r} ({error.strerror}); give a directory that this process may read"
                raise ModelLoadError(message) from None
        parts = _checked_parts(tensors, blank, where, "refuse" if isinstance(source, Mapping) else "warn")
        report = progress or _tell_nobody
        _check_finite(tensors, parts, model.dtype, where, report)
        if not writes:
            return
        try:
            _write(model, parts, tensors, lambda share: report("replacing weights", (1 + share) / 2))
        except Exception as error:
            raise EngineDeadError(
                f"the weights of {where} could be read in part only ({type(error).__name__}: {error}), and the model "
                "is a mixture now; load it again"
            ) from error


def _tell_nobody(label: str, share: float) -> None:
    pass


def _finite(rows: Tensor | GroupedRows, dtype: torch.dtype) -> bool:
    """Whether all values are finite, also after rounding to ``dtype``. Checking the minimum and maximum is enough: both
    are NaN if any element is. For integers in groups, the lowest and the highest possible value of each group are
    checked."""
    if isinstance(rows, GroupedRows) and rows.kind.e4m3:
        rows = rows.dequantize()  # a code may be NaN
    if isinstance(rows, GroupedRows):
        lowest = rows.scales * -rows.kind.zero if rows.minimums is None else rows.minimums
        rows = torch.stack([lowest, lowest + rows.scales * rows.kind.span])
    return bool(torch.stack(torch.aminmax(rows)).to(dtype).isfinite().all())


def _check_finite(
    tensors: Mapping[str, Any], parts: list[CheckpointPart], dtype: torch.dtype, where: Path, report: Progress
) -> None:
    groups = _by_layer(parts)
    for done, group in enumerate(groups.values()):
        for part, start, rows in _pieces(tensors, group):
            report("checking weights", done / len(groups) / 2)
            if not _finite(rows, dtype):
                first = start - part.start
                raise ModelLoadError(
                    f"{where}: tensor {part.name} has NaN or infinity, or numbers too large for"
                    f" {str(dtype).removeprefix('torch.')}, in rows {first} to {first + len(rows) - 1}; nothing of"
                    " it is used: train, convert or download the weights again"
                )
            if isinstance(rows, Tensor):  # release the file's pages
                by_slices(rows, lambda *_: None, mapped=_is_mapped(tensors, part))


def _by_layer(parts: list[CheckpointPart]) -> dict[str, list[CheckpointPart]]:
    """Name of a layer -> its checkpoint parts: the weight and, if there is one, the bias."""
    grouped: dict[str, list[CheckpointPart]] = {}
    for part in parts:
        grouped.setdefault(part.parameter.rpartition(".")[0], []).append(part)
    return grouped


def _kinds(tensors: Mapping[str, Any], parts: list[CheckpointPart]) -> dict[str, GroupKind]:
    """Parameter name -> kind of groups, for parameters whose parts are all stored as codes in groups. The kind is one
    that can hold all parts; parameters for which there is none are left out."""
    found: dict[str, list[GroupKind | None]] = {}
    for part in parts:
        stored = tensors[part.name]
        found.setdefault(part.parameter, []).append(stored.kind if isinstance(stored, StoredRows) else None)
    whole = {name: [kind for kind in kinds if kind is not None] for name, kinds in found.items() if None not in kinds}
    found_kinds = {name: functools.reduce(operator.or_, kinds) for name, kinds in whole.items()}
    return {name: kind for name, kind in found_kinds.items() if kind.bits <= 8}


def _write(
    model: CausalLM | PooledNetwork,
    parts: list[CheckpointPart],
    tensors: Mapping[str, Any],
    report: Callable[[float], None],
) -> None:
    """Write all weights, piece by piece. Pages of memory-mapped files are released after use. Tensors in memory belong
    to the caller and are not released."""
    total = sum(math.prod(part.shape) for part in parts)
    done = 0
    model.rounds_floats = False
    for name, group in _by_layer(parts).items():
        layer = model.get_submodule(name)
        for part, start, rows in _pieces(tensors, group):
            attribute = part.parameter.rpartition(".")[2]
            used: WeightFormat = PLAIN
            kind: GroupKind | None = None
            if isinstance(layer, Matrix) and attribute == "weight":
                used = layer.format
                kind = layer.shape.kind
            target = getattr(layer, attribute)
            used.write(target, start, _of_kind(rows, kind), mapped=_is_mapped(tensors, part))
            if used.name(target) is None and not holds_exactly(target.dtype, _stored_dtype(tensors, part)):
                model.rounds_floats = True
            done += rows.numel()
            report(done / total)
        if isinstance(layer, Matrix):
            layer.finish()
    model.finish_head()


def write_parts(model: Any, parts: list[CheckpointPart], tensors: Mapping[str, Any]) -> None:
    """Write the weights of a module that is laid out, such as a layer that makes drafts. ``parts`` have been checked
    against ``tensors``."""
    _write(model, parts, tensors, lambda share: None)


def _stored_dtype(tensors: Mapping[str, Any], part: CheckpointPart) -> str:
    """Dtype of a stored tensor, as safetensors names it; F32 for integers in groups."""
    return str(tensors[part.name].get_slice(part.name).get_dtype())


def _of_kind(rows: Tensor | GroupedRows, kind: GroupKind | None) -> Tensor | GroupedRows:
    """``rows`` in the form that a layer with a weight of ``kind`` stores. They become floats if the layer stores
    floats, or if ``kind`` cannot represent their codes exactly."""
    if isinstance(rows, Tensor) or kind is None:
        return rows
    return rows.to(kind) if rows.kind | kind == kind else rows.dequantize()


def _pieces(
    tensors: Mapping[str, Any], group: list[CheckpointPart]
) -> Iterator[tuple[CheckpointPart, int, Tensor | GroupedRows]]:
    """Yield (part, first row, rows) of parameters, in pieces. A slow disk may read a large tensor for minutes, and
    pieces allow progress reports. Quantised rows are unpacked as they are read."""
    for part in group:
        given = _read(tensors, part)
        most = MOST_NUMBERS if isinstance(given, StoredRows) else _PIECE_BYTES // given.element_size()
        count = max(most // max(math.prod(part.shape[1:]), 1), 1)
        if part.order:  # whole heads
            count = max(count // len(part.order), 1) * len(part.order)
        for first in range(0, len(given), count):
            rows = given[first : first + count]
            yield part, part.start + first, rows[part.sources(first, len(rows)) - first] if part.order else rows


class _InMemory:
    """A tensor in memory, wrapped so that it looks like a tensor in a safetensors file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_tensor(self, name: str) -> Tensor:
        return self._tensor

    def get_slice(self, name: str) -> _InMemory:
        return self

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _STORED_AS.get(self._tensor.dtype, str(self._tensor.dtype))


class _RowsInMemory(StoredRows):
    """Integers in groups in memory, wrapped so that they look like a tensor in a safetensors file."""

    def __init__(self, rows: GroupedRows) -> None:
        self._rows = rows
        self.kind = rows.kind

    def get_shape(self) -> list[int]:
        return list(self._rows.shape)

    def __getitem__(self, rows: slice) -> GroupedRows:
        return self._rows[rows]


def _in_memory(name: str, value: Any) -> _InMemory | _RowsInMemory:
    if isinstance(value, GroupedRows):
        _check_grouped(name, value)
        return _RowsInMemory(value)
    if not isinstance(value, Tensor) or value.is_meta or value.layout is not torch.strided:
        given = type(value).__name__ if not isinstance(value, Tensor) else "one without ordinary memory"
        raise ModelLoadError(f"{name!r} must be a dense torch tensor, got {given}; the model is unchanged")
    return _InMemory(value.detach())


def _check_grouped(name: str, rows: GroupedRows) -> None:
    kind = rows.kind
    codes = rows.codes
    fits = codes.dim() == 2 and codes.dtype == torch.uint8 and (rows.minimums is not None) == kind.minimum
    if fits:
        groups = (len(codes), -(-codes.shape[1] // kind.group))
        values = [rows.scales] if rows.minimums is None else [rows.scales, rows.minimums]
        fits = all(each.shape == groups and each.dtype == torch.float32 for each in values)
        fits = fits and kind.bits <= 8 and (not codes.numel() or int(codes.max()) < 1 << kind.bits)
    if not fits:
        raise ModelLoadError(
            f"{name!r} is not what {kind} are: codes must be uint8 [rows, columns] below {1 << kind.bits}, scales"
            f" (and minimums, where the kind has them) float32 [rows, columns / {kind.group}]; the model is unchanged"
        )


def _is_mapped(tensors: Mapping[str, Any], part: CheckpointPart) -> bool:
    """Whether reading the tensor gives a view of a file. Reordered rows and rows of a transposed stack are copies
    instead."""
    copied = part.order or (part.transposed and part.stack > 1)
    return not copied and not isinstance(tensors[part.name], (StoredRows, _InMemory))


def _read(tensors: Mapping[str, Any], part: CheckpointPart) -> Tensor | StoredRows:
    """The part's tensor as a view of its memory-mapped file."""
    try:
        stored = tensors[part.name]
        if isinstance(stored, StoredRows):
            return stored
        tensor: Tensor | StoredRows = part.rows_of(tensors[part.name].get_tensor(part.name))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelLoadError(f"cannot read tensor {part.name}: {error}; download the model again") from None
    return tensor


def open_tensors(model_dir: Path, config: NetworkConfig | None, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Map tensor name -> the open, memory-mapped file that holds the tensor, or an object that makes its rows from
    several stored tensors. ``config`` is needed only for a GGUF file."""
    if config is not None and is_gguf(model_dir):
        return cast(dict[str, Any], GGUFTensors(GGUFModel(model_dir), config))
    tensors = with_whole_weights(open_safetensors(model_dir, stack), model_dir)
    if config is None:
        return tensors
    family = FAMILIES[config.model_type]
    by_expert = any("#" in name for names in family.tensors.values() for name in names)
    return with_usual_names(tensors, family.other_names, experts=by_expert)


def open_safetensors(model_dir: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Tensor name -> open safetensors file that holds it, for all weights in a directory. ``stack`` closes the files.
    Raises :class:`~chairlift.errors.ModelLoadError`."""
    index_path = model_dir / INDEX_NAME
    if index_path.is_file() and (index := _read_index(index_path)):
        opened = {file: _open_file(model_dir / file, stack) for file in sorted(set(index.values()))}
        names = {file: frozenset(opened[file].keys()) for file in opened}
        for name, file in index.items():
            if name not in names[file]:
                raise ModelLoadError(f"{index_path}: tensor {name!r} is not in {file}; download both files again")
        if SINGLE_NAME not in opened and (model_dir / SINGLE_NAME).is_file():
            message = "%s has both %s and the weights in pieces of %s: the pieces are used; remove the outdated files"
            _log.warning(message, model_dir, SINGLE_NAME, INDEX_NAME)
        return {name: opened[file] for name, file in index.items()}
    if (model_dir / SINGLE_NAME).is_file():
        file = _open_file(model_dir / SINGLE_NAME, stack)
        return dict.fromkeys(file.keys(), file)
    pickled = sorted(path.name for path in model_dir.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if _HQQ_FILE in pickled:
        raise ModelLoadError(
            f"HQQ weights are not read: {model_dir} has {_HQQ_FILE}, which is also a pickle; use a GGUF file or another"
            " quantised version of the model, or the original weights, which --quantization int8 or int4 rounds while"
            " they are loaded"
        )
    if pickled:
        raise ModelLoadError(
            f"{model_dir} has its weights only as pickle ({pickled[0]!r}), and unpickling runs any code inside; "
            "get a version with *.safetensors, or convert it with transformers' save_pretrained if you trust its author"
        )
    raise ModelLoadError(mistaken_models.of_weights(model_dir))


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index. Empty if the index does not match the files."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path} has no weight_map; download it again")
    for file in set(map(str, weight_map.values())):
        # Only plain file names are allowed, so that an entry cannot point outside the model's directory.
        if not WEIGHT_FILE.fullmatch(file):
            raise ModelLoadError(f"{path} refers to {file[:80]!r}; only *.safetensors files beside it are allowed")
        if not (path.parent / file).is_file():
            if (path.parent / SINGLE_NAME).is_file():
                return {}  # transformers leaves it behind when it saves one file over the pieces of before
            raise ModelLoadError(f"{path} refers to {file}, which is not there; download the model again")
    return {str(name): str(file) for name, file in weight_map.items()}


def _open_file(path: Path, stack: contextlib.ExitStack) -> Any:
    """Memory-map a safetensors file. The library checks header size, offsets, overlaps, shapes and file length."""
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError, RuntimeError, ValueError, MemoryError) as error:
        mistaken_models.check_content(path)
        if "Cannot allocate memory" in str(error):  # PyTorch has no type of its own for it
            raise ModelLoadError(f"there is no memory to map {path} ({error}); free some, or raise ulimit -v") from None
        raise ModelLoadError(f"{path} is damaged or incomplete ({error}); download it again") from None


def _checked_parts(
    tensors: Mapping[str, Any], model: CausalLM, model_dir: Path, surplus: Surplus = "warn"
) -> list[CheckpointPart]:
    """Compare stored names, shapes and dtypes with what the model needs, before memory is allocated for them; see
    :func:`_compare_parts`."""
    tied = model.config.tie_word_embeddings
    parts = tensors.layout(model) if isinstance(tensors, GGUFTensors) else checkpoint_layout(model, tensors)
    family = FAMILIES[model.config.model_type]
    embedding_name = next(part.name for part in parts if part.parameter == _EMBEDDING)
    prefix = embedding_name.partition(".")[0] + "."
    if not any(name.startswith(prefix) for name in tensors):  # saved by the class without a head (...Model)
        parts = [dataclasses.replace(part, name=part.name.removeprefix(prefix)) for part in parts]
        embedding_name = embedding_name.removeprefix(prefix)
    if tied and embedding_name not in tensors and _HEAD in tensors:  # safetensors' save_model keeps either name
        parts = [dataclasses.replace(part, name=_HEAD) if part.name == embedding_name else part for part in parts]
    # Two kinds of surplus tensors are redundant: rotary frequencies in old checkpoints, and a tied head that is stored
    # in addition to the embedding.
    redundant = (_HEAD,) if tied and not any(part.name == _HEAD for part in parts) else ()
    ignored = family.ignored_tensors
    _compare_parts(tensors, parts, model_dir, lambda name: name in redundant or _is_ignored(ignored, name), surplus)
    _refuse_mixed(tensors, parts, model.config, model_dir)
    for name in filter(tensors.__contains__, redundant):
        head, embedding = (tensors[each].get_tensor(each) for each in (name, embedding_name))
        if not torch.equal(head.to(embedding), embedding):
            raise ModelLoadError(
                f"{model_dir}: config.json ties {name} to {embedding_name}, but both are stored, and differ; "
                "set tie_word_embeddings to false if the head was trained by itself, else remove it from the file"
            )
    return parts


def _is_ignored(pattern: str, name: str) -> bool:
    return re.search(pattern, name) is not None


def _compare_parts(
    tensors: Mapping[str, Any],
    parts: list[CheckpointPart],
    model_dir: Path,
    redundant: Callable[[str], bool],
    surplus: Surplus = "warn",
) -> None:
    """Raise ModelLoadError unless ``tensors`` contains all ``parts``, each with the right shape and a float dtype.

    Surplus tensors are allowed if they are ``redundant``. Others raise an error if they are in a layer of the model, or
    if ``surplus`` is ``refuse``. Otherwise a log line names them, unless ``surplus`` is ``ignore``.
    """
    wanted = {part.name: part for part in parts}
    missing = [name for name in wanted if name not in tensors]
    unused = [
        name for name in tensors if name not in wanted and not redundant(name) and not _adds_nothing(tensors, name)
    ]
    owners = {_owner(name) for name in wanted}
    unexpected = [name for name in unused if surplus == "refuse" or _owner(name) in owners]
    if missing or unexpected:
        both = (("missing", missing), ("unexpected", unexpected))
        problems = " and ".join(f"{len(names)} {kind} ({_few(names)})" for kind, names in both if names)
        raise ModelLoadError(
            f"{model_dir}: the weights do not fit config.json: tensors {problems}; "
            "check that config.json and the weights belong together"
        )
    if unused and surplus == "warn":
        _log.warning("%s: the model does not use %d of its tensors (%s)", model_dir, len(unused), _few(unused))
    for name, part in wanted.items():
        view = tensors[name].get_slice(name)
        shape = tuple(view.get_shape())
        dtype = view.get_dtype()
        expected = part.stored_shape
        if shape != expected:
            raise ModelLoadError(
                f"{model_dir}: tensor {name} has shape {list(shape)}, but config.json asks for {list(expected)}; "
                "check that config.json and the weights belong together"
            )
        if dtype not in _STORED_DTYPES:
            raise ModelLoadError(
                f"{model_dir}: tensor {name} is stored as {dtype}, and quantization_config in config.json does not say"
                " how to read it (docs/quantization.md lists the supported formats); use the original model in"
                " bfloat16, float16 or float32"
            )


def _refuse_mixed(
    tensors: Mapping[str, Any], parts: list[CheckpointPart], config: NetworkConfig, model_dir: Path
) -> None:
    for part in parts:
        mixed = part.transposed or part.stack > 1
        stored = tensors[part.name]
        if mixed and isinstance(stored, StoredRows) and not stored.stacked:
            raise ModelLoadError(
                f"{model_dir}: tensor {part.name} is quantised, which {config.model_type} models cannot be, for their"
                " weights are stored transposed or stacked; use the original model in bfloat16,"
                " float16 or float32"
            )


def _adds_nothing(tensors: Mapping[str, Any], name: str) -> bool:
    """Whether the tensor is a bias of zeros that belongs to a quantised weight. AutoGPTQ stores such a bias for every
    weight."""
    layer, _, ending = name.rpartition(".")
    if ending != "bias" or not isinstance(tensors.get(f"{layer}.weight"), StoredRows):
        return False
    return not tensors[name].get_tensor(name).any()


def _owner(name: str) -> str:
    """Name of the numbered layer that contains the tensor. For a tensor outside of numbered layers, name of the module
    that contains it."""
    layer = re.search(r"\A.*?\.\d+\.", name)
    return layer.group() if layer else name.rpartition(".")[0]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
