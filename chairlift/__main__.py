"""``python -m chairlift`` is the ``chairlift`` command."""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["entry_point"]


def entry_point() -> None:
    """What the installed ``chairlift`` script calls; does not return."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where it is to be ignored
    if handled:  # by a traceback, as long as main() does not run, and its imports take a while
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from chairlift.cli.main import main

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # ends what was started, as Ctrl-C does
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())


if __name__ == "__main__":
    entry_point()
