"""``chairlift list``: the models on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from chairlift.cli.table import print_table, size

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "list the models on this machine"
DESCRIPTION: Final = """List the models in the cache of the Hugging Face Hub: name, size, format, and whether they load.

The last column follows the rules of chairlift check, but reads no weights: the family, its settings, the
quantisation, and the names and shapes of all tensors. The names can be given to run, serve, show and rm."""

_BUNDLED: Final = "bundled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift list``."""
    parser.add_argument("--names", action="store_true", help="print only the names")


def run(args: argparse.Namespace) -> int:
    """Print the list. Returns 0."""
    import chairlift
    from chairlift.models.hub_cache import cached_models

    models = cached_models()
    if args.names:
        print("\n".join([_BUNDLED, *(each.name for each in models)]))
        return 0
    assets = Path(chairlift.__file__).parent / "assets"
    nbytes = sum(file.stat().st_size for file in assets.iterdir() if file.is_file())
    rows = [(_BUNDLED, size(nbytes), "safetensors", "yes, the demo model in the package")]
    for each in models:
        rows.append((each.name, size(each.num_bytes), each.format, _loads(each.path, each.name, each.is_partial)))
    print_table(("NAME", "SIZE", "FORMAT", "LOADS"), rows)
    return 0


def _loads(path: Path, name: str, is_partial: bool) -> str:
    from chairlift.loading.loadable import problem_of

    problem = problem_of(path)
    if problem is None:
        return "yes"
    if is_partial:
        return f"no: its download was interrupted; chairlift pull {name} goes on"
    return f"no: {problem.replace(f'{path}: ', '').replace(f'{path}/', '').replace(str(path), 'it')}"
