"""The output head: its logits are the product, its greedy choice the lowest of the best ids, each row for itself."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chairlift.kernels.cpu import library as lib
from chairlift.kernels.cpu.fused_op import OpKind
from tests.kernels.cpu.approximate import Approximate, assert_near, products
from tests.kernels.cpu.one_op import (
    Batch,
    Buffer,
    Machine,
    counts,
    equal_bits,
    normal,
    packed,
    packed_bias,
    pool,
    program,
    run,
    size_in,
    whole_numbers,
)
from tests.sweep import sweep

pytestmark = pytest.mark.usefixtures("native_library")

NAN = float("nan")
TOP = 3
"""Logprobs asked for, where any are."""


@dataclasses.dataclass
class Head:
    """Hidden states of a step, an output head, and which of the step's tokens are sampled."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    tokens: list[int]
    cap: float = 0.0

    @classmethod
    def draw(cls, rng: random.Random, dtype: torch.dtype, *, exact: bool) -> Head:
        rows = size_in(rng, (1, 1), (1, 13), (1, 70), (384, 420))
        k, vocab = size_in(rng, (1, 70), (1, 700)), size_in(rng, (TOP + 1, 40), (100, 700), (100, 4000))
        if exact:
            hidden, weight = (whole_numbers(rng, count, k, most=1, dtype=dtype) for count in (rows, vocab))
        else:
            hidden, weight = (normal(rng, count, k, scale=k**-0.25, dtype=dtype) for count in (rows, vocab))
        bias = whole_numbers(rng, vocab).to(dtype) if rng.random() < 0.3 else None
        tokens = [rng.randrange(rows) for _ in range(rng.randint(1, rows))]
        return cls(hidden, weight, bias, tokens)

    @property
    def logits(self) -> Approximate:
        """Logits of all tokens, [rows, vocab]."""
        logits = products(self.hidden, self.weight)
        logits = logits if self.bias is None else logits + Approximate.exactly(self.bias)
        return logits.capped(self.cap) if self.cap else logits

    def sample(self, machine: Machine, rng: random.Random, which: list[int], rows: list[dict[str, Any]]) -> Sampled:
        """Rows number ``which`` of the sampled ones in a call of their own, each with its settings."""
        vocab, k = self.weight.shape
        hidden = Buffer(rng, machine, len(self.hidden), k, self.hidden)
        records: np.ndarray[Any, Any] = np.zeros(len(which), dtype=lib.SAMPLING_ROW)
        top_ids, top = np.full((len(which), TOP + 1), -7, np.int32), np.full((len(which), TOP + 1), NAN, np.float32)
        plain = {"top_p": 1.0, "repetition": 1.0, "target": -1, "num_logprobs": -1}
        for i, settings in enumerate(rows):
            pointers = {"top_ids": top_ids[i].ctypes.data, "top_logprobs": top[i].ctypes.data}
            for name, value in {**plain, **pointers, **settings}.items():
                records[i][name] = value
        stored = sum("num_logprobs" in settings for settings in rows)
        logits = torch.full((stored + 1, -(-vocab // 32) * 32), NAN)
        token_rows = np.array([self.tokens[i] for i in which], dtype=np.int32)
        weight, bias = packed(self.weight), None if self.bias is None else packed_bias(self.bias)
        struct, _kept = program(machine)
        done = lib.require().cl_head(
            pool(machine.threads).handle,
            struct,
            hidden.whole.data_ptr(),
            hidden.whole.stride(0),
            token_rows.ctypes.data,
            None,
            len(which),
            lib.OpStruct(
                n=vocab, k=k, cap=self.cap, weight=weight.data_ptr(), bias=bias if bias is None else bias.data_ptr()
            ),
            records.ctypes.data,
            logits.data_ptr(),
            stored,
        )
        assert done == 0
        hidden.check_frame()
        assert logits[stored].isnan().all(), "more logits were stored than asked for"
        tokens, statuses, ranks = (records[name].tolist() for name in ("token", "status", "rank"))
        return Sampled(tokens, statuses, ranks, logits[:stored, :vocab], top_ids, top)


@dataclasses.dataclass
class Sampled:
    tokens: list[int]
    statuses: list[int]
    ranks: list[int]
    logits: Tensor
    """float32 [stored rows, vocab]"""
    top_ids: np.ndarray[Any, Any]
    top_logprobs: np.ndarray[Any, Any]


STORED: dict[str, Any] = {"num_logprobs": TOP}
SAMPLED, RAW_NAN = 0, 1


def check_ties(machine: Machine, seed: int) -> None:
    """Small whole numbers: logits are exact and many are the best."""
    rng = random.Random(seed)
    head = Head.draw(rng, machine.dtype, exact=True)
    everyone = list(range(len(head.tokens)))
    logits = head.logits.value[head.tokens]
    rows = [rng.choice(({}, STORED)) for _ in everyone]
    found = head.sample(machine, rng, everyone, rows)
    assert found.statuses == [SAMPLED] * len(everyone)
    assert found.tokens == logits.argmax(-1).tolist()  # of equal ones the first
    stored = [i for i, row in enumerate(rows) if row]
    assert torch.equal(found.logits.double(), logits[stored])
    for i in stored:
        ids = found.top_ids[i]
        assert (ids[0], found.ranks[i]) == (found.tokens[i], 1)
        assert ids[1:].tolist() == logits[i].sort(descending=True, stable=True).indices[:TOP].tolist()


def check_rows(machine: Machine, seed: int) -> None:
    """Logits within rounding of the product; tokens and logprobs the same bits in any company."""
    rng = random.Random(seed)
    head = Head.draw(rng, machine.dtype, exact=False)
    head.cap = rng.choice((0.0, 0.0, 1.0, 30.0))
    everyone = list(range(len(head.tokens)))
    settings: list[dict[str, Any]] = []
    for _ in everyone:
        noise = {"temperature": rng.choice((0.0, 0.7, 1.0, 2.0)), "seed": rng.getrandbits(64)}
        settings.append({**noise, "position": rng.randrange(1000), **rng.choice(({}, STORED))})
    found = head.sample(machine, rng, everyone, settings)
    stored = [i for i, row in enumerate(settings) if "num_logprobs" in row]
    if stored:
        assert_near(found.logits, head.logits[[head.tokens[i] for i in stored]], f"{len(stored)} rows of logits")
        if not head.cap:
            assert_is_the_linear_operation(machine, rng, head, [head.tokens[i] for i in stored], found.logits)
    some = rng.sample(everyone, rng.randint(1, min(len(everyone), 20)))
    for which in (some, some[:1]):
        # Whether logits are stored must not matter either.
        again = head.sample(
            machine._replace(threads=rng.choice((1, 2, 3))), rng, which, [{**settings[i], **STORED} for i in which]
        )
        assert again.tokens == [found.tokens[i] for i in which], "a token depends on its batch"
        for place, i in enumerate(which):
            if i in stored:
                assert again.top_ids[place].tolist() == found.top_ids[i].tolist()
                assert again.top_logprobs[place].tobytes() == found.top_logprobs[i].tobytes()
                assert equal_bits(again.logits[place], found.logits[stored.index(i)])


def assert_is_the_linear_operation(
    machine: Machine, rng: random.Random, head: Head, tokens: list[int], logits: Tensor
) -> None:
    """The head differs from a layer of the body in not rounding its result."""
    vocab, k = head.weight.shape
    inputs = Buffer(rng, machine, len(tokens), k, head.hidden[tokens])
    out = Buffer(rng, machine, len(tokens), vocab)
    bias = None if head.bias is None else packed_bias(head.bias)
    fields: dict[str, Any] = {"in_": 0, "out": 1, "n": vocab, "k": k, "weight": packed(head.weight), "bias": bias}
    run(machine, OpKind.LINEAR, Batch.flat(len(tokens)), [inputs, out], **fields)
    assert equal_bits(out.rows, logits.to(machine.dtype))


@counts(20)
def test_the_lowest_of_equal_ids_is_chosen(machine: Machine, count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: check_ties(machine, seed))


@counts(20)
def test_logits_are_the_product_and_rows_are_independent(
    machine: Machine, count: int, request: pytest.FixtureRequest
) -> None:
    sweep(request, count, lambda seed: check_rows(machine, 1000 + seed))


def test_a_cap_comes_before_penalties_and_temperature(machine: Machine) -> None:
    """A penalty of 3 takes the best id below the second best once logits of 100 and 50 are 29.9 and 28."""
    rng = random.Random(0)
    head = Head(torch.ones(1, 1, dtype=machine.dtype), torch.tensor([[100.0], [50.0], [1.0], [0.0]]), None, [0])
    head.weight, history = head.weight.to(machine.dtype), np.array([0], dtype=np.int32)
    penalised = {**STORED, "presence": 3.0, "history": history.ctypes.data, "history_len": 1, "num_prompt_tokens": 0}
    assert head.sample(machine, rng, [0], [penalised]).tokens == [0]
    head.cap = 30.0
    assert head.sample(machine, rng, [0], [penalised]).tokens == [1]
    assert head.sample(machine, rng, [0], [{}]).tokens == [0]
    noise = [head.sample(machine, rng, [0], [{"temperature": 2.0, "seed": seed}]).tokens[0] for seed in range(200)]
    assert 20 < noise.count(1) < 80  # 28.0 against 29.9 at a temperature of 2; 50 against 100 would never win
    found = head.sample(machine, rng, [0], [{**STORED, "temperature": 2.0}])
    assert_near(found.logits, head.logits, "capped logits")


@pytest.mark.parametrize("vocab", [5, 31, 32, 33, 127, 128, 129, 4097])
def test_the_best_id_may_lie_anywhere(vocab: int, machine: Machine) -> None:
    for best in (0, vocab // 2, vocab - 1):
        weight = -torch.ones(vocab, 8, dtype=machine.dtype)  # so that the zeros which pad the last panel would win
        weight[best] = -0.5
        head = Head(torch.ones(5, 8, dtype=machine.dtype), weight, None, [4, 0, 2])
        settings: list[dict[str, Any]] = [{}, STORED, {"seed": 3, "temperature": 1e-4}]
        assert head.sample(machine, random.Random(best), [0, 1, 2], settings).tokens == [best] * 3


def test_a_broken_row_says_so_and_others_go_on(machine: Machine) -> None:
    rng = random.Random(0)
    head = Head.draw(rng, machine.dtype, exact=False)
    head.hidden, head.tokens = normal(rng, 30, head.hidden.shape[1], dtype=machine.dtype), list(range(30))
    sound = head.sample(machine, rng, list(range(30)), [{}] * 30)
    head.hidden[7, 0] = NAN
    for settings in ({}, STORED, {"temperature": 1.0}):
        rest = [i for i in range(30) if i != 7]
        found = head.sample(machine, rng, list(range(30)), [settings if i == 7 else {} for i in range(30)])
        assert [i for i, status in enumerate(found.statuses) if status != SAMPLED] == [7]
        assert (found.statuses[7], found.tokens[7]) == (RAW_NAN, -1)
        assert [found.tokens[i] for i in rest] == [sound.tokens[i] for i in rest]
