"""Compares greedy answers with llama.cpp's, token by token, for GGUF files.

    sh benchmarks/peers/setup_llama_cpp.sh /tmp/llama_cpp
    python -m benchmarks.llama_cpp_answers --llama-cpp /tmp/llama_cpp FILE.gguf [FILE.gguf ...]

Both engines get the same token ids: twelve questions in the model's own chat template, or plain texts.
The table has, for each way to
compute, the number of equal answers, the number of equal tokens before the first difference, and the margins there: by
how much the largest logit exceeds the second in llama.cpp, and the same in Chairlift. A small margin in both says that
two tokens are about equally likely, and that rounding decides between them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from chairlift import LLM, SamplingParams
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["Difference", "compare", "main", "theirs"]

QUESTIONS: Final = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "What is 17 plus 25?",
    "Translate 'good morning' into German.",
    "Why is the sky blue?",
    "List the planets of the solar system.",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Explain photosynthesis to a child.",
    "What should I pack for a week in the mountains?",
)
WAYS: Final[dict[str, dict[str, Any]]] = {
    "float32, weights as floats": {"dtype": "float32", "quantization": "none"},
    "float32, weights as stored": {"dtype": "float32", "quantization": "stored"},
    "bfloat16, weights as stored": {"dtype": "bfloat16"},
}
"""Way to compute -> settings of the engine. llama.cpp rounds activations to 8 bits, and so do weights as stored."""
SIZES: Final[dict[str, Any]] = {"max_model_len": 512, "num_kv_blocks": 600, "max_num_seqs": 12}
TOKENS: Final = 48


@dataclasses.dataclass(frozen=True)
class Difference:
    """First difference between two answers to one prompt."""

    place: int
    """Number of equal tokens before it; the length of the answers if they are equal."""
    equal: bool
    their_margin: float
    """llama.cpp's largest logit minus its second, at this place; 0 if the answers are equal."""
    our_margin: float
    """Largest logit minus that of llama.cpp's token, here; 0 if the answers are equal."""


def theirs(
    environment: Path, model: Path, prompts: Sequence[Sequence[int]], tokens: int, threads: int
) -> list[dict[str, Any]]:
    """llama.cpp's answers: for each prompt its tokens and margins. Raises SystemExit if llama.cpp fails."""
    script = Path(__file__).parent / "peers" / "answers_llama_cpp.py"
    command = [str(environment / "bin" / "python"), str(script), str(model), "--threads", str(threads)]
    asked = json.dumps({"prompts": [list(prompt) for prompt in prompts], "tokens": tokens})
    done = subprocess.run(command, input=asked, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-1000:]}")
    answers: list[dict[str, Any]] = json.loads(done.stdout)["answers"]
    return answers


def compare(llm: LLM, prompts: Sequence[list[int]], answers: Sequence[dict[str, Any]], tokens: int) -> list[Difference]:
    """Compare the greedy answers of ``llm`` with those of llama.cpp."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=20)
    found = []
    for output, answer in zip(llm.generate(list(prompts), params), answers, strict=True):
        ours = output.outputs[0]
        pairs = zip(ours.token_ids, answer["tokens"], strict=True)
        place = next((index for index, (mine, other) in enumerate(pairs) if mine != other), None)
        if place is None:
            found.append(Difference(tokens, True, 0.0, 0.0))
            continue
        assert ours.logprobs is not None
        likely = ours.logprobs[place]
        chosen = likely[ours.token_ids[place]].logprob
        other = likely.get(answer["tokens"][place])
        margin = float("inf") if other is None else chosen - other.logprob
        found.append(Difference(place, False, answer["margins"][place], margin))
    return found


def _lines(model: Path, environment: Path, tokens: int, threads: int) -> Iterator[str]:
    prompts = _prompts(model)
    answers = theirs(environment, model, prompts, tokens, threads)
    for way, settings in WAYS.items():
        llm = LLM(str(model), **SIZES, **settings, threads=threads)
        found = compare(llm, prompts, answers, tokens)
        different = [each for each in found if not each.equal]
        places = ", ".join(str(each.place) for each in different) or "none"
        both = [f"{each.their_margin:.2f} / {each.our_margin:.2f}" for each in different]
        equal = statistics.mean(each.place for each in found) / tokens
        count = f"{len(found) - len(different)} of {len(found)}"
        yield f"| {model.name} | {way} | {count} | {equal:.0%} | {places} | {', '.join(both) or 'none'} |"


def _prompts(model: Path) -> list[list[int]]:
    """The questions in the model's chat template, as token ids. A file without a template gets plain texts."""
    llm = LLM(str(model), **SIZES)
    once = SamplingParams(max_tokens=1)
    if Tokenizer.from_dir(model).chat_template is None:
        outputs = llm.generate([f"Question: {text}\nAnswer:" for text in QUESTIONS], once)
    else:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in QUESTIONS], once)
    return [list(output.prompt_token_ids) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files")
    parser.add_argument("--llama-cpp", type=Path, required=True, help="environment made by setup_llama_cpp.sh")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of both engines")
    args = parser.parse_args()
    print("| file | computed in | equal answers | equal tokens | first differences after | margins there |")
    print("|---|---|---|---|---|---|")
    for model in args.models:
        for line in _lines(model, args.llama_cpp, args.tokens, args.threads):
            print(line, flush=True)


if __name__ == "__main__":
    main()
