"""Why a row has no token, in words. Needs no torch."""

from __future__ import annotations

import math

__all__ = ["raw_reason", "shaped_reason"]


def raw_reason(highest: float) -> str:
    if highest == -math.inf:
        return "the model gave every token a logit of -inf, so none can be chosen"
    kind = "NaN" if math.isnan(highest) else "+inf"
    return f"the model's logits contain {kind}; the weights or the dtype may be at fault (try float32)"


def shaped_reason(highest: float) -> str:
    if highest == -math.inf:
        return (
            "no token is left to choose from: allowed_token_ids, bad_words, logit_bias, min_tokens or the grammar "
            "exclude every one; relax one of them"
        )
    return "the logits overflow after penalties and temperature; use a higher repetition_penalty or temperature"
