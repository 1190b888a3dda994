"""Files become examples: every record once, learnt where it should be, and the same again after a resume."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

import chairlift
from chairlift.errors import ChairliftError, ConfigError
from chairlift.text.tokenizer.tokenizer import Tokenizer
from chairlift_train.encoder import Encoder, fitting
from chairlift_train.sources import FollowedLines, LineFile, RecordSource, TableFile
from chairlift_train.stream import PackStream
from tests.cli.conftest import CHAT_TEMPLATE
from tests.text.tokenizer import tiny


def numbers(path: Path, count: int, first: int = 0) -> Path:
    path.write_text("".join(json.dumps({"input_ids": [i, i + 1]}) + "\n" for i in range(first, first + count)))
    return path


def read(item: Mapping[str, Any]) -> Mapping[str, Any]:
    return item


def firsts(items: Any) -> list[int]:
    return [int(item["input_ids"][0]) for item in items]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.byte_level_backend().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def learnt(tokenizer_dir: Path, item: Mapping[str, Any]) -> list[str]:
    """The stretches of text that have weight."""
    tokenizer = Tokenizer.from_dir(tokenizer_dir)
    parts: list[list[int]] = [[]]
    for token, weight in zip(item["input_ids"], item["loss_weight"], strict=True):
        if weight:
            parts[-1].append(int(token))
        elif parts[-1]:
            parts.append([])
    return [tokenizer.decode(part, skip_special_tokens=False) for part in parts if part]


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one one"},
    {"role": "assistant", "content": "two three"},
    {"role": "user", "content": "four"},
    {"role": "assistant", "content": "five"},
]


def test_answers_of_a_chat_are_learnt_with_the_end_of_their_turn(tokenizer_dir: Path) -> None:
    item = Encoder(tokenizer_dir)({"messages": CHAT})
    assert learnt(tokenizer_dir, item) == ["two three<|im_end|>\n", "five<|im_end|>\n"]
    everything = Encoder(tokenizer_dir, train_on="all")({"messages": CHAT})
    assert everything["loss_weight"].all()
    np.testing.assert_array_equal(everything["input_ids"], item["input_ids"])


def test_only_the_completion_of_a_prompt_is_learnt_and_texts_end(tokenizer_dir: Path) -> None:
    encode = Encoder(tokenizer_dir)
    item = encode({"prompt": "one two", "completion": " three"})
    assert learnt(tokenizer_dir, item) == [" three<|im_end|>"]
    text = encode({"text": "one two"})
    assert learnt(tokenizer_dir, text)[0].endswith("one two<|im_end|>")
    assert Encoder(tokenizer_dir, add_eos=False)({"text": "one two"})["input_ids"][-1] != text["input_ids"][-1]
    assert Encoder(tokenizer_dir, text_field="body")({"body": "one two"})["input_ids"].tolist() == list(
        text["input_ids"]
    )


def test_a_token_that_only_the_config_has_is_trained_as_it_is_served(tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    ids = Encoder(tmp_path)({"text": "one<|end|>"})["input_ids"].tolist()
    (end,) = Tokenizer.from_dir(tmp_path).eos_token_ids
    assert ids == [*Tokenizer.from_dir(tmp_path).encode("one"), end]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(("prompt", "completion"), [("one:  ", "\n    two\n        three  "), ("one:", "  two three")])
def test_indentation_in_an_answer_is_learnt(tmp_path: Path, trim_offsets: bool, prompt: str, completion: str) -> None:
    backend = tiny.byte_level_backend()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)  # of GPT-2's family: True
    backend.save(str(tmp_path / "tokenizer.json"))
    item = Encoder(tmp_path)({"prompt": prompt, "completion": completion})
    assert learnt(tmp_path, item) == [completion]


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer_dir: Path, tmp_path: Path) -> None:
    last_only = "{% for m in messages[-2:] %}{{ m.role }}:{{ m.content }};{% endfor %}"
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(last_only)
    encode = Encoder(tmp_path)
    with pytest.raises(ConfigError, match=r"messages\[2\].*a template for training"):
        encode({"messages": CHAT})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": CHAT[:2]}, "no message of an assistant"),
        ({"body": "a"}, "this one has body"),
        ({"text": 5}, "text must be text, got '5'"),
        ({"prompt": "one", "completion": ""}, "completion must be a text that is not empty, got ''"),
        ({"text": "\ud800"}, "surrogate"),
        ({"input_ids": [1, 2], "labels": [5, 6]}, "the record has labels that are neither -100 nor its input_ids"),
        ({"input_ids": [1, 2], "completion_mask": [1]}, "the record has completion_mask"),
        ({"input_ids": [1, 2], "completion_mask": [0, math.nan]}, "the record has a loss weight that is not finite"),
        ({"input_ids": [1, 2], "weight": "x"}, "the record has the weight 'x'; give one number"),
        ({"input_ids": [1, 2], "weight": [1, 2]}, r"the record has the weight \[1, 2\]; give one number"),
    ],
)
def test_unusable_records_are_refused(tokenizer_dir: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Encoder(tokenizer_dir)(record)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        Encoder()({"text": "a"})


def test_lines_are_found_by_position(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for text, lines in (('{"a": 1}\n\n{"a": 2}', [1, None, 2]), ('{"a": 1}\r\n{"a": 2}\n', [1, 2])):
        path.write_text(text)
        file = LineFile(path)
        assert [record and record["a"] for record in map(file.read, range(len(file)))] == lines


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_record_comes_once_in_each_epoch(tmp_path: Path, shuffle: bool) -> None:
    files = [numbers(tmp_path / "a.jsonl", 7), numbers(tmp_path / "b.jsonl", 5, first=7)]
    found = firsts(RecordSource(files, read, epochs=2, shuffle=shuffle))
    assert sorted(found[:12]) == sorted(found[12:]) == list(range(12))
    assert (found[:12] == list(range(12))) is not shuffle
    assert (found[:12] == found[12:]) is not shuffle


def sources(folder: Path) -> list[Callable[[], Any]]:
    files = [numbers(folder / "a.jsonl", 7), numbers(folder / "b.jsonl", 5, first=7)]
    return [
        lambda: RecordSource(files, read, epochs=2),
        lambda: RecordSource(files, read, epochs=2, shuffle=True),
        lambda: FollowedLines(files, read),
    ]


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_source_goes_on_from_any_place(tmp_path: Path, kind: int) -> None:
    make = sources(tmp_path)[kind]
    whole = firsts(make())
    for taken in range(len(whole) + 1):
        first, second = make(), make()
        beginning = [int(next(first)["input_ids"][0]) for _ in range(taken)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert beginning + firsts(second) == whole


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_stream_over_a_source_goes_on_after_any_pack(tmp_path: Path, kind: int) -> None:
    make = sources(tmp_path)[kind]

    def stream() -> PackStream:
        return PackStream(make(), 7, pool=4, step="packs:2")

    whole = [pack.tokens.tolist() for pack in stream()]
    for taken in range(len(whole)):
        first, second = stream(), stream()
        for _ in range(taken):
            next(first)
        state = first.state_dict()
        list(first)
        for each in (first, second):
            each.load_state_dict(state)
            assert [pack.tokens.tolist() for pack in each] == whole[taken:]


@pytest.mark.parametrize("kind", [RecordSource, FollowedLines])
def test_a_loader_process_does_not_move_the_place_of_the_others(tmp_path: Path, kind: Any) -> None:
    data = pytest.importorskip("torch.utils.data")
    file = numbers(tmp_path / "a.jsonl", 2000)
    expected = [pack.ids for pack in PackStream(kind([file], read), 50)]
    stream = PackStream(kind([file], read), 50)
    assert next(iter(stream)).ids == expected[0]
    loaded = data.DataLoader(stream.as_torch(), batch_size=None, num_workers=1)
    assert [pack.ids for pack in loaded] == expected[1:]
    assert [pack.ids for pack in stream] == expected[1:]


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_changed_data_is_noticed(tmp_path: Path, kind: int) -> None:
    make = sources(tmp_path)[kind]
    source = make()
    for _ in range(9):
        next(source)
    state = source.state_dict()
    path = tmp_path / "b.jsonl"
    path.write_text(path.read_text().replace("[8,", "[9,"))
    with pytest.raises(ConfigError, match=r"b\.jsonl.* same"):
        make().load_state_dict(state)
    path.unlink()
    with pytest.raises(ConfigError, match=r"b\.jsonl is not a file"):
        make()


def test_a_corrupt_line_is_named_or_skipped_and_counted(tmp_path: Path) -> None:
    path = numbers(tmp_path / "a.jsonl", 3)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], '{"input_ids": [1,', lines[1], '{"other": 1}', lines[2]]) + "\n")
    for make in (RecordSource, FollowedLines):
        source = make([path], Encoder())
        assert next(source)["input_ids"].tolist() == [0, 1]
        with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: not JSON .*\{\"input_ids\": \[1,"):
            next(source)
        assert next(source)["input_ids"].tolist() == [1, 2]  # an error loses nothing
        with pytest.raises(ConfigError, match=r"a\.jsonl, line 4: .*this one has other"):
            next(source)
        lenient = make([path], Encoder(), on_error="skip")
        assert firsts(lenient) == [0, 1, 2]
        assert lenient.skipped == 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_record_that_is_skipped_counts_once_however_often_the_file_is_read(tmp_path: Path, shuffle: bool) -> None:
    path = numbers(tmp_path / "a.jsonl", 6)
    lines = path.read_text().splitlines()
    lines[2] = lines[4] = "no record"
    path.write_text("\n".join(lines))

    def source() -> RecordSource:
        return RecordSource([path], Encoder(), shuffle=shuffle, epochs=None, on_error="skip")

    endless = source()
    for _ in range(4 * 50 + 1):
        next(endless)
    assert endless.skipped == 2
    resumed = source()
    resumed.load_state_dict(endless.state_dict())
    for _ in range(8):
        next(resumed)
    assert resumed.skipped == 2


def test_a_token_id_that_the_model_does_not_know_is_named_or_skipped(tmp_path: Path) -> None:
    path = numbers(tmp_path / "a.jsonl", 3)
    for make in (RecordSource, FollowedLines):
        source = make([path], fitting(Encoder(), 3, None))
        assert next(source)["input_ids"].tolist() == [0, 1]
        assert next(source)["input_ids"].tolist() == [1, 2]
        with pytest.raises(ConfigError, match=r"a\.jsonl, line 3: it has the token id 3, but the model knows 3 tokens"):
            next(source)
        assert firsts(make([path], fitting(Encoder(), 3, None), on_error="skip")) == [0, 1]


def test_files_without_records_are_refused(tmp_path: Path) -> None:
    empty, odd, bad = tmp_path / "e.jsonl", tmp_path / "a.txt", tmp_path / "b.jsonl"
    for path, text in ((empty, ""), (odd, "x"), (bad, "nothing\n")):
        path.write_text(text)
    for make in (RecordSource, FollowedLines):
        with pytest.raises(ConfigError, match="is empty"):
            make([empty], read)
    with pytest.raises(ConfigError, match=r"suffix '\.txt'"):
        RecordSource([odd], read)
    with pytest.raises(ConfigError, match=r"no record of .*b\.jsonl can be used \(1 were skipped\)"):
        next(RecordSource([bad], read, epochs=None, on_error="skip"))


def test_a_growing_file_is_read_line_by_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("")
    writes = ['{"input_ids": [0', ', 1]}\n{"input_', 'ids": [1, 2]}\n\n', '{"input_ids": [2, 3]}']

    def wait() -> bool:
        if not writes:
            return False
        with path.open("a") as file:
            file.write(writes.pop(0))
        return True

    source = FollowedLines([path], read, follow=True, wait=wait)
    assert firsts(source) == [0, 1]
    state = FollowedLines([path], read, follow=True, wait=wait)
    next(state)
    later = FollowedLines([path], read, follow=True, wait=lambda: False)
    with path.open("a") as file:
        file.write("\n")
    later.load_state_dict(state.state_dict())
    assert firsts(later) == [1, 2]


def test_only_the_last_of_several_files_is_followed(tmp_path: Path) -> None:
    first, last = numbers(tmp_path / "a.jsonl", 2), numbers(tmp_path / "b.jsonl", 1, first=2)
    first.write_text(first.read_text().rstrip("\n"))
    source = FollowedLines([first, last], read, follow=True, wait=lambda: pytest.fail("nothing to wait for"))
    assert firsts(next(source) for _ in range(3)) == [0, 1, 2]


def test_records_that_a_file_has_lost_are_no_blank_lines(tmp_path: Path) -> None:
    path = numbers(tmp_path / "a.jsonl", 4)
    strict, lenient = (RecordSource([path], read, on_error=on_error) for on_error in ("stop", "skip"))
    assert firsts([next(strict), next(lenient)]) == [0, 0]
    os.truncate(path, len(path.read_text()) // 2)
    assert firsts([next(strict), *lenient]) == [1, 1]
    assert lenient.skipped == 2
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 3: the file was cut while it was read"):
        next(strict)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, 0),
        lambda path: path.unlink(),
        lambda path: path.rename(path.with_suffix(".1")),
        lambda path: Path(shutil.copy(path, path.with_suffix(".new"))).replace(path),
    ],
)
def test_a_followed_file_that_cannot_grow_any_more_is_not_waited_for(
    tmp_path: Path, change: Callable[[Path], Any]
) -> None:
    path = numbers(tmp_path / "a.jsonl", 3)
    waits: list[int] = []

    def wait() -> bool:
        waits.append(1)
        if len(waits) == 1:
            change(path)
        return len(waits) < 9

    source = FollowedLines([path], read, follow=True, wait=wait)
    assert firsts(next(source) for _ in range(3)) == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"a\.jsonl was cut, moved or replaced while it was read \(after line 3\)"):
        next(source)
    assert len(waits) == 1


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    if importlib.util.find_spec("pyarrow") is None:
        with pytest.raises(ConfigError, match=r"pip install 'chairlift\[train\]'"):
            TableFile(path)
    else:
        with pytest.raises(ConfigError, match="cannot be read as Parquet"):
            TableFile(path)


@pytest.mark.parametrize("shuffle", [False, True])
def test_parquet_rows_are_records(tmp_path: Path, shuffle: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    rows = pyarrow.table({"input_ids": [[i, i + 1] for i in range(10)], "labels": [None] * 10})
    parquet.write_table(rows, path, row_group_size=4)
    source = RecordSource([path], Encoder(), shuffle=shuffle)
    beginning = [next(source) for _ in range(4)]
    again = RecordSource([path], Encoder(), shuffle=shuffle)
    again.load_state_dict(source.state_dict())
    found = firsts(beginning) + firsts(again)
    assert sorted(found) == list(range(10))
    assert (found == list(range(10))) is not shuffle
    parquet.write_table(rows.slice(1), path, row_group_size=4)
    with pytest.raises(ConfigError, match=r"a\.parquet.* same data"):
        RecordSource([path], Encoder(), shuffle=shuffle).load_state_dict(source.state_dict())


@pytest.mark.parametrize("ids", ["7", "[]", "[-1]", "[1.5]", '[1, "x"]', "[true]", "[4294967296]", "[[1]]"])
def test_a_row_that_is_no_token_ids_is_named_with_its_line(tmp_path: Path, ids: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"input_ids": [1, 2]}\n{"input_ids": ' + ids + "}\n")
    with pytest.raises(ConfigError, match=r"data\.jsonl, line 2: input_ids must be a list of token ids"):
        list(RecordSource([file], Encoder()))


def test_null_is_nothing_in_lines_as_in_tables(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows: list[dict[str, Any]] = [{"input_ids": None, "text": "ab"}, {"input_ids": [1, 2], "text": None}]
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    for path in (lines, table):
        assert list(RecordSource([path], read)) == [{"text": "ab"}, {"input_ids": [1, 2]}]
    lines.write_text('{"input_ids": null}')
    with pytest.raises(ConfigError, match=r"line 1: a record has input_ids.*; this one has nothing"):
        next(RecordSource([lines], Encoder()))


def test_a_damaged_parquet_file_is_named_with_its_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    texts = [f"{i} {i * 7919 % 104729} some words" * 20 for i in range(2000)]
    parquet.write_table(pyarrow.table({"text": texts}), path, compression="snappy")
    damaged = bytearray(path.read_bytes())
    damaged[500:9000] = bytes(255 - byte for byte in damaged[500:9000])
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"a\.parquet, row 1: .*make the file again"):
        next(RecordSource([path], Encoder()))


def test_padding_is_left_out_before_a_record_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 3] + [100] * 9, "attention_mask": [1] * 3 + [0] * 9}) + "\n")
    assert next(RecordSource([path], fitting(Encoder(), 100, 8)))["input_ids"].tolist() == [1, 2, 3]


def test_a_record_that_no_pack_takes_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in ([1, 2], [1] * 9)))
    source = RecordSource([path], fitting(Encoder(), 100, 8))
    assert next(source)["input_ids"].tolist() == [1, 2]
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: it has 9 tokens, but a pack takes 8"):
        next(source)


def test_null_in_a_message_is_nothing() -> None:
    """Parquet gives every message the fields of all others."""
    encode = Encoder(Path(chairlift.__file__).parent / "assets")
    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    nulls = [{**message, "name": None, "tool_calls": None} for message in plain]
    found, expected = encode({"messages": nulls}), encode({"messages": plain})
    assert found.keys() == expected.keys()
    assert all(list(found[key]) == list(expected[key]) for key in found)
    with pytest.raises(ChairliftError, match=r"messages\[0\]"):
        encode({"messages": [{"role": None, "content": "hi"}]})
