"""A real small model, held to schemas: every answer that ends satisfies its schema, and some answers make sense."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest

from chairlift import LLM, SamplingParams
from tests.gguf.make import real_gguf
from tests.grammar.schemas import SCHEMAS

ASKED = ["three flat fields", "nested", "array of objects", "one of tagged", "tree", "invoice", "weather call", "date"]


@pytest.mark.nightly
def test_a_real_model_follows_schemas() -> None:
    llm = LLM(real_gguf(), max_num_seqs=16, num_kv_blocks=600)
    prompts, asked = [], []
    for name in ASKED:
        for temperature in (0.0, 0.7, 1.0):
            prompts.append(f"Answer with JSON only. Give an example of: {name}.")
            form = {"json": SCHEMAS[name][0]}
            asked.append(SamplingParams(structured_outputs=form, max_tokens=300, temperature=temperature, seed=2))
    outputs = llm.generate([llm.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts], asked)
    good = 0
    for params, output in zip(asked, outputs, strict=True):
        answer = output.outputs[0]
        assert output.error is None
        if answer.finish_reason == "stop":
            assert params.structured_outputs is not None
            schema = json.loads(str(params.structured_outputs.json))
            assert jsonschema_rs.is_valid(schema, json.loads(answer.text)), answer.text
            good += 1
    assert good >= len(asked) // 2
    color = SamplingParams(structured_outputs={"choice": ["red", "blue", "green"]}, temperature=0.0)
    sky = llm.encode_chat([{"role": "user", "content": "What colour is the clear sky by day? One word."}])
    assert llm.generate([sky], color)[0].outputs[0].text == "blue"
