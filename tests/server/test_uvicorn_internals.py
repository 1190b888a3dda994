"""``http_protocol.py`` builds on parts of uvicorn that uvicorn does not promise to keep."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from chairlift.server.http.http_protocol import HttpProtocol
from tests.architecture.source import imports, modules

DIGESTS = {
    "Config.__init__": "98e927ea97a7",
    "Config.load": "92b7159dce10",
    "FlowControl": "126debcdaa89",
    "HttpToolsProtocol.__init__": "4f0899941034",
    "HttpToolsProtocol._get_upgrade": "7b1305aac7b8",
    "HttpToolsProtocol._should_upgrade": "8fcad1ab8e09",
    "HttpToolsProtocol._should_upgrade_to_ws": "d580849b4df8",
    "HttpToolsProtocol._start_asgi_task": "9c08c2571ae9",
    "HttpToolsProtocol._unset_keepalive_if_required": "00a6a4e47214",
    "HttpToolsProtocol._unsupported_upgrade_warning": "55bbd2762b18",
    "HttpToolsProtocol.connection_lost": "c91a4c9bf2e2",
    "HttpToolsProtocol.connection_made": "6efb565ff3d3",
    "HttpToolsProtocol.data_received": "010a7ae59a5d",
    "HttpToolsProtocol.eof_received": "5652627579a0",
    "HttpToolsProtocol.handle_websocket_upgrade": "179c4f769386",
    "HttpToolsProtocol.on_body": "dba9c32aeba3",
    "HttpToolsProtocol.on_header": "65d62c044f61",
    "HttpToolsProtocol.on_headers_complete": "1ea8589acfad",
    "HttpToolsProtocol.on_message_begin": "96d377fdc7c2",
    "HttpToolsProtocol.on_message_complete": "1fbad42dc31f",
    "HttpToolsProtocol.on_response_complete": "64e254f28e38",
    "HttpToolsProtocol.on_url": "37be44e962b0",
    "HttpToolsProtocol.pause_writing": "17a8fd215d96",
    "HttpToolsProtocol.resume_writing": "7844bbaa8cce",
    "HttpToolsProtocol.send_400_response": "ae5a4a3782b6",
    "HttpToolsProtocol.shutdown": "d7351fa33f00",
    "HttpToolsProtocol.timeout_keep_alive_handler": "8b53bf5f2e20",
    "RequestResponseCycle": "e67d470d435d",
    "ServerState": "f2260fbf1015",
}
"""The first digits of the SHA-256 of the source of what we override, call or read."""
OVERRIDDEN = {
    "_start_asgi_task",
    "connection_lost",
    "connection_made",
    "data_received",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "on_url",
    "timeout_keep_alive_handler",
}


def relied_on() -> dict[str, Any]:
    """All methods of uvicorn's protocol; of what it is made of the whole class."""
    methods = {name: each for name, each in vars(HttpToolsProtocol).items() if inspect.isfunction(each)}
    whole = (RequestResponseCycle, FlowControl, ServerState, uvicorn.Config.__init__, uvicorn.Config.load)
    return {f"HttpToolsProtocol.{name}": each for name, each in methods.items()} | {
        each.__qualname__: each for each in whole
    }


def test_uvicorn_is_what_the_protocol_was_written_against() -> None:
    found = {
        name: hashlib.sha256(inspect.getsource(each).encode()).hexdigest()[:12] for name, each in relied_on().items()
    }
    changed = sorted(name for name in {*found, *DIGESTS} if found.get(name) != DIGESTS.get(name))
    assert not changed, (
        f"uvicorn {uvicorn.__version__} changed {', '.join(changed)}. Compare its source with the version before, check"
        " the methods of chairlift/server/http/http_protocol.py that override or call it, run"
        f" tests/server/test_limits.py, test_app.py and test_streaming.py, then write the new"
        f" digests here and the new bound of uvicorn in pyproject.toml: {found}"
    )


def test_overridden_methods_exist_with_the_same_signature() -> None:
    own = {name for name, each in vars(HttpProtocol).items() if inspect.isfunction(each)}
    overridden = own & set(vars(HttpToolsProtocol)) - {"__init__"}
    for name in overridden:
        ours, theirs = (
            list(inspect.signature(getattr(of, name)).parameters) for of in (HttpProtocol, HttpToolsProtocol)
        )
        assert ours == theirs, f"{name} takes {theirs} in uvicorn, and {ours} here"
    assert overridden == OVERRIDDEN, "uvicorn no longer calls these, or the list here is old"


def test_one_file_knows_uvicorn() -> None:
    known = {module for module in modules() for _, name in imports(module) if name.split(".")[0] == "uvicorn"}
    assert known == {"chairlift.server.http.http_protocol"}
