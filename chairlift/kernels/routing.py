"""Settings for routing tokens to experts. The module does not import torch."""

from __future__ import annotations

import dataclasses

__all__ = ["GROUP_SCORES", "SCORINGS", "Routing"]

SCORINGS = ("softmax", "softmax_chosen", "sigmoid")
"""Values of :attr:`Routing.scoring`, in the order of ``cl_scoring``."""

GROUP_SCORES = ("best_two", "best")
"""Values of :attr:`Routing.group_score`, in the order of ``cl_group_score``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How experts are chosen for a token, and how their results are weighted (Shazeer et al., 2017).

    The router is a matmul in float32 that computes one logit per expert. ``scoring`` turns logits into scores. The
    ``top_k`` experts with the highest scores are chosen, best first, and their scores are the weights. Among equal
    scores, the expert with the lower index comes first. Raises ValueError for parameters that do not fit together.
    """

    num_experts: int
    top_k: int
    """Number of experts per token."""
    scoring: str = "softmax"
    """``softmax`` over all experts (Mixtral, Qwen), ``softmax_chosen`` over the experts chosen by their logits
    (Granite), or ``sigmoid`` of each logit (DeepSeek-V3)."""
    normalise: bool = False
    """Whether the weights are divided by their sum."""
    epsilon: float = 0.0
    """Number added to the sum of a token's weights before the weights are divided by it."""
    scale: float = 1.0
    """Factor by which the weights are multiplied at the end."""
    groups: int = 1
    """Number of groups of equal size into which neighbouring experts are divided (DeepSeek-V2)."""
    kept_groups: int = 1
    """Number of groups that are kept: those with the highest scores. Experts are chosen only from them."""
    group_score: str = "best_two"
    """Score of a group: the sum of its two highest scores (``best_two``, DeepSeek-V3), or the highest score (``best``,
    DeepSeek-V2)."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.top_k} experts per token, of {self.num_experts}; choose from 1 to all of them")
        if self.groups < 1 or self.num_experts % self.groups:
            raise ValueError(f"{self.num_experts} experts make no {self.groups} groups of equal size")
        size = self.num_experts // self.groups
        if not 1 <= self.kept_groups <= self.groups or self.kept_groups * size < self.top_k:
            raise ValueError(
                f"{self.kept_groups} of {self.groups} groups of {size} experts are kept, "
                f"which must be at most all, and hold the {self.top_k} that a token is sent to"
            )
        if self.groups > 1 and self.group_score == "best_two" and size < 2:
            raise ValueError(f"a group is scored by its best two experts, but {self.groups} groups have {size} each")
        if self.scoring not in SCORINGS or self.group_score not in GROUP_SCORES:
            raise ValueError(f"no such scores: {self.scoring} of experts, {self.group_score} of groups")

    @property
    def words(self) -> str:
        """Short description of the routing for messages, such as ``32 experts, 4 chosen``."""
        return f"{self.num_experts} experts, {self.top_k} chosen"
