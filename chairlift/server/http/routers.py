"""Headers of routers in front of several servers, such as the Gateway API's endpoint picker and llm-d.

Such a router sends all requests with one API key, or without a key, and names the tenant in a header. Any client could
send this header, so the server reads it only in connections from addresses that the settings trust.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Final

from chairlift.server.http.auth import Caller
from chairlift.server.http.errors import ApiError

__all__ = ["FAIRNESS_HEADERS", "TrustedProxies", "charged_to"]

FAIRNESS_HEADERS: Final = (b"x-gateway-inference-fairness-id", b"x-llm-d-inference-fairness-id")
"""Headers with the id of the tenant: the header of the Gateway API's inference extension, and the header of llm-d."""
_ID: Final = re.compile(rb"[!-~]{1,128}")


class TrustedProxies:
    """Networks of trusted routers. The server reads tenant headers only from these networks. ``networks`` are checked
    addresses or networks, such as 10.0.0.0/8."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(each, strict=False) for each in networks]

    def __bool__(self) -> bool:
        return bool(self._networks)

    def fairness_id(self, client: Sequence[object] | None, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Id of the tenant in the headers of a request; empty if there is none, or if its sender is not trusted.

        ``client`` is the (address, port) of the connection's other end, None for a Unix socket. Raises ApiError 400 if
        a trusted router sent several ids, or text that is no id.
        """
        if client is None or not self._trusts(str(client[0])):
            return ""
        given = {value.strip() for name, value in headers if name in FAIRNESS_HEADERS} - {b""}
        if not given:
            return ""
        if len(given) > 1 or not _ID.fullmatch(next(iter(given))):
            shown = b", ".join(sorted(given)).decode("latin-1")
            names = " and ".join(name.decode() for name in FAIRNESS_HEADERS)
            message = f"{names} must have one id of 1 to 128 visible ASCII characters; got {shown!r:.160}"
            raise ApiError(400, message, code="invalid_value", param=FAIRNESS_HEADERS[0].decode())
        return next(iter(given)).decode()

    def _trusts(self, text: str) -> bool:
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)


def charged_to(caller: Caller, fairness_id: str) -> str:
    """Tenant to charge for a request with this ``fairness_id``: ``KEY/ID``, where ``KEY`` is the name of the router's
    API key. Without keys: the id itself.

    A name of a key has no ``/``, so an id can never be taken for the tenant of a key.
    """
    return f"{caller.tenant}/{fairness_id}" if caller.tenant else fairness_id
