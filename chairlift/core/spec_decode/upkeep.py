"""Decides when a drafter keeps what it needs for drafts: hidden states of the served model, or KV of its own. It also
decides when the engine looks for drafts in tokens, which takes a part of the time of a short step.

Keeping takes time in every step, also in steps without drafts. Where it takes more time than the drafts save, the
drafter stops. It tries again after a pause, which is so long that the tries take a small share of the time. Drafts are
always checked, so that a request whose states have a gap only has no drafts, or worse ones.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Upkeep"]

_TRIAL_STEPS: Final = 256
"""Number of steps with upkeep after which the time that it took is compared with the time that drafts saved."""
_SHARE: Final = 0.005
"""Maximum fraction of the time that tries without a gain may take."""
_CREDIT_KEPT: Final = 0.5
"""Fraction of a gain that counts in the next comparison, too, so that a few bad drafts do not end the upkeep."""


class Upkeep:
    """Compares the seconds that a drafter takes with the seconds that its drafts save.

    The drafter reports the time that it takes in each step. The speculator reports the time for drafts, and the time
    that accepted drafts saved.

    Args:
        trial_steps: Number of steps with upkeep after which both are compared.
    """

    def __init__(self, trial_steps: int = _TRIAL_STEPS) -> None:
        self._trial_steps = trial_steps
        self.is_on = True
        """Whether the drafter keeps states."""
        self._balance = 0.0
        """Seconds saved, less seconds taken, since the last comparison."""
        self._steps = 0
        """Number of steps with upkeep since the last comparison."""
        self._pause = 0
        """Number of steps until the next try. Used only while the upkeep is off."""

    def passes(self, has_new: bool, num_steps: int = 1) -> bool:
        """Called for each step of the served model, or, during a pause, once for ``num_steps`` steps. ``has_new``: a
        request has joined in the newest step. Returns whether the drafter keeps states. After a pause it starts again
        with the next new request."""
        if not self.is_on:
            self._pause -= num_steps
            self.is_on = has_new and self._pause <= 0
        return self.is_on

    def kept(self, seconds: float) -> None:
        """Note that the drafter took ``seconds`` for the upkeep in a step."""
        self._balance -= seconds
        self._steps += 1

    def drafted(self, seconds: float) -> None:
        """Note that it took ``seconds`` to make drafts or to check them."""
        self._balance -= seconds

    def saved(self, seconds: float) -> None:
        """Note that accepted drafts saved ``seconds``."""
        self._balance += seconds

    def compare(self, step_seconds: float) -> None:
        """End the upkeep if it has not paid since the last comparison. Call this only if :attr:`is_due`. A step without
        drafts takes ``step_seconds``."""
        if self._balance < 0:
            self.is_on = False
            self._pause = int(-self._balance / (_SHARE * step_seconds))
        self._balance = max(0.0, _CREDIT_KEPT * self._balance)
        self._steps = 0

    @property
    def is_due(self) -> bool:
        """Whether there were enough steps with upkeep for a comparison."""
        return self._steps >= self._trial_steps
