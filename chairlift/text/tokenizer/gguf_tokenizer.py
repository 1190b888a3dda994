"""Converts the tokenizer in a GGUF file back to ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf.special_tokens import CONTROL, adds_bos, special_ids, token_texts

__all__ = ["gguf_tokenizer"]

_USER_DEFINED: Final = 4
_MAX_MERGED_CHARS: Final = 512
"""Maximum length in characters of a token for which merges are searched. The time of the search grows with the square
of the length."""
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS: Final = {"type": "Digits", "individual_digits": True}
_PATTERNS: Final[dict[str, str]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-v2-en"), _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
}
"""llama.cpp's name of a tokenizer -> regular expression that splits a text before merges are applied."""
_DEFAULT: Final = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9]{3}")
"""Patterns of llama.cpp for a tokenizer named ``default`` or without a name, as in old files. Each splits the pieces of
the one before."""
_DIGITS_FIRST: Final = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
"""Names of tokenizers that first split off every digit, and then split the rest like GPT-2."""
_MERGES_IGNORED: Final = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Names of tokenizers that do not apply merges to a piece of text that is itself a token."""
_NAMED: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def gguf_tokenizer(model: GGUFModel) -> tuple[bytes, dict[str, Any]]:
    """(contents of ``tokenizer.json``, contents of ``tokenizer_config.json``).

    Supported are byte-level BPE (``gpt2``) and SentencePiece BPE (``llama``). Raises
    :class:`~chairlift.errors.ModelLoadError` for other kinds, and for unknown names of pre-tokenizers.
    """
    metadata = model.metadata
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelLoadError(f"{model.path} has no tokens; give a tokenizer directory, or convert the model again")
    tokens = token_texts(tokens)
    types = _numbers(model, "token_type", len(tokens), default=1)
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if token in vocab:
            raise ModelLoadError(f"{model.path}: token {token!r:.40} is there twice; convert the model again")
        vocab[token] = number
    if kind == "gpt2":
        parts = _byte_level(model, vocab)
    elif kind == "llama":
        parts = _sentence_piece(model, vocab, tokens)
    else:
        raise ModelLoadError(f"{model.path}: tokenizer model {kind!r:.40} is not supported; gpt2 and llama are")
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
    flags = {
        "bos_token": adds_bos(model.metadata),
        "eos_token": model.metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    marks = {name: names[name] for name in flags if flags[name] is True and name in names}
    if not marks:
        return None

    def around(text: str, number: int) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"Sequence": {"id": text, "type_id": number}}]
        if "bos_token" in marks:
            parts.insert(0, {"SpecialToken": {"id": marks["bos_token"], "type_id": number}})
        if "eos_token" in marks:
            parts.append({"SpecialToken": {"id": marks["eos_token"], "type_id": number}})
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
    split: list[dict[str, Any]]
    if name in _DIGITS_FIRST:
        split = [_DIGITS, _level(use_regex=True)]
    elif name in _PATTERNS or name == "default":
        patterns = (_PATTERNS[name],) if name in _PATTERNS else _DEFAULT
        split = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in patterns
        ]
        split.append(_level(use_regex=False))
    else:
        known = ", ".join(sorted((*_PATTERNS, *_DIGITS_FIRST, "default")))
        raise ModelLoadError(f"{model.path}: pre-tokenizer {name!r:.40} is not known; known are {known}")
    return {
        "normalizer": {"type": "NFC"} if _PATTERNS.get(name) == _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split},
        "post_processor": _level(use_regex=True),
        "decoder": _level(use_regex=True),
        "model": _bpe(vocab, pairs, ignore_merges=name in _MERGES_IGNORED),
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
