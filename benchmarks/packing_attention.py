"""Measures attention in packed rows, and checks the leak detector: bounds B2, C1, C2 and C3 of training.

    python benchmarks/packing_attention.py --rounds 5 --json benchmarks/results/packing.json

C1 trains a small random Llama (4 layers, 256 wide) on the same sequences in four ways, interleaved. A round is a
forward and a backward pass over all of them; only real tokens count, not padding. Only the small vocabulary has a
bound. With a vocabulary of 32,000, the output head does most of the work of such a small model, and its logits cause
most of the memory traffic. C3 compares whole passes over the data with TRL: packing, collating, forward, backward and
an AdamW step (``pip install trl==1.16.0 datasets``). ``--clock cpu`` counts CPU seconds, for a machine on which other
programs run. Tests check that gradients of packed and unpacked sequences are equal (B1), and losses over any split (B3,
B4).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from acceptance import Figure, at_least, at_most, context, interleaved, main, missing, peer, ratios
from packers import mix
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chairlift_train.collate import TRAINER_KEYS, PackCollator
from chairlift_train.isolation import check_isolation
from chairlift_train.layout import Layout
from chairlift_train.pack import pack_indices
from chairlift_train.stream import PackStream
from chairlift_train.varlen import attend, patch_hf

SMALL = 4096
"""Number of token ids of the small vocabulary."""
CASES = (
    (2048, SMALL, torch.float32, (2.5, 1.8, 1.1)),
    (2048, SMALL, torch.bfloat16, (2.5, 1.8, 1.1)),
    (4096, SMALL, torch.float32, (None, 1.4, 1.1)),
    (2048, 32_000, torch.float32, (None, None, None)),
)
"""(pack length, vocabulary size, dtype, required speed-ups over padded batches, transformers' packing, and batches of
1)."""
Batches = list[dict[str, Any]]


def b2(args: argparse.Namespace) -> Iterator[Figure]:
    """Run the leak detector on families that leak, on families that do not leak, and with a mask of ones."""
    families = importlib.import_module("tests.train.families")
    seconds: list[float] = []

    def isolated(name: str, **settings: bool) -> bool:
        model = families.tiny(name)
        begin = time.perf_counter()
        report = check_isolation(model, **settings)
        seconds.append(time.perf_counter() - begin)
        return bool(report)

    missed = [name for name in families.LEAKING if isolated(name)]
    yield at_most(f"leaks missed, {len(families.LEAKING)} families", len(missed), 0, "", ", ".join(missed))
    false = [name for name in families.EXACT if not isolated(name)]
    yield at_most(f"false alarms, {len(families.EXACT)} families", len(false), 0, "", ", ".join(false))
    masked = [name for name in families.EXACT if isolated(name, attention_mask=True)]
    yield at_most("masks of ones missed", len(masked), 0, "", ", ".join(masked))
    yield at_most("longest check", max(seconds), 2.0, "s", f"median {sorted(seconds)[len(seconds) // 2]:.2f} s")


class Llama:
    """A small random Llama of transformers, with passes over batches of the same sequences."""

    def __init__(
        self, sequences: Sequence[Tensor], vocabulary: int = SMALL, dtype: torch.dtype = torch.float32
    ) -> None:
        import transformers

        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = transformers.LlamaConfig(vocab_size=vocabulary, **sizes, max_position_embeddings=8192, use_cache=False)
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
        self.targets = sum(len(ids) - 1 for ids in sequences)
        self.losses: dict[str, float] = {}

    def train(self, name: str, batches: Batches, packed: bool = False) -> None:
        """Forward and backward passes over all batches. Each loss is a sum divided by the number of targets in all
        batches."""
        handle = patch_hf(self.model) if packed else None
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            loss = self.model(**batch, num_items_in_batch=self.targets).loss
            loss.backward()
            total += float(loss.detach())
        self.losses[name] = total
        if handle is not None:
            handle.remove()


def padded(sequences: Sequence[Tensor], size: int) -> Batches:
    """Batches in the order of arrival, right-padded to the longest sequence. A batch of one sequence has no mask."""
    batches = []
    for at in range(0, len(sequences), size):
        some = sequences[at : at + size]
        pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        batch = {"input_ids": pad(list(some)), "labels": pad(list(some), padding_value=-100)}
        if size > 1:
            batch["attention_mask"] = pad([torch.ones_like(ids) for ids in some])
        batches.append(batch)
    return batches


def c1(args: argparse.Namespace) -> Iterator[Figure]:
    """Tokens per second on the CPU of attention per segment, padded batches, transformers' packed rows, and batches of
    1."""
    import transformers

    for capacity, vocabulary, dtype, demanded in CASES:
        lengths = mix("chat", 8 * args.batches, 0, capacity)
        sequences = [torch.randint(0, vocabulary, (length,)) for length in lengths]
        rows = [[{"input_ids": sequences[i].tolist()} for i in pack] for pack in pack_indices(lengths, capacity)]
        flatten, collate = transformers.DataCollatorWithFlattening(), PackCollator(keys=TRAINER_KEYS)
        others = ("padded, batches of 8", "transformers, packed", "batch 1, accumulated")
        batches = {
            others[0]: padded(sequences, 8),
            others[1]: [dict(flatten(row)) for row in rows],
            others[2]: padded(sequences, 1),
            "per segment": [collate(row) for row in rows],
        }
        llama = Llama(sequences, vocabulary, dtype)
        runs = {
            name: functools.partial(llama.train, name, each, packed=name == "per segment")
            for name, each in batches.items()
        }
        seconds = interleaved(runs, args.rounds, clock=args.clock)
        case = f"{capacity // 1024}k" if vocabulary == SMALL else f"{capacity // 1024}k, {vocabulary:,} ids"
        case += ", bf16" if dtype is torch.bfloat16 else ""
        places = sum(batch["input_ids"].numel() for batch in batches[others[0]])
        yield context(f"{case}: padding in batches of 8", 100 * (1 - sum(lengths) / places), "%")
        for name, values in seconds.items():
            yield context(f"{case}: {name}", [sum(lengths) / s for s in values], "tok/s")
        for name, bound in zip(others, demanded, strict=True):
            yield Figure(
                f"{case}: per segment / {name}",
                tuple(ratios(seconds[name], seconds["per segment"])),
                bound,
                ">=" if bound else "",
                "x",
            )
        apart = max(abs(loss / llama.losses[others[2]] - 1) for loss in llama.losses.values())
        yield at_most(f"{case}: losses apart, relative", apart, 1e-5 if dtype is torch.float32 else 1e-3)


def c3(args: argparse.Namespace) -> Iterator[Figure]:
    """Targets per second of a pass over the data with our packs, with TRL's bfd packs, and with padded batches."""
    if (trl := peer("trl")) is None:
        yield missing("our packs / TRL bfd", "trl")
        return
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    datasets = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    capacity = 2048
    lengths = mix("chat", 8 * args.batches, 0, capacity)
    sequences = [torch.randint(0, SMALL, (length,)) for length in lengths]
    lists = [ids.tolist() for ids in sequences]
    dataset = datasets.Dataset.from_dict({"input_ids": lists})
    flatten = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    collate = PackCollator(keys=TRAINER_KEYS)
    llama = Llama(sequences)
    optimizer = torch.optim.AdamW(llama.model.parameters(), 0.0)  # a rate of 0 keeps the losses comparable
    places: dict[str, int] = {}

    def run(name: str, batches: Batches, packed: bool = False) -> None:
        places[name] = sum(batch["input_ids"].numel() for batch in batches)
        llama.train(name, batches, packed)
        optimizer.step()

    def bfd() -> Batches:
        rows = trl.pack_dataset(dataset, capacity, "bfd", map_kwargs={"load_from_cache_file": False})
        return [dict(flatten([row])) for row in rows]

    runs: dict[str, Callable[[], None]] = {
        "our packs": lambda: run("our packs", [collate(pack) for pack in PackStream(lists, capacity)], packed=True),
        "TRL bfd": lambda: run("TRL bfd", bfd()),
        "padded, batches of 8": lambda: run("padded, batches of 8", padded(sequences, 8)),
    }
    seconds = interleaved(runs, args.rounds, clock=args.clock)
    unit = {"wall": "s", "cpu": "CPU s"}[args.clock]
    for name, values in seconds.items():
        note = f"{100 * (1 - sum(lengths) / places[name]):.1f} % padding"
        yield context(name, [llama.targets / s for s in values], f"targets/{unit}", note)
    for name, bound in (("TRL bfd", 1.3), ("padded, batches of 8", 2.0)):
        yield at_least(f"our packs / {name}", ratios(seconds[name], seconds["our packs"]), bound, "x")
    apart = max(abs(loss / llama.losses["our packs"] - 1) for loss in llama.losses.values())
    yield at_most("losses apart, relative", apart, 1e-5)


def c2(args: argparse.Namespace) -> Iterator[Figure]:
    """Cases in which no gain is possible: rows of equal sequences, and of one sequence, compared with PyTorch's own
    attention."""
    for label, count, length in (("4 of 512", 4, 512), ("1 of 2048", 1, 2048)):
        layout = Layout.of([length] * count)
        q, k, v = (torch.randn(count * length, 8, 64, requires_grad=True) for _ in range(3))
        weight = torch.randn(count * length, 8, 64)

        def plain(q: Tensor = q, k: Tensor = k, v: Tensor = v, shape: Any = (count, length, 8, 64)) -> Tensor:
            apart = [x.view(shape).transpose(1, 2) for x in (q, k, v)]
            return scaled_dot_product_attention(*apart, is_causal=True).transpose(1, 2).reshape(q.shape)

        def ours(q: Tensor = q, k: Tensor = k, v: Tensor = v, layout: Layout = layout) -> Tensor:
            return attend(q, k, v, layout)

        def passes(run: Callable[[], Tensor], weight: Tensor = weight) -> None:
            for _ in range(args.repeats):
                (run() * weight).sum().backward()

        off = float((ours() - plain()).detach().abs().max())
        yield at_most(f"{label}: outputs apart", off, 1e-5)
        runs = {"sdpa": functools.partial(passes, plain), "ours": functools.partial(passes, ours)}
        seconds = interleaved(runs, 4 * args.rounds, clock=args.clock)
        slower = [100 * (ratio - 1) for ratio in ratios(seconds["ours"], seconds["sdpa"])]
        yield at_most(f"{label}: attention alone, slower by", slower, 3.0, "%")
        sequences = [torch.randint(0, SMALL, (length,)) for _ in range(count)]
        llama = Llama(sequences)
        together = [{"input_ids": torch.stack(sequences), "labels": torch.stack(sequences)}]
        row = [PackCollator(keys=TRAINER_KEYS)([{"input_ids": ids.tolist()} for ids in sequences])]
        models = {
            "sdpa": functools.partial(llama.train, "sdpa", together),
            "ours": functools.partial(llama.train, "ours", row, packed=True),
        }
        seconds = interleaved(models, args.rounds, clock=args.clock)
        slower = [100 * (ratio - 1) for ratio in ratios(seconds["ours"], seconds["sdpa"])]
        yield at_most(f"{label}: the whole model, slower by", slower, 3.0, "%")
        yield at_most(f"{label}: losses apart", abs(math.log(llama.losses["ours"] / llama.losses["sdpa"])), 1e-5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=2, help="batches of 8 sequences per pass in C1")
    parser.add_argument("--repeats", type=int, default=5, help="passes of attention per round in C2")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    threads = parser.parse_known_args()[0].threads
    torch.set_num_threads(threads)
    main({"B2": b2, "C1": c1, "C2": c2, "C3": c3}, parser)
