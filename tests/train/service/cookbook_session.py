"""One recipe of the tinker cookbook with a server: ``python cookbook_session.py RECIPE URL MODEL DIRECTORY``. It prints
``done`` at its end, and fails if the recipe does.

It runs in an environment of its own, because the cookbook's dependencies are other versions than those of the tests.
The recipes are unchanged; where one has no flags, its configuration is made here. The data are local files.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RENDERER = "role_colon"
WORDS = ("the lift runs", "riders step on", "nobody waits", "the ride goes on", "snow falls", "the top is near")


def chats(directory: Path) -> Path:
    """A file of conversations."""
    path = directory / "chats.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"Say {words}."}, {"role": "assistant", "content": f"Yes, {words}."}]}
        for words in WORDS * 2
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def module(name: str, **flags: Any) -> None:
    """Run a recipe as its command does."""
    sys.argv = [name, *(f"{flag}={value}" for flag, value in flags.items())]
    runpy.run_module(f"tinker_cookbook.recipes.{name}", run_name="__main__")


def common(url: str, model: str, directory: Path) -> dict[str, Any]:
    more = {"log_path": directory / "log", "behavior_if_log_dir_exists": "delete"}
    return {"model_name": model, "renderer_name": RENDERER, "base_url": url, **more}


def arithmetic(url: str, model: str, directory: Path) -> None:
    """Reinforcement learning with sums of two numbers, from snapshots."""
    sizes = {"groups_per_batch": 2, "group_size": 4, "max_steps": 2, "lora_rank": 8, "eval_every": 0, "save_every": 1}
    module("math_rl.train", env="arithmetic", **sizes, **common(url, model, directory))


def chat_sl(url: str, model: str, directory: Path) -> None:
    """Supervised learning on a local file."""
    sizes = {"batch_size": 4, "max_steps": 2, "lora_rank": 8, "max_length": 128, "save_every": 1, "eval_every": 0}
    module("chat_sl.train", dataset=chats(directory), **sizes, **common(url, model, directory))


def shorter(url: str, model: str, directory: Path) -> None:
    """Reinforcement learning of pairs, of which the shorter answer wins."""
    sizes = {"batch_size": 2, "group_size": 4, "max_steps": 2, "max_tokens": 16, "eval_every": 0}
    flags = common(url, model, directory)
    del flags["base_url"]  # it has none, and reads TINKER_BASE_URL
    module("preference.shorter.train", **sizes, **flags)


def guess_number(url: str, model: str, directory: Path) -> None:
    """Reinforcement learning of conversations with several turns."""
    from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import GuessNumberDatasetBuilder
    from tinker_cookbook.rl import train

    sizes = {"batch_size": 2, "train_group_size": 2}
    data = GuessNumberDatasetBuilder(model_name=model, renderer_name=RENDERER, **sizes)
    how = {"model_name": model, "renderer_name": RENDERER, "recipe_name": "guess_number", "base_url": url}
    rates = {"learning_rate": 3e-5, "max_tokens": 8, "eval_every": 0, "max_steps": 1, "lora_rank": 8}
    config = train.Config(log_path=str(directory / "log"), dataset_builder=data, compute_post_kl=True, **how, **rates)
    asyncio.run(train.main(config))


def dpo(url: str, model: str, directory: Path) -> None:
    """Direct preference optimisation (Rafailov et al., 2023) on a local file of comparisons."""
    from tinker_cookbook.preference import train_dpo
    from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
    from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    def message(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    path = directory / "comparisons.jsonl"
    lines = [
        {
            "comparison": {
                "prompt_conversation": [message("user", f"Say {words}.")],
                "completion_A": [message("assistant", words)],
                "completion_B": [message("assistant", f"No, not {words}.")],
            },
            "label": "A",
        }
        for words in WORDS
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shape = {"model_name_for_tokenizer": model, "renderer_name": RENDERER, "max_length": 128, "batch_size": 3}
    data = DPODatasetBuilderFromComparisons(
        common_config=ChatDatasetBuilderCommonConfig(**shape),
        comparison_builder=ComparisonBuilderFromJsonl(train_path=str(path)),
    )
    how = {"model_name": model, "renderer_name": RENDERER, "base_url": url, "recipe_name": "dpo"}
    rates = {"lora_rank": 8, "learning_rate": 1e-3, "eval_every": 0, "max_steps": 2}
    train_dpo.main(train_dpo.Config(log_path=str(directory / "log"), dataset_builder=data, **how, **rates))
    first = json.loads((directory / "log" / "metrics.jsonl").read_text().splitlines()[0])
    loss = next(value for name, value in first.items() if name.startswith("dpo_loss"))
    assert abs(loss - 0.6931) < 1e-3, f"the loss begins at {loss}, and not at log 2"


def distillation(url: str, model: str, directory: Path) -> None:
    """Distillation off policy: the student learns the teacher's most likely tokens at each position, with (N, K)
    targets. The cookbook's recipe reads remote data, so its calls are made here."""
    import tinker
    import torch
    from tinker import types

    service = tinker.ServiceClient(base_url=url)
    teacher = service.create_lora_training_client(base_model=model, rank=8, seed=1).result()
    tokenizer = teacher.get_tokenizer()
    texts = [tokenizer.encode(f"{words}, and {words}.") for words in WORDS]

    def plain(tokens: list[int]) -> types.Datum:
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    for _ in range(4):
        teacher.forward_backward([plain(each) for each in texts], "cross_entropy")
        teacher.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    sampler = teacher.save_weights_and_get_sampling_client().result()
    data = []
    for tokens in texts:
        asked = types.SamplingParams(max_tokens=1)
        scored = sampler.sample(types.ModelInput.from_ints(tokens), 1, asked, topk_prompt_logprobs=4).result()
        rows = list(scored.topk_prompt_logprobs[1:])
        targets = torch.tensor([[token for token, _ in row] for row in rows])
        weights = torch.tensor([[score for _, score in row] for row in rows]).softmax(1)
        inputs = {"target_tokens": targets, "weights": weights}
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={name: tinker.TensorData.from_torch(each) for name, each in inputs.items()},
            )
        )
    student = service.create_lora_training_client(base_model=model, rank=8, seed=2).result()
    losses = []
    for _ in range(4):
        found = student.forward_backward(data, "cross_entropy")
        student.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(found.result().metrics["loss:sum"])
    assert losses[-1] < 0.9 * losses[0], losses


RECIPES: dict[str, Callable[[str, str, Path], None]] = {
    each.__name__: each for each in (arithmetic, chat_sl, shorter, guess_number, dpo, distillation)
}


def main(recipe: str, url: str, model: str, directory: str) -> None:
    RECIPES[recipe](url, model, Path(directory))
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
