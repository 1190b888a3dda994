"""``chairlift generate``: answer many prompts at once, from the command line, a JSONL file or standard input."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import dataclasses
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from chairlift.cli.flags import add_engine_flags, add_sampling_flags, load_llm, read_settings
from chairlift.errors import ChairliftError, ConfigError
from chairlift.outputs import CompletionOutput, Logprob, RequestOutput
from chairlift.sampling_params import SamplingParams
from chairlift.writing import check_writable

if TYPE_CHECKING:
    from chairlift.engine.step_log import StepLog
    from chairlift.llm import LLM

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "answer prompts, all in one continuous batch"
DESCRIPTION: Final = """Answer prompts, all in one continuous batch.

Prompts are arguments, or lines of standard input (no PROMPT, or -), and answers are printed as text. With
--prompts-file they are JSON objects, one per line, and answers are JSON lines in the same order:

  {"prompt": "Hi"}    {"prompt": [1, 2, 3]}    {"messages": [{"role": "user", "content": "Hi"}]}

each with an optional "id" and any sampling parameter by name, such as "max_tokens": 32. An answer has index, id,
prompt, outputs (text, token_ids, finish_reason), usage and error. A line that cannot be answered is reported, gets an
error in its place, and does not hold up the others.

Where the model has a chat template, a text prompt becomes the user's message in it; --raw sends it as it is.
Answers are greedy (temperature 0) and at most 256 tokens long unless flags say otherwise."""

_MAX_TOKENS: Final = 256
_REFRESH_SECONDS: Final = 0.2


@dataclasses.dataclass(slots=True)
class _Job:
    """One prompt, where it came from, and what became of it."""

    index: int
    place: str
    """Place of the job in its input (``line 3``), for messages."""
    prompt: Any = None
    id: Any = None
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Sampling parameters of this prompt alone."""
    is_chat: bool = False
    error: str | None = None
    output: RequestOutput | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or self.output is not None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``chairlift generate``."""
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="*", help="a prompt; - reads one per line from standard input"
    )
    parser.add_argument("--prompts-file", metavar="FILE", help="prompts as JSON lines; - is standard input")
    parser.add_argument("--output", "-o", metavar="FILE", type=Path, help="write the answers there, as JSON lines")
    parser.add_argument("--jsonl", action="store_true", help="print JSON lines for prompts given as text, too")
    parser.add_argument("--raw", action="store_true", help="do not apply the model's chat template to text prompts")
    parser.add_argument("--quiet", "-q", action="store_true", help="no progress bar")
    add_sampling_flags(parser, _MAX_TOKENS)
    parser.add_argument(
        "--json-schema", metavar="FILE", type=Path, help="hold every answer to the JSON schema in this file"
    )
    # --seed is the one of sampling: an engine seed would give each prompt a seed of its own.
    add_engine_flags(parser, leave_out={"seed"})


def run(args: argparse.Namespace) -> int:
    """Answer everything; 0 when all were answered, 1 when some were, 2 when none."""
    engine, sampling = read_settings(args, sampling=True)
    if args.json_schema is not None:
        sampling["structured_outputs"] = {"json": _read_schema(args.json_schema)}
    SamplingParams.from_dict(sampling)  # reports a fault of all jobs once, before the model loads
    jobs = _read_jobs(args)
    with contextlib.ExitStack() as stack:
        write = stack.enter_context(_json_writer(args.output)) if _wants_json(args) else _text_writer(len(jobs))
        llm = None if all(job.done for job in jobs) else load_llm(engine, args.quiet)
        for job in _answered(jobs, llm, sampling, raw=args.raw, quiet=args.quiet):
            if job.error is not None:
                print(f"chairlift: error: {job.place}: {' '.join(job.error.split())}", file=sys.stderr)
            write(job)
    failed = sum(job.error is not None for job in jobs)
    return 0 if not failed else 1 if failed < len(jobs) else 2


# --- prompts in ------------------------------------------------------------------------------------------------------


def _read_jobs(args: argparse.Namespace) -> list[_Job]:
    if args.prompts_file is not None:
        if args.prompts:
            raise ConfigError("give prompts as arguments or as --prompts-file, not both")
        if args.output is not None and args.output.is_file() and _same_file(args.prompts_file, args.output):
            raise ConfigError(f"--output {args.output} is the prompts file, which would be lost; give another --output")
        jobs = [_parse_line(index, number, line) for index, (number, line) in enumerate(_lines(args.prompts_file))]
        source = f"the prompts file {args.prompts_file}"
    elif args.prompts and args.prompts != ["-"]:
        _refuse_model_paths(args.prompts)
        return [_text_job(i, f"prompt {i + 1}", prompt) for i, prompt in enumerate(args.prompts)]
    elif sys.stdin.isatty() and not args.prompts:
        raise ConfigError('no prompt; give one (chairlift generate "Hi"), a --prompts-file, or lines on standard input')
    else:
        jobs = [_line_job(i, number, line) for i, (number, line) in enumerate(_lines("-"))]
        source = "standard input"
    if not jobs:
        raise ConfigError(f"{source} holds no prompts; write one per line")
    return jobs


def _refuse_model_paths(prompts: Sequence[str]) -> None:
    """Raise ConfigError for a prompt that is the path of a model here: a GGUF file or a directory with config.json."""
    for prompt in prompts:
        path, kind = Path(prompt), ""
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


def _lines(name: str) -> list[tuple[int, bytes]]:
    """(number from 1, bytes) of lines that are not blank. Bytes, so that one invalid line leaves the others
    readable."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the prompts file {name}: {error.strerror}") from None
    lines = raw.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _line_job(index: int, number: int, line: bytes) -> _Job:
    try:
        return _text_job(index, f"line {number}", line.decode().rstrip("\r"))
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte 0x{line[error.start]:02X} at position {error.start}); convert or remove it"
        return _Job(index, f"line {number}", line.decode("utf-8", "replace").rstrip("\r"), error=problem)


def _text_job(index: int, place: str, prompt: str) -> _Job:
    return _Job(index, place, prompt, error=_not_utf8(prompt) if prompt else "the prompt is empty; write something")


def _not_utf8(argument: str) -> str | None:
    """Fault of an argument whose bytes are not UTF-8, with the offset from 0; None if it is valid."""
    raw = argument.encode("utf-8", "surrogateescape")
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 text (byte 0x{raw[error.start]:02X} at position {error.start}); convert or remove it"
    return None


def _parse_line(index: int, number: int, line: bytes) -> _Job:
    job = _Job(index, f"line {number}")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        job.error = f"not valid JSON ({error})"
        return job
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        job.error = 'must be an object with either "prompt" (text or token ids) or "messages"'
        return job
    job.id = fields.pop("id", None)
    job.is_chat = "messages" in fields
    job.prompt = fields.pop("messages" if job.is_chat else "prompt")
    job.fields = fields
    if not job.is_chat and (not isinstance(job.prompt, (str, list)) or not job.prompt):
        job.error = f"prompt must be text or a list of token ids, and not empty, got {str(job.prompt)[:40]!r}"
    return job


# --- answers ---------------------------------------------------------------------------------------------------------


def _answered(
    jobs: Sequence[_Job], llm: LLM | None, sampling: Mapping[str, Any], *, raw: bool, quiet: bool
) -> Iterator[_Job]:
    """The jobs in order, each as soon as it and all earlier ones have ended."""
    running: dict[str, _Job] = {}
    if llm is not None:
        for job in jobs:
            if not job.done:
                try:
                    running[_submit(llm, job, sampling, raw)] = job
                except ChairliftError as error:
                    job.error = str(error)
    given = 0
    with _Progress(len(jobs), len(jobs) - len(running), show=not quiet and sys.stderr.isatty()) as progress:
        while given < len(jobs):
            if jobs[given].done:
                progress.hide()
            while given < len(jobs) and jobs[given].done:
                yield jobs[given]
                given += 1
            if llm is not None and running:
                outputs = llm.engine.step()
                progress.step(llm.engine.step_log, outputs)
                for output in outputs:
                    job = running.pop(output.request_id)
                    job.output, job.error = output, output.error


def _submit(llm: LLM, job: _Job, sampling: Mapping[str, Any], raw: bool) -> str:
    prompt = job.prompt
    if job.is_chat:
        prompt = llm.encode_chat(prompt)
    elif isinstance(prompt, str) and llm.tokenizer is not None:
        if llm.tokenizer.chat_template is not None and not raw:
            prompt = llm.encode_chat([{"role": "user", "content": prompt}])
        else:
            prompt = llm.tokenizer.encode(prompt)
    fields = dict(sampling) | job.fields
    if "max_tokens" not in fields:
        room = min(llm.max_model_len, llm.engine.kv.capacity_tokens + 1) - len(prompt)
        fields["max_tokens"] = max(1, min(_MAX_TOKENS, room), fields.get("min_tokens") or 0)
    return llm.engine.add_request(prompt, SamplingParams.from_dict(fields), stream=False)


class _Progress:
    """A progress bar with tokens per second on standard error, if it is to be shown."""

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
        """Remove the bar until the next step, so that other output can be printed."""
        self._bar.clear()
        self._shown = 0.0

    def step(self, log: StepLog, finished: Sequence[RequestOutput]) -> None:
        """The engine made a step."""
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
def _json_writer(path: Path | None) -> Iterator[Any]:
    """A function that writes a job as a JSON line to a file or to standard output, at once.

    An invalid path raises an error before other work. The old content of a file is removed only when there is something
    to write.
    """
    if path is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # JSON is UTF-8, whatever the terminal uses
        yield lambda job: _put(sys.stdout, job)
        return
    check_writable(path, "output")
    with contextlib.ExitStack() as stack:
        opened: list[IO[str]] = []

        def write(job: _Job) -> None:
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


def _put(file: IO[str], job: _Job) -> None:
    # Half a surrogate pair, which UTF-8 cannot hold, is written as the escape that JSON has for it.
    file.write(json.dumps(_record(job), ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n")
    file.flush()


def _text_writer(total: int) -> Any:
    """A function that prints answers for people: the bare text of a single one, else each under its prompt."""

    def write(job: _Job) -> None:
        answers = job.output.outputs if job.output is not None and job.error is None else []
        for answer in answers:
            if total > 1 or len(answers) > 1:
                number = f" ({answer.index + 1} of {len(answers)})" if len(answers) > 1 else ""
                print(f"> {' '.join(str(job.prompt).split())}{number}")
            print(answer.text, end="\n\n" if total > 1 or len(answers) > 1 else "\n")
        sys.stdout.flush()

    return write


def _record(job: _Job) -> dict[str, Any]:
    output = job.output
    record: dict[str, Any] = {"index": job.index, "id": job.id, "prompt": job.prompt, "outputs": [], "usage": None}
    if output is not None:
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
    return record | {"error": job.error}


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
    """The chosen token first, then the likeliest."""
    return [{"token_id": token_id, **dataclasses.asdict(logprob)} for token_id, logprob in entry.items()]
