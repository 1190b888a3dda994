"""Writes packs to files for training with other frameworks: Megatron-LM, NeMo and TRL.

A writer receives the packs one after another. The files appear only after all packs are written. Needs NumPy, and
pyarrow for Parquet files.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from chairlift.base.writing import replacing
from chairlift.errors import ConfigError
from chairlift_train.collate import PackCollator, trl_columns
from chairlift_train.layout import Pack

__all__ = ["FORMATS", "export_files", "megatron_writer", "nemo_writer", "trl_writer", "writer_of"]

FORMATS: Final = ("megatron", "nemo", "trl")
"""Names of the frameworks for which packs can be written."""

Write = Callable[[Pack], None]

_INDEX_HEADER: Final = b"MMIDIDX\x00\x00"
_DTYPES: Final = {"uint8": 1, "int32": 4, "uint16": 8}
"""NumPy dtype -> code of the dtype in the index file (``DType`` of ``megatron.core.datasets.indexed_dataset``)."""
_SMALL_VOCABULARY: Final = 65_500
"""If the vocabulary is smaller than this, token ids are stored in 16 bits, as in Megatron-LM."""
_ROWS: Final = 500
"""Number of rows in a row group of a Parquet file."""


def export_files(to: str, output: Path) -> list[Path]:
    """Paths of the files that the writer for ``to`` may create. Raises ConfigError if ``output`` has a wrong suffix."""
    suffixes = {"megatron": ("",), "nemo": (".parquet", ".pq", ".npy"), "trl": (".parquet", ".pq", ".jsonl")}[to]
    if to == "megatron":
        if output.suffix in (".bin", ".idx"):
            output = output.with_suffix("")
        masks = output.with_name(f"{output.name}_loss_mask")
        return [each.with_name(f"{each.name}{end}") for each in (output, masks) for end in (".bin", ".idx")]
    if output.suffix not in suffixes:
        raise ConfigError(f"--output {output} for {to} must end in {' or '.join(suffixes)}")
    return [output]


def writer_of(to: str, output: Path, vocab_size: int = 0) -> AbstractContextManager[Write]:
    """Create a writer for ``to``, one of :data:`FORMATS`. ``vocab_size`` limits the token ids for Megatron-LM only; 0
    means no limit."""
    files = export_files(to, output)
    if to == "megatron":
        return megatron_writer(files, vocab_size)
    return nemo_writer(output) if to == "nemo" else trl_writer(output)


class _Indexed:
    """Writes an indexed data set of Megatron-LM: the values of each pack as soon as it is added, and the index file at
    the end."""

    def __init__(self, data: Any, dtype: str) -> None:
        self._data = data
        self._dtype = np.dtype(dtype)
        self._lengths: list[int] = []
        self._documents = [0]

    def add(self, values: npt.NDArray[Any], lengths: tuple[int, ...]) -> None:
        self._data.buffer.write(values.astype(self._dtype).tobytes())
        self._lengths += lengths
        self._documents.append(len(self._lengths))

    def write_index(self, index: Any) -> None:
        lengths = np.array(self._lengths, np.int32)
        starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * self._dtype.itemsize
        head = struct.pack("<QBQQ", 1, _DTYPES[self._dtype.name], len(lengths), len(self._documents))
        index.buffer.write(_INDEX_HEADER + head)
        for values in (lengths, starts, np.array(self._documents, np.int64)):
            index.buffer.write(values.tobytes())


@contextlib.contextmanager
def megatron_writer(files: list[Path], vocab_size: int = 0) -> Iterator[Write]:
    """Write Megatron-LM's ``.bin`` and ``.idx`` files: a sequence becomes a sequence, and a pack becomes a document.

    ``document_indices`` in the index gives the start of each pack. The format has tokens only. If some tokens are not
    targets, a second data set with the same index is written: one byte per token, 1 for a target. ``files`` comes from
    :func:`export_files`. Raises ConfigError for weights other than 0 and 1, and for token ids of ``vocab_size`` or
    more.
    """
    dtype = "uint16" if 0 < vocab_size < _SMALL_VOCABULARY else "int32"
    with contextlib.ExitStack() as stack:
        data, index = (stack.enter_context(replacing(file)) for file in files[:2])
        tokens = _Indexed(data, dtype)
        mask_data, mask_index = (stack.enter_context(_optional_file(file)) for file in files[2:])
        masks = _Indexed(mask_data.file, "uint8")
        is_needed = False

        def write(pack: Pack) -> None:
            nonlocal is_needed
            if vocab_size and int(pack.tokens.max()) >= vocab_size:
                raise ConfigError(f"the token id {pack.tokens.max()} does not fit a vocabulary of {vocab_size}")
            tokens.add(pack.tokens, pack.lengths)
            mask = _binary(pack)
            masks.add(mask, pack.lengths)
            is_needed = is_needed or int(mask.sum()) < pack.num_tokens - len(pack.lengths)

        yield write
        tokens.write_index(index)
        masks.write_index(mask_index.file)
        mask_data.keep = mask_index.keep = is_needed


class _OptionalFile:
    """An open file that is deleted at the end unless ``keep`` is set."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.keep = False


@contextlib.contextmanager
def _optional_file(path: Path) -> Iterator[_OptionalFile]:
    """Context with a file at ``path``, which is deleted at the end unless ``keep`` is set."""
    with replacing(path) as file:
        optional = _OptionalFile(file)
        yield optional
    if not optional.keep:
        path.unlink()


@contextlib.contextmanager
def nemo_writer(output: Path) -> Iterator[Write]:
    """Write the packed data set of NeMo and Megatron-Bridge: ``input_ids``, ``loss_mask`` and ``seq_start_id`` per
    pack.

    The file is Parquet, or ``.npy`` with an array of dicts. A 1 in ``loss_mask`` stands at the token before the target,
    because NeMo's reader drops the last position of each sequence. Raises ConfigError for weights other than 0 and 1.
    """

    def columns(pack: Pack) -> dict[str, list[int]]:
        ahead = np.append(_binary(pack)[1:], np.int8(0))  # shifted left; the last position has no target
        starts = list(pack.layout.cu_seqlens[:-1])
        return {"input_ids": pack.tokens.tolist(), "loss_mask": ahead.tolist(), "seq_start_id": starts}

    types = {"input_ids": "int32", "loss_mask": "int8", "seq_start_id": "int32"}
    if output.suffix == ".npy":
        rows: list[dict[str, list[int]]] = []
        with replacing(output) as file:
            yield lambda pack: rows.append(columns(pack))
            array = np.empty(len(rows), object)
            array[:] = rows
            np.save(file.buffer, array, allow_pickle=True)
        return
    with _parquet(output, types) as write:
        yield lambda pack: write(columns(pack))


@contextlib.contextmanager
def trl_writer(output: Path) -> Iterator[Write]:
    """Write rows with the columns of TRL's packing (:func:`~chairlift_train.collate.trl_columns`).

    The file is Parquet or JSON lines. ``datasets.load_dataset`` reads it. ``SFTTrainer`` accepts the rows if
    ``skip_prepare_dataset`` is set.
    """
    if output.suffix == ".jsonl":
        with replacing(output) as file:
            yield lambda pack: _ignore(file.write(json.dumps(trl_columns(pack)) + "\n"))
        return
    types = {"input_ids": "int32", "labels": "int32", "loss_weight": "float32", "seq_lengths": "int32"}
    with _parquet(output, types) as write:
        yield lambda pack: write(trl_columns(pack))


def _ignore(_value: object) -> None:
    """Do nothing. A lambda that must return None wraps its expression in this function."""


@contextlib.contextmanager
def _parquet(output: Path, types: dict[str, str]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Context with a function that writes a row to a Parquet file. ``types``: column -> pyarrow type of its list
    items."""
    try:
        pyarrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"writing {output} needs pyarrow; install it with: pip install 'chairlift[train]', or give another suffix"
        ) from None
    schema = pyarrow.schema([(name, pyarrow.list_(getattr(pyarrow, kind)())) for name, kind in types.items()])
    rows: list[dict[str, Any]] = []
    with replacing(output) as file, parquet.ParquetWriter(file.buffer, schema) as writer:

        def flush() -> None:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
            rows.clear()

        def write(row: dict[str, Any]) -> None:
            rows.append(row)
            if len(rows) >= _ROWS:
                flush()

        yield write
        flush()


def _binary(pack: Pack) -> npt.NDArray[np.int8]:
    """Loss mask [T]: 1 for a token that is a target, otherwise 0. Raises ConfigError for weights other than 0 and 1."""
    weights = PackCollator(keys=("loss_weight",)).arrays(pack)["loss_weight"][0]
    other = weights[(weights != 0) & (weights != 1)]
    if other.size:
        raise ConfigError(
            f"sequences {', '.join(map(str, pack.ids[:8]))} have a target of weight {other[0]}, but this format has "
            "only the weights 0 and 1; leave loss_weight and weight out, or write for trl"
        )
    mask: npt.NDArray[np.int8] = weights.astype(np.int8)
    return mask
