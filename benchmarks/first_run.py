"""Time from a wheel to the first streamed token: ``python benchmarks/first_run.py [--json FILE]``.

The script builds a wheel of this tree, installs it into a fresh environment, starts ``chairlift serve`` without a model
and streams one chat. It prints the seconds of each part. Run it twice, because pip's cache must be warm.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def first_token(port: int, since: float) -> float:
    """Seconds from ``since`` until the first text of a streamed chat."""
    body = {"model": "bundled", "stream": True, "messages": [{"role": "user", "content": "What is a KV cache?"}]}
    while time.monotonic() - since < 120:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status == 200:
                while line := reply.readline():
                    if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                        return time.monotonic() - since
        except OSError:
            pass
        time.sleep(0.02)
    raise SystemExit("the server has not streamed anything within two minutes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip = [sys.executable, "-m", "pip", "--quiet"]
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
        (wheel,) = folder.glob("*.whl")
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        begin = time.monotonic()
        install = [str(folder / "venv/bin/pip"), "install", "--quiet", str(wheel)]
        subprocess.run(install, check=True, env=environment)
        installed = time.monotonic() - begin
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        started = []
        for _ in range(2):  # the first start writes Python's bytecode files
            begin = time.monotonic()
            command = [str(folder / "venv/bin/chairlift"), "serve", "--port", str(port)]
            server = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder, env=environment)
            started.append(first_token(port, begin))
            server.terminate()
            server.wait(60)
    seconds = {"install": installed, "first_start_to_first_token": started[0], "second_start": started[1]}
    for what, value in seconds.items():
        print(f"{what:28} {value:6.1f} s")
    if args.json is not None:
        args.json.write_text(json.dumps({"processors": os.cpu_count(), "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
