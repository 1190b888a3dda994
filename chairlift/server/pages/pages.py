"""The page at ``/`` (a chat) and ``/docs`` (the contents of ``/openapi.json``). Both are one HTML document that loads
no other resources.

The document has no data of its own. With API keys, ``/`` stays open. The page then asks for a key, stores it for the
browser tab and sends it with its requests. ``/docs`` needs the key like every other path; ``/#api`` shows the same
contents.

The content security policy allows the document's style and scripts by their SHA-256 hashes. Text becomes markup only
through DOMPurify, which the browser enforces (Trusted Types). So no text of a model or client can run as a script.

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
    """The HTML file ``name`` of the folder ``static``. Its style and scripts are inserted into it, so that the page
    needs only one path."""
    folder = resources.files("chairlift.server.pages").joinpath("static")
    html = folder.joinpath(name).read_text(encoding="utf-8")

    def fill(place: re.Match[str]) -> str:
        return f"<{place[1]}>\n{folder.joinpath(place[2]).read_text(encoding='utf-8')}</{place[1]}>"

    return _PLACE.sub(fill, html)


def page() -> str:
    """The chat page as one HTML document."""
    return assemble("page.html")


def content_security_policy(html: str) -> str:
    """Content security policy that allows the inline styles and scripts in ``html``, and requests to the page's own
    server."""
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
    """Response with a page, and a policy that allows only the scripts in the page."""
    return Response(html.encode(), media_type="text/html; charset=utf-8", headers=_headers(html))


async def _show(request: Request) -> Response:
    return page_response(page())


routes: list[Route] = [Route("/", _show, methods=["GET"]), Route("/docs", _show, methods=["GET"])]
