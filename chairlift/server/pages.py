"""The page at ``/`` (a chat) and ``/docs`` (the contents of ``/openapi.json``): one document without other resources.

It has no data of its own. With API keys, ``/`` stays open and the page asks for a key, which it keeps for the tab and
sends with its requests. ``/docs`` needs the key like every other path, and ``/#api`` shows the same. Its style and its
scripts are allowed by their SHA-256. Text becomes markup only through DOMPurify, which the browser enforces (Trusted
Types). So no text from a model or client can run in it.

``static/vendor`` has libraries as their authors publish them, each with its licence: markdown-it 15.0.3 (the file
``dist/browser/markdown-it.umd.min.js`` of its npm package) and DOMPurify 3.4.18 (``dist/purify.min.js``).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["assemble", "content_security_policy", "page", "page_response", "routes"]

_PLACE: Final = re.compile(r"<(script|style) data-file=\"([a-z_./-]+)\"></\1>")
_BLOCK: Final = re.compile(r"<(?P<tag>script|style)>(?P<content>.*?)</(?P=tag)>", re.DOTALL)


@functools.cache
def assemble(name: str) -> str:
    """The HTML file ``name`` of ``static`` with its style and its scripts inside, so that all comes from one path."""
    folder = resources.files("chairlift.server").joinpath("static")
    html = folder.joinpath(name).read_text(encoding="utf-8")

    def fill(place: re.Match[str]) -> str:
        return f"<{place[1]}>\n{folder.joinpath(place[2]).read_text(encoding='utf-8')}</{place[1]}>"

    return _PLACE.sub(fill, html)


def page() -> str:
    """The chat page as one HTML document."""
    return assemble("page.html")


def content_security_policy(html: str) -> str:
    """Policy that allows the inline styles and scripts in ``html``, and requests to the page's own server."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for block in _BLOCK.finditer(html):
        digest = hashlib.sha256(block["content"].encode()).digest()
        hashes[block["tag"]].append(f"'sha256-{base64.b64encode(digest).decode()}'")
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]) or "'none'",
        "style-src": " ".join(hashes["style"]) or "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


@functools.cache
def _headers(html: str) -> dict[str, str]:
    return {
        "content-security-policy": content_security_policy(html),
        "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }


def page_response(html: str) -> Response:
    """A page with a policy that allows only its present scripts."""
    return Response(html.encode(), media_type="text/html; charset=utf-8", headers=_headers(html))


async def _show(request: Request) -> Response:
    return page_response(page())


routes: list[Route] = [Route("/", _show, methods=["GET"]), Route("/docs", _show, methods=["GET"])]
