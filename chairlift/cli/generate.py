"""``chairlift generate``: generates answers for many prompts in one batch. The prompts come from the command line, a
JSONL file or standard input."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from chairlift.base.outputs import CompletionOutput, Logprob, RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.writing import check_writable
from chairlift.cli.flags import add_engine_flags, add_sampling_flags, load_llm, read_settings
from chairlift.cli.prompt_files import Job, line_jobs, read_prompts_file, text_job
from chairlift.engine.interrupt import held_interrupt
from chairlift.errors import ChairliftError, ConfigError, RequestError

if TYPE_CHECKING:
    from chairlift.engine.step_log import StepLog
    from chairlift.llm import LLM

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "answer prompts in one continuous batch"
DESCRIPTION: Final = """Answer prompts in one continuous batch.

Prompts are arguments, or lines of standard input (no PROMPT, or -), and answers are printed as text. With
--prompts-file they are JSON objects, one per line, and answers are JSON lines in the same order:

  {"prompt": "Hi"}    {"prompt": [1, 2, 3]}    {"messages": [{"role": "user", "content": "Hi"}]}

Each object may have an "id" and any sampling parameter by name, such as "max_tokens": 32. An answer has index, id,
prompt, prompt_token_ids, outputs (text, token_ids, finish_reason), usage and error, and a copy of the object's other
keys. chairlift train can read these answers. A line that cannot be answered gets an error in its answer; the other
lines are answered.

The file may be HumanEval's, GSM8K's (--prompt-field question), MT-Bench's ("turns", each answered in its conversation),
a file for OpenAI's batch API, or plain text with a prompt per line. Any of these may be gzipped, or be Parquet.

The answer to a single prompt is printed while it is generated. After Ctrl-C the finished answers are kept, and the
other prompts get an error.

If the model has a chat template, a text prompt becomes the user's message in it; --raw skips the template.
Answers are greedy (temperature 0) and at most 256 tokens long unless flags change this."""

_MAX_TOKENS: Final = 256
_REFRESH_SECONDS: Final = 0.2
_INTERRUPTED: Final = 130
_STOPPED: Final = "stopped with Ctrl-C before its answer was complete"
_CLASHING: Final = "input"
"""Key in an output record under which input fields are stored whose names clash with output keys."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift generate``."""
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="*", help="a prompt; - reads one per line from standard input"
    )
    parser.add_argument(
        "--prompts-file", metavar="FILE", help="prompts as JSON lines or as lines of text; - is standard input"
    )
    parser.add_argument("--prompt-field", metavar="NAME", help="key of the prompt in the records of --prompts-file")
    parser.add_argument(
        "--output", "-o", metavar="FILE", type=Path, help="write the answers to this file, as JSON lines"
    )
    parser.add_argument("--force", action="store_true", help="overwrite --output if it exists")
    parser.add_argument("--jsonl", action="store_true", help="print JSON lines, also for prompts given as text")
    parser.add_argument("--raw", action="store_true", help="do not apply the model's chat template to text prompts")
    parser.add_argument("--quiet", "-q", action="store_true", help="no progress bar")
    add_sampling_flags(parser, _MAX_TOKENS)
    parser.add_argument(
        "--json-schema", metavar="FILE", type=Path, help="make every answer follow the JSON schema in this file"
    )
    # --seed is the one of sampling: an engine seed would give each prompt a seed of its own.
    add_engine_flags(parser, leave_out={"seed"})


def run(args: argparse.Namespace) -> int:
    """Answer all prompts. Returns 0 if all were answered, 1 if some were, 2 if none, 130 after Ctrl-C."""
    engine, sampling = read_settings(args, sampling=True)
    if args.json_schema is not None:
        sampling["structured_outputs"] = {"json": _read_schema(args.json_schema)}
    shared = SamplingParams.from_dict(sampling)  # reports a fault of all jobs once, before the model loads
    jobs = _read_jobs(args)
    streamed = _Streamed() if len(jobs) == 1 and shared.n == 1 and not _wants_json(args) else None
    with contextlib.ExitStack() as stack:
        if _wants_json(args):
            write = stack.enter_context(_json_writer(args.output, args.force))
        else:
            write = _text_writer(len(jobs), streamed)
        llm = None if all(job.done for job in jobs) else load_llm(engine, args.quiet)
        interrupted = stack.enter_context(held_interrupt())
        run = _Run(jobs, llm, sampling, raw=args.raw, quiet=args.quiet, streamed=streamed)
        for job in run.answered(interrupted):
            if job.error is not None and job.error != _STOPPED:
                print(f"chairlift: error: {job.place}: {' '.join(job.error.split())}", file=sys.stderr)
            write(job)
        if run.stopped:
            if len(jobs) > 1:
                number = f"{len(run.stopped):,} of {len(jobs):,}"
                print(f"chairlift: stopped with Ctrl-C; {number} prompts have no answer", file=sys.stderr)
            return _INTERRUPTED
    failed = sum(job.error is not None for job in jobs)
    if not failed:
        return 0
    if failed < len(jobs):
        return 1
    return 2


# --- prompts in ------------------------------------------------------------------------------------------------------


def _read_jobs(args: argparse.Namespace) -> list[Job]:
    if args.prompt_field is not None and args.prompts_file is None:
        raise ConfigError("--prompt-field names a key of the records in --prompts-file, which is not given")
    if args.prompts_file is not None:
        if args.prompts:
            raise ConfigError("give prompts as arguments or as --prompts-file, not both")
        if args.output is not None and args.output.is_file() and _same_file(args.prompts_file, args.output):
            raise ConfigError(f"--output {args.output} is the prompts file, which would be lost; give another --output")
        jobs = read_prompts_file(args.prompts_file, args.prompt_field)
        source = f"the prompts file {args.prompts_file}"
    elif args.prompts and args.prompts != ["-"]:
        _refuse_model_paths(args.prompts)
        return [text_job(i, f"prompt {i + 1}", prompt) for i, prompt in enumerate(args.prompts)]
    elif sys.stdin.isatty() and not args.prompts:
        raise ConfigError('no prompt; give one (chairlift generate "Hi"), a --prompts-file, or lines on standard input')
    else:
        jobs = line_jobs("-")
        source = "standard input"
    if not jobs:
        raise ConfigError(f"{source} holds no prompts; write one per line")
    return jobs


def _refuse_model_paths(prompts: Sequence[str]) -> None:
    """Raise ConfigError if a prompt is the path of a model on this machine: a GGUF file, or a directory with
    config.json. The user probably wanted ``--model``."""
    for prompt in prompts:
        path = Path(prompt)
        kind = ""
        with contextlib.suppress(OSError, ValueError):  # most prompts are no paths: too long, or with a NUL
            if path.suffix == ".gguf" and path.is_file():
                kind = "a GGUF file"
            elif path.is_dir() and (path / "config.json").is_file():
                kind = "a model directory"
        if kind:
            raise ConfigError(f"{prompt} is given as a prompt, but is {kind}; give it as --model {prompt}")


def _read_schema(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the schema {path}: {reason}; give another --json-schema") from None


def _same_file(one: str, other: Path) -> bool:
    try:
        return other.samefile(one)
    except OSError:
        return False


# --- answers ---------------------------------------------------------------------------------------------------------


class _Run:
    """Runs jobs in one batch. Each turn of a conversation is a request, which is sent when the previous turn has
    ended."""

    def __init__(
        self,
        jobs: Sequence[Job],
        llm: LLM | None,
        sampling: Mapping[str, Any],
        *,
        raw: bool,
        quiet: bool,
        streamed: _Streamed | None,
    ) -> None:
        self._jobs = jobs
        self._llm = llm
        self._sampling = sampling
        self._raw = raw
        self._quiet = quiet
        self._streamed = streamed
        self._running: dict[str, Job] = {}
        self.stopped: list[Job] = []
        """Jobs that had not ended when Ctrl-C was pressed."""

    def answered(self, interrupted: Callable[[], bool]) -> Iterator[Job]:
        """The jobs in order. A job is yielded when it and all earlier jobs have ended. After Ctrl-C, all remaining
        jobs are yielded."""
        for job in self._jobs:
            if not job.done:
                self._send(job)
        given = 0
        total = len(self._jobs)
        show = not self._quiet and self._streamed is None and sys.stderr.isatty()
        with _Progress(total, total - len(self._running), show=show) as progress:
            while given < total:
                if self._running and interrupted():
                    self._stop()
                if self._jobs[given].done:
                    progress.hide()
                while given < total and self._jobs[given].done:
                    yield self._jobs[given]
                    given += 1
                if self._llm is not None and self._running:
                    progress.step(self._llm.engine.step_log, self._step(self._llm))

    def _step(self, llm: LLM) -> list[RequestOutput]:
        """Run one step of the engine. Returns the outputs of jobs that ended in it."""
        ended = []
        for output in llm.engine.step():
            job = self._running[output.request_id]
            if self._streamed is not None and not job.turns:
                self._streamed.show(output.outputs[0].text)
            if not output.finished:
                continue
            del self._running[output.request_id]
            if output.error is None and job.turns:
                self._next_turn(job, output)
                continue
            job.output = output
            job.error = output.error
            ended.append(output)
        return ended

    def _next_turn(self, job: Job, output: RequestOutput) -> None:
        text = output.outputs[0].text
        job.answers.append(text)
        said = [{"role": "assistant", "content": text}, {"role": "user", "content": job.turns.pop(0)}]
        job.prompt = [*job.prompt, *said]
        self._send(job)

    def _send(self, job: Job) -> None:
        if self._llm is None:
            return
        try:
            request_id = _submit(self._llm, job, self._sampling, self._raw, stream=self._streamed is not None)
        except ChairliftError as error:
            job.error = str(error)
        else:
            self._running[request_id] = job

    def _stop(self) -> None:
        self.stopped = list(self._running.values())
        for job in self.stopped:
            job.error = _STOPPED
        self._running.clear()


def _submit(llm: LLM, job: Job, sampling: Mapping[str, Any], raw: bool, *, stream: bool) -> str:
    prompt = job.prompt
    if job.is_chat:
        prompt = llm.encode_chat(prompt)
    elif isinstance(prompt, str) and llm.tokenizer is not None:
        if llm.tokenizer.chat_template is not None and not raw:
            prompt = llm.encode_chat([{"role": "user", "content": prompt}])
        else:
            prompt = llm.tokenizer.encode(prompt)
    fields = dict(sampling) | job.fields
    if (job.turns or job.answers) and fields.get("n", 1) != 1:
        raise RequestError(f"n is {fields['n']}, but a conversation goes on after one answer; leave n out")
    if "max_tokens" not in fields:
        room = min(llm.max_model_len, llm.engine.kv.capacity_tokens + 1) - len(prompt)
        fields["max_tokens"] = max(1, min(_MAX_TOKENS, room), fields.get("min_tokens") or 0)
    return llm.engine.add_request(prompt, SamplingParams.from_dict(fields), stream=stream)


class _Progress:
    """Progress bar with tokens per second on standard error. It is hidden if ``show`` is False."""

    def __init__(self, total: int, done: int, show: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, initial=done, unit="prompt", disable=not show, file=sys.stderr, leave=False)
        self._start = self._shown = time.monotonic()
        self._finished_tokens = 0
        self._decoded_tokens = 0
        self._step = -1

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def hide(self) -> None:
        """Remove the progress bar until the next step, so that other output can be printed."""
        self._bar.clear()
        self._shown = 0.0

    def step(self, log: StepLog, finished: Sequence[RequestOutput]) -> None:
        """Update the progress bar after a step of the engine."""
        if self._bar.disable:
            return
        if len(log) and log[-1].step != self._step:
            self._step = log[-1].step
            self._decoded_tokens += len(log[-1].decodes)
        self._finished_tokens += sum(len(answer.token_ids) for output in finished for answer in output.outputs)
        self._bar.n += len(finished)
        now = time.monotonic()
        if now - self._shown > _REFRESH_SECONDS:
            self._shown = now
            rate = max(self._finished_tokens, self._decoded_tokens) / max(now - self._start, 1e-9)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s")


# --- answers out -----------------------------------------------------------------------------------------------------


def _wants_json(args: argparse.Namespace) -> bool:
    return args.output is not None or args.prompts_file is not None or bool(args.jsonl)


@contextlib.contextmanager
def _json_writer(path: Path | None, force: bool) -> Iterator[Any]:
    """Context manager: a function that writes a job as a JSON line, at once, to a file or to standard output.

    Raises an error for an invalid path before any other work. An existing file is emptied only when the first line is
    written.
    """
    if path is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # JSON is UTF-8, whatever the terminal uses
        yield lambda job: _put(sys.stdout, job)
        return
    check_writable(path, "output")
    if not force and path.is_file() and path.stat().st_size:
        raise ConfigError(f"--output {path} exists; give another --output, or --force to overwrite it")
    with contextlib.ExitStack() as stack:
        opened: list[IO[str]] = []

        def write(job: Job) -> None:
            try:
                if not opened:
                    opened.append(stack.enter_context(path.open("w", encoding="utf-8")))
                _put(opened[0], job)
            except OSError as error:
                with contextlib.suppress(OSError):  # the error was reported by the write already
                    stack.close()
                message = f"cannot write the output file {path}: {error.strerror}; give another --output"
                raise ConfigError(message) from None

        yield write


def _put(file: IO[str], job: Job) -> None:
    # A lone surrogate has no UTF-8 form, so it is written as a JSON escape.
    file.write(json.dumps(_record(job), ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n")
    file.flush()


class _Streamed:
    """Prints the text of a single output while it grows."""

    def __init__(self) -> None:
        self._shown = 0

    def show(self, text: str, end: str = "") -> None:
        """Print the part of ``text`` that has not been printed."""
        sys.stdout.write(text[self._shown :] + end)
        sys.stdout.flush()
        self._shown = len(text)

    def end(self) -> None:
        """End the line of an output that will not be completed."""
        if self._shown:
            print(flush=True)


def _text_writer(total: int, streamed: _Streamed | None) -> Any:
    """Create a function that prints outputs as readable text. A single output is printed without its prompt; of several
    outputs, each is printed below its prompt."""

    def write(job: Job) -> None:
        answers = job.output.outputs if job.output is not None and job.error is None else []
        if streamed is not None and len(answers) == 1:
            streamed.show(answers[0].text, end="\n")
            return
        if streamed is not None:
            streamed.end()
        for answer in answers:
            if total > 1 or len(answers) > 1:
                number = f" ({answer.index + 1} of {len(answers)})" if len(answers) > 1 else ""
                print(f"> {' '.join(str(job.prompt).split())}{number}")
            print(answer.text, end="\n\n" if total > 1 or len(answers) > 1 else "\n")
        sys.stdout.flush()

    return write


def _record(job: Job) -> dict[str, Any]:
    output = job.output
    record: dict[str, Any] = {"index": job.index, "id": job.id, "prompt": job.prompt, "outputs": [], "usage": None}
    if output is not None:
        record["prompt_token_ids"] = list(output.prompt_token_ids)
        record["outputs"] = [_answer_record(answer) for answer in output.outputs]
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = [entry and _logprob_records(entry) for entry in output.prompt_logprobs]
        generated = sum(len(answer.token_ids) for answer in output.outputs)
        record["usage"] = {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": generated,
            "total_tokens": len(output.prompt_token_ids) + generated,
            "cached_tokens": output.num_cached_tokens,
        }
    if job.answers:
        record["answers"] = [*job.answers, *(answer["text"] for answer in record["outputs"])]
    record["error"] = job.error
    clashing = {key: value for key, value in job.copied.items() if key in record or key == _CLASHING}
    return (
        record
        | {key: value for key, value in job.copied.items() if key not in clashing}
        | ({_CLASHING: clashing} if clashing else {})
    )


def _answer_record(answer: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if answer.logprobs is not None:
        record["logprobs"] = [_logprob_records(entry) for entry in answer.logprobs]
    return record


def _logprob_records(entry: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    """Records of the tokens at one position: the chosen token first, then the most likely tokens."""
    return [{"token_id": token_id, **dataclasses.asdict(logprob)} for token_id, logprob in entry.items()]
