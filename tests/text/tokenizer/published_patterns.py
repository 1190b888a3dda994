"""Regular expressions of published tokenizers, from ``tokenizer.json`` or from the code of tiktoken.

Keys name the models that use them. They are test data: ``chairlift.text.tokenizer.patterns`` decides how the server
treats a pattern.
"""

from __future__ import annotations

__all__ = ["SLOW", "STEADY"]

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_START = r"[^\r\n\p{L}\p{N}]?"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_JOINED = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_START}(?:\p{{L}}|\p{{M}}|%s|%s)+|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"


_NO_HAN = r"&&[^\p{Han}]"


def _cased(ending: str, without: str = "") -> str:
    upper, lower = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    return f"{_START}{upper}*{lower}+{ending}|{_START}{upper}+{lower}*{ending}"


STEADY = {
    # Patterns that split the whole text, without another split before them.
    "GPT-2, GPT-NeoX, OLMo, Phi-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "r50k of tiktoken": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "r50k, older": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k of tiktoken": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "cl100k, older": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
    "Ling, Ring (Bailing)": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
    "GPT-4o, gpt-oss, Llama 4, MiniMax M2, Phi-4-mini": rf"{_cased(_ENDINGS + '?')}|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    "Mistral (Tekken)": rf"{_cased('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    "Kimi K2": rf"[\p{{Han}}]+|{_cased(_ENDINGS + '?', _NO_HAN)}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}",
    "Llama 3, GLM-4, SmolLM3, OLMo 2, Phi-4": rf"{_ENDINGS}|{_START}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}",
    "Qwen2, Qwen3, StableLM 2, Hunyuan": rf"{_ENDINGS}|{_START}\p{{L}}+|\p{{N}}|{_MARKS}|{_SPACES}",
    "Qwen3.5": rf"{_ENDINGS}|{_START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "MiniCPM 5": rf"{_ENDINGS}|{_START}\p{{L}}+|\p{{N}}+|{_MARKS}|{_SPACES}",
    "Ufakzeka": rf"{_START}\p{{L}}+|\p{{N}}|{_MARKS}|{_SPACES}",
    "K2": _JOINED % (r"\u200C", r"\u200D"),
    "K2, converted": _JOINED % (r"\x{200C}", r"\x{200D}"),
    "EXAONE 4": rf"{_ENDINGS}|{_START}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
    "Seed-Coder, line breaks as such": _ENDINGS + "|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    "DeepSeek V3, R1, V4, Hunyuan; line breaks as such": "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    "Spark": "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+|[\r\n]|\\s+(?!\\S)|\\s+",
    "BLOOM": " ?[^(\\s|[.,!?…。，、।۔،])]+",
    "Viking, Poro": " ?[^(\\s|.,!?…。，、।۔،)]+",
    "CLIP": r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "Gemma 4, Laguna": r"[^\n]+|[\n]+",
    "whitespace": r"\w+|[^\w\s]+",
    # Patterns of tokenizers that split in several steps: one step each.
    "DeepSeek V3, numbers": r"\p{N}{1,3}",
    "DeepSeek V3, Chinese": "[一-龥぀-ゟ゠-ヿ]+",
    "DeepSeek Coder, line breaks": "[\r\n]",
    "DeepSeek Coder, words": r"\s?\p{L}+",
    "DeepSeek Coder, marks": r"\s?\p{P}+",
    "DeepSeek LLM, words (shortened)": r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓ]+",
    "DeepSeek LLM, marks": "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    "Youtu": "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    "Trinity (AFMoE), Asian scripts": "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿]+",
    "Falcon": "[0-9][0-9][0-9]",
    # Patterns of normalizers.
    "ALBERT, XLM-R, T5, Pegasus": " {2,}",
    "CLIP, spaces": r"\s+",
    "DeBERTa, BARThez": r"\s{2,}|[\n\r\t]",
    "SentencePiece, converted": r"\A▁",
    "a prefix at the start of a text": r"(?<!\n)^",
}
SLOW = {
    # Patterns that the server correctly refuses, because splitting takes time that grows with the square of the text's
    # length.
    "DeepSeek LLM, spaces at the end": r"\s+$",
    "SentencePiece, converted by transformers 5": r"\A +| +\z",
    "SeamlessM4T": " +▁",
    "SuperBPE": r"(?=(\d{3})+(?!\d))",
    "Tiny Aya, Trinity (AFMoE)": r"\d{1,3}(?=(?:\d{3})*\b)",
    "Jais 2": r"\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{1,2}(?!\S)|\s{1}",
    # Patterns that no model uses.
    "twice as often per letter": "(a|aa)+$",
    "a repetition in a repetition": "(a+)+b",
    "a repetition in a repetition, in Oniguruma": "a{1,3}+b|a+",
    "several repetitions": "a*a*a*b|a+",
    "a run nobody takes": r"\w*[!?]|\s+",
    "a run taken one by one": r"\s*x| |\s+",
    "a run taken one by one, behind": r"\s*x|\s++(?!\S)|\s",
    "a run found empty": r"\s*(?!\S)|\s+",
    "a repetition in a group": "(?:a+b)*",
    "a repetition ahead": "(?=a+)b",
    "a reference": r"(\w+)\1",
    "many ways": "(?:a|b){0,9}c",
}
