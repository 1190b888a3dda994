"""A tokenizer that needs no training: one token per byte, and a few special tokens."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from chairlift.text.tokenizer.tokenizer import Tokenizer, byte_level_alphabet

__all__ = ["byte_tokenizer"]


def byte_tokenizer(special: Sequence[str], *, eos: str, chat_template: str | None = None) -> Tokenizer:
    """A tokenizer for bytes. Ids 0 to 255 are the bytes of the text in UTF-8. The ``special`` tokens get the ids from
    256 on."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_level_alphabet(), []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, {"eos_token": eos}, chat_template)
