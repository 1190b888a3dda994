"""Converts the tokenizer in a GGUF file back to ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf.special_tokens import CONTROL, adds_bos, special_ids, token_texts
from chairlift.text.tokenizer.gguf_splits import SPLITS
from chairlift.text.tokenizer.gguf_vocabularies import unigram, word_piece, word_piece_texts

__all__ = ["gguf_tokenizer"]

_USER_DEFINED: Final = 4
_MAX_MERGED_CHARS: Final = 512
"""Maximum length in characters of a token for which merges are searched. The time of the search grows with the square
of the length."""
_NAMED: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}


def gguf_tokenizer(model: GGUFModel) -> tuple[bytes, dict[str, Any]]:
    """(contents of ``tokenizer.json``, contents of ``tokenizer_config.json``).

    Supported are byte-level BPE (``gpt2``), SentencePiece BPE (``llama``) and unigrams (``t5``), and WordPiece
    (``bert``). Raises :class:`~chairlift.errors.ModelLoadError` for other kinds, and for unknown names of
    pre-tokenizers.
    """
    metadata = model.metadata
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelLoadError(f"{model.path} has no tokens; give a tokenizer directory, or convert the model again")
    tokens = token_texts(tokens)
    types = _numbers(model, "token_type", len(tokens), default=1)
    if kind == "bert":
        tokens = word_piece_texts(tokens, types == CONTROL)
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if token in vocab:
            raise ModelLoadError(f"{model.path}: token {token!r:.40} is there twice; convert the model again")
        vocab[token] = number
    if kind == "gpt2":
        parts = _byte_level(model, vocab)
    elif kind == "llama":
        parts = _sentence_piece(model, vocab, tokens)
    elif kind == "t5":
        parts = unigram(model, tokens, _numbers(model, "scores", len(tokens)))
    elif kind == "bert":
        parts = word_piece(vocab, _named(model, tokens), types == CONTROL)
    else:
        raise ModelLoadError(
            f"{model.path}: tokenizer model {kind!r:.40} is not supported; bert, gpt2, llama and t5 are; give the"
            " directory of the original tokenizer with --tokenizer"
        )
    added = [
        {"id": number, "content": tokens[number], "special": bool(types[number] == CONTROL)}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number in np.flatnonzero(np.isin(types, (CONTROL, _USER_DEFINED))).tolist()
    ]
    names = _named(model, tokens)
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added} | parts
    content["post_processor"] = _post_processor(model, names, vocab) or parts.get("post_processor")
    config: dict[str, Any] = dict(names)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"), config


def _numbers(model: GGUFModel, name: str, count: int, default: float | None = None) -> Any:
    found = model.metadata.get(f"tokenizer.ggml.{name}")
    if found is None and default is not None:
        return np.full(count, default)
    if not isinstance(found, np.ndarray) or len(found) < count:
        raise ModelLoadError(f"{model.path}: tokenizer.ggml.{name} must have {count} numbers; convert the model again")
    return found[:count]


def _named(model: GGUFModel, tokens: Sequence[str]) -> dict[str, str]:
    ids = special_ids(model.metadata)
    return {name: tokens[ids[key]] for name, key in _NAMED.items() if key in ids}


def _post_processor(model: GGUFModel, names: Mapping[str, str], vocab: Mapping[str, int]) -> dict[str, Any] | None:
    """Post-processor that adds special tokens at the beginning and the end of a text; None if the model adds none."""
    kind = model.metadata.get("tokenizer.ggml.model")
    flags = {
        "bos_token": adds_bos(model.metadata),
        "eos_token": model.metadata.get("tokenizer.ggml.add_eos_token", kind == "t5"),
    }
    if kind == "bert":
        flags = {"cls_token": True, "sep_token": True}
    marks = {name: names[name] for name in flags if flags[name] is True and name in names}
    if not marks:
        return None

    def around(text: str, number: int) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"Sequence": {"id": text, "type_id": number}}]
        first = marks.get("bos_token", marks.get("cls_token"))
        last = marks.get("eos_token", marks.get("sep_token"))
        if first is not None and not (number and kind == "bert"):  # BERT begins only the first text of a pair
            parts.insert(0, {"SpecialToken": {"id": first, "type_id": number}})
        if last is not None:
            parts.append({"SpecialToken": {"id": last, "type_id": number}})
        return parts

    special = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in marks.values()}
    single = around("A", 0)
    return {"type": "TemplateProcessing", "single": single, "pair": single + around("B", 1), "special_tokens": special}


def _byte_level(model: GGUFModel, vocab: Mapping[str, int]) -> dict[str, Any]:
    merges = model.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelLoadError(f"{model.path} has no merges; convert the model again")
    pairs = [merge.split(" ", 1) for merge in merges]
    wrong = [pair for pair in pairs if len(pair) != 2 or not all(part in vocab for part in (*pair, "".join(pair)))]
    if wrong:
        raise ModelLoadError(f"{model.path}: merge {' '.join(wrong[0])!r:.40} has no tokens; convert the model again")
    name = model.metadata.get("tokenizer.ggml.pre", "default")
    how = SPLITS.get(name) if isinstance(name, str) else None
    if how is None:
        known = ", ".join(sorted(SPLITS))
        raise ModelLoadError(
            f"{model.path}: pre-tokenizer {name!r:.40} is not known; give the directory of the original tokenizer with"
            f" --tokenizer; known are {known}"
        )
    split: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in how.patterns
    ]
    return {
        "normalizer": {"type": "NFC"} if how.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, _level(use_regex=False)]},
        "post_processor": _level(use_regex=True),
        "decoder": _level(use_regex=True),
        "model": _bpe(vocab, pairs, ignore_merges=how.whole_tokens),
    }


def _level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def _bpe(vocab: Mapping[str, int], merges: list[Any], **settings: Any) -> dict[str, Any]:
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "type": "BPE",
        **plain,
        "fuse_unk": False,
        "byte_fallback": False,
        **settings,
        "vocab": vocab,
        "merges": merges,
    }


def _sentence_piece(model: GGUFModel, vocab: Mapping[str, int], tokens: Sequence[str]) -> dict[str, Any]:
    """Entries of ``tokenizer.json`` for a SentencePiece model.

    Such a model has no list of merges, but scores of tokens: the pair whose merged token has the best score is merged
    first.
    """
    scores = _numbers(model, "scores", len(tokens))
    found: list[tuple[float, int, int, str, str]] = []
    for number, token in enumerate(tokens):
        if len(token) > _MAX_MERGED_CHARS:
            raise ModelLoadError(
                f"{model.path}: a token of {len(token)} characters; up to {_MAX_MERGED_CHARS} are allowed"
            )
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-float(scores[number]), vocab[left], vocab[right], left, right))
    found.sort()
    space = "\u2581"
    prefix = model.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": space}]
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": space}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.insert(0, {"type": "Prepend", "prepend": space})
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _named(model, tokens).get("unk_token")
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": _bpe(
            vocab, [[left, right] for *_, left, right in found], unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }
