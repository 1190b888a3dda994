"""Models of LSTMs and GRUs compute what PyTorch's layers compute, however their work is cut, and mistakes show."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from chairlift import LLM
from chairlift.errors import ModelLoadError
from chairlift.kernels import recurrent
from chairlift.kernels.cells import GRU, LSTM
from chairlift.kernels.weights import PLAIN
from chairlift.models.formats.checkpoint import hf_state_dict
from chairlift.models.hf_config import parse_config
from chairlift.models.random_weights import write_random_model
from chairlift.models.step_cost import ModelCost
from chairlift_train.config import TrainConfig
from chairlift_train.run import train
from tests.models.paged import PagedRunner, packed_logits
from tests.models.test_families import close, load, prompt
from tests.models.test_recurrent_families import KERNELS, PARAMS, PIECE_MISTAKES, PROMPTS, SCHEDULES, answers
from tests.train import tiny_run

SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 48, "num_hidden_layers": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "two layers": {},
    "no biases": {"bias": False, "num_hidden_layers": 1},
    "tied, biased head": {"tie_word_embeddings": True, "head_bias": True, "hidden_size": 40},
}


CELLS = {"gru": GRU, "lstm": LSTM}
each_cell = pytest.mark.parametrize("cell", CELLS)


def write(tmp_path: Path, cell: str, **more: Any) -> Path:
    config = {"model_type": cell, **SIZES, "eos_token_id": 1, **more}
    return write_random_model(tmp_path / cell, config, dtype="float32", std=0.4)


def torch_logits(model_dir: Path, tokens: list[int]) -> Tensor:
    """Logits [n, vocab] by torch.nn.LSTM or torch.nn.GRU with the tensors of the file."""
    tensors, config = load_file(model_dir / "model.safetensors"), json.loads((model_dir / "config.json").read_text())
    size, layers = config["hidden_size"], config["num_hidden_layers"]
    prefix = f"{config['model_type']}."
    module = {"gru.": torch.nn.GRU, "lstm.": torch.nn.LSTM}[prefix]
    layer = module(size, size, layers, bias=config.get("bias", True), batch_first=True)
    layer.load_state_dict({name.removeprefix(prefix): each for name, each in tensors.items() if prefix in name})
    with torch.no_grad():
        hidden = layer(tensors["embed_tokens.weight"][tokens][None])[0][0]
        head = tensors.get("lm_head.weight", tensors["embed_tokens.weight"])
        return torch.nn.functional.linear(hidden, head, tensors.get("lm_head.bias"))


@each_cell
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_files_are_those_of_torch(variant: str, cell: str, tmp_path: Path) -> None:
    model_dir = write(tmp_path, cell, **VARIANTS[variant])
    ours = load(model_dir, weight_format=PLAIN)
    prompts = [prompt(40, 1), prompt(3, 2), prompt(61, 3)]
    for logits, tokens in zip(packed_logits(ours, prompts), prompts, strict=True):
        assert close(logits, torch_logits(model_dir, tokens))
    saved, stored = hf_state_dict(ours), load_file(model_dir / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], stored[name]) for name in stored)
    cost = ModelCost.of(ours.config, torch.float32)
    looked_up = 0 if ours.config.tie_word_embeddings else stored["embed_tokens.weight"].numel()
    assert cost.body_params + cost.head_params + looked_up == sum(each.numel() for each in stored.values())


@each_cell
def test_a_chunk_may_end_anywhere(cell: str, tmp_path: Path) -> None:
    model_dir = write(tmp_path, cell)
    ours, tokens, other = load(model_dir), prompt(15, 3), prompt(20, 4)
    expected, beside = torch_logits(model_dir, tokens), torch_logits(model_dir, other)
    runner = PagedRunner(ours, 4, num_blocks=256, state_span=8)
    for border in range(1, len(tokens)):
        first = runner.step([(f"o{border}", other[:9]), (f"a{border}", tokens[:border])])
        second = runner.step([(f"a{border}", tokens[border:]), (f"o{border}", other[9:])])
        assert close(torch.cat((first[1], second[0])), expected)
        assert close(torch.cat((first[0], second[1])), beside)


@pytest.mark.full
@each_cell
@pytest.mark.parametrize("kernels", [KERNELS[0], *(pytest.param(k, marks=pytest.mark.nightly) for k in KERNELS[1:])])
def test_answers_do_not_depend_on_the_schedule(kernels: str, cell: str, tmp_path: Path) -> None:
    """Not a bit of them does on native kernels: the cell's products have one size, whoever else is in the batch."""
    settings = {"kernels": kernels, "dtype": "float32", "skip_tokenizer_init": True, "threads": 1}
    model_dir, params = write(tmp_path, cell), dataclasses.replace(PARAMS, max_tokens=20)
    alone = LLM(model_dir, max_num_seqs=1, enable_prefix_caching=False, num_kv_blocks=60, **settings)
    expected = answers([alone.generate([tokens], params)[0] for tokens in PROMPTS])
    cached = 0
    for name, schedule in SCHEDULES.items():
        llm = LLM(model_dir, **{"num_kv_blocks": 60, **settings, **schedule})
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params)
            found = answers(outputs)
            assert [ids for ids, _ in found] == [ids for ids, _ in expected], name
            assert kernels == "torch" or found == expected, name
            cached += sum(output.num_cached_tokens for output in outputs)
    assert cached


@each_cell
def test_a_trained_model_is_served(cell: str, tmp_path: Path) -> None:
    tiny_run.write_records(tmp_path / "data.jsonl")
    raw = tiny_run.settings(tmp_path, steps=4)
    raw["model"]["config"] = {"model_type": cell, **SIZES, "vocab_size": tiny_run.VOCAB, "eos_token_id": 1}
    outcome = train(TrainConfig.from_mapping(raw))
    llm = LLM(outcome.directory, skip_tokenizer_init=True, dtype="float32", num_kv_blocks=20)
    tokens = [5, 9, 33]
    (output,) = llm.generate([tokens], dataclasses.replace(PARAMS, n=1, temperature=0, max_tokens=6))
    found = list(output.outputs[0].token_ids)
    expected = torch_logits(Path(outcome.directory), [*tokens, *found])[len(tokens) - 1 : -1].argmax(-1)
    assert found == expected.tolist()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bias": "yes"}, "bias must be true or false"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: tanh"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1"),
    ],
)
def test_an_impossible_config_is_refused(config: dict[str, Any], words: str) -> None:
    for cell in CELLS:
        parsed = parse_config({"model_type": cell, **SIZES})
        assert parsed.recurrent and not parsed.attends
        with pytest.raises(ModelLoadError, match=words):
            parse_config({"model_type": cell, **SIZES, **config})


# -- each way of getting it wrong is noticed ---------------------------------------------------------------------------

Scan = Callable[[Any, tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, tuple[Tensor, ...]]]


def hidden_lost(scan: Scan) -> Scan:
    return lambda self, inputs, state: scan(self, inputs, (torch.zeros_like(state[0]), *state[1:]))


def cells_lost(scan: Scan) -> Scan:
    return lambda self, inputs, state: scan(self, inputs, (state[0], torch.zeros_like(state[1])))


def state_late(scan: Scan) -> Scan:
    return lambda self, inputs, state: (scan(self, inputs, state)[0], state)


def state_in_16_bits(scan: Scan) -> Scan:
    return lambda self, inputs, state: scan(self, inputs, (*state[:-1], state[-1].bfloat16().float()))


def gates_in_another_order(scan: Scan) -> Scan:
    def wrong(self: Any, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        first, second, *others = inputs[0].split(self.weight.shape[1], dim=-1)
        return scan(self, (torch.cat((second, first, *others), dim=-1),), state)

    return wrong


def bias_left_out(scan: Scan) -> Scan:
    return lambda self, inputs, state: scan(dataclasses.replace(self, bias=None), inputs, state)


def bias_of_n_outside_its_gate(scan: Scan) -> Scan:
    """The bias of a GRU's third part is added to the input's, where r does not scale it (Cho et al., 2014)."""

    def wrong(self: Any, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        return scan(dataclasses.replace(self, bias=None), (inputs[0] + self.bias,), state)

    return wrong


MISTAKES: dict[str, tuple[Callable[[Scan], Scan], ...]] = {
    "gru": (
        hidden_lost,
        state_late,
        state_in_16_bits,
        gates_in_another_order,
        bias_left_out,
        bias_of_n_outside_its_gate,
    ),
    "lstm": (hidden_lost, cells_lost, state_late, state_in_16_bits, gates_in_another_order, bias_left_out),
}
PLANTED = [(cell, name) for cell in CELLS for name in (*(each.__name__ for each in MISTAKES[cell]), *PIECE_MISTAKES)]


@pytest.mark.planted("test_a_chunk_may_end_anywhere[{cell}]")
@pytest.mark.parametrize(("cell", "mistake"), PLANTED)
def test_a_state_that_goes_wrong_is_noticed(
    cell: str, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir, tokens = write(tmp_path, cell), [prompt(24, 5), prompt(24, 6)]
    planted = {each.__name__: each for each in MISTAKES[cell]}
    if mistake in planted:
        monkeypatch.setattr(CELLS[cell], "scan", planted[mistake](CELLS[cell].scan))
    else:
        plan = recurrent.plan_pieces
        monkeypatch.setattr("chairlift.models.context.plan_pieces", lambda *args: PIECE_MISTAKES[mistake](plan(*args)))
    runner = PagedRunner(load(model_dir, weight_format=PLAIN), 8)
    for part in (slice(0, 9), slice(9, 24)):
        logits = runner.step([("a", tokens[0][part]), ("b", tokens[1][part])])
    expected = [torch_logits(model_dir, each)[9:] for each in tokens]
    tolerance = 3e-4 if mistake.endswith("16_bits") else 0.01
    assert not all(close(found, truth, tolerance) for found, truth in zip(logits, expected, strict=True))
