"""The field ``suffix`` of /v1/completions: generates the text between a prompt and a suffix (fill in the middle)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from chairlift.server.http.errors import ApiError
from chairlift.server.http.state import ServerState
from chairlift.server.openai.protocol import CompletionRequest
from chairlift.server.openai.structured import FIELDS
from chairlift.text.tokenizer.infilling import InfillFormat, cut_lead, infill_format_of, lead_of
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["Infilling", "infilling"]

_NOT_WITH_IT: Final = ("echo", "truncate_prompt_tokens", *FIELDS)


@dataclasses.dataclass(frozen=True, slots=True)
class Infilling:
    """The suffix of a request, and the way in which the model's prompt combines prefix and suffix."""

    layout: InfillFormat
    tokenizer: Tokenizer

    @property
    def ends(self) -> list[int]:
        """Token ids that end an output, in addition to the request's own stop tokens."""
        return self.layout.end_ids(self.tokenizer)

    async def encode(self, state: ServerState, payload: CompletionRequest, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt, combined with the suffix. Raises the errors of the engine's ``encode_all``."""
        tokenizer = self.tokenizer
        lead = lead_of(self.tokenizer)
        *prefixes, suffix = await state.engine.prompts.encode_all([*prompts, lead + (payload.suffix or "")], False)
        suffix = cut_lead(tokenizer, lead, suffix)
        special = payload.add_special_tokens is not False
        return [self.layout.lay_out(tokenizer, prefix, suffix, special) for prefix in prefixes]


def infilling(state: ServerState, payload: CompletionRequest, given: Sequence[str | list[int]]) -> Infilling | None:
    """The :class:`Infilling` for a request; None if it has no suffix. Raises ApiError 400 if the model cannot fill in
    the middle."""
    if not payload.suffix:
        return None
    tokenizer = state.engine.prompts.tokenizer
    layout = None if tokenizer is None else infill_format_of(tokenizer)
    if tokenizer is None or layout is None:
        message = (
            "suffix cannot be used: the model has no tokens to fill in the middle, such as <|fim_middle|>; leave it"
            " out, or serve a model that was trained for it"
        )
        raise ApiError(400, message, code="unsupported_parameter", param="suffix")
    if not all(isinstance(each, str) for each in given):
        message = "suffix needs a prompt of text, because the prompt is laid out around it; got token ids"
        raise ApiError(400, message, code="invalid_value", param="prompt")
    for name in _NOT_WITH_IT:
        if getattr(payload, name) not in (None, False):
            message = f"{name} cannot be used with suffix; leave one of them out"
            raise ApiError(400, message, code="invalid_value", param=name)
    return Infilling(layout, tokenizer)
