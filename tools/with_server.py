"""Runs a command against a server: ``python tools/with_server.py [SERVE FLAGS] -- curl -s '$URL/v1/models'``.

The script starts ``chairlift serve`` on a free port, waits until it is ready, and runs the command with ``URL`` and
``OPENAI_BASE_URL`` set; ``$URL`` in its arguments is replaced. Then it stops the server. The exit code is the
command's, or 1 if the server did not start or did not exit with 0.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

START_SECONDS = 120
STOP_SECONDS = 60


def main(arguments: list[str]) -> int:
    if "--" not in arguments or arguments[-1] == "--":
        print(__doc__)
        return 2
    cut = arguments.index("--")
    flags, command = arguments[:cut], arguments[cut + 1 :]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "chairlift", "serve", "--port", str(port), *flags], stdout=sys.stderr
    )
    try:
        if not ready(server, url):
            return 1
        environment = os.environ | {"URL": url, "OPENAI_BASE_URL": f"{url}/v1"}
        environment.setdefault("OPENAI_API_KEY", "none")
        code = subprocess.run([word.replace("$URL", url) for word in command], env=environment).returncode
        server.send_signal(signal.SIGTERM)
        ended = server.wait(STOP_SECONDS)
        if ended:
            print(f"with_server: the server ended with {ended}", file=sys.stderr)
        return code or int(ended != 0)
    except subprocess.TimeoutExpired:
        print(f"with_server: the server did not stop in {STOP_SECONDS} s", file=sys.stderr)
        return 1
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def ready(server: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until the server accepts requests. Returns False if it exits first or takes too long."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if server.poll() is not None:
            print(f"with_server: the server ended with {server.returncode} before it was ready", file=sys.stderr)
            return False
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)
    print(f"with_server: the server was not ready after {START_SECONDS} s", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
