"""Writes a directory with quantised weights for a model that Chairlift can load."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from chairlift.errors import ConfigError, ModelLoadError
from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.kernels.weights import PLAIN
from chairlift.models.formats.checkpoint import CheckpointPart
from chairlift.models.formats.quantize.gptq import Calibrated, CalibrationPack, calibrate
from chairlift.models.formats.quantize.rounding import FORMATS, Squares, round_rows
from chairlift.models.formats.quantize.samples import make_packs, read_texts
from chairlift.models.formats.quantize.writing import Planned, ShardWriter, packed_words, source_config, write_files
from chairlift.models.hf_config import NetworkConfig
from chairlift.models.layers.linear import Linear
from chairlift.models.loader import Checkpoint, check_weights, load_model, open_checkpoint
from chairlift.models.model_files import read_config
from chairlift.models.registry import FAMILIES
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["QuantizeReport", "quantize_model"]

Progress = Callable[[str, float], None]
"""Function called with a label and the completed fraction (0 to 1)."""


@dataclasses.dataclass(slots=True)
class QuantizeReport:
    """Result of quantising a model."""

    kind: GroupKind
    matrices: int = 0
    weights: int = 0
    """Number of weights in the quantised matrices."""
    squares: Squares = dataclasses.field(default_factory=Squares)
    files: list[str] = dataclasses.field(default_factory=list)
    """Names of the weight files."""
    nbytes: int = 0
    """Size in bytes of all tensors that were written."""
    samples: int = 0
    """Number of samples used for calibration; 0 without calibration."""
    tokens: int = 0
    output_errors: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """(output error, output error with rounding to nearest) for each calibrated layer; see
    :class:`~chairlift.models.formats.quantize.gptq.Calibrated`."""
    notes: list[str] = dataclasses.field(default_factory=list)


def quantize_model(
    model_dir: Path, out: Path, form: str, texts: Path | None = None, progress: Progress = lambda label, share: None
) -> QuantizeReport:
    """Quantise the model in ``model_dir``, a directory or a GGUF file, to one of
    :data:`~chairlift.models.formats.quantize.rounding.FORMATS`, and write it to ``out``.

    With ``texts``, a file of samples, GPTQ chooses the codes; otherwise weights are rounded to the nearest codes.
    Matrices of the decoder layers are quantised. The embedding, the head and the rest are written in bfloat16, or in
    float16 if the model uses it. ``out`` must be empty or missing; an error leaves it unchanged. Raises ConfigError and
    ModelLoadError.
    """
    kind = FORMATS[form]
    _check_empty(out)
    network = read_config(model_dir)
    raw = source_config(model_dir)
    if network.vision is not None:
        raise ConfigError(
            f"{model_dir} reads images, and its encoder cannot be written quantised yet; round its text model as it is"
            " loaded: --quantization int8 or int4"
        )
    if network.experts is not None:
        raise ConfigError(
            f"{model_dir} has {network.experts.routing.words}, and weights of experts cannot be written quantised yet;"
            " round them as they are loaded: --quantization int8 or int4"
        )
    dtype = torch.float16 if network.dtype == "float16" else torch.bfloat16
    packs, samples = ([], 0) if texts is None else _packs(texts, model_dir, network)
    report = QuantizeReport(kind, samples=samples, tokens=sum(len(pack.token_ids) for pack in packs))
    with open_checkpoint(model_dir, network) as checkpoint:
        matrices = _matrices(checkpoint, kind, model_dir)
        _add_notes(report, checkpoint, matrices, network, packs)
        with _new_directory(out):
            writer = ShardWriter(out, _plan(checkpoint, matrices, kind, dtype))
            _check_room(out, writer.nbytes)
            with writer:
                if packs:
                    _write_calibrated(writer, report, model_dir, network, matrices, packs, dtype, progress)
                _write_rest(writer, report, checkpoint, [] if packs else matrices, matrices, dtype, progress)
            write_files(out, model_dir, raw, FAMILIES[network.model_type], dtype, kind)
    report.matrices = len(matrices)
    report.weights = sum(part.shape[0] * part.shape[1] for part in matrices)
    report.files = writer.names
    report.nbytes = writer.nbytes
    return report


def _packs(texts: Path, model_dir: Path, network: NetworkConfig) -> tuple[list[CalibrationPack], int]:
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


def _matrices(checkpoint: Checkpoint, kind: GroupKind, model_dir: Path) -> list[CheckpointPart]:
    """Weights to quantise: those of linear layers except the head. Raises ModelLoadError for a weight that cannot be
    quantised."""
    found = []
    for part in checkpoint.parts:
        layer, _, attribute = part.parameter.rpartition(".")
        linear = isinstance(checkpoint.model.get_submodule(layer), Linear)
        if attribute != "weight" or not linear or layer == "lm_head":
            continue
        if part.transposed:
            raise ModelLoadError(
                f"{model_dir}: weights of {checkpoint.model.config.model_type} models are stored transposed, which"
                " no quantised format is; llama, mistral, qwen2 and qwen3 models can be quantised"
            )
        if part.shape[1] % kind.group:
            fitting = [name for name, other in FORMATS.items() if part.shape[1] % other.group == 0]
            remedy = f"use --format {' or '.join(fitting)}" if fitting else "this model cannot be quantised"
            raise ModelLoadError(
                f"{model_dir}: tensor {part.name} has rows of {part.shape[1]} numbers, which groups of {kind.group} do"
                f" not divide; {remedy}"
            )
        found.append(part)
    return found


def _add_notes(
    report: QuantizeReport,
    checkpoint: Checkpoint,
    matrices: list[CheckpointPart],
    network: NetworkConfig,
    packs: list[CalibrationPack],
) -> None:
    stored = {str(kind): None for part in matrices if (kind := checkpoint.kind(part)) is not None}
    if stored:
        report.notes.append(
            f"the model is quantised already ({', '.join(stored)}): its weights are dequantised and rounded again,"
            " which loses more than quantising the original"
        )
    if network.dtype not in ("bfloat16", "float16"):
        report.notes.append("the embedding, the head and norms are rounded from float32 to bfloat16")
    widest = max((part.shape[1] for part in matrices), default=0)
    if packs and report.tokens < widest:
        report.notes.append(
            f"the calibration texts have {report.tokens:,} tokens, fewer than the {widest:,} inputs of the widest"
            " layer: give more for better weights"
        )


def _plan(
    checkpoint: Checkpoint, matrices: list[CheckpointPart], kind: GroupKind, dtype: torch.dtype
) -> Iterator[Planned]:
    for part in checkpoint.parts:
        if part not in matrices:
            yield Planned(part.name, dtype, part.shape[::-1] if part.transposed else part.shape)
            continue
        (n, k), layer = part.shape, part.name.removesuffix(".weight")
        yield Planned(f"{layer}.weight_packed", torch.int32, (n, k * kind.bits // 32))
        yield Planned(f"{layer}.weight_scale", dtype, (n, k // kind.group))
        yield Planned(f"{layer}.weight_shape", torch.int64, (2,))


def _write_rest(
    writer: ShardWriter,
    report: QuantizeReport,
    checkpoint: Checkpoint,
    to_round: list[CheckpointPart],
    matrices: list[CheckpointPart],
    dtype: torch.dtype,
    progress: Progress,
) -> None:
    """Write the tensors that are not quantised. Round the tensors ``to_round`` to the nearest codes, piece by piece,
    and write them."""
    total = sum(_numbers(part) for part in checkpoint.parts)
    done = 0
    for part in checkpoint.parts:
        for first, rows in () if part in matrices and part not in to_round else checkpoint.pieces(part):
            _check_finite(part, first, rows, dtype)
            if part in to_round:
                rounded, squares = round_rows(rows, report.kind, dtype)
                _write_matrix(writer, part, first, rounded)
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
    matrices: list[CheckpointPart],
    packs: list[CalibrationPack],
    dtype: torch.dtype,
    progress: Progress,
) -> None:
    """Write all weights that GPTQ quantises. The model is in memory only once, in its own dtype."""
    check_weights(model_dir, network, dtype)
    model = load_model(model_dir, network, progress=progress, weight_format=PLAIN)
    parts: dict[str, list[CheckpointPart]] = {}
    for part in matrices:
        parts.setdefault(part.parameter, []).append(part)
    found: Calibrated
    for found in calibrate(model, packs, report.kind, dtype, lambda share: progress("calibrating", share)):
        for part in parts[found.parameter]:
            _write_matrix(writer, part, 0, found.rows[part.start : part.start + part.shape[0]])
        report.squares.add(found.squares)
        report.output_errors.append((found.output_error, found.nearest_error))


def _write_matrix(writer: ShardWriter, part: CheckpointPart, first: int, rows: GroupedRows) -> None:
    layer = part.name.removesuffix(".weight")
    writer.write(f"{layer}.weight_packed", first, packed_words(rows.codes, rows.kind.bits))
    writer.write(f"{layer}.weight_scale", first, rows.scales)
    writer.write(f"{layer}.weight_shape", 0, torch.tensor(part.shape))


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
