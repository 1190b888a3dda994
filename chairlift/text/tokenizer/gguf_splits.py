"""How llama.cpp's byte-level tokenizers split a text before merges are applied.

The names are those of ``tokenizer.ggml.pre`` in GGUF files (``src/llama-vocab.cpp``). The patterns are those of the
models' own ``tokenizer.json``, which llama.cpp's are made from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["SPLITS", "Splitting"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """How one tokenizer splits texts."""

    patterns: tuple[str, ...]
    """Regular expressions. Each splits the pieces of the one before: a match is a piece, and so is what lies between
    two matches."""
    whole_tokens: bool = False
    """Whether a piece that is itself a token becomes this token, without merges."""
    composed: bool = False
    """Whether texts are normalised to composed characters (NFC) first."""


_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)


def _cased(ending: str, numbers: str, signs: str = r"[\r\n/]*", but: str = "") -> str:
    """Pattern that also splits a word before a capital letter. ``ending`` may follow a word. ``but`` removes characters
    from the classes of letters."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{signs}|{_SPACES}"


_TEKKEN: Final = _cased("", r"\p{N}")
_O200K: Final = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_YOUTU: Final = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
    _cased(f"{_CONTRACTIONS}?", r"\p{N}"),
)
_KIMI: Final = r"[\p{Han}]+|" + _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", r"[\r\n]*", r"&&[^\p{Han}]")
_HAN: Final = "[一-龥\u3040-ゟ゠-ヿ]+"
_PUNCTUATED: Final = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK3: Final = (r"\p{N}{1,3}", _HAN, rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")
_SPARK: Final = (
    r"\p{N}{1,3}",
    _HAN,
    rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
_THOUSANDS: Final = r"\d{1,3}(?=(?:\d{3})*\b)"
_AFMOE: Final = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[一-\u9fff㐀-\u4dbf豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdf\u0e00-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f"
    "\uaa60-\uaa7f\ua9e0-\ua9ff가-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK3[2],
)
_CASED_LETTERS: Final = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-"
    "ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Ranges of the letters that have two cases, as DeepSeek LLM lists them."""
_DEEPSEEK: Final = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥\u0800-一가-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")
_BLOOM: Final = r" ?[^(\s|.,!?…。，、।۔،)]+"
_JAIS2: Final = (
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+"
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
    r"|\s{1,2}(?!\S)|\s{1}"
)
_CHAMELEON: Final = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_BAILING: Final = rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_EXAONE_MOE: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_MINICPM5: Final = (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_SIGNS}|{_SPACES}")


def _named(names: Iterable[str], *patterns: str, **how: bool) -> dict[str, Splitting]:
    return dict.fromkeys(names, Splitting(patterns=patterns, **how))


SPLITS: Final[Mapping[str, Splitting]] = {
    # Without a name, as in old files.
    **_named(["default"], r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9]{3}"),
    **_named(
        [
            *("a.x-4.0", "exaone4", "gigachat", "gpt-2", "granite-docling", "jais", "jina-de", "jina-es", "jina-v1-en"),
            *("jina-v2-code", "jina-v2-de", "jina-v2-en", "jina-v2-es", "mellum", "modern-bert", "mpt", "olmo"),
            *("phi-2", "roberta-bpe", "trillion"),
        ],
        _GPT2,
    ),
    **_named(
        ["codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "smollm", "starcoder"], r"\p{N}", _GPT2
    ),
    **_named(
        [
            *("falcon-h1", "falcon3", "jina-v5-nano", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0"),
            "pixtral",
        ],
        _LLAMA3,
        whole_tokens=True,
    ),
    **_named(["chatglm-bpe", "dbrx", "smaug-bpe"], _LLAMA3),
    **_named(["glm4", "glm5"], _LLAMA3, whole_tokens=True),
    **_named(["deepseek-r1-qwen", "f2llmv2", "kormo", "megrez", "qwen2", "stablelm2"], _QWEN2, composed=True),
    **_named(["grok-2", "hunyuan", "solar-open"], _QWEN2),
    **_named(["qwen35"], _QWEN35, composed=True),
    **_named(["tekken"], _TEKKEN, whole_tokens=True),
    **_named(["gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie"], _O200K),
    **_named(["granite-embed-multi-97m"], _O200K, whole_tokens=True),
    **_named(["cohere2moe", "tiny_aya"], _THOUSANDS, _O200K),
    **_named(["youtu"], *_YOUTU, whole_tokens=True),
    **_named(["kimi-k2"], _KIMI),
    **_named(["deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"], *_DEEPSEEK3),
    **_named(["spark2_5"], *_SPARK),
    **_named(["deepseek-llm"], *_DEEPSEEK),
    **_named(["deepseek-coder"], *_DEEPSEEK_CODER),
    **_named(["afmoe"], *_AFMOE),
    **_named(["falcon"], r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **_named(["bloom", "gpt3-finnish", "poro-chat"], _BLOOM),
    **_named(["viking"], _BLOOM, r"\p{N}"),
    **_named(["jais-2"], _JAIS2),
    **_named(["chameleon"], *_CHAMELEON),
    **_named(["superbpe"], r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **_named(["bailingmoe", "bailingmoe2", "llada-moe"], _BAILING),
    **_named(["seed-coder"], _SEED_CODER),
    **_named(["ufakzeka"], rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"),
    **_named(["laguna"], r"[^\n]+|[\n]+", _QWEN2),
    **_named(["exaone-moe"], _EXAONE_MOE),
    **_named(["minicpm5"], *_MINICPM5, whole_tokens=True),
}
"""Name of a tokenizer -> how it splits texts. llama.cpp's ``gemma4``, ``granite-embed-multi-311m``, ``sarvam-moe`` and
``whitespace`` are left out, because they are not byte-level."""
