"""Decoders that say yes or no to a query and a document, and the text that they are asked with. Needs no torch."""

from __future__ import annotations

import dataclasses
from typing import Final

__all__ = ["RERANKERS", "Reranker"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reranker:
    """A family of such models. The text is ``before``, instruction, query and document, and ``behind``."""

    before: str
    instruction: str
    """Stands before the instruction."""
    query: str
    document: str
    behind: str
    default: str
    """The instruction where nobody gives one."""
    answers: tuple[str, str] = ("no", "yes")
    """The tokens whose logits are compared, behind the text; the second one's probability is the score."""


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
"""By the values of the setting ``reranker``. ``qwen3``: Qwen3-Reranker (Zhang et al., 2025), as its card has it."""
