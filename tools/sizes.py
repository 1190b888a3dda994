"""Print how many lines of Python each folder of the package has, and the largest files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "chairlift"


def main() -> None:
    """Write one line per folder, largest first, then the ten largest files and the total."""
    files = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(PACKAGE.rglob("*.py"))}
    folders: Counter[str] = Counter()
    for path, lines in files.items():
        parts = path.relative_to(PACKAGE).parts
        folders[parts[0] if len(parts) > 1 else "(top level)"] += lines
    for folder, lines in folders.most_common():
        print(f"{lines:7,}  {folder}")
    print("largest files:")
    for path, lines in Counter(files).most_common(10):
        print(f"{lines:7,}  {path.relative_to(PACKAGE)}")
    print(f"{sum(files.values()):7,}  lines of Python in the package")


if __name__ == "__main__":
    main()
