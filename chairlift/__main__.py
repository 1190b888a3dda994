"""``python -m chairlift`` is the ``chairlift`` command."""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["entry_point"]


def entry_point() -> None:
    """Entry point of the installed ``chairlift`` script. It does not return."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    # ignored signals stay ignored
    handled = [number for number, usually in usual.items() if signal.getsignal(number) is usually]
    # main()'s imports take a while; the default handlers would print a traceback, or do nothing in a PID 1
    for number in handled:
        signal.signal(number, lambda number, _: os._exit(128 + number))
    from chairlift.cli.main import main

    if signal.SIGINT in handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.SIGTERM in handled:  # SIGTERM ends the command as Ctrl-C does
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())


if __name__ == "__main__":
    entry_point()
