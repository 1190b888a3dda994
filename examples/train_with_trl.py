"""Trains with TRL's SFTTrainer on packed rows of whole sequences. A token attends only to its own sequence.

    pip install trl && python examples/train_with_trl.py

The script takes three steps with the bundled model on a CPU. docs/training.md explains the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

import datasets
import transformers
import trl

from chairlift_train.collate import TRAINER_KEYS, PackCollator
from chairlift_train.isolation import check_isolation
from chairlift_train.layout import Pack
from chairlift_train.stream import PackStream
from chairlift_train.varlen import patch_hf

path = str(files("chairlift") / "assets")  # the bundled model; any causal language model of transformers works
model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32")
tokenizer = transformers.AutoTokenizer.from_pretrained(path)
chats = [f"What is {what}? " * times for what in ("a KV cache", "preemption") for times in range(1, 60)]
sequences = [tokenizer(chat)["input_ids"] for chat in chats]


def packs() -> Iterator[dict[str, Pack]]:
    """One pass over the data. The trainer calls this function for each pass."""
    yield from ({"pack": pack} for pack in PackStream(sequences, capacity=512, overflow="truncate"))


collate = PackCollator(keys=TRAINER_KEYS)
patch_hf(model)  # one attention call per sequence instead of a mask over the whole row
check_isolation(model, strict=True, collate=collate)
settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 3, "logging_steps": 1}
ours = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False, "max_length": None}
trainer = trl.SFTTrainer(
    model,
    trl.SFTConfig("build/trl", **settings, **ours, save_strategy="no", report_to=[], use_cpu=True, bf16=False),
    train_dataset=datasets.IterableDataset.from_generator(packs),
    data_collator=lambda rows: collate([row["pack"] for row in rows]),
    processing_class=tokenizer,
)
trainer.train()
