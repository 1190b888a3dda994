"""Generates outputs under JSON schemas, and checks whether every complete output satisfies its schema, and how many
outputs are cut off.

python benchmarks/json_answers.py FOLDER [MODEL] [--answers 200] [--longest 800] [--max-tokens 300] [--temperature 0.7]

FOLDER has one JSON file per schema, as for json_schemas.py. Schemas that are refused or have more than ``--longest``
characters are skipped. The others are used in turn until there are ``--answers`` outputs. The prompt contains the
schema, so its length plus ``--max-tokens`` must fit the model. MODEL is a model's directory or file (default: the
bundled model); ``random`` is a tiny model with random weights, whose outputs are random within the grammar.
``--bounded`` adds limits where a schema has none: strings have at most 24 characters, arrays 4 items, numbers are
within a million, objects have no other keys, and a value without a type is no object or array. jsonschema-rs checks
complete outputs, including formats. The exit code is 1 if one of them does not satisfy its schema.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs

import chairlift
from chairlift import LLM, SamplingParams
from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.errors import RequestError
from chairlift.models.random_weights import write_random_model

_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 3072,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
_AT_ONCE = 256
"""Number of requests per call of the engine; progress is printed after each call."""


def schemas(folder: Path, longest: int, seed: int) -> list[dict[str, Any]]:
    """Schemas in the folder that have at most ``longest`` characters, in random order."""
    paths = sorted(folder.glob("*.json"))
    random.Random(seed).shuffle(paths)
    found = (json.loads(path.read_text(encoding="utf-8"))["schema"] for path in paths)
    return [each for each in found if isinstance(each, dict) and len(json.dumps(each)) <= longest]


_KINDS = {"type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref", "properties", "items", "patternProperties"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const"}


def bounded(schema: Any) -> Any:
    """Copy of the schema with limits for values that have none."""
    if isinstance(schema, list):
        return [bounded(each) for each in schema]
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    result = {name: _bounded_inside(name, each) for name, each in schema.items()}
    if not result.keys() & _KINDS:
        result["type"] = ["string", "number", "boolean", "null"]
    kind = result.get("type")
    kinds = set(kind) if isinstance(kind, list) else {kind}
    if "string" in kinds and not result.keys() & {"pattern", "format", "enum", "const", "maxLength"}:
        result["maxLength"] = max(24, result.get("minLength", 0))
    if kinds & {"integer", "number"} and not result.keys() & _NUMBERS:
        result |= {"minimum": -1_000_000, "maximum": 1_000_000}
    if "array" in kinds:
        result.setdefault("items", bounded({}))
        if "maxItems" not in result:
            result["maxItems"] = max(4, result.get("minItems", 0), len(result.get("prefixItems", [])))
    if "object" in kinds and not result.keys() & {"patternProperties", "allOf", "anyOf", "oneOf"}:
        result["additionalProperties"] = False
    return result


def _bounded_inside(name: str, value: Any) -> Any:
    if name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
        return {key: bounded(each) for key, each in value.items()}
    if name in ("items", "additionalProperties", "prefixItems", "anyOf", "oneOf", "allOf"):
        return value if value is False else bounded(value)
    return value


def usable(llm: LLM, found: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], StructuredOutputsParams]]:
    """Endless cycle of the schemas that neither the engine nor the validator refuses."""
    kept = []
    for schema in found:
        try:
            form = StructuredOutputsParams(json=schema)
            llm.engine.core.preparers.grammars.check(form.value)
            jsonschema_rs.validator_for(schema, validate_formats=True)
        except (RequestError, ValueError):
            continue
        kept.append((schema, form))
        yield schema, form
    while kept:
        yield from kept


def finite(text: str) -> float:
    """Parse a number in an output. A number beyond the range of floats becomes the largest float, because JSON Schema
    allows such numbers."""
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


def load(name: str | None, seed: int) -> LLM:
    """Load the model. The name ``random`` means a model with random weights and the bundled tokenizer."""
    if name != "random":
        return LLM(name) if name else LLM()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_random_model(Path(folder) / "random", _TINY, seed=seed)
        for path in (Path(chairlift.__file__).parent / "assets").glob("*token*.json"):
            shutil.copy(path, directory)
        return LLM(str(directory))


class Tally:
    """Counts of the outputs so far."""

    def __init__(self, show: int) -> None:
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.cut: list[str] = []
        self._show = show

    def add(self, schema: dict[str, Any], output: Any) -> None:
        """Count one output, and check it if it is complete."""
        answer = output.outputs[0]
        self.ended["error" if output.error else str(answer.finish_reason)] += 1
        if output.error is None and answer.finish_reason == "stop":
            checked = jsonschema_rs.validator_for(schema, validate_formats=True)
            if not checked.is_valid(json.loads(answer.text, parse_float=finite)):
                self.wrong.append(f"{json.dumps(schema)[:400]} {answer.text[:400]}")
        elif len(self.cut) < self._show:
            self.cut.append(f"{json.dumps(schema)[:400]}\n    {output.error or answer.text!r:.600}")

    def __str__(self) -> str:
        total = self.ended.total()
        share = self.ended["stop"] / total if total else 0.0
        ended = ", ".join(f"{count:,} {name}" for name, count in self.ended.most_common())
        return f"{total:,} answers: {ended}; {share:.1%} complete; complete and wrong: {len(self.wrong)}"


def main() -> int:
    """Generate the outputs, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--longest", type=int, default=800)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--bounded", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="incomplete answers to print")
    settings = parser.parse_args()
    llm, tally = load(settings.model, settings.seed), Tally(settings.show)
    found = schemas(settings.folder, settings.longest, settings.seed)
    forms = usable(llm, [bounded(each) for each in found] if settings.bounded else found)
    begin, ask = time.monotonic(), "Answer with short JSON that satisfies this schema: "
    while (done := tally.ended.total()) < settings.answers:
        chosen = [each for _, each in zip(range(min(_AT_ONCE, settings.answers - done)), forms, strict=False)]
        if not chosen:
            parser.error(f"{settings.folder} has no schema that can be used")
        prompts = [llm.encode_chat([{"role": "user", "content": ask + json.dumps(schema)}]) for schema, _ in chosen]
        params = [
            SamplingParams(
                structured_outputs=form,
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                seed=settings.seed + done + number,
            )
            for number, (_, form) in enumerate(chosen)
        ]
        for (schema, _), output in zip(chosen, llm.generate(prompts, params), strict=True):
            tally.add(schema, output)
        print(f"{time.monotonic() - begin:6.0f} s: {tally}", flush=True)
    for line in tally.cut:
        print("CUT", line)
    for line in tally.wrong[:5]:
        print("WRONG", line)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
