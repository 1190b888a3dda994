"""Answers of a model that are held to JSON schemas: does every complete one satisfy its schema?

python benchmarks/json_answers.py FOLDER [MODEL] [--answers 200] [--longest 800] [--max-tokens 300] [--temperature 0.7]

FOLDER has one JSON file per schema, as for json_schemas.py; schemas of more than ``--longest`` characters and refused
ones are passed over. Schemas are part of the prompt, so their length and ``--max-tokens`` must fit the model. MODEL is
a model's directory or file (default: the bundled one). Complete answers are checked by jsonschema-rs, with formats. The
exit code is 1 where one of them does not satisfy its schema.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema_rs

from chairlift import LLM, SamplingParams
from chairlift.errors import RequestError
from chairlift.structured_outputs import StructuredOutputsParams


def schemas(folder: Path, longest: int, seed: int) -> list[dict[str, Any]]:
    """Schemas of the folder that have at most ``longest`` characters, in random order."""
    paths = sorted(folder.glob("*.json"))
    random.Random(seed).shuffle(paths)
    found = (json.loads(path.read_text(encoding="utf-8"))["schema"] for path in paths)
    return [each for each in found if isinstance(each, dict) and len(json.dumps(each)) <= longest]


def asked(llm: LLM, schema: dict[str, Any], settings: argparse.Namespace, seed: int) -> SamplingParams | None:
    """Parameters that hold an answer to the schema; None where it is refused."""
    try:
        form = StructuredOutputsParams(json=schema)
        llm.engine.core.grammars.check(form.value)
        jsonschema_rs.validator_for(schema, validate_formats=True)
    except (RequestError, ValueError):
        return None
    return SamplingParams(
        structured_outputs=form, max_tokens=settings.max_tokens, temperature=settings.temperature, seed=seed
    )


def finite(text: str) -> float:
    """A number of an answer; the largest float where it is beyond all floats, which JSON Schema does not forbid."""
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


def main() -> int:
    """Sample the answers, and print counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--longest", type=int, default=800)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    llm = LLM(settings.model) if settings.model else LLM()
    chosen: list[tuple[dict[str, Any], SamplingParams]] = []
    for schema in schemas(settings.folder, settings.longest, settings.seed):
        if len(chosen) >= settings.answers:
            break
        params = asked(llm, schema, settings, len(chosen))
        if params is not None:
            chosen.append((schema, params))
    ask = "Answer with short JSON that satisfies this schema: "
    prompts = [llm.encode_chat([{"role": "user", "content": ask + json.dumps(schema)}]) for schema, _ in chosen]
    counts: Counter[str] = Counter()
    wrong = []
    for (schema, _), output in zip(chosen, llm.generate(prompts, [params for _, params in chosen]), strict=True):
        answer = output.outputs[0]
        counts["error" if output.error else str(answer.finish_reason)] += 1
        if output.error is None and answer.finish_reason == "stop":
            checked = jsonschema_rs.validator_for(schema, validate_formats=True)
            if not checked.is_valid(json.loads(answer.text, parse_float=finite)):
                wrong.append(f"{json.dumps(schema)[:200]} {answer.text[:200]}")
    print(f"{len(chosen):,} answers: " + ", ".join(f"{count:,} {name}" for name, count in counts.most_common()))
    print(f"complete and wrong: {len(wrong)}")
    for line in wrong[:5]:
        print("WRONG", line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
