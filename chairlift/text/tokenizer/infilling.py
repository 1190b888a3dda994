"""Prompts for generating the text between a prefix and a suffix (fill in the middle; Bavarian et al., 2022).

Models that were trained for it mark the parts with special tokens, which their authors published. A format applies to
a tokenizer that has all tokens of the format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["INFILL_FORMATS", "InfillFormat", "cut_lead", "infill_format_of", "lead_of"]

_LEAD: Final = "\u263a"
"""Text that is put before a suffix, so that a space which the tokenizer adds comes before this text and not before the
suffix. The tokenizers that add such a space never merge this text with others. CodeLlama's authors and Mistral use the
same text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InfillFormat:
    """Texts of the special tokens with which one group of models marks prefix, suffix and middle."""

    name: str
    prefix: str
    suffix: str
    middle: str = ""
    """Mark after prefix and suffix, before the generated text; empty if there is none."""
    suffix_first: bool = False
    ends: tuple[str, ...] = ()
    """Tokens that end the generated text, in addition to the marks and the end of sequence. Tokens that the tokenizer
    does not have are ignored."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens that a tokenizer must have for this format."""
        return tuple(mark for mark in (self.prefix, self.suffix, self.middle) if mark)

    def lay_out(self, tokenizer: Tokenizer, prefix: Sequence[int], suffix: Sequence[int], special: bool) -> list[int]:
        """Token ids of a prompt that asks for the text between ``prefix`` and ``suffix``. If ``special`` is true, it
        begins with the tokens that the tokenizer puts before a text (such as a BOS)."""
        mark = {text: tokenizer.token_to_id(text) for text in self.marks}
        first, second = [mark[self.prefix], *prefix], [mark[self.suffix], *suffix]
        parts = [*second, *first] if self.suffix_first else [*first, *second]
        begin = tokenizer.encode("a")[: tokenizer.num_added[0]] if special else []
        ids = [*begin, *parts, *([mark[self.middle]] if self.middle else [])]
        return [token_id for token_id in ids if token_id is not None]

    def end_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Ids of the tokens that end the generated text."""
        found = [tokenizer.token_to_id(text) for text in (*self.marks, *self.ends)]
        return sorted({token_id for token_id in found if token_id is not None})


INFILL_FORMATS: Final = (
    InfillFormat(
        name="qwen",  # Qwen2.5-Coder, CodeGemma, Granite
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>", "<|im_end|>"),
    ),
    InfillFormat(
        name="starcoder",  # StarCoder, StarCoder2, Stable Code, Granite Code
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        ends=("<fim_pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<|endoftext|>"),
    ),
    InfillFormat(
        name="santacoder",
        prefix="<fim-prefix>",
        suffix="<fim-suffix>",
        middle="<fim-middle>",
        ends=("<fim-pad>", "<|endoftext|>"),
    ),
    InfillFormat(name="codellama", prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>", ends=("▁<EOT>",)),
    InfillFormat(
        name="deepseek", prefix="<｜fim▁begin｜>", suffix="<｜fim▁hole｜>", middle="<｜fim▁end｜>", ends=("<|EOT|>",)
    ),
    InfillFormat(
        name="seed_coder",
        prefix="<[fim-prefix]>",
        suffix="<[fim-suffix]>",
        middle="<[fim-middle]>",
        suffix_first=True,
        ends=("<[end▁of▁sentence]>",),
    ),
    InfillFormat(name="codestral", prefix="[PREFIX]", suffix="[SUFFIX]", suffix_first=True),
)
"""All formats. A tokenizer has the first one whose marks it contains."""


def infill_format_of(tokenizer: Tokenizer) -> InfillFormat | None:
    """Format of a model's tokenizer; None if it has no tokens for filling in the middle."""
    known = (row for row in INFILL_FORMATS if all(tokenizer.token_to_id(mark) is not None for mark in row.marks))
    return next(known, None)


def lead_of(tokenizer: Tokenizer) -> str:
    """Text to put before a suffix when the suffix is encoded separately. :func:`cut_lead` then removes the tokens of
    this text."""
    ids = tokenizer.encode("a", False)
    return _LEAD if ids and tokenizer.token_text(ids[0]).startswith((" ", "▁")) else ""


def cut_lead(tokenizer: Tokenizer, lead: str, ids: Sequence[int]) -> list[int]:
    """Token ids of a suffix, given the token ids of :func:`lead_of` and the suffix encoded together."""
    begin = tokenizer.encode(lead, False) if lead else []
    return list(ids[len(begin) :])
