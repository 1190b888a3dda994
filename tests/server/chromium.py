"""A headless Chromium, controlled through its DevTools protocol over two pipes. It needs the browser, but no Python
package."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Chromium", "find_chromium", "open_chromium"]

_FLAGS = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"]
_FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server"]


_PATIENCE = 60.0
"""Seconds to wait for the browser, or for contents of a page, before an error is raised."""
_SERVER_ERROR = -32000
"""The protocol's error code when a page was left, or its tab closed, while an expression was being awaited."""


class PageGone(RuntimeError):
    """Raised when the page in which an expression ran no longer exists."""


def find_chromium() -> str | None:
    """Path of the browser; None if it is not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Chromium:
    """A browser with one tab."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: dict[str, str] = {}
        self.problems: list[str] = []
        """Messages of uncaught errors, and of requests that the browser refused."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run one command of the protocol, and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (reply := self._read()).get("id") != number:
            self._note(reply)
        if "error" in reply:
            gone = method == "Runtime.evaluate" and reply["error"]["code"] == _SERVER_ERROR
            raise (PageGone if gone else RuntimeError)(f"{method}: {reply['error']}")
        result: dict[str, Any] = reply["result"]
        return result

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._from, 1 << 16)
            if not data:
                raise EOFError("the browser has ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["source"] != "network":
            self.problems.append(params["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(params["args"]))

    def resize(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression. A promise is awaited. The value must be representable in JSON."""
        given = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in given:
            raise RuntimeError(json.dumps(given["exceptionDetails"]))
        return given["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true. Raises an error after a minute."""
        look = f"(async () => {{ try {{ return !!(await ({condition})); }} catch {{ return false; }} }})()"
        end = time.monotonic() + _PATIENCE
        while True:
            with contextlib.suppress(PageGone):  # a click may load another page, which the next check sees
                if self.value(look):
                    return
                self.value("new Promise(requestAnimationFrame)")
            if time.monotonic() > end:
                shown = self.value("document.body.innerText")
                raise TimeoutError(f"{condition} does not come true; the page shows {shown!r}")

    def write(self, text: str) -> None:
        """Type into the focused element."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        fields: dict[str, Any] = {"key": key, "code": key, "modifiers": 8 if shift else 0}
        fields["windowsVirtualKeyCode"] = {"Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def open_chromium(program: str) -> Iterator[Chromium]:
    """Start the browser with a new profile. It is ended at the end of the block."""
    ours_in, its_out = os.pipe()
    its_in, ours_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [*_FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]

        def place_pipes() -> None:  # the browser reads from 3 and writes to 4
            spare_in, spare_out = os.dup(its_in), os.dup(its_out)
            os.dup2(spare_in, 3)
            os.dup2(spare_out, 4)

        process = subprocess.Popen(
            [program, *flags, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place_pipes,
            close_fds=False,
            start_new_session=True,
        )
        os.close(its_in)
        os.close(its_out)
        try:
            yield Chromium(ours_out, ours_in)
        finally:
            os.close(ours_out)  # the browser ends when its pipe closes
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            os.close(ours_in)
