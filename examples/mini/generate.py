"""File 8 of 8. The command: text in, text out, and a picture of the batch.

::

    python examples/mini/generate.py "What is continuous batching?" "What is a KV cache?" "What is a block table?"
    python examples/mini/generate.py --compare                  # static and continuous batching, in steps
    python examples/mini/generate.py --num-kv-blocks 14         # so little memory that requests are preempted

In the picture, a line is a row of the batch and a column is a step. A capital letter is a step that computes a part of
request A's prompt; a small letter is a step that generates one token of its answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from engine import EngineCore
from jinja2.sandbox import ImmutableSandboxedEnvironment
from request import Request, SamplingParams
from scheduler import SchedulerOutput
from tokenizers import Tokenizer

__all__ = ["Picture", "TextModel", "main"]

BUNDLED = Path(__file__).resolve().parents[2] / "chairlift" / "assets"
QUESTIONS = (
    "What is continuous batching?",
    "What is a KV cache?",
    "What is a block table?",
    "What is preemption?",
    "What is chunked prefill?",
    "What does TTFT mean?",
    "What is static batching?",
    "What is a prefix cache?",
)
_COLUMNS = 100


class TextModel:
    """The texts of a model directory: its tokenizer, chat template and end of an answer."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        settings = json.loads((model_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._settings = {"bos_token": settings.get("bos_token"), "eos_token": settings.get("eos_token")}
        self._template = ImmutableSandboxedEnvironment().from_string(settings["chat_template"])
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        eos = config["eos_token_id"]
        self.stop_token_ids = frozenset(eos if isinstance(eos, list) else [eos])

    def encode(self, question: str) -> list[int]:
        """Token ids of a chat with one question."""
        messages = [{"role": "user", "content": question}]
        text = self._template.render(messages=messages, add_generation_prompt=True, **self._settings)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids)
        return text


class Picture:
    """Records which request each row of the batch computes in each step."""

    def __init__(self, num_rows: int) -> None:
        self.rows = [""] * num_rows
        self.events: list[str] = []
        self.num_steps = 0
        self.first_steps: dict[str, int] = {}
        """Request -> step in which its first token was sampled."""

    def saw(self, out: SchedulerOutput, finished: list[Request]) -> None:
        """Add a step."""
        self.num_steps += 1
        column = ["."] * len(self.rows)
        for index, chunk in enumerate(out.chunks):
            name = chunk.request.request_id
            column[chunk.slot] = name.lower() if index < out.num_decodes else name.upper()
            if chunk.samples:
                self.first_steps.setdefault(name, out.step)
        self.rows = [row + mark for row, mark in zip(self.rows, column, strict=True)]
        events = [f"{request.request_id} preempted" for request in out.preempted]
        for slot, request in out.joined:
            cached = f" ({request.num_cached_tokens} tokens cached)" if request.num_cached_tokens else ""
            events.append(f"{request.request_id} joins row {slot}{cached}")
        events += [f"{request.request_id} leaves" for request in finished]
        if events:
            self.events.append(f"step {out.step:3}, {out.num_tokens:2} tokens: {', '.join(events)}")

    def text(self) -> str:
        """The picture, in pieces of at most 100 columns."""
        lines: list[str] = []
        for start in range(0, self.num_steps, _COLUMNS):
            lines.append(f"steps {start + 1} to {min(start + _COLUMNS, self.num_steps)}")
            lines += [f"  row {i}  {row[start : start + _COLUMNS]}" for i, row in enumerate(self.rows)]
        return "\n".join(lines)

    def numbers(self) -> str:
        """Steps, idle places, and the mean wait for a first token."""
        idle = sum(row.count(".") for row in self.rows) / (self.num_steps * len(self.rows))
        mean = sum(self.first_steps.values()) / len(self.first_steps)
        return f"{self.num_steps} steps, {idle:.0%} of the places idle, first token after {mean:.1f} steps on average"


def _run(arguments: argparse.Namespace, batching: str) -> tuple[Picture, list[Request]]:
    texts = TextModel(arguments.model)
    picture = Picture(arguments.max_num_seqs)
    engine = EngineCore(
        arguments.model,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        block_size=arguments.block_size,
        num_kv_blocks=arguments.num_kv_blocks,
        batching=batching,
        watch=picture.saw,
    )
    requests: list[Request] = []
    for index, question in enumerate(arguments.questions):
        # Real traffic has short and long answers. With equal lengths there would be little to compare.
        is_short = arguments.compare and index % 4 != 0
        params = SamplingParams(
            max_tokens=max(1, arguments.max_tokens // 4) if is_short else arguments.max_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed + index,
            stop_token_ids=texts.stop_token_ids,
        )
        requests.append(engine.add(chr(ord("A") + index), texts.encode(question), params))
    engine.run()
    return picture, requests


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description="Continuous batching in less than 1,000 lines.")
    parser.add_argument("questions", nargs="*", default=list(QUESTIONS), help="at most 26; eight questions by default")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="directory of a Llama (default: the bundled model)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=4, help="rows of the batch")
    parser.add_argument("--max-num-batched-tokens", type=int, default=32, help="most tokens of a step")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--num-kv-blocks", type=int, default=256)
    parser.add_argument("--batching", choices=("continuous", "static"), default="continuous")
    parser.add_argument(
        "--compare", action="store_true", help="static, then continuous batching; three of four answers are short"
    )
    arguments = parser.parse_args(argv)
    if len(arguments.questions) > 26:
        parser.error(f"{len(arguments.questions)} questions were given; the picture has letters for 26")
    if arguments.compare:
        for batching in ("static", "continuous"):
            picture, _ = _run(arguments, batching)
            print(f"{batching} batching: {picture.numbers()}\n{picture.text()}\n")
        return
    picture, requests = _run(arguments, arguments.batching)
    texts = TextModel(arguments.model)
    for question, request in zip(arguments.questions, requests, strict=True):
        print(f"{request.request_id}  {question}\n   {texts.decode(request.output_token_ids)}")
    print("\n" + "\n".join(picture.events))
    print(f"\n{picture.text()}\n{picture.numbers()}")


if __name__ == "__main__":
    main()
