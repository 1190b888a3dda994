"""Small tokenizers for every decoder family, built in memory."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from chairlift.text.tokenizer import Tokenizer

__all__ = ["FAMILIES", "LLAMA3_PATTERN", "byte_fallback_backend", "byte_level_backend", "library", "make"]

_CORPUS = (
    "The chairlift never stops: riders step on and off while it runs, and so does the batch.",
    "Wer früh fährt, hat die Piste für sich allein. Ça va très bien, merci à tous !",
    "你好世界 こんにちは 안녕하세요 Привет мир  two  spaces\n\n\tand a tab",
    "def f(x):\n    return x + 1  # 😀👍🏽👨‍👩‍👧 naïve café",
)
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3_PATTERN = _WORDS + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def byte_level_backend(pattern: str | None = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is None:
        backend.pre_tokenizer = split
    else:
        cut = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, split])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<tool call>", "ñandú"])
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return backend


def byte_fallback_backend(strip: bool = True) -> tokenizers.Tokenizer:
    """A tokenizer like Llama 2's: no pre-tokenizer, spaces as ``▁``, and unknown characters as byte tokens."""
    specials = ["<unk>", "<s>", "</s>"]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(_SENTENCEPIECE + [decoders.Strip(" ", 1, 0)] * strip)
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=specials + _BYTES, show_progress=False)
    backend.train_from_iterator(_CORPUS[:1], trainer)  # few letters, so that most text becomes bytes
    # The trainer can reserve entries only as special tokens, but byte tokens must be normal tokens.
    description = json.loads(backend.to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["content"] in specials]
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _unigram_backend() -> tokenizers.Tokenizer:
    pieces = [(piece, -3.0) for piece in ("<unk>", "</s>", *_BYTES, "▁", "▁the", "he", "ch", "air", "lift", "▁▁", "é")]
    pieces += [(char, -5.0) for char in "abcdefghijklmnopqrstuvwxyz."]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([*_SENTENCEPIECE, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["</s>"])
    return backend


def _metaspace_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _word_piece_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _suffix_backend() -> tokenizers.Tokenizer:
    """A tokenizer with ``</w>`` at the end of each word. The last token of a sequence drops its space, so its text
    depends on the tokens that follow."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


FAMILIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level_backend,
    "byte_fallback": byte_fallback_backend,
    "byte_fallback_no_strip": lambda: byte_fallback_backend(strip=False),
    "unigram_byte_fallback": _unigram_backend,
    "metaspace": _metaspace_backend,
    "word_piece": _word_piece_backend,
    "suffix": _suffix_backend,
}


@functools.cache
def library(family: str) -> tokenizers.Tokenizer:
    """Tokenizer of the ``tokenizers`` library, as the reference."""
    return FAMILIES[family]()


@functools.cache
def make(family: str) -> Tokenizer:
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(tokenizers.Tokenizer.from_str(library(family).to_str()), named)
