"""Decoders that answer yes or no about a query and a document, and their prompts. Needs no torch."""

from __future__ import annotations

import dataclasses
from typing import Final

__all__ = ["RERANKERS", "Reranker"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reranker:
    """A family of such models. The prompt is ``before``, instruction, query, document, ``behind``."""

    before: str
    instruction: str
    """Text before the instruction."""
    query: str
    document: str
    behind: str
    default: str
    """Default instruction."""
    answers: tuple[str, str] = ("no", "yes")
    """Answers whose logits are compared after the prompt; the probability of the second is the score."""


RERANKERS: Final = {
    "qwen3": Reranker(
        before=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
            ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        ),
        instruction="<Instruct>: ",
        query="\n<Query>: ",
        document="\n<Document>: ",
        behind="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        default="Given a web search query, retrieve relevant passages that answer the query",
    ),
}
"""Rerankers by value of the setting ``reranker``. ``qwen3``: Qwen3-Reranker (Zhang et al., 2025), with the prompt of
its model card."""
