"""Times decode steps on one GPU with and without the fusions of launches.

    python benchmarks/gpu_steps.py --shape qwen2.5-0.5b qwen3-0.6b --rows 1 8 64 200 --json gpu-steps.json

Each row decodes one token after a context of random keys and values; all rows take the most likely token. A variant is
a set of fusions, see ``FUSIONS`` in ``chairlift/kernels/triton/program.py``. All variants use the same weights and the
same KV cache, each with its own CUDA graph, and they take turns. A turn replays one graph several times and waits at
its end, so the time per step is the GPU's. Before each turn the state is reset, so that the context keeps its length.
The script also checks that the hidden states of all variants have the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_random_model import SHAPES, make

from chairlift import LLM
from chairlift.executor.backends.triton.triton_runner import DecodeKind
from chairlift.kernels.triton import program
from chairlift.kernels.triton.program import TritonProgram

VARIANTS = {
    "before": frozenset({"add_norm"}),
    "swiglu": frozenset({"add_norm", "linear_swiglu"}),
    "and norms": frozenset({"add_norm", "linear_swiglu", "linear_add_norm"}),
    "all": program.FUSIONS,
}
"""Name of a variant -> its fusions. All ratios are relative to the first variant."""
BLOCK_SIZE = 16


def load(model: Path, args: argparse.Namespace) -> LLM:
    """An engine with room for the largest batch and its context."""
    longest = args.context + args.steps + BLOCK_SIZE
    return LLM(
        model,
        device=args.device,
        dtype=args.dtype,
        kernels="triton",
        skip_tokenizer_init=True,
        batch_invariant=args.batch_invariant,
        max_num_seqs=max(args.rows),
        max_num_batched_tokens=1024,
        max_model_len=longest,
        block_size=BLOCK_SIZE,
        num_kv_blocks=max(args.rows) * -(-longest // BLOCK_SIZE) + 1,
    )


class Steps:
    """The decode step of ``num_rows`` rows after ``context`` tokens, recorded once for each variant."""

    def __init__(self, runner: Any, num_rows: int, context: int) -> None:
        self._runner, self._state = runner, runner._state
        self._sync: Callable[[], None] = torch.cuda.synchronize if runner.runs_ahead else lambda: None
        slots, width = np.arange(num_rows, dtype=np.int32), self._state.block_tables[0].shape[1]
        order = np.random.default_rng(0).permutation(num_rows * width).astype(np.int32)
        body, self._variants = runner._body, {}
        kind = DecodeKind(num_rows, truncates=False, keep=False, adapted=False)
        fusions = program.FUSIONS
        try:
            for name, program.FUSIONS in VARIANTS.items():
                how = body._kv, runner._device, body._multiprocessors, body._batch_invariant
                runner._body, runner._decodes = TritonProgram(body._nodes, body._output, *how), {}
                graph = runner._recorded(kind)
                self._variants[name] = runner._body, graph, runner._decodes  # which own the graph's input buffers
        finally:
            program.FUSIONS = fusions
        for group in range(len(self._state.block_tables)):
            self._state.note_tables(group, slots, order.reshape(num_rows, width))
        self._state.note("tokens", slots, 7 + slots)
        self._state.note("num_computed", slots, np.full(num_rows, context))
        self._state.note("slots", np.arange(num_rows), slots)
        self._state.flush()
        self._state.forget(slots)
        self._start = self._state._memory.clone()

    @torch.inference_mode()
    def run(self, name: str, count: int) -> tuple[float, torch.Tensor]:
        """(seconds per step, hidden states of the first step) of one turn of ``count`` steps."""
        self._runner._body, graph, _ = self._variants[name]
        self._state._memory.copy_(self._start)
        hidden = graph.replay().hidden.clone()
        self._sync()
        start = time.perf_counter()
        for _ in range(count - 1):
            graph.replay()
        self._sync()
        return (time.perf_counter() - start) / (count - 1), hidden


def measure(llm: LLM, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a record for each number of rows."""
    executor: Any = llm.engine.core.executor
    runner = executor._runner
    for cache in runner._kv_caches:
        for each in cache:
            each.normal_()
    for rows in args.rows:
        steps = Steps(runner, rows, args.context)
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        results = {}
        for turn in range(args.rounds + 1):
            for name in VARIANTS:
                seconds, results[name] = steps.run(name, args.steps)
                if turn:  # the first turn warms up
                    times[name].append(seconds * 1e3)
        first, *others = results.values()
        same = all(torch.equal(each, first) for each in others)
        medians = {name: statistics.median(each) for name, each in times.items()}
        paired = [[b / a for a, b in zip(times["before"], each, strict=True)] for each in times.values()]
        ratios = dict(zip(times, map(statistics.median, paired), strict=True))
        text = "  ".join(f"{name} {medians[name]:.4f} ms ({ratios[name]:.3f})" for name in VARIANTS)
        print(f"{rows:4d} rows  {text}  bits {'equal' if same else 'DIFFER'}", flush=True)
        yield {"rows": rows, "median_ms": medians, "ratio": ratios, "same_bits": same, "ms": times}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["qwen2.5-0.5b", "qwen3-0.6b"])
    parser.add_argument("--model", type=Path, nargs="*", default=[], help="model directories, instead of shapes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 200])
    parser.add_argument("--context", type=int, default=512, help="tokens of each row before the step")
    parser.add_argument("--steps", type=int, default=21, help="steps in a turn, at least 2; the first is not timed")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "chairlift-gpu", help="for models")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2 or min(args.rows) < 1:
        parser.error("--rounds and --rows must be at least 1, and --steps at least 2")
    return args


def main() -> None:
    args = parse_args()
    models = args.model or [make(args.work / shape, shape) for shape in args.shape]
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    record: dict[str, Any] = {"device": name, "context": args.context, "batch_invariant": args.batch_invariant}
    for model in models:
        print(f"{model.name}, {args.context} tokens of context, {name}", flush=True)
        record[model.name] = []
        for each in measure(load(model, args), args):
            record[model.name].append(each)
            if args.json:
                args.json.write_text(json.dumps(record, indent=1) + "\n")
    if not all(each["same_bits"] for model in models for each in record[model.name]):
        raise SystemExit("some variants computed other bits")


if __name__ == "__main__":
    main()
