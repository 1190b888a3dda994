"""A view with stated values, and the order in which a scheduler starts requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chairlift.core.request import Request
from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift.core.scheduler.policy import Policy
from chairlift.core.scheduler.view import View
from tests.core.scheduler.driver import Driver

__all__ = ["SHARES", "KnownView", "LinearModel", "starts"]

SHARES = [1.0, 0.75]
"""Values of ``policy_share``: all in the policy's order, and the default."""


class LinearModel(CostModel):
    """Step time ``base + rows + positions * position + tokens * token``, in the unit of the caller."""

    def __init__(self, base: float, position: float, token: float) -> None:
        super().__init__()
        self._base, self._position, self._token = base, position, token

    def step_seconds(self, step: StepFeatures) -> float:
        tokens = step.prefill_tokens * self._token
        return self._base + step.num_decodes + step.context_tokens * self._position + tokens


class KnownView(View):
    """A view in which some values are stated, by request id."""

    def __init__(self, **known: Any) -> None:
        super().__init__()
        self._known = known

    def _of(self, name: str, request: Request, otherwise: Any) -> Any:
        return self._known.get(name, {}).get(request.request_id, otherwise)

    @property
    def block_size(self) -> int:
        return self._known.get("block_size", super().block_size)

    @property
    def capacity_tokens(self) -> int:
        return self._known.get("capacity", super().capacity_tokens)

    def cached_tokens(self, request: Request) -> int:
        return self._of("cached", request, 0)

    def cached_path(self, request: Request) -> list[int]:
        return self._of("paths", request, [])

    def prefill_seconds(self, request: Request) -> float:
        return self._of("prefill", request, 0.0)

    def service_seconds(self, request: Request, answer_tokens: int | None = None) -> float:
        return self._of("service", request, 0.0) if answer_tokens is None else float(answer_tokens)

    def recent_answers(self, request: Request) -> list[int]:
        return self._known.get("recent", [])


def starts(policy: Policy, requests: Iterable[Request], share: float, **settings: Any) -> list[str]:
    """Ids of the requests in the order in which they start, one at a time. All wait from the beginning."""
    defaults: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 4096, "max_model_len": 4096}
    drive = Driver(policy=policy, policy_share=share, num_blocks=1200, **{**defaults, **settings})
    drive.add(*requests)
    return started(drive.run(2000))


def started(outs: Sequence[Any]) -> list[str]:
    """Ids of the requests in the order in which they got a row."""
    return [row.request_id for out in outs for row in out.joined]
