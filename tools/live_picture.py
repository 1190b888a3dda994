"""Takes the README's picture: continuous batching above static batching, as the page ``/live`` draws them.

::

    python tools/live_picture.py docs/live.png

The script serves the simulated example of ``chairlift trace view --demo``, opens its comparison in a headless Chromium,
and saves the part of the page with the two timelines. It needs ``chromium`` on the PATH.
"""

from __future__ import annotations

import argparse
import base64
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.server.chromium import find_chromium, open_chromium

WIDTH, HEIGHT = 960, 620
"""Size of the window in pixels. The height of a row depends on the window's height."""

_CORNER = "(({%s: x, %s: y}) => [x + scrollX, y + scrollY])(document.querySelector('#%s').getBoundingClientRect())"


@contextmanager
def example() -> Iterator[str]:
    """Serve the example. Gives the address of the page."""
    server = subprocess.Popen([sys.executable, "-m", "chairlift", "trace", "view", "--demo"], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().decode().split()[0]
    finally:
        server.terminate()
        server.wait()


def take(program: str, address: str) -> bytes:
    """The picture as PNG. ``program`` is the browser. Raises RuntimeError if the page reports an error."""
    with open_chromium(program) as browser:
        browser.resize(WIDTH, HEIGHT)
        browser.call("Emulation.setScrollbarsHidden", hidden=True)
        browser.open(f"{address}?demo&compare=orca,static")
        browser.wait_for("document.querySelector('#verdict').checkVisibility()")
        browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        if browser.problems:
            raise RuntimeError(browser.problems[0])
        left, top = browser.value(_CORNER % ("left", "top", "title"))
        right, bottom = browser.value(_CORNER % ("right", "bottom", "timeline2"))
        clip = {"x": left - 8, "y": top - 8, "width": right - left + 16, "height": bottom - top + 16, "scale": 1}
        shot = browser.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="the PNG file to write")
    args = parser.parse_args()
    program = find_chromium()
    if program is None:
        raise SystemExit("there is no chromium on the PATH; install it (apt install chromium)")
    with example() as address:
        args.output.write_bytes(take(program, address))
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
