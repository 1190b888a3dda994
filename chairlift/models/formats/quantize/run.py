"""Writes a directory with quantised weights for a model that Chairlift can load."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from chairlift.errors import ConfigError, ModelLoadError
from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.kernels.weights import PLAIN
from chairlift.models.formats.checkpoint import CheckpointPart
from chairlift.models.formats.quantize.gptq import Calibrated, CalibrationPack, calibrate
from chairlift.models.formats.quantize.recipes import RECIPES, Recipe
from chairlift.models.formats.quantize.rounding import Squares, round_rows
from chairlift.models.formats.quantize.samples import make_packs, packs_of, read_texts
from chairlift.models.formats.quantize.writing import (
    Planned,
    ShardWriter,
    packed_by_output,
    packed_words,
    source_config,
    write_files,
)
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.linear import Matrix
from chairlift.models.loader import Checkpoint, check_weights, load_model, open_checkpoint
from chairlift.models.model_files import read_config
from chairlift.models.registry import FAMILIES
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["QuantizeReport", "quantize_model"]

Progress = Callable[[str, float], None]
"""Function called with a label and the completed fraction (0 to 1)."""
Kinds = dict[CheckpointPart, GroupKind]
"""Tensor to quantise -> its kind."""


@dataclasses.dataclass(slots=True)
class QuantizeReport:
    """Result of quantising a model."""

    kinds: dict[str, int] = dataclasses.field(default_factory=dict)
    """Kind in words -> number of weights of this kind, the most first."""
    matrices: int = 0
    weights: int = 0
    """Number of weights in the quantised matrices."""
    quantised_bytes: int = 0
    """Bytes of the quantised matrices, with scales and zero points."""
    squares: Squares = dataclasses.field(default_factory=Squares)
    files: list[str] = dataclasses.field(default_factory=list)
    """Names of the weight files."""
    nbytes: int = 0
    """Size in bytes of all tensors that were written."""
    samples: int = 0
    """Number of samples used for calibration; 0 without calibration."""
    tokens: int = 0
    output_errors: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Output errors of each calibrated layer; see :class:`~chairlift.models.formats.quantize.gptq.Calibrated`."""
    notes: list[str] = dataclasses.field(default_factory=list)


def quantize_model(
    model_dir: Path,
    out: Path,
    form: str,
    texts: Path | Sequence[Sequence[int]] | None = None,
    progress: Progress = lambda label, share: None,
) -> QuantizeReport:
    """Quantise the model in ``model_dir``, a directory or a GGUF file, by one of
    :data:`~chairlift.models.formats.quantize.recipes.RECIPES`, and write it to ``out``.

    With ``texts``, a file of samples or token ids of samples, GPTQ chooses the codes; otherwise weights are rounded to
    the nearest codes. What the recipe does not quantise is written in bfloat16, or in float16 if the model uses it.
    ``out`` must be empty or missing; an error leaves it unchanged. Raises ConfigError and ModelLoadError.
    """
    recipe = RECIPES[form]
    _check_empty(out)
    network = read_config(model_dir)
    raw = source_config(model_dir)
    if network.vision is not None:
        raise ConfigError(
            f"{model_dir} reads images, and its encoder cannot be written quantised yet; round its text model as it is"
            " loaded: --quantization int8 or int4"
        )
    dtype = torch.float16 if network.dtype == "float16" else torch.bfloat16
    packs, samples = ([], 0) if texts is None else _packs(texts, model_dir, network)
    report = QuantizeReport(samples=samples, tokens=sum(len(pack.token_ids) for pack in packs))
    with open_checkpoint(model_dir, network) as checkpoint:
        kinds = _kinds(checkpoint, recipe, model_dir)
        _add_notes(report, checkpoint, kinds, network, packs)
        with _new_directory(out):
            writer = ShardWriter(out, _plan(checkpoint, kinds, dtype))
            _check_room(out, writer.nbytes)
            with writer:
                written: set[str] = set()
                if packs:
                    written = _write_calibrated(writer, report, model_dir, network, kinds, packs, dtype, progress)
                _write_rest(writer, report, checkpoint, kinds, written, dtype, progress)
            groups = _layers_of_kinds(checkpoint, kinds)
            write_files(out, model_dir, raw, FAMILIES[network.model_type], dtype, groups)
    _count(report, kinds, dtype)
    report.files = writer.names
    report.nbytes = writer.nbytes
    return report


def _count(report: QuantizeReport, kinds: Kinds, dtype: torch.dtype) -> None:
    report.matrices = len(kinds)
    for part, kind in kinds.items():
        numbers = _numbers(part)
        report.weights += numbers
        report.kinds[str(kind)] = report.kinds.get(str(kind), 0) + numbers
        report.quantised_bytes += sum(tensor.nbytes for tensor in _planned(part, kind, dtype))
    report.kinds = dict(sorted(report.kinds.items(), key=lambda each: -each[1]))


def _packs(
    texts: Path | Sequence[Sequence[int]], model_dir: Path, network: NetworkConfig
) -> tuple[list[CalibrationPack], int]:
    if not isinstance(texts, Path):
        return packs_of(texts), len(texts)
    found = read_texts(texts)
    packs, samples = make_packs(found, Tokenizer.from_dir(model_dir), network.max_model_len)
    if not packs:
        raise ConfigError(f"--calibrate {texts} has no token for this tokenizer; give other texts")
    largest = max(int(pack.token_ids.max()) for pack in packs)
    if largest >= network.vocab_size:
        raise ConfigError(
            f"the tokenizer makes token {largest} of --calibrate {texts}, but the model has {network.vocab_size}; check"
            " that the tokenizer and the weights belong together"
        )
    return packs, samples


def _kinds(checkpoint: Checkpoint, recipe: Recipe, model_dir: Path) -> Kinds:
    """Weights to quantise, with their kinds. Raises ModelLoadError for a weight that cannot be quantised."""
    found: Kinds = {}
    for part in checkpoint.parts:
        layer, _, attribute = part.parameter.rpartition(".")
        matrix = isinstance(checkpoint.model.get_submodule(layer), Matrix)
        kind = recipe.kind(part.parameter) if matrix and attribute == "weight" else None
        if kind is None:
            continue
        if part.transposed and part.stack == 1:
            raise ModelLoadError(
                f"{model_dir}: weights of {checkpoint.model.config.model_type} models are stored transposed, which"
                " no quantised format is; llama, mistral, qwen2 and qwen3 models can be quantised"
            )
        if part.shape[1] % kind.group:
            fitting = [name for name, other in RECIPES.items() if part.shape[1] % other.layers.group == 0]
            remedy = f"use --format {' or '.join(fitting)}" if fitting else "this model cannot be quantised"
            raise ModelLoadError(
                f"{model_dir}: tensor {part.name} has rows of {part.shape[1]} numbers, which groups of {kind.group} do"
                f" not divide; {remedy}"
            )
        found[part] = kind
    return found


def _layers_of_kinds(checkpoint: Checkpoint, kinds: Kinds) -> tuple[dict[GroupKind, list[str]], list[str]]:
    """(kind -> names of the layers of this kind, names of layers with matrices that are not quantised)."""
    groups: dict[GroupKind, list[str]] = {}
    for part, kind in kinds.items():
        groups.setdefault(kind, []).append(part.name.removesuffix(".weight"))
    kept = [part.name for part in checkpoint.parts if part not in kinds and len(part.shape) == 2]
    return groups, [name.removesuffix(".weight") for name in kept if name.endswith(".weight")]


def _add_notes(
    report: QuantizeReport,
    checkpoint: Checkpoint,
    kinds: Kinds,
    network: NetworkConfig,
    packs: list[CalibrationPack],
) -> None:
    stored = {str(kind): None for part in kinds if (kind := checkpoint.kind(part)) is not None}
    if stored:
        report.notes.append(
            f"the model is quantised already ({', '.join(stored)}): its weights are dequantised and rounded again,"
            " which loses more than quantising the original"
        )
    if network.dtype not in ("bfloat16", "float16"):
        report.notes.append("tensors that are not quantised are rounded from float32 to bfloat16")
    widest = max((part.shape[1] for part in kinds), default=0)
    if packs and report.tokens < widest:
        report.notes.append(
            f"the calibration texts have {report.tokens:,} tokens, fewer than the {widest:,} inputs of the widest"
            " layer: give more for better weights"
        )


def _plan(checkpoint: Checkpoint, kinds: Kinds, dtype: torch.dtype) -> Iterator[Planned]:
    for part in checkpoint.parts:
        if part in kinds:
            yield from _planned(part, kinds[part], dtype)
        else:
            yield Planned(part.name, dtype, part.stored_shape)


def _planned(part: CheckpointPart, kind: GroupKind, dtype: torch.dtype) -> Iterator[Planned]:
    (n, k), layer = part.shape, part.name.removesuffix(".weight")
    yield Planned(f"{layer}.weight_packed", torch.int32, (n, k * kind.bits // 32))
    yield Planned(f"{layer}.weight_scale", dtype, (n, k // kind.group))
    if kind.minimum:
        yield Planned(f"{layer}.weight_zero_point", torch.int32, (-(-n * kind.bits // 32), k // kind.group))
    yield Planned(f"{layer}.weight_shape", torch.int64, (len(part.stored_shape),))


def _write_rest(
    writer: ShardWriter,
    report: QuantizeReport,
    checkpoint: Checkpoint,
    kinds: Kinds,
    written: set[str],
    dtype: torch.dtype,
    progress: Progress,
) -> None:
    """Write the tensors of all parameters that are not in ``written``. Those in ``kinds`` are rounded to the nearest
    codes, piece by piece."""
    total = sum(_numbers(part) for part in checkpoint.parts)
    done = 0
    for part in checkpoint.parts:
        zeros: list[Tensor] = []
        for first, rows in () if part.parameter in written else checkpoint.pieces(part):
            _check_finite(part, first, rows, dtype)
            if part in kinds:
                rounded, squares = round_rows(rows, kinds[part], dtype)
                _write_matrix(writer, part, first, rounded, zeros)
                report.squares.add(squares)
            else:
                writer.write(part.name, first, rows)
        done += _numbers(part)
        progress("quantising", done / total)


def _write_calibrated(
    writer: ShardWriter,
    report: QuantizeReport,
    model_dir: Path,
    network: NetworkConfig,
    kinds: Kinds,
    packs: list[CalibrationPack],
    dtype: torch.dtype,
    progress: Progress,
) -> set[str]:
    """Write all weights that are quantised for the samples, and return the names of their parameters. The model is in
    memory only once, in its own dtype."""
    check_weights(model_dir, network, dtype)
    model = load_model(model_dir, network, progress=progress, weight_format=PLAIN)
    parts: dict[str, list[CheckpointPart]] = {}
    for part in kinds:
        parts.setdefault(part.parameter, []).append(part)
    kind_of = {name: kinds[some[0]] for name, some in parts.items()}
    written = set()
    found: Calibrated
    for found in calibrate(model, packs, kind_of.get, dtype, lambda share: progress("calibrating", share)):
        for part in parts[found.parameter]:
            rows = found.rows[part.start : part.start + part.shape[0]]
            _write_matrix(writer, part, 0, part.in_stored_order(0, rows), [])
        report.squares.add(found.squares)
        if found.output_errors is not None:
            report.output_errors.append(found.output_errors)
        written.add(found.parameter)
    return written


def _write_matrix(
    writer: ShardWriter, part: CheckpointPart, first: int, rows: GroupedRows, zeros: list[Tensor]
) -> None:
    """Write ``rows`` of a matrix, from row ``first`` on. ``zeros`` has the zero points of the rows before, which are
    written with the last rows, because the zero points of several rows share a word."""
    layer = part.name.removesuffix(".weight")
    if rows.minimums is not None:
        zeros.append((rows.minimums / -rows.scales).round_().to(torch.uint8))
        if first + len(rows) == part.shape[0]:
            writer.write(f"{layer}.weight_zero_point", 0, packed_by_output(torch.cat(zeros), rows.kind.bits))
    writer.write(f"{layer}.weight_packed", first, packed_words(rows.codes, rows.kind.bits))
    writer.write(f"{layer}.weight_scale", first, rows.scales)
    writer.write(f"{layer}.weight_shape", 0, torch.tensor(part.stored_shape))


def _numbers(part: CheckpointPart) -> int:
    return torch.Size(part.shape).numel()


def _check_finite(part: CheckpointPart, first: int, rows: Tensor, dtype: torch.dtype) -> None:
    if not bool(torch.stack(torch.aminmax(rows)).to(dtype).isfinite().all()):
        raise ModelLoadError(
            f"tensor {part.name} has NaN or infinity, or numbers too large for {str(dtype).removeprefix('torch.')}, in"
            f" rows {first} to {first + len(rows) - 1}; train, convert or download the weights again"
        )


def _check_empty(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty; give a directory that is empty or not there")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; give a directory that is empty or not there")


def _check_room(out: Path, nbytes: int) -> None:
    free = shutil.disk_usage(out).free
    if nbytes > free:
        raise ConfigError(
            f"the model needs {nbytes / 2**20:,.0f} MiB in {out}, and {free / 2**20:,.0f} MiB are free; make room, or"
            " give another directory"
        )


@contextlib.contextmanager
def _new_directory(out: Path) -> Iterator[None]:
    """Create a directory for the ``with`` block. After an error the directory is missing or empty again, as it was
    before."""
    existed = out.is_dir()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the directory {out}: {error.strerror}; give another") from None
    try:
        yield
    except BaseException:
        for path in out.iterdir():
            path.unlink()
        if not existed:
            out.rmdir()
        raise
