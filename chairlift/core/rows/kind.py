"""The methods of a kind of request. The loop calls them, and knows nothing else of a kind.

The caller of :class:`~chairlift.core.scheduler.scheduler.Scheduler` makes the kinds and passes them as a list. A
request has a tuple of its kinds (:attr:`Request.kinds`), which is empty for plain text. So a plain request costs
nothing more, however many kinds there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chairlift.core.request import Request
    from chairlift.core.scheduler.batch import Batch

__all__ = ["RowKind", "whole_after", "whole_before"]


class RowKind:
    """One kind of request. Methods that a kind does not override have no effect.

    A method with a request is called only for requests of the kind. Steps are scheduled one after another, so a kind
    may keep what concerns the step that is being scheduled, from :meth:`begin` on.
    """

    name = ""
    """Name of the kind, as :attr:`SchedulerOutput.held_up_by` shows it."""
    num_looked_past = 0
    """Number of additional waiting requests that a step looks at, because it may skip requests of this kind."""

    def has(self, request: Request) -> bool:
        """Whether the request is of this kind. Called once, when the request is added to the scheduler."""
        raise NotImplementedError

    def attach(self, batch: Batch) -> None:
        """Called once, before all other methods. ``batch`` is the batch in which the kind's requests run."""

    def twin(self) -> RowKind | None:
        """This kind for a simulated batch (:meth:`Scheduler.twin`), in the present state but without requests. None:
        the simulation takes its requests for plain text."""
        return None

    # -- readiness ---------------------------------------------------------------------------------------------------

    def added(self, request: Request) -> None:
        """Note that a request was added. If something must be prepared for it, the kind sets ``is_ready`` to False and
        ``waits_for`` to the kind's name, and :meth:`Scheduler.ready` is called later."""

    def obstacle(self, request: Request) -> bool:
        """Whether a waiting request may not join the next step, whatever rows and blocks are free."""
        return False

    def begin_pass(self) -> None:
        """Called before waiting requests are tried, perhaps several times per step. The calls of :meth:`skipped` up to
        now do not count any more."""

    def skips(self, request: Request) -> bool:
        """Whether to skip a waiting request and try the next ones, as if the request did not wait."""
        return False

    def skipped(self, request: Request) -> None:
        """Note that a waiting request may be passed by later requests."""

    def passed(self, request: Request) -> None:
        """Note that a request was admitted, before all requests that were skipped since :meth:`begin_pass`."""

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin(self, num_decodes: int) -> None:
        """Called in each step after the decode rows are known. ``num_decodes`` is their number."""

    def room(self, request: Request, num_tokens: int) -> int:
        """Number of the request's next tokens, at most ``num_tokens``, that the step may compute. It may be more if the
        kind lets requests join only steps that have room for it."""
        return num_tokens

    def spent(self, request: Request, num_tokens: int) -> None:
        """Note that the step computes the request's next ``num_tokens`` tokens. The number is negative if a chunk that
        began with the same token is taken back."""

    def whole(self, request: Request, index: int) -> tuple[int, int] | None:
        """(first position, end) of the positions that one step must compute together, if they contain ``index`` and
        begin before it; otherwise None."""
        return None

    def may_resume(self, request: Request, position: int) -> bool:
        """Whether the request can be computed again from ``position`` on."""
        return True

    def joined(self, request: Request) -> None:
        """Note that a request got a row."""

    def num_bytes(self, chunks: Iterable[Request], decodes: list[Request]) -> int:
        """Number of bytes that a step with these rows reads because of this kind. Both arguments have requests of any
        kind. The list ``decodes`` is never changed in place."""
        return 0

    # -- keys of the prefix cache ------------------------------------------------------------------------------------

    def key(self, request: Request) -> bytes:
        """What the KV of all positions depends on, besides the tokens. Empty: nothing."""
        return b""

    def marks(self, request: Request, start: int, end: int) -> bytes:
        """What the KV of positions ``start`` to ``end`` (excluded) depends on, besides the tokens and :meth:`key`.
        Empty: nothing."""
        return b""

    def outlives(self, request: Request) -> bool:
        """Whether :meth:`key` and :meth:`marks` mean the same in another process, so that blocks may be kept for it."""
        return not self.key(request)

    # -- release -----------------------------------------------------------------------------------------------------

    def left(self, request: Request) -> None:
        """Note that a request lost its row. It may join again."""

    def ended(self, request: Request) -> None:
        """Release what the kind holds for a request that has left the scheduler for good."""

    def check_invariants(self) -> None:
        """Raise InvariantError if the kind's counters contradict the batch."""


def whole_before(request: Request, index: int) -> int:
    """The last position, at most ``index``, before which a step of the request may end."""
    while spans := [span for kind in request.kinds if (span := kind.whole(request, index)) is not None]:
        index = min(start for start, _ in spans)
    return index


def whole_after(request: Request, index: int) -> int:
    """The first position, at least ``index``, before which a step of the request may end."""
    while spans := [span for kind in request.kinds if (span := kind.whole(request, index)) is not None]:
        index = max(end for _, end in spans)
    return index
