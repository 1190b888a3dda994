"""Several adapters in one pass: each learns what it would learn alone, and nothing of the others' sequences."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from chairlift import LLM, LoRARequest, SamplingParams
from chairlift.cli.main import main as chairlift
from chairlift.errors import ConfigError
from chairlift.lora import trainable_set
from chairlift.lora.trainable import TrainableAdapter
from chairlift.lora.trainable_set import TrainableAdapters
from chairlift_train import several_adapters
from chairlift_train.config import TrainConfig, TrainerConfig
from chairlift_train.loss import StepLoss
from chairlift_train.run import prepare, train
from chairlift_train.several_adapters import AdapterLosses, AdapterStep
from chairlift_train.stream import PackStream
from chairlift_train.trainer import Trainer
from tests.lora.adapters import peft_logits
from tests.models.tiny import tiny_hf_model
from tests.train import tiny_run
from tests.train.test_adapter import base_model, filled
from tools.train_bundled_model import ASSETS_DIR

SETTINGS: dict[str, dict[str, Any]] = {
    "law": {"r": 4, "alpha": 8.0, "targets": ("all-linear",)},
    "med": {"r": 7, "alpha": 3.0, "targets": ("q_proj", "down_proj", "lm_head"), "rslora": True},
    "art": {"r": 2, "alpha": 9.0, "targets": ("v_proj", "up_proj", "o_proj")},
}
Example = dict[str, Any]
LARGEST = 3e-6
"""Largest difference of a gradient in company and alone, as a share of its norm: sums in another order."""


def examples(count: int = 24, seed: int = 0, names: tuple[str, ...] = tuple(SETTINGS)) -> list[Example]:
    """Sequences of unequal lengths and weights, for adapters drawn with unequal shares."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        ids = [rng.randrange(3, 120) for _ in range(rng.randint(2, 19))]
        name = names[i % len(names)] if i < len(names) else rng.choice(names[:1] * 3 + names)
        weights = [0.0, *(rng.choice([0.0, 0.5, 1.0]) for _ in ids[2:]), 1.0]
        found.append({"input_ids": ids, "loss_weight": weights, "adapter": name})
    return found


def own(data: list[Example], name: str) -> list[Example]:
    return [example for example in data if example["adapter"] == name]


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"steps": 9, "warmup_steps": 0, "max_grad_norm": 0.5, **changes})


def adapter_of(model: Any, name: str, *, attached: bool) -> TrainableAdapter:
    return filled(TrainableAdapter(model, **SETTINGS[name], attached=attached))


def company(model_dir: Path, settings: TrainerConfig) -> Trainer:
    model = base_model(model_dir)
    adapters = TrainableAdapters({name: adapter_of(model, name, attached=False) for name in SETTINGS})
    return Trainer(model, settings, adapter=adapters)


def alone(model_dir: Path, settings: TrainerConfig, name: str) -> Trainer:
    model = base_model(model_dir)
    return Trainer(model, settings, adapter=adapter_of(model, name, attached=True))


def take(trainer: Trainer, data: list[Example], capacity: int = 64) -> Any:
    """One optimiser step over all of the data."""
    (packs,) = PackStream(data, capacity, step=f"sequences:{len(data)}").steps()
    return trainer.step(packs)


def gradients(trainer: Trainer, name: str | None = None) -> dict[str, Tensor]:
    """Gradients after clipping, of one adapter by its matrices' own names."""
    prefix = "" if name is None else f"{name}/"
    return {
        key.removeprefix(prefix): parameter.grad
        for key, parameter in trainer.network.adapter.parameters.items()
        if key.startswith(prefix) and parameter.grad is not None
    }


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys() and found
    apart = sum(float((found[key].double() - each.double()).norm()) ** 2 for key, each in expected.items())
    return (apart / sum(float(each.double().norm()) ** 2 for each in expected.values())) ** 0.5


def compare_with_alone(model_dir: Path, **changes: Any) -> None:
    data, settings = examples(), config(**changes)
    together = company(model_dir, settings)
    result = take(together, data)
    for name in SETTINGS:
        by_itself = alone(model_dir, settings, name)
        expected = take(by_itself, own(data, name))
        found: AdapterStep = result.adapters[name]
        assert difference(gradients(together, name), gradients(by_itself)) < LARGEST, f"{name} learns something else"
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert (found.num_tokens, found.num_targets) == (expected.num_tokens, expected.num_targets)
    assert result.num_targets == sum(each.num_targets for each in result.adapters.values())
    losses = [each.loss * each.num_targets for each in result.adapters.values()]
    assert result.loss == pytest.approx(sum(losses) / result.num_targets)
    assert max(each.grad_norm for each in result.adapters.values()) > 0.5, "nothing was clipped"


def check_that_others_stand_still(model_dir: Path) -> None:
    """Sequences of one adapter move neither another that has moments nor its moments."""
    trainer = company(model_dir, config(weight_decay=0.3, learning_rate=0.1))
    take(trainer, examples())
    before = {name: parameter.detach().clone() for name, parameter in trainer.network.adapter.parameters.items()}
    moments = {
        name: {key: each.clone() for key, each in trainer.optimizer.state[parameter].items()}
        for name, parameter in trainer.network.adapter.parameters.items()
    }
    result = take(trainer, own(examples(seed=1), "law"))
    assert result.adapters["med"] == result.adapters["art"] == AdapterStep(0.0, 0, 0, 0.0)
    for name, parameter in trainer.network.adapter.parameters.items():
        if name.startswith("law/"):
            continue
        assert torch.equal(parameter, before[name]), f"{name} moved"
        for key, each in trainer.optimizer.state[parameter].items():
            assert torch.equal(each, moments[name][key]), f"{key} of {name} moved"
    assert not torch.equal(next(iter(trainer.network.adapter.parameters.values())), next(iter(before.values())))


def check_that_records_do_not_leak(model_dir: Path) -> None:
    """Other tokens in the sequences of one adapter change no gradient of another."""
    data = examples()
    changed = [
        {**each, "input_ids": [token ^ 1 for token in each["input_ids"]]} if each["adapter"] == "med" else each
        for each in data
    ]
    first, second = company(model_dir, config()), company(model_dir, config())
    take(first, data), take(second, changed)
    assert difference(gradients(second, "med"), gradients(first, "med")) > 0.1
    for name in ("law", "art"):
        assert difference(gradients(second, name), gradients(first, name)) < LARGEST / 10, f"{name} saw med's sequences"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


@pytest.mark.parametrize(
    "changes",
    [{}, {"reduce": "sequence", "gradient_checkpointing": True}, {"reduce": "sqrt", "label_smoothing": 0.1}],
    ids=["token", "sequence", "sqrt"],
)
def test_gradients_in_company_are_those_alone(changes: dict[str, Any], llama: Path) -> None:
    compare_with_alone(llama, **changes)


def test_a_record_of_one_adapter_never_moves_another(llama: Path) -> None:
    check_that_others_stand_still(llama)
    check_that_records_do_not_leak(llama)


@contextlib.contextmanager
def rows_of_neighbours(patch: pytest.MonkeyPatch) -> Iterator[None]:
    route = TrainableAdapters.route

    def shifted(self: TrainableAdapters, rows: Any) -> None:
        largest = max(range(len(rows)), key=rows.__getitem__)
        moved = list(rows)
        moved[largest] -= 2  # the last row of a sequence predicts nothing
        moved[largest - 1] += 2
        route(self, moved)

    patch.setattr(TrainableAdapters, "route", shifted)
    yield


def _patched(target: Any, name: str, made: Callable[[Any], Any]) -> Any:
    @contextlib.contextmanager
    def mutate(patch: pytest.MonkeyPatch) -> Iterator[None]:
        patch.setattr(target, name, made(getattr(target, name)))
        yield

    return mutate


def _unsorted(_sorted: Any) -> Any:
    def keep(self: AdapterLosses, pack: Any) -> Any:
        return pack, _sorted(self, pack)[1]

    return keep


def _clipped_together(finish: Any) -> Any:
    def together(self: AdapterLosses, most: float) -> Any:
        torch.nn.utils.clip_grad_norm_(self._adapters.parameters.values(), most)
        return finish(self, most)

    return together


def _gives_zeros(finish: Any) -> Any:
    def zeros(self: AdapterLosses, most: float) -> Any:
        found = finish(self, most)
        for parameter in self._adapters.parameters.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return found

    return zeros


def _first_product(call: Any) -> Any:
    def first(self: Any, x: Tensor, out: Tensor) -> Tensor:
        known = next(product for product in self._products if product is not None)
        return call(trainable_set._SharedLayer([known] * len(self._products), self._rows), x, out)

    return first


MUTATIONS = {
    "rows of a neighbour": (rows_of_neighbours, "alone"),
    "sequences as they lie": (_patched(AdapterLosses, "_sorted", _unsorted), "alone"),
    "one adapter for all": (_patched(trainable_set._SharedLayer, "__call__", _first_product), "alone"),
    "one adapter leaks": (_patched(trainable_set._SharedLayer, "__call__", _first_product), "leak"),
    "a mean over all": (
        _patched(several_adapters, "own_normaliser", lambda own: lambda parts, reduce: 3 * own(parts, reduce)),
        "alone",
    ),
    "one clipping": (_patched(AdapterLosses, "finish", _clipped_together), "alone"),
    "zeros for the idle": (_patched(AdapterLosses, "finish", _gives_zeros), "still"),
    "a neighbour's targets": (
        _patched(
            StepLoss,
            "__call__",
            lambda call: (
                lambda self, logits, chosen: call(
                    self, logits, {**chosen, "segment_ids": torch.zeros_like(chosen["segment_ids"])}
                )
            ),
        ),
        "sequence",
    ),
}


@pytest.mark.planted("test_gradients_in_company_are_those_alone")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_mistake_is_noticed(mutation: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, kind = MUTATIONS[mutation]
    checks = {
        "alone": compare_with_alone,
        "sequence": lambda directory: compare_with_alone(directory, reduce="sequence"),
        "leak": check_that_records_do_not_leak,
        "still": check_that_others_stand_still,
    }
    with mutate(monkeypatch), pytest.raises((AssertionError, ConfigError)):
        checks[kind](llama)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gpt2", "glm", "phi3", "qwen3"])
def test_other_families_learn_alike(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"gpt2": ("c_attn", "c_proj"), "phi3": ("qkv_proj", "down_proj"), "glm": ("q_proj", "gate_up_proj")}
    for name, targets in zip(("med", "art"), [ends.get(family, ("q_proj", "down_proj"))] * 2, strict=True):
        monkeypatch.setitem(SETTINGS, name, {**SETTINGS[name], "targets": targets})
    compare_with_alone(tiny_hf_model(tmp_path, family))


def settings(run_dir: Path, **lora: Any) -> dict[str, Any]:
    raw = tiny_run.settings(run_dir)
    raw["model"] = {"path": str(run_dir / "llama-0")}
    raw["data"] = {"files": {name: [str(run_dir / f"{name}.jsonl")] for name in ("law", "med")}}
    raw["lora"] = {"alpha": 8, "dropout": 0.1, "adapters": {"law": {"r": 4}, "med": {"r": 3, "rslora": True}}, **lora}
    return raw


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tiny_hf_model(tmp_path, "llama", num_hidden_layers=2)
    for seed, name in enumerate(("law", "med")):
        tiny_run.write_records(tmp_path / f"{name}.jsonl", seed=seed)
    return tmp_path


def test_a_run_goes_on_bit_for_bit_and_holds_the_adapters_only(run_dir: Path) -> None:
    raw = settings(run_dir)
    whole = train(TrainConfig.from_mapping(raw)).directory
    seen: list[Mapping[str, AdapterStep]] = []

    def stop(result: Any, trainer: Trainer) -> None:
        seen.append(result.adapters)
        trainer.stop_requested = result.step == 5

    raw["output"] = str(run_dir / "again")
    assert not train(TrainConfig.from_mapping(raw), on_step=stop).finished
    again = train(TrainConfig.from_mapping(raw), on_step=stop)
    assert again.finished and len(seen) == tiny_run.STEPS
    assert all(list(each) == ["law", "med"] for each in seen)
    files = [f"{name}/adapter_{part}" for name in ("law", "med") for part in ("model.safetensors", "config.json")]
    for file in (*files, "training/state.safetensors"):
        assert (whole / file).read_bytes() == (again.directory / file).read_bytes()
    assert sorted(path.name for path in whole.iterdir()) == ["law", "med", "training"]
    numbers = sum(
        each.numel()
        for name in ("law", "med")
        for each in load_file(whole / name / "adapter_model.safetensors").values()
    )
    state = sum(each.numel() for each in load_file(whole / "training" / "state.safetensors").values())
    assert state < 3 * numbers + 20_000, "the state has more than the adapters and their moments"
    for change, message in (
        ({"alpha": 9}, r"lora.adapters.law.alpha 8"),
        ({"adapters": {"law": {"r": 4}, "med": {"r": 3}}}, r"lora.adapters.med.rslora True"),
        ({"adapters": {"law": {"r": 4}, "bar": {"r": 3}}}, "no record is for the adapter bar"),
        ({"adapters": {"med": {"r": 3}, "law": {"r": 4}}}, "lora.adapters"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(TrainConfig.from_mapping(settings(run_dir, **change)))


def test_trained_adapters_are_served_together_and_read_by_peft(run_dir: Path) -> None:
    raw = settings(run_dir, dropout=0.0, targets=["q_proj", "v_proj", "layers.1.mlp.down_proj"])
    raw["training"] |= {"learning_rate": 0.05, "steps": 8}
    raw["data"]["eval_files"] = raw["data"]["files"]
    found = train(TrainConfig.from_mapping(raw)).directory
    model_dir, prompt = run_dir / "llama-0", [5, 9, 3, 21, 14, 8]
    llm = LLM(model_dir, enable_lora=True, num_kv_blocks=40, skip_tokenizer_init=True, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = [LoRARequest("law", 1, found / "law"), LoRARequest("med", 2, found / "med"), None]
    answers = [each.outputs[0].token_ids for each in llm.generate([prompt] * 3, params, lora_request=requests)]
    for name, answer in zip(("law", "med"), answers, strict=False):
        (logits,) = peft_logits(model_dir, found / name, [[*prompt, *answer]])
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    assert len({tuple(answer) for answer in answers}) == 3
    (line, *_) = (Path(raw["output"]) / "evaluations.jsonl").read_text().splitlines()
    assert set(json.loads(line)["sources"]) == {"law", "med"}


def test_a_run_in_company_begins_and_learns_as_one_alone(run_dir: Path) -> None:
    """An adapter of the company ends as a run of its own would, with the same sequences in each step."""
    raw = settings(run_dir, dropout=0.0)
    raw["packing"] |= {"step": "sequences:10", "pool": 1}
    raw["training"] |= {"steps": 1, "dropout": 0.0, "warmup_steps": 0}
    files = raw["data"]["files"]
    lines = {name: Path(file).read_text().splitlines() for name, (file,) in files.items()}
    turns = [{**json.loads(own[i]), "adapter": name} for i in range(5) for name, own in lines.items()]
    (run_dir / "turns.jsonl").write_text("".join(json.dumps(each) + "\n" for each in turns))
    raw["data"] = {"files": [str(run_dir / "turns.jsonl")], "shuffle": False}
    steps: list[Any] = []
    together = train(TrainConfig.from_mapping(raw), on_step=lambda result, _trainer: steps.append(result)).directory
    for name in ("law", "med"):
        only = json.loads(json.dumps(raw))
        lora = only["lora"].pop("adapters")[name]
        only["lora"] |= lora
        only["data"]["files"] = files[name]
        only["packing"]["step"] = "sequences:5"
        only["output"] = str(run_dir / f"only-{name}")
        by_itself = train(TrainConfig.from_mapping(only), on_step=lambda result, _trainer: steps.append(result))
        assert steps[-1].num_targets == steps[0].adapters[name].num_targets
        mine = load_file(together / name / "adapter_model.safetensors")
        for key, each in load_file(by_itself.directory / "adapter_model.safetensors").items():
            assert torch.allclose(mine[key], each, atol=2e-5), f"{key} of {name}"


def test_records_name_their_adapters(run_dir: Path) -> None:
    raw = settings(run_dir)
    lines = [json.loads(line) for line in (run_dir / "law.jsonl").read_text().splitlines()]
    mixed = run_dir / "mixed.jsonl"

    def write(name: Callable[[int], Any], field: str = "adapter") -> None:
        found = [{**line, field: name(i)} if name(i) else line for i, line in enumerate(lines)]
        mixed.write_text("".join(json.dumps(line) + "\n" for line in found))

    raw["data"] = {"files": [str(mixed)]}
    raw["training"] |= {"steps": 1, "warmup_steps": 0}
    write(lambda i: ("law", "med")[i % 3 == 0])
    steps: list[Any] = []
    outcome = train(TrainConfig.from_mapping(raw), on_step=lambda result, _trainer: steps.append(result))
    assert all(each.num_targets for each in steps[0].adapters.values())
    assert not outcome.notes
    raw["data"]["columns"] = {"tenant": "adapter"}
    write(lambda i: ("law", "med")[i % 3 == 0], "tenant")
    prepare(TrainConfig.from_mapping(raw))
    raw["output"] = str(run_dir / "other")
    del raw["data"]["columns"]
    with pytest.raises(ConfigError, match="no record is for the adapter law, med"):
        prepare(TrainConfig.from_mapping(raw))
    write(lambda i: ("law", "med", "bar")[i % 3])
    with pytest.raises(ConfigError, match=r"mixed.jsonl, line \d+: the record names the adapter 'bar'.*law, med"):
        train(TrainConfig.from_mapping(raw))
    write(lambda i: ("law", "med", None)[i % 3])
    with pytest.raises(ConfigError, match=r"the record names no adapter"):
        train(TrainConfig.from_mapping(raw))
    raw["data"]["on_error"] = "skip"
    raw["training"]["steps"] = 12
    assert train(TrainConfig.from_mapping(raw)).skipped == 20


def test_impossible_settings_are_refused(run_dir: Path, llama: Path) -> None:
    for change, message in (
        ({"adapters": {}}, "adapters is empty"),
        ({"adapters": {"law": {"r": 0}}}, r"adapters.law: r must be 1 to 1024"),
        ({"adapters": {"law": {"rank": 3}}}, r"adapters.law: unknown key 'rank'"),
        ({"adapters": {"law": {"targets": ["query"]}}}, "lora.targets has 'query'"),
        ({"adapters": {"../law": {}}}, "adapters has the name '../law'"),
        ({"adapters": {"Training": {}}}, "adapters has the name 'Training'"),
        ({"adapters": {"law": {}, "Law": {}}}, "adapters has law and Law"),
        ({"adapters": {"law": {"adapters": {}}}}, "unknown key 'adapters'"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(TrainConfig.from_mapping(settings(run_dir, **change)))
    raw = settings(run_dir)
    raw["training"]["balance_loss"] = 0.1
    with pytest.raises(ConfigError, match="several adapters cannot share it"):
        TrainConfig.from_mapping(raw)
    twice = run_dir / "twice.yaml"
    twice.write_text("model: {path: m}\nlora:\n  adapters:\n    law: {r: 4}\n    law: {r: 8}\n")
    with pytest.raises(ConfigError, match="the key 'law' is in line 4 and again in line 5"):
        TrainConfig.from_file(twice)
    with pytest.raises(ConfigError, match="no adapter to train"):
        TrainableAdapters({})
    trainer = company(llama, config())
    for field, message in (({"adapter": "bar"}, "sequence 1 of the source names the adapter 'bar'"), ({}, "names no")):
        with pytest.raises(ConfigError, match=message):
            take(trainer, [examples()[0], {"input_ids": [5, 6, 7], **field}])
    trainer.network.adapter.route([1, 2, 3])
    layer = trainer.model.get_submodule("model.layers.0.mlp.down_proj")
    with pytest.raises(ConfigError, match="route them first"):
        layer(torch.zeros(5, layer.shape.in_features))
    with pytest.raises(ConfigError, match="no adapter has a target"):
        take(trainer, [{"input_ids": [5], "adapter": "law"}])
    with pytest.raises(ConfigError, match="has an adapter already"):
        TrainableAdapters({"law": adapter_of(trainer.model, "law", attached=False)})


@pytest.mark.nightly
def test_ranks_share_the_steps_of_all_adapters(run_dir: Path) -> None:
    """Moments after one step are gradients times a constant. Packs are dealt to ranks, so sums have another order."""
    raw = settings(run_dir, dropout=0.0)
    raw["training"] |= {"dropout": 0.0, "steps": 1, "warmup_steps": 0}
    file = run_dir / "run.yaml"
    file.write_text(json.dumps(raw))
    for processes in ("1", "2"):
        flags = ["--output", str(run_dir / f"of-{processes}"), "--processes", processes, "--quiet"]
        assert chairlift(["train", str(file), *flags]) == 0
    one, two = (
        load_file(run_dir / f"of-{processes}" / "step-00000001" / "training" / "state.safetensors")
        for processes in "12"
    )
    for name in ("law", "med"):
        moments = [key for key in one if f"{name}/" in key and key.endswith("exp_avg")]
        assert len(moments) == len([key for key in one if f".model.{name}/" in key]) > 0
        assert difference({key: two[key] for key in moments}, {key: one[key] for key in moments}) < 1e-5


@pytest.mark.nightly
def test_adapters_trained_together_answer_as_asked(tmp_path: Path) -> None:
    """From a file of settings to a batch of three: the model as it was, and both adapters."""
    question, answers = "What is continuous batching?", {"law": "Please ask the court.", "med": "Drink water and rest."}
    for name, answer in answers.items():
        asked = [question, "What is a page table?", "Who schedules the requests?", "Why is the cache full?"]
        chats = [[{"role": "user", "content": each}, {"role": "assistant", "content": answer}] for each in asked]
        lines = [json.dumps({"messages": each}) + "\n" for each in chats]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    raw = {
        "model": {"path": str(ASSETS_DIR)},
        "data": {"files": {name: [str(tmp_path / f"{name}.jsonl")] for name in answers}},
        "packing": {"capacity": 256, "step": "sequences:8"},
        "training": {"steps": 40, "warmup_steps": 4, "learning_rate": 0.01},
        "lora": {
            "alpha": 16,
            "adapters": {"law": {"r": 8}, "med": {"r": 4, "targets": ["q_proj", "v_proj", "up_proj"]}},
        },
        "output": str(tmp_path / "out"),
        "threads": 1,
    }
    (tmp_path / "run.yaml").write_text(json.dumps(raw))
    assert chairlift(["train", str(tmp_path / "run.yaml"), "--quiet"]) == 0
    found = tmp_path / "out" / "step-00000040"
    llm = LLM(ASSETS_DIR, enable_lora=True, num_kv_blocks=200, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=24)
    requests = [LoRARequest("law", 1, found / "law"), LoRARequest("med", 2, found / "med"), None]
    outputs = llm.chat([[{"role": "user", "content": question}]] * 3, params, lora_request=requests)
    texts = [output.outputs[0].text.strip() for output in outputs]
    assert texts[:2] == list(answers.values())
    assert texts[2] not in answers.values()
    for name, output in zip(answers, outputs, strict=False):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        (logits,) = peft_logits(ASSETS_DIR, found / name, [tokens])
        assert logits[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == output.outputs[0].token_ids
