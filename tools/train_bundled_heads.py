"""Trains Medusa heads or a layer of EAGLE-3 for the bundled model on the model's own answers, and writes them to
chairlift/assets.

::

    python -m tools.train_bundled_heads                     # about five minutes on one CPU core
    python -m tools.train_bundled_heads --method eagle3     # about six minutes

The questions are variations of the guide's wordings, made like the model's training questions, but from another seed.
Held-back wordings are not used. The model answers the questions by greedy decoding (``chairlift generate``). Then
``chairlift train`` trains with the configuration tools/bundled_heads.yaml or tools/bundled_layer.yaml. An interrupted
run continues when the script is started again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from chairlift.cli.main import main as chairlift
from chairlift_train.config import TrainConfig
from chairlift_train.run import train
from chairlift_train.trainer import Trainer, TrainingStepResult
from tools.guide import read_guide
from tools.train_bundled_model import ASSETS_DIR, ROOT, Curriculum

CONFIG_FILES = {"medusa": ROOT / "tools" / "bundled_heads.yaml", "eagle3": ROOT / "tools" / "bundled_layer.yaml"}
WORK_DIR = ROOT / "build" / "bundled-heads"
HEADS_DIR, LAYER_DIR = ASSETS_DIR / "medusa", ASSETS_DIR / "eagle3"
FILES = ("config.json", "medusa_lm_head.safetensors")
LAYER_FILES = ("config.json", "model.safetensors")
NUM_QUESTIONS = 6000
SEED = 1
"""Seed of the questions. It differs from the seed of the model's training, so that the wordings differ."""


def write_answers(path: Path, count: int) -> None:
    """Write ``count`` questions and the model's answers to ``path``. The guide's entries occur about equally often."""
    entries, rng = read_guide(), random.Random(SEED)
    backend = tokenizers.Tokenizer.from_file(str(ASSETS_DIR / "tokenizer.json"))
    questions = Curriculum(entries, backend, rng)
    questions_file = path.with_name("questions.jsonl")
    with questions_file.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = questions.wording(entries[number % len(entries)])
            file.write(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n")
    partial = path.with_suffix(".partial")
    command = ["generate", "--prompts-file", str(questions_file), "--max-tokens", "400", "--quiet", "--force"]
    if chairlift([*command, "-o", str(partial)]):
        raise SystemExit("some questions were not answered")
    partial.rename(path)


def train_heads(
    work: Path, overrides: Sequence[str] = (), count: int = NUM_QUESTIONS, method: str = "medusa"
) -> Path | None:
    """Train in the directory ``work``, continuing an earlier run there. Returns the directory of the heads or the
    layer, if they are complete."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "answers.jsonl").is_file():
        write_answers(work / "answers.jsonl", count)
    own = (f"model.path={ASSETS_DIR}", f"data.files={work / 'answers.jsonl'}", f"output={work / method}")
    outcome = train(TrainConfig.from_file(CONFIG_FILES[method], [*own, *overrides]), on_step=_tell)
    return outcome.directory if outcome.finished else None


def copy_heads(trained: Path, output: Path, files: Sequence[str] = FILES) -> None:
    """Copy the files that serve, without a path of the machine that trained them."""
    output.mkdir(parents=True, exist_ok=True)
    for name in files:
        shutil.copyfile(trained / name, output / name)
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"base_model_name_or_path": "bundled"}, indent=2)
    (output / "config.json").write_text(text + "\n", encoding="utf-8")


def _tell(result: TrainingStepResult, trainer: Trainer) -> None:
    if result.step % 50 == 0 or result.step == trainer.config.steps:
        print(f"step {result.step}/{trainer.config.steps}  loss {result.loss:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--method", choices=sorted(CONFIG_FILES), default="medusa", help="what to train")
    parser.add_argument("--output", type=Path, help="directory to write")
    parser.add_argument("--work", type=Path, default=WORK_DIR, help="directory for answers and checkpoints")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for chairlift train")
    args = parser.parse_args()
    trained = train_heads(args.work, args.set, method=args.method)
    if trained is None:
        print("stopped; start it again to go on")
        return
    is_layer = args.method == "eagle3"
    output = args.output or (LAYER_DIR if is_layer else HEADS_DIR)
    copy_heads(trained, output, LAYER_FILES if is_layer else FILES)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
