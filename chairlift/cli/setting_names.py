"""Names of settings in error messages, as the user has written them. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["with_names"]

_NAME: Final = re.compile(r"(?<![\w'\"`{./-])[a-z]+(?:_[a-z0-9]+)+(?![\w'\"`=./]| in [./~])|^[a-z]+(?= must )")


def with_names(message: str, names: Mapping[str, str]) -> str:
    """The message with the names of settings replaced: ``names`` maps setting -> flag or environment variable.

    Names in quotes and names of a config file (``max_num_seqs in FILE``) stay. A name of one word, which could be a
    word of a sentence, is a setting only at the beginning, before ``must``.
    """
    return _NAME.sub(lambda found: names.get(found[0], found[0]), message)
