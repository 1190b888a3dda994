"""``python -m chairlift`` is the ``chairlift`` command."""

from __future__ import annotations

from chairlift.cli.main import entry_point

__all__: list[str] = []

if __name__ == "__main__":
    entry_point()
