"""Compares how Chairlift and transformers render published chat templates.

``python -m tests.text.tokenizer.published_templates DIR`` compares all templates in a directory.

These packages contain chat templates: trl, and llama-cpp-python's source distribution
(vendor/llama.cpp/models/templates).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from chairlift.errors import RequestError, TemplateError
from chairlift.text.tokenizer import ChatTemplate
from tests.text.tokenizer import tiny

__all__ = ["CHATS", "NAMED", "compare", "reference"]

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
_HI = {"role": "user", "content": "Hi"}
_CALL = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": {"place": "Ulm"}}}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "name": "look", "tool_call_id": "call12345", "content": "Rain."}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _says(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


# Name -> (messages, words that the rendered text must contain). The text must also equal transformers', if transformers
# can render the chat.
CHATS: dict[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {
    "user": ([_HI], ("Hi",)),
    "system": ([{"role": "system", "content": "Be."}, _HI], ("Be.", "Hi")),
    "turns": ([_HI, _says("Yo"), {"role": "user", "content": "Go"}], ("Hi", "Yo", "Go")),
    "parts": ([{"role": "user", "content": _parts("One.", " Two.")}], ("One.", "Two.")),
    "system's parts": ([{"role": "system", "content": _parts("S1", "S2")}, _HI], ("S1", "S2", "Hi")),
    "assistant's parts": ([_HI, _says(_parts("A1", "A2")), {"role": "user", "content": "Go"}], ("A1", "A2", "Go")),
    "reasoning": ([_HI, _says("Yo", reasoning_content="Because."), {"role": "user", "content": "Go"}], ("Yo", "Go")),
    "calls": ([_HI, _CALLS, _RESULT], ("Hi", "Rain.")),
    "late system": (
        [_HI, _says("Yo"), {"role": "system", "content": "Be."}, {"role": "user", "content": "Go"}],
        ("Hi", "Yo", "Be.", "Go"),
    ),
    "continued": ([_HI, _says("Well, I ")], ("Hi", "Well, I")),
    "thoughts continued": ([_HI, _says("<think>\na\n</think>\n\nWell")], ("Hi", "Well")),
}


def reference() -> Any:
    """A tokenizer of transformers, whose ``apply_chat_template`` is the reference."""
    import transformers

    return transformers.PreTrainedTokenizerFast(tokenizer_object=tiny.library("byte_level"), **NAMED)


def compare(source: str, name: str, truth: Any) -> str:
    """Compare both renderings of one template. Returns ``same``, ``refused`` (by Chairlift), ``other`` (a different
    text that contains all words), ``differs`` or ``lost`` (words are missing)."""
    chat, words = CHATS[name]
    how = {"continue_final_message": True} if "continued" in name else {"add_generation_prompt": True}
    try:
        ours = ChatTemplate(source, NAMED).render(chat, **how)  # type: ignore[arg-type]
    except (RequestError, TemplateError):
        return "refused"
    if any(word not in ours for word in words):
        return "lost"
    try:
        theirs = truth.apply_chat_template(chat, chat_template=source, tokenize=False, **how)
    except Exception:  # a template may raise anything
        return "other"
    if ours == theirs:
        return "same"
    # If a template does not loop over the parts of a message, transformers prints the parts as Python objects or drops
    # them.
    broken = "'text'" in theirs or '"text"' in theirs or any(word not in theirs for word in words)
    return "other" if broken or "reasoning" in name else "differs"


def _main(folder: Path) -> None:
    truth = reference()
    for name in CHATS:
        outcomes = {file.name: compare(file.read_text("utf-8"), name, truth) for file in folder.rglob("*.jinja")}
        worst = [file for file, outcome in outcomes.items() if outcome in ("lost", "differs")]
        print(f"{name:20} {dict(Counter(outcomes.values()))} {' '.join(sorted(worst))}")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
