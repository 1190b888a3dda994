"""Pauses, resumes and ends the generation of a server or of an AsyncLLM, for trainers that replace its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol

from chairlift.engine.output_stream import OutputStream
from chairlift.engine.process.messages import Action
from chairlift.errors import ConfigError, EngineDeadError

__all__ = ["Generation", "PausableCore", "PauseMode"]

PauseMode = Literal["keep", "abort"]
_MODES: Final = ("keep", "abort")


class PausableCore(Protocol):
    """A core that can be told to pause, to resume, and to forget KV."""

    async def control(self, action: Action) -> None: ...


class Generation:
    """Whether an engine generates. ``core`` returns the newest core; None before the first one. ``streams`` returns the
    requests that have not ended, and ``cut_off`` ends some of them with the finish reason ABORT. ``check_ready`` raises
    EngineDeadError while the engine does not run. Use it in one event loop only."""

    def __init__(
        self,
        core: Callable[[], PausableCore | None],
        check_ready: Callable[[], object],
        streams: Callable[[], Sequence[OutputStream]],
        cut_off: Callable[[Sequence[OutputStream]], None],
    ) -> None:
        self.is_paused = False
        """Whether the engine is paused. A core that replaces a dead one is paused, too."""
        self._core = core
        self._check_ready = check_ready
        self._streams = streams
        self._cut_off = cut_off

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Compute no further step until :meth:`resume`. Returns when no step is running.

        With ``keep``, requests stay, and :meth:`resume` continues them with the same tokens. With ``abort`` they end
        with what they have. New requests are accepted and wait. Timeouts go on. Raises ConfigError for another mode,
        and EngineDeadError.
        """
        if mode not in _MODES:
            raise ConfigError(f"a pause may keep or abort the requests, got {mode!r:.40}; give one of {_MODES}")
        await self._control("pause")
        self.is_paused = True
        if mode == "abort":
            self.abort()

    async def resume(self) -> None:
        """Go on after a pause. Does nothing if the engine is not paused. Raises EngineDeadError."""
        await self._control("resume")
        self.is_paused = False

    async def reset_prefix_cache(self, *, recompute: bool = False) -> None:
        """Let no later request use KV that was computed until now. Running requests keep theirs; with ``recompute``
        they compute it again. Raises ConfigError for ``recompute`` in a static batch, and EngineDeadError."""
        await self._control("recompute" if recompute else "reset")

    def abort(self, names: Sequence[str] | None = None) -> int:
        """End requests with the finish reason ABORT, and with the tokens that they have. ``names`` are the callers'
        names of requests; None ends all. Unknown names are ignored. Returns the number of requests that were ended."""
        wanted = None if names is None else set(names)
        ended = [each for each in self._streams() if wanted is None or each.name in wanted or each.request_id in wanted]
        self._cut_off(ended)
        return len(ended)

    async def restored(self, core: PausableCore) -> None:
        """Pause a core that replaces a dead one, if the dead one was paused."""
        if self.is_paused:
            await core.control("pause")

    async def _control(self, action: Action) -> None:
        self._check_ready()
        core = self._core()
        if core is None:
            raise EngineDeadError("the engine is not there")
        await core.control(action)
