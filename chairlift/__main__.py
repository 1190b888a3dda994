"""``python -m chairlift`` is the ``chairlift`` command."""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["entry_point"]


def entry_point() -> None:
    """Entry point of the installed ``chairlift`` script. Exits the process; does not return."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    # A signal that the parent process set to be ignored stays ignored.
    handled = [number for number, usually in usual.items() if signal.getsignal(number) is usually]
    # Importing main() takes a while. Until then, Python's own handlers would print a traceback on Ctrl-C; as process 1
    # of a container the process would not react to SIGTERM at all.
    for number in handled:
        signal.signal(number, lambda number, _: os._exit(128 + number))
    from chairlift.cli.main import main

    if signal.SIGINT in handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.SIGTERM in handled:  # SIGTERM runs the same cleanup as Ctrl-C
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())


if __name__ == "__main__":
    entry_point()
