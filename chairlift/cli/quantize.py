"""``chairlift quantize``: writes a quantised copy of a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import chairlift
from chairlift.cli.flags import show_progress
from chairlift.config import BUNDLED_MODEL

if TYPE_CHECKING:
    from chairlift.models.formats.quantize.run import QuantizeReport

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "write a model with its weights in 4 or 8 bits"
DESCRIPTION: Final = """Write a directory with the weights of a model's layers in 4 or 8 bits.

MODEL is a directory, a Hub id, a GGUF file, or "bundled". OUT has the format of compressed-tensors (pack-quantized),
which Chairlift, vLLM and transformers can read. The embedding and the output head stay in 16 bits. A quantised model is
dequantised first.

  chairlift quantize MODEL OUT --format int8
  chairlift quantize MODEL OUT --format int4-g32 --calibrate texts.jsonl
  chairlift serve OUT

Weights are rounded to the nearest value. With --calibrate, GPTQ chooses the values so that the outputs of the layers
for these texts change as little as possible. Use texts like those that the model will read; chats must contain the
special tokens of their template. GPTQ needs the memory of the whole model, and the time of several passes over the
texts."""

_FORMATS: Final = ("int4-g128", "int4-g32", "int8")
"""Names of the formats in :mod:`chairlift.models.formats.quantize.rounding`. They are repeated here, because that
module imports torch, which is slow."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift quantize``."""
    parser.add_argument("model", metavar="MODEL", help="directory, Hub id, GGUF file, or bundled")
    parser.add_argument("out", metavar="OUT", type=Path, help="output directory: empty or new")
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        required=True,
        help="4 bits in groups of 128 or 32 columns, or 8 bits in groups of 32",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        type=Path,
        help='texts for GPTQ: a sample on each line or in each paragraph, or .jsonl with {"text": ...} on each line',
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Quantise a model and print the result. Returns 0. Raises ChairliftError if it cannot run."""
    from chairlift.models.formats.quantize.run import quantize_model
    from chairlift.models.loader import resolve_model_dir

    bundled = Path(chairlift.__file__).parent / "assets"
    model_dir = bundled if args.model == BUNDLED_MODEL else resolve_model_dir(args.model)
    show = show_progress if sys.stderr.isatty() else lambda label, share: None
    report = quantize_model(model_dir, args.out, args.format, args.calibrate, show)
    if args.json:
        print(json.dumps(_record(args, report)))
        return 0
    for label, value in _lines(args, report):
        print(f"{label:14} {value}")
    return 0


def _record(args: argparse.Namespace, report: QuantizeReport) -> dict[str, Any]:
    record = {
        "model": args.model,
        "output": str(args.out),
        "format": args.format,
        "method": "gptq" if report.samples else "nearest",
        "matrices": report.matrices,
        "weights": report.weights,
        "squared_error": report.squares.share,
        "files": report.files,
        "bytes": report.nbytes,
        "notes": report.notes,
    }
    if not report.samples:
        return record | {"squared_error_of_largest": report.squares.share_of_largest}
    found, nearest = _mean_errors(report)
    return record | {
        "samples": report.samples,
        "tokens": report.tokens,
        "output_error": found,
        "output_error_of_nearest": nearest,
    }


def _mean_errors(report: QuantizeReport) -> tuple[float, float]:
    """Mean relative squared errors of the layers' outputs: (error with the written weights, error with weights rounded
    to the nearest value)."""
    count = len(report.output_errors)
    return sum(each for each, _ in report.output_errors) / count, sum(each for _, each in report.output_errors) / count


def _lines(args: argparse.Namespace, report: QuantizeReport) -> Iterator[tuple[str, str]]:
    yield "model", args.model
    yield "format", f"{args.format}: {report.kind}, symmetric"
    yield "layers", f"{report.matrices} matrices, {report.weights:,} weights"
    error = f"squared error {report.squares.share:.3%} of the weights' squares"
    if report.samples:
        yield "calibration", f"GPTQ on {report.samples:,} samples, {report.tokens:,} tokens"
        found, nearest = _mean_errors(report)
        yield (
            "error",
            f"squared error of the layers' outputs {found:.3%}, mean over layers; weights rounded to the nearest:"
            f" {nearest:.3%}",
        )
        yield "", error
    else:
        yield "error", f"{error}; with scales of each group's largest: {report.squares.share_of_largest:.3%}"
    count = f"{len(report.files)} files" if len(report.files) > 1 else "1 file"
    yield "written", f"{args.out}: {count} of weights, {report.nbytes / 2**20:,.1f} MiB"
    for note in report.notes:
        yield "note", note
