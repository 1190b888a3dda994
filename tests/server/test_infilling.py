"""``suffix``: the text between a prompt and what follows it, as models are asked for it that can do so."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from starlette.testclient import TestClient
from tokenizers import AddedToken, processors

from chairlift.server.http.app import make_app
from chairlift.text.tokenizer.infilling import INFILL_FORMATS, InfillFormat, cut_lead, infill_format_of, lead_of
from chairlift.text.tokenizer.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, make_state
from tests.text.tokenizer.tiny import byte_fallback_backend, byte_level_backend

PREFIX, SUFFIX = "def f(x):\n    return ", " + x\n"
LAYOUTS = {  # what the authors' documents print
    "qwen": "<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>",
    "starcoder": "<fim_prefix>{p}<fim_suffix>{s}<fim_middle>",
    "santacoder": "<fim-prefix>{p}<fim-suffix>{s}<fim-middle>",
    "codellama": "▁<PRE>{p}▁<SUF>{s}▁<MID>",
    "deepseek": "<｜fim▁begin｜>{p}<｜fim▁hole｜>{s}<｜fim▁end｜>",
    "seed_coder": "<[fim-suffix]>{s}<[fim-prefix]>{p}<[fim-middle]>",
    "codestral": "[SUFFIX]{s}[PREFIX]{p}",
}


def with_marks(form: InfillFormat, backend: tokenizers.Tokenizer, bos: bool = False) -> Tokenizer:
    marks = [AddedToken(text, special=True, normalized=False) for text in (*form.marks, *form.ends[:1])]
    backend.add_special_tokens([*marks, "<s>"])
    if bos:
        first = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[first])
    return Tokenizer(backend, {})


def lay_out(tokenizer: Tokenizer, prefix: str, suffix: str, special: bool = True) -> list[int]:
    form, lead = infill_format_of(tokenizer), lead_of(tokenizer)
    assert form is not None
    ids = cut_lead(tokenizer, lead, tokenizer.encode(lead + suffix, False))
    return form.lay_out(tokenizer, tokenizer.encode(prefix, False), ids, special)


@pytest.mark.parametrize("form", INFILL_FORMATS, ids=lambda form: form.name)
def test_the_layout_is_the_published_one(form: InfillFormat) -> None:
    tokenizer = with_marks(form, byte_level_backend(), bos=True)
    ids = lay_out(tokenizer, PREFIX, SUFFIX)
    text = LAYOUTS[form.name].format(p=PREFIX, s=SUFFIX)
    assert tokenizer.decode(ids, False) == "<s>" + text
    assert lay_out(tokenizer, PREFIX, SUFFIX, False) == ids[1:] == tokenizer.encode(text, False)
    assert set(form.end_ids(tokenizer)) >= {tokenizer.token_to_id(text) for text in (*form.marks, *form.ends[:1])}


def test_a_suffix_gets_no_space_of_the_tokenizer_s_own() -> None:
    (form,) = [form for form in INFILL_FORMATS if form.name == "codellama"]
    tokenizer = with_marks(form, byte_fallback_backend())
    assert lead_of(tokenizer)
    for suffix in ("a b", " a", "\n\n", ""):
        cut = cut_lead(tokenizer, lead_of(tokenizer), tokenizer.encode(lead_of(tokenizer) + suffix, False))
        assert b"".join(tokenizer.token_bytes(token_id) for token_id in cut) == suffix.encode()


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    backend = byte_level_backend()
    backend.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"])
    engine.prompts.tokenizer = Tokenizer(backend, {})
    assert engine.info is not None
    return engine


def ask(engine: FakeEngine, **body: Any) -> Any:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as http:
        return http.post("/v1/completions", json={"max_tokens": 4, **body})


def test_the_endpoint_lays_out_each_prompt(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    monkeypatch.setattr(engine, "_check", lambda *_: None)
    tokenizer = engine.prompts.tokenizer
    assert tokenizer is not None
    reply = ask(engine, prompt=["one", ""], suffix="end", stop_token_ids=[7], logprobs=1)
    assert reply.status_code == 200, reply.text
    prompts = [tokenizer.decode(prompt, False) for prompt, _, _ in engine.submitted]
    assert prompts == [f"<s><|fim_prefix|>{p}<|fim_suffix|>end<|fim_middle|>" for p in ("one", "")]
    ends = {tokenizer.token_to_id(f"<|fim_{name}|>") for name in ("prefix", "suffix", "middle", "pad")}
    assert set(engine.submitted[0][1].stop_token_ids or ()) >= {7, *ends}
    plain = ask(engine, prompt="one", suffix="")
    assert plain.status_code == 200 and engine.submitted[-1][1].stop_token_ids == ()
    assert ask(engine, prompt="one", suffix="end", ignore_eos=True).status_code == 200
    assert engine.submitted[-1][1].stop_token_ids == ()


def test_ollamas_editors_are_told_that_a_model_fills_in_the_middle(engine: FakeEngine) -> None:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as http:
        shown = http.post("/api/show", json={"name": "fake"}).json()
    assert "insert" in shown["capabilities"] and ".Suffix" in shown["template"]  # Continue looks for the latter


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, 2]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"suffix": 3}, "suffix"),
    ],
)
def test_fields_that_contradict_a_suffix_are_refused(engine: FakeEngine, body: dict[str, Any], param: str) -> None:
    reply = ask(engine, **{"prompt": "x", "suffix": "y", **body})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
