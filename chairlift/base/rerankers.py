"""Decoders that score a query and a document by the probability of the answer yes, and their prompts. Needs no
torch."""

from __future__ import annotations

import dataclasses
from typing import Final

__all__ = ["RERANKERS", "Reranker"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reranker:
    """A family of rerankers. The prompt joins ``before``, ``instruction`` and the text of the instruction, ``query``
    and the query, ``document`` and the document, and ``behind``."""

    before: str
    instruction: str
    """Text between ``before`` and the text of the instruction."""
    query: str
    document: str
    behind: str
    default: str
    """Text of the instruction unless the settings give another."""
    answers: tuple[str, str] = ("no", "yes")
    """(negative answer, positive answer). The model compares the logits of both after the prompt; the probability of
    the positive answer is the score."""


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
"""Value of the setting ``reranker`` -> its family. ``qwen3`` is Qwen3-Reranker (Zhang et al., 2025), with the prompt of
its model card."""
