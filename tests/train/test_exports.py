"""Packs that others read: each by its framework's own reader where that is installed, and by its documented layout."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from chairlift.errors import ConfigError
from chairlift_train.adapters import megatron_batch
from chairlift_train.collate import PackCollator
from chairlift_train.exports import writer_of
from chairlift_train.layout import Pack
from chairlift_train.stream import PackStream

ITEMS: list[dict[str, Any]] = [
    {"input_ids": [n + 1] * n, "completion_mask": [int(i > n // 2) for i in range(n)]} for n in range(2, 30)
]


Change = Callable[[dict[str, Any]], Any]


def packs(items: Any = ITEMS) -> list[Pack]:
    return list(PackStream(items, 32, pool=8))


def sequences(made: list[Pack], values: str = "tokens") -> list[list[list[Any]]]:
    return [[part.tolist() for part in np.split(getattr(pack, values), pack.layout.cu_seqlens[1:-1])] for pack in made]


def write(to: str, path: Path, made: list[Pack], vocab_size: int = 0) -> None:
    with writer_of(to, path, vocab_size) as add:
        for pack in made:
            add(pack)


def indexed(prefix: Path) -> list[list[npt.NDArray[Any]]]:
    """Documents of an indexed data set, read as its layout says."""
    raw = Path(f"{prefix}.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    version, code, count, documents = struct.unpack("<QBQQ", raw[9:34])
    assert version == 1
    dtype = np.dtype({1: "uint8", 4: "int32", 8: "uint16"}[code])
    lengths = np.frombuffer(raw, np.int32, count, 34)
    starts = np.frombuffer(raw, np.int64, count, 34 + 4 * count)
    borders = np.frombuffer(raw, np.int64, documents, 34 + 12 * count)
    assert len(raw) == 34 + 12 * count + 8 * documents
    data = Path(f"{prefix}.bin").read_bytes()
    found = [np.frombuffer(data, dtype, n, at) for n, at in zip(lengths, starts.tolist(), strict=True)]
    assert len(data) == lengths.sum() * dtype.itemsize
    return [found[first:last] for first, last in itertools.pairwise(borders)]


@pytest.mark.parametrize("vocab_size", [0, 100, 70_000])
def test_megatron_has_sequences_and_packs_as_documents(tmp_path: Path, vocab_size: int) -> None:
    made = packs()
    write("megatron", tmp_path / "set", made, vocab_size)
    found = indexed(tmp_path / "set")
    assert [[part.tolist() for part in document] for document in found] == sequences(made)
    assert found[0][0].dtype == (np.uint16 if vocab_size == 100 else np.int32)
    masks = indexed(tmp_path / "set_loss_mask")
    assert [[part.tolist() for part in document] for document in masks] == sequences(made, "weights")


def test_megatron_needs_no_mask_where_everything_is_learnt(tmp_path: Path) -> None:
    write("megatron", tmp_path / "set.bin", packs([item["input_ids"] for item in ITEMS]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.idx"]


def test_megatrons_own_reader_finds_the_packs(tmp_path: Path) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    made = packs()
    write("megatron", tmp_path / "set", made)
    found = indexed_dataset.IndexedDataset(str(tmp_path / "set"))
    borders = found.document_indices.tolist()
    assert [[found[i].tolist() for i in range(*pair)] for pair in itertools.pairwise(borders)] == (sequences(made))


def nemo_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".npy":
        return list(np.load(path, allow_pickle=True))
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(path)
    assert [str(field.type) for field in table.schema] == [
        "list<element: int32>",
        "list<element: int8>",
        "list<element: int32>",
    ]
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


@pytest.mark.parametrize("name", ["set.idx.parquet", "set.npy"])
def test_nemo_learns_the_targets_of_each_sequence(tmp_path: Path, name: str) -> None:
    """As its reader does it: inputs lose the last token of a sequence, labels the first, the mask the last."""
    made = packs()
    write("nemo", tmp_path / name, made)
    rows = nemo_rows(tmp_path / name)
    assert len(rows) == len(made)
    for row, pack in zip(rows, made, strict=True):
        bounds = [*row["seq_start_id"], len(row["input_ids"])]
        assert bounds == list(pack.layout.cu_seqlens)
        for start, end in itertools.pairwise(bounds):
            labels, mask = row["input_ids"][start + 1 : end], row["loss_mask"][start : end - 1]
            assert labels == pack.tokens[start + 1 : end].tolist()
            assert mask == pack.weights[start + 1 : end].tolist()


@pytest.mark.parametrize("name", ["set.parquet", "set.jsonl"])
def test_trl_rows_are_read_by_datasets_and_collated_to_the_same_batch(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    made = packs([{**ITEMS[5], "weight": 0.5}, *ITEMS])
    write("trl", tmp_path / name, made)
    kind = "json" if name.endswith("jsonl") else "parquet"
    rows = datasets.load_dataset(kind, data_files=str(tmp_path / name), split="train", cache_dir=str(tmp_path / "c"))
    assert len(rows) == len(made)
    for row, pack in zip(rows, made, strict=True):
        mine, theirs = PackCollator()(pack), PackCollator()([row])
        for key in ("input_ids", "labels", "position_ids", "loss_weight", "cu_seqlens"):
            assert torch.equal(mine[key], theirs[key]), key


def test_data_that_a_format_cannot_express_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    weighted = packs([{"input_ids": [1, 2, 3], "weight": 0.5}])
    for to, name in (("megatron", "set"), ("nemo", "set.npy"), ("nemo", "set.parquet")):
        with pytest.raises(ConfigError, match=r"target of weight 0\.5, but this format has only the weights 0 and 1"):
            write(to, tmp_path / name, weighted)
    with pytest.raises(ConfigError, match="does not fit a vocabulary of 5"):
        write("megatron", tmp_path / "set", packs(), 5)
    with pytest.raises(ConfigError, match=r"for nemo must end in \.parquet or \.pq or \.npy"):
        write("nemo", tmp_path / "set.json", packs())
    assert list(tmp_path.iterdir()) == []


def check_megatron(pack: Pack, batch: dict[str, Any], ranks: int) -> None:
    """Demand that a batch has what Megatron-Core documents for sequences in one row."""
    params = batch["packed_seq_params"]
    real = params["cu_seqlens_q"].tolist()
    places = params.get("cu_seqlens_q_padded", params["cu_seqlens_q"]).tolist()
    assert real == list(pack.layout.cu_seqlens) and places[-1] == batch["tokens"].shape[1]
    assert ("cu_seqlens_q_padded" in params) == (ranks > 1) and params["qkv_format"] == "thd"
    for name in [name for name in params if "_q" in name]:
        assert torch.equal(torch.as_tensor(params[name]), torch.as_tensor(params[name.replace("_q", "_kv")]))
    assert all(place % (2 * ranks if ranks > 1 else 1) == 0 for place in places)
    assert params["max_seqlen_q"] == max(b - a for a, b in itertools.pairwise(places))
    padding = torch.ones(places[-1], dtype=torch.bool)
    for index, length in enumerate(pack.lengths):
        row, own = slice(places[index], places[index] + length), slice(real[index], real[index + 1])
        padding[row] = False
        assert batch["tokens"][0, row].tolist() == pack.tokens[own].tolist()
        assert batch["labels"][0, row].tolist() == [*pack.tokens[own][1:].tolist(), 0]
        assert batch["loss_mask"][0, row].tolist() == [*pack.weights[own][1:].tolist(), 0.0]
        assert batch["position_ids"][0, row].tolist() == list(range(length))
    assert not batch["loss_mask"][0, padding].any() and (batch["tokens"][0, padding] == 99).all()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_batch_for_megatron_has_shifted_labels_and_places_for_context_parallelism(ranks: int) -> None:
    for pack in packs():
        check_megatron(pack, megatron_batch(pack, context_parallel=ranks, pad_id=99), ranks)
    with pytest.raises(ConfigError, match="context_parallel must be at least 1"):
        megatron_batch(packs()[0], context_parallel=0)


def of_params(**changes: str) -> Change:
    """Replace fields of the attention's arguments by other fields."""
    return lambda batch: batch["packed_seq_params"].update(
        {name: batch["packed_seq_params"][other] for name, other in changes.items()}
    )


MISTAKES: dict[str, Change] = {
    "mask not shifted": lambda batch: batch.update(loss_mask=batch["loss_mask"].roll(1, 1)),
    "labels not shifted": lambda batch: batch.update(labels=batch["tokens"]),
    "labels of the next sequence": lambda batch: batch.update(labels=batch["tokens"].roll(-1, 1)),
    "positions not restarted": lambda batch: batch.update(position_ids=torch.arange(batch["tokens"].shape[1])[None]),
    "padding learnt": lambda batch: batch["loss_mask"].masked_fill_(batch["tokens"] == 99, 1.0),
    "offsets of the padded row": of_params(cu_seqlens_q="cu_seqlens_q_padded", cu_seqlens_kv="cu_seqlens_kv_padded"),
    "padded offsets without padding": of_params(cu_seqlens_q_padded="cu_seqlens_q"),
    "other offsets of keys": of_params(cu_seqlens_kv="cu_seqlens_kv_padded"),
    "longest sequence without padding": lambda batch: batch["packed_seq_params"].update(max_seqlen_q=1),
}


@pytest.mark.planted("test_a_batch_for_megatron_has_shifted_labels_and_places_for_context_parallelism")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_batch_for_megatron_is_found(mistake: str) -> None:
    pack = packs()[0]
    assert len(pack.lengths) > 1 and any(length % 4 for length in pack.lengths)
    batch = megatron_batch(pack, context_parallel=2, pad_id=99)
    MISTAKES[mistake](batch)
    with pytest.raises(AssertionError):
        check_megatron(pack, batch, 2)


def test_megatron_core_takes_the_fields() -> None:
    params = pytest.importorskip("megatron.core.packed_seq_params").PackedSeqParams
    for ranks in (1, 2):
        made = params(**megatron_batch(packs()[0], context_parallel=ranks)["packed_seq_params"])
        assert made.qkv_format == "thd"
