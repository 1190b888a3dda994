"""Records as people have them: every form becomes the same examples, and what is ignored is counted."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import ChairliftError, ConfigError
from chairlift.text.tokenizer.chat_template import ChatTemplate
from chairlift_train.chats import write_chat
from chairlift_train.encoder import Encoded, Encoder, fitting
from chairlift_train.record_files import ArrayFile, LineFile, expand, open_file
from chairlift_train.records import chat_of
from chairlift_train.sequences import read_sample
from chairlift_train.sources import FollowedLines, Notes, RecordSource
from tests.cli.conftest import CHAT_TEMPLATE
from tests.text.tokenizer import tiny

# An answer that is not the last loses its thoughts, as with Qwen3, and the last one ends the text, as with Phi-3.5.
REWRITING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
)
TOOLS = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }}{% endfor %}]{% endif %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}!{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
U, A = (lambda text: {"role": "user", "content": text}), (lambda text: {"role": "assistant", "content": text})
CALL = {"type": "function", "function": {"name": "look", "arguments": {"place": "Ulm"}}}
TWO = [U("one"), A("two") | {"reasoning_content": "b"}, U("three"), A("four") | {"reasoning_content": "d"}]


def learnt(template: str, record: Mapping[str, Any], answers: Any = "auto") -> list[tuple[str, list[str]]]:
    """Text and what is learnt of it, for each example of a chat."""
    chat = chat_of(record)
    assert chat is not None
    written = write_chat(ChatTemplate(template), chat, answers, [])
    return [(example.text, [example.text[start:end] for start, end in example.spans]) for example in written]


def encoder(folder: Path, template: str = CHAT_TEMPLATE, **settings: Any) -> Encoder:
    if not (folder / "tokenizer.json").exists():
        tiny.byte_level_backend().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Encoder(folder, **settings)


def test_a_template_that_rewrites_earlier_turns_gives_one_example_per_answer() -> None:
    """Each answer follows what the model would see before it, and is written as the model would write it."""
    first = "<user>one<end><assistant>(b)two<end>"
    second = "<user>one<end><assistant>two<end><user>three<end><assistant>(d)four<end>"
    assert learnt(REWRITING, {"messages": TWO}) == [(first, ["(b)two<end>"]), (second, ["(d)four<end>"])]
    with pytest.raises(ConfigError, match=r"messages\[1\] in another way once more follow.*answers: auto"):
        learnt(REWRITING, {"messages": TWO}, "together")


def test_a_template_that_keeps_earlier_turns_gives_one_example() -> None:
    text = "<user>one<end><assistant>two<end><user>three<end><assistant>four<end>"
    assert learnt(TOOLS, {"messages": TWO}) == [(text, ["two<end>", "four<end>"])]
    apart = learnt(TOOLS, {"messages": TWO}, "apart")
    assert apart == [(text[: text.index("<user>three")], ["two<end>"]), (text, ["four<end>"])]
    weighted = [*TWO[:1], {**TWO[1], "weight": 0}, *TWO[2:]]
    assert learnt(TOOLS, {"messages": weighted}) == [(text, ["four<end>"])]


def test_a_template_for_training_says_itself_what_is_learnt() -> None:
    text = "<user>one<end><assistant>two<end><user>three<end><assistant>four<end>"
    assert learnt(MARKING, {"messages": TWO}) == [(text, ["two<end>", "four<end>"])]
    weighted = [*TWO[:1], {**TWO[1], "weight": 0}, *TWO[2:]]
    assert learnt(MARKING, {"messages": weighted}) == [(text, ["four<end>"])]
    assert ChatTemplate(MARKING).render(TWO, add_generation_prompt=False) == text


def test_an_answer_that_is_opened_otherwise_begins_where_both_part() -> None:
    """The prompt for an answer opens thoughts, and a chat has none of them, as with DeepSeek-R1."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    notes: list[str] = []
    chat = chat_of({"messages": TWO[:2]})
    assert chat is not None
    (example,) = write_chat(ChatTemplate(template), chat, "auto", notes)
    assert [example.text[start:end] for start, end in example.spans] == ["two<end>"]
    assert any("opens in another way" in note for note in notes)


SAME_CHAT: dict[str, dict[str, Any]] = {
    "ShareGPT": {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
    "Alpaca": {"instruction": "one", "input": "", "output": "two"},
    "TRL": {"prompt": [U("one")], "completion": [A("two")]},
    "parts": {"messages": [U([{"type": "text", "text": "one"}]), A("two")]},
}


@pytest.mark.parametrize("name", SAME_CHAT)
def test_forms_of_one_chat_are_the_same_example(name: str) -> None:
    assert learnt(TOOLS, SAME_CHAT[name]) == learnt(TOOLS, {"messages": [U("one"), A("two")]})


def test_only_the_completion_of_a_conversational_prompt_is_learnt() -> None:
    record = {"prompt": TWO[:3], "completion": TWO[3:]}
    assert [spans for _, spans in learnt(TOOLS, record)] == [["four<end>"]]


def test_alpaca_and_sharegpt_have_system_texts_histories_and_inputs() -> None:
    record = {"instruction": "add", "input": "1, 2", "output": "3", "system": "Be.", "history": [["hi", "yo"]]}
    text = "<system>Be.<end><user>hi<end><assistant>yo<end><user>add\n\n1, 2<end><assistant>3<end>"
    assert learnt(TOOLS, record) == [(text, ["yo<end>", "3<end>"])]
    shared = {"system": "Be.", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    assert learnt(TOOLS, shared)[0][0] == "<system>Be.<end><user>hi<end><assistant>yo<end>"


def test_calls_of_tools_are_learnt_in_every_form() -> None:
    tool = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
    result, end = {"role": "tool", "content": "Rain."}, A("Wet.")
    text = '[look]<user>one<end><assistant>!look{"place": "Ulm"}<end><tool>Rain.<end><assistant>Wet.<end>'
    expected = [(text, ['!look{"place": "Ulm"}<end>', "Wet.<end>"])]
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert learnt(TOOLS, {"messages": [U("one"), calling, result, end], "tools": [tool]}) == expected
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"place": "Ulm"}'}}
    back = {"role": "function", "name": "look", "content": "Rain."}
    assert learnt(TOOLS, {"messages": [U("one"), legacy, back, end], "tools": json.dumps([tool])}) == expected
    called = {"from": "function_call", "value": '{"name": "look", "arguments": {"place": "Ulm"}}'}
    shared = [{"from": "human", "value": "one"}, called, {"from": "observation", "value": "Rain."}]
    record = {"conversations": [*shared, {"from": "gpt", "value": "Wet."}], "tools": json.dumps([tool])}
    assert learnt(TOOLS, record) == expected
    with pytest.raises(ConfigError, match="calls 'look', but the chat template does not print tool calls"):
        learnt(MARKING, {"messages": [U("one"), calling, result, end]})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": "no"}, "messages must be a list"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, r"conversations\[0\].from must be one of assistant,"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "must be JSON text, got 'x'"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 2}]}, "weight of a message is 0 or 1, got '2'"),
        ({"messages": ["x"]}, r"messages\[0\] must have role and content"),
        ({"messages": TWO, "tools": "{"}, "tools must be JSON text"),
        ({"instruction": "a", "output": 5}, "output must be text, got '5'"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, r"history\[0\] must be \[question, answer\]"),
        ({"prompt": [U("a")], "completion": "b"}, "completion must be a list"),
    ],
)
def test_unreadable_fields_of_a_form_are_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chat_of(record)


def test_other_forms_of_trl_are_refused_by_name(tmp_path: Path) -> None:
    encode = encoder(tmp_path)
    with pytest.raises(ConfigError, match="a pair of answers, one of them preferred"):
        encode({"chosen": "a", "rejected": "b"})
    with pytest.raises(ConfigError, match="a prompt without a completion"):
        encode({"prompt": "a"})


def test_fields_and_keys_that_nobody_reads_are_noted(tmp_path: Path) -> None:
    encode = encoder(tmp_path)
    plain = encode.examples({"messages": [U("one"), A("two")]})
    more = {"id": 7, "messages": [U("one") | {"timestamp": 5}, A("two")], "text": "x"}
    found = encode.examples(more)
    assert found.notes == {
        "have the field 'id', which is ignored",
        "have the field 'text', which is ignored",
        "have messages with the key 'timestamp', which is ignored",
    }
    assert plain.notes == frozenset()
    assert found.items[0]["input_ids"].tolist() == plain.items[0]["input_ids"].tolist()
    with pytest.raises(ConfigError, match="makes 2 examples"):
        encoder(tmp_path, REWRITING)({"messages": TWO})


def test_fields_may_have_other_names_and_the_template_may_be_another(tmp_path: Path) -> None:
    (tmp_path / "train.jinja").write_text(MARKING)
    encode = encoder(tmp_path, columns={"question": "prompt", "answer": "completion"})
    assert list(encode({"question": "one", "answer": " two"})) == list(encode({"prompt": "one", "completion": " two"}))
    assert encode.examples({"question": "one", "answer": " two"}).notes == frozenset()
    other = encoder(tmp_path, REWRITING, chat_template=tmp_path / "train.jinja")
    assert len(other.examples({"messages": TWO}).items) == 1
    with pytest.raises(ConfigError, match=r"chat_template .*none\.jinja cannot be read"):
        encoder(tmp_path, chat_template=tmp_path / "none.jinja")


def several(record: Mapping[str, Any]) -> Encoded:
    """As many examples as the record says."""
    if record["n"] < 0:
        raise ConfigError("negative")
    items = [{"input_ids": [record["n"], part]} for part in range(record["n"])]
    return Encoded(tuple(items), frozenset({"are odd"}) if record["n"] % 2 else frozenset())


def lines(path: Path, numbers: Iterable[int]) -> Path:
    path.write_text("".join(json.dumps({"n": number}) + "\n" for number in numbers))
    return path


def rest(source: Any) -> list[list[int]]:
    return [item["input_ids"] for item in source]


@pytest.mark.parametrize("kind", ["in order", "shuffled", "followed", "compressed", "compressed and followed"])
def test_a_source_goes_on_between_the_examples_of_one_record(tmp_path: Path, kind: str) -> None:
    path = lines(tmp_path / "a.jsonl", [3, 0, 2, 1, -1, 4])
    if "compressed" in kind:
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path = tmp_path / "a.jsonl.gz"

    def source() -> Any:
        if "followed" in kind:
            return FollowedLines([path], several, on_error="skip")
        return RecordSource([path], several, shuffle=kind == "shuffled", seed=3, on_error="skip", epochs=2)

    expected = rest(source())
    assert len(expected) == (10 if "followed" in kind else 20)
    for count in range(len(expected) + 1):
        begun = source()
        assert [next(begun)["input_ids"] for _ in range(count)] == expected[:count]
        state = json.loads(json.dumps(begun.state_dict()))
        resumed = source()
        resumed.load_state_dict(state)
        assert rest(resumed) == expected[count:], count
        assert (resumed.skipped, dict(resumed.notes)) == (1, {"are odd": 2})
        kept = resumed.notes.places["are odd"]
        named = {f"{path}, line {number}" for number in (1, 4)}
        assert len(kept) == 2 and set(kept) == named, "also those before the state"
        assert resumed.notes.skipped == [f"{path}, line 5"]


def test_the_first_five_records_of_a_note_are_named(tmp_path: Path) -> None:
    source = RecordSource([lines(tmp_path / "a.jsonl", [1] * 7)], several)
    assert len(rest(source)) == 7
    named = "; ".join(f"{tmp_path / 'a.jsonl'}, line {number}" for number in range(1, 6))
    assert source.notes.lines() == [f"note: 7 records are odd (first: {named})"]


def test_notes_of_several_sources_are_counted_together(tmp_path: Path) -> None:
    together = Notes()
    for name, numbers in (("a.jsonl", [1, -1, 2]), ("b.jsonl", [1, -1, -1, 3])):
        source = FollowedLines([lines(tmp_path / name, numbers)], several, on_error="skip")
        assert rest(source)
        together.merge(source.notes)
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert together.lines() == [f"note: 3 records are odd ({a}, line 1; {b}, line 1; {b}, line 4)"]
    assert together.skipped_text(3) == f" ({a}, line 2; {b}, line 2; {b}, line 3)"
    assert together.skipped_text(9).startswith(" (first: ")


PACKED = {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, -100, 8, 9]}


@pytest.mark.parametrize(
    "places",
    [
        {"seq_lengths": [2, 3]},
        {"position_ids": [0, 1, 0, 1, 2]},
        {"seq_lengths": [2, 3], "position_ids": [0, 1, 0, 1, 2]},
        {"position_ids": [0, 1, 0, 1, 2], "attention_mask": [1, 1, 1, 1, 1]},
    ],
)
def test_a_packed_record_is_split_into_its_sequences(places: dict[str, Any]) -> None:
    found = Encoder().examples({**PACKED, **places})
    assert [item["input_ids"].tolist() for item in found.items] == [[5, 6], [7, 8, 9]]
    assert [item["loss_weight"].tolist() for item in found.items] == [[0, 1], [0, 1, 1]]
    assert found.notes == frozenset()
    with pytest.raises(ConfigError, match="of several sequences; give each sequence by itself"):
        read_sample({**PACKED, **places})


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"seq_lengths": [2, 2]}, "has the seq_lengths .* for 5 tokens"),
        ({"seq_lengths": [5, 0]}, "has the seq_lengths"),
        ({"seq_lengths": "two"}, "has the seq_lengths"),
        ({"position_ids": [0, 1, 0, 2, 3]}, "which do not count each sequence from 0"),
        ({"position_ids": [3, 4, 5, 6, 7]}, "which do not count each sequence from 0"),
        ({"position_ids": [0, 1]}, "has position_ids .* for 5 tokens"),
        ({"position_ids": [0, 1, 0, 1, 2], "seq_lengths": [3, 2]}, "which do not count each sequence from 0"),
    ],
)
def test_places_of_a_packed_record_that_make_no_sense_are_refused(places: dict[str, Any], message: str) -> None:
    for read in (Encoder().examples, read_sample):
        with pytest.raises(ConfigError, match=message):
            read({**PACKED, **places})


def test_positions_of_one_sequence_may_be_given() -> None:
    for places in ({"seq_lengths": [5]}, {"position_ids": [0, 1, 2, 3, 4]}):
        assert len(Encoder().examples({**PACKED, **places}).items) == 1
    padded = {"position_ids": [1, 1, 0, 1, 2], "attention_mask": [0, 0, 1, 1, 1]}
    (item,) = Encoder().examples({**PACKED, **padded}).items
    assert item["input_ids"].tolist() == [7, 8, 9]


def test_examples_of_one_record_are_each_checked(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [3])
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: it has the token id 3"):
        rest(RecordSource([path], fitting(several, 3, None)))


def written(folder: Path) -> dict[str, Path]:
    """The same three records in every kind of file."""
    records = [{"n": number, "m": None if number else {"a": 1}} for number in range(3)]
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    made = {"jsonl": text, "jsonl.gz": gzip.compress(text), "json": json.dumps(records, indent=1).encode()}
    if importlib.util.find_spec("zstandard"):
        import zstandard

        made["ndjson.zst"] = zstandard.ZstdCompressor().compress(text)
        made["json.zst"] = zstandard.ZstdCompressor().compress(made["json"])
    for suffix, content in made.items():
        (folder / f"a.{suffix}").write_bytes(content)
    return {suffix: folder / f"a.{suffix}" for suffix in made}


def test_every_kind_of_file_has_the_same_records(tmp_path: Path) -> None:
    for suffix, path in written(tmp_path).items():
        file = open_file(path)
        assert [file.read(index) for index in range(len(file))] == [{"n": 0, "m": {"a": 1}}, {"n": 1}, {"n": 2}]
        assert isinstance(file, ArrayFile if suffix in ("json", "json.zst") else LineFile)
        assert str(path) in file.where(1)


def test_datasets_of_hugging_face_are_read_from_their_directory(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [U(str(n)), A("x") | ({"tool_calls": [CALL]} if n == 1 else {})]} for n in range(5)]
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(str(tmp_path / "one"), num_shards=2)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "splits"))
    found = rest_of_records(tmp_path / "one")
    assert found == rows  # without what Arrow adds: every row has the fields of all
    assert rest_of_records(tmp_path / "splits" / "test") == rows
    with pytest.raises(ConfigError, match=r"holds the splits test, train; name one, such as .*splits/test"):
        expand([tmp_path / "splits"])
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002"):
        made.to_parquet(str(tmp_path / "hub" / "data" / f"{name}.parquet"))
    assert rest_of_records(tmp_path / "hub") == rows * 2
    made.to_parquet(str(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet"))
    with pytest.raises(ConfigError, match="holds the splits test, train; name one by a pattern"):
        expand([tmp_path / "hub"])
    assert len(expand([f"{tmp_path}/hub/data/train-*"])) == 2


def test_sheets_are_records_of_texts(tmp_path: Path) -> None:
    """Quotes, line ends and separators within values, an empty cell, a mark at the beginning, and messages as JSON."""
    chat = json.dumps([U("a, b"), A("c\td")])
    long = "x" * 200_000  # more than the csv module reads by default
    rows = [["messages", "note"], [chat, "line\r\nline"], [], [chat, ""], ["other", long]]
    expected = [{"messages": chat, "note": "line\r\nline"}, {"messages": chat}, {"messages": "other", "note": long}]

    def sheet(delimiter: str) -> str:
        csv.writer(made := io.StringIO(newline=""), delimiter=delimiter).writerows(rows)
        return made.getvalue()

    for name, content in (
        ("a.csv", sheet(",").encode("utf-8-sig")),
        ("b.tsv", sheet("\t").encode()),
        ("c.csv.gz", gzip.compress(sheet(",").encode())),
    ):
        (tmp_path / name).write_bytes(content)
        assert rest_of_records(tmp_path / name) == expected
    (found, *_) = rest_of_records(tmp_path / "a.csv")
    parsed, plain = chat_of(found), chat_of({"messages": json.loads(chat)})
    assert parsed is not None and plain is not None and parsed.messages == plain.messages
    with pytest.raises(ConfigError, match="messages must be JSON text"):
        chat_of({"messages": "[broken"})


def rest_of_records(*files: Path) -> list[Any]:
    return [file.read(index) for file in map(open_file, expand(files)) for index in range(len(file))]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    good = gzip.compress(b'{"n": 1}\n' * 100)
    (tmp_path / "a.jsonl.gz").write_bytes(good[:-12])
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz is damaged: it cannot be decompressed"):
        open_file(tmp_path / "a.jsonl.gz")
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz is damaged after line"):
        rest(FollowedLines([tmp_path / "a.jsonl.gz"], several))
    with pytest.raises(ConfigError, match="is compressed, so it cannot grow"):
        FollowedLines([tmp_path / "a.jsonl.gz"], several, follow=True)
    for name, content, message in (
        ("b.json", "[]", "empty array"),
        ("c.json", "[1", "begins with a JSON array"),
        ("d.txt", "x", r"suffix '\.txt'.*write each text as a line of JSON"),
        ("g.csv", "a,b\n", "at least one row"),
        ("h.csv", "a,a\n1,2\n", "a different name for each field"),
        ("i.csv", "a,b\n1,2,3\n", r"row 1: 3 values for 2 fields; put quotes"),
        ("j.csv", 'a\n"x\n', "cannot be read as CSV"),
        ("e.arrow", "x", "cannot be read as Arrow"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=message):
            open_file(tmp_path / name)
    (tmp_path / "f.json").write_text("[1]")
    with pytest.raises(ConfigError, match="record 1: a record must be a JSON object, got '1'"):
        open_file(tmp_path / "f.json").read(0)
    with pytest.raises(ConfigError, match="no file matches"):
        expand([f"{tmp_path}/*.nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no file of records"):
        expand([tmp_path / "empty"])


@pytest.mark.nightly
def test_no_published_template_refuses_several_turns() -> None:
    spec = importlib.util.find_spec("trl")
    files = [f for place in (spec and spec.submodule_search_locations) or () for f in Path(place).rglob("*.jinja")]
    if not files:
        pytest.skip("no package with chat templates is installed; pip install trl")
    refused: dict[str, str] = {}
    turns = [U("Hi"), A("Yo"), U("Go"), A("Gone")]
    for file in files:
        template = ChatTemplate(file.read_text("utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})
        chat = chat_of({"messages": turns})
        assert chat is not None
        try:
            examples = write_chat(template, chat, "auto", [])
        except ChairliftError as error:
            refused[file.name] = str(error)
            continue
        spans = "".join(example.text[start:end] for example in examples for start, end in example.spans)
        assert re.findall("Yo|Gone|Hi|Go(?!n)", spans) == ["Yo", "Gone"], file.name
    assert not refused
