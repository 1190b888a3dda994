"""Adapters of a model that several processes share: every kind computes the bits of one process."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch

from chairlift.config import LoRAConfig
from chairlift.errors import EngineDeadError, ModelLoadError
from chairlift.executor.parallel.orders import Orders
from chairlift.executor.parallel.parallel_adapters import ParallelAdapters
from chairlift.kernels.cpu.communicator import Communicator, shared_file
from chairlift.kernels.weights import NATIVE, QUANTIZED
from chairlift.lora.reader import WEIGHTS_NAME
from tests.executor.parallel.ranks import Ranks
from tests.executor.parallel.test_parallel_runner import run
from tests.kernels.cpu.models import VOCAB
from tests.lora.adapters import random_adapter
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels

pytestmark = needs_kernels

LORA = LoRAConfig(enable_lora=True, max_loras=2, max_cpu_loras=3, max_lora_rank=8)
Q = ["q_proj"]
BIG: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "all-linear": ("llama", {}, {}),
    "fused": ("phi3", {}, {"r": 6}),
    "dora": ("qwen3", {}, {"use_dora": True, "r": 5}),
    "own-biases": ("qwen2", {}, {"bias": "lora_only", "target_modules": ["q_proj", "v_proj"]}),
    "embedding-tied": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "head": ("llama", {"tie_word_embeddings": False}, {"target_modules": [*Q, "lm_head"]}),
    "saved": ("qwen2", {}, {"target_modules": ["v_proj"], "modules_to_save": ["q_proj", "down_proj"]}),
    "tokens-tied": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": Q, "trainable_token_indices": {"embed_tokens": [3, 7, 64]}},
    ),
    "experts": ("qwen2_moe", {}, {}),
    "experts-with-biases": (
        "gpt_oss",
        {},
        {"target_modules": Q, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "router": ("olmoe", {}, {"target_modules": Q, "target_parameters": ["mlp.gate.weight"]}),
}
SHORT = ("all-linear", "dora", "embedding-tied", "experts")


def put(ranks: Ranks, adapter_id: int, path: Path) -> None:
    """Load an adapter into the model on one process, and into the divided one."""
    assert ranks.alone.adapters is not None
    ranks.alone.adapters.put(adapter_id, ranks.alone.adapters.read(path, None))
    adapters = adapters_of(ranks)
    adapters.put(adapter_id, adapters.read(path, None))


def adapters_of(ranks: Ranks) -> ParallelAdapters:
    adapters: object = ranks.first.adapters
    assert isinstance(adapters, ParallelAdapters)
    return adapters


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in SHORT else pytest.mark.nightly) for k in KINDS])
def test_adapters_keep_their_bits(kind: str, tmp_path: Path) -> None:
    family, fields, settings = KINDS[kind]
    model_dir = tiny_hf_model(tmp_path, family, vocab_size=VOCAB, **fields)
    paths = [random_adapter(model_dir, tmp_path / f"a{n}", seed=n, **settings) for n in range(2)]
    ranks = Ranks(model_dir, torch.bfloat16, 2, lora=LORA)
    for number, path in enumerate(paths, 1):
        put(ranks, number, path)
    run(ranks, seed=1, adapters=(1, 0, 2))
    ranks.close()


@pytest.mark.parametrize("weights", ["floats", "int8"])
def test_four_processes_have_adapters(weights: str, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", **BIG)
    form = NATIVE if weights == "floats" else QUANTIZED[weights]
    ranks = Ranks(model_dir, torch.float32, 4, lora=LORA, weight_format=form)
    put(ranks, 1, random_adapter(model_dir, tmp_path / "a"))
    run(ranks, adapters=(1, 0))
    ranks.close()


def test_an_adapter_takes_the_memory_of_its_parts(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", **BIG)
    path = random_adapter(model_dir, tmp_path / "a")
    ranks = Ranks(model_dir, torch.float32, 2, lora=LORA)
    assert ranks.alone.adapters is not None
    whole = ranks.alone.adapters.read(path, None)
    held = adapters_of(ranks).read(path, None)
    assert held.own.nbytes < whole.nbytes < held.nbytes  # the matrices A are in every process
    assert held.digest == whole.digest
    ranks.close()


def test_an_adapter_that_leaves_memory_leaves_all_processes(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", **BIG)
    path = random_adapter(model_dir, tmp_path / "a")
    ranks = Ranks(model_dir, torch.float32, 2, lora=LORA)
    adapters = adapters_of(ranks)
    for number in range(1, 6):  # more than fit at once
        adapters.put(number, adapters.read(path, None))
        gc.collect()
        assert not adapters._unused, "an order would overtake the message that puts it into memory"
        adapters.drop(number)
    unused = adapters.read(path, None)
    other = ranks.runners[1]
    assert list(other.held) == [unused.key]
    del unused
    gc.collect()
    last = adapters.read(path, None)
    assert list(other.held) == [last.key]
    ranks.close()


def test_an_adapter_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama", **BIG)
    path = random_adapter(model_dir, tmp_path / "a")
    ranks = Ranks(model_dir, torch.float32, 2, lora=LORA)
    adapters = adapters_of(ranks)
    own = adapters._own.read(path, None)
    (path / WEIGHTS_NAME).unlink()
    adapters._own.read = lambda *_: own  # type: ignore[method-assign]  # it is deleted after process 0 has read it
    with pytest.raises(ModelLoadError, match=rf"in process 1 of tensor_parallel_size 2: .*{WEIGHTS_NAME}"):
        adapters.read(path, None)
    random_adapter(model_dir, path, seed=1)
    with pytest.raises(ModelLoadError, match="the files changed while the processes of the model read them"):
        adapters.read(path, None)
    ranks.close()


@pytest.mark.parametrize("closes", ["", "before", "then"])
def test_an_order_ends_with_the_process_that_should_obey_it(closes: str) -> None:
    file = shared_file()
    comm = Communicator(file, 0, 2)
    ours, theirs = socket.socketpair()
    pipe = cast("IO[bytes]", ours.makefile("rwb"))
    with ours, theirs:
        if not closes:
            comm.end()  # it hangs, and another thread has noticed it
        elif closes == "before":
            theirs.close()
        else:
            theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(EngineDeadError):
            Orders([ours], [pipe], comm).give({"do": "weights"})
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    os.close(file)
