"""Reflows the prose of Markdown files to 100 columns: ``python tools/reflow.py docs/*.md``.

Code blocks, tables, headings, quotes and HTML are unchanged. Code spans and short links are not broken. Words never
change: if reflowing would change a file's words, the file is not written, and the exit code is 1.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

WIDTH = 100
_ITEM = re.compile(r"^(\s*)([-*+]|\d+[.)])(\s+)")
_SPAN = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)")
_LONGEST_SPAN = 60
_STARTS_A_BLOCK = re.compile(r"^([-+*]|\d+[.)]|#+|>.*|=+|-+|\|.*|<.*|```.*|~~~.*)$")
_FENCE = re.compile(r"^(```+|~~~+)")
_JOIN = "\0"
"""Placeholder for a space at which a line must not be broken."""


def reflow(text: str) -> str:
    """The Markdown ``text`` with its paragraphs and list items wrapped at ``WIDTH`` columns."""
    out: list[str] = []
    paragraph: list[str] = []
    first = rest = fence = ""

    def flush() -> None:
        if paragraph:
            out.extend(_fill(first, rest, " ".join(paragraph)))
            paragraph.clear()

    for line in text.split("\n"):
        stripped = line.strip()
        if fence:
            out.append(line)
            fence = "" if stripped.startswith(fence) else fence
        elif opening := _FENCE.match(stripped):
            flush()
            out.append(line)
            fence = opening[1]
        elif not stripped or stripped.startswith(("|", "#", "<", ">", "---", "===")) or line.endswith("  "):
            flush()
            out.append(line)
        elif item := _ITEM.match(line):
            flush()
            first, rest = item[0], " " * len(item[0])
            paragraph.append(line[item.end() :].strip())
        elif paragraph:
            paragraph.append(stripped)
        elif line.startswith("    "):
            out.append(line)
        else:
            first = rest = line[: len(line) - len(line.lstrip())]
            paragraph.append(stripped)
    flush()
    return "\n".join(out)


def _fill(first: str, rest: str, text: str) -> list[str]:
    """Lines of at most ``WIDTH`` columns. The first line begins with ``first``, all others with ``rest``."""
    lines, line = [], first
    for word in _words(text):
        if line in (first, rest) and line.strip() in ("", first.strip()):
            line += word
        elif len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = rest + word
        else:
            line += f" {word}"
    lines.append(line)
    return [line.replace(_JOIN, " ").rstrip() for line in lines]


def _words(text: str) -> list[str]:
    """Pieces of text between which a line may be broken. A piece that would look like a list item or a heading at the
    start of a line is joined to the piece before it."""

    def whole(match: re.Match[str]) -> str:
        is_link = match[0].startswith("[")
        return match[0] if is_link and len(match[0]) > _LONGEST_SPAN else match[0].replace(" ", _JOIN)

    words: list[str] = []
    for word in _SPAN.sub(whole, text).split(" "):
        if not word:
            continue
        if words and _STARTS_A_BLOCK.match(word):
            words[-1] += _JOIN + word
        else:
            words.append(word)
    return words


def main(paths: list[str]) -> int:
    """Rewrite each file in place. Returns 1 if the words of a file would have changed."""
    for path in map(Path, paths):
        before = path.read_text(encoding="utf-8")
        after = reflow(before)
        if before.split() != after.split():
            print(f"{path}: reflowing would change its words; left as it is")
            return 1
        path.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
