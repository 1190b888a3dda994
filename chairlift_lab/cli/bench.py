"""``chairlift bench``: measures the kernels and the engine, and compares them with the limits of this machine."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import chairlift
from chairlift.base.writing import check_writable, replacing
from chairlift.cli.flags import add_engine_flags, read_settings
from chairlift.cli.flags import whole_number as _number
from chairlift.config import BUNDLED_MODEL, EngineConfig, flat_fields
from chairlift.errors import ConfigError
from chairlift_lab.cli import bench_offline, bench_presets, bench_serve

if TYPE_CHECKING:
    import torch

    from chairlift_lab.bench.kernels import KernelSettings
    from chairlift_lab.bench.limits import Limits
    from chairlift_lab.bench.machine import HostMachine
    from chairlift_lab.bench.report import Report

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "measure kernels, the engine and servers"
DESCRIPTION: Final = (
    "Measure kernels and the engine against the limits of this machine, or servers with traffic. See "
    "chairlift bench NAME --help."
)

_KERNELS: Final = """Measure the speed of the compiled CPU kernels, as a fraction of this machine's limits.

The command first measures the limits: memory bandwidth, and the speed of the multiply-add instructions. A kernel has
two minimum times: for reading its weights (or K and V), and for its arithmetic. The longer one is its floor. The limits
are measured just before and after each kernel, because those of a virtual machine change within seconds.
All data comes from memory, not from a cache. For a layer of experts, only the chosen experts' weights count. Attention
is measured over blocks in shuffled order, as in a paged cache, and over blocks in order. Run the command on an
otherwise idle machine.

With --device cuda it measures the Triton kernels in CUDA graphs. The limits are then the speed of a copy within the
GPU's memory and of a large matmul by cuBLAS. Matmuls of few rows are also measured with cuBLAS."""
_STARTUP: Final = """Measure the time from the start of a new process to its first token.

The command measures two kinds of processes: a Python program (interpreter, import, loading the model, first token), and
a server (until /ready is 200, then the first token over HTTP). A first round, which does not count, warms the file
cache. The engine's settings apply to both."""

_print: Final = functools.partial(print, sep="\n", flush=True)
_CODES: Final = {"int8": (8, 32), "int4": (4, 32), "int4-g128": (4, 128)}
"""Value of ``--dtype`` -> (bits per weight, number of weights that share one scale)."""
_DEFAULT_SHAPES: Final = "qwen2.5-0.5b,smollm-135m"
_DEFAULT_EXPERTS: Final = "8of32:1024x512"
"""Shape of an expert layer of Granite 3 1B-A400M, which is measured on the CPU."""
_QUICK: Final[dict[str, Any]] = {
    "shapes": "smollm-135m",
    "rows": (1, 16, 256),
    "contexts": (128, 2048),
    "batches": (1, 8),
    "seconds": 0.002,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and their flags."""
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="NAME", dest="benchmark", required=True)
    for name, summary, description, add in (
        ("kernels", "time the compiled CPU kernels, or the Triton kernels", _KERNELS, _add_kernel_flags),
        ("offline", bench_offline.SUMMARY, bench_offline.DESCRIPTION, bench_offline.add_arguments),
        ("presets", bench_presets.SUMMARY, bench_presets.DESCRIPTION, bench_presets.add_arguments),
        ("serve", bench_serve.SUMMARY, bench_serve.DESCRIPTION, bench_serve.add_arguments),
        ("startup", "time processes from their start to their first token", _STARTUP, _add_startup_flags),
    ):
        benchmark = benchmarks.add_parser(name, help=summary, description=description)
        verbose = "log more, and print tracebacks"
        benchmark.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=verbose)
        benchmark.add_argument("--json", metavar="FILE", type=Path, help="write settings and results to this file")
        benchmark.set_defaults(parser=benchmark)
        add(benchmark)


def run(args: argparse.Namespace) -> int:
    """Run one benchmark. Returns 0, or another exit code of the benchmark. Raises ChairliftError if it cannot run."""
    for flag, other in (("json", "html"), ("html", "json")):
        others = [getattr(args, each, None) for each in (other, "trace", "config")]
        check_writable(getattr(args, flag, None), flag, *others)
    measure = {
        "kernels": _run_kernels,
        "offline": bench_offline.run,
        "presets": bench_presets.run,
        "serve": bench_serve.run,
        "startup": _run_startup,
    }
    report, code = measure[args.benchmark](args)
    if args.json is not None:
        with replacing(args.json) as file:
            file.write(json.dumps({"chairlift": chairlift.__version__, **report.record}, indent=1) + "\n")
    if getattr(args, "html", None) is not None:
        with replacing(args.html) as file:
            file.write(report.html())
    return code


# --- kernels ---------------------------------------------------------------------------------------------------------


def _add_kernel_flags(parser: argparse.ArgumentParser) -> None:
    paths = [
        path
        for flag in flat_fields()
        if flag.name == "kernels"
        for path in flag.choices or ()
        if path not in ("torch", "triton")
    ]
    parser.add_argument("--threads", metavar="N", type=_number(1, 256), help="CPU threads (default: one per processor)")
    parser.add_argument("--kernels", choices=paths, default="auto", help="instruction-set path (default: the best)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", *_CODES, "fp8"),
        default="bfloat16",
        help="int8, int4, int4-g128: linear layers and output heads with quantised weights and bfloat16 activations; "
        "fp8: linear layers with fp8 weights, on a GPU (default: bfloat16)",
    )
    parser.add_argument(
        "--shapes",
        metavar="LIST",
        help="models (qwen2.5-0.5b, smollm-135m, qwen3-0.6b, llama-3.2-1b, granite-3-1b-a400m, olmoe-1b-7b, "
        "qwen3-30b-a3b), linear layers KxN (inputs x outputs), and on the CPU layers of experts CofE:KxI (C of E "
        f"experts per token, inputs x inner columns) (default: {_DEFAULT_SHAPES} and on the CPU {_DEFAULT_EXPERTS})",
    )
    for name, maximum, text in (
        ("rows", 65_536, "tokens per linear layer (default: 1,4,16,32,64,256,1024)"),
        ("contexts", 131_072, "tokens that attention reads (default: 128,512,2048,8192)"),
        ("batches", 4096, "sequences that decode together (default: 1,8,32)"),
    ):
        parser.add_argument(f"--{name}", metavar="LIST", type=_numbers(1, maximum), help=text)
    parser.add_argument(
        "--quick", action="store_true", help="fewer shapes and shorter runs, as a test; not a measurement"
    )


def _run_kernels(args: argparse.Namespace) -> tuple[Report, int]:
    import torch

    from chairlift.loading.model import device_name
    from chairlift_lab.bench.kernel_report import doubts, kernel_table, limits_record, limits_table
    from chairlift_lab.bench.kernels import measure_kernels
    from chairlift_lab.bench.limits import measure_device, measure_limits
    from chairlift_lab.bench.machine import describe_machine, machine_facts
    from chairlift_lab.bench.report import Facts, Report, text

    machine = describe_machine()
    settings = _kernel_settings(args, machine)
    device = torch.device(settings.device)

    def limits_now(*, quick: bool) -> Limits:
        if device.type == "cpu":
            return measure_limits(machine, settings.threads, quick=quick)
        return measure_device(device, settings.dtype, quick=quick)

    where = f"threads: {settings.threads}" if device.type == "cpu" else device_name(device)
    about = machine_facts(dataclasses.asdict(machine)) | {"kernels": f"{settings.isa} in {args.dtype}, {where}"}
    _print(*text(Facts(about)), "")
    try:
        limits = limits_now(quick=args.quick)
        _print(*text(limits_table(limits_record(limits))))
        measured = []
        for measurements in measure_kernels(settings, machine, limits):
            _print("", *text(kernel_table(measurements)))
            measured += measurements
        after = limits_now(quick=device.type == "cpu" or args.quick)
    except (OSError, torch.OutOfMemoryError) as error:  # too many threads, or a GPU without free memory
        raise ConfigError(str(error)) from None
    roofs = [each.roof(settings.isa, settings.dtype, settings.threads) for each in (limits, after)]
    _print("", *doubts(machine, *roofs, followed=device.type == "cpu"))
    record = {
        "benchmark": "kernels",
        "machine": dataclasses.asdict(machine),
        "settings": dataclasses.asdict(settings) | {"dtype": args.dtype},
        "limits": limits_record(limits),
        "limits_after": limits_record(after),
        "results": [dataclasses.asdict(each) for each in measured],
    }
    return Report(record), 0


def _kernel_settings(args: argparse.Namespace, machine: HostMachine) -> KernelSettings:
    import torch

    from chairlift.kernels.grouped import GroupKind
    from chairlift_lab.bench.kernels import KernelSettings
    from chairlift_lab.bench.shapes import Shapes

    names = ("shapes", "rows", "contexts", "batches")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    options = {"shapes": _DEFAULT_SHAPES} | (_QUICK if args.quick else {})
    if args.device == "cpu":
        options["shapes"] += f",{_DEFAULT_EXPERTS}"
    options |= given
    kind = None if args.dtype not in _CODES else GroupKind(*_CODES[args.dtype])
    if kind:
        dtype = torch.bfloat16
    elif args.dtype == "fp8":
        dtype = torch.float8_e4m3fn
    else:
        dtype = getattr(torch, args.dtype)
    shapes = Shapes.parse(options["shapes"])
    if args.device != "cpu" and shapes.experts:
        name = shapes.experts[0].name
        raise ConfigError(
            f"{name}: there are no GPU kernels for experts to measure (PyTorch computes them); leave it out"
        )
    if args.dtype == "fp8" and (odd := [each for each in shapes.products if each.k % 16 or each.n % 16]):
        raise ConfigError(f"{odd[0].k}x{odd[0].n}: the sizes of products in fp8 must be multiples of 16; give others")
    return KernelSettings(
        threads=args.threads or machine.processors if args.device == "cpu" else 1,
        isa=_path(args, machine, dtype),
        dtype=dtype,
        device=args.device,
        kind=kind,
        **{**options, "shapes": shapes},
    )


def _path(args: argparse.Namespace, machine: HostMachine, dtype: torch.dtype) -> str:
    """Instruction set of the kernels to measure, or ``gpu``. Raises ConfigError if the machine cannot run them."""
    import torch

    from chairlift.executor.backends.native.backend import why_not_isa
    from chairlift.executor.backends.triton.backend import TritonBackend
    from chairlift.kernels.cpu.library import best_isa, why_unavailable
    from chairlift.kernels.roof import GPU
    from chairlift.loading.model import find_device

    EngineConfig.from_flat({"device": args.device})
    if args.device != "cpu" and args.dtype in _CODES:
        raise ConfigError(f"dtype is {args.dtype}, and weights in codes are for the CPU; leave --device out")
    if args.device != "cpu":
        if args.kernels != "auto" or args.threads:
            raise ConfigError(f"--kernels and --threads are for the CPU, and device is {args.device}; leave them out")
        device = find_device(args.device)
        triton = TritonBackend.choose("auto")
        too_old = triton.why_not_weights("fp8", torch.bfloat16, device) if args.dtype == "fp8" else ""
        if reason := triton.why_not(None, dtype, device, 16) or too_old:
            raise ConfigError(f"there are no kernels to measure: {reason}")
        return GPU
    if args.dtype == "fp8":
        raise ConfigError("dtype is fp8, and weights in fp8 are for GPUs; use --device cuda, or another dtype")
    best = best_isa()
    if best is None:
        raise ConfigError(f"there are no kernels to measure: {why_unavailable()}")
    if args.kernels not in ("auto", *machine.isas):
        raise ConfigError(why_not_isa(args.kernels))
    return best if args.kernels == "auto" else args.kernels


# --- startup ---------------------------------------------------------------------------------------------------------


def _add_startup_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory or Hub id (default: the bundled model)")
    parser.add_argument("--rounds", metavar="N", type=_number(1, 1000), default=5, help="processes (default: 5)")
    add_engine_flags(parser, leave_out={"model"})


def _run_startup(args: argparse.Namespace) -> tuple[Report, int]:
    settings, _ = read_settings(args, sampling=False)
    if args.model is not None:
        settings |= {"model": args.model}
    from chairlift_lab.bench.machine import describe_machine, machine_facts
    from chairlift_lab.bench.report import Facts, Report, text
    from chairlift_lab.bench.startup import measure_startup, startup_lines

    machine = dataclasses.asdict(describe_machine())
    _print(*text(Facts(machine_facts(machine) | {"model": settings.get("model", BUNDLED_MODEL)})), "")
    seconds = measure_startup(settings, args.rounds)
    _print(*startup_lines(seconds))
    record = {"benchmark": "startup", "machine": machine, "settings": settings, "rounds": args.rounds}
    return Report(record | {"seconds": seconds}), 0


# --- flags -----------------------------------------------------------------------------------------------------------


def _numbers(minimum: int, maximum: int) -> Callable[[str], tuple[int, ...]]:
    """Parser of comma-separated whole numbers. Repeated numbers are dropped."""
    number = _number(minimum, maximum)
    return lambda text: tuple(dict.fromkeys(number(item.strip()) for item in text.split(",")))
