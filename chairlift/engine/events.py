"""The one stream of what happens in an engine: whoever wants to know subscribes to it.

The core tells of requests that were ``added`` and have ``ended``, and of steps that were ``scheduled`` and have
``landed``. In the server's process the engine tells of requests that ``began`` and have ``ended``, and in ``steps`` it
hands on the lines that the recorder of the core made of them. An event that nobody subscribed to costs one call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["Events"]

_log = logging.getLogger(__name__)


class Events:
    """Subscribers by name. A subscriber has a method for each event that it wants, named as the event; it is called
    where the engine's own work is done, so it must be quick.

    What a subscriber raises is logged and changes nothing for the engine; its method ``missed``, if it has one, is
    called then. ``changed`` is called when somebody has come or gone.
    """

    def __init__(self, *events: str, changed: Callable[[], object] = lambda: None) -> None:
        self.subscribers: dict[str, Any] = {}
        self._calls: dict[str, tuple[tuple[str, Callable[..., object]], ...]] = dict.fromkeys(events, ())
        self._changed = changed

    def subscribe(self, name: str, subscriber: Any) -> None:
        """Tell ``subscriber`` from now on, after those that are there already."""
        self.subscribers[name] = subscriber
        self._renew()

    def unsubscribe(self, name: str) -> None:
        """Tell it no more. Unknown names are ignored."""
        if self.subscribers.pop(name, None) is not None:
            self._renew()

    def wants(self, event: str) -> bool:
        """Whether anybody has subscribed to the event."""
        return bool(self._calls[event])

    def tell(self, event: str, *facts: Any) -> None:
        """Something has happened."""
        for name, call in self._calls[event]:
            try:
                call(*facts)
            except Exception:
                _log.exception("%s missed something (%s)", name, event)
                missed = getattr(self.subscribers.get(name), "missed", None)
                if missed is not None:
                    missed()

    def _renew(self) -> None:
        for event in self._calls:
            told = ((name, getattr(each, event, None)) for name, each in self.subscribers.items())
            self._calls[event] = tuple((name, call) for name, call in told if call is not None)
        self._changed()
