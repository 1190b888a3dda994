"""Batches say where sequences end; and packed rows give the gradients that the sequences give alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift_train.collate import (
    ALL_KEYS,
    FLASH_KEYS,
    PackCollator,
    jax_inputs,
    packed_seq_params,
    trl_columns,
    xformers_seqlens,
)
from chairlift_train.layout import Layout, Pack
from chairlift_train.loss import StepLoss
from tests.train.families import EXACT, VOCABULARY, tiny

TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-12}


def pack(lengths: list[int], *, prompt: int = 0, seed: int = 0, **fields: Any) -> Pack:
    """Random tokens; the first ``prompt`` of each sequence, and at least one, are no targets."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCABULARY, sum(lengths)).astype(np.int32)
    weights = (Layout.of(lengths).positions >= max(1, prompt)).astype(np.float32)
    return Pack(tokens, tuple(lengths), tuple(range(len(lengths))), weights, **fields)


def test_a_batch_has_all_fields_of_its_pack() -> None:
    batch = PackCollator(keys=(*ALL_KEYS, *FLASH_KEYS))(pack([3, 1, 4], prompt=2, step_weight=9.0, step_sequences=4))
    ids = batch["input_ids"][0].tolist()
    assert batch["labels"].tolist() == [[-100, -100, ids[2], -100, -100, -100, ids[6], ids[7]]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert batch["segment_ids"].tolist() == batch["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2, 2, 2]]
    assert batch["loss_weight"].tolist() == [[0, 0, 1, 0, 0, 0, 1, 1]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 8]
    assert (batch["max_seqlen"], batch["max_length_q"], batch["num_tokens"]) == (4, 4, 8)
    assert (batch["step_weight"], batch["step_sequences"]) == (9.0, 4)
    assert all(batch[key].dtype == torch.int64 for key in ("input_ids", "labels", "position_ids"))
    assert all(batch[key].dtype == torch.int32 for key in ("cu_seqlens", "segment_ids", "cu_seq_lens_k"))
    assert batch["loss_weight"].dtype == torch.float32
    assert batch["use_cache"] is False
    assert "attention_mask" not in batch


def test_the_first_token_of_a_sequence_is_never_a_target() -> None:
    careless = Pack(np.arange(5, dtype=np.int32), (2, 3), (0, 1), np.ones(5, np.float32))
    batch = PackCollator()(careless)
    assert batch["labels"].tolist() == [[-100, 1, -100, 3, 4]]
    assert batch["loss_weight"].tolist() == [[0, 1, 0, 1, 1]]
    assert careless.weights.tolist() == [1] * 5, "the pack itself stays as it was"


def test_padding_is_a_sequence_of_its_own() -> None:
    batch = PackCollator(pad_to=8, pad_id=7)(pack([3, 2]))
    assert batch["input_ids"][0, 5:].tolist() == [7, 7, 7]
    assert batch["labels"][0, 5:].tolist() == [-100] * 3
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 8]
    assert batch["num_tokens"] == 5
    assert PackCollator(pad_to=5)(pack([3, 2]))["cu_seqlens"].tolist() == [0, 3, 5]


def test_features_and_lists_of_packs_are_joined() -> None:
    first, second = pack([3, 2], seed=1), pack([4], seed=2)
    joined = PackCollator()([first, second])
    assert joined["input_ids"][0].tolist() == [*first.tokens.tolist(), *second.tokens.tolist()]
    assert joined["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    features = [
        {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]},
        {"input_ids": torch.tensor([8, 9]), "loss_weight": [1.0, 0.5]},
    ]
    batch = PackCollator()(features)
    assert batch["labels"].tolist() == [[-100, -100, 7, -100, 9]]
    assert batch["loss_weight"].tolist() == [[0, 0, 1, 0, 0.5]]


@pytest.mark.parametrize(
    ("features", "said"),
    [
        ([], "nothing to collate"),
        ([{"text": "x"}], "needs input_ids"),
        ([{"input_ids": []}], "at least 1"),
        ([{"input_ids": [1, 2], "labels": [1]}], "same L"),
        ([{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}], "aligned"),
        ([pack([2], step=0), pack([2], step=1)], r"steps \[0, 1\]"),
        ([Pack(np.zeros(3, np.int32), (2,), (0,), np.ones(3, np.float32))], "3 tokens"),
    ],
)
def test_features_that_do_not_fit_are_refused(features: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PackCollator()(features)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="attention_mask"):
        PackCollator(keys=("input_ids", "attention_mask"))
    with pytest.raises(ConfigError, match="pad_to"):
        PackCollator(pad_to=0)


def test_each_library_gets_the_fields_that_it_reads() -> None:
    batch = PackCollator(pad_to=8)(pack([3, 2]))
    fields = packed_seq_params(batch)
    assert fields["qkv_format"] == "thd"
    assert fields["cu_seqlens_q"].tolist() == fields["cu_seqlens_kv"].tolist() == [0, 3, 5, 8]
    assert fields["max_seqlen_q"] == fields["max_seqlen_kv"] == 3
    assert xformers_seqlens(batch) == [3, 2, 3]
    jax = jax_inputs(batch)
    assert jax["inputs_segmentation"].tolist() == [[1, 1, 1, 2, 2, 0, 0, 0]]
    assert {value.dtype for value in jax.values()} == {np.dtype(np.int32)}
    assert batch["segment_ids"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]


def test_columns_of_trl_are_read_back() -> None:
    source = pack([3, 1, 4], prompt=2)
    columns = trl_columns(source)
    assert columns["seq_lengths"] == [3, 1, 4]
    assert columns["labels"][:2] == [-100, -100]
    ours, theirs = PackCollator()(source), PackCollator()([columns])
    for key in ("input_ids", "labels", "position_ids", "loss_weight", "cu_seqlens", "segment_ids"):
        assert torch.equal(ours[key], theirs[key])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 16), st.integers(0, 4))
@settings(max_examples=50, deadline=None)
def test_a_batch_is_its_pack(lengths: list[int], pad_to: int, prompt: int) -> None:
    source = pack(lengths, prompt=prompt)
    batch = PackCollator(pad_to=pad_to)(source)
    size = batch["num_tokens"]
    assert batch["input_ids"].shape[1] % pad_to == 0
    assert batch["input_ids"].shape[1] - size < pad_to
    assert batch["input_ids"][0, :size].tolist() == source.tokens.tolist()
    assert batch["loss_weight"].sum() == source.weights.sum()
    assert ((batch["labels"] != -100) == (batch["loss_weight"] != 0)).all()
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    layout = Layout((*starts, batch["position_ids"].shape[1]))
    assert layout.cu_seqlens == tuple(batch["cu_seqlens"].tolist())
    assert layout.max_seqlen == batch["max_seqlen"]


def test_a_row_of_many_sequences_is_collated_fast() -> None:
    """As fast as a few empty loops over its tokens: what is measured beside it says how fast the machine is now."""
    source, collate = pack([100] * 40), PackCollator()

    def empty(row: Pack) -> None:
        for _ in range(row.num_tokens):
            pass

    def best(work: Callable[[Pack], object]) -> float:
        """Processor time of the fastest of 50 calls, which nobody held up."""
        times = []
        for _ in range(50):
            start = time.process_time()
            work(source)
            times.append(time.process_time() - start)
        return min(times)

    assert best(collate) < 4 * best(empty)


def gradients(model: Any, batches: list[dict[str, Any]], **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step over these batches, and what it leaves in the parameters."""
    model.zero_grad()
    loss = StepLoss()
    with loss.step(batches):
        for batch in batches:
            given = {"position_ids": batch["position_ids"], "use_cache": batch["use_cache"]} | inputs
            loss(model(batch["input_ids"], **given).logits, batch).backward()
    return loss.total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Relative, over all gradients as one vector."""
    off = sum(((ours[name] - theirs[name]).double() ** 2).sum() for name in theirs)
    return float((off / sum((gradient.double() ** 2).sum() for gradient in theirs.values())) ** 0.5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
@pytest.mark.parametrize("name", EXACT)
def test_packed_gradients_are_those_of_the_sequences_alone(name: str, dtype: torch.dtype) -> None:
    lengths = [11, 3, 1, 17, 8]
    whole = pack(lengths, prompt=2)
    edges = np.cumsum(lengths)[:-1]
    alone = [
        Pack(tokens, (len(tokens),), (0,), weights)
        for tokens, weights in zip(np.split(whole.tokens, edges), np.split(whole.weights, edges), strict=True)
    ]
    model = tiny(name, dtype, attention="sdpa")  # transformers' own attention takes its softmax in float32
    packed_loss, packed = gradients(model, [PackCollator(pad_to=16)(whole)])
    alone_loss, separate = gradients(model, [PackCollator()(one) for one in alone])
    assert packed_loss == pytest.approx(alone_loss, rel=TOLERANCE[dtype])
    assert packed.keys() == separate.keys()
    if name == "gemma3":  # it sums the gradients of its norms in float32, whatever the model's dtype
        norms = {key: value for key, value in separate.items() if "norm" in key}
        assert norms
        assert difference(packed, norms) < TOLERANCE[torch.float32]
        separate = {key: value for key, value in separate.items() if key not in norms}
    assert difference(packed, separate) < TOLERANCE[dtype]


@pytest.mark.parametrize("leak", [{"attention_mask": torch.ones(1, 31)}, {"use_cache": True}], ids=["mask", "cache"])
def test_the_comparison_sees_a_leak(leak: dict[str, Any]) -> None:
    """Arguments with which transformers silently takes the row for one sequence: a mask of ones, and a cache."""
    batch, model = PackCollator()(pack([11, 3, 17])), tiny("llama")
    _, packed = gradients(model, [batch])
    _, leaking = gradients(model, [batch], **leak)
    assert difference(leaking, packed) > 0.05
