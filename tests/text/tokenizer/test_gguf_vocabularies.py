"""WordPiece and unigram vocabularies in a GGUF file are the tokenizers that they were made from.

Changes that must make these fail: beginnings of words kept as llama.cpp marks them; capital letters kept for a
vocabulary without them; the second special token left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from chairlift.errors import ModelLoadError
from tests.models.gguf.test_tokenizer import TEXTS, tokens_id, written
from tests.text.tokenizer.tiny import _CORPUS

MORE = (*TEXTS[:3], "", "x", "unaffable THE chairlift's 你好", "Çok güzel  naïve", "a" * 120)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONTROL = 3


def word_piece_backend(*, lowercase: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator([*_CORPUS, "a"], trainer)
    ids = [(token, tokens_id(backend, token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    return backend


def as_word_pieces(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a WordPiece tokenizer."""
    texts = {number: text for text, number in backend.get_vocab().items()}
    stored = [
        text if text in SPECIAL else text[2:] if text.startswith("##") else f"\u2581{text}"
        for _, text in sorted(texts.items())
    ]
    names = ("padding", "unknown", "cls", "seperator", "mask")
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": stored,
        "tokenizer.ggml.token_type": [CONTROL if text in SPECIAL else 1 for text in stored],
        **{f"tokenizer.ggml.{name}_token_id": number for number, name in enumerate(names)},
    }


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces_equal_the_original_tokenizer(tmp_path: Path, lowercase: bool) -> None:
    backend = word_piece_backend(lowercase=lowercase)
    found = written(tmp_path, as_word_pieces(backend))
    assert found.named_tokens["cls_token"] == "[CLS]" and found.named_tokens["sep_token"] == "[SEP]"
    for text in MORE:
        ids = backend.encode(text).ids
        assert found.encode(text) == ids, text
        assert found.decode(ids) == backend.decode(ids)


def test_the_second_text_of_a_pair_has_no_first_token(tmp_path: Path) -> None:
    backend = word_piece_backend(lowercase=True)
    written(tmp_path, as_word_pieces(backend))
    from chairlift.models.formats.gguf.reader import GGUFModel
    from chairlift.text.tokenizer.gguf_tokenizer import gguf_tokenizer

    content, _ = gguf_tokenizer(GGUFModel(tmp_path / "model.gguf"))
    ours, theirs = tokenizers.Tokenizer.from_buffer(content).encode("a", "b"), backend.encode("a", "b")
    assert (ours.ids, ours.type_ids) == (theirs.ids, theirs.type_ids)


def unigram_backend() -> tokenizers.Tokenizer:
    """A tokenizer like XLM-RoBERTa's: unigrams between <s> and </s>."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=260, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    ids = [(token, tokens_id(backend, token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return backend


def as_unigrams(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for SentencePiece's unigrams."""
    import json

    vocab = json.loads(backend.to_str())["model"]["vocab"]
    texts = [text for text, _ in vocab]
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [float(score) for _, score in vocab],
        "tokenizer.ggml.token_type": [
            {"<unk>": 2}.get(text, CONTROL if text[0] == "<" and len(text) > 2 else 1) for text in texts
        ],
        "tokenizer.ggml.bos_token_id": texts.index("<s>"),
        "tokenizer.ggml.eos_token_id": texts.index("</s>"),
        "tokenizer.ggml.unknown_token_id": texts.index("<unk>"),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }


def test_unigrams_equal_the_original_tokenizer(tmp_path: Path) -> None:
    backend = unigram_backend()
    found = written(tmp_path, as_unigrams(backend))
    for text in MORE:
        ids = backend.encode(text).ids
        assert found.encode(text) == ids, text
        assert found.decode(ids) == backend.decode(ids)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("precompiled_charsmap", "text", "precompiled_charsmap must hold bytes"),
        ("unknown_token_id", 100_000, "unknown_token_id 100000 is no token"),
        ("model", "rwkv", "tokenizer model 'rwkv' is not supported; bert, gpt2, llama and t5 are"),
    ],
)
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, key: str, value: Any, words: str) -> None:
    metadata = as_unigrams(unigram_backend()) | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelLoadError, match=words):
        written(tmp_path, metadata)
