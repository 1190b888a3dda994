"""``chairlift train``: trains a model from a file of settings, and writes a directory that ``chairlift serve`` can
load."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chairlift.cli.flags import whole
from chairlift.config import LoRAConfig

if TYPE_CHECKING:
    from chairlift_train.config import TrainConfig
    from chairlift_train.evaluation import EvaluationResult
    from chairlift_train.networks import Network
    from chairlift_train.run import Outcome
    from chairlift_train.trainer import Trainer, TrainingStepResult

__all__ = ["DESCRIPTION", "SUMMARY", "Speed", "add_arguments", "run"]

SUMMARY: Final = "train a model on packed sequences"
DESCRIPTION: Final = """Train a new model, or a model from a directory, on packed sequences.

Chairlift computes native families. transformers computes other causal language models, if their packed sequences do not
affect each other (model.impl).

CONFIG is YAML, with the sections model, data, packing, training and checkpoints:

  model: {path: DIR}                      # or for a new model, config: config.json and tokenizer: DIR
  data: {files: [chats.jsonl]}            # chats, prompt + completion, text or input_ids on each line
  packing: {capacity: 4096, step: "packs:8"}
  training: {steps: 1000, learning_rate: 2e-5, warmup_steps: 50}
  lora: {r: 16, alpha: 32}                # an adapter (LoRA, in PEFT's format) instead of the whole model
                                          # or several adapters at once: {adapters: {law: {r: 16}, med: {r: 8}}}
  heads: {method: medusa, num_heads: 4}   # or heads that draft: medusa, eagle3 (docs/speculation.md)
  output: OUT

With data.eval_files, each checkpoint records its loss on these files, and OUT/best is the checkpoint with the lowest.

Every checkpoint can be served (chairlift serve OUT/step-...). A run that was stopped or killed resumes from the newest
checkpoint, with the same result as an uninterrupted run. Ctrl-C writes a checkpoint after the running step and stops.

  chairlift train config.yaml --set training.steps=50 --output OUT
  torchrun --nproc-per-node 2 -m chairlift train config.yaml"""

_QUIET_TERMINAL_SECONDS: Final = 30.0
_BAR_FORMAT: Final = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift train``."""
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file with the settings of the run")
    parser.add_argument(
        "--resume",
        metavar="HOW",
        default="auto",
        help="auto (from the newest checkpoint in the output directory, if any), never, or a checkpoint's directory "
        "(default: auto)",
    )
    parser.add_argument("--output", metavar="DIR", help="directory for the checkpoints")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set a key of CONFIG, such as training.steps=500; may be repeated",
    )
    parser.add_argument(
        "--processes",
        metavar="N",
        type=whole,
        default=1,
        help="number of data-parallel processes on this machine (default: 1)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Train. Returns 0, or 130 after an interruption. Raises ChairliftError if it cannot run."""
    from chairlift_train.config import TrainConfig

    overrides = [*args.overrides, *([] if args.output is None else [f"output={args.output}"])]
    config = TrainConfig.from_file(args.config, overrides)
    if args.processes != 1:
        from chairlift_train.parallel import launch
        from chairlift_train.run import prepare

        prepare(config, resume=args.resume, ranks=max(1, args.processes))  # launch reports a lower number
        flags = ["--resume", args.resume, *(["--quiet"] if args.quiet else [])]
        for override in overrides:
            flags += ["--set", override]
        return launch(["train", str(args.config), *flags], args.processes)
    from chairlift_train.run import train

    is_first = os.environ.get("RANK", "0") == "0"
    with _Progress(config.training.steps, shown=is_first and not args.quiet) as progress:
        outcome = train(config, resume=args.resume, **progress.callbacks)
    if is_first:
        _print_result(outcome, args, config)
    return 0 if outcome.finished else 130


def _print_result(outcome: Outcome, args: argparse.Namespace, config: TrainConfig) -> None:
    if outcome.skipped:
        records = "1 record" if outcome.skipped == 1 else f"{outcome.skipped:,} records"
        named = outcome.notes.skipped_text(outcome.skipped)
        print(f"left out {records} that could not be used (on_error: skip){named}", file=sys.stderr)
    for line in outcome.notes.lines():
        print(line, file=sys.stderr)
    for source, cut in outcome.cut.items():
        rest = f"; nothing to learn was left of {cut.left_out:,}, which are left out" if cut.left_out else ""
        print(
            f"{source}: {cut.sequences:,} sequences did not fit in a pack and lost {cut.tokens:,} tokens, "
            f"{cut.targets:,} of them to learn{rest} (packing.overflow, packing.capacity)",
            file=sys.stderr,
        )
    if outcome.dropped:
        print(
            f"left out {outcome.dropped:,} sequences that did not fit in a pack (packing.overflow, packing.capacity)",
            file=sys.stderr,
        )
    if not outcome.finished:
        print(f"stopped after step {outcome.steps:,}; everything is in {outcome.directory}")
        flags = [part for override in args.overrides for part in ("--set", override)]
        flags += ["--output", args.output] if args.output else []
        processes = os.environ.get("WORLD_SIZE", "1")
        flags += ["--processes", processes] if processes != "1" else []
        print(f"go on with: {shlex.join(['chairlift', 'train', str(args.config), *flags])}")
        return
    if outcome.best is not None:
        step, best = outcome.best
        print(f"lowest loss on eval_files: {best:.4f} after step {step:,}, in {outcome.directory.parent / 'best'}")
    loss = "" if outcome.last is None else f", loss {outcome.last.loss:.4f}"
    before = "nothing is left to do: " if outcome.last is None else ""
    adapters = {} if config.lora is None else config.lora.by_name or {"mine": config.lora}
    if config.lora is None:
        what = "model is"
    elif len(adapters) == 1:
        what = "adapter is"
    else:
        what = "adapters are"
    if config.heads is not None:
        what = "Medusa heads are" if config.heads.method == "medusa" else "EAGLE-3 layer is"
    print(f"{before}trained {outcome.steps:,} steps{loss}; the {what} in {outcome.directory}")
    served = [str(outcome.directory)]
    if config.lora is not None:
        served = [str(config.model.path), "--enable-lora"]
        for name in adapters:
            directory = outcome.directory / name if config.lora.adapters else outcome.directory
            served += ["--lora-modules", f"{name}={directory}"]
        rank = max(each.r for each in adapters.values())
        served += ["--max-lora-rank", str(rank)] if rank > LoRAConfig().max_lora_rank else []
    if config.heads is not None:
        drafter = json.dumps({"method": config.heads.method, "model": str(outcome.directory)})
        served = [str(config.model.path), "--speculative-config", drafter]
    print(f"serve it with: {shlex.join(['chairlift', 'serve', *served])}")


class Speed:
    """Measures the speed of a run. The first step is slower than others, so it counts only until the second ends."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = self._last = (clock(), 0)
        self._num_steps = 0
        self._tokens = 0

    def begin(self, step: int) -> None:
        """Start the clock before the step after ``step``."""
        self._since = self._last = (self._clock(), step)

    def add(self, step: int, num_tokens: int) -> None:
        """Count a step of ``num_tokens`` tokens that has just ended."""
        self._num_steps += 1
        if self._num_steps == 2:
            self._since = self._last
            self._tokens = 0
        self._last = (self._clock(), step)
        self._tokens += num_tokens

    def rates(self, steps: int) -> tuple[float, float]:
        """(tokens per second, seconds until step ``steps`` ends). Call it after :meth:`add`."""
        now, step = self._last
        seconds = max(now - self._since[0], 1e-9)
        return self._tokens / seconds, (steps - step) * seconds / max(1, step - self._since[1])


class _Progress:
    """Shows the remaining time, loss, tokens per second and packing waste: as a bar on a terminal, otherwise as a line
    at intervals."""

    def __init__(self, steps: int, *, shown: bool) -> None:
        self._steps = steps
        self._shown = shown
        self._bar: Any = None
        self._speed = Speed()
        self._is_first = True
        self._changes = 0

    @property
    def callbacks(self) -> dict[str, Any]:
        """Arguments of :func:`~chairlift_train.run.train`."""
        return {
            "on_step": self,
            "on_evaluation": self.on_evaluation,
            "on_start": self.on_start,
            "on_begin": self.on_begin,
        }

    def on_start(self, network: Network) -> None:
        """Print a line that names the implementation that trains the model."""
        if self._shown:
            print(f"model: {network}", file=sys.stderr)

    def on_begin(self, trainer: Trainer) -> None:
        """Show the bar before the first step."""
        if not self._shown or trainer.num_steps >= self._steps:
            return
        from tqdm import tqdm

        pause = 0.1 if sys.stderr.isatty() else _QUIET_TERMINAL_SECONDS
        self._bar = tqdm(
            total=self._steps, initial=trainer.num_steps, mininterval=pause, bar_format=_BAR_FORMAT, file=sys.stderr
        )
        self._speed.begin(trainer.num_steps)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def on_evaluation(self, result: EvaluationResult) -> None:
        """Print a line with the evaluation loss of each source."""
        if not self._shown:
            return
        rows = {"evaluation": result.total, **(result.sources if len(result.sources) > 1 else {})}
        texts = [f"{name}: loss {row.loss:.4f}, perplexity {row.perplexity:,.2f}" for name, row in rows.items()]
        line = f"step {result.step:,}, {'; '.join(texts)}"
        if self._bar is None:
            print(line, file=sys.stderr)
        else:
            self._bar.write(line, file=sys.stderr)

    def __call__(self, result: TrainingStepResult, trainer: Trainer) -> None:
        if self._bar is None:
            return
        self._speed.add(result.step, result.num_tokens)
        rate, seconds = self._speed.rates(self._steps)
        left = f"{self._bar.format_interval(seconds)} left"
        waste = trainer.stream.stats().waste if trainer.stream is not None else 0.0
        balance = f", balance {result.balance_loss:.3f}" if result.balance_loss else ""
        own = [f"{name} {each.loss:.4f}" for name, each in result.adapters.items() if each.num_targets]
        if len(own) > 4:
            own = [*own[:4], "..."]
        some = f" ({', '.join(own)})" if own else ""
        self._bar.set_postfix_str(
            f"{left}, loss {result.loss:.4f}{some}{balance}, {rate:,.0f} tok/s, waste {waste:.2%}", refresh=False
        )
        events = [] if trainer.drift is None else trainer.drift.events
        for event in events[self._changes :]:
            means = f"mean {event.before:.3f} before, {event.after:.3f} since"
            self._bar.write(f"{event.source} has changed, after {event.drawn:,} sequences ({means})", file=sys.stderr)
        self._changes = len(events)
        self._bar.update(1)
        if self._is_first:  # at once, so that a reader of the log sees progress
            self._bar.refresh()
            self._is_first = False
