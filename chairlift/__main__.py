"""``python -m chairlift`` is the ``chairlift`` command."""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["entry_point"]


def entry_point() -> None:
    """What the installed ``chairlift`` script calls; does not return."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    handled = [number for number, usually in usual.items() if signal.getsignal(number) is usually]  # not the ignored
    for number in handled:  # main()'s imports take a while; until then one is a traceback, the other nothing to PID 1
        signal.signal(number, lambda number, _: os._exit(128 + number))
    from chairlift.cli.main import main

    if signal.SIGINT in handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.SIGTERM in handled:  # ends what was started, as Ctrl-C does
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())


if __name__ == "__main__":
    entry_point()
