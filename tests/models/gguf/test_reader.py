"""GGUF headers: what they hold, and that a damaged one costs an error message and no more."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.files import find_gguf
from chairlift.models.formats.gguf.reader import GGUFFile, GGUFModel
from tests.models.gguf.make import write_gguf

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
METADATA = {
    "general.architecture": "llama",
    "a.number": 7,
    "a.float": 0.5,
    "a.flag": True,
    "texts": ["a", "ß", ""],
    "numbers": [1, 2, 3],
}


def some_file(path: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        "one": (rng.normal(size=(3, 64)).astype(np.float32), F32),
        "two": (rng.normal(size=(4, 32)).astype(np.float32), Q8_0),
        "three": (rng.normal(size=5).astype(np.float32), F32),
    }
    return write_gguf(path / "model.gguf", METADATA, tensors)


def test_metadata_and_tensors_equal_the_public_readers(tmp_path: Path) -> None:
    path = some_file(tmp_path)
    theirs, model = gguf.GGUFReader(path), GGUFModel(path)
    assert {key: model.metadata[key] for key in METADATA if key != "numbers"} == {
        key: value for key, value in METADATA.items() if key != "numbers"
    }
    assert model.metadata["numbers"].tolist() == [1, 2, 3]
    assert list(model) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = model.info(tensor.name)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(info.rows, -1)
        assert info.shape == tuple(tensor.shape[::-1].tolist())
        np.testing.assert_array_equal(model.read(tensor.name, 0, info.rows), expected)
        np.testing.assert_array_equal(model.read(tensor.name, info.rows - 1, info.rows), expected[-1:])


def read_all(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    model = GGUFModel(path)
    for name in model:
        model.read(name, 0, model.info(name).rows)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    data = some_file(tmp_path).read_bytes()
    for length in range(len(data) - 12):  # after the last numbers the file is padded
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            read_all(data[:length], tmp_path / "cut.gguf")


def test_changed_bytes_are_refused_or_read_within_the_file(tmp_path: Path) -> None:
    data = some_file(tmp_path).read_bytes()
    header = data.index(b"three") + 40
    rng, refused = random.Random(0), 0
    for _ in range(1500):
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            changed[rng.randrange(header)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        if rng.random() < 0.3:  # a whole count or length
            at = rng.randrange(header - 8)
            changed[at : at + 8] = struct.pack("<Q", rng.choice([1 << 62, 1 << 32, 2**64 - 1, 1 << 20]))
        try:
            with np.errstate(all="ignore"):
                read_all(bytes(changed), tmp_path / "changed.gguf")
        except ModelLoadError:
            refused += 1
    assert refused > 300


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"GGML", "does not begin with 'GGUF'"),
        (4, struct.pack("<I", 1), "its version is 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 40), "claims to have 1099511627776 tensors"),
        (16, struct.pack("<Q", 1 << 62), "metadata keys, more than fit"),
    ],
)
def test_a_wrong_field_is_refused_by_name(tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    data = bytearray(some_file(tmp_path).read_bytes())
    data[offset : offset + len(value)] = value
    path = tmp_path / "wrong.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=message):
        GGUFFile(path)


def test_an_array_said_to_be_endless_is_refused_at_once(tmp_path: Path) -> None:
    data = bytearray(some_file(tmp_path).read_bytes())
    at = data.index(b"texts") + 5 + 4 + 4
    data[at : at + 8] = struct.pack("<Q", 1 << 62)
    path = tmp_path / "endless.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match="texts in 'texts', more than fit"):
        GGUFFile(path)


def test_tensors_may_not_overlap_or_leave_the_file(tmp_path: Path) -> None:
    data = bytearray(some_file(tmp_path).read_bytes())
    at = data.index(b"two") + 3 + 4 + 16 + 4
    for offset in (0, 32, 1 << 40, 7):
        data[at : at + 8] = struct.pack("<Q", offset)
        path = tmp_path / "moved.gguf"
        path.write_bytes(data)
        with pytest.raises(ModelLoadError, match="lies outside of the file, or over another one"):
            GGUFFile(path)


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    data = bytearray(some_file(tmp_path).read_bytes())
    at = data.index(b"two") + 3 + 4 + 16
    data[at : at + 4] = struct.pack("<I", 40)
    path = tmp_path / "unknown.gguf"
    path.write_bytes(data)
    with pytest.raises(
        ModelLoadError, match=r"^NVFP4: this block type, which tensor 'two' of .* is not read; use another"
    ):
        GGUFFile(path)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    values = {name: rng.normal(size=(2, 32)).astype(np.float32) for name in "ab"}
    split = {"general.architecture": "llama", "split.count": 2, "split.tensors.count": 2}
    for number, name in enumerate("ab"):
        path = tmp_path / f"m-{number + 1:05}-of-00002.gguf"
        write_gguf(path, {**split, "split.no": number}, {name: (values[name], F32)})
    assert find_gguf(tmp_path) == tmp_path / "m-00001-of-00002.gguf"
    model = GGUFModel(tmp_path / "m-00001-of-00002.gguf")
    assert list(model) == ["a", "b"]
    np.testing.assert_array_equal(model.read("b", 0, 2), values["b"])
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelLoadError, match="is one of 2 parts"):
        GGUFModel(tmp_path / "m-00001-of-00002.gguf")


def test_a_directory_with_several_models_asks_which(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    only = some_file(tmp_path)
    assert find_gguf(tmp_path) == only
    only.with_name("other.gguf").write_bytes(only.read_bytes())
    with pytest.raises(ModelLoadError, match=r"has 2 GGUF models \(model.gguf, other.gguf\); give the path"):
        find_gguf(tmp_path)
