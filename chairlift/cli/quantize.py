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
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.models.formats.quantize.run import QuantizeReport

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "write a model with its weights in 4 to 8 bits"
DESCRIPTION: Final = """Write a directory with the weights of a model in 4 to 8 bits.

MODEL is a directory, a Hub id, a GGUF file, or "bundled". OUT has the format of compressed-tensors (pack-quantized).
A quantised model is dequantised first.

  chairlift quantize MODEL OUT
  chairlift quantize MODEL OUT --format int4-small --calibrate texts.jsonl
  chairlift serve OUT

Weights are rounded to the nearest value. With --calibrate, GPTQ chooses the values so that the outputs of the layers
for these texts change as little as possible. Use texts like those that the model will read; chats must contain the
special tokens of their template. Without a FILE, the model writes the texts itself. GPTQ needs the memory of the whole
model, and the time of several passes over the texts."""

_FORMATS: Final = {
    "int4": "4 bits with zero points in groups of 32; 8 bits for what loses most, embedding and head (default)",
    "int4-small": "4 bits in groups of 32; 8 bits for embedding and head",
    "int4-g32": "4 bits in groups of 32; 16 bits for embedding and head",
    "int4-g128": "4 bits in groups of 128; 16 bits for embedding and head",
    "int5": "5 bits with zero points in groups of 32; 6 bits for what loses most, embedding and head; 8 bits in memory",
    "int8": "8 bits in groups of 32; 16 bits for embedding and head",
}
"""Names of the recipes in :mod:`chairlift.models.formats.quantize.recipes`, and what they are. They are repeated here,
because that module imports torch, which is slow."""
_OWN: Final = "own"
"""Value of ``--calibrate`` without a file."""
_OWN_SAMPLES: Final = 32
_OWN_TOKENS: Final = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift quantize``."""
    parser.add_argument("model", metavar="MODEL", help="directory, Hub id, GGUF file, or bundled")
    parser.add_argument("out", metavar="OUT", type=Path, help="output directory: empty or new")
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        default="int4",
        help="; ".join(f"{name}: {words}" for name, words in _FORMATS.items()),
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        nargs="?",
        const=_OWN,
        help='texts for GPTQ: a sample on each line or in each paragraph, or .jsonl with {"text": ...} on each line;'
        f" without FILE {_OWN_SAMPLES} texts of {_OWN_TOKENS} tokens that the model writes",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Quantise a model and print the result. Returns 0. Raises ChairliftError if it cannot run."""
    from chairlift.models.formats.quantize.run import quantize_model
    from chairlift.models.loader import resolve_model_dir

    bundled = Path(chairlift.__file__).parent / "assets"
    model_dir = bundled if args.model == BUNDLED_MODEL else resolve_model_dir(args.model)
    show = show_progress if sys.stderr.isatty() else lambda label, share: None
    texts = Path(args.calibrate) if args.calibrate not in (None, _OWN) else None
    samples = _own_samples(str(model_dir)) if args.calibrate == _OWN else texts
    report = quantize_model(model_dir, args.out, args.format, samples, show)
    if args.json:
        print(json.dumps(_record(args, report)))
        return 0
    for label, value in _lines(args, report):
        print(f"{label:14} {value}")
    return 0


def _own_samples(model: str) -> list[list[int]]:
    """Token ids of texts that the model writes, with temperature 1 and fixed seeds. They begin with BOS. In models
    without BOS, they begin with tokens spread over the vocabulary."""
    from chairlift import LLM, SamplingParams

    llm = LLM(model, max_num_seqs=_OWN_SAMPLES)
    if llm.tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer; give texts: --calibrate FILE")
    begin = llm.tokenizer.encode("")
    step = llm.tokenizer.backend.get_vocab_size() // _OWN_SAMPLES
    prompts = [begin or [seed * step] for seed in range(_OWN_SAMPLES)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=_OWN_TOKENS, seed=seed, ignore_eos=True)
        for seed in range(_OWN_SAMPLES)
    ]
    outputs = llm.generate(prompts, params)
    return [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]


def _record(args: argparse.Namespace, report: QuantizeReport) -> dict[str, Any]:
    record = {
        "model": args.model,
        "output": str(args.out),
        "format": args.format,
        "method": "gptq" if report.samples else "nearest",
        "matrices": report.matrices,
        "weights": report.weights,
        "squared_error": report.squares.share,
        "bits_per_weight": report.quantised_bytes * 8 / report.weights,
        "kinds": report.kinds,
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
    yield "format", f"{args.format}: {_FORMATS[args.format].removesuffix(' (default)')}"
    bits = report.quantised_bytes * 8 / report.weights
    yield "quantised", f"{report.matrices} matrices, {report.weights:,} weights, {bits:.2f} bits per weight"
    for kind, weights in report.kinds.items():
        yield "", f"{weights:,} weights are {kind}"
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
