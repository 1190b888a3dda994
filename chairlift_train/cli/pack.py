"""``chairlift pack``: packs a file of sequences, and prints how full the packs are."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from chairlift.base.writing import replacing
from chairlift.cli.flags import whole
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift_train.encoder import Encode
    from chairlift_train.layout import Pack
    from chairlift_train.stream_stats import StreamStats

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "show how well a file of sequences packs, or write the packs for other frameworks"
DESCRIPTION: Final = """Pack the sequences of a file as training would, and show how much space is wasted.

A record has input_ids. With --tokenizer it may have a chat, a text, or prompt and completion instead. With
--length-field it has only a number of tokens. FILE may be JSON lines, a JSON array, Parquet, a pattern, or the
directory of a Hugging Face dataset. --to writes the packs for Megatron-LM (PREFIX.bin and PREFIX.idx), NeMo (.parquet,
.npy) or TRL (.parquet, .jsonl).

  chairlift pack chats.jsonl --tokenizer MODEL_DIR --capacity 8192
  chairlift pack chats.jsonl --tokenizer MODEL_DIR --to nemo --output chats.idx.parquet
  chairlift pack lengths.jsonl --length-field num_tokens --output packs.jsonl"""

_BATCH: Final = 8
_BAR: Final = 40
_LONGEST: Final = 100_000_000
"""Maximum length of a sequence that is given by its length only. Such a sequence takes memory until it is packed."""
_FILLS: Final = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift pack``."""
    parser.add_argument("file", metavar="FILE", type=Path, help="file, pattern or directory with records")
    parser.add_argument(
        "--capacity", metavar="TOKENS", type=whole, default=4096, help="tokens per pack (default: 4096)"
    )
    parser.add_argument("--pool", metavar="N", type=whole, default=256, help="sequences to choose among (default: 256)")
    parser.add_argument(
        "--align",
        metavar="N",
        type=whole,
        default=1,
        help="begin every sequence at a multiple of this number of tokens (default: 1)",
    )
    parser.add_argument(
        "--max-sequences", metavar="N", type=whole, help="maximum number of sequences in a pack (default: any number)"
    )
    parser.add_argument(
        "--overflow",
        choices=("split", "truncate", "drop", "error"),
        default="split",
        help="what to do with sequences longer than a pack (default: split)",
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a record that cannot be used: stop (default), or skip and count it",
    )
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="model directory whose tokenizer reads texts")
    parser.add_argument("--text-field", metavar="NAME", default="text", help="field with the text (default: text)")
    parser.add_argument("--length-field", metavar="NAME", help="field with the number of tokens")
    parser.add_argument(
        "--train-on",
        choices=("answers", "all"),
        help="which part of chats and prompts is trained (default: answers with --to, which writes it; otherwise all)",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", type=Path, help="template for training (default: the model's)"
    )
    parser.add_argument("--to", choices=("megatron", "nemo", "trl"), help="write the packs for this framework")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="write the packs to this file, a JSON object on each line"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


@dataclasses.dataclass(slots=True)
class _Tally:
    """Statistics for the report that :class:`~chairlift_train.stream_stats.StreamStats` does not have."""

    capacity: int
    align: int = 1
    lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    """Length in tokens -> number of sequences. Each piece of a split sequence is counted separately."""
    fills: list[int] = dataclasses.field(default_factory=lambda: [0] * len(_FILLS))
    """Number of packs per range of fill. ``_FILLS`` has the lower bounds of the ranges."""
    batch: list[int] = dataclasses.field(default_factory=list)
    padded: int = 0
    """Number of tokens, including padding, if the sequences were padded in batches of :data:`_BATCH` to the longest of
    each batch."""
    next_fit: int = 0
    room: int = 0
    """Free tokens in the current pack of the next-fit algorithm, which is simulated for comparison."""

    def on_sequence(self, length: int) -> None:
        self.lengths[length] = self.lengths.get(length, 0) + 1
        length = -(-length // self.align) * self.align
        self.batch.append(length)
        if len(self.batch) == _BATCH:
            self.end_batch()
        if length > self.room:
            self.next_fit += 1
            self.room = self.capacity
        self.room -= length

    def end_batch(self) -> None:
        self.padded += len(self.batch) * max(self.batch, default=0)
        self.batch.clear()

    def on_pack(self, tokens: int) -> None:
        fill = tokens / self.capacity
        self.fills[max(index for index, lower_bound in enumerate(_FILLS) if fill >= lower_bound)] += 1


def run(args: argparse.Namespace) -> int:
    """Pack and print the result. Returns 0. Raises ChairliftError if it cannot run."""
    from chairlift_train.encoder import fitting
    from chairlift_train.sources import RecordSource
    from chairlift_train.stream import PackStream

    encode, vocab_size = _reader(args)
    # A framework that reads the packs would fail at a token id that the model lacks, and could not name the record.
    most_ids = (vocab_size or None) if args.to is not None else None
    read = fitting(encode, most_ids, args.capacity if args.overflow == "error" else None)
    source = RecordSource([args.file], read, on_error=args.on_error)
    _check_output(args)
    tally = _Tally(args.capacity, max(1, args.align))
    stream = PackStream(
        _counted(source, tally, args),
        args.capacity,
        pool=args.pool,
        align=args.align,
        max_sequences=args.max_sequences,
        overflow=args.overflow,
    )
    with contextlib.ExitStack() as stack:
        write = None if args.output is None else stack.enter_context(_writer(args, vocab_size))
        for pack in stream:
            tally.on_pack(_num_tokens(pack, args.align))
            if write is not None:
                write(pack)
    tally.end_batch()
    stats = stream.stats()
    record = _record(stats, tally) | {"skipped": source.skipped}
    print("\n".join([json.dumps(record)] if args.json else _lines(stats, tally, args)))
    if source.skipped:
        records = "1 record" if source.skipped == 1 else f"{source.skipped:,} records"
        named = source.notes.skipped_text(source.skipped)
        print(f"{records} of {args.file} could not be used and were skipped{named}", file=sys.stderr)
    for line in source.notes.lines():
        print(line, file=sys.stderr)
    return 0


def _check_output(args: argparse.Namespace) -> None:
    """Raise ConfigError if the output file cannot be written, or would replace the input."""
    from chairlift_train.exports import export_files
    from chairlift_train.record_files import expand

    if args.to is not None and args.output is None:
        raise ConfigError(f"--to {args.to} writes files: name them with --output")
    if args.to is not None and args.length_field is not None:
        raise ConfigError("--length-field reads no tokens, so nothing can be written for others; leave out --to")
    if args.to is not None and args.align > 1:
        raise ConfigError(
            f"--align {args.align} would write padding, which the loop that reads the packs adds itself "
            "(chairlift_train.adapters.megatron_batch); leave out --align or --to"
        )
    if args.output is not None and not args.output.parent.is_dir():
        raise ConfigError(f"--output {args.output}: the directory {args.output.parent} does not exist; make it first")
    written = [args.output] if args.to is None else export_files(args.to, args.output)
    read = [file.resolve() for file in expand([args.file])]
    if lost := [file for file in written if file is not None and file.resolve() in read]:
        raise ConfigError(f"--output {lost[0]} is the file that is read, and would be lost; give another name")


def _writer(args: argparse.Namespace, vocab_size: int) -> AbstractContextManager[Callable[[Pack], None]]:
    from chairlift_train.exports import writer_of

    return _plain_writer(args.output) if args.to is None else writer_of(args.to, args.output, vocab_size)


@contextlib.contextmanager
def _plain_writer(path: Path) -> Iterator[Callable[[Pack], None]]:
    with replacing(path) as output:
        yield lambda pack: _write(output, pack.ids, pack.lengths)


def _num_tokens(pack: Pack, align: int) -> int:
    """Number of tokens in a pack without the padding that ``align`` adds. (With ``align``, exactly the padding and the
    first token of each sequence have weight 0.)"""
    return len(pack.lengths) + int((pack.weights != 0).sum()) if align > 1 else pack.num_tokens


def _reader(args: argparse.Namespace) -> tuple[Encode, int]:
    """(function that encodes records, upper bound of its token ids or 0 if unknown)."""
    from chairlift_train.encoder import Encoder

    if args.length_field is None:
        train_on: Any = args.train_on or ("all" if args.to is None else "answers")
        template = args.chat_template
        encoder = Encoder(args.tokenizer, text_field=args.text_field, train_on=train_on, chat_template=template)
        return encoder.examples, encoder.vocab_size
    import numpy as np

    def read(record: Mapping[str, Any]) -> Mapping[str, Any]:
        length = record.get(args.length_field)
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= _LONGEST:
            raise ConfigError(
                f"{args.length_field} must be a number of tokens, from 1 to {_LONGEST:,}, got {str(length)[:40]!r}"
            )
        return {"input_ids": np.zeros(length, np.int32)}

    return read, 0


def _counted(
    source: Iterator[Mapping[str, Any]], tally: _Tally, args: argparse.Namespace
) -> Iterator[Mapping[str, Any]]:
    """Yield the items of ``source``, and add the lengths of their sequences, as they will be packed, to ``tally``."""
    for item in source:
        length = len(item["input_ids"])
        capacity = args.capacity
        pieces = [min(capacity, length - start) for start in range(0, length, capacity)] if capacity > 0 else []
        if length > capacity:
            pieces = {"split": pieces, "truncate": pieces[:1]}.get(args.overflow, [])
        for piece in pieces:
            tally.on_sequence(piece)
        yield {"input_ids": item["input_ids"]} if args.to is None else item


def _write(output: IO[str], ids: Sequence[int], lengths: Sequence[int]) -> None:
    output.write(json.dumps({"ids": list(ids), "lengths": list(lengths)}) + "\n")


def _compared(stats: StreamStats, tally: _Tally) -> dict[str, float]:
    room = tally.next_fit * tally.capacity
    return {
        "padding": 1 - stats.tokens / tally.padded if tally.padded else 0.0,
        "next_fit": 1 - stats.tokens / room if room else 0.0,
    }


def _record(stats: StreamStats, tally: _Tally) -> dict[str, Any]:
    return {
        "capacity": tally.capacity,
        **dataclasses.asdict(stats),
        "waste_of": _compared(stats, tally),
        "next_fit_packs": tally.next_fit,
        "lengths": [[low, high, count] for low, high, count in _length_bins(tally)],
        "fills": [[lower_bound, count] for lower_bound, count in zip(_FILLS, tally.fills, strict=True)],
    }


def _lines(stats: StreamStats, tally: _Tally, args: argparse.Namespace) -> list[str]:
    padding, next_fit = _compared(stats, tally).values()
    handled = [("split", stats.split), ("truncated", stats.truncated), ("dropped", stats.dropped)]
    too_long = ", ".join(f"{count:,} {what}" for what, count in handled if count) or "none"
    lost = sum(cut.tokens for cut in stats.cut.values())
    too_long += f", {lost:,} tokens cut" if lost else ""
    delay = stats.delay_packs
    waited = stats.delay_arrivals
    lines = [
        f"sequences     {stats.sequences:,} of {stats.tokens / max(1, stats.sequences):,.1f} tokens on average",
        f"tokens        {stats.tokens:,}",
        f"too long      {too_long}",
        f"packs         {stats.packs:,} of {args.capacity:,} tokens, pool {args.pool}",
        f"waste         {stats.waste:.3%}, {stats.excess:.3%} more packs than the lower bound",
        f"delay         p50 {delay.p50:,}, p99 {delay.p99:,}, at most {delay.max:,} packs; "
        f"at most {waited.max:,} arrivals",
        f"drift         mean length within {stats.length_drift_max:.1%} of the source's over time",
        f"against       padded batches of {_BATCH} in this order waste {padding:.1%}",
        f"              next-fit needs {tally.next_fit:,} packs and wastes {next_fit:.1%}",
        "",
        "length",
    ]
    bins = _length_bins(tally)
    lines += _bars([(f"{low:,}-{high:,}" if low < high else f"{low:,}", count) for low, high, count in bins])
    lines += ["", "pack fill"]
    names = [f"{low:.0%}-{high:.0%}" for low, high in itertools.pairwise(_FILLS)]
    return lines + _bars([*zip(names, tally.fills, strict=False), ("full", tally.fills[-1])])


def _length_bins(tally: _Tally) -> list[tuple[int, int, int]]:
    """Bins of a histogram of lengths: (shortest length, longest length, number of sequences). Each bin is twice as wide
    as the previous bin."""
    counts: dict[int, int] = {}
    for length, count in tally.lengths.items():
        counts[length.bit_length()] = counts.get(length.bit_length(), 0) + count
    every = range(min(counts, default=1), max(counts, default=0) + 1)
    longest = max(tally.lengths, default=0)
    return [(1 << bits - 1, min(longest, (1 << bits) - 1), counts.get(bits, 0)) for bits in every]


def _bars(rows: Sequence[tuple[str, int]]) -> list[str]:
    maximum = max((count for _, count in rows), default=0)
    return [
        f"{name:>13} {'#' * (-(-count * _BAR // maximum) if count else 0):{_BAR}} {count:,}".rstrip()
        for name, count in rows
    ]
