"""Makes chairlift/assets from docs/guide: tokenizer, configuration and weights, from one seed.

::

    python -m tools.train_bundled_model                     # about 12 minutes on one CPU core
    python -m tools.score_bundled_model                     # what it answers to wordings it has never seen
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from chairlift.models.checkpoint import hf_state_dict
from chairlift.models.hf_config import parse_config
from chairlift.models.llama import LlamaForCausalLM
from chairlift.tokenizer.chat_template import ChatTemplate
from chairlift.train.trainer import Example, Trainer, TrainerConfig
from tools.augment import outside, vary
from tools.guide import Entry, HeldBack, read_guide, words

ASSETS_DIR = Path(__file__).resolve().parent.parent / "chairlift" / "assets"

BOS, EOS, USER, ASSISTANT = SPECIAL_TOKENS = ("<|start|>", "<|end|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 3072
CONTEXT = 512

# The question is put in lower case, so that case carries no information that the model would have to learn to ignore.
# Earlier turns are left out: the model was trained on single questions.
CHAT_TEMPLATE = """\
{%- set ns = namespace(question='', answer=none) %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.question = message['content'] %}
        {%- set ns.answer = none %}
    {%- elif message['role'] == 'assistant' %}
        {%- set ns.answer = message['content'] %}
    {%- endif %}
{%- endfor %}
{{- bos_token + '<|user|> ' + ns.question | trim | lower + '<|end|><|assistant|>\\n' }}
{%- if ns.answer is not none %}
    {{- ns.answer | trim + '<|end|>' }}
    {%- if add_generation_prompt %}
        {{- '<|assistant|>\\n' }}
    {%- endif %}
{%- endif %}
"""

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}

FALLBACK = "What is the capital of France?"
"""Heading of the entry whose answer is given to everything that the guide is not about."""
FULL_ANSWER_SHARE = 0.35
"""Examples with the whole answer; the others end early, since the first words carry the choice among answers."""
CUT_ANSWER_TOKENS = 14
PLAIN_SHARE = 0.02
"""Examples that are an answer alone, so that text without the chat template can be continued as well."""


def train_tokenizer(entries: Sequence[Entry]) -> tokenizers.Tokenizer:
    """A byte-level BPE of the guide's own words; any other text falls back to bytes."""
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
    # Bare text starts a sequence by itself; the chat template brings its own start token.
    start = (BOS, _special_id(tokenizer, BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[start])
    return tokenizer


def write_tokenizer(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """tokenizer.json, and beside it what the format of transformers keeps elsewhere."""
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
    """An endless stream of examples: every entry in turn, in a new order each round, in a new wording each time."""

    def __init__(self, entries: Sequence[Entry], tokenizer: tokenizers.Tokenizer, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._held_back = HeldBack(text for entry in entries for text in entry.held_back)
        self._template = ChatTemplate(CHAT_TEMPLATE, {"bos_token": BOS, "eos_token": EOS})
        self._bos, self._eos = (_special_id(tokenizer, name) for name in (BOS, EOS))
        self._other_words = sorted({word for entry in entries for text in entry.questions for word in words(text)})
        self._answers = {entry.answer: self._ids(entry.answer) for entry in entries}
        # Entries with many wordings are wide; they come more often, or each wording would be rare.
        self._round = [entry for entry in entries for _ in range(max(1, round(len(entry.questions) / 8)))]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def __iter__(self) -> Iterator[Example]:
        while True:
            self._rng.shuffle(self._round)
            for entry in self._round:
                yield self._example(entry)

    def _example(self, entry: Entry) -> Example:
        answer = [*self._answers[entry.answer], self._eos]
        if self._rng.random() < PLAIN_SHARE:
            return Example((self._bos, *answer))
        prompt = self._ids(self._template.render([{"role": "user", "content": self.wording(entry)}]))
        if self._rng.random() >= FULL_ANSWER_SHARE:
            answer = answer[:CUT_ANSWER_TOKENS]
        return Example((*prompt, *answer), first_target=len(prompt))

    def wording(self, entry: Entry) -> str:
        """A variation of one of the entry's wordings, far enough from everything that is held back."""
        while True:
            if entry.questions[0] == FALLBACK and self._rng.random() < 0.6:
                text = outside(self._rng)
            else:
                text = vary(entry.questions, self._rng, self._other_words)
            if not self._held_back.too_close(text):
                return text


def train(
    entries: Sequence[Entry], tokenizer: tokenizers.Tokenizer, config: TrainerConfig, batch: int, seed: int
) -> LlamaForCausalLM:
    """Train a fresh model; the same arguments give the same weights on the same kind of machine."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(parse_config(MODEL_CONFIG, GENERATION_CONFIG))
    trainer = Trainer(model, config)
    stream = iter(Curriculum(entries, tokenizer, random.Random(seed)))
    began = time.perf_counter()
    for step in range(1, config.steps + 1):
        result = trainer.step([next(stream) for _ in range(batch)])
        if step % 50 == 0 or step == config.steps:
            seconds = time.perf_counter() - began
            print(f"step {step}/{config.steps}  loss {result.loss:.4f}  {seconds:.0f} s", flush=True)
    return model


def write_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Weights in bf16 under Hugging Face's names, and the two configuration files."""
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in hf_state_dict(model).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # the library writes it for the owner only
    _write_json(directory / "config.json", MODEL_CONFIG)
    _write_json(directory / "generation_config.json", GENERATION_CONFIG)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=ASSETS_DIR, help="directory to write")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=128, help="examples per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads; more change the rounding, and so the weights"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    entries = read_guide()
    tokenizer = train_tokenizer(entries)
    write_tokenizer(tokenizer, args.output)
    config = TrainerConfig(
        steps=args.steps,
        learning_rate=2e-3,
        warmup_steps=min(100, args.steps),
        dropout=0.15,
        capacity=8192,
        autocast=True,
    )
    write_model(train(entries, tokenizer, config, args.batch, args.seed), args.output)


if __name__ == "__main__":
    main()
