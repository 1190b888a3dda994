"""Makes chairlift/assets from docs/guide: tokenizer, configuration and weights, from one seed.

::

    python -m tools.train_bundled_model                     # about 12 minutes on one CPU core
    python -m tools.score_bundled_model                     # answers to wordings outside the training data

tools/bundled_model.yaml is the configuration of the training run for ``chairlift train``. This script creates the
tokenizer before the run, and copies the files of the last checkpoint after it. An interrupted run continues when the
script is started again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from chairlift.text.tokenizer.chat_template import ChatTemplate
from chairlift_train.config import TrainConfig
from chairlift_train.run import Outcome, train
from chairlift_train.trainer import Trainer, TrainingStepResult
from tools.augment import outside, vary
from tools.guide import Entry, HeldBack, fingerprint, read_guide, words

ROOT = Path(__file__).resolve().parent.parent
ASSETS_DIR = ROOT / "chairlift" / "assets"
CONFIG_FILE = ROOT / "tools" / "bundled_model.yaml"
WORK_DIR = ROOT / "build" / "bundled-model"

BOS, EOS, USER, ASSISTANT = SPECIAL_TOKENS = ("<|start|>", "<|end|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 3072
CONTEXT = 512

# The question is converted to lower case, so that the model need not learn to ignore case. Earlier turns are left out,
# because the model was trained on single questions. Instructions are a part of the question, so that none is lost.
CHAT_TEMPLATE = """\
{%- set ns = namespace(instructions='', question='', answer=none) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.instructions = ns.instructions + message['content'] | trim + ' ' %}
        {%- set ns.answer = none %}
    {%- elif message['role'] == 'user' %}
        {%- set ns.question = message['content'] %}
        {%- set ns.answer = none %}
    {%- elif message['role'] == 'assistant' %}
        {%- set ns.answer = message['content'] %}
    {%- endif %}
{%- endfor %}
{%- set question = ns.instructions + ns.question | trim %}
{{- bos_token + '<|user|> ' + question | trim | lower + '<|end|><|assistant|>\\n' }}
{%- if ns.answer is not none %}
    {{- ns.answer | trim + '<|end|>' }}
    {%- if add_generation_prompt %}
        {{- '<|assistant|>\\n' }}
    {%- endif %}
{%- endif %}
"""

FALLBACK = "What is the capital of France?"
"""Heading of the guide's entry whose answer is given to every question outside the guide."""
FULL_ANSWER_SHARE = 0.35
"""Fraction of examples with the whole answer. In the others the answer is cut short: the first words matter most,
because they decide which answer follows."""
CUT_ANSWER_TOKENS = 14
PLAIN_SHARE = 0.02
"""Fraction of examples that are only an answer without the chat template, so that the model can also continue plain
text."""


def train_tokenizer(entries: Sequence[Entry]) -> tokenizers.Tokenizer:
    """Train a byte-level BPE on the guide's words. All other text becomes bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f" {question.lower()}" for entry in entries for question in entry.questions]
    tokenizer.train_from_iterator([*texts, *(entry.answer for entry in entries)], trainer)
    # Plain text gets a start token. The chat template already contains its own.
    start = (BOS, _special_id(tokenizer, BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[start])
    return tokenizer


def write_tokenizer(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, and the other tokenizer files of transformers' format."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _special_id(tokenizer: tokenizers.Tokenizer, name: str) -> int:
    token_id = tokenizer.token_to_id(name)
    if token_id is None:
        raise ValueError(f"the tokenizer has no token {name}")
    return int(token_id)


class Curriculum:
    """An endless stream of training examples. Every entry is used in turn, in a new order in each round, with a new
    wording each time.

    Examples are mappings with ``input_ids`` and ``completion_mask``. The mask selects the answer, which is the only
    part that is learnt.
    """

    def __init__(self, entries: Sequence[Entry], tokenizer: tokenizers.Tokenizer, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._entries = list(entries)
        self._held_back = HeldBack(text for entry in entries for text in entry.held_back)
        self._template = ChatTemplate(CHAT_TEMPLATE, {"bos_token": BOS, "eos_token": EOS})
        self._bos, self._eos = (_special_id(tokenizer, name) for name in (BOS, EOS))
        self._other_words = sorted({word for entry in entries for text in entry.questions for word in words(text)})
        self._answers = {entry.answer: self._ids(entry.answer) for entry in entries}
        # Entries with many wordings are used more often, because otherwise each of their wordings would be rare.
        shares = [max(1, round(len(entry.questions) / 8)) for entry in entries]
        self._round = [index for index, share in enumerate(shares) for _ in range(share)]
        self._place = 0

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        while True:
            if self._place == 0:
                self._rng.shuffle(self._round)
            entry = self._entries[self._round[self._place]]
            self._place = (self._place + 1) % len(self._round)
            yield self._example(entry)

    def state_dict(self) -> dict[str, Any]:
        """State that determines the next examples."""
        version, numbers, gauss = self._rng.getstate()
        return {"random": [version, list(numbers), gauss], "round": list(self._round), "place": self._place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        version, numbers, gauss = state["random"]
        self._rng.setstate((version, tuple(numbers), gauss))
        self._round, self._place = list(state["round"]), int(state["place"])

    def _example(self, entry: Entry) -> Mapping[str, Any]:
        answer = [*self._answers[entry.answer], self._eos]
        if self._rng.random() < PLAIN_SHARE:
            return _masked([self._bos], answer)
        prompt = self._ids(self._template.render([{"role": "user", "content": self.wording(entry)}]))
        if self._rng.random() >= FULL_ANSWER_SHARE:
            answer = answer[:CUT_ANSWER_TOKENS]
        return _masked(prompt, answer)

    def wording(self, entry: Entry) -> str:
        """A variation of one of the entry's wordings, far enough from all held-back ones."""
        while True:
            if entry.questions[0] == FALLBACK and self._rng.random() < 0.6:
                text = outside(self._rng)
            else:
                text = vary(entry.questions, self._rng, self._other_words)
            if not self._held_back.too_close(text):
                return text


class GuideCurriculum(Curriculum):
    """The curriculum of the pages in docs/guide. ``tokenizer`` is the directory of the tokenizer that encodes them.
    Use this class as ``data.source`` of ``chairlift train``."""

    def __init__(self, tokenizer: str, seed: int = 0) -> None:
        backend = tokenizers.Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
        super().__init__(read_guide(), backend, random.Random(seed))


def _masked(prompt: Sequence[int], answer: Sequence[int]) -> Mapping[str, Any]:
    return {"input_ids": [*prompt, *answer], "completion_mask": [0] * len(prompt) + [1] * len(answer)}


def train_model(work: Path, overrides: Sequence[str] = ()) -> Outcome:
    """Create the tokenizer and train in the directory ``work``. An earlier run in that directory is continued."""
    write_tokenizer(train_tokenizer(read_guide()), work / "tokenizer")
    own = (f"model.tokenizer={work / 'tokenizer'}", f"data.options.tokenizer={work / 'tokenizer'}", f"output={work}")
    return train(TrainConfig.from_file(CONFIG_FILE, [*own, *overrides]), on_step=_tell)


def _tell(result: TrainingStepResult, trainer: Trainer) -> None:
    if result.step % 50 == 0 or result.step == trainer.config.steps:
        print(f"step {result.step}/{trainer.config.steps}  loss {result.loss:.4f}", flush=True)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=ASSETS_DIR, help="directory to write")
    parser.add_argument("--work", type=Path, default=WORK_DIR, help="directory for the checkpoints")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for chairlift train")
    args = parser.parse_args()
    outcome = train_model(args.work, args.set)
    if not outcome.finished:
        print(f"stopped after step {outcome.steps}; start it again to go on")
        return
    args.output.mkdir(parents=True, exist_ok=True)
    for file in outcome.directory.iterdir():
        if file.is_file():
            shutil.copyfile(file, args.output / file.name)
    print(f"wrote {args.output}; sha256 of the training text: {fingerprint(read_guide())}")


if __name__ == "__main__":
    main()
