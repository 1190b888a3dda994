"""Generates required tool calls, and counts how many have valid arguments.

python benchmarks/required_calls.py MODEL [--calls 100] [--max-tokens 300] [--tool-call-parser hermes]

MODEL is a model's directory or file. A grammar restricts each output to one call of one of four functions, as
``tool_choice: required`` does. The prompt describes the functions, so models whose chat template has no tools can be
tested, too. Questions and temperatures (0 to 1) vary. jsonschema-rs checks the arguments, including formats. The exit
code is 1 if a call is missing or invalid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import Any

import jsonschema_rs

from chairlift import LLM, SamplingParams
from chairlift.text.tool_calls import TOOL_FORMATS, AnswerReader, Thinking, check_tools, output_constraint, read_answer

_TEXT = {"type": "string", "maxLength": 40}
_FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": {
        "place": _TEXT,
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "send_mail": {
        "to": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3},
        "subject": _TEXT,
        "urgent": {"type": "boolean"},
    },
    "book_table": {
        "day": {"type": "string", "format": "date"},
        "time": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
        "guests": {"type": "integer", "minimum": 1, "maximum": 20},
        "wish": {"anyOf": [_TEXT, {"type": "null"}]},
    },
    "convert": {
        "amount": {"type": "number", "minimum": 0, "maximum": 1_000_000},
        "from": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "to": {"type": "string", "pattern": "^[A-Z]{3}$"},
    },
}
_QUESTIONS = (
    "Will it rain in Paris in the next three days?",
    "Tell Ann and Bob that the meeting is moved to Friday.",
    "We are six people and want to eat at seven in the evening on the third of May.",
    "How many dollars are 250 euros?",
    "Hello, how are you?",
)


def functions() -> list[dict[str, Any]]:
    """The functions, described in OpenAI's format."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                },
            },
        }
        for name, properties in _FUNCTIONS.items()
    ]


def main() -> int:
    """Generate the calls, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--tool-call-parser", default="hermes", choices=sorted(TOOL_FORMATS))
    settings = parser.parse_args()
    llm, form = LLM(settings.model), TOOL_FORMATS[settings.tool_call_parser]
    tools = check_tools(functions(), "required", False)
    held = output_constraint(None, tools, form, None, Thinking.NONE)
    listed = json.dumps([each["function"] for each in functions()])
    prompts, params = [], []
    for number in range(settings.calls):
        question = f"You can call these functions: {listed}. {_QUESTIONS[number % len(_QUESTIONS)]}"
        prompts.append(llm.encode_chat([{"role": "user", "content": question}]))
        temperature = number // len(_QUESTIONS) % 5 / 4
        params.append(
            SamplingParams(
                structured_outputs=held, max_tokens=settings.max_tokens, temperature=temperature, seed=number
            )
        )
    names: Counter[str] = Counter()
    faults = []
    for output in llm.generate(prompts, params):
        text = output.outputs[0].text
        answer = read_answer(text, AnswerReader(form, None, tools.schemas))
        if output.error or len(answer.calls) != 1 or answer.content:
            faults.append(f"{output.error or output.outputs[0].finish_reason}: {text!r:.300}")
            continue
        (call,) = answer.calls
        checked = jsonschema_rs.validator_for(tools.schemas[call.name], validate_formats=True)
        if not checked.is_valid(json.loads(call.arguments)):
            faults.append(f"not valid: {call}")
        names[call.name] += 1
    print(f"{settings.calls - len(faults)} of {settings.calls} calls are valid: {dict(names)}")
    for fault in faults[:5]:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
