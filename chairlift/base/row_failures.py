"""Error texts for rows that get no token. Needs no torch."""

from __future__ import annotations

import math

from chairlift.base.sampling_params import SHAPED_REASONS

__all__ = ["output_reason", "raw_reason", "shaped_reason"]


def raw_reason(highest: float) -> str:
    if highest == -math.inf:
        return "the model gave every token a logit of -inf, so none can be chosen"
    kind = "NaN" if math.isnan(highest) else "+inf"
    return f"the model's logits contain {kind}; the weights or the dtype may be at fault (try float32)"


def output_reason(error: Exception) -> str:
    """Error text for an answer whose output could not be made. It has the error's type, but no text of the request."""
    return f"its output could not be made ({type(error).__name__}); the server's log says more"


def shaped_reason(highest: float) -> str:
    return SHAPED_REASONS[highest != -math.inf]
