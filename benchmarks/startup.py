"""How long a newcomer waits: ``import chairlift``, and process start to the first token of the bundled model.

    python benchmarks/startup.py [--rounds 5] [--json FILE]

The first token is measured as a whole process that generates exactly one (``chairlift generate --max-tokens 1``), so it
includes the interpreter, the imports, loading the model and leaving again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "import chairlift": [sys.executable, "-c", "import chairlift; chairlift.LLM"],
    "first token": [sys.executable, "-m", "chairlift", "generate", "--max-tokens", "1", "What is a KV cache?"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for round_number in range(args.rounds + 1):
        for name, command in COMMANDS.items():
            begin = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            if round_number:  # the first round warms the file cache
                seconds[name].append(round(time.perf_counter() - begin, 3))
    for name, values in seconds.items():
        print(f"{name:16s} median {statistics.median(values):.2f} s, from {min(values):.2f} to {max(values):.2f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(seconds, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
